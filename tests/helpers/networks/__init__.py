"""Tiny networks, each with its own way of leading a Jacobian astray."""

from networks import convolutions, dense, numerics, parameters, sequences
from networks.case import NETWORKS, NetworkCase

__all__ = ["NETWORKS", "NetworkCase", "convolutions", "dense", "numerics", "parameters", "sequences"]
