"""Contractions: exact methods that add the products of two clusters of blocks to a tile of K, each with its cost.

A cluster is a set of blocks that share a parameter, whose rows are summed before products are formed. `contractions`
pairs the clusters of two Jacobians and chooses the cheapest method for each pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Cluster, Dense, Outer, clusters, written_out
from ntk_laplace.jacobian.contractions.base import Contraction
from ntk_laplace.jacobian.contractions.factored import Hadamard, Positions, same_factors
from ntk_laplace.jacobian.contractions.rows import Panels, Rows, Written
from ntk_laplace.jacobian.contractions.tile import Tile, Variance, Variances, read_once, tile_rows

__all__ = [
    "METHODS",
    "Contraction",
    "Hadamard",
    "Panels",
    "Positions",
    "Rows",
    "Tile",
    "Variance",
    "Variances",
    "Written",
    "contractions",
    "read_once",
    "tile_rows",
]

METHODS: tuple[type[Contraction[Any]], ...] = (Rows, Hadamard, Positions, Panels, Written)
"""All methods; of two that cost the same, the first is taken."""


def contractions(left: Cluster, right: Cluster, variances: Variances) -> list[Contraction]:
    """The cheapest contraction of each pair of clusters, in the order in which they initialize a tile.

    Clusters are paired by their parameters; those without a prior variance are left out.
    """
    variances = read_once(variances)
    ours, theirs = clusters(left), clusters(right)
    if [_names(cluster) for cluster in ours] != [_names(cluster) for cluster in theirs]:
        # sequence lengths or branches of the network differ: only parameters that both sides use contribute
        one, two = written_out(left), written_out(right)
        names = sorted(one.keys() & two.keys())
        ours, theirs = [(Dense.of(n, one[n]),) for n in names], [(Dense.of(n, two[n]),) for n in names]
    found = [
        min((method(*pair) for method in METHODS if method.applies(*pair)), key=lambda each: each.cost)
        for pair in (_by_input(one, two, variances) for one, two in zip(ours, theirs, strict=True)
                     if any(name in variances for name in _names(one)))
    ]
    return sorted(found, key=lambda each: each.stage)


def _by_input(left: Cluster, right: Cluster, variances: Variances) -> tuple[Cluster, Cluster, Variances]:
    """The same products with one prior variance of a layer's weight, if it has one for each input.

    Their roots are multiplied into the inputs, so that rows need not be written out.
    """
    (one, *_), (two, *_) = left, right
    if not (isinstance(one, Outer) and isinstance(two, Outer) and same_factors(left, right)):
        return left, right, variances
    variance = variances.get(one.weight)
    if not isinstance(variance, Tensor):
        return left, right, variances
    entries = one.shaped(variance.flatten())  # (G, o, i)
    if not torch.equal(entries, entries[:, :1].expand_as(entries)):
        return left, right, variances
    scale = entries[:, :1].sqrt()

    def scaled(block: Outer) -> Cluster:
        return (replace(block, a=block.a * scale.to(block.a)),)

    ours = scaled(one)
    return ours, ours if two is one else scaled(two), {**variances, one.weight: 1.0}


def _names(cluster: Cluster) -> tuple[str, ...]:
    return tuple(sorted(name for block in cluster for name in set(block.names)))
