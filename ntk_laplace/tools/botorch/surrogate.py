"""Training of a surrogate: a network, its prior precisions and its noise, on few data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from torch import Tensor, nn

from ntk_laplace.errors import (
    DataError,
    HyperparameterError,
    UnsupportedError,
    is_number,
    require_choice,
    require_whole,
)
from ntk_laplace.gp.input_format import InputFormat
from ntk_laplace.model.likelihoods import Gaussian, Likelihood
from ntk_laplace.model.network import Network, probe
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.fit import laplace
from ntk_laplace.structures import Settings
from ntk_laplace.tools.botorch.fourier import FourierNetwork
from ntk_laplace.tools.botorch.gaussian_model import require_transforms
from ntk_laplace.tools.botorch.optimizers import gauss_newton, lbfgs
from ntk_laplace.tools.estimators.networks import network_of

_FIRST_SCALE = 2.0  # of the first layer's weights, relative to torch's: shorter length scales, by the evidence
_FIRST_NOISE = 1e-2  # where the noise is learned, of standardized outcomes
_OTHER_PRIOR = "Leave it out: a warm start takes over the prior. Or leave out warm_start."


class Angles(nn.Module):
    """Each input x in [0, 1] as a point of a half circle, (sin π(x - ½), cos π(x - ½)).

    All inputs then have one norm, so that the variance of a perceptron's tangent kernel is about the same everywhere:
    on x itself it grows towards the corners of the cube, and acquisition functions with it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(n, 2 d)."""
        angles = math.pi * (x - 0.5)
        return torch.cat([angles.sin(), angles.cos()], -1)


@torch.inference_mode(False)
def transformed(
    train_X: Tensor, train_Y: Tensor, train_Yvar: Tensor | None, input_transform: InputTransform | None,
    outcome_transform: OutcomeTransform | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs (n, d), targets (n, m) and variances in units of the transforms, which are fitted to them.

    DataError if the shapes do not fit each other, or a number is not finite. UnsupportedError if a transform is none.
    """
    require_transforms(input_transform, outcome_transform)
    for name, values in (("train_X", train_X), ("train_Y", train_Y), ("train_Yvar", train_Yvar)):
        fits = isinstance(values, Tensor) and values.ndim == 2 and len(values) == len(train_X) > 0
        if not (fits or (name == "train_Yvar" and values is None)):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise DataError(f"{name} as a tensor (n, {'d' if name == 'train_X' else 'm'}), n as in train_X", got,
                            "Pass tensors with one row per observation.")
        if name == "train_Yvar" and values is not None and values.shape != train_Y.shape:
            raise DataError(f"train_Yvar of shape {tuple(train_Y.shape)}, that of train_Y", f"{tuple(values.shape)}",
                            "Pass a variance for each number of train_Y.")
        if isinstance(values, Tensor) and not values.isfinite().all():
            row = int((~values.isfinite()).any(1).nonzero()[0])
            raise DataError(f"finite {name}", f"NaN or infinity in row {row}", "Leave that observation out.")
    inputs, targets, variances = train_X, train_Y, train_Yvar
    if input_transform is not None:
        input_transform.train()
        inputs = input_transform(train_X)
        input_transform.eval()
    if outcome_transform is not None:
        outcome_transform.train()
        targets, variances = outcome_transform(train_Y, train_Yvar, X=inputs)
        outcome_transform.eval()
    for name, values in (("input_transform", inputs), ("outcome_transform", targets)):
        if not values.isfinite().all():
            row = int((~values.isfinite()).any(1).nonzero()[0])
            raise DataError(f"finite values after {name}", f"NaN or infinity in row {row}",
                            "Choose a transform for such values, or leave that observation out.")
    return inputs.detach().clone(), targets.detach().clone(), variances  # tensors of inference mode have no gradients


@dataclass(frozen=True)
class Surrogate:
    """The data of a surrogate, and how its weights and hyperparameters are trained, as in `LaplaceModel.fit`."""

    inputs: Tensor  # (n, d)
    targets: Tensor  # (n, m)
    form: InputFormat  # of the network's inputs
    groups: Any  # None: all weights share a precision, or as in the start
    noise: float | None  # None: one for each output is learned, unless `variances` are given
    variances: Tensor | None  # of the noise of each point, (n, m)
    prior_mean: str | None  # None: the weights before the training, or the mean of the start
    rounds: int
    steps: int
    trainer: Callable[..., Any] | str | None

    def __post_init__(self) -> None:
        require_choice(self.prior_mean, ("zero", "initial", None), 'prior_mean "zero" or "initial"')
        if self.noise is not None and self.variances is not None:
            raise HyperparameterError("noise= or train_Yvar", "both", "Pass one: each is the noise of the data.")
        one = is_number(self.noise) or (isinstance(self.noise, Tensor) and self.noise.numel() == 1)
        if not (self.noise is None or one):
            raise HyperparameterError("noise= as one variance, for all outputs", f"{self.noise}"[:80],
                                      "Pass train_Yvar, a variance for each value of train_Y.")
        require_whole("rounds", self.rounds, 1, "Pass rounds=2.")
        require_whole("steps", self.steps, 1, "Leave it out for 100.")
        if not (self.trainer is None or self.trainer == "gauss-newton" or callable(self.trainer)):
            raise UnsupportedError('trainer="gauss-newton" or a callable', repr(self.trainer),
                                   "Leave it out for L-BFGS.")

    @torch.inference_mode(False)
    def network(self, network: Any, hidden_layer_sizes: Any, activation: str, seed: int) -> nn.Module:
        """The network to train, with initial weights of this seed where it is made here; a module is copied."""
        named = network if isinstance(network, str) else ""
        if named == "fourier" and self.trainer is not None:
            raise UnsupportedError('no trainer for network="fourier"', f"a {type(self.trainer).__name__}",
                                   "Pass a module or a callable (d, m) -> Module with the trainer.")
        d, m = self.inputs.shape[1], self.targets.shape[1]
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            if named == "fourier":
                return FourierNetwork(d, m)
            if named == "mlp":
                return _perceptron(d, m, hidden_layer_sizes, activation)
            if named:
                raise UnsupportedError('network="fourier" or "mlp", a callable (d, m) -> Module or an nn.Module',
                                       repr(network)[:80], "Pass one of them.")
            return network_of(network, d, m, hidden_layer_sizes, activation)

    @torch.inference_mode(False)
    def posterior(self, module: nn.Module, start: Posterior | None, options: dict[str, Any]) -> Posterior:
        """The posterior of a trained copy of the network, or of that of `start`."""
        options = {"settings": Settings(progress=False), **options}
        frozen = fresh = Network(module.eval(), options.get("parameters"), options.get("output"))
        if start is not None:
            _require_same(module, start.network.module)
            module = copy.deepcopy(start.network.module).eval()
            frozen = Network(module, options.get("parameters"), options.get("output"))
        x = self.form.restore(self.inputs, frozen)
        probe(frozen, x)
        y = self.targets.to(frozen.device)
        if frozen.num_outputs != y.shape[1]:
            raise DataError(f"a network with {y.shape[1]} outputs, as many as train_Y", f"{frozen.num_outputs}",
                            "Make its last layer as wide; a callable gets the number.")
        likelihood, fixed = self._likelihood(start), self.noise is not None or self.variances is not None
        if isinstance(module, FourierNetwork):
            self._train_fourier(module, warm=start is not None)
            likelihood = likelihood if fixed else _noise_of(module.noise)
            return laplace(module, (x, y), likelihood, GaussianPrior(module.precision, groups="layer"), **options)
        prior = self._prior(start, fresh)
        likelihood.bind(*y.shape)
        prior.bind(frozen.shapes)
        for _ in range(self.rounds):
            if callable(self.trainer):
                self.trainer(frozen.module, x, y)
            else:
                descend = lbfgs if self.trainer is None else gauss_newton
                descend(frozen, x, y, likelihood, prior, self.steps)
            found = laplace(frozen.module.eval(), (x, y), likelihood, prior, **options)
            found.fit_hyperparameters(parameters=["precision"] if fixed else None)
            likelihood, prior = found.likelihood, found.prior
        return found

    def _train_fourier(self, module: FourierNetwork, warm: bool) -> None:
        known = self.variances if self.noise is None else self.targets.new_tensor(self.noise)
        inputs, targets = (part.to(module.noise) for part in (self.inputs, self.targets))
        module.train_with_evidence(inputs, targets, None if known is None else known.to(module.noise), warm)

    def _likelihood(self, start: Posterior | None) -> Likelihood:
        if self.variances is not None:
            return Gaussian(self.variances, "point")
        if self.noise is not None:
            return Gaussian(self.noise, "scalar")
        if start is None or not isinstance(start.likelihood, Gaussian) or start.likelihood.kind == "point":
            return _noise_of(torch.full(self.targets.shape[1:], _FIRST_NOISE, device="cpu").double())
        if start.likelihood.kind == "scalar":
            return _noise_of(start.likelihood.noise.detach().expand(self.targets.shape[1]))
        return copy.deepcopy(start.likelihood)

    def _prior(self, start: Posterior | None, fresh: Network) -> GaussianPrior:
        """A new prior of the new network; under a warm start its prior, of which the caller may ask for no other."""
        mean = 0.0 if self.prior_mean == "zero" else fresh.theta
        prior = GaussianPrior(mean=mean, groups="all" if self.groups is None else self.groups).bind(fresh.shapes)
        if start is None:
            return prior
        if self.groups is not None and prior.groups != start.prior.groups:
            raise UnsupportedError(f"groups={start.prior.groups!r}, as in warm_start", repr(prior.groups), _OTHER_PRIOR)
        known = "initial" if start.prior.flat_mean().any() else "zero"
        if self.prior_mean is not None and bool(prior.flat_mean().any()) != (known == "initial"):
            raise UnsupportedError(f"prior_mean={known!r}, as in warm_start", repr(self.prior_mean), _OTHER_PRIOR)
        return copy.deepcopy(start.prior)


def _perceptron(d: int, m: int, hidden_layer_sizes: Any, activation: str) -> nn.Module:
    """The network "mlp" of d inputs in [0, 1] and m outputs."""
    perceptron = network_of("mlp", 2 * d, m, hidden_layer_sizes, activation)
    layers = [layer for layer in perceptron.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        layers[0].weight.mul_(_FIRST_SCALE)
        layers[-1].weight.zero_()  # the prior mean of the function is constant
    return nn.Sequential(Angles(), perceptron)


def _require_same(module: nn.Module, start: nn.Module) -> None:
    """Refuse a module whose parts have other classes or parameters than those of the start (UnsupportedError)."""
    for expected, got in zip_longest(_parts(start), _parts(module), fillvalue="no other part"):
        if expected != got:
            raise UnsupportedError(f"the network of warm_start, with {expected}", got, "Pass that network, with the "
                                   "hidden_layer_sizes and activation of its fit, or leave out warm_start.")


def _parts(module: nn.Module) -> list[str]:
    """Name, class and parameters of each part. A class is known by its name: a callable may define it at each call."""
    found = []
    for name, part in module.named_modules():
        shapes = [f"{own} {tuple(value.shape)}" for own, value in part.named_parameters(recurse=False)]
        found.append(" ".join([f"{name}:" if name else "class", type(part).__name__, *shapes]))
    return found


def _noise_of(variances: Tensor) -> Gaussian:
    """Independent noise of the outputs, (m,); of one output a scalar."""
    return Gaussian(variances, "scalar" if len(variances) == 1 else "output")
