"""How a module is called: on one input, or on its parts."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from ntk_laplace.data import Inputs
from ntk_laplace.network.precision import Autocast

__all__ = ["Caller"]


class Caller(nn.Module):
    """Calls a module on one input, or on the parts of a tuple or dict where its `forward` takes them apart.

    Always under the state of `torch.autocast` that it was made in: the fit's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.autocast = Autocast.present()
        self._signature = _signature(module)

    def forward(self, x: Inputs) -> Tensor:
        """Outputs as the module gives them."""
        with self.autocast.entered():
            return self._called(x)

    def _called(self, x: Inputs) -> Tensor:
        if isinstance(x, dict) and _binds(self._signature, (), x):
            return self.module(**x)
        if isinstance(x, (tuple, list)) and _binds(self._signature, tuple(x), {}):
            return self.module(*x)
        return self.module(x)


def _signature(module: nn.Module) -> inspect.Signature | None:
    while isinstance(getattr(module, "_orig_mod", None), nn.Module):  # torch.compile's wrapper takes anything
        module = module._orig_mod
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _binds(signature: inspect.Signature | None, args: tuple, kwargs: dict) -> bool:
    """Whether `forward` names these arguments; a bare ``*args`` or ``**kwargs`` names nothing."""
    if signature is None or not all(isinstance(key, str) for key in kwargs):
        return False
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return False
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    return not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
