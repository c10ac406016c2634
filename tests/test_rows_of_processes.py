"""Methods that read rows of J at training points, on several processes: each reads its share, all have the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from group_cases import require_same
from minima import parts, trained
from ntk_laplace.runtime.reduction import Reducer
from ranks import on_ranks, shares, take_all
from refusals import N, inputs, labels, refused


def fit(structure: str, likelihood: str, part: slice = slice(None), **settings: Any) -> ntkl.Posterior:
    y, own = parts(likelihood)
    return ntkl.laplace(trained(likelihood), take_all((inputs(), y), part), own, ntkl.GaussianPrior(3.0), structure,
                        settings=ntkl.Settings(batch_size=2, **settings))


def answers(posterior: ntkl.Posterior) -> dict[str, Tensor]:
    """Of every method that reads rows at training points; one process has neither of the points 0 and 1."""
    new, classes = inputs(3) + 0.1, isinstance(posterior.likelihood, ntkl.Categorical)
    ranking, few = posterior.explain(new), posterior.leave_one_out(points=[0, 1])
    found = {
        "strongest": ranking.top(5).double(), "total": ranking.total, "leverage": ranking.leverage,
        "spread": posterior.explain(new, by="variance").effects["for"], "few": few.mean, "of few": few.covariance,
        "density of few": few.log_density, "removed": posterior.remove([1, 5]).latent_moments(new)[0],
        "groups": posterior.what_ifs([[0], [1, 2]], linearization="fixed").outputs(new),
        "sources": posterior.source_effects(new, [n % 3 for n in range(N)], linearization="fixed").effect,
    }
    found |= {f"conditional {method}": posterior.conditional_log_marginal_likelihood(6, 1, method=method)
              for method in ("average", "samples")}
    if posterior.fitted.exact:
        one = posterior.leave_one_out()
        found |= {"mean": one.mean, "covariance": one.covariance, "density": one.log_density, "own": one.leverage}
        if classes:
            found["set"] = posterior.predict_set(new, 0.7).mask.double()
        else:
            found |= {"lower": posterior.predict_interval(new, 0.7).lower,
                      "refit": posterior.refit("loo").latent_moments(new)[1],
                      "predictive": torch.tensor(posterior.fit_predictive("loo").after).double()}
    return found


@pytest.mark.filterwarnings("ignore:the removed points")
@pytest.mark.parametrize(("structure", "likelihood", "world_size"), [
    ("full", "classes", 3), ("full", "regression", 2), ("ekfac", "classes", 2), ("diag", "regression", 2),
])
def test_what_is_computed_from_rows_is_that_of_one_process(structure: str, likelihood: str, world_size: int) -> None:
    expected = answers(fit(structure, likelihood))
    require_same(on_ranks(world_size, lambda reducer: answers(fit(structure, likelihood, reducer=reducer))), expected)


def test_passes_that_all_processes_take_together_are_refused() -> None:
    """Conjugate gradients of "iterative" read the data of all processes for the rows of one."""
    def run(reducer: Reducer) -> None:
        part = shares(N, 2)[reducer.rank]
        posterior = fit("iterative", "classes", part, reducer=reducer, sharded=True)
        with refused(ntkl.UnsupportedError, "one process for rows of J", "a group of 2", 'structure="gp"'):
            posterior.leave_one_out()

    on_ranks(2, run)


def test_rows_that_do_not_fit_are_refused_by_all_processes() -> None:
    """Also by the last one, which has none of the points and would wait for the others."""
    x = inputs(150)

    def run(reducer: Reducer) -> None:
        settings = ntkl.Settings(batch_size=50, reducer=reducer, memory_budget=2**13)
        posterior = ntkl.laplace(trained("classes"), (x, labels(150)), ntkl.Categorical(), structure="diag",
                                 settings=settings)
        with refused(ntkl.MemoryBudgetError, "rows of 60 training points to fit", "predicted need", "fewer points"):
            posterior.remove(range(60))

    on_ranks(2, run)
