"""Conditional evidence and the other criteria, against evidences of both data sets from dense matrices."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ntk_laplace as ntkl
from exact_cases import TURNS, fit, ids, trained, truth
from ntk_laplace.model.predictive import predictive
from ntk_laplace.posterior.conditional import rest_given
from ntk_laplace.posterior.scores import orders
from pairwise import one_each
from reference import Dense, call, relative_error, take
from refusals import inputs, labels, network, refused
from registry import LIKELIHOODS, NOISE, PRIORS, problem, targets
from registry_cases import tolerance

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
STRUCTURES = ("gp", "full", "kfac", "ekfac", "inf", "diag")


def part(dense: Dense, index: Tensor) -> Dense:
    """The same weights and prior, some of the points."""
    own = {name: getattr(dense, name)[index] for name in ("log_prob", "residual", "hessian", "jac")}
    return replace(dense, **own)


def half(n: int) -> int:
    return max(1, n // 2)


# --- conditional evidence in closed form


@pytest.mark.parametrize(("case", "structure"), one_each(TURNS, ("gp", "full")),
                         ids=lambda value: value if isinstance(value, str) else ids(value))
def test_conditional_evidence_is_the_difference_of_two_evidences(case, structure):
    """[L22] Eq. 5 with the evidence of [T20] Theorem 3.3 of all points, less that of the first m, each on its own."""
    reference, limit = truth(*case), tolerance(case[0], 1e-8)
    n = len(reference.log_prob)
    m, whole = half(n), reference.regression_evidence()
    first = part(reference, torch.arange(m)).regression_evidence()
    each = [part(reference, order[:m]).regression_evidence() for order in orders(n, 3, 5)]
    posterior = fit(*case, structure)
    own = posterior.conditional_log_marginal_likelihood(m, permutations=0)
    assert relative_error(own, whole - first) < limit
    mean = posterior.conditional_log_marginal_likelihood(m, permutations=3, seed=5)
    assert relative_error(mean, whole - torch.stack(each).mean()) < limit


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_each_term_of_the_learning_curve_is_a_difference_of_evidences(case):
    """[L22] Eq. 4: one factorization beside one dense evidence for every beginning of the data."""
    reference, limit = truth(*case), tolerance(case[0], 1e-8)
    n = len(reference.log_prob)
    curve = fit(*case, "gp").learning_curve(permutations=2, seed=1)
    for order, terms in zip(orders(n, 2, 1), curve.terms, strict=True):
        evidences = [torch.zeros(()).double()]
        evidences += [part(reference, order[: count + 1]).regression_evidence() for count in range(n)]
        scale = max(float(evidence.abs()) for evidence in evidences)
        found = terms.cumsum(0)
        assert (found - torch.stack(evidences[1:])).abs().max() < limit * scale
    for m in (0, half(n)):
        direct = fit(*case, "gp").conditional_log_marginal_likelihood(m, permutations=2, seed=1)
        assert curve.conditional(m) == pytest.approx(float(direct), rel=limit, abs=limit * scale)
    assert curve.evidence == pytest.approx(float(reference.evidence(correction=True)), rel=limit)


def test_a_regression_is_plain_gaussian_process_regression():
    """log N(y; mean, K + σ²I) of all targets less that of the first m, for a linear model at any weights."""
    torch.manual_seed(3)
    x, y = torch.randn(14, 3).double(), torch.randn(14, 2).double()
    network = nn.Linear(3, 2).double()  # far from its optimum, which must not matter
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.3), ntkl.GaussianPrior(0.7, mean=0.2))
    design = torch.cat([x, torch.ones(14, 1).double()], 1)
    mean = (design @ torch.full((4,), 0.2, dtype=torch.float64)).repeat_interleave(2)
    kernel = torch.kron(design @ design.T, torch.eye(2).double()) / 0.7

    def evidence(points: Tensor) -> Tensor:
        at = (2 * points[:, None] + torch.arange(2)).flatten()
        noisy = kernel[at][:, at] + 0.3 * torch.eye(len(at)).double()
        return torch.distributions.MultivariateNormal(mean[at], noisy).log_prob(y[points].flatten())

    everything = evidence(torch.arange(14))
    for m in (1, 9, 13):
        given = posterior.conditional_log_marginal_likelihood(m, permutations=4, seed=2)
        truth = everything - torch.stack([evidence(order[:m]) for order in orders(14, 4, 2)]).mean()
        assert relative_error(given, truth) < 1e-10
    # conditioning is joint: the marginals of the points left out add up to something else
    order = torch.arange(14)
    alone = sum(evidence(torch.cat([order[:9], order[i : i + 1]])) - evidence(order[:9]) for i in range(9, 14))
    joint = posterior.conditional_log_marginal_likelihood(9, permutations=0)
    assert abs(alone - joint) > 1e-2
    assert float(posterior.conditional_log_marginal_likelihood(9, 0, method="average", scale=1.0)) == pytest.approx(
        float(alone), rel=1e-10
    )


@pytest.mark.parametrize("curvature", ["ef", "mc"])
def test_other_roots_obey_the_product_rule(curvature):
    """Residuals outside the range of S too: the terms add up to the evidence with correction."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), curvature=curvature)
    total = posterior.log_marginal_likelihood(correction=True)
    sums = posterior.learning_curve(3).terms.sum(1)
    assert relative_error(sums, total.expand(3)) < 1e-9
    given = posterior.conditional_log_marginal_likelihood(4, permutations=0)
    assert relative_error(given, posterior.learning_curve(0).terms[0, 4:].sum()) < 1e-9
    if curvature == "ef":
        full = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), structure="full", curvature="ef")
        assert relative_error(full.conditional_log_marginal_likelihood(4, permutations=0), given) < 1e-9


def test_a_saturated_and_wrong_point_is_no_infinity():
    """Λ = 0 where the label has probability 1e-300: pseudo-targets would be infinite."""
    network = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[700.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 0.4], [0.0, -1.0]]).double()
    y = torch.tensor([1, 1, 2, 0])
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(2.0))
    curve = posterior.learning_curve(0)
    assert relative_error(curve.terms.sum(), posterior.log_marginal_likelihood(correction=True)) < 1e-10
    for m in (1, 2, 3):
        start = ntkl.laplace(network, (x[:m], y[:m]), ntkl.Categorical(), ntkl.GaussianPrior(2.0))
        assert float(curve.terms[0, :m].sum()) == pytest.approx(
            start.log_marginal_likelihood(correction=True).item(), rel=1e-10
        )


def test_noise_of_each_point_stays_with_its_point():
    case = problem("deep_mlp")
    n = case.case.examples
    y = LIKELIHOODS["gaussian"].targets(n, case.case.outputs)
    noise = torch.linspace(0.1, 2.0, n).double()
    posteriors = [
        ntkl.laplace(case.network, (case.x, y), ntkl.Gaussian(noise, kind="point"), structure=structure)
        for structure in ("gp", "full")
    ]
    for order in orders(n, 2, 0):
        index = order[: half(n)]
        alone = ntkl.laplace(case.network, (case.x[index], y[index]), ntkl.Gaussian(noise[index], kind="point"))
        for posterior in posteriors:
            found = posterior.subset(index).log_marginal_likelihood()
            assert relative_error(found, alone.log_marginal_likelihood()) < 1e-9
    gp, full = (posterior.conditional_log_marginal_likelihood(half(n), 2) for posterior in posteriors)
    assert relative_error(gp, full) < 1e-8
    kfac = ntkl.laplace(case.network, (case.x, y), ntkl.Gaussian(noise, kind="point"), structure="kfac")
    assert math.isfinite(kfac.conditional_log_marginal_likelihood(half(n), 2))


# --- [L22] appendix B


@functools.cache
def classes() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(40, 3).double()
    y = (x[:, 0] + 0.5 * torch.randn(40).double() > 0).long() + (x[:, 1] > 1).long()
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return network, x, y


def of_classes(structure: object, data: object = None, **options) -> ntkl.Posterior:
    network, x, y = classes()
    prior = ntkl.GaussianPrior(0.5, groups="layer")
    return ntkl.laplace(network, (x, y) if data is None else data, ntkl.Categorical(), prior, structure, **options)


def one_step(posterior: ntkl.Posterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean after one Newton step of the linear model, and covariance blocks."""
    rows = posterior.jacobian(x)
    mean = rows.f - rows.jvp(posterior.network.unflatten(posterior.fitted.newton_step()))
    return mean, posterior.posterior_precision.covariance_blocks(rows)


def by_hand(structure: object, fitted: Tensor, asked: Tensor, scale: float) -> float:
    """The same through the verbs of a posterior that was fitted to the part alone."""
    _, x, y = classes()
    posterior = of_classes(structure, (x[fitted], y[fitted]))
    f, covariance = one_step(posterior, x[asked])
    points = torch.distributions.MultivariateNormal(f, scale * covariance + 1e-13 * torch.eye(3).double())
    torch.manual_seed(0)
    draws = points.sample((60_000,))
    log_p = torch.log_softmax(draws, -1).gather(-1, y[asked].expand(60_000, -1)[..., None]).squeeze(-1)
    return float((log_p.logsumexp(0) - math.log(60_000)).sum())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_averaged_predictions_of_the_rest(structure):
    """Σ log ∫ p(y | f) N(f | refitted mean, scale V) df, by plain Monte Carlo from a fit to the part alone."""
    posterior = of_classes(structure)
    alone = {"ekfac": ntkl.EKFAC(basis=posterior), "inf": ntkl.INF(basis=posterior)}.get(structure, structure)
    (order,) = orders(40, 1, 7)
    for scale in (1.0, 0.1):
        found = posterior.conditional_log_marginal_likelihood(34, 1, 7, method="average", scale=scale, samples=4096)
        assert float(found) == pytest.approx(by_hand(alone, order[:34], order[34:], scale), abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "m", "held"), [("gp", 34, 2), ("kfac", 34, 2), ("gp", 6, 1)])
def test_the_scale_is_tuned_on_points_that_the_fit_does_not_see(structure, m, held):
    """Of 17 scales the one that predicts 2 of 34 points best, by the verbs of a posterior of the other 32."""
    posterior, (_, x, y) = of_classes(structure), classes()
    grid, wanted, chosen = torch.logspace(-3, 1, 17, dtype=torch.float64).tolist(), [], []
    for order in orders(40, 4, 0):
        fitted, tuned, rest = order.split([m - held, held, 40 - m])
        alone, found = posterior.subset(fitted), []
        for asked in (tuned, rest):
            f, covariance = one_step(alone, x[asked])
            parts = [predictive(ntkl.Categorical(), f, scale * covariance, "glm", 500) for scale in grid]
            found.append([part.log_prob(y[asked]).sum().item() for part in parts])
        chosen.append(max(range(17), key=found[0].__getitem__))
        wanted.append(found[1][chosen[-1]])
    given = posterior.conditional_log_marginal_likelihood(m, 4, method="average", samples=500)
    assert float(given) == pytest.approx(sum(wanted) / 4, rel=1e-9)
    assert len(set(chosen)) > 1


def test_ten_orders_of_a_closed_form_and_one_of_a_fit_for_each():
    posterior = of_classes("gp")
    for count, options in ((10, {"method": "evidence"}), (1, {"method": "average", "scale": 1.0, "samples": 4})):
        given = posterior.conditional_log_marginal_likelihood(30, **options)
        assert given.item() == posterior.conditional_log_marginal_likelihood(30, count, **options).item()


def test_streamed_batches_and_shuffled_loaders_keep_their_points():
    """The data come again in the order of the first pass, whatever the loader does."""
    _, x, y = classes()
    plain = of_classes("kfac").conditional_log_marginal_likelihood(30, 0, method="average", scale=1.0)
    batched = of_classes("kfac", DataLoader(TensorDataset(x, y), batch_size=7))
    again = batched.conditional_log_marginal_likelihood(30, 0, method="average", scale=1.0)
    assert relative_error(again, plain) < 1e-9
    with torch.random.fork_rng(devices=[]):
        shuffled = of_classes("kfac", DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True))
        index = torch.tensor([3, 8, 20, 39])
        with pytest.warns(ntkl.NTKLaplaceWarning, match="the DataLoader of the fit shuffles"):
            part = shuffled.subset(index)
        assert torch.equal(part.targets, shuffled.targets[index])
        assert relative_error(part.f, shuffled.f[index]) < 1e-12


class Once(IterableDataset):
    """A stream that runs dry."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.pairs = iter(list(zip(x, y, strict=True)))

    def __iter__(self):
        return self.pairs


def test_a_stream_that_runs_dry_is_refused():
    _, x, y = classes()
    stream = DataLoader(Once(x, y), batch_size=7)
    posterior = ntkl.laplace(classes()[0], stream, ntkl.Categorical(), structure="diag")
    with pytest.raises(ntkl.DataError, match=r"the same 40 examples in every pass .*; got 0"):
        posterior.conditional_log_marginal_likelihood(30)


def test_a_checkpoint_without_data_is_refused(tmp_path):
    of_classes("kfac").save(tmp_path / "kfac.pt")
    loaded = ntkl.load(tmp_path / "kfac.pt", classes()[0])
    with pytest.raises((ntkl.DataError, ntkl.UnsupportedError), match="a checkpoint"):
        loaded.conditional_log_marginal_likelihood(30)


# --- subsets


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_a_subset_is_a_fit_to_the_subset(structure):
    _, x, y = classes()
    index = torch.tensor([30, 2, 5, 17, 9])
    some, alone = of_classes(structure).subset(index), of_classes(structure, (x[index], y[index]))
    assert relative_error(some.log_marginal_likelihood(), alone.log_marginal_likelihood()) < 1e-9
    assert relative_error(some.latent_moments(x[:3])[1], alone.latent_moments(x[:3])[1]) < 1e-9
    assert torch.equal(some.targets, y[index.sort().values])
    assert some.num_examples == 5


@pytest.mark.parametrize("tempered", [False, True])
def test_noise_of_each_point_of_a_subset_is_its_own_parameter(tempered: bool, tmp_path: Path) -> None:
    """It moves, is fitted, saved and loaded, as that of a fit to the subset; the posterior of all points stays."""
    torch.manual_seed(0)
    network, x, noise = nn.Linear(2, 1).double(), torch.randn(8, 2).double(), torch.linspace(0.1, 0.8, 8).double()
    y, kept = torch.randn(8, 1).double(), [1, 2, 5, 6, 7]

    def fit_to(index: Sequence[int]) -> ntkl.Posterior:
        likelihood: ntkl.Likelihood = ntkl.Gaussian(noise[list(index)], "point")
        likelihood = ntkl.Tempered(likelihood, 2.0) if tempered else likelihood
        return ntkl.laplace(network, (x[list(index)], y[list(index)]), likelihood, ntkl.GaussianPrior(1.0))

    whole, fresh = fit_to(range(8)), fit_to(kept)
    before, some = float(whole.log_marginal_likelihood()), whole.subset(kept)
    assert list(dict(some.likelihood.named_parameters())) == ["log_noise"]
    still = fit_to(range(8))
    still.likelihood.requires_grad_(False)
    assert not any(p.requires_grad for p in still.subset(kept).likelihood.parameters())
    for posterior in (some, fresh):
        posterior.log_marginal_likelihood()
        with torch.no_grad():
            posterior.likelihood.get_parameter("likelihood.log_noise" if tempered else "log_noise").fill_(0.7)
    assert relative_error(some.log_marginal_likelihood(), fresh.log_marginal_likelihood()) < 1e-12
    assert relative_error(some.latent_moments(x[:2])[1], fresh.latent_moments(x[:2])[1]) < 1e-12
    found, wanted = some.fit_hyperparameters(), fresh.fit_hyperparameters()
    assert found.names == wanted.names and len(found.names) == 6
    assert relative_error(some.log_marginal_likelihood(), fresh.log_marginal_likelihood()) < 1e-6
    some.save(tmp_path / "some.pt", include_data=True)
    loaded = ntkl.load(tmp_path / "some.pt", network)
    assert relative_error(loaded.log_marginal_likelihood(), some.log_marginal_likelihood()) < 1e-12
    assert float(whole.log_marginal_likelihood()) == before


def test_points_that_choose_the_scale_have_targets() -> None:
    """Points without a target say nothing of the scale of the covariance: others take their place."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), torch.randn(12, 2).double()
    y = torch.randn(12, 1).double()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    missing = y.clone()
    missing[order[8]] = torch.nan
    posterior = ntkl.laplace(network, (x, missing), ntkl.Gaussian(0.1, missing="nan"))
    found = rest_given(posterior.fitted, order, 9, None, None, 100)
    keep = torch.cat([order[:8], order[9:]])
    others = ntkl.laplace(network, (x[keep], y[keep]), ntkl.Gaussian(0.1))
    wanted = rest_given(others.fitted, torch.arange(11), 8, None, None, 100)
    assert found[2] == wanted[2]
    missing[order[:8]] = torch.nan
    missing[order[8]] = 0.0
    posterior = ntkl.laplace(network, (x, missing), ntkl.Gaussian(0.1, missing="nan"))
    with pytest.raises(ntkl.DataError, match=r"two points with targets among the first 9, .*; got 1\."):
        rest_given(posterior.fitted, order, 9, None, None, 100)
    assert rest_given(posterior.fitted, order, 9, 0.5, None, 100)[2].scale == 0.5
    missing[order[8]] = torch.nan
    posterior = ntkl.laplace(network, (x, missing), ntkl.Gaussian(0.1, missing="nan"))
    with pytest.raises(ntkl.DataError, match="at least one example with a target"):
        posterior.subset(order[:9])


def test_of_few_points_with_targets_one_chooses_the_scale() -> None:
    """A seventeenth of those with targets, not of all: the others are the fit."""
    network, x = nn.Linear(2, 2).double(), torch.randn(60, 2, generator=torch.Generator().manual_seed(0)).double()
    y, order = (x[:, 0] > 0).long(), torch.arange(60)
    y[torch.arange(60) % 5 != 0] = -100
    weight = torch.ones(60).double()
    weight[50] = 0.0
    posterior = ntkl.laplace(network, (x, y, weight), ntkl.Categorical())
    found = rest_given(posterior.fitted, order, 51, None, "draws", 100)
    kept = torch.tensor([*range(0, 50, 5), 55])
    others = ntkl.laplace(network, (x[kept], y[kept]), ntkl.Categorical())
    wanted = rest_given(others.fitted, torch.arange(11), 10, None, "draws", 100)
    assert found[2].temperature == pytest.approx(wanted[2].temperature, rel=1e-6)
    assert found[2].scale == pytest.approx(wanted[2].scale, rel=1e-6, abs=1e-9)
    assert relative_error(found[0].precision.log_det(), wanted[0].precision.log_det()) < 1e-9


# --- criteria


@pytest.mark.parametrize("structure", STRUCTURES)
def test_bic_and_aic_are_log_scores(structure):
    posterior, (network, x, y) = of_classes(structure), classes()
    with torch.no_grad():
        fit_ = -nn.functional.cross_entropy(network(x), y, reduction="sum").item()
    count = sum(p.numel() for p in network.parameters())
    used = float(posterior.effective_parameters().sum())
    assert posterior.log_likelihood().item() == pytest.approx(fit_, rel=1e-12)
    # the textbook's: BIC = P log N - 2 log L, AIC = 2 P - 2 log L
    assert -2 * float(posterior.bic()) == pytest.approx(count * math.log(40) - 2 * fit_, rel=1e-12)
    assert -2 * float(posterior.aic()) == pytest.approx(2 * count - 2 * fit_, rel=1e-12)
    assert float(posterior.bic(effective=True)) == pytest.approx(fit_ - 0.5 * used * math.log(40), rel=1e-12)
    assert float(posterior.aic(effective=True)) == pytest.approx(fit_ - used, rel=1e-12)


def test_bic_counts_the_parameters_that_are_linearized():
    network, x, y = classes()
    last = ntkl.laplace(network, (x, y), ntkl.Categorical(), parameters="last_layer")
    assert float(of_classes("gp").aic() - last.aic()) == pytest.approx(-24.0)


def test_leave_one_out_is_the_conditional_evidence_of_one_point():
    """At the MAP of a regression: Σ log p(y_i given the others) from N pairs of dense evidences."""
    case, y = trained("gaussian")
    prior = PRIORS["scalar"]
    posterior = ntkl.laplace(case.network, (case.x, y), ntkl.Gaussian(NOISE), prior.build(case))
    n, precision = len(y), prior.dense(case)[0]
    f = call(case.network, case.x).detach()
    everything = torch.arange(n)

    def dense(index: Tensor) -> Tensor:
        jac = torch.stack([_jacobian(case.network, take(case.x, i)) for i in index]).flatten(0, 1)
        kernel = (jac / precision) @ jac.T + NOISE * torch.eye(len(jac)).double()
        mean = f[index].flatten() - jac @ case.theta
        return torch.distributions.MultivariateNormal(mean, kernel).log_prob(y[index].flatten())

    truth = sum(dense(everything) - dense(everything[everything != i]) for i in range(n))
    assert float(posterior.loo_log_density()) == pytest.approx(float(truth), rel=1e-6)  # L-BFGS stops near the MAP


def _jacobian(network: nn.Module, x: Tensor) -> Tensor:
    weights = {name: p.detach() for name, p in network.named_parameters()}
    jac = torch.func.jacrev(lambda w: torch.func.functional_call(network, w, (x[None],))[0])(weights)
    return torch.cat([each.flatten(1) for each in jac.values()], 1)


def test_points_that_a_what_if_removed_count_for_nothing():
    torch.manual_seed(5)
    x, y = torch.randn(12, 3).double(), torch.randn(12, 1).double()
    network = nn.Linear(3, 1).double()
    design = torch.cat([x, torch.ones(12, 1).double()], 1)
    best = torch.linalg.solve(design.T @ design / 0.4 + torch.eye(4).double(), design.T @ y / 0.4)
    with torch.no_grad():  # the MAP
        network.weight.copy_(best[:3].T)
        network.bias.copy_(best[3])
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.4)).remove([2, 6])
    kept = torch.tensor([0, 1, 3, 4, 5, 7, 8, 9, 10, 11])
    truth = ntkl.laplace(network, (x[kept], y[kept]), ntkl.Gaussian(0.4))
    assert float(posterior.bic()) == pytest.approx(posterior.log_likelihood().item() - 2 * math.log(10))
    whole = truth.log_marginal_likelihood(correction=True)
    others = [torch.tensor([j for j in range(10) if j != i]) for i in range(10)]
    each = [whole - truth.subset(index).log_marginal_likelihood(correction=True) for index in others]
    assert relative_error(posterior.loo_log_density(), sum(each)) < 1e-9
    given = posterior.conditional_log_marginal_likelihood(8, 0, method="average", scale=1.0)
    mine = truth.conditional_log_marginal_likelihood(6, 0, method="average", scale=1.0)
    assert relative_error(given, mine) < 1e-9
    with pytest.raises(ntkl.DataError, match="removed or reweighted"):
        ntkl.compare_models([posterior, ntkl.laplace(network, (x, y), ntkl.Gaussian(0.4))])


# --- bad input


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda p: p("gp").conditional_log_marginal_likelihood(40), ntkl.DataError, "0 to 39; got 40"),
        (lambda p: p("gp").conditional_log_marginal_likelihood(-1), ntkl.DataError, "0 to 39; got -1"),
        (lambda p: p("gp").conditional_log_marginal_likelihood(0.8), ntkl.DataError, r"got 0\.8\. Pass a whole"),
        (lambda p: p("kfac").conditional_log_marginal_likelihood(1), ntkl.DataError, "2 to 39; got 1"),
        (lambda p: p("gp").conditional_log_marginal_likelihood(9, -2), ntkl.DataError, "0 or more; got -2"),
        (lambda p: p("gp").conditional_log_marginal_likelihood(9, method="exact"), ntkl.UnsupportedError, "evidence"),
        (lambda p: p("gp").conditional_log_marginal_likelihood(9, seed="a"), ntkl.HyperparameterError, "seed.*got 'a'"),
        (lambda p: p("gp").learning_curve(seed=0.5), ntkl.HyperparameterError, "seed as a whole.*got 0.5"),
        (
            lambda p: p("kfac").conditional_log_marginal_likelihood(9, samples=10.5),
            ntkl.HyperparameterError, r"samples as a whole number, at least 1; got 10\.5",
        ),
        (
            lambda p: p("kfac").conditional_log_marginal_likelihood(9, method="evidence"),
            ntkl.UnsupportedError, 'structure="gp", or "full" or "iterative".*\'kfac\'.*method="average"',
        ),
        (
            lambda p: p("full", curvature="mc").conditional_log_marginal_likelihood(9, method="evidence"),
            ntkl.UnsupportedError, "curvature='mc'",
        ),
        (lambda p: p("full").learning_curve(), ntkl.UnsupportedError, 'structure="gp".*conditional_log'),
        (lambda p: p("gp").learning_curve().conditional(40), ntkl.DataError, "0 to 39; got 40"),
        (lambda p: p("diag").loo_log_density(), ntkl.UnsupportedError, 'structure="gp"'),
        (lambda p: p("gp").subset([]), ntkl.DataError, "each once; got 0"),
        (lambda p: p("gp").subset([3, 3]), ntkl.DataError, "3 more than once"),
        (lambda p: p("gp").subset([40]), ntkl.DataError, "0 to 39"),
    ],
)
def test_bad_questions_are_answered(ask, error, words):
    with pytest.raises(error, match=words):
        ask(of_classes)


def test_a_budget_is_kept():
    posterior = of_classes("gp", settings=ntkl.Settings(memory_budget=90_000))
    with pytest.raises(ntkl.MemoryBudgetError, match=r"in another.*structured posterior"):
        posterior.learning_curve()


# --- the curve people hold


def test_the_learning_curve_as_table_and_picture():
    curve = of_classes("gp").learning_curve(permutations=5)
    frame = curve.to_dataframe()
    assert list(frame["n"]) == list(range(1, 41))
    assert frame["log_density"].to_numpy() == pytest.approx(curve.terms.mean(0).numpy())
    assert frame["standard_error"].to_numpy() == pytest.approx(curve.terms.std(0).numpy() / 5**0.5)
    assert frame["evidence_so_far"].iloc[-1] == pytest.approx(curve.evidence)
    assert (curve.terms.sum(1) - curve.evidence).abs().max() < 1e-9  # no order changes the evidence
    top, bottom = curve.plot().axes
    assert top.lines[0].get_ydata() == pytest.approx(frame["log_density"].to_numpy())
    assert bottom.lines[0].get_ydata()[-1] == pytest.approx(curve.evidence)
    with warnings.catch_warnings():  # one order has no deviation, which is no reason to warn
        warnings.simplefilter("error")
        alone = of_classes("gp").learning_curve(np.int64(0))
        assert alone.standard_error.isnan().all() and alone.plot().axes
        assert alone.conditional(np.int64(30)) == float(alone.terms[0, 30:].sum())
        given = of_classes("gp").conditional_log_marginal_likelihood(np.int64(30), np.int64(0))
        assert float(given) == pytest.approx(alone.conditional(30))
    # and what was asked leaves no trace in the caller's random numbers
    before = torch.random.get_rng_state()
    of_classes("gp").learning_curve(permutations=2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_subsets_and_scales_of_the_wrong_kind():
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure="gp")
    for index in ([0.5, 1.7], "ab", [0, 0], [9]):
        with refused(ntkl.DataError, "training point", ".", "0 to 8"):
            posterior.subset(index)
    mask = torch.arange(9) % 2 == 0
    assert torch.equal(posterior.subset(mask).f, posterior.f[mask])
    for scale in (-1.0, float("nan"), "a"):
        with refused(ntkl.HyperparameterError, "scale of the covariance", ".", "Leave it out"):
            posterior.conditional_log_marginal_likelihood(4, method="average", scale=scale)
