"""The result of variational inference: a posterior, and the history of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ntk_laplace.posterior import Posterior

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass
class VariationalHistory:
    """Every step, and the evidence lower bound (ELBO) at some of them.

    Attributes
    ----------
    step_size : list of float
        γ of every step.
    natural_gradient : list of float
        Norm of the natural gradient of every step in q's own metric, sqrt(gᵀH⁻¹g): half its square is the gain of the
        ELBO, in nats, that a step of size 1 expects. If the algorithm samples, it contains the samples' noise.
    rows : list of int
        Rows that represent H after every step, in function space; empty in weight space.
    steps : list of int
        Steps after which the ELBO was estimated; 0 is the start.
    elbo_nn, elbo_nn_error : list of float
        ELBO of the network there, nats, by weight samples, and its standard error. It bounds the network's evidence.
    elbo_glm, elbo_glm_error : list of float
        ELBO of the network linearized at μ, with the standard error of what is sampled of it.
    """

    step_size: list[float] = field(default_factory=list)
    natural_gradient: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    elbo_nn: list[float] = field(default_factory=list)
    elbo_nn_error: list[float] = field(default_factory=list)
    elbo_glm: list[float] = field(default_factory=list)
    elbo_glm_error: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.step_size)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per step, from 0 for the start; NaN where a number was not computed."""
        import pandas as pd

        frame = pd.DataFrame(index=pd.RangeIndex(len(self) + 1, name="step"))
        every = {"step_size": self.step_size, "natural_gradient": self.natural_gradient}
        for name, values in (every | ({"rows": self.rows} if self.rows else {})).items():
            frame[name] = pd.Series(values, index=range(1, len(values) + 1), dtype=float)
        for name in ("elbo_nn", "elbo_nn_error", "elbo_glm", "elbo_glm_error"):
            frame[name] = pd.Series(getattr(self, name), index=self.steps, dtype=float)
        return frame.reset_index()

    def plot(self) -> Figure:
        """Both ELBOs over the steps, and the natural gradient below."""
        from ntk_laplace.plotting import variational_history

        return variational_history(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)


@dataclass
class VariationalStep:
    """What a callback gets after a step; `stop` ends the run.

    Attributes
    ----------
    step, steps : int
        Number of finished steps, and of all that were asked for.
    mean : Tensor, (P,)
        μ.
    history : VariationalHistory
    stopped : str
        Why the run ends here; empty if it continues.
    """

    step: int
    steps: int
    mean: Tensor
    history: VariationalHistory
    stopped: str = ""

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the run after this step."""
        self.stopped = reason


Callback = Callable[[VariationalStep], object]


@dataclass(frozen=True)
class VariationalFit:
    """A posterior by variational inference.

    Attributes
    ----------
    posterior : Posterior
        N(μ, H⁻¹), with the verbs that hold for a Gaussian that is not Laplace's.
    history : VariationalHistory
    stopped : str
        Why the steps ended.
    dropped : float
        What H lacks because rows of old steps were dropped: the spectral norm of the missing sum is at most this, in
        units of the prior precision. 0 in weight space.
    """

    posterior: Posterior
    history: VariationalHistory = field(repr=False)  # a number for every step
    stopped: str
    dropped: float = 0.0

    def plot(self) -> Figure:
        """Both ELBOs over the steps, and the natural gradient below."""
        return self.history.plot()

    def __str__(self) -> str:
        history = self.history
        words = [f"{len(history):,} steps ({self.stopped})"]
        if history.steps:
            words.append(f"ELBO {history.elbo_nn[-1]:.4f} ± {history.elbo_nn_error[-1]:.2g} nats of the network, "
                         f"{history.elbo_glm[-1]:.4f} of the linearized one")
        if history.natural_gradient:
            words.append(f"natural gradient {history.natural_gradient[-1]:.3g}")
        if self.dropped:
            words.append(f"rows dropped: at most {self.dropped:.2g} prior precisions")
        return "; ".join(words)
