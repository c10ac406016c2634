"""The choice of the parameters to linearize."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ntk_laplace.errors import NetworkError

ParameterChoice = None | str | Iterable[str] | Callable[[str, nn.Parameter], bool]


def _last_layer(module: nn.Module, named: Mapping[str, nn.Parameter]) -> set[str]:
    """Names of the parameters of the module that is registered last, its parametrizations' included.

    No other module may use them (NetworkError).
    """
    modules = dict(module.named_modules(remove_duplicate=False))  # one may have several names
    every = [(name, p) for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    layer = modules[owner(every[-1][0])] if every else module
    own, others = ([pair for pair in every if (modules[owner(pair[0])] is layer) == here] for here in (True, False))
    for name, parameter in own:
        twin = next((other for other, p in others if p is parameter), None)
        if twin is not None:
            raise NetworkError('a last layer with parameters of its own, for parameters="last_layer"',
                               f"{name!r}, which is {twin!r} too",
                               f"Untie it, network.{name} = torch.nn.Parameter(network.{name}.detach().clone()), or "
                               "name the parameters.")
    return {name for name, parameter in named.items() if any(parameter is p for _, p in own)}


def owner(name: str) -> str:
    """Name of the module that a parameter belongs to; one that a parametrization makes belongs to the parametrized."""
    before, made, _ = f".{name}".partition(".parametrizations.")
    return (before if made else before.rpartition(".")[0]).removeprefix(".")


def choose(module: nn.Module, choice: ParameterChoice) -> set[str]:
    """Names of the parameters to linearize: all that require gradients, "last_layer", names, prefixes, or a predicate.

    "last_layer" is the module that is registered last, of those that have such parameters themselves. A parameter that
    is tied has several names; any of them chooses it.

    Raises
    ------
    NetworkError
        If no parameter is chosen, or a chosen one cannot be linearized.
    """
    named = dict(module.named_parameters())
    free = [name for name, parameter in named.items() if parameter.requires_grad]
    if choice is None:
        chosen = set(free)
    elif callable(choice) and not isinstance(choice, nn.Module):
        chosen = {name for name in free if choice(name, named[name])}
    elif isinstance(choice, str) and choice == "last_layer":
        chosen = _last_layer(module, named)
    else:
        wanted: list[Any] = [choice] if isinstance(choice, str) or not isinstance(choice, Iterable) else list(choice)
        if not all(isinstance(want, str) for want in wanted):
            raise NetworkError('names of parameters or modules, a function of name and parameter, or "last_layer"',
                               repr(choice)[:80], 'Pass for instance the name of a module, "head", or leave '
                               "parameters= out for all that require gradients.")
        chosen = set()
        every = dict(module.named_parameters(remove_duplicate=False))  # a tied one by all of its names
        first = {parameter: name for name, parameter in named.items()}
        for want in wanted:
            hits = {first[p] for name, p in every.items() if name == want or name.startswith(want + ".")}
            if not hits:
                raise NetworkError(f"parameter names among {', '.join(list(named)[:6])}, ...", f"{want!r}",
                                   "Use names or module prefixes of network.named_parameters().")
            if want in every and not every[want].requires_grad:
                raise NetworkError("parameters that require a gradient", f"{want!r}, which is frozen",
                                   "Call requires_grad_(True) on it, or leave it out of parameters=.")
            chosen |= hits & set(free)
    if not chosen:
        raise NetworkError("at least one parameter that requires a gradient",
                           f"none of {len(named)} parameters chosen and requiring one",
                           "Set requires_grad=True on the parameters to linearize, or widen parameters=.")
    if not any(named[name].numel() for name in chosen):
        raise NetworkError("at least one parameter with entries", f"{', '.join(sorted(chosen)[:3])}, which are empty",
                           "Give the layers inputs and outputs, or widen parameters=.")
    for name in sorted(chosen):
        if named[name].is_complex():
            raise NetworkError("real parameters", f"{name!r} of {named[name].dtype}",
                               "Store its real and imaginary parts in real parameters and join them by torch.complex "
                               "in forward(), or leave it out with parameters=.")
    dtypes = {named[name].dtype for name in chosen}
    devices = {named[name].device for name in chosen}
    if len(dtypes) > 1 or len(devices) > 1:
        raise NetworkError("parameters of one dtype on one device", f"{dtypes} on {devices}",
                           "Move the network with network.to(device, dtype).")
    return chosen
