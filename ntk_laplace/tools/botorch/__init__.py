"""A trained network as a BoTorch model; needs the extra ``botorch``."""

from ntk_laplace.errors import optional_package

with optional_package("botorch", 'Run pip install "ntk_laplace[botorch]", with Python 3.11 or newer.'):
    from ntk_laplace.tools.botorch import pathwise as _pathwise  # noqa: F401, registers paths with BoTorch
    from ntk_laplace.tools.botorch.ensemble import LaplaceEnsemble
    from ntk_laplace.tools.botorch.model import LaplaceModel

__all__ = ["LaplaceEnsemble", "LaplaceModel"]
