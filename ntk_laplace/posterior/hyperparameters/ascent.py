"""A few gradient steps on the evidence of successive posteriors, for online training ([I21] Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError
from ntk_laplace.posterior.hyperparameters.objectives import Differentiable, Evidence, SearchObjective, SpectralEvidence
from ntk_laplace.posterior.hyperparameters.variables import Variables


class Ascent:
    """Adam on the logarithms of the hyperparameters `which`, within bounds; its moments are kept across posteriors.

    The learning rate γ, in log units, is constant, with Adam's default decay rates, as in [I21] section 4.
    """

    def __init__(self, which: Sequence[str] | None, learning_rate: float, bounds: tuple[float, float]) -> None:
        self.which, self.learning_rate, self.bounds = which, learning_rate, bounds
        self._moving: tuple[Tensor, torch.optim.Optimizer] | None = None

    def climb(self, posterior: Evidence, steps: int) -> tuple[float, float]:
        """Take K steps on a posterior's evidence and set its hyperparameters to the result ([I21] Eq. 7).

        The steps are on the evidence with the prior's `log_hyperprior`; with K = 0 nothing changes. Return the evidence
        before and after, nats.
        """
        variables = Variables(posterior, self.which)
        with variables.alone():
            spectral = SpectralEvidence.of(posterior, variables.parameters) if steps > 1 else None
            evidence: SearchObjective = spectral or Differentiable(posterior.log_marginal_likelihood)
            logs, optimizer = self._bound(variables)
            low, high = variables.box(self.bounds)
            before = None
            for _ in range(steps):
                value, gradient = variables.evidence_and_gradient(evidence)
                before = value if before is None else before
                if not bool(gradient.isfinite().all()):
                    raise _not_finite(value)
                logs.grad = -gradient
                optimizer.step()
                with torch.no_grad():
                    logs.clamp_(low, high)
                variables.set(logs.detach())
            after = float(evidence.value())
        if not math.isfinite(after):
            raise _not_finite(after)
        return (after if before is None else before), after

    def _bound(self, variables: Variables) -> tuple[Tensor, torch.optim.Optimizer]:
        """The flat logarithms at their current values, and their optimizer, created once."""
        now = variables.get()
        if self._moving is None:
            self._moving = self._created(now.clone().requires_grad_())
        with torch.no_grad():
            self._moving[0].copy_(now)
        return self._moving

    def _created(self, logs: Tensor) -> tuple[Tensor, torch.optim.Optimizer]:
        return logs, torch.optim.Adam([logs], lr=self.learning_rate, fused=True)  # one kernel of few numbers

    def state(self) -> dict[str, Any] | None:
        """Adam's moments, as plain containers of tensors; None before the first step."""
        if self._moving is None:
            return None
        logs, optimizer = self._moving
        return {"size": len(logs), "optimizer": optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a `state`."""
        if state is None:
            self._moving = None
            return
        self._moving = self._created(torch.zeros(state["size"], dtype=torch.float64, requires_grad=True, device="cpu"))
        self._moving[1].load_state_dict(state["optimizer"])


def _not_finite(value: float) -> NumericalError:
    return NumericalError("a finite evidence and gradient", f"evidence {value}",
                          "Use dtype=torch.float64, narrower bounds, or a smaller learning rate.")
