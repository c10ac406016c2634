"""The evidence in trainings of Lightning and transformers: its value, the best weights, a training left as it was."""

from __future__ import annotations

import copy
import importlib
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace.tools.callbacks import EvidenceTracker
from packages import OnUse

trainers = OnUse("trainers")

# what the trainers say of loggers, workers and other packages
pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings("ignore", "error::ntk_laplace.errors.NTKLaplaceWarning")
]

NOISE, PRECISION = 0.1, 2.0


def likelihood() -> ntkl.Gaussian:
    return ntkl.Gaussian(NOISE)


def dense_evidence(network: nn.Module) -> float:
    """The log density of y under the linearized model's normalizer: from the dense Jacobian by autograd."""
    x, y = trainers.data()
    named = dict(network.named_parameters())

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(network, parameters, (x,)).flatten()

    jacobian = torch.cat([part.flatten(1) for part in torch.func.jacrev(outputs)(named).values()], 1)
    theta = torch.cat([value.detach().flatten() for value in named.values()])
    kernel = torch.eye(len(y)).double() + jacobian @ jacobian.T / (PRECISION * NOISE)
    error = y.flatten() - outputs(named).detach()
    fit = -0.5 * (error**2).sum() / NOISE - 0.5 * len(y) * math.log(2 * math.pi * NOISE)
    return float(fit - 0.5 * PRECISION * theta @ theta - 0.5 * torch.logdet(kernel))


def same(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(v, states[1][k]) for k, v in states[0].items())


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_the_evidence_of_each_epoch_is_that_of_its_weights(structure, tmp_path):
    seen = trainers.Recorder()
    callback = trainers.lightning_callback(trainers.data(), likelihood(), ntkl.GaussianPrior(PRECISION), structure)
    logger = trainers.lightning.loggers.CSVLogger(tmp_path)
    trainers.train(seen, callback, logger=logger)
    expected = [dense_evidence(network) for network in seen.networks]
    assert [one.epoch for one in callback.tracker.history] == [1, 2, 3, 4]
    assert [one.log_evidence for one in callback.tracker.history] == pytest.approx(expected, rel=1e-10)
    assert callback.best.log_evidence == max(one.log_evidence for one in callback.tracker.history)
    rows = Path(logger.experiment.metrics_file_path).read_text().splitlines()
    at = {name: rows[0].split(",").index(name) for name in ("log_evidence", "log_evidence_per_example")}
    logged = {name: [float(row.split(",")[i]) for row in rows[1:]] for name, i in at.items()}
    assert logged["log_evidence"] == pytest.approx(expected, rel=1e-6)  # Lightning logs float32
    assert logged["log_evidence_per_example"] == pytest.approx([value / 20 for value in expected], rel=1e-6)


def test_monitors_of_lightning_find_it_and_every_epoch_that_is_asked_for(tmp_path):
    callback = trainers.lightning_callback(trainers.data(), likelihood(), metric="evidence", every=1)
    options = {"monitor": "evidence", "mode": "max"}
    stopping = trainers.lightning.callbacks.EarlyStopping(**options, patience=1, check_on_train_epoch_end=True)
    saving = trainers.lightning.callbacks.ModelCheckpoint(tmp_path, "{epoch}", **options, save_on_train_epoch_end=True)
    trainers.train(stopping, saving, callback, epochs=30, enable_checkpointing=True)
    values = [one.log_evidence for one in callback.tracker.history]
    assert len(values) < 30 and values[-1] < max(values)
    assert saving.best_model_path.endswith(f"epoch={callback.best.epoch - 1}.ckpt")
    seldom = trainers.lightning_callback(trainers.data(), likelihood(), every=3)
    trainers.train(seldom, epochs=7)
    assert [one.epoch for one in seldom.tracker.history] == [3, 6]


@pytest.mark.parametrize("file", [None, "best.pt", "best.safetensors"])
def test_the_best_weights_come_back(file, tmp_path):
    if file == "best.safetensors":
        pytest.importorskip("safetensors")
    seen, path = trainers.Recorder(), None if file is None else tmp_path / file
    # a large precision: the evidence falls as the weights grow
    options = {"prior": ntkl.GaussianPrior(30.0), "structure": "gp", "path": path}
    callback = trainers.lightning_callback(trainers.data(), likelihood(), restore_best=True, **options)
    best = trainers.train(seen, callback, epochs=6)
    number = callback.best.epoch - 1
    assert same(best, seen.networks[number]) and not same(best, seen.networks[-1])
    later = trainers.lightning_callback(trainers.data(), likelihood(), **options)
    last = trainers.train(later, epochs=6)
    assert same(last, seen.networks[-1])
    later.tracker.restore(last)
    assert same(last, best)


@pytest.mark.parametrize("given", ["tensors", "the loader in training"])
def test_a_training_is_the_same_with_and_without_it(given):
    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(*trainers.data()), 5, shuffle=True, generator=generator)

    shared = loader()
    read = trainers.data() if given == "tensors" else shared
    callback = trainers.lightning_callback(read, likelihood(), hyperparameters=True)
    assert same(trainers.train(callback, loader=shared), trainers.train(loader=loader()))


def test_modes_gradients_and_random_states_stay():
    module = trainers.Regression()
    tracker = EvidenceTracker(trainers.data(), likelihood(), structure="kfac", curvature="mc")
    module.train()
    module.net[2].eval()
    module(trainers.data()[0]).sum().backward()
    modes = [part.training for part in module.modules()]
    gradients = [parameter.grad for parameter in module.parameters()]
    values = [value.clone() for value in gradients]
    state, before = torch.get_rng_state(), copy.deepcopy(module)
    with torch.no_grad():
        tracker.evaluate(module, 1)
    assert torch.equal(state, torch.get_rng_state()) and same(module, before)
    assert [part.training for part in module.modules()] == modes
    assert all(p.grad is g and torch.equal(g, v)
               for p, g, v in zip(module.parameters(), gradients, values, strict=True))


def test_hyperparameters_are_fitted_and_kept_with_their_evidence():
    module = trainers.Regression().eval()
    prior = ntkl.GaussianPrior(1.0, groups="layer")
    tracker = EvidenceTracker(trainers.data(), likelihood(), prior, "full", hyperparameters=True)
    posterior = ntkl.laplace(module, trainers.data(), likelihood(), prior, "full")
    posterior.fit_hyperparameters()
    assert tracker.evaluate(module, 1)["log_evidence"] == pytest.approx(float(posterior.log_marginal_likelihood()))
    again = ntkl.laplace(module, trainers.data(), tracker.best.likelihood, tracker.best.prior, "full")
    assert float(again.log_marginal_likelihood()) == pytest.approx(tracker.best.log_evidence, rel=1e-12)
    assert "not bound" in repr(prior), "the caller's prior does not change"
    tracker.start()
    assert tracker.history == [] and tracker.best is None


def test_a_network_in_the_module_and_the_correction():
    module = trainers.Regression().eval()
    options = {"structure": "gp", "correction": True}
    named = EvidenceTracker(trainers.data(), likelihood(), network="net", **options).evaluate(module, 1)
    tracker = EvidenceTracker(trainers.data(), likelihood(), network=lambda m: nn.Sequential(m.net), **options)
    made = tracker.evaluate(module, 1)
    posterior = ntkl.laplace(module, trainers.data(), likelihood(), ntkl.GaussianPrior(groups="layer"), "gp")
    expected = float(posterior.log_marginal_likelihood(correction=True))
    assert named["log_evidence"] == pytest.approx(expected, rel=1e-12)
    assert made["log_evidence"] == pytest.approx(expected, rel=1e-12)


def test_a_training_of_transformers(tmp_path):
    plain = trainers.trainer_of(tmp_path)
    plain.train()
    tracked = trainers.trainer_of(tmp_path)
    prior = ntkl.GaussianPrior(5.0)
    callback = trainers.huggingface_callback(tracked, ntkl.Categorical(), prior, "gp", restore_best=True)
    tracked.add_callback(callback)
    tracked.train()
    networks = next(one for one in tracked.callback_handler.callbacks if isinstance(one, trainers.Snapshots)).networks
    assert same(plain.model, networks[-1]), "the training is the same without the callback"
    read = trainers.Sentences()
    inputs = {"input_ids": read.tokens, "labels": read.labels}
    expected = [
        ntkl.laplace(network, inputs, ntkl.Categorical(), prior, "full", output="logits", targets="labels",
                     settings=ntkl.Settings(memory_budget=2**31)).log_marginal_likelihood().item()
        for network in networks
    ]
    rows = [row for row in tracked.state.log_history if "log_evidence" in row]
    assert [row["epoch"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["log_evidence"] for row in rows] == pytest.approx(expected, rel=1e-6)  # the network is in float32
    assert rows[0]["log_evidence_per_example"] == pytest.approx(expected[0] / 16, rel=1e-6)
    assert callback.best.log_evidence == max(row["log_evidence"] for row in rows)
    assert same(tracked.model, networks[callback.best.epoch - 1])


def test_transformers_in_16_bits_and_data_of_its_own(tmp_path):
    trainer = trainers.trainer_of(tmp_path, bf16=True, max_steps=3)
    read = trainers.Sentences()
    loader = DataLoader(read, batch_size=5)
    callback = trainers.huggingface_callback(trainer, ntkl.Categorical(), data=loader, every=2)
    trainer.add_callback(callback)
    trainer.train()
    assert [one.epoch for one in callback.tracker.history] == [2] and callback.best.num_examples == 16


BAD = {
    "no data": ({"data": None}, ntkl.DataError, "None"),
    "every zero": ({"every": 0}, ntkl.HyperparameterError, "at least 1"),
    "every half": ({"every": 0.5}, ntkl.HyperparameterError, "0.5"),
    "empty metric": ({"metric": ""}, ntkl.HyperparameterError, "metric"),
    "restore_best no": ({"restore_best": "no"}, ntkl.UnsupportedError, "restore_best True or False"),
    "hyperparameters names": ({"hyperparameters": ["noise"]}, ntkl.UnsupportedError, "hyperparameters True or False"),
    "no such structure": ({"structure": "kfca"}, ntkl.UnsupportedError, "kfca"),
    "no likelihood": ({"likelihood": "gaussian"}, ntkl.NTKLaplaceError, "ikelihood"),
    "no folder": ({"path": "/nowhere/best.pt"}, ntkl.DataError, "nowhere"),
    "a network": ({"network": nn.Linear(1, 1)}, ntkl.NetworkError, "Linear"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    changed, error, words = BAD[case]
    given = {"data": trainers.data(), "likelihood": likelihood()} | changed
    for make in (EvidenceTracker, trainers.lightning_callback):
        with pytest.raises(error, match=words):
            make(**given)


def test_what_the_first_evaluation_finds(tmp_path):
    module = trainers.Regression()
    with pytest.raises(ntkl.NetworkError, match="There are: net"):
        EvidenceTracker(trainers.data(), likelihood(), network="body").evaluate(module, 1)
    with pytest.raises(ntkl.NetworkError, match="int"):
        EvidenceTracker(trainers.data(), likelihood(), network=lambda _: 3).evaluate(module, 1)
    assert module.training and module.net[2].training
    with pytest.warns(ntkl.NTKLaplaceWarning, match="every=9"):
        EvidenceTracker(trainers.data(), likelihood(), every=9).restore(module)
    several = SimpleNamespace(world_size=2)
    with pytest.raises(ntkl.UnsupportedError, match="2 processes"):
        trainers.lightning_callback(trainers.data(), likelihood()).on_fit_start(several, module)
    trainer = trainers.trainer_of(tmp_path)
    callback = trainers.huggingface_callback(trainer, ntkl.Categorical())
    with pytest.raises(ntkl.UnsupportedError, match="2 processes"):
        callback.on_train_begin(several, trainer.state, trainer.control)
    with pytest.raises(ntkl.UnsupportedError, match=r"transformers\.Trainer"):
        trainers.huggingface_callback(trainers.data(), ntkl.Categorical())
    trainer.train_dataset = None
    with pytest.raises(ntkl.DataError, match="data="):
        trainers.huggingface_callback(trainer, ntkl.Categorical())


@pytest.mark.parametrize(("module", "package"), [("lightning", "lightning"), ("huggingface", "transformers")])
def test_a_missing_package(module, package, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(f"{package}.") or name == f"ntk_laplace.tools.callbacks.{module}":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ntkl.MissingPackageError, match=rf"ntk_laplace\[{module}\]"):
        importlib.import_module(f"ntk_laplace.tools.callbacks.{module}")
    with pytest.raises(AttributeError, match="keras"):
        ntkl.callbacks.keras  # noqa: B018


class Drawing(Dataset):
    """Examples whose reading draws from every global random source, as augmentations do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
        return trainers.data()[0][i], trainers.data()[1][i]


@pytest.mark.parametrize("shuffle", [False, True])
def test_random_states_stay_whatever_the_data_draw(shuffle):
    generator = torch.Generator().manual_seed(3) if shuffle else None
    loader = DataLoader(Drawing(), 5, shuffle=shuffle, generator=generator)

    def states() -> list[Any]:
        own = [] if generator is None else [generator.get_state().tolist()]
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), *own]  # noqa: NPY002

    module = trainers.Regression()
    before = states()
    EvidenceTracker(loader, likelihood()).evaluate(module, 1)
    assert states() == before
