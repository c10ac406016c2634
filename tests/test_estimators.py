"""scikit-learn's own conformance checks, its clients, and the estimators against the library's functions by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import re
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_digits, load_iris, make_classification
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.explain.reliability import Reliability
from ntk_laplace.posterior.lack_of_fit import LackOfFit
from ntk_laplace.runtime import tuning
from ntk_laplace.tools.estimators import base as estimators_base
from ntk_laplace.tools.estimators import training as estimator_training
from ntk_laplace.tools.estimators.hyperparameters import integrated_evidence
from ntk_laplace.tools.estimators.tables import Standardized
from ntk_laplace.tools.estimators.units import in_units
from ntk_laplace.training import starts as training_starts
from reference import relative_error
from refusals import refused

# few epochs and starts, to be quick
pytestmark = [
    pytest.mark.filterwarnings("ignore:noise.* is not at the optimum of the evidence"),
    pytest.mark.usefixtures("one_perceptron"),
]
QUICK: dict[str, Any] = {"epochs": 5, "hidden_layer_sizes": (5,), "precision": (1.0, 0.01), "random_state": 0,
                         "fourier_features": 0, "piecewise_features": False}
SINGLE = QUICK | {"epochs": 3, "precision": 1.0}  # where it does not matter how it was trained


SMALL: dict[str, Any] = {"epochs": 1, "hidden_layer_sizes": (8,), "precision": 1.0}
# without a predictive nothing is trained to convergence: of so few epochs a classifier is right where checks ask it
QUICKER: dict[Any, dict[str, Any]] = {ntkl.LaplaceRegressor: SMALL, ntkl.LaplaceClassifier: SMALL | {"epochs": 5}}
CHECKS = parametrize_with_checks([cls(**options) for cls, quicker in QUICKER.items() for options in (
    SMALL | {"piecewise_features": True}, quicker | {"predictive": None})]).mark
# what a predictive may change: how good a fit is, what is drawn, stored and left in the estimator, and few examples
WITH_PREDICTIVE = {
    "check_classifiers_train", "check_regressors_train", "check_fit_idempotent", "check_dict_unchanged",
    "check_sample_weight_equivalence_on_dense_data", "check_estimators_pickle", "check_dont_overwrite_attributes",
    "check_estimators_overwrite_params", "check_methods_subset_invariance", "check_methods_sample_order_invariance",
    "check_fit2d_1sample", "check_fit2d_1feature", "check_classifiers_one_label", "check_readonly_memmap_input",
    "check_regressor_multioutput", "check_fit_check_is_fitted", "check_estimators_partial_fit_n_features",
}


def name_and_options(check: Any) -> tuple[str, int]:
    """Of a check of scikit-learn: several of them differ in options alone, of which this is the number."""
    return getattr(check, "func", check).__name__, len(getattr(check, "keywords", {}))


MOST_OPTIONS = {name: most for name, most in sorted(name_and_options(check) for _, check in CHECKS.args[1])}


def default_or_quicker(estimator: Any, check: Any) -> bool:
    """Of an estimator's two kinds, the one for a check: most are about the data and the interface alone."""
    name, options = name_and_options(check)
    every = name == "check_regressors_train"  # asks for a good fit
    return (estimator.predictive is None) != (
        name in WITH_PREDICTIVE and (every or options == MOST_OPTIONS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(CHECKS.args[0], [pair for pair in CHECKS.args[1] if default_or_quicker(*pair)],
                         **CHECKS.kwargs)  # once made, by scikit-learn 1.7
def test_conformance(estimator: Any, check: Any) -> None:
    check(estimator)


def sine(n: int = 40, outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(0)
    x = draws.uniform(-2, 2, (n, 2))
    y = np.stack([np.sin((k + 1) * x[:, 0]) * 3 + 7 + 0.1 * draws.standard_normal(n) for k in range(outputs)], 1)
    return x, y[:, 0] if outputs == 1 else y


@pytest.mark.slow
def test_a_regressor_is_the_training_by_hand() -> None:
    """In units of the targets: moments, joint covariance, noise and evidence."""
    x, y = sine()
    model = ntkl.LaplaceRegressor(**QUICK).fit(x, y)
    xs, ys = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    torch.manual_seed(int(np.random.RandomState(0).randint(2**31 - 1)))
    network = nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, 1)).double()
    found = ntkl.train_from_starts(
        network, (torch.as_tensor(xs), torch.as_tensor(ys)[:, None]), ntkl.Gaussian(noise=1.0),
        ntkl.GaussianPrior(groups="input", spread=3.0), starts=(1.0, 0.01),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.03),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        schedule=ntkl.EvidenceSchedule(1, 20), epochs=5, settings=ntkl.Settings(progress=False),
    )[0]
    assert found.predictive is not None and found.predictive.trusted
    response = found.posterior.predict(torch.as_tensor(xs[:7]))
    mean, std = model.predict(x[:7], return_std=True)
    assert relative_error(torch.as_tensor(mean), response.mean[:, 0] * y.std() + y.mean()) < 1e-12
    assert relative_error(torch.as_tensor(std), response.variance[:, 0].sqrt() * y.std()) < 1e-12
    again, covariance = model.predict(x[:7], return_cov=True)
    assert np.array_equal(mean, model.predict(x[:7])) and np.allclose(again, mean, rtol=1e-14)
    assert np.allclose(np.diag(covariance), std**2, rtol=1e-12)
    joint = found.posterior.latent(torch.as_tensor(xs[:7])).covariance_matrix * found.posterior.predictive.scale
    assert np.allclose(covariance - model.noise_ * np.eye(7), joint.detach() * y.var(), rtol=1e-10, atol=1e-12)
    evidence = float(found.posterior.log_marginal_likelihood()) - 40 * np.log(y.std())
    assert model.log_marginal_likelihood_value_ == pytest.approx(evidence, rel=1e-12)
    draws = model.sample_y(x[:3], 20000, random_state=1)
    assert draws.shape == (3, 20000)
    assert np.allclose(np.cov(draws), covariance[:3, :3], atol=0.05 * covariance[:3, :3].max())
    assert np.allclose(draws.mean(1), mean[:3], atol=4 * std[:3].max() / 141)
    with refused(ntkl.HyperparameterError, "n_samples", "-1", "Leave it out"):
        model.sample_y(x[:3], -1)


@pytest.mark.slow
def test_folds_are_trainings_of_the_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones, from the same weights; all else is that of a fit by leave-one-out."""
    x, y = sine(24)
    quick = QUICK | {"epochs": 2, "likelihood": "gaussian"}
    model = ntkl.LaplaceRegressor(predictive="folds", **quick).fit(x, y)
    other = ntkl.LaplaceRegressor(**quick).fit(x, y)
    posterior, fit = other.posterior_, model.predictive_fit_
    assert fit.objective == "folds" and fit.trusted and posterior.predictive != model.posterior_.predictive
    assert np.array_equal(model.predict(x), other.predict(x))
    inputs, targets = other.network_inputs(x), posterior.targets
    seed = int(np.random.RandomState(0).randint(2**31 - 1))

    def train(part: Any) -> ntkl.Posterior:
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, 1)).double()
        return ntkl.train_from_starts(
            network, part, ntkl.Gaussian(noise=1.0), ntkl.GaussianPrior(groups="input", spread=3.0), starts=(1.0, 0.01),
            optimizer=lambda p: torch.optim.Adam(p, lr=0.03),
            scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 2),
            schedule=ntkl.EvidenceSchedule(1, 20), epochs=2, settings=ntkl.Settings(progress=False),
        )[0].posterior

    found = posterior.cross_calibrate(train, (inputs, targets), seed=seed).shifted(-float(np.log(y.std())))
    assert (found.scale, found.noise, found.after) == pytest.approx((fit.scale, fit.noise, fit.after), rel=1e-6)
    assert np.allclose(other.predict(x, return_std=True)[1], model.predict(x, return_std=True)[1], rtol=1e-6)
    names = np.array(["b", "c"])[(y > np.median(y)).astype(int)]
    monkeypatch.setattr(estimator_training, "_FOLDS", 2)
    classifier = ntkl.LaplaceClassifier(predictive="folds", **SINGLE | {"epochs": 1}).fit(x, names)
    assert classifier.predictive_fit_.objective == "folds" and classifier.posterior_.predictive is not None
    for options, words in (({"predictive": "none"}, ("folds", "'none'", "")), (
            {"predictive": "folds", "prefit": True, "network": classifier.network_}, ("prefit=True", "'folds'", ""))):
        with refused(ntkl.UnsupportedError, *words):
            ntkl.LaplaceClassifier(**options).fit(x, names)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_is_the_training_by_hand(classes: int) -> None:
    """Probabilities of names of classes, evidence, and hyperparameters."""
    x, y = sine()
    labels = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
    names = np.array(["b", "c", "d"])[labels]
    model = ntkl.LaplaceClassifier(**QUICK | {"precision": 1.0}).fit(x, names)
    xs = torch.as_tensor((x - x.mean(0)) / x.std(0))
    torch.manual_seed(int(np.random.RandomState(0).randint(2**31 - 1)))
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    found = ntkl.train_with_evidence(
        network, (xs, torch.as_tensor(labels)), ntkl.Categorical(), ntkl.GaussianPrior(groups="input"),
        structure="kfac", optimizer=lambda p: torch.optim.Adam(p, lr=0.02), predictive="loo", epochs=5,
        batch_size=128, settings=ntkl.Settings(progress=False),
    )
    assert found.predictive is not None and found.predictive.trusted
    probabilities = found.posterior.predict(xs[:7], generator=torch.Generator().manual_seed(0)).probs
    assert relative_error(torch.as_tensor(model.predict_proba(x[:7])), probabilities) < 1e-12
    assert np.array_equal(model.predict(x[:7]), model.classes_[probabilities.argmax(1)])
    evidence = float(found.posterior.log_marginal_likelihood())
    assert model.log_marginal_likelihood_value_ == pytest.approx(evidence, rel=1e-12)
    own = [*found.posterior.prior.parameters(), *found.posterior.likelihood.parameters()]
    assert relative_error(torch.as_tensor(model.theta_), nn.utils.parameters_to_vector(own).detach()) < 1e-12
    assert np.array_equal(model.y_train_, names)


def test_the_evidence_at_other_hyperparameters() -> None:
    x, y = sine(25)
    model = ntkl.LaplaceRegressor(**SINGLE).fit(x, y)
    theta = model.theta_
    value, slope = model.log_marginal_likelihood(theta + 0.2, eval_gradient=True)
    for index in range(len(theta)):
        step = np.zeros_like(theta)
        step[index] = 1e-5
        ends = [model.log_marginal_likelihood(theta + 0.2 + sign * step) for sign in (1, -1)]
        assert slope[index] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-7)
    assert value != model.log_marginal_likelihood() == model.log_marginal_likelihood_value_
    assert np.array_equal(model.theta_, theta)
    scaled = ntkl.LaplaceRegressor(**SINGLE).fit(x, 100 * y)
    assert scaled.log_marginal_likelihood() == pytest.approx(model.log_marginal_likelihood() - 25 * np.log(100))
    with refused(ntkl.HyperparameterError, "theta of shape", r"shape \(1,\)", "theta_"):
        model.log_marginal_likelihood([0.0])


@pytest.mark.slow
def test_relevance_is_learned_for_the_inputs_of_a_perceptron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four inputs have no effect. Other networks, structures and tables have one precision for each layer."""
    draws = np.random.default_rng(0)
    x = draws.uniform(-2, 2, (80, 4))
    y = np.sin(x[:, 0]) + 0.5 * x[:, 2] + 0.1 * draws.standard_normal(80)
    model = ntkl.LaplaceRegressor(epochs=40, hidden_layer_sizes=(8,), random_state=0).fit(x, y)
    relevance = model.relevance_
    assert relevance.shape == (4,) and relevance[[0, 2]].min() > 2 * relevance[[1, 3]].max()
    assert np.allclose(relevance, np.exp(-0.5 * model.theta_[:4]), rtol=1e-12)
    constant = np.column_stack([x, np.full(80, 7.0), np.full(80, 0.3) + 1e-16 * (np.arange(80) % 2)])
    found = ntkl.LaplaceRegressor(**SINGLE).fit(constant, y).relevance_
    assert (found[:4] > 0).all() and found[4:].tolist() == [0.0, 0.0]
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    wide = np.concatenate([x] * 3, 1)
    monkeypatch.setattr(tuning, "INPUTS_WITH_PRECISIONS", 11)
    for options, table in (({"structure": "ekfac"}, x), ({"network": net}, x), ({"groups": "layer"}, x), ({}, wide)):
        other = ntkl.LaplaceRegressor(**SINGLE | {"epochs": 1} | options).fit(table, y)
        assert other.posterior_.prior.groups == "layer" and not hasattr(other, "relevance_")


def test_a_perceptron_with_a_linear_part() -> None:
    x = np.random.default_rng(0).normal(size=(20, 65))
    y, quick = x[:, 0], SINGLE | {"epochs": 1, "predictive": None, "smooth_clipping": False}
    cases = {1: ntkl.LaplaceRegressor(likelihood="gaussian", linear_part=True, **quick).fit(x, y),
             2: ntkl.LaplaceRegressor(likelihood="heteroscedastic-gaussian", linear_part=True, **quick).fit(x, y),
             3: ntkl.LaplaceClassifier(**quick).fit(x, np.arange(20) % 3)}
    for outputs, model in cases.items():
        network, inputs = model.network_, model.network_inputs(x)
        weight, bias = network.first.weight, network.first.bias
        assert weight.shape == (outputs + 5, 65) and len(model.relevance_) == 65
        assert model.posterior_.prior.groups == "input" and model.posterior_.prior.spread == 1.0
        linear = inputs @ weight[:outputs].T + bias[:outputs]
        hidden = network.rest[0](inputs @ weight[outputs:].T + bias[outputs:])
        expected = linear + hidden @ network.rest[-1].weight.T + network.rest[-1].bias
        assert torch.allclose(network(inputs), expected, rtol=1e-12)
    of_layers = ntkl.LaplaceRegressor(likelihood="gaussian", groups="layer", linear_part=True, **quick).fit(x, y)
    assert of_layers.network_.first.weight.shape == (6, 65) and of_layers.posterior_.prior.groups == "layer"
    with refused(ntkl.MemoryBudgetError, "the 660,000,000,065 weights", "need of", "fewer units"):  # 65 skip the rest
        huge = quick | {"hidden_layer_sizes": 10**10}
        ntkl.LaplaceRegressor(likelihood="gaussian", linear_part=True, **huge).fit(x, y)


def test_which_tables_have_a_linear_part() -> None:
    """With more than 64 features it is usual; of few examples in a regression both perceptrons are tried."""
    forms: list[list[bool]] = []

    def recorded(form: Any, designs: estimator_training.Designs, *args: Any) -> Any:
        linear = designs.first.linear
        forms.append([linear, not linear] if "linear" in designs.tried else [linear])
        return estimator_training.trained(form, dataclasses.replace(designs, tried=()), *args)

    x, quick = np.random.default_rng(0).normal(size=(170, 65)), SINGLE | {"epochs": 1, "predictive": None}
    regressor = ntkl.LaplaceRegressor(likelihood="gaussian", **quick)
    none, usual, either, first = [False], [True], [False, True], [True, False]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimators_base, "trained", recorded)
        for rows, columns, expected in ((159, 16, either), (160, 16, none), (149, 15, none), (170, 64, either),
                                        (170, 65, first)):
            clone(regressor).fit(x[:rows, :columns], x[:rows, 0])
            assert forms.pop() == expected
        for options, expected in (({"groups": "layer"}, none), ({"hidden_layer_sizes": ()}, none),
                                  ({"hidden_layer_sizes": (), "linear_part": True}, none),
                                  ({"linear_part": True}, usual), ({"linear_part": False}, none),
                                  ({"network": lambda d, c: nn.Linear(d, c).double()}, none)):
            clone(regressor).set_params(**options).fit(x, x[:, 0])
            assert forms.pop() == expected
        patch.setattr(tuning, "EXAMPLES_OF_EACH_INPUT", 2)
        clone(regressor).fit(x, x[:, 0])
        assert forms.pop() == usual
        patch.undo()
        patch.setattr(estimators_base, "trained", recorded)
        for columns, expected in ((64, none), (65, usual)):
            ntkl.LaplaceClassifier(**quick).fit(x[:, :columns], np.arange(170) % 2)
            assert forms.pop() == expected


def test_the_evidence_chooses_a_linear_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their precisions integrated out."""
    rng = np.random.default_rng(3)
    x, chosen = rng.normal(size=(60, 16)), set()
    quick = QUICK | {"epochs": 12, "hidden_layer_sizes": (8,), "likelihood": "gaussian", "precision": 1.0,
                     "predictive": None}
    for y in (x @ rng.normal(size=16) + 0.3 * rng.normal(size=60), np.abs(3 * x[:, 0]) + 0.1 * rng.normal(size=60)):
        forms = {linear: ntkl.LaplaceRegressor(linear_part=linear, **quick).fit(x, y) for linear in (False, True)}
        evidence = {linear: integrated_evidence(form.posterior_) for linear, form in forms.items()}
        best = max(evidence, key=lambda linear: evidence[linear])
        chosen.add(best)
        model = ntkl.LaplaceRegressor(**quick).fit(x, y)
        assert np.array_equal(model.predict(x), forms[best].predict(x)) and model.linear_part_ is best
    assert chosen == {False, True}
    monkeypatch.setattr(estimator_training, "integrated_evidence", lambda posterior: -integrated_evidence(posterior))
    results: list[estimator_training.Trained] = []
    monkeypatch.setattr(estimators_base, "trained", lambda *options: results.append(
        estimator_training.trained(*options)) or results[-1])
    other = ntkl.LaplaceRegressor(**quick).fit(x, y)
    assert np.array_equal(other.predict(x), forms[not best].predict(x)) and results[0].design.linear is not best
    assert list(results[0].tried) == ["linear"]


def test_the_evidence_without_precisions_of_inputs() -> None:
    """Each input costs ½ log(1 + ½ spread² γ_i), by dense algebra; a prior with other groups costs nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3))
    model = ntkl.LaplaceRegressor(**SINGLE | {"likelihood": "gaussian", "predictive": None}, structure="full")
    for groups in ("input", "layer"):
        posterior = model.set_params(groups=groups).fit(x, x[:, 0] + 0.1 * rng.normal(size=30)).posterior_
        value = float(posterior.log_marginal_likelihood())
        if groups == "layer":
            assert integrated_evidence(posterior) == value
            continue
        module, inputs = posterior.network.module, model.network_inputs(x)
        parts = [torch.autograd.grad(f, [*module.parameters()], retain_graph=True) for f in module(inputs).flatten()]
        rows = torch.stack([torch.cat([part.flatten() for part in row]) for row in parts])
        precision = posterior.prior.flat_precision().detach()
        hessian = rows.T @ rows / posterior.likelihood.noise.detach() + precision.diag()
        shares = 1.0 - precision * torch.linalg.inv(hessian).diagonal()
        first = next(module.parameters())
        used = shares[: first.numel()].view(first.shape).sum(0)  # of each column of the first weight
        logs = precision[: first.numel()].view(first.shape)[0].log()
        density = -0.5 * (logs - logs.mean()).square().sum() / 9
        cost = 0.5 * (1 + 0.5 * 9 * used).log().sum()
        assert integrated_evidence(posterior) == pytest.approx(value + float(density - cost), rel=1e-9)


@pytest.mark.slow
def test_few_of_many_columns_are_found() -> None:
    """A perceptron without a linear part, with a precision for each layer, has a score of 0.69."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 150))
    y = x[:, 0] + 2 * x[:, 1] - x[:, 2] + 0.5 * rng.normal(size=300)
    model = ntkl.LaplaceRegressor(likelihood="gaussian", epochs=100, precision=1.0, random_state=0, fourier_features=0,
                                  piecewise_features=False)
    model.fit(x[:150], y[:150])
    assert model.score(x[150:], y[150:]) > 0.9
    assert set(np.argsort(-model.relevance_)[:3]) == {0, 1, 2}


@pytest.mark.parametrize("classes", [True, False])
def test_examples_are_kept_apart_where_no_posterior_is_exact(classes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "EXACT_OPERATIONS", 1e3)
    rng = np.random.default_rng(0)
    x, weight = np.concatenate([rng.normal(size=(323, 2)), np.zeros((2, 2))]), np.ones(325)
    y = np.where(x[:, 0] > 0, "b", "a") if classes else 3.0 * x[:, 0] + rng.normal(size=325)
    if classes:
        y[10:30] = list("cdefghijklmnopqrstuv")  # one example of each
    y[-1], weight[5] = y[-2], 0.0
    cls = ntkl.LaplaceClassifier if classes else ntkl.LaplaceRegressor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the network misses")
        model = cls(epochs=3, hidden_layer_sizes=(3,), random_state=0).fit(x, y, weight)
    held, kept, fit = model.held_out_index_, model.training_index_, model.predictive_fit_
    # two of those drawn are alone in their class
    assert len(held) == fit.num_points == (30 if classes else 32) and len(kept) == 323 - len(held)
    assert sorted([*held, *kept, 5, 324]) == list(range(325))  # weight 0, and a copy
    points, order = model.training_point_, np.arange(len(kept))
    assert (points[held] == -1).all() and np.array_equal(points[kept], order) and len(model.y_train_) == len(kept)
    assert model.posterior_.structure == "kfac" and fit.objective == "held-out data"
    assert not classes or len(set(model.y_train_)) == 22
    found = model.posterior_.calibrate((model.network_inputs(x[held]), model.network_targets(y[held])))
    shift = 0.0 if classes else 0.5 * float(np.log(np.cov(y, aweights=weight, ddof=0)))
    assert found.after == pytest.approx(fit.after + shift, rel=1e-12)
    assert np.isclose(model.log_marginal_likelihood(model.theta_ + 0.0), model.log_marginal_likelihood_value_)
    z = model.network_inputs(x)
    assert torch.equal(model.network_(z), model.posterior_.outputs(z))
    assert cls(epochs=1, predictive=None, random_state=0).fit(x, y).held_out_index_.size == 0

    def stuck(*_: Any, **__: Any) -> None:
        raise ntkl.NumericalError("steps", "none", "Wait.")

    monkeypatch.setattr(ntkl.Posterior, "retrain", stuck)
    first = cls(epochs=3, hidden_layer_sizes=(3,), random_state=0).fit(x, y, weight).predictive_fit_
    assert first.num_points == len(held) and first.after <= fit.after
    assert not classes or first.after < fit.after  # the optimum is taken


def test_folds_say_nothing_of_trainings_without_a_predictive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "EXACT_OPERATIONS", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ntkl.LaplaceRegressor(epochs=1, hidden_layer_sizes=(2,), precision=1.0, predictive="folds")
        assert model.fit(*sine(8)).predictive_fit_ is not None


def test_a_training_that_is_not_trusted_is_told_of_only_if_it_stays() -> None:
    """Labels at random: leave-one-out has little to judge by, and a tenth of many examples takes its place."""
    rng = np.random.default_rng(0)
    options = {"epochs": 2, "hidden_layer_sizes": (10, 10), "precision": 1e-4, "random_state": 0,
               "piecewise_features": False}
    x, y = rng.normal(size=(1100, 9)), rng.normal(size=1100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = ntkl.LaplaceRegressor(**options).fit(x, y)
    assert many.posterior_.structure == "kfac" and len(many.held_out_index_) == 110
    assert many.predictive_fit_.objective == "held-out data"
    with pytest.warns(ntkl.NTKLaplaceWarning) as told:
        few = ntkl.LaplaceRegressor(**options).fit(x[:900], y[:900])
    assert any("has lowered the evidence" in str(one.message) for one in told)
    assert few.posterior_.fitted.exact and not few.predictive_fit_.trusted and few.held_out_index_.size == 0


@pytest.mark.slow
def test_labels_that_were_learned_by_heart_are_calibrated_on_a_tenth() -> None:
    """Half of the labels are noise: leave-one-out promised 0.23 nats more than test data have."""
    x, y = make_classification(1600, 20, n_informative=8, n_classes=3, flip_y=0.5, random_state=0)
    model = ntkl.LaplaceClassifier(epochs=20, hidden_layer_sizes=(64, 64), random_state=0, piecewise_features=False)
    fit = model.fit(x[:600], y[:600]).predictive_fit_
    assert len(model.held_out_index_) == fit.num_points == 60 and fit.objective == "held-out data"
    test = np.log(model.predict_proba(x[600:])[np.arange(1000), y[600:]]).mean()
    assert abs(fit.after - test) < 0.1 and test > np.log(1 / 3) + 0.08


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:training to the optimum")
@pytest.mark.parametrize("classes", [False, True])
def test_a_network_that_learned_noise_is_trained_again_with_more_evaluations(
    classes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 30 columns and noise, or labels half at random, one prediction for all inputs has the larger evidence."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2600, 20 if classes else 30))
    y = np.sin(2.0 * x[:, 0]) * x[:, 1] + 0.3 * x[:, 2] ** 2 + rng.normal(size=2600)
    if classes:
        y = np.where(rng.uniform(size=2600) < 0.5, rng.integers(0, 3, 2600), x[:, :3].argmax(1))
    cls, n = ntkl.LaplaceClassifier if classes else ntkl.LaplaceRegressor, 300 if classes else 150

    def density(model: Any) -> float:
        if classes:
            return float(np.log(model.predict_proba(x[n:])[np.arange(2600 - n), y[n:]]).mean())
        return float(norm.logpdf(y[n:], *model.predict(x[n:], return_std=True)).mean())

    options = {"random_state": 0, "linear_part": False, "piecewise_features": False}
    model = cls(**options).fit(x[:n], y[:n])
    inputs = model.network_inputs(x)
    assert torch.equal(model.network_(inputs), model.posterior_.outputs(inputs)) and not model.held_out_index_.size
    monkeypatch.setattr(Reliability, "below_one_prediction", property(lambda _: False))
    first = cls(**options).fit(x[:n], y[:n])
    assert (len(model.history_.epochs), len(first.history_.epochs)) == ((34, 10) if classes else (50, 15))
    assert density(model) > density(first) + 0.01


@pytest.mark.slow
def test_the_first_training_is_kept_if_the_second_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, trained, calls = rng.normal(size=(299, 20)), estimator_training.train_with_evidence, []
    y = np.where(rng.uniform(size=299) < 0.5, rng.integers(0, 3, 299), x[:, :3].argmax(1))

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(options.get("schedule"))
        if calls[-1] is not None:
            raise ntkl.NumericalError("steps", "none", "Wait.")
        return trained(*args, **options)

    monkeypatch.setattr(estimator_training, "train_with_evidence", failing)
    model = ntkl.LaplaceClassifier(precision=1.0, random_state=0, piecewise_features=False).fit(x, y)
    assert [call and call.frequency for call in calls] == [None, 3] and len(model.history_.epochs) == 10


@pytest.mark.slow
@pytest.mark.parametrize(("function", "starts"), [
    (lambda x: x[:, 0], [1.0]), (lambda x: np.sin(9 * x[:, 0]), [1.0, 0.01, 1e-4, 1e-6]),
], ids=["linear", "with many waves"])
def test_starts_are_tried_where_residuals_of_neighbors_are_alike(
    function: Any, starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of weaker priors for three times as many epochs."""
    tried, lengths, scaled = [], [], ntkl.GaussianPrior.scaled
    train = training_starts.train_with_evidence
    monkeypatch.setattr(ntkl.GaussianPrior, "scaled", lambda prior, by: tried.append(by) or scaled(prior, by))
    monkeypatch.setattr(training_starts, "train_with_evidence",
                        lambda *given, **options: lengths.append(options["epochs"]) or train(*given, **options))
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, (60, 1))
    y = function(x) + 0.1 * rng.normal(size=60)
    model = ntkl.LaplaceRegressor(epochs=15, hidden_layer_sizes=(8,), likelihood="gaussian", fourier_features=0,
                                  piecewise_features=False, random_state=0)
    found = model.fit(x, y).posterior_.lack_of_fit()
    assert tried == starts and lengths == [15, 15, 45, 45][:len(starts)]
    assert found.clear == (len(starts) == 4)
    tried.clear()
    model.set_params(predictive=None).fit(x, y)  # the evidence chooses
    assert tried == [1.0, 0.01]


@pytest.mark.slow
def test_a_classifier_that_misses_its_classes_is_trained_longer_from_weaker_priors(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fold too."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 3, (170, 2))
    y = np.where(np.floor(x).sum(1) % 2, "black", "white")
    options = {"epochs": 20, "hidden_layer_sizes": (20,), "learning_rate": 0.05, "random_state": 0,
               "piecewise_features": False}
    one, auto = (ntkl.LaplaceClassifier(**options, precision=precision).fit(x[:120], y[:120])
                 for precision in (1.0, "auto"))
    assert one.posterior_.lack_of_fit().clear and auto.n_iter_ == 60
    lengths, train = [], estimator_training.train_from_starts
    monkeypatch.setattr(estimator_training, "train_from_starts",
                        lambda *given, **options: lengths.append(options["epochs"]) or train(*given, **options))
    monkeypatch.setattr(estimator_training, "_FOLDS", 2)
    folds = ntkl.LaplaceClassifier(**options, predictive="folds").fit(x[:120], y[:120])
    assert lengths.count(20) == lengths.count(60) == 3
    assert folds.score(x[120:], y[120:]) == auto.score(x[120:], y[120:])
    assert auto.score(x[120:], y[120:]) > 0.7 > 0.6 > one.score(x[120:], y[120:])


@pytest.mark.slow
def test_labels_that_look_sure_from_a_weak_prior_are_not_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave-one-out of the network alone says they are certain; the posterior, that it knows next to nothing."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[:550]
    x, y, x_new, y_new = x[rows[:150]], y[rows[:150]], x[rows[150:]], y[rows[150:]]
    monkeypatch.setattr(LackOfFit, "clear", property(lambda _: True))
    found = ntkl.LaplaceClassifier(epochs=100, random_state=0).fit(x, y)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "training to the optimum")
        weak = ntkl.LaplaceClassifier(epochs=300, precision=1e-4, random_state=0).fit(x, y)
    assert weak.predictive_fit_.after > found.predictive_fit_.after + 0.1 and found.n_iter_ == 100
    assert weak.predictive_fit_.before < found.predictive_fit_.before - 0.5
    density = [np.log(model.predict_proba(x_new)[np.arange(400), y_new]).mean() for model in (found, weak)]
    assert density[0] > density[1] + 0.1


def test_several_precisions_are_several_starts() -> None:
    x, y = sine()
    options = QUICK | {"groups": "layer"}
    model = ntkl.LaplaceRegressor(**options | {"precision": (1.0, 1e-3)}).fit(x, y)
    single = [ntkl.LaplaceRegressor(**options | {"precision": one}).fit(x, y) for one in (1.0, 1e-3)]
    assert single[0].posterior_.lack_of_fit().above(0.05)
    best = max(single, key=lambda one: one.predictive_fit_.after)
    assert single[0].predictive_fit_.after != single[1].predictive_fit_.after
    assert np.allclose(model.predict(x), best.predict(x), rtol=1e-12)
    torch.manual_seed(1)
    own = nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, 1)).double()
    options |= {"predictive": None, "standardize": True, "epochs": 8, "random_state": 4}  # the evidence chooses
    for network in (own, "mlp"):
        auto, one, two = (ntkl.LaplaceRegressor(network, **options | {"precision": precision}).fit(x, y)
                          for precision in ("auto", 1.0, (1.0, 0.01)))
        assert np.array_equal(auto.predict(x), two.predict(x)) and auto.predictive_fit_ is None
        assert not np.array_equal(one.predict(x), two.predict(x))
    for wrong in ("x", (1.0, -1.0), [], -1.0, None, float("nan"), np.array(1.0)):
        with refused(ntkl.HyperparameterError, "a positive precision", re.escape(repr(wrong)), "precision=1.0"):
            ntkl.LaplaceRegressor(**QUICK | {"precision": wrong}).fit(x, y)
    assert ntkl.LaplaceRegressor(own, precision={"0": 2.0, "2": 3.0}, groups="layer", epochs=1).fit(x, y).n_iter_ == 1
    with refused(ntkl.UnsupportedError, "one precision, for prefit=True", r"\(1.0, 0.1\)", "trained with"):
        ntkl.LaplaceRegressor(model.network_, prefit=True, precision=(1.0, 0.1)).fit(x, y)


def test_several_targets() -> None:
    x, y = sine(outputs=2)
    model = ntkl.LaplaceRegressor(**QUICK | {"epochs": 10, "precision": 1.0}).fit(x, y)
    mean, std = model.predict(x[:4], return_std=True)
    _, covariance = model.predict(x[:4], return_cov=True)
    assert mean.shape == std.shape == (4, 2) and covariance.shape == (4, 4, 2)
    assert np.allclose(np.einsum("iic->ic", covariance), std**2)
    assert model.sample_y(x[:4], 3).shape == (4, 2, 3) and model.noise_.shape == (2,)
    assert model.score(x, y) > 0.3


@pytest.mark.slow
def test_each_of_several_targets_has_its_own_noise() -> None:
    """A noisy target beside an almost exact one: the fit of noise=[1, 1], in units of the targets everywhere."""
    draws = np.random.default_rng(0)
    x = draws.standard_normal((80, 2))
    y = np.stack([5 * (np.sin(x[:, 0]) + draws.standard_normal(80)), x[:, 1] + 0.01 * draws.standard_normal(80)], 1)
    options = QUICK | {"epochs": 30, "precision": 1.0, "random_state": 1, "likelihood": "gaussian"}
    model, given = (ntkl.LaplaceRegressor(**options, noise=noise).fit(x, y) for noise in (1.0, np.ones(2)))
    assert model.noise_[0] > 10 and model.noise_[1] < 0.1
    assert np.array_equal(model.noise_, given.noise_) and np.array_equal(model.theta_, given.theta_)
    assert model.log_marginal_likelihood_value_ == given.log_marginal_likelihood_value_
    mean, std = model.predict(x[:6], return_std=True)
    _, covariance = model.predict(x[:6], return_cov=True)
    assert (std**2 > (1 - 1e-9) * model.noise_).all() and np.allclose(np.einsum("iic->ic", covariance), std**2)
    sampled = model.sample_y(x[:6], 20000)
    assert np.allclose(sampled.std(2), std, rtol=0.05) and np.allclose(sampled.mean(2), mean, atol=0.05 * std.max())
    theta = model.theta_
    value, slope = model.log_marginal_likelihood(theta, eval_gradient=True)
    steps = np.eye(len(theta))[-2:] * 1e-5  # of the two noises
    ends = [[model.log_marginal_likelihood(theta + sign * step) for sign in (1, -1)] for step in steps]
    assert value == pytest.approx(model.log_marginal_likelihood_value_, rel=1e-9)
    assert slope[-2:] == pytest.approx([(high - low) / 2e-5 for high, low in ends], rel=1e-5, abs=1e-6)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(x, return_std=True), model.predict(x, return_std=True))
    assert ntkl.LaplaceRegressor(**options).fit(x, y[:, 1]).noise_ < 0.1


@pytest.mark.slow
def test_a_classifier_with_names_and_a_frame() -> None:
    x, y = load_iris(return_X_y=True, as_frame=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = ntkl.LaplaceClassifier(epochs=20, hidden_layer_sizes=(8,), random_state=0).fit(x, names)
    assert list(model.classes_) == ["setosa", "versicolor", "virginica"] and model.score(x, names) > 0.95
    assert list(model.feature_names_in_) == list(x.columns)
    probabilities = model.predict_proba(x)
    assert np.allclose(probabilities.sum(1), 1) and np.array_equal(probabilities, model.predict_proba(x))
    assert np.allclose(np.exp(model.predict_log_proba(x)), probabilities)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict_proba(x), probabilities)
    table = model.explain(x[:2], k=3)
    assert len(table.to_dataframe()) > 0
    with pytest.raises(ValueError, match="feature names"):
        model.predict(x.rename(columns={x.columns[0]: "other"}))


@pytest.mark.slow
def test_clients() -> None:
    """Pipelines, cross-validation, grids over precisions and over networks, calibration."""
    x, y = load_diabetes(return_X_y=True)
    x, y = x[:80], y[:80]
    piped = make_pipeline(StandardScaler(), ntkl.LaplaceRegressor(**SINGLE)).fit(x, y)
    assert piped.predict(x, return_std=True)[1].shape == (80,)

    def wide(features: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, outputs)).double()

    tried = [{"network": ["mlp", wide], "precision": [10.0]}, {"precision": [0.1]}]
    grid = GridSearchCV(ntkl.LaplaceRegressor(**QUICK), tried, cv=2)
    assert grid.fit(x, y).best_score_ > 0.1
    labels = (y > np.median(y)).astype(int)
    one = ntkl.LaplaceClassifier(**QUICK | {"precision": 1.0})
    found = cross_val_score(one, x, labels, scoring="neg_log_loss", cv=2)
    assert (found > -0.9).all()
    sharper = CalibratedClassifierCV(ntkl.LaplaceClassifier(**SINGLE), cv=2).fit(x, labels)
    assert sharper.predict_proba(x).shape == (80, 2)


@pytest.mark.slow
def test_equal_examples_are_one() -> None:
    """Weights, copies, and zeros: one fit; explanations name the first row."""
    x, y = sine(20)
    weight = np.random.default_rng(1).integers(0, 3, 20)
    weighted = ntkl.LaplaceRegressor(**SINGLE).fit(x, y, sample_weight=weight)
    copied = ntkl.LaplaceRegressor(**SINGLE).fit(np.repeat(x, weight, 0), np.repeat(y, weight))
    assert np.allclose(weighted.predict(x, return_std=True), copied.predict(x, return_std=True), rtol=1e-9)
    assert weighted.log_marginal_likelihood() == pytest.approx(copied.log_marginal_likelihood(), rel=1e-9)
    assert np.array_equal(weighted.training_index_, np.flatnonzero(weight))
    assert np.array_equal(weighted.y_train_, y[weight > 0]) and np.array_equal(copied.y_train_, weighted.y_train_)
    assert np.array_equal(np.repeat(np.arange(20), weight)[copied.training_index_], weighted.training_index_)
    plain = ntkl.LaplaceRegressor(**SINGLE).fit(x, y)
    assert not np.allclose(plain.predict(x), weighted.predict(x), rtol=1e-3)
    with pytest.raises(ValueError, match="non-zero"):
        plain.fit(x, y, sample_weight=np.zeros(20))


def test_weights_that_are_shares_are_told() -> None:
    """Shares of 1 leave all rows the say of one; multiples of mean 1 do not, and of few rows none are told."""
    x, y = sine(20)
    share = np.full(20, 1 / 20)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="weights of 20 rows add up to 1, .* divide them by their mean"):
        ntkl.LaplaceRegressor(**SINGLE).fit(x, y, sample_weight=share)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ntkl.LaplaceRegressor(**SINGLE).fit(x, y, sample_weight=share / share.mean())
        ntkl.LaplaceRegressor(**SINGLE).fit(x[:9], y[:9], sample_weight=share[:9])
    assert not any("add up to" in str(one.message) for one in told)


class _Raw(nn.Module):
    """The network of standardized targets, with outputs in units of the targets."""

    def __init__(self, network: nn.Module, scale: np.ndarray, mean: np.ndarray) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", torch.as_tensor(scale))
        self.register_buffer("mean", torch.as_tensor(mean))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x) * self.scale + self.mean


@pytest.mark.slow
@pytest.mark.parametrize("by", ["output", "log_likelihood", "variance"])
@pytest.mark.parametrize("structure", ["gp", "full"])
def test_explanations_are_in_units_of_the_targets(structure: str, by: str) -> None:
    """They are those of a network whose outputs are in these units; parts add up to `predict`."""
    x, y = sine(24, outputs=2)
    y = y * [1.0, 50.0] + [0.0, 1000.0]
    options = SINGLE | {"groups": "layer"}
    model = ntkl.LaplaceRegressor(**options, structure=structure, predictive=None).fit(x, y)
    own, new, truths = model.posterior_, x[:3] + 0.1, y[:3]
    raw = _Raw(model.network_, y.std(0), y.mean(0))
    noise = ntkl.Gaussian(torch.as_tensor(model.noise_), "output")
    prior = ntkl.GaussianPrior(own.prior.precision.detach(), groups="layer")
    data = model.network_inputs(x), torch.as_tensor(y)
    whole = ntkl.laplace(raw, data, noise, prior, structure)
    assert float(whole.log_marginal_likelihood()) == pytest.approx(model.log_marginal_likelihood(), rel=1e-9)
    given = truths if by == "log_likelihood" else None
    found = model.explain(new, 4, given, output=1, by=by)
    wanted = whole.explain(model.network_inputs(new), 4, 1, by=by, y=None if given is None else torch.as_tensor(given),
                           decomposition="optimum")
    assert found.at_optimum and not model.explain(new, 4, given, by=by, decomposition="weights").at_optimum
    for (name, side), value in wanted.by_input().items():
        assert relative_error(found.by_input()[name, side].double(), value.double()) < 1e-6, name
    for name in ("leverage", "targets", *(["importance"] if structure == "gp" else [])):
        assert relative_error(getattr(found, name), getattr(wanted, name)) < 1e-6, name
    parts = found.offset + found.contributed() + found.gap
    assert np.allclose(parts, model.predict(new), rtol=1e-9) and torch.allclose(parts, found.f, rtol=1e-9)
    table, other = found.to_dataframe(), wanted.to_dataframe()
    assert np.allclose(table["removal_effect"], other["removal_effect"], rtol=1e-6)
    if by == "output":
        who = ["a", "b"] * 12
        effects, others = model.source_effects(new, who, truths, output=1), whole.source_effects(
            model.network_inputs(new), who, y=torch.as_tensor(truths), output=1)
        for name in ("f", "outputs", "effect", "single", "log_prob_change", "own_log_prob", "own_log_prob_without"):
            assert relative_error(getattr(effects, name), getattr(others, name)) < 1e-6, name


def of_targets(model: Any, found: ntkl.SourceEffects) -> ntkl.SourceEffects:
    """The posterior's explanation in units of the targets."""
    if isinstance(model, ntkl.LaplaceClassifier):
        return found
    return in_units(found, model.y_train_.std(keepdims=True), model.y_train_.mean(keepdims=True))


@pytest.mark.slow
def test_equal_rows_of_several_sources_count_for_each() -> None:
    """Two annotators of the same items: the effects are those of the posterior of all rows."""
    x, y = sine(16)
    x, who = np.concatenate([x, x, x[:1]]), ["Ann"] * 16 + ["Bob"] * 16 + ["Ann"]
    weight = np.r_[np.full(16, 0.5), np.full(16, 1.5), 0.0]
    labels = np.r_[y > 7, y > 6, True].astype(int)
    values = np.r_[y, y, 9.0]
    for model, own_y in ((ntkl.LaplaceClassifier(**SINGLE), labels), (ntkl.LaplaceRegressor(**SINGLE), values)):
        model.fit(x, own_y, sample_weight=weight)
        assert len(model.training_index_) < 32 and model.training_point_[-1] == -1
        rows = model.training_point_[:32]
        assert np.array_equal(model.y_train_[rows], own_y[:32])
        found = model.source_effects(x[:5], who, own_y[:5])
        own = model.posterior_
        data = model.network_inputs(x[:32]), model.network_targets(own_y[:32]), torch.as_tensor(weight[:32])
        whole = ntkl.laplace(model.network_, data, own.likelihood, own.prior, "full")
        assert float(whole.log_marginal_likelihood()) == pytest.approx(float(own.log_marginal_likelihood()), rel=1e-9)
        wanted = of_targets(model, whole.source_effects(data[0][:5], who[:32], y=data[1][:5]))
        assert found.num_points.tolist() == [16, 16] and found.names == ("Ann", "Bob")
        for name in ("effect", "single", "own_log_prob", "own_log_prob_without", "log_prob_change"):
            assert relative_error(getattr(found, name), getattr(wanted, name)) < 1e-6, name
        for wrong, got in ((who[:32], "32 labels"), ("a" * 33, "'aaa"), (None, "None"), (np.ones((33, 1)), "33, 1")):
            with refused(ntkl.DataError, "the sources of 33 rows", got, "one label for each"):
                model.source_effects(x[:5], wrong)
    again = ntkl.LaplaceRegressor(**SINGLE, structure="diag", curvature="ef", predictive=None)
    x, y = sine(16)
    x, y, who = np.repeat(x, 3, 0), np.repeat(y, 3), ["a", "b", "b"] * 16  # b has each row twice: one point of b
    found = again.fit(x, y).source_effects(x[:3], who)
    assert found.num_points.tolist() == [16, 16]
    own = again.posterior_
    parts = (again.network_inputs(np.repeat(x[::3], 2, 0)), again.network_targets(np.repeat(y[::3], 2)),
             torch.tensor([1.0, 2.0]).repeat(16))
    whole = ntkl.laplace(again.network_, parts, own.likelihood, own.prior, "diag", "ef", dtype=own.dtype)
    wanted = of_targets(again, whole.source_effects(parts[0][[0, 0, 0]], ["a", "b"] * 16))
    assert relative_error(found.effect, wanted.effect) < 1e-6 and own.structure == "diag"
    assert relative_error(found.single, wanted.single) < 1e-6
    x, y = sine(16)
    model = ntkl.LaplaceRegressor(**SINGLE).fit(x, y)
    assert np.array_equal(model.training_point_, np.arange(16))
    found = model.source_effects(x[:3], ["a"] * 8 + ["b"] * 8)
    wanted = of_targets(model, model.posterior_.source_effects(model.network_inputs(x[:3]), ["a"] * 8 + ["b"] * 8))
    assert torch.allclose(found.effect, wanted.effect, rtol=1e-12)
    # a row without weight comes first, its copy last: points are in the order of first rows, weight or not
    late = ntkl.LaplaceRegressor(**SINGLE).fit(np.r_[x, x[:1]], np.r_[y, y[:1]], np.r_[0.0, np.ones(16)])
    assert np.array_equal(late.training_index_, np.arange(16)) and late.training_point_[-1] == 0
    found = late.source_effects(x[:3], ["b"] + ["a"] * 8 + ["b"] * 7 + ["a"])
    wanted = of_targets(late, late.posterior_.source_effects(late.network_inputs(x[:3]), ["a"] * 9 + ["b"] * 7))
    assert torch.allclose(found.effect, wanted.effect, rtol=1e-12)


def test_a_trained_network() -> None:
    """prefit=True: its weights stay, and the posterior is that of `laplace` with fitted hyperparameters."""
    x, y = sine(30)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    before = copy.deepcopy(network.state_dict())
    model = ntkl.LaplaceRegressor(network, prefit=True, predictive=None, structure="gp", noise=9.0).fit(x, y)
    data = torch.as_tensor(x).float(), torch.as_tensor(y)[:, None]
    posterior = ntkl.laplace(network, data, ntkl.Gaussian(noise=9.0), ntkl.GaussianPrior(groups="layer"), "gp")
    posterior.fit_hyperparameters()
    mean, std = model.predict(x, return_std=True)
    wanted = posterior.predict(data[0])
    assert relative_error(torch.as_tensor(mean), wanted.mean[:, 0].double()) < 1e-6
    assert relative_error(torch.as_tensor(std), wanted.variance[:, 0].sqrt().double()) < 1e-6
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())
    trained = ntkl.LaplaceRegressor(network, **QUICK | {"epochs": 10}, standardize=True).fit(x, y)
    assert trained.score(x, y) > 0.3
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())


class Net:
    """The part of a skorch net that an estimator reads."""

    def __init__(self, module: Any, criterion: Any, **options: Any) -> None:
        self.module, self.criterion, self._options = module, criterion, options
        if isinstance(module, nn.Module):
            self.module_ = module  # it is fitted

    def get_params_for(self, prefix: str) -> dict[str, Any]:
        assert prefix == "module"
        return self._options


class Probabilities(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3), nn.Softmax(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


@pytest.mark.slow
def test_a_net_whose_module_returns_probabilities() -> None:
    x, y = load_iris(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    model = ntkl.LaplaceClassifier(Net(Probabilities, nn.NLLLoss, width=6), epochs=30, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.9 and model.network_[0].layers[0].out_features == 6
    with torch.no_grad():
        plain = model.network_[0](torch.as_tensor(x))
    at_the_mode = model.posterior_.predict(torch.as_tensor(x), method="map").probs
    assert torch.allclose(plain.double(), at_the_mode, atol=1e-5)
    net = Net(nn.Linear(4, 3), nn.CrossEntropyLoss())
    assert isinstance(ntkl.LaplaceClassifier(net, epochs=2).fit(x, y).network_, nn.Linear)


@pytest.mark.slow
def test_a_fit_is_repeatable_and_leaves_the_global_generator() -> None:
    x, y = sine()
    state = torch.random.get_rng_state()
    first, second = (clone(ntkl.LaplaceRegressor(**SINGLE)).fit(x, y).predict(x) for _ in range(2))
    assert np.array_equal(first, second) and torch.equal(torch.random.get_rng_state(), state)
    other = ntkl.LaplaceRegressor(**SINGLE | {"random_state": 1}).fit(x, y).predict(x)
    assert not np.array_equal(first, other)


@pytest.mark.slow
def test_many_examples_take_fewer_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are steps in all, between the fewest and those of a small table."""
    x, y = sine(23)
    options = SINGLE | {"epochs": "auto", "predictive": None, "likelihood": "gaussian"}

    def epochs(steps: int, fewest: int, batch_size: int | None = 10) -> int:
        monkeypatch.setattr(tuning, "TRAINING_STEPS", steps)
        monkeypatch.setattr(tuning, "FEWEST_EPOCHS", fewest)
        return ntkl.LaplaceRegressor(**options | {"batch_size": batch_size}).fit(x, y).n_iter_

    assert epochs(20, 2) == 7  # of three minibatches
    assert epochs(20, 11) == 11
    assert epochs(20, 2, None) == 20
    assert epochs(20_000, 10, None) == 300
    classifier = ntkl.LaplaceClassifier(**SINGLE | {"epochs": "auto", "predictive": None})
    assert classifier.fit(x, np.sin(3 * x[:, 0]) > 0).n_iter_ == 100


@pytest.mark.slow
@pytest.mark.parametrize(("few", "classes"), [(23, True), (22, True), (23, False)])
def test_many_examples_make_two_layers(few: int, classes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a learning rate that falls to 0; a regression has both of few."""
    rates: list[float] = []
    train = estimator_training.train_with_evidence

    def watched(*given: Any, **options: Any) -> ntkl.EvidenceTraining:
        optimizers: list[torch.optim.Optimizer] = []
        made = options["optimizer"]
        found = train(*given, **options | {"optimizer": lambda own: optimizers.append(made(own)) or optimizers[0]})
        rates.append(optimizers[0].param_groups[0]["lr"])
        return found

    monkeypatch.setattr(estimator_training, "train_with_evidence", watched)
    monkeypatch.setattr(tuning, "EXAMPLES_OF_ONE_LAYER", few)
    x, y = sine(23)
    cls = ntkl.LaplaceClassifier if classes else ntkl.LaplaceRegressor
    model = cls(epochs=2, precision=1.0, random_state=0, hidden_layer_sizes="auto", predictive=None)
    model.fit(x, np.sin(3 * x[:, 0]) > 0 if classes else y)
    widths = [layer.out_features for layer in model.network_.modules() if isinstance(layer, nn.Linear)]
    large = few == 22 or not classes
    assert widths[:-1] == [32, 32][: 1 + large]
    assert rates == [pytest.approx(0.0 if large else 0.02, abs=1e-12)]


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"network": "cnn"}, ntkl.UnsupportedError, "cnn"),
    ({"network": lambda features, outputs: 3}, ntkl.UnsupportedError, "int"),
    ({"epochs": 0}, ntkl.HyperparameterError, "epochs"),
    ({"epochs": "many"}, ntkl.HyperparameterError, "epochs"),
    ({"epochs": "auto", "batch_size": 0}, ntkl.DataError, "batch size"),
    ({"epochs": "auto", "batch_size": "large"}, ntkl.DataError, "batch size"),
    ({"learning_rate": -1.0}, ntkl.HyperparameterError, "rate"),
    ({"activation": "cos"}, ntkl.UnsupportedError, "tanh"),
    ({"hidden_layer_sizes": (0,)}, ntkl.HyperparameterError, "0"),
    ({"hidden_layer_sizes": "wide"}, ntkl.HyperparameterError, "whole numbers"),
    ({"hidden_layer_sizes": [[1], [2, 3]]}, ntkl.HyperparameterError, "whole numbers"),
    ({"hidden_layer_sizes": 10**30}, ntkl.MemoryBudgetError, "weights of hidden_layer_sizes=10"),
    ({"standardize": "yes"}, ntkl.UnsupportedError, "standardize"),
    ({"standardize": np.ones(2)}, ntkl.UnsupportedError, "standardize"),
    ({"prefit": np.ones(2)}, ntkl.UnsupportedError, "prefit True or False"),
    ({"prefit": True}, ntkl.UnsupportedError, "trained"),
    ({"prefit": True, "precision": 1.0}, ntkl.UnsupportedError, "trained"),
    ({"verbose": "x"}, ntkl.UnsupportedError, "verbose True or False"),
    ({"linear_part": "yes"}, ntkl.UnsupportedError, 'linear_part True, False or "auto"'),
    ({"linear_part": True, "network": nn.Linear}, ntkl.UnsupportedError, "mlp"),
    ({"precision": -1.0}, ntkl.HyperparameterError, "precision"),
    ({"predictive": "mcmc"}, ntkl.UnsupportedError, "loo"),
])
def test_wrong_parameters(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ntkl.LaplaceRegressor(**QUICK | options).fit(*sine(10))


def test_wrong_data() -> None:
    x, y = sine(10)
    with refused(ntkl.DataError, "labels of at least two classes", "1 class, 'cat'", "another class"):
        ntkl.LaplaceClassifier(**SINGLE).fit(x, ["cat"] * 10)
    with refused(ntkl.UnsupportedError, "return_std or return_cov", "both", "diagonal"):
        ntkl.LaplaceRegressor(**SINGLE).fit(x, y).predict(x, return_std=True, return_cov=True)


@functools.cache
def two_targets() -> tuple[ntkl.LaplaceRegressor, np.ndarray]:
    x, y = sine(10, 2)
    return ntkl.LaplaceRegressor(**SINGLE).fit(x, y), y


@pytest.mark.parametrize("wrong", [1.0, [], [1.0, 2.0, 3.0], np.ones((3, 3))])
def test_targets_of_another_width_are_refused(wrong: Any) -> None:
    """A column of two targets would be taken as both."""
    model, y = two_targets()
    with refused(ntkl.DataError, r"y of shape \(n, 2\)", re.escape(str(np.shape(wrong))), "one row for each input"):
        model.network_targets(wrong)
    assert model.network_targets(y).shape == (10, 2)


DAYS = pd.date_range("2024-01-01", periods=10)


@pytest.mark.parametrize(("targets", "column", "got", "remedy"), [
    (["1", "b"] * 5, "y", "'b' in row 1", "LaplaceClassifier takes names"),
    (DAYS, "y", "dates or times, datetime64", "days since a date"),
    (DAYS.tz_localize("UTC"), "y", "dates or times, datetime64", "days since a date"),
    ((DAYS - DAYS[0]).to_numpy(), "y", "dates or times, timedelta64", "days since a date"),
    (pd.DataFrame({"a": np.arange(10), "b": DAYS}), "column 'b' of y", "dates or times, datetime64", "days since"),
])
def test_targets_that_are_no_numbers(targets: Any, column: str, got: str, remedy: str) -> None:
    """NumPy makes numbers of dates without a word."""
    with refused(ntkl.DataError, f"numbers in {column}", got, remedy):
        ntkl.LaplaceRegressor().fit(np.zeros((10, 1)), targets)


@pytest.mark.parametrize(("column", "got", "remedy"), [
    (["1", "b"] * 5, "'b' in row 1", "get_dummies"),
    (pd.Categorical(["a", "b"] * 5), "'a' in row 0", "OneHotEncoder"),
    (DAYS, "dates or times, datetime64", "days since a date"),
    (DAYS.tz_localize("UTC"), "dates or times, datetime64", "days since a date"),
    (DAYS - DAYS[0], "dates or times, timedelta64", "days since a date"),
    (DAYS.to_period("D"), "dates or times, period", "days since a date"),
])
def test_columns_that_are_no_numbers_are_named(column: Any, got: str, remedy: str) -> None:
    """At a fit and at a prediction; numbers as text, categories of numbers and missing types are numbers."""
    x, y = sine(10)
    frame = pd.DataFrame(x, columns=["a", "b"])
    wrong = frame.assign(b=column)
    for ask in (lambda: ntkl.LaplaceRegressor(**QUICK).fit(wrong, y), lambda: a_trained_one().predict(wrong)):
        with refused(ntkl.DataError, "numbers in column 'b' of X", got, remedy):
            ask()


def a_trained_one() -> ntkl.LaplaceRegressor:
    x, y = sine(10)
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(b=["1", "2"] * 5)
    return ntkl.LaplaceRegressor(hidden_layer_sizes=(2,), epochs=1, precision=1.0, predictive=None).fit(frame, y)


def test_a_network_that_does_not_take_real_numbers_is_told() -> None:
    x, y = sine(10)
    with refused(ntkl.NetworkError, r"takes X of shape \(2, 2\)", "indices", r"x\.long\(\)"):
        ntkl.LaplaceRegressor(nn.Sequential(nn.Embedding(9, 2), nn.Flatten()), epochs=1).fit(x, y)


def test_a_network_is_made_from_two_numbers() -> None:
    x, y = sine(10)
    with refused(ntkl.UnsupportedError, r"network\(features, outputs\)", r"of_one_argument\(features", "Take both"):
        ntkl.LaplaceRegressor(_linear_of_one_argument, epochs=1).fit(x, y)


def _linear_of_one_argument(features: int) -> nn.Module:
    return nn.Linear(features, 1)


def test_constant_columns_are_zero_in_any_unit() -> None:
    """Sums of large numbers are rounded: the mean of a constant is not the constant."""
    x, y = sine(10)
    table = np.column_stack([np.full(10, 1e30), 1e30 * (1 + 3e-16 * (np.arange(10) % 2)), np.full(10, 7.3), x])
    weight = np.arange(10) + 0.3
    found = Standardized.of(table, weight, True, ["x"] * table.shape[1])
    scaled = found(table)
    assert (scaled[:, [0, 2]] == 0).all() and np.abs(scaled[:, 1]).max() <= 1 and found.scale[2] == 1
    assert np.average(scaled[:, 3:], axis=0, weights=weight) == pytest.approx([0, 0], abs=1e-12)
    assert np.average(scaled[:, 3:] ** 2, axis=0, weights=weight) == pytest.approx([1, 1], rel=1e-9)
    model = ntkl.LaplaceRegressor(**SINGLE).fit(table[:, [0, 3, 4]], y)
    assert np.isfinite(model.predict(table[:, [0, 3, 4]])).all()


def test_columns_that_are_standardized_already_stay_as_they_are() -> None:
    """Their variance is 1 up to rounding, and of many its root is exactly 1."""
    table = np.random.default_rng(0).standard_normal((50, 300))
    table = (table - table.mean(0)) / table.std(0)
    assert ((table.var(0) != 1.0) & (table.std(0) == 1.0)).sum() > 30
    assert Standardized.of(table, None, True, ["x"] * 300)(table) == pytest.approx(table, abs=1e-12)


@pytest.mark.parametrize("targets", [1, 2])
def test_densities_of_the_predictive_fit_are_of_targets_in_their_own_units(targets: int) -> None:
    x, y = sine(30)
    y = y if targets == 1 else np.column_stack([y, 1e3 * x[:, 0] ** 2])
    model = ntkl.LaplaceRegressor(likelihood="gaussian", **SINGLE).fit(x, y)
    found, own = model.predictive_fit_, model.posterior_.fit_predictive("loo", strict=False)
    shift = -np.log(y.std(0)).sum()
    assert found.calibration == own.calibration
    for name in ("before", "after", "network"):
        assert getattr(found, name) == pytest.approx(getattr(own, name) + shift, rel=1e-6)
    assert found.reliability.density == pytest.approx(own.reliability.density + shift, rel=1e-6)
    assert found.gain == pytest.approx(own.gain, rel=1e-6) and found.reasons == own.reasons

@pytest.mark.slow
def test_units_of_any_size() -> None:
    """Single precision and extreme units of inputs and targets change nothing."""
    x, y = sine(30)
    x = np.round(x, 2).astype(np.float32)
    wanted = ntkl.LaplaceRegressor(**SINGLE).fit(x, y).predict(x)
    for unit in (1e-30, 1e30):
        found = ntkl.LaplaceRegressor(**SINGLE).fit((x * np.float32(unit)), y)
        assert np.allclose(found.predict(x * np.float32(unit)), wanted, rtol=1e-3)
        assert np.allclose(ntkl.LaplaceRegressor(**SINGLE).fit(x, y * unit).predict(x) / unit, wanted, rtol=1e-6)
    for unit in (1e-200, 1e200):
        named = pd.DataFrame(x.astype(np.float64) * unit).add_prefix("height ")
        for where, data in {
            "column 0 of X": (x.astype(np.float64) * unit, y), "column 'height 0' of X": (named, y), "y": (x, y * unit),
            "column 1 of y": (x, np.column_stack([y, y * unit])),
        }.items():
            with refused(ntkl.DataError, rf"magnitudes from 1e-140 to 1e\+140 in {where}", "at most", "another unit"):
                ntkl.LaplaceRegressor(**SINGLE).fit(*data)
    column = np.full((200000, 2), 7.3, np.float32)
    column[:, 1] = 1e4 + np.random.default_rng(0).standard_normal(200000)
    scaled = Standardized.of(column, None, True, ["a", "b"])
    assert scaled.mean == pytest.approx([7.3, 1e4], rel=1e-6) and scaled.scale == pytest.approx([1.0, 1.0], rel=1e-2)


def test_another_number_of_outputs() -> None:
    x, y = sine(12)
    for outputs, labels in ((3, y > 7), (1, np.arange(12) % 3)):
        with refused(ntkl.DataError, f"{len(set(labels))} outputs", f"{outputs}", "as wide"):
            ntkl.LaplaceClassifier(nn.Linear(2, outputs).double(), epochs=1).fit(x, labels)
    one = ntkl.LaplaceClassifier(nn.Linear(2, 1).double(), epochs=1).fit(x, y > 7)  # the logit of the second class
    assert one.predict_proba(x).shape == (12, 2) and one.posterior_.num_outputs == 2


@pytest.mark.slow
def test_a_bad_theta_leaves_the_fit_as_it_was() -> None:
    x, y = sine(20)
    for structure in ("full", "kfac", "gp"):
        model = ntkl.LaplaceRegressor(**SINGLE, structure=structure).fit(x, y)
        before = model.log_marginal_likelihood()
        for shift in (-720.0, 720.0):
            theta = model.theta_
            theta[-1] += shift
            with suppress(ntkl.NTKLaplaceError):
                model.log_marginal_likelihood(theta)
            assert model.log_marginal_likelihood() == pytest.approx(before, rel=1e-9)
    for shift in (-800.0, 800.0, np.inf):
        with refused(ntkl.HyperparameterError, "logarithms of finite numbers", "to", "like theta_"):
            model.log_marginal_likelihood(model.theta_ + shift)


@pytest.mark.slow
def test_a_fit_that_fails_leaves_nothing_of_another() -> None:
    """Labels and units of the new data would give the old network another meaning."""
    x = np.random.default_rng(0).standard_normal((20, 2))
    for model, labels, others in (
        (ntkl.LaplaceClassifier(epochs=2), np.where(x[:, 0] > 0, "cat", "dog"), np.where(x[:, 0] > 0, "yes", "no")),
        (ntkl.LaplaceRegressor(epochs=2), x[:, 0], 100.0 * x[:, 1]),
    ):
        model.fit(x, labels).set_params(network=lambda features, outputs: 1 / 0)
        with refused(ntkl.NetworkError, "an nn.Module from network", "ZeroDivisionError: division", "Take any"):
            model.fit(1000.0 * x, others)
        with pytest.raises(NotFittedError):
            model.predict(x)
        assert len(model.set_params(network="mlp").fit(x, labels).predict(x)) == 20


def test_before_a_fit() -> None:
    for ask in (lambda m: m.noise_, lambda m: m.explain([[0.0]]), lambda m: m.theta_,
                lambda m: m.original_inputs(torch.zeros(1, 1)), lambda m: m.source_effects([[0.0]], ["a"])):
        with pytest.raises(NotFittedError):
            ask(ntkl.LaplaceRegressor())


@pytest.mark.parametrize("estimator", [ntkl.LaplaceRegressor, ntkl.LaplaceClassifier])
def test_tools_of_dataclasses_see_the_parameters_alone(estimator: Any) -> None:
    model = estimator(epochs=7)
    assert dataclasses.asdict(model) == model.get_params()
    assert pd.DataFrame([model]).epochs.tolist() == [7]


@pytest.mark.parametrize(("labels", "got"), [
    (["a", None] * 5, "None in row 1"),
    ([1, None] * 5, "None in row 1"),
    ([None] * 10, "None in row 0"),
    ([2.0, np.nan] * 5, "nan in row 1"),
    (["a", np.nan] * 5, "nan in row 1"),
    (pd.Series([1, None] * 5, dtype="Int64"), "<NA> in row 1"),
])
def test_missing_labels_are_refused(labels: Any, got: str) -> None:
    with refused(ntkl.DataError, "a label for each example", got, "Drop the rows"):
        ntkl.LaplaceClassifier().fit(np.arange(20.0).reshape(10, 2), labels)


@pytest.mark.parametrize(("labels", "got"), [
    (["a", 1] * 5, "int and str"), ([b"a", 1] * 5, "bytes and int"), ([b"a", "b"] * 5, "bytes and str"),
])
def test_labels_of_several_types_are_refused(labels: Any, got: str) -> None:
    labels = np.array(labels, dtype=object)
    with refused(ntkl.DataError, "labels of one type", got, "all of them"):
        ntkl.LaplaceClassifier().fit(np.arange(20.0).reshape(10, 2), labels)


def test_strings_of_python_and_numpy_are_labels_of_one_type() -> None:
    """As in a list of names that others were taken from an array for."""
    labels, other = ["b", np.str_("a")] * 10, ["b", "a"] * 10
    x = np.arange(40.0).reshape(20, 2)
    fits = [ntkl.LaplaceClassifier(epochs=1, random_state=0).fit(x, one) for one in (labels, other)]
    assert [fit.classes_.tolist() for fit in fits] == 2 * [["a", "b"]]
    assert np.array_equal(*(fit.predict_proba(x) for fit in fits))
