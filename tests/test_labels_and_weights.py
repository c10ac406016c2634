"""Missing targets, soft labels and example weights against the same data written out: rows left out, or repeated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.func import grad, hessian
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from compared_fits import STRUCTURES, assert_same, dealt, fit
from noise import COVARIANCE, PER_ENTRY, PER_OUTPUT, C, N, draw
from ntk_laplace.curvature import CurvatureType
from ntk_laplace.metrics import held_out_scores, mean_log_likelihood
from ntk_laplace.model.likelihoods import Likelihood, Tempered
from ntk_laplace.model.network import Caller
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.predictive import predictive
from ntk_laplace.tools.comparison import compare_models
from ntk_laplace.tools.explorer.gather import gather
from ntk_laplace.tools.explorer.naming import Naming
from reference import Dense, difference, outputs, relative_error, take
from registry import LIKELIHOODS, PRIORS, problem, targets
from registry_cases import jacobians

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

NAN = float("nan")
F64 = torch.float64
THERE = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0], [1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0]], dtype=torch.bool)
SOFT = torch.softmax(2 * draw(8, N, C), 1)

# ------------------------------------------------------------------------------------------- likelihoods


def of_what_is_there(log_density: Callable[[int, Tensor, Tensor], float]) -> Callable[[Tensor, Tensor], list[float]]:
    """Σ over examples of a density of the outputs that are there, ``log_density(c, f, y)`` for one of them."""

    def density(f: Tensor, y: Tensor) -> list[float]:
        return [
            sum(float(log_density((n, c), f[n, c], y[n, c])) for c in range(C) if not y[n, c].isnan())
            for n in range(len(f))
        ]

    return density


def marginal(f: Tensor, y: Tensor) -> list[float]:
    """SciPy's normal density of the targets that are there."""
    found = []
    for mean, value in zip(f, y, strict=True):
        own = ~value.isnan()
        covariance = COVARIANCE[own][:, own].numpy()
        found.append(scipy.stats.multivariate_normal(mean[own].numpy(), covariance).logpdf(value[own].numpy())
                     if own.any() else 0.0)
    return found


def normal(variance: Tensor) -> Callable[[Tensor, Tensor], list[float]]:
    return of_what_is_there(lambda place, f, y: scipy.stats.norm(f, variance[place] ** 0.5).logpdf(y))


def cross_entropy(f: Tensor, y: Tensor) -> list[float]:
    """Σ_c y_c log p_c at temperature 1.7 by hand; 0 of a missing label."""
    found = []
    for row, label in zip((f / 1.7).tolist(), y.tolist(), strict=True):
        total = math.log(sum(math.exp(value) for value in row))
        share = [float(k == label) for k in range(C)] if isinstance(label, int) else label
        found.append(sum(q * (value - total) for q, value in zip(share, row, strict=True) if q > 0))
    return found


@dataclass(frozen=True)
class Case:
    """A likelihood with targets some of which are missing or soft, and its log density by other means."""

    name: str
    build: Callable[[], Likelihood]
    targets: Tensor
    reference: Callable[[Tensor, Tensor], list[float]]


def hidden(y: Tensor) -> Tensor:
    return y.double().masked_fill(~THERE, NAN)


REAL, COUNTS = hidden(draw(1, N, C)), hidden(torch.arange(N * C).reshape(N, C) % 6)
BINARY, ODDS = hidden(draw(2, N, C) > 0), hidden(torch.sigmoid(draw(9, N, C)))
LABELS = torch.tensor([0, 2, -100, 1, 2, -100, 0])
SOFT_MISSING = SOFT.clone().masked_fill((LABELS == -100).unsqueeze(1), -100.0)
CERTAIN = torch.eye(C, dtype=F64)[torch.arange(N) % C]
bernoulli = of_what_is_there(lambda place, f, y: y * f - math.log1p(math.exp(f)))
CASES = [
    Case("gaussian", lambda: ntkl.Gaussian(0.3, missing="nan"), REAL, normal(torch.full((N, C), 0.3, dtype=F64))),
    Case("output", lambda: ntkl.Gaussian(PER_OUTPUT, missing="nan"), REAL, normal(PER_OUTPUT.expand(N, C))),
    Case("entry", lambda: ntkl.Gaussian(PER_ENTRY, missing="nan"), REAL, normal(PER_ENTRY)),
    Case("covariance", lambda: ntkl.Gaussian(COVARIANCE, missing="nan"), REAL, marginal),
    Case("poisson", lambda: ntkl.Poisson(missing="nan"), COUNTS,
         of_what_is_there(lambda place, f, y: scipy.stats.poisson(math.exp(f)).logpmf(y))),
    Case("student", lambda: ntkl.StudentT(0.3, 4.0, "nan"), REAL,
         of_what_is_there(lambda place, f, y: scipy.stats.t(4.0, f, 0.3**0.5).logpdf(y))),
    Case("bernoulli", lambda: ntkl.Bernoulli(missing="nan"), BINARY, bernoulli),
    Case("bernoulli soft", lambda: ntkl.Bernoulli(missing="nan"), ODDS, bernoulli),
    Case("tempered", lambda: Tempered(ntkl.Bernoulli(missing="nan"), 2.5), BINARY,
         lambda f, y: [2.5 * value for value in bernoulli(f, y)]),
    Case("categorical", lambda: ntkl.Categorical(1.7), LABELS, cross_entropy),
    Case("categorical soft", lambda: ntkl.Categorical(1.7), SOFT, cross_entropy),
    Case("categorical certain", lambda: ntkl.Categorical(1.7), CERTAIN, cross_entropy),
    Case("categorical soft missing", lambda: ntkl.Categorical(1.7), SOFT_MISSING, cross_entropy),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
F = draw(3, N, C)


def bound(case: Case) -> tuple[Likelihood, Tensor]:
    """The likelihood and its targets in canonical form, which is a fixed point of reading them."""
    likelihood = case.build()
    likelihood.bind(N, C)
    y = likelihood.targets(case.targets, N, C)
    assert torch.equal(likelihood.targets(y, N, C).nan_to_num(7.0), y.nan_to_num(7.0))
    return likelihood, y


@each_case
def test_the_density_is_that_of_the_observed_targets(case: Case) -> None:
    likelihood, y = bound(case)
    expected = torch.tensor(case.reference(F, case.targets), dtype=F64)
    torch.testing.assert_close(likelihood.log_prob(F, y).detach(), expected, rtol=1e-12, atol=1e-12)


@each_case
def test_derivatives_are_those_of_the_density(case: Case) -> None:
    likelihood, y = bound(case)
    torch.testing.assert_close(likelihood.residual(F, y), grad(lambda f: likelihood.log_prob(f, y).sum())(F),
                               rtol=1e-12, atol=1e-14)
    full = hessian(lambda f: likelihood.log_prob(f, y).sum())(F)
    own, root = likelihood.curvature(F, y), likelihood.root(F, y)
    if case.name != "student":  # whose curvature is the Fisher information
        torch.testing.assert_close(own, torch.stack([-full[n, :, n] for n in range(N)]), rtol=1e-12, atol=1e-14)
    assert root.shape == (N, C, likelihood.rank(C))
    torch.testing.assert_close(root @ root.mT, own, rtol=1e-12, atol=1e-14)


@each_case
def test_derivatives_in_hyperparameters_are_finite_where_targets_are_missing(case: Case) -> None:
    likelihood, y = bound(case)
    values = [likelihood.log_prob(F, y), likelihood.residual(F, y), likelihood.curvature(F, y), likelihood.root(F, y)]
    total = sum(value.sin().sum() for value in values)
    for gradient in torch.autograd.grad(total, list(likelihood.parameters())) if list(likelihood.parameters()) else ():
        assert gradient.isfinite().all()


@each_case
@pytest.mark.parametrize("curvature", ["ef", "mc"])
def test_other_roots_know_what_is_missing(case: Case, curvature: str) -> None:
    """Labels are drawn for all points, and count where there is one; elsewhere nothing changes."""
    likelihood, y = bound(case)
    root = CurvatureType(curvature, samples=3).root(likelihood, F, y)
    observed = likelihood.observed(y)
    if observed is None:
        assert case.name in ("categorical soft", "categorical certain")
        return
    there = observed if observed.ndim == 2 else observed.unsqueeze(1).expand(N, C)
    assert (root[~there] == 0).all()
    if curvature == "mc" and case.name != "covariance":  # whose outputs are not apart
        all_there = torch.zeros(N, dtype=torch.long) if "categorical" in case.name else torch.zeros(N, C, dtype=F64)
        whole = CurvatureType("mc", samples=3).root(likelihood, F, all_there)
        torch.testing.assert_close(root[there], whole[there], rtol=0, atol=0)


def test_drawn_labels_move_no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor that of accelerators which the fit does not use: nothing would restore it."""
    moved: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", moved.append)
    state, likelihood = torch.get_rng_state(), ntkl.Categorical()
    one, other = (CurvatureType("mc", samples=3).root(likelihood, F, torch.zeros(N, dtype=torch.long)) for _ in "ab")
    assert not moved and torch.equal(state, torch.get_rng_state()) and torch.equal(one, other)


@each_case
@pytest.mark.parametrize("method", ["glm", "blr", "map"])
def test_predictions_are_scored_on_observed_targets(case: Case, method: str) -> None:
    """The density of a row is that of its targets that are there, from the marginal prediction of those alone."""
    likelihood, y = bound(case)
    if case.name in ("entry", "tempered"):
        return  # noise per entry has no new points, and the weight is no part of a prediction
    likelihood = likelihood.for_new_points()
    root = 0.4 * draw(4, N, C, C)
    covariance = root @ root.mT
    generator = torch.Generator().manual_seed(0)

    with torch.no_grad():
        response = predictive(likelihood, F, covariance * (method != "map"), method, 200, generator, False)
        found = response.log_prob(case.targets)
        assert found.shape == (N,) and found.isfinite().all()
        observed = likelihood.observed(y)
        if observed is None:
            return
        assert torch.equal(response.present(case.targets), observed.reshape(N, -1).any(1))
        assert (found[~observed.reshape(N, -1).any(1)] == 0).all()
        if case.name.startswith(("gaussian", "covariance")):
            total = covariance * (method != "map") + likelihood.response_covariance(F)
            for n in range(N):
                own = THERE[n]
                if own.any():
                    normal_ = scipy.stats.multivariate_normal(F[n][own].numpy(), total[n][own][:, own].numpy())
                    assert float(found[n]) == pytest.approx(normal_.logpdf(REAL[n][own].numpy()), rel=1e-10)


def test_predicted_probabilities_score_soft_labels() -> None:
    """Σ_c y_c log p_c of the averaged probabilities, with samples in front too."""
    likelihood = ntkl.Categorical(1.7)
    with torch.no_grad():
        response = likelihood.average(F + 0.3 * draw(5, 6, N, C))
        torch.testing.assert_close(response.log_prob(SOFT), (SOFT * response.probs.log()).sum(1))
        torch.testing.assert_close(response.log_prob(SOFT.expand(4, N, C)), response.log_prob(SOFT).expand(4, N))
        torch.testing.assert_close(response.log_prob(CERTAIN), response.log_prob(CERTAIN.argmax(1)))
        one = ntkl.Bernoulli().average(F[None, :, :1] + 0.3 * draw(6, 5, N, 1))
        y = SOFT[:, :1]
        torch.testing.assert_close(one.log_prob(y), (y * one.probs.log() + (1 - y) * (1 - one.probs).log()).sum(1))


def test_the_mark_of_missing_targets_must_be_given() -> None:
    for likelihood in (ntkl.Gaussian(), ntkl.Bernoulli(), ntkl.Poisson()):
        name = type(likelihood).__name__
        with pytest.raises(ntkl.NonFiniteError, match=rf'{name}\(missing="nan"\)'):
            likelihood.targets(torch.tensor([[0.0], [NAN]]), 2, 1)
        with pytest.raises(ntkl.HyperparameterError, match='missing="nan", or None'):
            type(likelihood)(missing="zero")
    with pytest.raises(ntkl.NonFiniteError, match="A missing class label is -100"):
        ntkl.Categorical().targets(torch.tensor([0.0, NAN]), 2, 2)
    assert ntkl.Categorical().targets(torch.tensor([0.0, -100.0]), 2, 2).tolist() == [0, -100]
    with pytest.raises(ntkl.TargetError, match=r"sum to 1; got \[0.5, 0.6\] at example 1"):
        ntkl.Categorical().targets(torch.tensor([[0.5, 0.5], [0.5, 0.6]]), 2, 2)


# ------------------------------------------------------------------------------------------- fits


GONE = [1, 4]
MISSING = {
    "categorical": (lambda: ntkl.Categorical(1.7), "categorical", -100),
    "bernoulli": (lambda: ntkl.Bernoulli(missing="nan"), "bernoulli", NAN),
    "gaussian": (lambda: ntkl.Gaussian(0.3, missing="nan"), "gaussian", NAN),
    "poisson": (lambda: ntkl.Poisson(missing="nan"), "poisson", NAN),
}


@pytest.mark.parametrize(("structure", "name", "likelihood", "curvature"), dealt([
    ("deep_mlp", "categorical", "ggn"), ("cnn_groups", "bernoulli", "ggn"), ("transformer_tied", "categorical", "ef"),
    ("scalar_outputs", "gaussian", "ggn"), ("layer_twice", "poisson", "ef"),
]))
def test_an_example_without_a_target_is_no_example(structure, name, likelihood, curvature) -> None:
    own, (build, kind, mark) = problem(name), MISSING[likelihood]
    y = targets(LIKELIHOODS[kind], own).clone()
    left = [n for n in range(len(y)) if n not in GONE]
    y[GONE] = mark
    found = fit(name, build(), (own.x, y), STRUCTURES[structure], curvature=curvature)
    want = fit(name, build(), (take(own.x, left), y[left]), STRUCTURES[structure], curvature=curvature)
    assert_same(found, want, own.x_new)
    assert (found.num_examples, want.num_examples) == (len(y), len(left))


DENSE = {
    "bernoulli": (lambda: ntkl.Bernoulli(missing="nan"), "bernoulli"),
    "noise per output": (lambda: ntkl.Gaussian(torch.linspace(0.1, 2, 5), missing="nan"), "gaussian"),
    "noise covariance": (lambda: ntkl.Gaussian(torch.eye(5) + 0.3, missing="nan"), "gaussian"),
    "poisson": (lambda: ntkl.Poisson(missing="nan"), "poisson"),
    "soft": (lambda: ntkl.Categorical(1.7), "soft"),
    "soft bernoulli": (lambda: ntkl.Bernoulli(missing="nan"), "odds"),
}


def partly_missing(kind: str) -> Tensor:
    """Targets of deep_mlp with some outputs missing, the third example's all."""
    own = problem("deep_mlp")
    if kind == "soft":
        return torch.softmax(2 * draw(8, 7, 5), 1).masked_fill((torch.arange(7) == 2).unsqueeze(1), -100.0)
    y = torch.sigmoid(draw(8, 7, 5)) if kind == "odds" else targets(LIKELIHOODS[kind], own)
    gone = draw(7, *y.shape) > 0.5
    gone[2] = True
    return y.masked_fill(gone, NAN)


@pytest.mark.parametrize("kind", DENSE)
def test_outputs_without_a_target_carry_no_information(kind: str) -> None:
    """Against the P x P matrices, with derivatives of the likelihood's own density by autograd; gradients too."""
    build, which = DENSE[kind]
    own, y, likelihood = problem("deep_mlp"), partly_missing(which), build()
    likelihood.bind(*y.shape)
    f, density = outputs(own.network, own.x), lambda f: likelihood.log_prob(f, likelihood.targets(y, 7, 5))
    full = hessian(lambda f: density(f).sum())(f).detach()
    precision, mean = PRIORS["layer"].dense(own)
    truth = Dense(density(f).detach(), grad(lambda f: density(f).sum())(f).detach(),
                  torch.stack([-full[n, :, n] for n in range(7)]), jacobians("deep_mlp")[0], own.theta - mean,
                  precision)
    for structure in ("gp", "full"):
        posterior = fit("deep_mlp", build(), (own.x, y), structure)
        assert relative_error(posterior.log_marginal_likelihood(), truth.evidence()) < 1e-9
        evidence = posterior.log_marginal_likelihood(correction=True)
        assert relative_error(evidence, truth.evidence(correction=True)) < 1e-9
        assert relative_error(evidence, truth.regression_evidence()) < 1e-9
        jac = jacobians("deep_mlp")[1]
        assert relative_error(posterior.latent(own.x_new).covariance_matrix, truth.latent_covariance(jac)) < 1e-8
        moving = list(posterior.likelihood.parameters())
        gradients = torch.autograd.grad(evidence, moving) if moving else ()
        for parameter, found in zip(moving, gradients, strict=True):
            direction = draw(11, parameter.numel()).view(parameter.shape)
            slope = difference(lambda p=posterior: p.log_marginal_likelihood(correction=True), parameter, direction)
            assert float((found * direction).sum()) == pytest.approx(float(slope), rel=1e-6, abs=1e-8)
    diagonal = fit("deep_mlp", build(), (own.x, y), "diag")
    exact = (truth.posterior_precision - torch.diag(precision)).diagonal()
    assert relative_error(diagonal.log_det(), torch.log1p(exact / precision).sum()) < 1e-9


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_soft_labels_that_are_certain_are_labels(structure: str) -> None:
    """One-hot rows give what labels give; other rows have their curvature."""
    own, labels = problem("deep_mlp"), targets(LIKELIHOODS["categorical"], problem("deep_mlp"))
    rows = torch.eye(5)[labels]  # float32 for a float64 network
    hard, certain = (fit("deep_mlp", ntkl.Categorical(1.7), (own.x, y), STRUCTURES[structure]) for y in (labels, rows))
    assert_same(certain, hard, own.x_new, 1e-12)
    soft = fit("deep_mlp", ntkl.Categorical(1.7), (own.x, torch.softmax(draw(4, 7, 5), 1)), STRUCTURES[structure])
    assert relative_error(soft.log_det(), hard.log_det()) < 1e-12
    assert relative_error(soft.log_joint(), hard.log_joint()) > 1e-2


def test_the_fixed_point_of_the_noise_counts_observed_targets() -> None:
    """MacKay's noise is the evidence's maximum: L-BFGS comes to the same, and a mean over all entries does not."""
    own, y = problem("linear_model"), draw(5, 7, 3).masked_fill(draw(6, 7, 3) > 0.6, NAN)
    found = []
    for method, options in (("mackay", {"steps": 2000}), ("lbfgs", {})):
        posterior = fit("linear_model", ntkl.Gaussian(0.5, missing="nan"), (own.x, y))
        posterior.fit_hyperparameters(method, ["noise"], tolerance=1e-9, **options)
        found.append(posterior.likelihood.noise.item())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_data_without_any_target_are_refused() -> None:
    own = problem("deep_mlp")
    for structure in ("gp", "full", "kfac"):
        with pytest.raises(ntkl.DataError, match="at least one example with a target and a positive weight; got none"):
            fit("deep_mlp", ntkl.Categorical(), (own.x, torch.full((7,), -100)), structure)


# ------------------------------------------------------------------------------------------- what is asked of them


def missing_fit(structure: str = "gp", **options: Any):
    own = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], own).clone()
    y[GONE] = -100
    return fit("deep_mlp", ntkl.Categorical(1.7), (own.x, y), structure, **options), own, y


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_explanations_of_training_points_without_a_target(structure: str) -> None:
    """They have no share in anything, and are predicted by the others; a target found later is a relabel."""
    posterior, own, y = missing_fit(structure)
    left = posterior.leave_one_out()
    for column in ("log_density", "leverage", "information", "effective_parameters", "importance"):
        assert (getattr(left, column)[GONE].abs() < 1e-12).all()
    assert relative_error(left.mean[GONE], posterior.f[GONE]) < 1e-12
    assert len(left.to_dataframe()) == len(y)
    effects = posterior.removal_effects(own.x_new)
    assert (effects[:, GONE].abs() < 1e-12).all() and (effects.abs().sum(0) > 0).sum() == len(y) - len(GONE)
    truth = targets(LIKELIHOODS["categorical"], own)
    whole = fit("deep_mlp", ntkl.Categorical(1.7), (own.x, truth), structure)
    found = posterior.relabel(GONE, truth[GONE])
    if structure != "kfac":
        assert relative_error(found.latent_moments(own.x_new)[1], whole.latent_moments(own.x_new)[1]) < 1e-9
    hidden_ = whole.relabel(GONE, [-100, -100])
    removed = whole.remove(GONE)
    for one, other in zip(hidden_.latent_moments(own.x_new), removed.latent_moments(own.x_new), strict=True):
        assert relative_error(one, other) < 1e-9


@pytest.mark.parametrize("structure", ["gp", "full", "ekfac", "diag"])
def test_a_label_may_become_a_soft_one(structure: str) -> None:
    """Labels become rows of probabilities, a missing one a missing row; certain ones change nothing."""
    posterior, own, y = missing_fit(structure)
    certain = posterior.relabel([0, 2], torch.eye(5, dtype=F64)[y[[0, 2]]])
    assert certain.targets.shape == (7, 5) and (certain.targets[GONE] == -100).all()
    for one, other in zip(certain.latent_moments(own.x_new), posterior.latent_moments(own.x_new), strict=True):
        assert relative_error(one, other) < 1e-9
    soft = torch.softmax(draw(3, 5), 0)
    moved = posterior.relabel(0, soft)
    both = torch.stack([torch.eye(5, dtype=F64)[y[0]], soft])
    change = (both[1] - both[0]) / 1.7  # of the residual
    want = posterior.f.new_zeros(0)
    whole = torch.cat([own.x_new, own.x[:1]])
    if structure in ("gp", "full"):
        cross = posterior.latent(whole).covariance_matrix.view(5, 5, 5, 5)[:4, :, 4]
        want = posterior.outputs(own.x_new) + cross @ change
        assert relative_error(moved.latent_moments(own.x_new)[0], want) < 1e-8
    assert relative_error(moved.latent_moments(own.x_new)[1], posterior.latent_moments(own.x_new)[1]) < 1e-9


def test_a_target_that_stays_missing_is_no_change() -> None:
    """NaN differs from itself, and a point without a target is none of those that a what-if reads anew."""
    data = problem("deep_mlp").x, partly_missing("bernoulli")
    posterior = fit("deep_mlp", ntkl.Bernoulli(missing="nan"), data, "diag")
    assert posterior.remove(0).fitted.structure.index.tolist() == [0]


def test_explanations_of_missing_and_soft_targets() -> None:
    posterior, own, _ = missing_fit()
    asked = torch.tensor([2, -100, 0, 1])
    found = posterior.explain(own.x_new, by="log_likelihood", y=asked)
    assert found.output.tolist() == [2, int(posterior.outputs(own.x_new)[1].argmax()), 0, 1]
    assert (found.effect[1] == 0).all() and (found.effect[0] != 0).any()
    rows = torch.eye(5, dtype=F64)[asked.clamp_min(0)]
    certain = posterior.explain(own.x_new, by="log_likelihood", y=rows)
    torch.testing.assert_close(certain.effect[[0, 2, 3]], found.effect[[0, 2, 3]])
    assert len(found.to_dataframe()) > 0


@pytest.mark.parametrize("kind", ["categorical", "soft", "bernoulli"])
def test_the_page_marks_missing_targets(kind: str) -> None:
    posterior, own, y = missing_fit()
    if kind == "soft":
        y = torch.eye(5, dtype=F64)[y.clamp_min(0)].masked_fill((y == -100).unsqueeze(1), -100.0)
        posterior = fit("deep_mlp", ntkl.Categorical(), (own.x, y))
    asked: Tensor = torch.tensor([2, -100, 0, 1])
    if kind == "bernoulli":
        own = problem("scalar_outputs")
        y = targets(LIKELIHOODS["bernoulli"], own).clone()
        y[GONE] = NAN
        posterior = fit("scalar_outputs", ntkl.Bernoulli(missing="nan"), (own.x, y))
        asked = torch.tensor([1, NAN, 0.2, 1])
    record = gather(posterior, own.x_new, own.x, asked, 2, Naming(), progress=False)
    for place, shown in enumerate(record["training"]["target"]):
        assert (shown is None) == (place in GONE)
    assert [point.get("target") for point in record["points"]] == ([1, None, 0, 1] if kind == "bernoulli" else
                                                                   [2, None, 0, 1])


def test_scores_count_observed_targets() -> None:
    posterior, own, _ = missing_fit()
    response, asked = posterior.predict(own.x_new, "probit"), torch.tensor([2, -100, 0, 1])
    left = [0, 2, 3]
    fewer = posterior.predict(own.x_new[left], "probit")
    assert held_out_scores(response, asked) == pytest.approx(held_out_scores(fewer, asked[left]))
    soft = torch.softmax(draw(2, 4, 5), 1)
    assert set(held_out_scores(response, soft)) == {"log_likelihood"}
    model = fit("deep_mlp", ntkl.Gaussian(0.3, missing="nan"), (own.x, partly_missing("gaussian")))
    y = draw(3, 4, 5)
    y[0, 1], y[2] = NAN, NAN
    scores, mean = held_out_scores(model.predict(own.x_new), y), model.predict(own.x_new).mean
    assert scores["rmse"] == pytest.approx(float((mean - y)[~y.isnan()].square().mean().sqrt()))
    whole = model.predict(own.x_new).log_prob(y)
    assert scores["log_likelihood"] == pytest.approx(float(whole.sum() / 3)) == mean_log_likelihood(
        model.predict(own.x_new), y)


def test_models_of_the_same_missing_targets_are_compared() -> None:
    own, y = problem("deep_mlp"), partly_missing("gaussian")
    models = {name: fit("deep_mlp", ntkl.Gaussian(noise, missing="nan"), (own.x, y))
              for name, noise in (("a", 0.3), ("b", 1.0))}
    assert len(compare_models(models).rows) == 2
    with pytest.raises(ntkl.DataError, match="other targets"):
        compare_models(models | {"c": fit("deep_mlp", ntkl.Gaussian(0.3), (own.x, y.nan_to_num()))})


@pytest.mark.parametrize("include_data", [False, True])
def test_a_checkpoint_remembers_what_marks_a_missing_target(include_data: bool, tmp_path: Any) -> None:
    own, y = problem("deep_mlp"), partly_missing("bernoulli")
    posterior = fit("deep_mlp", ntkl.Bernoulli(missing="nan"), (own.x, y), "full")
    posterior.save(tmp_path / "p.pt", include_data=include_data)
    for data in (None, (own.x, y)):
        loaded = ntkl.load(tmp_path / "p.pt", own.network, data)
        assert loaded.likelihood.missing == "nan" and "N=7" in repr(loaded)
        assert relative_error(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood()) < 1e-12
        assert relative_error(loaded.bic(), posterior.bic()) < 1e-12
    with pytest.raises(ntkl.DataError, match="Pass the data that the posterior was fitted to"):
        ntkl.load(tmp_path / "p.pt", own.network, (own.x, y.nan_to_num(0.0)))


def test_training_skips_what_is_missing() -> None:
    """The loss's gradient is that of the labels that are there; the first minibatch may have none of them."""
    x, y = draw(1, 12, 2), torch.tensor([-100] * 6 + [0, 1, 2, 0, 1, 2])
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    prior = ntkl.GaussianPrior(2.0).bind({name: p.shape for name, p in network.named_parameters()})
    gradients = []
    for data in ((x, y), (x[6:], y[6:])):
        objective = Objective(Caller(network), ntkl.Categorical(), prior, len(data[1]), 3)
        objective.settle()
        network.zero_grad()
        objective.gradient(*data)
        gradients.append(objective.scale * torch.cat([p.grad.flatten() for p in network.parameters()]))
    torch.testing.assert_close(*gradients)
    result = ntkl.train_with_evidence(
        network, DataLoader(TensorDataset(x, y), 6), ntkl.Categorical(), structure="full", epochs=2,
        optimizer=torch.optim.Adam, schedule=ntkl.EvidenceSchedule(frequency=2, steps=3),
    )
    want = ntkl.laplace(network, (x[6:], y[6:]), ntkl.Categorical(), result.posterior.prior, "full")
    assert relative_error(result.posterior.log_marginal_likelihood(), want.log_marginal_likelihood()) < 1e-9


@pytest.mark.parametrize("structure", ["gp", "full", "diag"])
def test_independent_labels_are_as_many_problems(structure: str) -> None:
    """C labels of C networks side by side, soft and missing ones too, against each network with its own label."""

    class Beside(nn.Module):
        def __init__(self, networks: list[nn.Module]) -> None:
            super().__init__()
            self.networks = nn.ModuleList(networks)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([network(x) for network in self.networks], 1)

    torch.manual_seed(3)
    networks = [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double() for _ in range(C)]
    x, x_new = draw(20, N, 2), draw(21, 4, 2)
    y = torch.where(THERE, draw(22, N, C).sigmoid(), NAN)
    y[0] = torch.tensor([0.0, 1.0, 0.0])
    together = ntkl.laplace(Beside(networks), (x, y), ntkl.Bernoulli(missing="nan"), ntkl.GaussianPrior(3.0), structure)
    predicted, value = together.predict(x_new), 0.0
    assert predicted.probs.shape == (4, C)
    for c, network in enumerate(networks):
        there = THERE[:, c]
        data, prior = (x[there], y[there, c]), ntkl.GaussianPrior(3.0)
        alone = ntkl.laplace(network, data, ntkl.Bernoulli(), prior, structure)
        value = value + alone.log_marginal_likelihood()
        mean, covariance = alone.latent_moments(x_new)
        found = together.latent_moments(x_new)
        assert relative_error(found[0][:, c], mean[:, 0]) < 1e-12
        assert relative_error(found[1][:, c, c], covariance[:, 0, 0]) < 1e-9
        assert relative_error(predicted.probs[:, c], alone.predict(x_new, samples=4096).probs[:, 0]) < 2e-3
        assert found[1][:, c, (c + 1) % C].abs().max() < 1e-12
    assert relative_error(together.log_marginal_likelihood(), value) < 1e-9


def test_a_point_of_weight_zero_leaves_no_nan_where_it_is_infinitely_unlikely() -> None:
    from ntk_laplace.structures.points import TrainingPoints

    f, y = torch.tensor([[800.0], [0.5]]).double(), torch.tensor([[3.0], [1.0]]).double()
    weights, likelihood = torch.tensor([0.0, 2.0]).double(), ntkl.Poisson()
    assert likelihood.log_prob(f, y)[0] == -torch.inf
    alone = TrainingPoints(f[1:], y[1:], weights[1:])
    assert TrainingPoints(f, y, weights).log_likelihood(likelihood) == alone.log_likelihood(likelihood)
