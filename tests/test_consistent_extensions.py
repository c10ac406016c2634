"""Likelihoods whose methods contradict each other, merges of other options, hyperparameters without effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.runtime import tuning


class Plain(ntkl.Likelihood):
    """A Gaussian of variance 1 without constants."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -0.5 * (y - f).square().sum(1)


class Total(Plain):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y).sum()


class NotFinite(Plain):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y) * torch.nan


class WrongSign(Plain):
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return f - y


class Asymmetric(Plain):
    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.ones(2, 2).triu().to(f).expand(len(f), 2, 2)


class OtherRoot(Plain):
    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return 2.0 * torch.eye(2).to(f).expand(len(f), 2, 2)


class FlatRoot(Plain):
    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.ones_like(f)


class Single(Plain):
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return (y - f).float()


class Detached(Plain):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f.detach(), y)


class InPlace(Plain):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y.mul_(2.0))


class ClosedForms(Plain):
    """Derivatives that hide from autograd that examples mix."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f - f.mean(0).detach(), y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f + f.mean(0)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.eye(2).to(f).expand(len(f), 2, 2)


class PartialLikelihood(Plain):
    """Cox's, of examples in the order of falling times, of which the first five are censored."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y[:, 1] > 0.0) * (f[:, 0] - f[:, 0].logcumsumexp(0)) - f.square().sum(1)


class NoMean(Plain):
    def mean(self, f: Tensor) -> Tensor:
        raise ValueError("Cauchy's distribution has no mean")


class HalfGaussian(ntkl.Gaussian):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return 0.5 * super().log_prob(f, y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return 0.5 * super().residual(f, y)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return 0.5 * super().curvature(f, y)


class FlatMean(Plain):
    def mean(self, f: Tensor) -> Tensor:
        return f[:, 0]


class Inverted(Plain):
    """It takes what is there for missing."""

    def observed(self, y: Tensor) -> Tensor:
        return y[:, 0] > 0.0


class Events(Plain):
    def event_shape(self, num_outputs: int) -> torch.Size:
        return torch.Size((3,))


def case() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(12, 2).double()
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), (x, x[:, :1] - 1.0)


@pytest.mark.parametrize(("likelihood", "words"), [
    (Total, r"shape \(4,\) from Total.log_prob; got \(\)"), (NotFinite, "NotFinite.log_prob; got .* not finite"),
    (WrongSign, "WrongSign.residual, the derivative of its log_prob in f; got a difference of"),
    (Asymmetric, "Asymmetric.curvature that is symmetric; got a difference of 1"),
    (OtherRoot, "OtherRoot.root, S with S Sᵀ equal to its curvature; got a difference of 3"),
    (HalfGaussian, "HalfGaussian.root, S with S Sᵀ .* root = Likelihood.root, which uses the curvature"),
    (FlatRoot, r"shape \(4, 2, 2\) from FlatRoot.root; got \(4, 2\)"),
    (Single, r"Single.residual in torch.float64, as f; got torch.float32"),
    (Detached, "that autograd can differentiate in f; got one without a gradient"),
    (InPlace, r"InPlace.log_prob\(f, y\) to leave y as it is"),
    (ClosedForms, "treats examples apart; got one that changes at example 0"),
    (PartialLikelihood, "treats examples apart; got one that changes at example ([6-9]|1.) "),
    (FlatMean, r"shape \(4, 2\) from FlatMean.mean, of 2 responses; got \(4,\)"),
    (Inverted, "Inverted.log_prob of 0 where its `observed` is False; got another at example 0"),
    (Events, r"targets of shape \(12, 3\) for Events; got shape \(12, 2\)"),
])
def test_methods_that_contradict_each_other_are_refused(likelihood: type[ntkl.Likelihood], words: str) -> None:
    x = torch.linspace(-1.0, 0.9, 12).double()[:, None]
    with pytest.raises(ntkl.NTKLaplaceError, match=words):
        ntkl.laplace(nn.Linear(1, 2).double(), (x, torch.cat([x, x], 1)), likelihood(), structure="full")


class NotANumber(Plain):
    """NaN at one example, beyond those at which methods are compared."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y) + torch.where(y[:, 0] == 0.8, torch.nan, 0.0)


@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_a_log_density_that_is_no_number_names_its_example(structure: str) -> None:
    x = torch.arange(12).double()[:, None] / 10
    with pytest.raises(ntkl.NonFiniteError, match="log densities of NotANumber that are numbers; got NaN at example 8"):
        ntkl.laplace(nn.Linear(1, 1).double(), (x, x), NotANumber(), structure=structure)


def test_a_residual_that_is_no_number_is_not_blamed_on_the_network() -> None:
    class Closed(Plain):
        def residual(self, f: Tensor, y: Tensor) -> Tensor:
            return (y - f) / (y != 0.8)

    x = torch.arange(12).double()[:, None] / 10
    posterior = ntkl.laplace(nn.Linear(1, 1).double(), (x, x), Closed())
    with pytest.raises(ntkl.NonFiniteError, match="a finite residual of Closed; got NaN or infinity at example 8"):
        posterior.log_marginal_likelihood(correction=True)


def test_a_likelihood_may_have_no_mean() -> None:
    network, data = case()
    posterior = ntkl.laplace(network, data, NoMean())
    with pytest.raises(ValueError, match="Cauchy's distribution has no mean"):
        posterior.predict(data[0], "map").mean  # noqa: B018


def test_a_log_density_of_straight_lines_says_that_the_posterior_is_the_prior() -> None:
    network, data = case()
    pinball = ntkl.CustomLikelihood(lambda f, y: -torch.maximum(0.9 * (y - f), -0.1 * (y - f)).sum(1))
    with pytest.warns(ntkl.NTKLaplaceWarning, match="no curvature at any point, so the posterior is the prior"):
        ntkl.laplace(network, data, pinball)
    ntkl.laplace(network, data, pinball, curvature="ef")


@ntkl.register_likelihood
class Forgets(Plain):
    """A scale and a number of hyperparameters that its record does not have."""

    def __init__(self, scale: float = 1.0, count: int = 1) -> None:
        super().__init__()
        self.scale, self.shift = scale, nn.Parameter(torch.zeros(count).double())

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.scale * super().log_prob(f + self.shift.sum(), y)


def test_a_record_without_an_argument_is_refused(tmp_path) -> None:
    network, data = case()
    with pytest.raises(ntkl.UnsupportedError, match=r"a record\(\) of Forgets that builds an equal likelihood; got"):
        ntkl.laplace(network, data, Forgets(2.0)).save(tmp_path / "p.pt", include_data=True)
    ntkl.laplace(network, data, Forgets(1.0, 2)).save(tmp_path / "p.pt", include_data=True)
    with pytest.raises(ntkl.UnsupportedError, match=r"hyperparameters of the fit; got size mismatch for shift.*record"):
        ntkl.load(tmp_path / "p.pt", network)
    assert ntkl.load(tmp_path / "p.pt", network, likelihood=Forgets(1.0, 2)).likelihood.shift.shape == (2,)


def test_consistent_methods_are_accepted() -> None:
    network, data = case()
    found = ntkl.laplace(network, data, Plain(), structure="full").log_det()
    assert torch.allclose(found, ntkl.laplace(network, data, ntkl.Gaussian(1.0), structure="full").log_det())


def test_data_in_two_arguments_are_explained() -> None:
    network, (x, y) = case()
    with pytest.raises(ntkl.UnsupportedError, match=r"got a tensor of shape \(12, 1\). Pass the data as one pair"):
        ntkl.laplace(network, x, y)


class Unused(Plain):
    """It has a hyperparameter that its log density does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale_of_nothing = nn.Parameter(torch.zeros(()).double())


def test_a_hyperparameter_without_effect_is_refused() -> None:
    network, data = case()
    posterior = ntkl.laplace(network, data, Unused(), structure="full")
    with pytest.raises(ntkl.UnsupportedError, match="an evidence that depends on scale_of_nothing; got one that does"):
        posterior.fit_hyperparameters()
    assert posterior.fit_hyperparameters(parameters=["precision"]).converged


class Named(Plain):
    """Two hyperparameters that move the outputs, under given names."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            self.register_parameter(name, nn.Parameter(torch.tensor(100.0).double()))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f + sum(self.parameters()), y + 230.0)


@pytest.mark.parametrize("names", [("log_a", "a"), ("log_precision", "shift")])
def test_hyperparameters_of_one_name_are_refused(names: tuple[str, str]) -> None:
    network, data = case()
    posterior = ntkl.laplace(network, data, Named(*names), structure="full")
    with pytest.raises(ntkl.HyperparameterError, match=r"different names; got '(a|precision)' twice.* of Named"):
        posterior.fit_hyperparameters()


def test_a_hyperparameter_that_is_no_logarithm_has_no_bounds_and_is_told_as_it_is() -> None:
    network, data = case()
    posterior = ntkl.laplace(network, data, Named("log_a", "shift"), structure="full")
    history = posterior.fit_hyperparameters(parameters=["shift"])
    assert history.values[history.best] == [posterior.likelihood.shift.item()] and history.converged
    assert 125.0 < posterior.likelihood.shift.item() < 135.0 and history.at_bounds == {}


class Sharp(Plain):
    """Its curvature is 1e10 in the first output; a hyperparameter that is far below that is the second's."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(()).double())

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        weights = torch.stack([self.log_weight.new_tensor(1e10), self.log_weight.exp()])
        return -0.5 * (weights.to(f) * (y - f).square()).sum(1)


@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_sums_follow_a_small_change_of_a_small_curvature(structure: str) -> None:
    """It is below the rounding of the largest curvature; the sums of the fit were kept."""
    x = case()[1][0]
    posterior = ntkl.laplace(nn.Linear(2, 2).double(), (x, 2.0 * x), Sharp(), structure=structure)
    before = posterior.evidence().log_det
    (slope,) = torch.autograd.grad(before, posterior.likelihood.log_weight)
    with torch.no_grad():
        posterior.likelihood.log_weight += 1e-5
    assert float(posterior.evidence().log_det - before) == pytest.approx(1e-5 * float(slope), rel=0.05)


class Weibull(ntkl.Likelihood):
    """Times y of log scale f, with a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.log_shape = nn.Parameter(torch.zeros(()).double())

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        z = self.log_shape.exp() * (y.log() - f)
        return (self.log_shape + z - y.log() - z.exp()).sum(1)


@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_a_search_comes_back_from_where_the_evidence_is_infinite(structure: str) -> None:
    """A step of the search goes to a shape of exp(8) or more, where no double holds the log density."""
    network, (x, _) = case()
    logs = 0.2 * x[:, :1] + (network(x).detach() if structure == "gp" else 3.0 * x[:, 1:])
    posterior = ntkl.laplace(network, (x, logs.exp()), Weibull(), structure=structure)
    before = float(posterior.log_marginal_likelihood())
    history = posterior.fit_hyperparameters()
    assert history.converged and history.evidence[history.best] > before + 0.1


class Multiple(ntkl.PosteriorPrecision):
    """H = P0 + c I."""

    def __init__(self, curvature: Tensor, model: ntkl.LinearizedModel) -> None:
        super().__init__(model.prior, curvature)
        self.diagonal = self.prior_precision + curvature

    def log_det(self) -> Tensor:
        return (self.diagonal / self.prior_precision).log().sum()

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.diagonal

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(count, len(self.diagonal), dtype=self.diagonal.dtype, generator=generator)
        return noise * self.diagonal.rsqrt()


@dataclass(frozen=True)
class Trace(ntkl.SummedSpec):
    """The trace of the curvature, times an option."""

    times: float = 1.0
    name: ClassVar[str] = "trace"

    def zeros(self, model: ntkl.LinearizedModel) -> dict[str, Tensor]:
        return {"trace": model.theta.new_zeros(())}

    def add(self, sums: dict[str, Tensor], rows: ntkl.Jacobian, model: ntkl.LinearizedModel) -> None:
        sums["trace"] += self.times * rows.dense(model.network.shapes).square().sum()

    def precision(self, sums: dict[str, Tensor], model: ntkl.LinearizedModel) -> Multiple:
        return Multiple(sums["trace"] / model.network.num_parameters, model)


def test_structures_with_other_options_are_not_merged() -> None:
    network, data = case()
    one, other = (ntkl.laplace(network, data, ntkl.Gaussian(1.0), structure=Trace(times)) for times in (1.0, 2.0))
    both = one.merge(ntkl.laplace(network, data, ntkl.Gaussian(1.0), structure=Trace(1.0)))
    twice = ntkl.laplace(network, tuple(torch.cat([t, t]) for t in data), ntkl.Gaussian(1.0), structure=Trace(1.0))
    assert torch.allclose(both.log_det(), twice.log_det(), rtol=1e-12)
    with pytest.raises(ntkl.UnsupportedError, match=r"structure Trace\(times=1.0\); got Trace\(times=2.0\)"):
        one.merge(other)


def test_precisions_move_alone_where_the_likelihood_has_no_gradient() -> None:
    """The curvature of a user's likelihood comes from autograd; a frozen hyperparameter must not ask for its slope."""

    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(()).double())

        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return super().log_prob(f * self.log_scale.exp(), y)

    network, data = case()
    posterior = ntkl.laplace(network, data, Scaled(), structure=Trace())
    posterior.likelihood.requires_grad_(False)
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(), posterior.prior.log_precision)
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            posterior.prior.log_precision += step
        values.append(float(posterior.log_marginal_likelihood()))
    assert slope.item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)
    posterior.likelihood.requires_grad_(True)
    assert posterior.fit_hyperparameters(parameters=["precision"]).converged


def test_a_log_density_may_compute_in_float32() -> None:
    """Its products of matrices round by the number of rows; and an empty batch is no sign of examples that mix."""
    torch.manual_seed(1)
    weights = torch.randn(16, 16)

    def log_density(f: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(f.float() @ weights[:8]) @ weights[:, :1]
        return (-0.5 * (f - y).square().sum(1) - 0.01 * hidden.float().squeeze(1).square()).double()

    likelihood = ntkl.CustomLikelihood(log_density)
    f = torch.randn(1001, 8).double()
    for count in (0, 1, 4, 5, 7, 9, 1001):
        assert likelihood.residual(f[:count], f[:count] + 0.1).shape == (count, 8)


class Spread(ntkl.Everywhere):
    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        raise AssertionError("matrices of all positions")


def test_missing_first_labels_cost_no_matrices_of_all_positions() -> None:
    """Their curvature is zero, and others were looked at in matrices that took gigabytes: 4,096 examples at a time."""
    torch.manual_seed(0)
    labels = torch.full((12, 3), -100)
    labels[5:] = 1
    fitted = ntkl.laplace(nn.Linear(2, 6).double(), (torch.randn(12, 2).double(), labels),
                          Spread(ntkl.Categorical(), positions=3), structure="full").fitted
    assert fitted.points.total(fitted.likelihood) == 7


class Wide(ntkl.Gaussian):
    largest = 0

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        found = super().curvature(f, y)
        Wide.largest = max(Wide.largest, found.nbytes)
        return found


def test_one_factor_of_wide_curvatures_is_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 matrices of a thousand outputs were compared at a time; targets of the first examples may be missing."""
    torch.manual_seed(0)
    x, reads = torch.randn(40, 2).double(), list[int]()
    y = torch.randn(40, 6).double()
    y[:20] = torch.nan
    network = nn.Linear(2, 6).double()
    posterior = ntkl.laplace(network, (x, y), Wide(0.1, missing="nan"), structure="kfac")
    monkeypatch.setattr(tuning, "HESSIAN_BYTES", 2000)
    monkeypatch.setattr(type(posterior.fitted.structure.at.accumulated), "again", lambda *_: reads.append(1))
    Wide.largest = 0
    posterior.likelihood.noise = 0.3
    posterior.log_marginal_likelihood()
    assert not reads and 0 < Wide.largest <= 2000
