"""A trained network as a BoTorch model; needs the extra ``botorch``."""

from ntk_laplace.errors import MissingPackageError

try:
    from ntk_laplace.tools.botorch.model import LaplaceModel
except ModuleNotFoundError as cause:
    if cause.name != "botorch":
        raise
    remedy = 'Run pip install "ntk_laplace[botorch]", with Python 3.11 or newer.'
    raise MissingPackageError("the package botorch", "none installed", remedy) from cause

__all__ = ["LaplaceModel"]
