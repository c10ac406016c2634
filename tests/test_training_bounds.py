"""Training with a lower bound of the evidence from a subset of the examples, drawn anew for each evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from trainings import classes, flat, mlp, sine, train

SUBSET: dict[str, Any] = {"evidence": "subset", "examples": 4}


def by_hand(
    network: nn.Module, data: Any, likelihood: ntkl.Likelihood, index: Tensor, steps: int
) -> tuple[float, float, list[float]]:
    """Adam at rate 0.1 on log joint - 1/2 (N/M) log det of the subset; values before and after, hyperparameters."""
    whole = ntkl.laplace(network, data, likelihood, ntkl.GaussianPrior(groups="layer"))
    part = whole.subset(index)
    parameters = [whole.prior.log_precision, *whole.likelihood.parameters()]
    others = [part.prior.log_precision, *part.likelihood.parameters()]
    moving = [i for i, p in enumerate(parameters) if i == 0 or isinstance(likelihood, ntkl.Gaussian)]
    optimizer = torch.optim.Adam([parameters[i] for i in moving], lr=0.1)
    factor, values = whole.num_examples / len(index), []
    for step in range(steps + 1):
        with torch.no_grad():
            for ours, theirs in zip(parameters, others, strict=True):
                theirs.copy_(ours)
        optimizer.zero_grad()
        joint, det = whole.log_joint(), part.log_det()
        values.append(float(joint) - 0.5 * factor * float(det))
        if step == steps:
            break
        slopes = torch.autograd.grad(det, [others[i] for i in moving])
        joint.backward()
        for i, slope in zip(moving, slopes, strict=True):
            parameters[i].grad = -(parameters[i].grad - 0.5 * factor * slope)
        optimizer.step()
    found = [value for i in moving for value in parameters[i].detach().exp().flatten().tolist()]
    return values[0], values[-1], found


@pytest.mark.parametrize("form", ["tensors", "loader", "weights"])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_steps_are_adam_on_the_bound(kind: str, form: str) -> None:
    x, y = sine(12) if kind == "regression" else classes(12)
    likelihood = ntkl.Gaussian(0.5) if kind == "regression" else ntkl.Categorical()
    network, seen = mlp(1, 5, 1) if kind == "regression" else mlp(3, 4, 3), []
    w = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
    data = {"tensors": (x, y), "weights": (x, y, w), "loader": DataLoader(TensorDataset(x, y), batch_size=5)}[form]
    torch.manual_seed(5)  # the loader draws no number, nor do minibatches of all examples
    result = train(network, data, likelihood, epochs=4, schedule=ntkl.EvidenceSchedule(1, 3), batch_size=None,
                   structure="diag", callbacks=lambda state: seen.append(copy.deepcopy(state.network)),
                   evidence="subset", examples=3)
    assert result.history.examples == [3, 6, 12, 12]
    torch.manual_seed(5)
    if form == "loader":
        torch.empty((), dtype=torch.int64).random_()  # the seed that a loader draws for its workers
    index = torch.randperm(12)[:3].sort().values
    before, after, values = by_hand(seen[0].eval(), (x, y, w) if form == "weights" else (x, y), likelihood, index, 3)
    history = result.history
    assert history.evidence_before[0] == pytest.approx(before, rel=1e-10)
    assert history.evidence[0] == pytest.approx(after, rel=1e-10)
    assert history.values[0] == pytest.approx(values, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_the_last_evidence_is_exact(structure: str) -> None:
    network = mlp(1, 5, 1)
    states: list[bool] = []
    result = train(network, epochs=12, structure=structure, schedule=ntkl.EvidenceSchedule(2, 10), **SUBSET,
                   callbacks=lambda state: states.append(state.posterior is not None))
    assert result.history.examples == [4, 4, 6, 12, 24, 24] and result.best_epoch == 12
    assert states == [structure == "gp" and epoch in (10, 12) for epoch in range(1, 13)]
    exact = ntkl.laplace(network.eval(), sine(), result.posterior.likelihood, result.posterior.prior)
    assert result.evidence == pytest.approx(float(exact.evidence()), rel=1e-10)
    assert result.posterior.structure == structure and "nats from 24 examples after epoch 12" in str(result)
    assert list(result.history.to_dataframe()["examples"]) == result.history.examples
    assert len(result.history.plot().axes) == 2


def test_after_an_early_stop_the_best_state_is_evaluated_from_all_examples() -> None:
    def blow_up(state: ntkl.TrainingState) -> None:
        if state.epoch == 4:
            kept.append(flat(state.network))
            state.optimizer.param_groups[0]["lr"] = 0.7

    network, kept = mlp(1, 5, 1), []
    schedule = ntkl.EvidenceSchedule(2, 4, patience=2)
    result = train(network, epochs=60, callbacks=blow_up, schedule=schedule, evidence="subset", examples=20)
    history = result.history
    assert result.stopped == "no better evidence in 2 evaluations"
    assert history.examples == [20, 20, 20, 20, 24] and history.epochs == [2, 4, 6, 8, 4] and result.best_epoch == 4
    assert torch.equal(flat(network), kept[0])
    exact = ntkl.laplace(network.eval(), sine(), result.posterior.likelihood, result.posterior.prior)
    assert result.evidence == pytest.approx(float(exact.evidence()), rel=1e-10)


def test_as_many_examples_as_fit_in_memory() -> None:
    def run(budget: int) -> list[int]:
        return train(mlp(1, 40, 1), structure="diag", settings=ntkl.Settings(memory_budget=budget), **SUBSET
                     ).history.examples

    assert run(2**30) == [12, 24, 24]
    epochs: list[ntkl.TrainingState] = []
    assert run(20_000) == [12, 12, 12]  # rows of 121 parameters in factors, and a matrix of M x M
    with pytest.raises(ntkl.MemoryBudgetError, match=r"an evidence of 12 examples .*Pass a smaller examples="):
        train(mlp(1, 40, 1), structure="diag", settings=ntkl.Settings(memory_budget=7_000), epochs=8,
              **{**SUBSET, "examples": 12}, callbacks=epochs.append)
    assert not epochs  # before anything was trained


@pytest.mark.slow
def test_a_predictive_follows() -> None:
    network = mlp(1, 5, 1)
    result = ntkl.train_with_evidence(network, sine(), ntkl.Gaussian(0.5), epochs=20, predictive="loo", **SUBSET)
    assert result.predictive is not None and result.posterior.fitted.exact and result.history.examples[-1] == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evidence": "bound"}, 'evidence="posterior" or "subset"'),
        ({"evidence": "subset"}, "examples as a whole number"),
        ({"evidence": "subset", "examples": 0}, "examples as a whole number"),
        ({"examples": 10}, 'examples= with evidence="subset" only'),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ntkl.NTKLaplaceError, match=words):
        train(mlp(1, 5, 1), **options)


def test_bounds_of_different_sizes_are_not_compared() -> None:
    history = ntkl.EvidenceHistory(evidence=[-1.0, -5.0, -4.0, -6.0], examples=[4, 8, 8, 8])
    assert history.best == 2 and history.waited == 1
    assert ntkl.EvidenceHistory(evidence=[-1.0, -5.0]).best == 0
