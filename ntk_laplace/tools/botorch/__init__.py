"""A trained network as a BoTorch model; needs the extra ``botorch``."""

from typing import TYPE_CHECKING, Any

from ntk_laplace.errors import optional_package

if TYPE_CHECKING:
    from ntk_laplace.tools.botorch.ensemble import LaplaceEnsemble
    from ntk_laplace.tools.botorch.model import LaplaceModel

__all__ = ["LaplaceEnsemble", "LaplaceModel"]


def __getattr__(name: str) -> Any:
    """Import BoTorch on first use: it may be missing, and takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with optional_package("botorch", 'Run pip install "ntk_laplace[botorch]", with Python 3.11 or newer.'):
        from ntk_laplace.tools.botorch import pathwise as _pathwise  # noqa: F401, registers paths with BoTorch
        from ntk_laplace.tools.botorch.ensemble import LaplaceEnsemble
        from ntk_laplace.tools.botorch.model import LaplaceModel
    return {"LaplaceEnsemble": LaplaceEnsemble, "LaplaceModel": LaplaceModel}[name]
