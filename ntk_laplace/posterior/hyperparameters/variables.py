"""The optimized hyperparameters as one flat vector: logarithms, and parameters that are not named ``log_<name>``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.model.objective import constant
from ntk_laplace.posterior.hyperparameters.objectives import Evidence, SearchObjective


class Variables:
    """The log precisions and the likelihood's log hyperparameters to optimize.

    `which` are "precision", "noise", "temperature", or names of the likelihood's parameters; "likelihood" is all of
    those, and None all but a temperature, which must be named. HyperparameterError if two have one name, or one of the
    likelihood's is called "precision".
    """

    def __init__(self, posterior: Evidence, which: Sequence[str] | None) -> None:
        there: dict[str, nn.Parameter] = {"precision": posterior.prior.log_precision}
        logarithms = {"precision"}
        for full, own in posterior.likelihood.named_parameters():
            path, dot, last = full.rpartition(".")
            name = path + dot + last.removeprefix("log_")
            if name in there:
                raise HyperparameterError("hyperparameters of different names",
                                          f"{name!r} twice, one of them {full} of {type(posterior.likelihood).__name__}"
                                          + (", the other the prior's" if name == "precision" else ""),
                                          "Rename the parameter.")
            there[name] = own
            if last.startswith("log_"):
                logarithms.add(name)
        known = f"hyperparameters among {', '.join(there)}"
        named = which is None or isinstance(which, str)
        if not (named or (isinstance(which, Sequence) and all(isinstance(name, str) for name in which))):
            raise HyperparameterError(known, repr(which), "Pass their names, or leave them out for the default.")
        default = [name for name in there if name != "temperature"]
        chosen = default if which is None else [which] if isinstance(which, str) else list(which)
        if "likelihood" in chosen:
            chosen = [c for c in chosen if c != "likelihood"] + [n for n in there if n != "precision"]
        unknown = [name for name in chosen if name not in there]
        if unknown or not chosen:
            raise HyperparameterError(known, f"{unknown or 'none'}",
                                      f"This likelihood is {type(posterior.likelihood).__name__}.")
        self.posterior, self._prior, self._likelihood = posterior, posterior.prior, posterior.likelihood
        self.parameters = {name: there[name] for name in dict.fromkeys(chosen)}
        self._logarithms = logarithms
        if any(parameter.is_inference() for parameter in self.parameters.values()):
            raise HyperparameterError("hyperparameters that can change", "tensors made in torch.inference_mode()",
                                      "Copy the posterior outside of it.")

    @property
    def names(self) -> list[str]:
        """One name per entry."""
        found: list[str] = []
        for name, parameter in self.parameters.items():
            if name == "precision":
                found += [f"precision[{group}]" for group in self._prior.group_names]
            elif parameter.numel() == 1:
                found.append(name)
            else:
                found += [f"{name}[{i}]" for i in range(parameter.numel())]
        return found

    def get(self) -> Tensor:
        """Current logarithms, flat, float64."""
        return torch.cat([p.detach().double().flatten().cpu() for p in self.parameters.values()])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Disable all other gradients: one in the likelihood may need a pass over the data."""
        moving = {id(parameter) for parameter in self.parameters.values()}
        others = [p for m in (self._prior, self._likelihood) for p in m.parameters() if id(p) not in moving]
        with constant(others):
            yield

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        """Set the hyperparameters to these logarithms."""
        for parameter, own in zip(self.parameters.values(), self._split(values), strict=True):
            parameter.copy_(own.reshape(parameter.shape))

    def box(self, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the logarithms; parameters without a logarithm are unbounded."""
        low, high = (torch.tensor(bound, dtype=torch.float64, device="cpu").log() for bound in bounds)
        free = torch.cat([torch.full((p.numel(),), name not in self._logarithms, device="cpu")
                          for name, p in self.parameters.items()])
        infinite = torch.full((len(free),), float("inf"), dtype=torch.float64, device="cpu")
        return torch.where(free, -infinite, low), torch.where(free, infinite, high)

    def shown(self, values: Tensor) -> list[float]:
        """Variances, precisions, temperatures for the logarithms; parameters without a logarithm as they are."""
        parts = zip(self.parameters, self._split(values), strict=True)
        return torch.cat([own.exp() if name in self._logarithms else own for name, own in parts]).tolist()

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        """The flat values of each parameter."""
        return values.split([parameter.numel() for parameter in self.parameters.values()])

    def value_and_gradient(self, objective: SearchObjective) -> tuple[float, Tensor]:
        """An objective with the prior's `log_hyperprior` at the current values, and its gradient in the logarithms."""
        value, gradient = self.evidence_and_gradient(objective)
        return value + (self._prior.log_hyperprior().item() if self._prior.has_hyperprior else 0.0), gradient

    def evidence_and_gradient(self, objective: SearchObjective) -> tuple[float, Tensor]:
        """The objective without the hyperprior, whose slope is in the gradient."""
        value, gradients = objective.value_and_gradients(self.parameters)
        if self._prior.has_hyperprior:
            own = self._prior.hyperprior_slope()
            gradients = [gradient + own.to(gradient) if name == "precision" else gradient
                         for name, gradient in zip(self.parameters, gradients, strict=True)]
        return value.item(), torch.cat([g.detach().double().flatten().cpu() for g in gradients])
