"""The explorer: explanations of many predictions on one interactive page."""

from ntk_laplace.tools.explorer.display import in_digits, spread_of
from ntk_laplace.tools.explorer.naming import MOST_FEATURES, Naming
from ntk_laplace.tools.explorer.page import ExplorerPage, explore

__all__ = ["MOST_FEATURES", "ExplorerPage", "Naming", "explore", "in_digits", "spread_of"]
