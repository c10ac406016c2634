"""The network of an estimator: a multilayer perceptron, what a callable makes, or a copy of the caller's module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntk_laplace.errors import (
    DataError,
    HyperparameterError,
    NetworkError,
    NTKLaplaceError,
    UnsupportedError,
    first_line,
    is_whole,
    require_choice,
)
from ntk_laplace.model.objective import in_mode
from ntk_laplace.runtime.resources import require_memory

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "identity": nn.Identity,
}


class _Log(nn.Module):
    """log p of class probabilities p, whose softmax is p again."""

    def forward(self, probabilities: Tensor) -> Tensor:
        return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


class _Logit(nn.Module):
    """log p/(1 - p) of the probability p of the second of two classes."""

    def forward(self, probability: Tensor) -> Tensor:
        return probability.logit(torch.finfo(probability.dtype).eps)


class _TwoLogits(nn.Module):
    """(0, f) of the one logit f of the second of two classes, whose softmax is (1 - p, p)."""

    def forward(self, f: Tensor) -> Tensor:
        return nn.functional.pad(f.reshape(-1, 1), (1, 0))


class Shifted(nn.Module):
    """Outputs with constants added, (C,)."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)

    def forward(self, f: Tensor) -> Tensor:
        """f + shift."""
        return f + self.get_buffer("shift")


class Exposed(nn.Module):
    """A network of all inputs but the last, which is added to each output: the logarithm of an exposure."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Any:
        """The network's outputs and the exposure's logarithm; what is no tensor as it is, to be refused by its name."""
        f = self.network(x[:, :-1])
        if not isinstance(f, Tensor):
            return f
        return f + x[:, -1].reshape(-1, *[1] * (f.ndim - 1))


class SkipPerceptron(nn.Module):
    """A perceptron and a linear function, added: the first layer has a unit more for each output, which skips the rest.

    So the weights of an input share their prior precision, whichever of the two they belong to.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, rest: nn.Module) -> None:
        super().__init__()
        self.outputs = outputs
        self.first = nn.Linear(inputs, outputs + hidden)
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        """The linear units and the rest of the others, (n, outputs)."""
        linear, hidden = self.first(x).split([self.outputs, self.first.out_features - self.outputs], -1)
        found: Tensor = linear + self.rest(hidden)
        return found


def network_of(
    network: object, inputs: int, outputs: int, hidden_layer_sizes: Sequence[int], activation: str, linear: bool = False
) -> nn.Module:
    """A new network for data of this many features and outputs: "mlp" in double precision, or a copy of the caller's.

    A perceptron may have a linear part.

    UnsupportedError or HyperparameterError if it is no "mlp", callable, module or skorch net, or makes no module;
    NetworkError if the callable raises an error.
    """
    if isinstance(network, str) and network == "mlp":
        return _mlp(inputs, outputs, hidden_layer_sizes, activation, linear)
    if isinstance(network, nn.Module):
        return copy.deepcopy(network)
    if hasattr(network, "get_params_for"):
        return _of_skorch(network)
    if not callable(network):
        raise UnsupportedError('network="mlp", a callable (features, outputs) -> Module, an nn.Module or a skorch net',
                               repr(network)[:80], 'Pass one of them, or leave it out for "mlp".')
    _require_two_arguments(network)
    try:
        made = network(inputs, outputs)
    except NTKLaplaceError:
        raise
    except Exception as cause:  # of the caller's, which may raise anything
        raise NetworkError(f"an nn.Module from network({inputs}, {outputs})",
                           f"{type(cause).__name__}: {first_line(cause)}",
                           "Take any numbers of features and outputs.") from cause
    if not isinstance(made, nn.Module):
        raise UnsupportedError("an nn.Module from network(features, outputs)", f"a {type(made).__name__}",
                               "Return the module.")
    return made


def _require_two_arguments(network: Callable[..., object]) -> None:
    """Refuse a callable that cannot be called with the numbers of features and outputs."""
    try:
        signature = inspect.signature(network)
    except (TypeError, ValueError):  # of a builtin: unknown
        return
    try:
        signature.bind(1, 1)
    except TypeError as error:
        name = getattr(network, "__name__", type(network).__name__)
        raise UnsupportedError("network(features, outputs), two numbers, that returns an nn.Module",
                               f"{name}{signature}", "Take both; outputs is 1 for one target.") from error


def is_module(network: object) -> bool:
    """Whether the caller gives a network whose inputs are what they are, and not a way to make one."""
    return isinstance(network, nn.Module) or hasattr(network, "get_params_for")


def layer_sizes(hidden: object) -> tuple[int, ...]:
    """Units of each hidden layer; a number is one layer (HyperparameterError if they are no positive whole ones)."""
    sizes = tuple(hidden) if isinstance(hidden, (Sequence, np.ndarray)) else (hidden,)
    if not all(is_whole(size, 1) for size in sizes):
        raise HyperparameterError("hidden_layer_sizes of positive whole numbers", repr(hidden), "Pass (32,), say.")
    return tuple(map(int, sizes))


def _mlp(inputs: int, outputs: int, hidden: int | Sequence[int], activation: str, linear: bool) -> nn.Module:
    sizes = layer_sizes(hidden)
    require_choice(activation, ACTIVATIONS, f"an activation among {', '.join(ACTIVATIONS)}")
    weights = sum(before * after for before, after in pairwise((inputs, *sizes, outputs)))
    weights += inputs * outputs if linear else 0
    require_memory(8 * weights, torch.device("cpu"), f"the {weights:,} weights of hidden_layer_sizes={hidden}",
                   "Pass fewer units.")
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *sizes)):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    layers.append(nn.Linear(sizes[-1] if sizes else inputs, outputs))
    if not (linear and sizes):
        return nn.Sequential(*layers).double()
    return SkipPerceptron(inputs, sizes[0], outputs, nn.Sequential(*layers[1:])).double()


def _of_skorch(net: Any) -> nn.Module:
    """The fitted module of a net, or a new one; of a loss of probabilities, with their logarithms or log odds added."""
    if hasattr(net, "module_"):
        module = copy.deepcopy(net.module_)
    elif isinstance(net.module, nn.Module):
        module = copy.deepcopy(net.module)
    else:
        module = net.module(**net.get_params_for("module"))
    criterion = net.criterion if isinstance(net.criterion, type) else type(net.criterion)
    link = _Log() if issubclass(criterion, nn.NLLLoss) else _Logit() if issubclass(criterion, nn.BCELoss) else None
    return module if link is None else nn.Sequential(module, link)


def with_outputs(module: nn.Module, x: Tensor, outputs: int, responses: int, classes: bool) -> nn.Module:
    """The network with this many outputs, of which one logit makes two if they are those of classes.

    The responses are its classes or targets.

    NetworkError or DataError, before it is trained, if it does not take the inputs, or has another number of outputs.
    """
    with in_mode(module, training=False), torch.no_grad():
        try:
            f = module(x[:2])
        except NTKLaplaceError:
            raise
        except Exception as cause:  # of the caller's module, which may raise anything
            raise NetworkError(f"a network that takes X of shape {tuple(x[:2].shape)} and type {x.dtype}",
                               f"{type(cause).__name__}: {first_line(cause)}",
                               "An estimator passes X as real numbers: convert token numbers in forward(), x.long(), "
                               "and reshape other inputs there.") from cause
    if classes and outputs == 2 and isinstance(f, Tensor) and f.numel() == len(x[:2]):
        return nn.Sequential(module, _TwoLogits())
    own = f.shape[1] if isinstance(f, Tensor) and f.ndim == 2 else None
    if own is not None and own != outputs:
        what = "one" if outputs == responses else "a mean and a log variance"
        expected = f"a network with {outputs} output{'s' * (outputs > 1)}, {what} for each class or target"
        raise DataError(expected, f"{own}", "Make its last layer as wide; a callable gets the number.")
    return module
