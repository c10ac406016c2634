"""The explorer: explanations of many predictions on one interactive page."""

from ntk_laplace.tools.explorer.display import in_digits, spread_of
from ntk_laplace.tools.explorer.naming import MOST_FEATURES, Naming
from ntk_laplace.tools.explorer.page import ExplorerPage, explore
from ntk_laplace.tools.explorer.units import content_in_units

__all__ = ["MOST_FEATURES", "ExplorerPage", "Naming", "content_in_units", "explore", "in_digits", "spread_of"]
