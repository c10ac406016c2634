"""The demo: three real problems and two toy ones, from data to a report, with the library used as anyone would."""

from ntk_laplace.demo.run import run_demo

__all__ = ["run_demo"]
