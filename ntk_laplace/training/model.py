"""The network in training, with the arguments that define its posterior."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import untold
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.model.data import Batches
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.objective import in_mode
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.fit import can_fit, fitted_to, linearized, spec_of
from ntk_laplace.runtime.serialization import load_tensors, module_tensors
from ntk_laplace.structures import Auto, LinearizedModel, Settings, StructureSpec

_SHARE = 1 / 30  # of the operations of one exact matrix: the end of a training fits several


@dataclass(frozen=True)
class Model:
    """The caller's network in training, and the arguments of `laplace` that define its posterior, with its data."""

    network: nn.Module
    likelihood: Likelihood
    prior: GaussianPrior
    data: Any
    structure: str | StructureSpec | Auto
    curvature: CurvatureType
    dtype: torch.dtype | None
    settings: Settings
    output: str | int | None = None
    targets: str | None = None
    # the last pass over the Jacobian, by whether it keeps factors: its plans hold at other weights
    _passes: dict[bool, JacobianPass] = field(default_factory=dict, repr=False, compare=False)

    def posterior(self, quietly: bool = False) -> Posterior:
        """Fit at the current weights and hyperparameters in eval mode; `quietly` suppresses the library's warnings."""
        with in_mode(self.network, training=False), untold(quietly):
            return fitted_to(self.spec, *self._linearized())

    def _linearized(self) -> tuple[LinearizedModel, Batches]:
        model, batches = linearized(
            self.network, self.data, self.likelihood, self.prior, self.spec, self.curvature, dtype=self.dtype,
            settings=self.settings, output=self.output, targets=self.targets)
        own = model.jacobian_pass
        earlier = self._passes.get(own.keep_factors)
        if earlier is not None and earlier.network.evaluated:  # else a fit failed early
            model.network.take_findings(earlier.network)
            own = earlier.on(model.network, own.dtype)
        self._passes[own.keep_factors] = own
        return replace(model, jacobian_pass=own), batches

    def on(self, data: Any) -> Model:
        """The same model with other data, whose examples are probed anew."""
        return replace(self, data=data, _passes={})

    @property
    def spec(self) -> StructureSpec | Auto:
        """The structure; "auto" takes none whose evidence is an estimate, because its steps would follow the noise."""
        found = spec_of(self.structure)
        return Auto(None, None) if isinstance(found, Auto) and found.otherwise else found

    def exact(self) -> Model:
        """The same model with an exact posterior; this one if it has one."""
        if self.spec.exact and self.curvature.kind == "ggn":
            return self
        return replace(self, structure=Auto(None, _SHARE), curvature=CurvatureType.of("ggn"))

    def has_exact(self) -> bool:
        """Whether the end of a training can have an exact posterior, as far as sizes tell."""
        own = replace(self.exact(), likelihood=copy.deepcopy(self.likelihood), prior=copy.deepcopy(self.prior))
        if not isinstance(own.spec, Auto):
            return True  # that of the training
        with in_mode(self.network, training=False), untold(True):
            return can_fit(own.spec, *own._linearized())

    def tensors(self) -> dict[str, Tensor]:
        """Copies of weights, buffers and hyperparameters."""
        return module_tensors(self.network, self.prior, self.likelihood)

    def load(self, saved: dict[str, Tensor]) -> None:
        """Restore them."""
        load_tensors(saved, self.network, self.prior, self.likelihood)

    def signature(self) -> dict[str, str]:
        """Settings that a resumed training must share with the interrupted one."""
        trained = ((name, p) for name, p in self.network.named_parameters() if p.requires_grad)
        output = {} if self.output is None else {"output": repr(self.output)}
        return output | {
            "parameters": _listed(trained), "buffers": _listed(self.network.named_buffers()),
            "prior groups": self.prior.group_words, "prior mean": _words(self.prior.flat_mean()),
            "curvature": repr(self.curvature),
            "likelihood": f"{' of '.join(type(m).__name__ for m in self.likelihood.modules())}, weight "
                          f"{self.likelihood.weight:g}, {_listed(self.likelihood.named_parameters())}",
            "structure": repr(self.structure), "dtype": repr(self.dtype),
        }


def _listed(named: Iterable[tuple[str, Tensor]]) -> str:
    """Names, types and shapes in one line."""
    words = (f"{name}: {str(t.dtype).removeprefix('torch.')} {'x'.join(map(str, t.shape))}" for name, t in named)
    return ", ".join(map(str.strip, words)) or "none"


def _words(values: Tensor) -> str:
    """A number, or a digest that identifies many numbers."""
    if len(values.unique()) == 1:
        return f"{float(values[0]):g}"
    digest = hashlib.sha256(values.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:8]
    return f"{len(values):,} numbers ({digest})"
