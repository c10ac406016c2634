"""The explorer: explanations of many predictions on one interactive page."""

from ntk_laplace.tools.explorer.gather import Naming
from ntk_laplace.tools.explorer.page import ExplorerPage, explore

__all__ = ["ExplorerPage", "Naming", "explore"]
