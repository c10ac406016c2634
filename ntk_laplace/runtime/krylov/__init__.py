"""Linear algebra from products alone: solves, log determinants and low-rank factors of a matrix that is never formed.

All functions take an operator, a callable that multiplies a symmetric matrix with m vectors, the rows of an (m, d)
tensor. One call multiplies them all, because a product with a network's curvature is a pass over the data.
"""

from ntk_laplace.runtime.krylov.conjugate_gradients import conjugate_gradients, nearly_solved
from ntk_laplace.runtime.krylov.deflation import Deflated, WrittenOut, downward
from ntk_laplace.runtime.krylov.lanczos import Quadrature, lanczos
from ntk_laplace.runtime.krylov.low_rank import inner, low_rank
from ntk_laplace.runtime.krylov.newton import Minima, minimize
from ntk_laplace.runtime.krylov.quasi_newton import remembered

__all__ = [
    "Deflated",
    "Minima",
    "Quadrature",
    "WrittenOut",
    "conjugate_gradients",
    "downward",
    "inner",
    "lanczos",
    "low_rank",
    "minimize",
    "nearly_solved",
    "remembered",
]
