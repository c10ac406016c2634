"""History of an optimization of the evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_ROUNDING = 2.0**-50  # relative rounding of an evidence in float64


@dataclass
class HyperparameterHistory:
    """Evidence and hyperparameters at every step.

    Attributes
    ----------
    method : str
    names : list of str
        Hyperparameters by name: ``precision[group]``, ``noise``, ``temperature``.
    evidence : list of float
        Nats, one per step; the first is at the starting values. The prior's `log_hyperprior`, if it has one, is in it.
    values : list of list of float
        Hyperparameters at each step, in the order of `names`; variances and precisions, not their logarithms.
    converged : bool
        Whether step `best` meets the tolerance, or with "adam" the evidence stayed within it for 20 steps.
    message : str
        Why it stopped.
    at_bounds : dict of str to float
        Hyperparameters that ended on a bound while the evidence still increases beyond it, and the bound.
    """

    method: str
    names: list[str]
    evidence: list[float] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    converged: bool = False
    message: str = ""
    at_bounds: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """Step of the largest evidence; the posterior has its hyperparameters.

        Among steps whose evidence differs only by rounding, the last: gradients still decrease there.
        """
        largest = max(self.evidence)
        least = largest - _ROUNDING * (1.0 + abs(largest))
        return max(step for step, evidence in enumerate(self.evidence) if evidence >= least)

    def __len__(self) -> int:
        return len(self.evidence)

    def __str__(self) -> str:
        best = self.best
        found = ", ".join(f"{n} = {v:.4g}" for n, v in zip(self.names[:6], self.values[best], strict=False))
        more = f" and {len(self.names) - 6} more" if len(self.names) > 6 else ""
        state = "converged" if self.converged else "not converged"
        return (
            f"{self.method}: {state} after {len(self) - 1} steps ({self.message}); evidence {self.evidence[0]:.4f} -> "
            f"{self.evidence[best]:.4f} nats; {found}{more}"
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row per step."""
        import pandas as pd

        frame = pd.DataFrame(self.values, columns=self.names)
        frame.insert(0, "evidence", self.evidence)
        frame.index.name = "step"
        return frame

    def plot(self) -> Figure:
        """Plot the evidence over the steps, and the hyperparameters on a log scale below."""
        from ntk_laplace.plotting import hyperparameter_history

        return hyperparameter_history(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return dict(vars(self))
