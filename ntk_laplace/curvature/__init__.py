"""Curvature: the posterior's algebra, in function space and in weight space, behind the same verbs."""

from ntk_laplace.curvature.changed import ChangedWeightSpace
from ntk_laplace.curvature.forms import EKFAC, FORMS, INF, KFAC, Diagonal, Form
from ntk_laplace.curvature.frames import Frame, Side
from ntk_laplace.curvature.full import FullWeightSpace, accumulate_ggn
from ntk_laplace.curvature.function_space import FunctionSpace, prior_variances
from ntk_laplace.curvature.inf import LowRank
from ntk_laplace.curvature.parts import Part, find_parts, plain_part
from ntk_laplace.curvature.roots import CURVATURES, Root
from ntk_laplace.curvature.structured import StructuredWeightSpace, group_numbers
from ntk_laplace.curvature.summary import Products, Summary

__all__ = [
    "CURVATURES",
    "EKFAC",
    "FORMS",
    "INF",
    "KFAC",
    "ChangedWeightSpace",
    "Diagonal",
    "Form",
    "Frame",
    "FullWeightSpace",
    "FunctionSpace",
    "LowRank",
    "Part",
    "Products",
    "Root",
    "Side",
    "StructuredWeightSpace",
    "Summary",
    "accumulate_ggn",
    "find_parts",
    "group_numbers",
    "plain_part",
    "prior_variances",
]
