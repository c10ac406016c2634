"""Example weights at the fit: whole ones are rows repeated, others the dense reference's; what stands on the fit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ntk_laplace as ntkl
from compared_fits import STRUCTURES, assert_same, dealt, fit
from noise import draw
from ntk_laplace.model.data import Batches, InputDtype, Joined, Selected
from ntk_laplace.model.network import Caller
from ntk_laplace.model.objective import Objective
from ntk_laplace.tools.comparison import compare_models
from ntk_laplace.training.minibatches import Minibatches
from reference import Dense, outputs, relative_error, take
from reference_refit import Linearized
from registry import LIKELIHOODS, PRIORS, problem, targets
from registry_cases import derivatives, jacobians
from structured_cases import MC

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

WHOLE = torch.tensor([1, 2, 0, 3, 1, 1, 2, 1, 0])
REAL = torch.tensor([0.5, 2.25, 0.0, 1.5, 3.0, 0.7, 1.0, 0.2, 4.0], dtype=torch.float64)
SOME = [
    ("deep_mlp", "categorical", "ggn"), ("cnn_groups", "gaussian", "ggn"), ("decoder_dict", "categorical", "ef"),
    ("scalar_outputs", "bernoulli", "ef"), ("layer_twice", "poisson", "ggn"),
]


def data_of(name: str, likelihood: str) -> tuple[Any, Tensor]:
    return problem(name).x, targets(LIKELIHOODS[likelihood], problem(name))


def fitted(name: str, likelihood: str, structure: str, weights: Tensor | None = None, **options: Any):
    """With weights, as many of them as there are examples."""
    x, y = data_of(name, likelihood)
    data = (x, y) if weights is None else (x, y, weights[: len(y)])
    return fit(name, LIKELIHOODS[likelihood].build(), data, STRUCTURES[structure], **options)


def repeated(name: str, likelihood: str, structure: str, **options: Any):
    """Every example as often as its whole weight says; and the example that each row is."""
    x, y = data_of(name, likelihood)
    rows = torch.arange(len(y)).repeat_interleave(WHOLE[: len(y)])
    posterior = fit(name, LIKELIHOODS[likelihood].build(), (take(x, rows), y[rows]), STRUCTURES[structure], **options)
    return posterior, rows


@pytest.mark.parametrize(("structure", "name", "likelihood", "curvature"), dealt(SOME))
def test_a_whole_weight_repeats_the_example(structure, name, likelihood, curvature) -> None:
    """Evidence, its gradients in all hyperparameters, mean and covariance; a weight of 0 leaves the example out."""
    found = fitted(name, likelihood, structure, WHOLE, curvature=curvature)
    want, _ = repeated(name, likelihood, structure, curvature=curvature)
    assert_same(found, want, problem(name).x_new)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_other_hyperparameters_keep_the_weights(structure: str) -> None:
    """Another temperature asks for another pass over the data, another precision does not."""
    found = fitted("deep_mlp", "categorical", structure, WHOLE)
    want, _ = repeated("deep_mlp", "categorical", structure)
    for posterior in (found, want):
        with torch.no_grad():
            posterior.likelihood.log_temperature += 0.4
            posterior.prior.log_precision -= 0.3
    if structure in ("ekfac", "reduce", "inf"):  # in the eigenbasis of the first pass, where ties may turn
        assert relative_error(found.log_det(), want.log_det()) < 1e-6
        return
    assert_same(found, want, problem("deep_mlp").x_new)


@pytest.mark.parametrize("case", [
    ("deep_mlp", "categorical", "layer"), ("one_column", "bernoulli", "scalar"), ("deep_mlp", "gaussian", "layer"),
])
def test_real_weights_scale_density_gradient_and_curvature(case) -> None:
    name, likelihood, prior = case
    own = problem(name)
    log_prob, residual, hessian = derivatives(name, likelihood)
    w = REAL[: len(log_prob)]
    precision, mean = PRIORS[prior].dense(own)
    truth = Dense(log_prob * w, residual * w[:, None], hessian * w[:, None, None], jacobians(name)[0], own.theta - mean,
                  precision)
    for structure in ("gp", "full"):
        posterior = ntkl.laplace(own.network, (*data_of(name, likelihood), w), LIKELIHOODS[likelihood].build(),
                                 PRIORS[prior].build(own), structure)
        evidence = posterior.log_marginal_likelihood(correction=True)
        assert relative_error(evidence, truth.regression_evidence()) < 1e-9
        covariance = truth.latent_covariance(jacobians(name)[1])
        assert relative_error(posterior.latent(own.x_new).covariance_matrix, covariance) < 1e-8
        if likelihood == "gaussian":  # elsewhere the optimum takes more steps than this reference
            mean_ = truth.latent_mean(outputs(own.network, own.x_new), jacobians(name)[1])
            assert relative_error(posterior.latent(own.x_new, "posterior").mean, mean_) < 1e-8
        assert torch.equal(posterior.weights, w)


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_weights_of_one_change_nothing(structure: str) -> None:
    plain = fitted("transformer_tied", "categorical", structure)
    ones = fitted("transformer_tied", "categorical", structure, torch.ones(9))
    assert_same(ones, plain, problem("transformer_tied").x_new, 1e-12)


@pytest.mark.parametrize(("likelihood", "structure"), [("categorical", "gp"), ("poisson", "full")])
def test_a_likelihood_that_counts_thrice_is_a_weight_of_three(likelihood: str, structure: str) -> None:
    """Densities of single points count once, sums over points as often as the evidence counts each."""
    name, weight = "deep_mlp", 3.0
    x, y = data_of(name, likelihood)
    sources = [0, 0, 1, 1, 1, 2, 2, 2, 2][: len(y)]
    own = LIKELIHOODS[likelihood].build()
    verbs = {
        "evidence": lambda p: p.log_marginal_likelihood(),
        "left out": lambda p: torch.stack([getattr(p.leave_one_out(), of) for of in (
            "log_density", "plug_in_log_density", "self_influence", "importance", "leverage")]),
        "decrement": lambda p: torch.tensor(p.leave_one_out().reliability.decrement),
        "loo": lambda p: p.loo_log_density(),
        "loo of some": lambda p: p.loo_log_density([0, 3]),
        "folds": lambda p: p.cross_validate(2, linearization="fixed").log_density,
        "what if": lambda p: p.what_ifs([[1], [2, 3]], linearization="fixed").log_prob(),
        "sources": lambda p: p.source_effects(x[:2], sources, linearization="fixed").own_log_prob_without,
        "conditional": lambda p: p.conditional_log_marginal_likelihood(5, 2),
        "averaged": lambda p: p.conditional_log_marginal_likelihood(5, 2, method="average", scale=1.0),
        "tuned": lambda p: p.conditional_log_marginal_likelihood(5, 2, method="average"),
        "predictive": lambda p: torch.tensor([(fit := p.fit_predictive(strict=False)).before, fit.after, fit.network]),
    }
    weighted = fit(name, own, (x, y, torch.full((len(y),), weight)), structure)
    tempered = fit(name, ntkl.Tempered(own, weight), (x, y), structure)
    for verb, ask in verbs.items():
        assert relative_error(ask(tempered), ask(weighted)) < 1e-8, verb


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_labels_that_are_drawn_count_as_often(structure: str) -> None:
    """Monte-Carlo labels are drawn once for an example, whatever its weight."""
    found = fitted("deep_mlp", "categorical", structure, REAL, curvature=MC)
    x, y = data_of("deep_mlp", "categorical")
    w = REAL[: len(y)]
    if structure == "kfac":  # Λ scaled by one number is a weight for all
        ones = fitted("deep_mlp", "categorical", structure, curvature=MC)
        thrice = fitted("deep_mlp", "categorical", structure, torch.full((9,), 3.0), curvature=MC)
        model = ntkl.Tempered(LIKELIHOODS["categorical"].build(), 3)
        tempered = fit("deep_mlp", model, (x, y), "kfac", curvature=MC)
        assert relative_error(thrice.log_det(), tempered.log_det()) < 1e-10
        assert relative_error(thrice.log_det(), ones.log_det()) > 1e-2
        return
    root = MC.root(LIKELIHOODS["categorical"].build(), outputs(problem("deep_mlp").network, x), y).detach()
    precision, _ = PRIORS["layer"].dense(problem("deep_mlp"))
    rows = torch.einsum("ncp,ncr,n->nrp", jacobians("deep_mlp")[0], root, w.sqrt()).flatten(0, 1)
    curvature = rows.T @ rows
    curvature = torch.diag(curvature.diagonal()) if structure == "diag" else curvature
    want = torch.linalg.slogdet(torch.eye(len(precision)).double() + curvature / precision[:, None]).logabsdet
    assert relative_error(found.log_det(), want) < 1e-9


# ------------------------------------------------------------------------------------------- how they come


class Triples(Dataset):
    """Items (x, y, w) with Python numbers for weights."""

    def __init__(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        self.items = [(a, b, float(c)) for a, b, c in zip(x, y, w, strict=True)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, float]:
        return self.items[index]


@pytest.mark.parametrize("structure", ["full", "ekfac"])
def test_weights_come_with_tensors_datasets_and_loaders(structure: str) -> None:
    x, y = data_of("deep_mlp", "categorical")
    w = REAL[: len(y)]
    want = fitted("deep_mlp", "categorical", structure, REAL)
    for data in (
        [x.numpy(), y.tolist(), w.tolist()], Triples(x, y, w), DataLoader(TensorDataset(x, y, w), 3),
        DataLoader(TensorDataset(x, y, w), 2, shuffle=True),
    ):
        settings = ntkl.Settings(batch_size=2)
        found = fit("deep_mlp", LIKELIHOODS["categorical"].build(), data, structure, settings=settings)
        assert relative_error(found.log_det(), want.log_det()) < 1e-9
        assert relative_error(found.log_joint(), want.log_joint()) < 1e-9
    whole = fit("deep_mlp", LIKELIHOODS["categorical"].build(), (x, y, WHOLE[: len(y)].int()), structure)
    assert whole.weights.tolist() == WHOLE[: len(y)].tolist()


def test_weights_that_make_no_sense_are_refused() -> None:
    x, y = data_of("deep_mlp", "categorical")
    w = torch.ones(7)
    bad = w.clone()
    bad[3] = -1.0
    model = LIKELIHOODS["categorical"].build()
    for data in ((x, y, bad), DataLoader(TensorDataset(x, y, bad), 2)):
        with pytest.raises(ntkl.DataError, match=r"finite and at least 0 in .*; got -1 at example 3. Pass one weight"):
            fit("deep_mlp", model, data)
    bad[3] = float("nan")
    with pytest.raises(ntkl.DataError, match="got nan at example 3"):
        fit("deep_mlp", model, (x, y, bad))
    with pytest.raises(ntkl.DataError, match="got weights that are all zero"):
        fit("deep_mlp", model, (x, y, 0 * w))
    for given, got in ((w[:, None], r"float32 of shape \(7, 1\)"), (w[:5], r"float32 of shape \(5,\)"),
                       (w > 0, r"bool of shape \(7,\)")):
        with pytest.raises(ntkl.DataError, match=rf"real numbers of shape \(7,\) in \(x, y, w\); got {got}"):
            fit("deep_mlp", model, (x, y, given))
    with pytest.raises(ntkl.DataError, match=r"\(X, y, w\) with weights w \(N,\)"):
        fit("deep_mlp", model, (x, y, "ones"))
    batches = [(x[:3], y[:3], w[:3]), (x[3:], y[3:])]
    with pytest.raises(ntkl.DataError, match="in all batches, or in none; got a batch without them after 3 examples"):
        fit("deep_mlp", model, DataLoader(batches, batch_size=None), "full", settings=ntkl.Settings(batch_size=1))


class Restless(Dataset):
    """Weights that are others in every pass."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.asked = x, y, 0.0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, float]:
        self.asked += 1.0
        return self.x[index], self.y[index], self.asked


def test_numbers_of_rows_are_told_from_weights() -> None:
    """A data set of (x, y, index): each index would be a weight."""
    x, rows = torch.randn(12, 4).double(), torch.arange(12)
    for data in ((x, rows % 3, rows), TensorDataset(x, rows % 3, 40 - 3 * rows)):
        with pytest.warns(ntkl.NTKLaplaceWarning, match="12 different whole numbers, as indices are.*leave them out"):
            ntkl.laplace(nn.Linear(4, 3).double(), data, ntkl.Categorical())
    cells = torch.tensor([13, 57, 102, 33, 21, 8, 77, 90, 44, 61, 19, 250])  # counts of a table
    for weights in (rows.clamp(max=10), rows / 2, cells):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ntkl.laplace(nn.Linear(4, 3).double(), (x, rows % 3, weights), ntkl.Categorical())


def test_weights_that_change_between_passes_are_refused() -> None:
    with pytest.raises(ntkl.DataError, match="in every pass over the data"):
        fit("deep_mlp", LIKELIHOODS["categorical"].build(), Restless(*data_of("deep_mlp", "categorical")), "full")


# ------------------------------------------------------------------------------------------- what stands on the fit


@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "reduce"])
def test_removing_takes_an_example_with_all_its_weight(structure: str) -> None:
    """As removing all copies from the repeated rows; a reweighting starts from the weights of the fit."""
    found = fitted("deep_mlp", "categorical", structure, WHOLE)
    want, rows = repeated("deep_mlp", "categorical", structure)
    x_new = problem("deep_mlp").x_new
    copies = (rows == 3).nonzero().squeeze(1)
    fewer = found.reweight(3, 1.0)
    for one, other in ((found.remove([1, 3]), want.remove(((rows == 3) | (rows == 1)).nonzero().squeeze(1))),
                       (fewer, want.remove(copies[1:])), (found.reweight(3, 3.0), found)):
        for a, b in zip(one.latent_moments(x_new), other.latent_moments(x_new), strict=True):
            assert relative_error(a, b) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "steps"), [("gp", 1), ("full", None)])
def test_what_ifs_are_newton_steps_of_the_weighted_model(structure: str, steps: int | None) -> None:
    name, likelihood = "deep_mlp", "categorical"
    own = problem(name)
    x, y = data_of(name, likelihood)
    precision, mean = PRIORS["layer"].dense(own)
    model = Linearized(LIKELIHOODS[likelihood].log_density, outputs(own.network, x), jacobians(name)[0], precision,
                       own.theta - mean)
    w = REAL[: len(y)]
    held = model.gradient(torch.zeros_like(precision), y, w)[0]
    fewer = w.clone()
    fewer[[1, 4]] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    move, curvature = model.refit(y, fewer, steps, held)
    found = fitted(name, likelihood, structure, REAL).reweight([1, 4], [0.0, 1.0], steps=steps)
    f = outputs(own.network, own.x_new) + jacobians(name)[1] @ move
    assert relative_error(found.latent_moments(own.x_new)[0], f) < 1e-8
    flat = jacobians(name)[1].flatten(0, 1)
    want = flat @ torch.linalg.solve(curvature, flat.T)
    assert relative_error(found.latent(own.x_new).covariance_matrix, want) < 1e-8


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_leaving_one_out_leaves_all_of_its_weight(structure: str) -> None:
    found, own = fitted("deep_mlp", "categorical", structure, REAL), problem("deep_mlp")
    left = found.leave_one_out()
    for n in (1, 3):
        mean, covariance = found.remove(n).latent_moments(take(own.x, [n]))
        assert relative_error(left.mean[n], mean[0]) < 1e-8
        assert relative_error(left.covariance[n], covariance[0]) < 1e-8
    assert float(left.leverage[2]) == 0.0  # weight 0
    if structure != "kfac":
        assert relative_error(found.loo_log_density(), (REAL[:7] * left.log_density).sum()) < 1e-12
    assert relative_error(found.removal_effects(own.x_new)[:, 3], torch.stack([
        (found.remove(3).latent_moments(own.x_new)[0] - found.latent_moments(own.x_new)[0])[i, c]
        for i, c in enumerate(found.explain(own.x_new).output)
    ])) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag"])
def test_parts_of_weighted_data_add_up(structure: str) -> None:
    """Subsets keep their weights; what was not weighted counts once beside what was."""
    asked = structure
    if structure == "ekfac":  # one eigenbasis for all
        asked = ntkl.EKFAC(basis=fitted("deep_mlp", "categorical", "kfac", REAL))
    x, y = data_of("deep_mlp", "categorical")
    model, x_new = LIKELIHOODS["categorical"].build, problem("deep_mlp").x_new
    whole = fit("deep_mlp", model(), (x, y, REAL[:7]), asked)
    first, last = (fit("deep_mlp", model(), (x[i], y[i], REAL[:7][i]), asked) for i in (slice(0, 3), slice(3, 7)))
    assert_same(first.merge(last), whole, x_new)
    assert_same(first.condition((x[3:], y[3:], REAL[3:7])), whole, x_new)
    assert_same(whole.subset([0, 1, 2]), first, x_new)
    mixed = torch.cat([REAL[:3], torch.ones(4, dtype=torch.float64)])
    both = first.condition((x[3:], y[3:]))
    assert both.weights.tolist() == mixed.tolist()
    assert_same(both, fit("deep_mlp", model(), (x, y, mixed), asked), x_new)
    assert_same(both.subset([1, 4, 6]), fit("deep_mlp", model(), (x[[1, 4, 6]], y[[1, 4, 6]], mixed[[1, 4, 6]]), asked),
                x_new)
    if structure != "gp":
        for posterior in (both, whole):
            with torch.no_grad():
                posterior.likelihood.log_temperature += 0.2
        want = fit("deep_mlp", model(), (x, y, mixed), asked)
        with torch.no_grad():
            want.likelihood.log_temperature += 0.2
        assert relative_error(both.log_det(), want.log_det()) < 1e-9


def test_scores_of_selection_count_weights() -> None:
    """Conditional evidence, learning curve, hyperparameters, GPyTorch's evidence: as of repeated rows."""
    found, (want, rows) = (fitted("deep_mlp", "categorical", "gp", WHOLE), repeated("deep_mlp", "categorical", "gp"))
    m, n = 3, int((rows < 3).sum())
    given = found.conditional_log_marginal_likelihood(m, 0)
    assert relative_error(given, want.conditional_log_marginal_likelihood(n, 0)) < 1e-9
    full = fitted("deep_mlp", "categorical", "full", WHOLE)
    assert relative_error(full.conditional_log_marginal_likelihood(m, 0), given) < 1e-9
    without = torch.where(torch.arange(len(WHOLE)) < 2, 0.0, WHOLE)
    for structure in ("gp", "full"):  # the first two points tell nothing
        one = fitted("deep_mlp", "categorical", structure, without)
        whole = one.log_marginal_likelihood(correction=True)
        assert relative_error(one.conditional_log_marginal_likelihood(2, 0), whole) < 1e-9
    assert relative_error(found.learning_curve(0).terms.sum(), found.log_marginal_likelihood(correction=True)) < 1e-9
    factors = torch.logspace(-1, 1, 3)
    assert relative_error(found.evidence_curve(factors), want.evidence_curve(factors)) < 1e-9
    average = fitted("deep_mlp", "categorical", "kfac", WHOLE).conditional_log_marginal_likelihood(4, 0, scale=1.0)
    assert average.isfinite()
    gp = ntkl.gp.LaplaceGP(found)
    from gpytorch.mlls import ExactMarginalLogLikelihood

    value = ExactMarginalLogLikelihood(gp.likelihood, gp)(gp(*gp.train_inputs), gp.train_targets)
    assert relative_error(value * len(gp.train_targets), found.log_marginal_likelihood()) < 1e-9
    plain = fitted("deep_mlp", "categorical", "gp")
    with pytest.raises(ntkl.DataError, match="or other example weights, for"):
        compare_models({"a": found, "b": plain})
    x, y = data_of("deep_mlp", "categorical")
    with pytest.raises(ntkl.DataError, match="every example of which counts once"):
        compare_models({"a": found}, test=(x, y, torch.ones(7)))


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "method"), [("gp", "lbfgs"), ("kfac", "mackay")])
def test_hyperparameters_are_those_of_repeated_rows(structure: str, method: str) -> None:
    found, (want, _) = fitted("deep_mlp", "gaussian", structure, WHOLE), repeated("deep_mlp", "gaussian", structure)
    for posterior in (found, want):
        posterior.fit_hyperparameters(method, steps=40)
    assert relative_error(found.log_marginal_likelihood(), want.log_marginal_likelihood()) < 1e-6
    assert relative_error(found.likelihood.noise, want.likelihood.noise) < 1e-3


# ------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("include_data", [False, True])
@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_checkpoints_keep_the_weights_of_the_fit(structure: str, include_data: bool, tmp_path: Path) -> None:
    if structure == "gp" and not include_data:
        return
    posterior, path = fitted("deep_mlp", "categorical", structure, REAL), tmp_path / "p.pt"
    posterior.save(path, include_data=include_data)
    (x, y), own = data_of("deep_mlp", "categorical"), problem("deep_mlp")
    for data in (None, (x, y, REAL[:7])):
        loaded = ntkl.load(path, own.network, data)
        assert "N=7" in repr(loaded)
        assert relative_error(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood()) < 1e-12
        assert relative_error(loaded.bic(), posterior.bic()) < 1e-12
        if data is None and not include_data:
            with pytest.raises(ntkl.UnsupportedError, match="the weights of the training points"):
                _ = loaded.weights
            continue
        assert torch.equal(loaded.weights, REAL[:7])
        if data is not None:
            removed = loaded.remove(3).latent_moments(own.x_new)[1]
            assert relative_error(removed, posterior.remove(3).latent_moments(own.x_new)[1]) < 1e-9
    with pytest.raises(ntkl.DataError, match=r"with a sum of 8.95 .*; got a sum of 7. Pass the data .*\(X, y, w\)"):
        ntkl.load(path, own.network, (x, y))
    for changed in (posterior.reweight(1, 1.0), posterior.remove(0)):
        with pytest.raises(ntkl.UnsupportedError, match="one that a what-if changed"):
            changed.save(path, include_data=True)


class Interrupts(Dataset):
    """Items (x, y, w), and Ctrl-C at one of them, once."""

    def __init__(self, x: Tensor, y: Tensor, w: Tensor, at: int) -> None:
        self.data, self.at = (x, y, w), at

    def __len__(self) -> int:
        return len(self.data[1])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == self.at:
            self.at = -1
            raise KeyboardInterrupt
        return tuple(part[index] for part in self.data)


@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
def test_an_interrupted_fit_resumes_with_its_weights(structure: str, tmp_path: Path) -> None:
    x, y = data_of("deep_mlp", "categorical")
    loader = DataLoader(Interrupts(x, y, REAL[:7], 5), 2)
    settings = {"batch_size": 2, "checkpoint": tmp_path / "state.pt"}
    model = LIKELIHOODS["categorical"].build
    with pytest.raises(ntkl.FitInterrupted):
        fit("deep_mlp", model(), loader, structure, settings=ntkl.Settings(**settings))
    resumed = ntkl.Settings(**settings, resume=settings["checkpoint"])
    found = fit("deep_mlp", model(), loader, structure, settings=resumed)
    assert_same(found, fitted("deep_mlp", "categorical", structure, REAL), problem("deep_mlp").x_new, 1e-8)


# ------------------------------------------------------------------------------------------- training


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


X, Y = draw(1, 9, 3), torch.arange(9) % 3


@pytest.mark.parametrize("structure", ["full", "kfac"])
def test_training_with_weights_is_training_on_repeated_rows(structure: str) -> None:
    """The loss divides by the sum of the weights, so that learning rates are those of repeated rows."""
    rows = torch.arange(9).repeat_interleave(WHOLE)
    found = []
    for data in ((X, Y, WHOLE), (X[rows], Y[rows]), DataLoader(TensorDataset(X, Y, WHOLE), 9)):
        net = network()
        result = ntkl.train_with_evidence(
            net, data, ntkl.Categorical(), structure=structure, epochs=6, batch_size=None,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.3), schedule=ntkl.EvidenceSchedule(frequency=3, steps=4),
        )
        found.append((torch.cat([p.detach().flatten() for p in net.parameters()]), result.history.evidence,
                      result.history.loss))
    for theta, evidence, loss in found[1:]:
        torch.testing.assert_close(theta, found[0][0], rtol=1e-9, atol=1e-11)
        assert evidence == pytest.approx(found[0][1], rel=1e-9) and loss == pytest.approx(found[0][2], rel=1e-9)


def test_minibatch_gradients_average_to_the_whole_one() -> None:
    net = network()
    prior = ntkl.GaussianPrior(2.0).bind({name: p.shape for name, p in net.named_parameters()})
    objective = Objective(Caller(net), ntkl.Categorical(), prior, 9, 3, float(REAL.sum()))
    objective.settle()

    def gradient(*batch: Tensor) -> Tensor:
        net.zero_grad()
        objective.gradient(*batch)
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    torch.manual_seed(0)
    batches = Minibatches((X, Y, REAL), 3, torch.device("cpu"), InputDtype(torch.float64, frozenset()))
    parts = torch.stack([gradient(*batch) for batch in batches])
    torch.testing.assert_close(parts.mean(0), gradient(X, Y, REAL), rtol=1e-10, atol=1e-12)
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    log_prob = torch.log_softmax(net(X), 1)[torch.arange(9), Y]
    rows = [torch.autograd.grad(each, list(net.parameters()), retain_graph=True) for each in log_prob]
    pulls = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(gradient(X, Y, REAL), (2.0 * theta - REAL @ pulls) / REAL.sum(), rtol=1e-10, atol=1e-12)


def test_training_wants_weights_in_both_data_or_in_neither() -> None:
    for data, evidence in (((X, Y, WHOLE), (X, Y)), ((X, Y), (X, Y, WHOLE))):
        with pytest.raises(ntkl.DataError, match="example weights in the minibatches and in the data of the evidence"):
            ntkl.train_with_evidence(network(), data, ntkl.Categorical(), structure="diag", epochs=1,
                                     optimizer=torch.optim.Adam, evidence_data=evidence)


def test_weights_of_batches_that_are_cut_anew() -> None:
    """A pass that was given up, and one in batches of another size, gather each weight once."""
    n = 5000
    w = torch.arange(n, dtype=torch.float64)
    batches = Batches((torch.zeros(n, 1), torch.zeros(n), w), None, torch.device("cpu"))
    batches.first()
    assert 0 < batches.read < n and torch.equal(batches.weights, w[: batches.read])
    batches.limit_batch_size(600)
    keep = w % 3 == 0
    some, both = Selected(batches, keep), Joined([batches, Batches((torch.zeros(2, 1), torch.zeros(2)), None,
                                                                   torch.device("cpu"))])
    for _ in some:
        assert torch.equal(some.weights, w[keep][: some.read])
    assert torch.equal(batches.weights, w) and torch.equal(some.weights, w[keep]) and some.read == int(keep.sum())
    assert sum(len(y) for _, y in both) == n + 2 == both.read
    assert torch.equal(both.weights, torch.cat([w, torch.ones(2)]))


@pytest.mark.parametrize("batch_size", [8, 16])
def test_targets_may_be_a_column_of_a_table(batch_size: int) -> None:
    """The last batch has one target, at any stride."""
    table = torch.randint(0, 3, (17, 4), generator=torch.Generator().manual_seed(0))
    x, y = table[:, :3].double(), table[:, 3]
    network = nn.Linear(3, 3).double()
    settings = ntkl.Settings(batch_size=batch_size)
    strided, plain = (ntkl.laplace(network, (x, own), ntkl.Categorical(), structure="full", settings=settings)
                      for own in (y, y.clone()))
    assert torch.equal(strided.log_marginal_likelihood(), plain.log_marginal_likelihood())
    more = [one.condition((x[3:4], y[3:4])).log_marginal_likelihood() for one in (strided, plain)]
    assert torch.equal(*more)
