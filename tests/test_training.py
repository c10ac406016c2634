"""Training with evidence: [I21] Algorithm 1 against a few dense lines, and everything around it."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

import ntk_laplace as ntkl
from networks import NETWORKS, NetworkCase
from ntk_laplace.model.data import Batches, InputDtype
from ntk_laplace.model.network import Caller
from ntk_laplace.model.objective import Objective, in_mode
from ntk_laplace.model.optimum import Descent
from ntk_laplace.posterior.explain.reliability import newton_decrement
from ntk_laplace.posterior.hyperparameters import Variables
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.serialization import load_random, random_state
from ntk_laplace.training import run
from ntk_laplace.training.minibatches import Minibatches, count_examples
from ntk_laplace.training.train import _require_length
from pairwise import pairwise
from refusals import refused
from trainings import adam, classes, flat, mlp, sine, train

F64 = torch.float64
DOUBLE = InputDtype(F64, frozenset())
STRUCTURES = {"gp": "gp", "full": "full", "kfac": "kfac", "ekfac": "ekfac", "inf": ntkl.INF(rank=8), "diag": "diag"}
OPTIONS = {"reduce": ntkl.KFAC(sharing="reduce"), "damped": ntkl.KFAC(damped=True), "trace": ntkl.INF(rank="trace:0.9")}
quiet = pytest.mark.filterwarnings("ignore:INF's low-rank part")


# --- the algorithm


def algorithm_1(
    network: nn.Module, x: Tensor, y: Tensor, kind: str, epochs: int, batch: int, f: int, k: int, gamma: float
) -> list[tuple[float, list[float]]]:
    """[I21] Algorithm 1 written out: dense Jacobians, [I21] Eq. B.1, autograd. One precision for each layer."""
    names, weights = zip(*network.named_parameters(), strict=True)
    layer = torch.cat([torch.full((p.numel(),), int(n[0]) // 2) for n, p in network.named_parameters()])
    logs = torch.zeros(3 if kind == "regression" else 2, dtype=F64, requires_grad=True)  # log δ, log δ, log σ²
    if kind == "regression":
        logs.data[2] = float(np.log(0.5))

    def likelihood(out: Tensor, targets: Tensor) -> Tensor:
        if kind == "classification":
            return -nn.functional.cross_entropy(out, targets, reduction="sum")
        return torch.distributions.Normal(out, (0.5 * logs[2]).exp()).log_prob(targets).sum()

    def prior(theta: Tensor) -> Tensor:
        return torch.distributions.Normal(torch.zeros_like(theta), (-0.5 * logs[layer]).exp()).log_prob(theta).sum()

    def evidence() -> Tensor:
        values = {n: p.detach() for n, p in network.named_parameters()}
        jac = torch.func.jacrev(lambda v: torch.func.functional_call(network, v, (x,)))(values)
        jac = torch.cat([jac[n].flatten(2) for n in names], 2)
        out = network(x).detach()
        p = torch.softmax(out, 1)
        hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        if kind == "regression":
            hessian = torch.eye(out.shape[1], dtype=F64).expand(len(x), -1, -1) * torch.exp(-logs[2])
        h = torch.einsum("nip,nij,njq->pq", jac, hessian, jac) + torch.diag(logs[layer].exp())
        theta = flat(network)
        constant = 0.5 * len(theta) * np.log(2 * np.pi)
        return likelihood(out, y) + prior(theta) + constant - 0.5 * torch.linalg.slogdet(h)[1]

    optimizer, ascent = torch.optim.Adam(weights, lr=1e-2), torch.optim.Adam([logs], lr=gamma, maximize=True)
    trace = []
    for epoch in range(1, epochs + 1):
        for part in torch.arange(len(x)).split(batch):
            optimizer.zero_grad()
            theta = torch.cat([p.flatten() for p in weights])
            joint = len(x) / len(part) * likelihood(network(x[part]), y[part]) + prior(theta)
            (-joint / len(x)).backward(inputs=list(weights))
            optimizer.step()
        if epoch % f == 0:
            for _ in range(k):
                ascent.zero_grad()
                evidence().backward()
                ascent.step()
            trace.append((evidence().item(), logs.detach().exp().tolist()))
    return trace


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize(("kind", "batch"), [("regression", 24), ("regression", 7), ("classification", 30)])
def test_the_trajectory_is_that_of_algorithm_1(kind: str, batch: int, structure: str) -> None:
    x, y = sine() if kind == "regression" else classes()
    widths = (1, 5, 1) if kind == "regression" else (3, 4, 3)
    theirs, ours = mlp(*widths), mlp(*widths)
    reference = algorithm_1(theirs, x, y, kind, 9, batch, 3, 5, 0.1)
    likelihood = ntkl.Gaussian(0.5) if kind == "regression" else ntkl.Categorical()
    data = DataLoader(TensorDataset(x, y), batch_size=batch)
    result = train(ours, data, likelihood, structure=structure, epochs=9, schedule=ntkl.EvidenceSchedule(3, 5))
    history = result.history
    assert history.epochs == [3, 6, 9]
    for number, (evidence, values) in enumerate(reference):
        assert history.evidence[number] == pytest.approx(evidence, rel=1e-9)
        assert history.values[number] == pytest.approx(values, rel=1e-9)
    best = max(range(3), key=lambda i: reference[i][0])
    assert result.best_epoch == history.epochs[best]
    if best == 2:
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@quiet
# every structure with every curvature, and both with either problem
@pytest.mark.parametrize(
    ("name", "curvature", "problem"), pairwise(STRUCTURES, ["ggn", "ef", "mc"], ["regression", "classification"])
)
def test_every_structure_and_curvature_trains(name: str, curvature: str, problem: str) -> None:
    data, widths, likelihood = {
        "regression": (sine(), (1, 5, 1), ntkl.Gaussian(1.0)),
        "classification": (classes(), (3, 4, 3), ntkl.Categorical()),
    }[problem]
    network = mlp(*widths)
    result = train(network, data, likelihood, structure=STRUCTURES[name], curvature=curvature, epochs=6,
                   schedule=ntkl.EvidenceSchedule(3, 10), batch_size=10)
    history = result.history
    assert history.evidence[0] > history.evidence_before[0] and history.evidence[-1] > history.evidence[0]
    # the posterior is that of the network as it was left
    assert result.posterior.structure == name
    torch.testing.assert_close(result.posterior.network.theta, flat(network))
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-9)


@quiet
@pytest.mark.parametrize("name", OPTIONS)
def test_forms_with_options(name: str) -> None:
    result = train(mlp(1, 5, 1), structure=OPTIONS[name])
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-9)


@pytest.mark.parametrize(
    ("groups", "structure", "count"),
    [("all", "gp", 1), ("layer", "kfac", 2), ("tensor", "full", 4), ("parameter", "diag", 16),
     ({"first": ["0"], "rest": ["2"]}, "ekfac", 2)],
)
def test_every_grouping(groups: Any, structure: str, count: int) -> None:
    network = mlp(1, 5, 1)
    prior = ntkl.GaussianPrior(2.0, mean=0.1, groups=groups)
    result = train(network, prior=prior, structure=structure)
    given, prior = prior, result.posterior.prior
    assert given is not prior and prior.groups == given.groups and len(prior.precision) == count
    assert sum(name.startswith("precision") for name in result.history.names) == count
    assert not torch.allclose(prior.precision, torch.tensor(2.0, dtype=F64))
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-9)


def test_the_loss_pulls_each_parameter_to_its_own_mean() -> None:
    """One SGD step is that of autograd on the log joint; precisions and means differ from parameter to parameter."""
    x, y = sine()
    network, twin = mlp(1, 3, 1), mlp(1, 3, 1)
    precision = torch.linspace(0.5, 3.0, 10, dtype=F64)
    mean = torch.linspace(-1.0, 1.0, 10, dtype=F64)
    prior = ntkl.GaussianPrior(precision, mean=mean, groups="parameter")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    train(network, (x, y), prior=prior, structure="diag", optimizer=optimizer, epochs=1, batch_size=None,
          schedule=ntkl.EvidenceSchedule(1, 0))
    theta = torch.cat([p.flatten() for p in twin.parameters()])
    loss = (twin(x) - y).square().sum() + 0.5 * (precision * (theta - mean).square()).sum()  # σ² = 0.5
    (loss / len(x)).backward()
    stepped = [p - 0.1 * p.grad for p in twin.parameters()]
    torch.testing.assert_close(flat(network), torch.cat([p.detach().flatten() for p in stepped]))


def test_a_weight_of_the_likelihood_leaves_learning_rates_their_size() -> None:
    """The loss of N examples that count w times each is divided by N w: the likelihood's share of a step stays."""
    x, y = sine()
    network, twin = mlp(1, 3, 1), mlp(1, 3, 1)
    train(network, (x, y), ntkl.Tempered(ntkl.Gaussian(0.5), 4.0), prior=ntkl.GaussianPrior(6.0), epochs=1,
          optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=None, schedule=ntkl.EvidenceSchedule(1, 0))
    loss = (twin(x) - y).square().mean() + 0.5 * 6.0 / (4 * len(x)) * sum(p.square().sum() for p in twin.parameters())
    loss.backward()
    stepped = [p - 0.1 * p.grad for p in twin.parameters()]
    torch.testing.assert_close(flat(network), torch.cat([p.detach().flatten() for p in stepped]))


@pytest.mark.parametrize("steps", [1, 3])
def test_hyperparameters_stay_within_their_bounds(steps: int) -> None:
    schedule = ntkl.EvidenceSchedule(1, steps, learning_rate=1.0, bounds=(0.9, 1.1))
    values = train(mlp(1, 5, 1), likelihood=ntkl.Gaussian(1.0), epochs=3, schedule=schedule).history.values
    for value in torch.tensor(values, dtype=F64).flatten().tolist():
        assert value == pytest.approx(0.9) or value == pytest.approx(1.1) or 0.9 < value < 1.1


@quiet
@pytest.mark.parametrize("curvature", ["ggn", "ef", "mc"])
@pytest.mark.parametrize("name", [*STRUCTURES, "damped"])
def test_gradients_in_noise_and_precision_are_finite_differences(name: str, curvature: str) -> None:
    structure = (STRUCTURES | OPTIONS)[name]
    prior, likelihood = ntkl.GaussianPrior(0.7, groups="layer"), ntkl.Gaussian(0.3)
    posterior = ntkl.laplace(mlp(1, 5, 1), sine(), likelihood, prior, structure, curvature)
    values = [posterior.prior.log_precision, posterior.likelihood.log_noise]
    gradients = torch.autograd.grad(posterior.log_marginal_likelihood(), values)
    for value, gradient in zip(values, gradients, strict=True):
        for i in range(value.numel()):
            found = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    value.view(-1)[i] += step
                found.append(posterior.log_marginal_likelihood().item())
                with torch.no_grad():
                    value.view(-1)[i] -= step
            assert gradient.view(-1)[i].item() == pytest.approx((found[0] - found[1]) / 2e-5, rel=2e-6, abs=1e-6)


@quiet
@pytest.mark.parametrize("name", [*STRUCTURES, "damped"])
def test_drawn_labels_move_with_their_noise(name: str) -> None:
    """Under the Monte-Carlo Fisher too, the slope in each noise is that of the evidence itself."""
    x = sine(9)[0] + 0.3  # not symmetric: INF has a kink where its diagonal is the exact one
    y = torch.cat([x.sin(), x.cos()], 1)
    for noise in (torch.tensor([0.3, 1.4]), torch.tensor([[0.5, 0.2], [0.2, 0.9]])):
        likelihood = ntkl.Gaussian(noise)
        posterior = ntkl.laplace(mlp(1, 3, 2), (x, y), likelihood, None, (STRUCTURES | OPTIONS)[name], "mc")
        likelihood = posterior.likelihood
        for correction in (False, True):
            value = posterior.log_marginal_likelihood(correction)
            for parameter, slope in zip(
                likelihood.parameters(), torch.autograd.grad(value, list(likelihood.parameters())), strict=True
            ):
                found = []
                for step in (1e-5, -2e-5):
                    with torch.no_grad():
                        parameter[0] += step
                    found.append(posterior.log_marginal_likelihood(correction).item())
                with torch.no_grad():
                    parameter[0] += 1e-5
                assert slope[0].item() == pytest.approx((found[0] - found[1]) / 2e-5, rel=2e-6, abs=1e-6)


@quiet
@pytest.mark.parametrize("name", ["kfac", "ekfac", "diag", "full"])
def test_hyperparameter_steps_read_the_data_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K steps cost algebra alone, with a noise among what moves, and with a temperature that does not."""
    counts = []

    class Counted(Dataset):
        def __init__(self, data: tuple[Tensor, Tensor]) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data[1])

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            counts.append(index)
            return self.data[0][index], self.data[1][index]

    for data, widths, likelihood in (
        (sine(), (1, 5, 1), ntkl.Gaussian(1.0)), (classes(), (3, 4, 3), ntkl.Categorical())
    ):
        read = []
        for steps in (1, 30):
            counts.clear()
            train(mlp(*widths), data, likelihood, structure=name, evidence_data=Counted(data), epochs=2,
                  schedule=ntkl.EvidenceSchedule(2, steps))
            read.append(len(counts))
        assert read[0] == read[1]


def test_a_temperature_moves_if_it_is_asked_for() -> None:
    likelihood = ntkl.Categorical()
    result = train(mlp(3, 4, 3), classes(), likelihood, structure="kfac",
                   schedule=ntkl.EvidenceSchedule(3, 4, hyperparameters=["precision", "temperature"]))
    assert result.history.names[-1] == "temperature" and result.posterior.likelihood.temperature.item() != 1.0
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-9)
    assert train(mlp(3, 4, 3), classes(), ntkl.Categorical()).history.names[-1] == "precision[2]"
    assert ntkl.EvidenceSchedule(hyperparameters="temperature").moving(likelihood) == ["temperature"]


# --- the best evidence, and when to stop


def test_the_best_evidence_is_kept() -> None:
    """A rate that blows up half way: everything is left where the evidence was best."""
    network, seen = mlp(1, 5, 1), {}

    def watch(state: ntkl.TrainingState) -> None:
        if state.posterior is not None:
            seen[state.epoch] = flat(state.network), state.posterior.prior.precision.detach().clone()
        if state.epoch == 8:
            for group in state.optimizer.param_groups:
                group["lr"] = 0.7

    likelihood = ntkl.Gaussian(0.5)
    result = train(network, likelihood=likelihood, structure="full", epochs=14, callbacks=watch)
    assert result.best_epoch == 8 < result.history.epochs[-1] == 14
    assert result.evidence == max(result.history.evidence)
    weights, precision = seen[8]
    assert torch.equal(flat(network), weights) and torch.equal(result.posterior.prior.precision, precision)
    torch.testing.assert_close(result.posterior.network.theta, weights)
    assert result.posterior.likelihood.noise.item() == pytest.approx(result.history.values[3][-1])
    assert likelihood.noise.item() == 0.5
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-10)


def test_patience() -> None:
    def blow_up(state: ntkl.TrainingState) -> None:
        if state.epoch == 4:
            state.optimizer.param_groups[0]["lr"] = 0.7

    result = train(mlp(1, 5, 1), epochs=60, callbacks=blow_up, schedule=ntkl.EvidenceSchedule(2, 4, patience=2))
    assert result.stopped == "no better evidence in 2 evaluations" and "no better" in str(result)
    assert result.history.epochs[-1] == len(result.history.loss) < 60
    assert result.history.waited == 2


def test_a_callback_may_stop() -> None:
    epochs = []

    def stop(state: ntkl.TrainingState) -> None:
        epochs.append((state.epoch, state.posterior is not None, state.network.training))
        if state.epoch == 3:
            state.stop("enough")

    result = train(mlp(1, 5, 1), epochs=50, callbacks=[stop])
    assert epochs == [(1, False, True), (2, True, True), (3, False, True)]
    assert result.stopped == "enough" and result.history.epochs == [2, 3]  # the last epoch counts too


def test_burn_in_and_the_last_epoch() -> None:
    result = train(mlp(1, 5, 1), epochs=7, schedule=ntkl.EvidenceSchedule(2, 1, burn_in=3))
    assert result.history.epochs == [4, 6, 7]
    result = train(mlp(1, 5, 1), epochs=7, schedule=ntkl.EvidenceSchedule(2, 1, burn_in=4))
    assert result.history.epochs == [6, 7]  # none in the last epoch of the burn-in either
    result = train(mlp(1, 5, 1), epochs=3, schedule=ntkl.EvidenceSchedule(5, 0))
    assert result.history.epochs == [3] and result.history.evidence == result.history.evidence_before


# --- modes, optimizers, schedulers


class Moody(nn.Module):
    """BatchNorm and dropout, and a record of the modes of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.last = nn.Linear(6, 3)
        self.calls: list[tuple[bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((self.training and self.norm.training and self.drop.training, len(x)))
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Overwriting(nn.Linear):
    """Writes into its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class Narrow(nn.Linear):
    """Computes in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).to(x)


class Elsewhere(nn.Module):
    """Reads its weights where they are not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.parts = [self.first, torch.tanh, self.last]
        self.read = dict(self.last.named_parameters())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.parts[1](self.first(x)), self.read["weight"], self.read["bias"])


def rows(n: int) -> Tensor:
    return torch.randn(n, 3, dtype=F64)


PROBED = [
    NetworkCase("writes into its inputs", lambda: (Overwriting(3, 2).double(), rows), 2),
    NetworkCase("reads elsewhere", lambda: (Elsewhere(), rows), 2),
    NetworkCase("constant rows", lambda: (
        nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2)).double(),
        lambda n: torch.randint(0, 5, (n, 2))), 2),
    NetworkCase("computes in 16 bits", lambda: (Narrow(3, 2).double(), rows), 2),
    *(NETWORKS[name] for name in (
        "cnn_float32", "cnn_groups", "decoder_dict", "embedding_bag", "gru", "norms", "resnet_batchnorm",
        "scalar_outputs", "transformer_tied")),
]


def probed(posterior: ntkl.Posterior) -> dict[str, Any]:
    """What the probe of a network found."""
    own = posterior.network
    return {"outputs": (own.num_outputs, own.scalar), "precision": own.precision, "follows": own.follows_values,
            "copies": own.caller.copies_inputs, "constant": sorted(own.constant_rows), "format": own.channels_last,
            "inputs": repr(own.input_format)}


@pytest.mark.parametrize("case", PROBED, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:no factor rule covers")
def test_an_evidence_with_the_plans_of_the_first_is_that_of_a_fit(case: NetworkCase) -> None:
    network, draw = case.build()
    x, y = draw(8), torch.randn(8, case.outputs, dtype=F64)
    evidences = []

    def compare(state: ntkl.TrainingState) -> None:
        found = state.posterior
        assert found is not None
        with in_mode(state.network, training=False):
            anew = ntkl.laplace(state.network, (x, y), found.likelihood, found.prior, "gp")
        assert probed(found) == probed(anew)
        evidences.append([float(one.log_marginal_likelihood()) for one in (found, anew)])

    schedule = ntkl.EvidenceSchedule(1, 2)
    train(network, (x, y), ntkl.Gaussian(0.5), structure="gp", epochs=2, schedule=schedule, callbacks=compare)
    assert len(evidences) == 2
    for evidence, expected in evidences:
        assert evidence == pytest.approx(expected, rel=1e-9 if case.dtype == F64 else 1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_right_at_every_step(training: bool) -> None:
    network = Moody().double().train(training)
    network.drop.eval()  # the caller's own mixture comes back
    before = [module.training for module in network.modules()]
    moments = []
    result = train(network, classes(), ntkl.Categorical(), batch_size=10, epochs=4,
                   callbacks=lambda state: moments.append(network.norm.running_mean.clone()))
    assert [module.training for module in network.modules()] == before
    assert [mode for mode, _ in network.calls] == [True] * 12  # the evidence runs a copy
    assert not any(module.training for module in result.posterior.network.module.modules())
    assert not torch.equal(moments[0], moments[1])  # BatchNorm learned
    best = result.best_epoch - 1
    assert torch.equal(network.norm.running_mean, moments[best])  # and was left as at the best evidence
    assert torch.equal(result.posterior.network.module.norm.running_mean, moments[best])
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize(
    "make",
    [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.LBFGS,
     lambda p, **kw: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)],
)
def test_any_optimizer(make: Callable[..., torch.optim.Optimizer]) -> None:
    options = {"weight_decay": 0.0} if make is torch.optim.AdamW else {}
    network = mlp(1, 5, 1)
    result = train(network, optimizer=lambda p: make(p, **options), epochs=8, batch_size=None)
    assert result.history.loss[-1] < result.history.loss[0]
    given = make(mlp(1, 5, 1).parameters(), **options)
    network = nn.Sequential(nn.Linear(1, 1)).double()
    with pytest.raises(ntkl.UnsupportedError, match="all the network's parameters"):
        train(network, optimizer=given)


def test_schedulers_step_by_epoch_or_by_batch() -> None:
    rates: dict[str, list[float]] = {"epoch": [], "batch": []}
    for interval, found in rates.items():
        train(mlp(1, 5, 1), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5), batch_size=8,
              scheduler_interval=interval, epochs=3,
              callbacks=lambda state, found=found: found.append(state.optimizer.param_groups[0]["lr"]))
    assert rates["epoch"] == pytest.approx([0.005, 0.0025, 0.00125])
    assert rates["batch"] == pytest.approx([0.01 / 2**3, 0.01 / 2**6, 0.01 / 2**9])
    network = mlp(1, 5, 1)
    optimizer = adam(network.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
    train(network, optimizer=optimizer, scheduler=plateau, epochs=3)
    assert optimizer.param_groups[0]["lr"] < 0.01


def test_frozen_parameters_stay() -> None:
    network = mlp(1, 5, 1)
    network[0].requires_grad_(False)
    before = flat(network[0])
    result = train(network)
    assert torch.equal(flat(network[0]), before) and result.posterior.num_parameters == 6
    assert result.history.names == ["precision[2]", "noise"]


def test_gradients_can_be_clipped() -> None:
    norms = []

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = optimizer.param_groups[0]["params"]
        nn.utils.clip_grad_norm_(weights, 1e-3)
        norms.append(float(torch.cat([p.grad.flatten() for p in weights]).norm()))

    network = mlp(1, 5, 1)
    optimizer = adam(network.parameters())
    optimizer.register_step_pre_hook(clip)
    train(network, optimizer=optimizer)
    assert norms and max(norms) <= 1.001e-3


# --- augmentation


@quiet
@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_weight_of_three_is_the_data_three_times(name: str, curvature: str) -> None:
    for (x, y), widths, likelihood in (
        (sine(10), (1, 3, 1), ntkl.Gaussian(0.3)), (classes(12), (3, 2, 3), ntkl.Categorical(1.5))
    ):
        network, structure = mlp(*widths), STRUCTURES[name]
        thrice = ntkl.laplace(network, (torch.cat([x] * 3), torch.cat([y] * 3)), likelihood, None, structure, curvature)
        once = ntkl.laplace(network, (x, y), ntkl.Tempered(likelihood, 3), None, structure, curvature)
        expected = thrice.log_marginal_likelihood().item()
        assert once.log_marginal_likelihood().item() == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(once.latent_moments(x)[1], thrice.latent_moments(x)[1], rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(once.predict(x, "map").mean, thrice.predict(x, "map").mean)
        for score in ("bic", "aic"):
            assert getattr(once, score)().item() == pytest.approx(getattr(thrice, score)().item(), rel=1e-10)


class Jittered(Dataset):
    """Inputs with noise from every random source an augmentation may use."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(1).double() + random.gauss(0, 1) + np.random.randn()  # noqa: NPY002
        return self.data[0][index] + 0.05 * noise, self.data[1][index]


def test_augmentation() -> None:
    data, likelihood = sine(), ntkl.Gaussian(0.5)
    network = mlp(1, 5, 1)
    result = train(network, Jittered(data), ntkl.Tempered(likelihood, 4.0), evidence_data=data, batch_size=8)
    posterior = result.posterior
    torch.testing.assert_close(posterior.f, network(data[0]).detach())  # the evidence reads the clean data
    assert likelihood.noise.item() == 0.5 and posterior.likelihood.likelihood.noise.item() != 0.5
    assert result.history.names[-1] == "noise"
    repeated = ntkl.laplace(network, (data[0].repeat(4, 1), data[1].repeat(4, 1)),
                           posterior.likelihood.likelihood, posterior.prior, "gp")
    exact = ntkl.laplace(network, data, posterior.likelihood, posterior.prior, "gp")
    expected = repeated.log_marginal_likelihood().item()
    assert exact.log_marginal_likelihood().item() == pytest.approx(expected, rel=1e-10)


# --- the path to predictions

doubtful = pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")


def predicted(network: nn.Module, **options: Any) -> ntkl.EvidenceTraining:
    """The shortest call: network, data, likelihood, epochs."""
    options = {"epochs": 40, "predictive": "loo"} | options
    return ntkl.train_with_evidence(network, sine(), ntkl.Gaussian(0.5), **options)


@pytest.mark.slow
@doubtful
def test_a_predictive_ends_at_an_optimum_with_an_exact_posterior() -> None:
    network = mlp(1, 5, 1)
    result = predicted(network)
    posterior = result.posterior
    assert posterior.structure == "full" and "auto" in posterior.reason and posterior.fitted.exact  # P < N
    assert newton_decrement(posterior.fitted) <= 0.02
    assert torch.equal(flat(network), posterior.network.theta) and all(p.grad is None for p in network.parameters())
    assert posterior.predictive is not None and result.predictive.calibration == posterior.predictive
    assert str(result.predictive) in str(result)
    again = copy.deepcopy(posterior)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert again.fit_predictive("loo", strict=False).calibration == posterior.predictive
    before = predicted(mlp(1, 5, 1), predictive=None, schedule=ntkl.EvidenceSchedule(4, 20))
    assert before.history == result.history and before.predictive is None and before.posterior.predictive is None
    x, y = sine()
    noise = result.posterior.likelihood.noise.item()

    def joint(p: ntkl.Posterior) -> float:
        precision, theta = p.prior.flat_precision().detach(), p.network.theta
        return ((p.network.module(x) - y).square().sum() / noise + precision @ theta.square()).item()

    assert joint(posterior) < joint(before.posterior)  # of the same hyperparameters


def test_epochs_after_a_callback_that_evaluates_run_in_train_mode() -> None:
    modes = []

    def look(seen: ntkl.TrainingState) -> None:
        modes.append(all(module.training for module in seen.network.modules()))
        seen.network.eval()

    network = nn.Sequential(nn.Linear(1, 5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 1)).double()
    train(network, epochs=4, callbacks=look)
    assert modes == [True] * 4 and network.training


@doubtful
def test_an_optimum_that_was_not_reached_names_what_takes_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_STEPS", 1)
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"not at its optimum .*; in Python, call posterior.retrain\("):
        found = predicted(mlp(1, 5, 1), epochs=4).posterior
    retrained = found.retrain(sine(), evidence_steps=0, predictive=None)
    assert newton_decrement(found.fitted) > 0.02 >= newton_decrement(retrained.fitted)


def test_auto_is_judged_by_all_examples_and_not_by_two() -> None:
    """Function space is the cheaper one for two examples, and does not fit for all; weight space does."""
    result = train(mlp(1, 5, 1), structure="auto", data=sine(200), settings=ntkl.Settings(memory_budget=60_000))
    assert result.posterior.structure == "full"
    with pytest.raises(ntkl.MemoryBudgetError, match=r"for 200 examples to fit .*'full' .* and 'gp' "):
        train(mlp(1, 5, 1), structure="auto", data=sine(200), settings=ntkl.Settings(memory_budget=3_000))


@pytest.mark.slow
@doubtful
def test_an_exact_structure_of_the_training_stays() -> None:
    result = predicted(mlp(1, 5, 1), structure="gp", epochs=10)
    assert result.posterior.structure == "gp" and result.predictive is not None
    drawn = predicted(mlp(1, 5, 1), structure="full", curvature="ef", epochs=10)
    assert drawn.posterior.curvature_type.kind == "ggn"


def test_without_memory_for_an_exact_posterior_the_training_structure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise ntkl.MemoryBudgetError("matrices to fit", "more", "Use KFAC.")

    monkeypatch.setattr(ntkl.FullWeightSpace, "check_memory", refused)
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"no predictive is fitted.* call posterior.calibrate"):
        result = predicted(mlp(1, 5, 1), epochs=10)
    assert result.posterior.structure == "kfac" and result.predictive is None
    assert "there is no exact one: expected matrices to fit" in result.posterior.reason


@pytest.mark.slow
def test_the_default_optimizer_is_adam_with_a_cosine() -> None:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    networks = [mlp(1, 5, 1) for _ in range(4)]
    step, own_adam = torch.optim.lr_scheduler.StepLR, partial(torch.optim.Adam, lr=0.02, fused=True)
    options: list[dict[str, Any]] = [
        {}, {"optimizer": own_adam, "scheduler": lambda o: cosine(o, 8)},
        {"scheduler": lambda o: step(o, 2)}, {"optimizer": own_adam, "scheduler": lambda o: step(o, 2)},
    ]
    for network, own in zip(networks, options, strict=True):
        predicted(network, epochs=8, predictive=None, **own)
    assert torch.equal(flat(networks[0]), flat(networks[1])) and torch.equal(flat(networks[2]), flat(networks[3]))
    assert not torch.equal(flat(networks[0]), flat(networks[2]))


def test_the_default_learning_rate_is_not_resumed_over_other_epochs() -> None:
    with pytest.raises(ntkl.TrainingInterrupted) as caught:
        predicted(mlp(1, 5, 1), callbacks=interrupted, epochs=8)
    with pytest.raises(ntkl.UnsupportedError, match=r"learning rate of the interrupted training, to 0 over 8 epochs"):
        predicted(mlp(1, 5, 1), epochs=9, settings=ntkl.Settings(resume=caught.value.state),
                  schedule=ntkl.EvidenceSchedule(1, 20))


@pytest.mark.slow
@doubtful
def test_an_interruption_on_the_way_to_the_optimum_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, network, fresh = mlp(1, 5, 1), mlp(1, 5, 1), mlp(1, 5, 1, seed=7)
    options: dict[str, Any] = {"epochs": 12, "schedule": ntkl.EvidenceSchedule(4, 5)}
    expected = predicted(whole, **options)
    with monkeypatch.context() as patch, pytest.raises(ntkl.TrainingInterrupted, match="12 of 12 epochs") as caught:
        patch.setattr(Descent, "advance", lambda *_: interrupted_now())
        predicted(network, **options)
    best = predicted(mlp(1, 5, 1), predictive=None, **options)
    assert torch.equal(flat(network), best.posterior.network.theta)  # left at the best evidence
    result = predicted(fresh, settings=ntkl.Settings(resume=caught.value.state), **options)
    assert torch.equal(flat(fresh), flat(whole)) and str(result.predictive) == str(expected.predictive)


def interrupted_now() -> None:
    raise KeyboardInterrupt


def test_a_predictive_that_is_not_known() -> None:
    with pytest.raises(ntkl.UnsupportedError, match='predictive="loo" or None'):
        predicted(mlp(1, 5, 1), predictive="validation")


# --- interruption and resuming


def trainings(network: nn.Module, kind: str) -> dict[str, Any]:
    """Arguments of trainings with much state: momentum, schedulers, loaders with generators, dropout, augmentation."""
    common: dict[str, Any] = {"schedule": ntkl.EvidenceSchedule(2, 3), "epochs": 7}
    if kind == "subset":
        return trainings(network, "tensors") | {"evidence": "subset", "examples": 5}
    if kind == "tensors":
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR
        return common | {"data": sine(), "likelihood": ntkl.Gaussian(0.5), "batch_size": 8,
                         "scheduler": lambda o: cosine(o, 7)}
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Jittered(classes()), batch_size=10, shuffle=True, generator=generator)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    return common | {
        "data": loader, "likelihood": ntkl.Categorical(), "evidence_data": classes(), "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
    }


def interrupted(state: ntkl.TrainingState) -> None:
    if state.epoch == 5:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where"), [("tensors", "file"), ("loader", "state"), ("loader", "file"), ("subset", "state")]
)
def test_resuming_is_bit_for_bit(kind: str, where: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(tuning, "SNAPSHOT_SHARE", 0)

    def start() -> nn.Module:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        return Moody().double() if kind == "loader" else mlp(1, 5, 1, seed=3)

    whole = start()
    expected = train(whole, **trainings(whole, kind))
    network = start()
    path = tmp_path / "training.pt"
    with pytest.raises(ntkl.TrainingInterrupted, match="interrupted after 4 of 7 epochs") as caught:
        train(network, callbacks=interrupted, settings=ntkl.Settings(checkpoint=path), **trainings(network, kind))
    assert torch.load(path, weights_only=True)["format"] == "ntk_laplace training"
    torch.manual_seed(99)
    fresh = Moody().double() if kind == "loader" else mlp(1, 5, 1, seed=77)
    resume = caught.value.state if where == "state" else path
    result = train(fresh, settings=ntkl.Settings(resume=resume), **trainings(fresh, kind))
    assert result.history == expected.history
    for ours, theirs in zip(fresh.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(result.posterior.prior.log_precision, expected.posterior.prior.log_precision)
    assert torch.equal(torch.rand(3), torch.rand(3)) is False  # the stream goes on


def test_an_interruption_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    network, prior, at_four = mlp(1, 5, 1), ntkl.GaussianPrior(groups="layer"), []

    def watch(state: ntkl.TrainingState) -> None:
        if state.epoch == 4:
            at_four.append(flat(network))
        interrupted(state)

    network.eval()
    with pytest.raises(KeyboardInterrupt) as caught:
        train(network, prior=prior, callbacks=watch)
    assert torch.equal(flat(network), at_four[0]) and not network.training
    posterior = ntkl.laplace(network, sine(), ntkl.Gaussian(0.5), prior, "kfac")
    assert posterior.log_marginal_likelihood().isfinite()
    with pytest.raises(ntkl.UnsupportedError, match="structure of the interrupted training"):
        train(mlp(1, 5, 1), structure="diag", settings=ntkl.Settings(resume=caught.value.state))
    with pytest.raises(ntkl.UnsupportedError, match="frequency of the interrupted"):
        train(mlp(1, 5, 1), schedule=ntkl.EvidenceSchedule(3, 4), settings=ntkl.Settings(resume=caught.value.state))
    with pytest.raises(ntkl.UnsupportedError, match="parameters of the interrupted"):
        train(mlp(1, 6, 1), settings=ntkl.Settings(resume=caught.value.state))


CHANGED: dict[str, dict[str, Any]] = {
    "prior mean": {"prior": ntkl.GaussianPrior(mean=0.5, groups="layer")},
    "prior groups": {"prior": ntkl.GaussianPrior()},
    "likelihood": {"likelihood": ntkl.Tempered(ntkl.Gaussian(0.5), 2.0)},
    "number of examples": {"data": sine(20)},
    "batch size": {"batch_size": 8},
    "optimizer": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)},
    "scheduler": {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1)},
    "curvature": {"curvature": "ef"},
    "steps": {"schedule": ntkl.EvidenceSchedule(2, 5)},
    "dtype": {"dtype": torch.float32},
    "evidence": {"evidence": "subset", "examples": 4},
}


def test_what_changed_is_not_resumed() -> None:
    with pytest.raises(ntkl.TrainingInterrupted) as caught:
        train(mlp(1, 5, 1), callbacks=interrupted)
    for what, changed in CHANGED.items():
        with pytest.raises(ntkl.UnsupportedError, match=f"to resume with the {what} of the interrupted training"):
            train(mlp(1, 5, 1), settings=ntkl.Settings(resume=copy.deepcopy(caught.value.state)), **changed)
    narrow, (x, y) = mlp(1, 5, 1).float(), sine()
    with pytest.raises(ntkl.UnsupportedError, match=r"parameters of the .*float64 5x1.*got 0.weight: float32 5x1"):
        train(narrow, (x.float(), y.float()), settings=ntkl.Settings(resume=caught.value.state))


def odd(kind: str) -> dict[str, Any]:
    """A state that torch casts, a sampler with a generator of its own, deep inside, and a scheduler with an end."""
    def sampled() -> DataLoader:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(TensorDataset(*sine()), batch_sampler=BatchSampler(
            RandomSampler(range(24), generator=generator), 7, drop_last=False))

    cycle = torch.optim.lr_scheduler.OneCycleLR
    return {
        "data": sampled() if kind == "sampler" else sine(), "batch_size": 8, "evidence_data": sine(), "epochs": 7,
        "optimizer": (lambda p: torch.optim.NAdam(p, lr=0.01)) if kind == "nadam" else adam,
        "scheduler": (lambda o: cycle(o, 0.05, total_steps=21)) if kind == "cycle" else None,
        "scheduler_interval": "batch",
    }


@pytest.mark.parametrize(("kind", "moment"), [
    ("nadam", "hyperparameters"), ("sampler", "batch"), ("sampler", "hyperparameters"), ("cycle", "batch"),
])
def test_an_interruption_in_the_middle_of_things(kind: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(tuning, "SNAPSHOT_SHARE", 0)
    whole = mlp(1, 5, 1)
    expected = train(whole, **odd(kind))
    where = (Variables, "evidence_and_gradient", 6) if moment == "hyperparameters" else (Objective, "gradient", 16)
    own, count = getattr(where[0], where[1]), []

    def stops(*arguments: Any) -> Any:
        count.append(1)
        if len(count) == where[2]:
            raise KeyboardInterrupt
        return own(*arguments)

    with monkeypatch.context() as patch, pytest.raises(ntkl.TrainingInterrupted) as caught:
        patch.setattr(*where[:2], stops)
        train(mlp(1, 5, 1), **odd(kind))
    network = mlp(1, 5, 1, seed=8)
    result = train(network, settings=ntkl.Settings(resume=caught.value.state), **odd(kind))
    assert result.history == expected.history and torch.equal(flat(network), flat(whole))


def test_what_is_no_checkpoint(tmp_path) -> None:
    for content in (b"", b"nothing"):
        (tmp_path / "bad.pt").write_bytes(content)
        with pytest.raises(ntkl.DataError, match="checkpoint of a training"):
            train(mlp(1, 5, 1), settings=ntkl.Settings(resume=tmp_path / "bad.pt"))
    with pytest.raises(ntkl.DataError, match="no such file"):
        train(mlp(1, 5, 1), settings=ntkl.Settings(resume=tmp_path / "none.pt"))
    torch.save({"weights": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ntkl.DataError, match=r"checkpoint of a training at .*other\.pt; got another file"):
        train(mlp(1, 5, 1), settings=ntkl.Settings(resume=tmp_path / "other.pt"))
    with pytest.raises(ntkl.DataError, match="the state of an interrupted training"):
        train(mlp(1, 5, 1), settings=ntkl.Settings(resume={"weights": torch.ones(1)}))
    with pytest.raises(ntkl.DataError, match="version 1 or older; got version 2"):
        run.FORMAT.state(run.FORMAT.header | {"version": 2}, torch.device("cpu"), "training")
    random_sources = random_state(torch.device("cpu"), [torch.Generator()])
    with pytest.raises(ntkl.UnsupportedError, match="data with 1 random generators, as before; got 0"):
        load_random(random_sources, torch.device("cpu"), [])


def test_training_continues_after_its_end(tmp_path) -> None:
    path, schedule = tmp_path / "training.pt", ntkl.EvidenceSchedule(2, 3)
    torch.manual_seed(0)
    whole = mlp(1, 5, 1)
    expected = train(whole, epochs=8, batch_size=8, schedule=schedule)
    network = mlp(1, 5, 1)
    train(network, epochs=4, batch_size=8, schedule=schedule, settings=ntkl.Settings(checkpoint=path))
    network = mlp(1, 5, 1, seed=5)
    result = train(network, epochs=8, batch_size=8, schedule=schedule, settings=ntkl.Settings(resume=path))
    assert result.history == expected.history and torch.equal(flat(network), flat(whole))


# --- what people see, and bad input


def test_a_history_for_people() -> None:
    history = train(mlp(1, 5, 1)).history
    frame = history.to_dataframe()
    assert list(frame.columns) == [
        "epoch", "evidence", "evidence_before", "loss", "precision[0]", "precision[2]", "noise"
    ]
    assert list(frame["epoch"]) == [2, 4, 6] and frame["loss"].iloc[-1] == history.loss[-1] and len(history.loss) == 6
    assert json.loads(json.dumps(history.to_dict()))["epochs"] == [2, 4, 6]
    top, bottom = history.plot().axes
    assert len(top.get_lines()) == 3 and len(bottom.get_lines()) == 3 and bottom.get_xlabel() == "epoch"


def test_the_bar_names_the_evidence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    train(mlp(1, 5, 1), settings=ntkl.Settings(progress=True))
    shown = capsys.readouterr().err
    assert "epoch 6" in shown and "nats" in shown


def test_the_loss_is_the_log_joint() -> None:
    """With steps of length zero nothing moves: the loss is the negative log joint of the posterior."""
    result = train(mlp(1, 5, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.0), epochs=1, batch_size=6,
                   schedule=ntkl.EvidenceSchedule(1, 0))
    assert result.history.loss[0] == pytest.approx(-result.posterior.log_joint().item(), rel=1e-12)


def test_the_loss_of_a_closure_is_what_the_minibatch_saw_first() -> None:
    """Before L-BFGS moved; the prior's part is that at the epoch's end."""
    seen = []
    for make in (lambda p: torch.optim.SGD(p, lr=0.0), torch.optim.LBFGS):
        result = train(mlp(1, 5, 1), optimizer=make, epochs=1, batch_size=None, schedule=ntkl.EvidenceSchedule(1, 0))
        seen.append(result.history.loss[0] - result.posterior.prior.energy(result.posterior.network.theta).item())
    assert seen[0] == pytest.approx(seen[1], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer": "adam"}, ntkl.UnsupportedError, "an optimizer, or what makes one"),
        ({"optimizer": lambda p: None}, ntkl.UnsupportedError, "a callable that returns a torch.optim.Optimizer"),
        ({"optimizer": torch.optim.AdamW}, ntkl.HyperparameterError, "without weight decay"),
        ({"optimizer": lambda p: torch.optim.Adam(list(p)[:2])}, ntkl.UnsupportedError, "one without 2.weight, 2.bias"),
        ({"epochs": 0}, ntkl.HyperparameterError, "at least one epoch"),
        ({"batch_size": 0}, ntkl.DataError, "at once; got 0. Pass None, or leave it out for the default."),
        ({"structure": "kron"}, ntkl.UnsupportedError, "structure among"),
        ({"curvature": "hessian"}, ntkl.UnsupportedError, "curvature among"),
        ({"scheduler": 3}, ntkl.UnsupportedError, "a learning rate scheduler"),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.ConstantLR(adam([torch.zeros(1, requires_grad=True)]))},
         ntkl.UnsupportedError, "a scheduler of this training's optimizer"),
        ({"scheduler_interval": "step"}, ntkl.UnsupportedError, 'interval "epoch" or "batch"'),
        ({"data": torch.zeros(3)}, ntkl.DataError, "data as a DataLoader"),
        ({"data": (torch.zeros(3, 1), torch.zeros(2))}, ntkl.DataError, "as many targets as inputs"),
        ({"data": DataLoader(TensorDataset(*sine()), batch_size=7, drop_last=True)}, ntkl.DataError, "drops 3 exa"),
        ({"prior": 3.0}, ntkl.UnsupportedError, "a prior object; got 3.0"),
        ({"schedule": 3}, ntkl.UnsupportedError, "an EvidenceSchedule; got 3"),
        ({"callbacks": [3]}, ntkl.UnsupportedError, "a callable, or a sequence of them, as callbacks"),
        ({"epochs": True}, ntkl.HyperparameterError, "at least one epoch"),
        ({"likelihood": "gaussian"}, ntkl.UnsupportedError, "a likelihood object"),
        ({"likelihood": ntkl.Gaussian(torch.ones(24))}, ntkl.UnsupportedError, "the same for every example"),
        ({"likelihood": ntkl.Categorical()}, ntkl.NetworkError, "one output per class"),
        ({"schedule": ntkl.EvidenceSchedule(hyperparameters="temperature")}, ntkl.HyperparameterError, "among prec"),
        ({"batch_size": True}, ntkl.DataError, "a batch size of at least 1"),
        ({"dtype": torch.float16}, ntkl.UnsupportedError, "torch.float64 or torch.float32"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, ntkl.UnsupportedError, r"'StepLR': .*step_size"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau, "scheduler_interval": "batch"},
         ntkl.UnsupportedError, '"batch" for ReduceLROnPlateau'),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5)},
         ntkl.UnsupportedError, "at least 6 steps.*one of 5"),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=17), "batch_size": 8,
          "scheduler_interval": "batch"}, ntkl.UnsupportedError, "at least 18 steps.*one of 17"),
        ({"settings": ntkl.Settings(checkpoint="/no/such/folder/x.pt")}, ntkl.DataError, "existing, writable folder"),
        ({"settings": ntkl.Settings(checkpoint="/")}, ntkl.DataError, "existing, writable folder"),
        ({"settings": ntkl.Settings(checkpoint=5)}, ntkl.DataError, "a path as checkpoint; got 5"),
        ({"settings": ntkl.Settings(memory_budget=9000), "structure": "gp", "data": sine(40)},
         ntkl.MemoryBudgetError, r"N = 40, C = 1"),
        ({"settings": ntkl.Settings(memory_budget=100), "structure": "full"}, ntkl.MemoryBudgetError, "16 x 16"),
        ({"prior": ntkl.GaussianPrior(groups="parameter")}, ntkl.HyperparameterError, "one prior precision per layer"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], words: str) -> None:
    network, epochs = mlp(1, 5, 1), []
    with pytest.raises(error, match=words):
        train(network, **({"callbacks": epochs.append} | options))
    assert all(module.training for module in network.modules()) and not epochs  # before anything was trained


def test_sparse_gradients_are_refused() -> None:
    """torch's own error was "add(sparse, dense) is not supported"."""
    network = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten(), nn.Linear(4, 1)).double()
    data = torch.arange(6).view(3, 2) % 5, torch.zeros(3, 1).double()
    with refused(ntkl.UnsupportedError, "dense gradients", "'0' with sparse=True", "attribute sparse to False"):
        train(network, data=data)
    network[0].sparse = False
    train(network, data=data, epochs=1)


def test_a_loss_that_diverges_raises_an_error() -> None:
    with pytest.raises(ntkl.NonFiniteError, match=r"training loss; got (nan|inf)"):
        train(mlp(1, 5, 1), optimizer=lambda p: torch.optim.SGD(p, lr=1e200))


def test_minibatches_are_of_nearly_equal_size() -> None:
    sizes = [len(y) for _, y, _ in Minibatches(sine(), 10, torch.device("cpu"), DOUBLE)]
    assert sizes == [8, 8, 8]  # not 10, 10, 4: each step's gradient counts alike
    for batch_size, count in ((10, 3), (24, 1), (100, 1), (None, 1), (7, 4)):
        batches = Minibatches(sine(), batch_size, torch.device("cpu"), DOUBLE)
        assert batches.count == len(list(batches)) == count


def test_a_dataset_is_shuffled_and_a_loader_that_drops_nothing_is_whole() -> None:
    dataset = TensorDataset(torch.arange(24.0).unsqueeze(1), torch.zeros(24, 1))
    batches = Minibatches(dataset, 24, torch.device("cpu"), DOUBLE)
    first, second = (next(iter(batches))[0].flatten() for _ in range(2))
    assert not torch.equal(first, second) and torch.equal(first.sort().values, second.sort().values)
    loader = DataLoader(dataset, 8, drop_last=True)
    assert count_examples(loader, Batches(loader, None, torch.device("cpu"), DOUBLE)) == 24


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return zip(*sine(), strict=True)


def test_a_stream_is_trained_on_as_its_examples_are() -> None:
    """Neither the stream nor its loader has a length."""
    ends = []
    for data in (Stream(), DataLoader(Stream(), batch_size=7), DataLoader(TensorDataset(*sine()), batch_size=7)):
        network = mlp(1, 3, 1)
        found = ntkl.train_with_evidence(network, data, ntkl.Gaussian(), epochs=2, batch_size=7)
        ends.append((found.posterior.num_examples, nn.utils.parameters_to_vector(network.parameters())))
    assert [count for count, _ in ends] == [24, 24, 24]
    assert all(torch.equal(theta, ends[2][1]) for _, theta in ends)
    with refused(ntkl.DataError, "batch size for an IterableDataset", "None", "Pass a number, or leave it out"):
        ntkl.train_with_evidence(mlp(1, 3, 1), Stream(), ntkl.Gaussian(), epochs=2, batch_size=None)


def test_a_schedulers_end_counts_the_steps_it_has_taken() -> None:
    scheduler = SimpleNamespace(total_steps=30, last_epoch=12)
    for by_batch, epochs, enough in ((True, 10, True), (True, 11, False), (False, 22, True), (False, 23, False)):
        run = SimpleNamespace(scheduler=scheduler, minibatches=SimpleNamespace(count=3), by_batch=by_batch, epoch=4)
        with nullcontext() if enough else pytest.raises(ntkl.UnsupportedError, match="a scheduler of at least 3"):
            _require_length(run, epochs)


def test_a_weight_that_the_outputs_do_not_use_is_pulled_to_its_mean_too() -> None:
    network = mlp(1, 3, 1)
    network.spare = nn.Parameter(torch.ones(2).double())
    prior = ntkl.GaussianPrior(3.0, mean=0.5).bind({name: p.shape for name, p in network.named_parameters()})
    network.forward = lambda x: nn.Sequential.forward(network[:3], x)
    objective = Objective(Caller(network), ntkl.Gaussian(), prior, 24, 1)
    objective.settle()
    objective.gradient(*sine())
    torch.testing.assert_close(network.spare.grad, torch.full((2,), 3.0 * 0.5 / 24).double())


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    schedule = ntkl.EvidenceSchedule(np.int64(2), np.int64(4), learning_rate=np.float32(0.1))
    result = train(mlp(1, 5, 1), epochs=np.int64(3), batch_size=np.int64(8), schedule=schedule)
    assert result.history.epochs == [2, 3]


def test_bad_schedules_and_weights() -> None:
    for name, value in (("frequency", 0), ("steps", -1), ("burn_in", 1.5), ("patience", 0), ("learning_rate", 0.0),
                        ("learning_rate", "a"), ("bounds", (1.0, 0.1)), ("bounds", 3), ("bounds", ("a", 1)),
                        ("frequency", True), ("hyperparameters", []), ("hyperparameters", 5),
                        ("hyperparameters", [3])):
        with pytest.raises(ntkl.HyperparameterError):
            ntkl.EvidenceSchedule(**{name: value})
    for weight in (0, -1.0, float("inf"), "5"):
        with pytest.raises(ntkl.HyperparameterError, match="positive finite weight"):
            ntkl.Tempered(ntkl.Categorical(), weight)
    x, y = torch.randn(4, 1).double(), torch.randn(4, 1).double()
    with pytest.raises(ntkl.DataError, match="at least is positive, to train with; got zeros alone"):
        ntkl.train_with_evidence(mlp(1, 3, 1), (x, y, torch.zeros(4)), ntkl.Gaussian(), epochs=2)
    with pytest.raises(ntkl.UnsupportedError, match="not tempered yet"):
        ntkl.Tempered(ntkl.Tempered(ntkl.Categorical(), 2), 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
def test_an_optimum_that_costs_evidence_is_told() -> None:
    """A heteroscedastic network of 503 weights and 20 points: its variances collapse on the way to the optimum."""
    torch.manual_seed(0)
    x = torch.randn(20, 2).double()
    y = (x[:, :1].sin() + torch.exp(0.8 * x[:, 1:] - 1) * torch.randn(20, 1)).double()
    network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    options = {"epochs": 20, "batch_size": None}
    words = "lowered the evidence from .* to .* nats; in Python, predictive=None ends"
    with pytest.warns(ntkl.NTKLaplaceWarning, match=words):
        found = ntkl.train_with_evidence(network, (x, y), ntkl.HeteroscedasticGaussian(),
                                         ntkl.GaussianPrior(0.1, groups="layer"), predictive="loo", **options)
    own = found.posterior.log_marginal_likelihood().item()
    assert f"evidence {own:.4f} nats of the posterior" in str(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
def test_noise_that_is_too_large_at_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps leave the noise of a clean sine near its start; the optimum of the weights does not mend it."""
    monkeypatch.setattr(tuning, "RETRAINING_STEPS", 200)
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40).double()[:, None]
    data, prior = (x, (2 * x).sin()), ntkl.GaussianPrior(0.01)
    options = {"epochs": 60, "batch_size": None, "predictive": "loo"}
    with pytest.warns(ntkl.NTKLaplaceWarning, match="the slope is -.*; train for more epochs, or in Python call"):
        posterior = ntkl.train_with_evidence(mlp(1, 8, 1), data, ntkl.Gaussian(0.3), prior, **options,
                                             schedule=ntkl.EvidenceSchedule(30, 1)).posterior
    better = posterior.retrain(data)
    assert better.log_marginal_likelihood() > posterior.log_marginal_likelihood() + 10
    noise = float(better.likelihood.noise)
    schedule = ntkl.EvidenceSchedule(30, 1, hyperparameters=["precision"])
    for chosen in (ntkl.Gaussian(noise), ntkl.Gaussian(0.3)):  # the first is right, the second the caller's own wish
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ntkl.train_with_evidence(mlp(1, 8, 1), data, chosen, prior, **options, schedule=schedule)
        assert not [one for one in told if "the slope is" in str(one.message)]
    words = "the slope is .*; standardize the targets, or start from a noise of about their variance"
    with pytest.warns(ntkl.NTKLaplaceWarning, match=words):
        ntkl.train_with_evidence(mlp(1, 8, 1), (x, 1000 * (2 * x).sin()), ntkl.Gaussian(0.3), prior, **options)
