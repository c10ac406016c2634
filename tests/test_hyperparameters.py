"""Maximizing the evidence: three optimizers, one optimum, and what they report."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.hyperparameters import Ascent, SpectralEvidence, Variables
from ntk_laplace.posterior.hyperparameters.maximize import _Search
from ntk_laplace.runtime import tuning
from pairwise import pairwise

STRUCTURES = {"gp": "gp", "full": "full", "kfac": "kfac", "ekfac": "ekfac", "inf": ntkl.INF(rank=10), "diag": "diag"}
pytestmark = pytest.mark.filterwarnings("ignore:INF's low-rank part", "ignore:the evidence's maximum was not reached")


@pytest.fixture(scope="module")
def regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A network close to its MAP on a gap-ridden sine."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-2, -0.5, 20), torch.linspace(0.5, 2, 20)]).double().unsqueeze(1)
    y = torch.sin(3 * x) + 0.2 * torch.randn(40, 1, generator=generator).double()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (network(x) - y).square().sum() / 0.08 + 0.5 * sum(p.square().sum() for p in network.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    return network.eval(), (x, y)


def fit(regression, structure: object, precision: float = 1.0, groups: str = "layer", noise: float = 0.04):
    network, data = regression
    return ntkl.laplace(network, data, ntkl.Gaussian(noise), ntkl.GaussianPrior(precision, groups=groups), structure)


# for each grouping of the precisions, where each method starts; Adam starts at the other end for half of the structures
ROADS = {"layer": {"lbfgs": 1e-3, "mackay": 1e3}, "all": {"lbfgs": 1e3, "mackay": 1e-3, "adam": 1e-3}}
ADAM_FROM_ABOVE = ("gp", "ekfac", "diag")


@pytest.mark.slow
@pytest.mark.parametrize("groups", ROADS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_all_optimizers_reach_one_optimum(regression, name: str, groups: str) -> None:
    """[I21] Fig. 4: from precisions of 1e-3 and of 1e3."""
    found = []
    for method, start in ROADS[groups].items():
        precision = 1e3 if method == "adam" and name in ADAM_FROM_ABOVE else start
        posterior = fit(regression, STRUCTURES[name], precision, groups)
        history = posterior.fit_hyperparameters(method, steps=400)
        assert history.converged, str(history)
        # the posterior is left where the history says, and its evidence there is the history's
        assert posterior.log_marginal_likelihood().item() == pytest.approx(history.evidence[history.best], rel=1e-9)
        values = [*posterior.prior.precision.tolist(), posterior.likelihood.noise.item()]
        assert values == pytest.approx(history.values[history.best], rel=1e-9)
        found.append(history.evidence[history.best])
    assert max(found) - min(found) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-12, 1e-9, 1e-6, 1e9])
@pytest.mark.parametrize("name", ["gp", "kfac"])
def test_an_evidence_of_minus_billions_sets_no_tolerance(regression, name: str, noise: float) -> None:
    """Converged means flat where the search ends, not beside the size of the evidence where it began."""
    best = fit(regression, name).fit_hyperparameters()
    found = fit(regression, name, noise=noise).fit_hyperparameters()
    assert found.converged and found.evidence[found.best] == pytest.approx(best.evidence[best.best], abs=2e-3)
    again = fit(regression, name)
    again.prior.precision, again.likelihood.noise = best.values[best.best][:2], best.values[best.best][2]
    assert len(again.fit_hyperparameters()) == 1  # there already


@pytest.mark.parametrize("method", ["lbfgs", "mackay"])
def test_converged_is_flat_to_the_tolerance(regression, method: str) -> None:
    for tolerance in (1e-3, 1e-6):
        posterior = fit(regression, "kfac", 20.0)
        assert posterior.fit_hyperparameters(method, tolerance=tolerance).converged
        value = posterior.log_marginal_likelihood()
        slopes = torch.autograd.grad(value, [posterior.prior.log_precision, posterior.likelihood.log_noise])
        steepest = max(slope.abs().max().item() for slope in slopes)
        assert steepest <= 1.01 * tolerance * (1 + abs(value.item()))


def test_one_eigendecomposition_is_the_factorization_at_every_step(regression) -> None:
    posterior = fit(regression, "gp", 30.0, "all")
    history = posterior.fit_hyperparameters("adam", steps=30)
    for row, evidence in list(zip(history.values, history.evidence, strict=True))[::10]:
        posterior.prior.precision, posterior.likelihood.noise = row
        assert posterior.log_marginal_likelihood().item() == pytest.approx(evidence, rel=1e-10)


def test_only_what_is_named_moves(regression) -> None:
    posterior = fit(regression, "gp", 5.0)
    history = posterior.fit_hyperparameters(parameters=["noise"])
    assert history.names == ["noise"] and posterior.prior.precision.tolist() == pytest.approx([5.0, 5.0])
    assert posterior.prior.log_precision.requires_grad  # held for the search alone
    posterior = fit(regression, "gp", 5.0)
    posterior.fit_hyperparameters(parameters="precision")
    assert posterior.likelihood.noise.item() == pytest.approx(0.04)
    both = Variables(posterior, ["likelihood", "precision"])
    assert sorted(both.names) == ["noise", "precision[0]", "precision[2]"]


def test_a_posterior_of_many_eigenvalues_adds_them_up_in_pieces(regression, monkeypatch) -> None:
    """One shift for all of them, one for each of them, and its own optimum from the pieces' slopes."""
    for structure, groups in (("kfac", "layer"), ("diag", "parameter")):
        whole = fit(regression, structure, groups=groups).fit_hyperparameters(steps=5)
        with monkeypatch.context() as small:
            small.setattr(tuning, "EIGENVALUES", 5)
            pieces = fit(regression, structure, groups=groups).fit_hyperparameters(steps=5)
        assert pieces.evidence == pytest.approx(whole.evidence, rel=1e-9) and len(whole) > 3


@pytest.mark.parametrize("slope", [-3.0, 3.0])
def test_a_coupling_has_no_logarithm_and_no_bounds(slope: float) -> None:
    """Noise of two outputs, the second a multiple of the first: U is [[1, 0], [slope, 1]] at the optimum."""
    noise, network = torch.randn(200, 2).double(), nn.Linear(1, 2, bias=False).double()
    y = torch.stack([noise[:, 0], slope * noise[:, 0] + noise[:, 1]], 1)
    likelihood = ntkl.Gaussian(torch.eye(2))
    posterior = ntkl.laplace(network, (torch.zeros(200, 1).double(), y), likelihood)
    history = posterior.fit_hyperparameters(parameters="coupling", bounds=(0.9, 1.1))
    assert likelihood.coupling.item() == 0.0  # the caller's is not changed
    likelihood = posterior.likelihood
    assert history.converged and history.values[history.best] == [likelihood.coupling.item()]
    assert likelihood.coupling.item() == pytest.approx(slope, abs=0.3) and history.at_bounds == {}


def test_the_fixed_point_counts_outputs_and_weights(regression) -> None:
    """MacKay's noise is that of the maximum, with several outputs and points that count otherwise."""
    x = regression[1][0]
    y, network = torch.cat([x, x.square()], 1) + 0.3 * torch.randn(40, 2).double(), nn.Linear(1, 2).double()
    found = []
    for method in ("lbfgs", "mackay"):
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.1)).reweight(range(9), 4.0)
        assert posterior.fit_hyperparameters(method, "likelihood", tolerance=1e-9).converged
        found.append(posterior.likelihood.noise.item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.fixture(scope="module")
def inputs() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A network of three inputs, the second of which has next to no effect, and its outputs with noise."""
    torch.manual_seed(0)
    x, network = torch.randn(40, 3).double(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        network[0].weight[:, 1] *= 1e-3
        return network, (x, network(x) + 0.1 * torch.randn(40, 1).double())


def test_the_input_factor_gives_the_evidence_at_any_precisions(inputs) -> None:
    """Of KFAC with a precision for each input: value and gradient elsewhere are those of a factorization there."""
    network, data = inputs
    posterior = ntkl.laplace(network, data, ntkl.Gaussian(0.3), ntkl.GaussianPrior(0.7, groups="input"), "kfac")
    moved = {"precision": posterior.prior.log_precision, "noise": posterior.likelihood.log_noise}
    evidence = SpectralEvidence.of(posterior, moved)
    assert evidence is not None
    with torch.no_grad():
        posterior.prior.log_precision.add_(torch.randn_like(posterior.prior.log_precision))
        posterior.likelihood.log_noise.add_(0.7)
    value, gradients = evidence.value_and_gradients(moved)
    expected = posterior.log_marginal_likelihood()
    slopes = torch.autograd.grad(expected, list(moved.values()))
    for one, other in zip((value, evidence.value(), *gradients), (expected, expected, *slopes), strict=True):
        torch.testing.assert_close(one, other.detach().as_subclass(torch.Tensor), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("likelihood", "fitted", "moving"), pairwise(
    [ntkl.Gaussian(0.3), ntkl.Gaussian(0.3, missing="nan"), ntkl.StudentT(0.3, 4.0)],
    [("kfac", "ggn", "layer"), ("diag", "ef", "layer"), ("gp", "ggn", "all"), ("full", "ggn", "parameter"),
     ("full", "ef", "input")],
    [("noise",), ("precision",), ("precision", "noise")],
), ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value.record().get("missing", "")))
def test_steps_know_the_evidence_of_a_posterior_elsewhere(
    likelihood: ntkl.Likelihood, fitted: tuple[str, str, str], moving: tuple[str, ...],
) -> None:
    """Value and gradient after a move, from the first posterior's sums, beside a posterior that was fitted there."""
    torch.manual_seed(1)
    x, weights = torch.randn(15, 3).double(), torch.rand(15).double() + 0.5
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    y = 1e3 * torch.randn(15, 2).double()  # errors far beyond the noise
    if likelihood.record().get("missing") == "nan":
        y[3, 1] = y[7] = torch.nan
    structure, curvature, groups = fitted
    given = (copy.deepcopy(likelihood), ntkl.GaussianPrior(0.7, groups=groups), structure, curvature)
    posterior = ntkl.laplace(network, (x, y, weights), *given)
    names = {"precision": posterior.prior.log_precision, "noise": posterior.likelihood.log_noise}
    moved = {name: names[name] for name in moving}
    if isinstance(likelihood, ntkl.StudentT):
        moved |= {"excess": posterior.likelihood.log_excess} if "noise" in moving else {}
    evidence = SpectralEvidence.of(posterior, moved)
    if evidence is None:  # gradients of Student's t are no multiples of those at another scale
        assert isinstance(likelihood, ntkl.StudentT) and curvature == "ef" and "noise" in moving
        return
    with torch.no_grad():
        for parameter in moved.values():
            parameter.add_(2.0 * torch.rand_like(parameter) + 1.0)
    again = ntkl.laplace(network, (x, y, weights), copy.deepcopy(posterior.likelihood),
                         copy.deepcopy(posterior.prior), structure, curvature)
    own = {"precision": again.prior.log_precision} | {
        name.removeprefix("log_"): parameter for name, parameter in again.likelihood.named_parameters()}
    expected = again.log_marginal_likelihood()
    slopes = torch.autograd.grad(expected, [own[name] for name in moved])
    value, gradients = evidence.value_and_gradients(moved)
    for one, other in zip((value, evidence.value(), *gradients), (expected, expected, *slopes), strict=True):
        torch.testing.assert_close(one, other.detach().as_subclass(Tensor).to(one), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", ["kfac", "gp"])
def test_a_parameter_that_the_likelihood_does_not_use_is_named(inputs, structure: str) -> None:
    """Where the gradient is in closed form, and where autograd gives it."""

    class Idle(ntkl.Gaussian):
        def __init__(self) -> None:
            super().__init__(0.3)
            self.log_idle = nn.Parameter(torch.zeros((), dtype=torch.float64))

    network, data = inputs
    posterior = ntkl.laplace(network, data, Idle(), ntkl.GaussianPrior(groups="layer"), structure)
    with pytest.raises(ntkl.UnsupportedError, match=r"depends on idle; got one that does not.*Name those that move"):
        posterior.fit_hyperparameters()
    assert all(parameter.requires_grad for parameter in posterior.likelihood.parameters())


@pytest.mark.parametrize("parameters", [["temperature"], ["precision", "temperature"]])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_that_cannot_move_is_named(parameters: list[str], frozen: bool, tmp_path) -> None:
    """Frozen by the caller, or of a checkpoint without data, whose evidence is known at one temperature alone."""
    network = nn.Linear(3, 3).double()
    data = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 3
    posterior = ntkl.laplace(network, data, ntkl.Categorical(), structure="full")
    if frozen:
        posterior.likelihood.requires_grad_(False)
    else:
        posterior.save(tmp_path / "p.pt")
        posterior = ntkl.load(tmp_path / "p.pt", network)
    with pytest.raises(ntkl.UnsupportedError, match=r"depends on temperature; got .*data=.*requires_grad"):
        posterior.fit_hyperparameters(parameters=parameters)


@pytest.mark.parametrize(("structure", "method"), [("kfac", "lbfgs"), ("gp", "lbfgs"), ("kfac", "adam")])
def test_searches_add_the_hyperprior_of_the_inputs(inputs, structure: str, method: str) -> None:
    """At the end the evidence's slope is the hyperprior's pull; an input without effect has the largest precision."""
    (network, data), spread = inputs, 0.8
    posterior = ntkl.laplace(network, data, ntkl.Gaussian(0.01), ntkl.GaussianPrior(groups="input", spread=spread),
                             structure)
    history = posterior.fit_hyperparameters(method, ["precision"], tolerance=1e-9, steps=400)
    logs, value = posterior.prior.log_precision, posterior.log_marginal_likelihood()
    (slope,) = torch.autograd.grad(value, logs)
    pull = (logs[:3] - logs[:3].mean()) / spread**2
    torch.testing.assert_close(slope[:3], pull.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(slope[3:], torch.zeros_like(slope[3:]), rtol=0.0, atol=1e-4)
    assert logs[:3].argmax() == 1 and (logs[1] - logs[0]).item() > 0.5
    total = value + posterior.prior.log_hyperprior()
    assert history.evidence[history.best] == pytest.approx(total.item(), rel=1e-10)
    with pytest.raises(ntkl.UnsupportedError, match='for a prior with a spread; got "mackay"'):
        posterior.fit_hyperparameters("mackay")


def test_an_ascent_climbs_the_evidence_and_the_hyperprior(inputs) -> None:
    """Its first step is Adam's along the sum of both gradients; it returns evidences alone."""
    network, data = inputs
    posterior = ntkl.laplace(network, data, ntkl.Gaussian(0.3), ntkl.GaussianPrior(groups="input", spread=0.01), "kfac")
    logs = posterior.prior.log_precision
    with torch.no_grad():
        logs.add_(torch.linspace(-1, 1, len(logs)).double())
    before, start = posterior.log_marginal_likelihood().item(), logs.detach().clone()
    total = posterior.log_marginal_likelihood() + posterior.prior.log_hyperprior()
    (slope,) = torch.autograd.grad(total, logs)
    first, last = Ascent("precision", 0.1, (1e-6, 1e6)).climb(posterior, steps=1)
    torch.testing.assert_close(logs.detach(), start + 0.1 * slope.sign(), rtol=1e-6, atol=1e-6)
    assert (first, last) == pytest.approx((before, posterior.log_marginal_likelihood().item()), rel=1e-12)
    first, _ = Ascent("precision", 0.1, (1e-6, 1e6)).climb(posterior, steps=2)
    assert first == pytest.approx(last, rel=1e-12)  # on the terms of log det B


@pytest.mark.filterwarnings("ignore:the evidence still grows")
def test_eigenvectors_that_mix_weights_of_several_precisions_belong_to_none_of_them() -> None:
    """An exact block, one precision for each of its entries: the evidence on the way is that of the matrix there."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]).double())

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale.exp()).sum(1, keepdim=True)

    x = torch.randn(20, 3).double()
    prior = ntkl.GaussianPrior(groups="parameter")
    posterior = ntkl.laplace(Product(), (x, x.sum(1, keepdim=True)), ntkl.Gaussian(0.1), prior, "inf")
    assert [part.kind for part in posterior.parameter_blocks] == ["block"]
    history = posterior.fit_hyperparameters(parameters="precision", steps=5)
    assert posterior.log_marginal_likelihood().item() == pytest.approx(history.evidence[history.best], rel=1e-12)


@pytest.mark.parametrize("evidence", [lambda logs: (logs - logs).sqrt().sum(), lambda logs: logs.sum() + float("inf")])
def test_an_ascent_on_what_is_no_number_leaves_numbers(regression, monkeypatch, evidence) -> None:
    """A gradient that is none, 0/0 at a finite value; and a value that is none, with a finite gradient."""
    posterior = fit(regression, "kfac")
    logs = posterior.prior.log_precision
    monkeypatch.setattr(posterior, "log_marginal_likelihood", lambda: evidence(logs))
    with pytest.raises(ntkl.NumericalError, match="a finite evidence and gradient"):
        Ascent("precision", 0.1, (1e-3, 1e3)).climb(posterior, steps=1)
    assert logs.isfinite().all()


def test_still_is_a_whole_run_of_steps_without_a_change() -> None:
    flat = [5.0] * 19
    for evidence, still in ((flat, False), ([5.0, *flat], True), ([6.0, *flat], False), ([6.0, 5.0, *flat], True)):
        search = SimpleNamespace(history=SimpleNamespace(evidence=evidence), tolerance=1e-6)
        assert _Search.still(search) == still


@pytest.mark.filterwarnings("ignore:the evidence still grows")
def test_temperature_and_one_precision_per_parameter() -> None:
    torch.manual_seed(0)
    x, network = torch.randn(30, 4).double(), nn.Linear(4, 3).double()
    y = torch.distributions.Categorical(logits=2 * network(x)).sample()
    cases = (("all", "gp", "temperature"), ("parameter", "diag", "precision"), ("tensor", "kfac", None),
             ("tensor", "diag", "precision"),  # a layer's weight and bias are one part of the diagonal
             ("all", "gp", ["precision", "temperature"]))
    for groups, structure, moving in cases:
        posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(1.0), ntkl.GaussianPrior(groups=groups), structure)
        before = posterior.log_marginal_likelihood().item()
        history = posterior.fit_hyperparameters(parameters=moving, bounds=(1e-3, 1e6))
        asked = moving is not None and "temperature" in moving
        assert ("temperature" in history.names) == asked
        assert (posterior.likelihood.temperature.item() == 1.0) != asked
        assert history.evidence[history.best] > before + 0.1
        assert posterior.log_marginal_likelihood().item() == pytest.approx(history.evidence[history.best], rel=1e-8)


def test_the_correction_can_be_maximized_too(regression) -> None:
    posterior = fit(regression, "kfac")
    history = posterior.fit_hyperparameters(correction=True)
    assert posterior.log_marginal_likelihood(correction=True).item() == pytest.approx(max(history.evidence), rel=1e-8)


def test_bounds_and_early_ends_are_named(regression) -> None:
    posterior = fit(regression, "gp")
    with pytest.warns(ntkl.NTKLaplaceWarning, match="beyond the bounds of 1 hyperparameters: noise = 0.5"):
        history = posterior.fit_hyperparameters(parameters="noise", bounds=(0.5, 1e4))
    assert list(history.at_bounds) == ["noise"] and posterior.likelihood.noise.item() == pytest.approx(0.5)
    below, near, above = (1e-4, 0.01), (1e-4, 0.045), (0.5, 1e4)  # of a start at 0.04 and an optimum at 0.06
    ends = {("adam", below): 0.01, ("mackay", above): 0.5, ("lbfgs", below): 0.01}
    ends |= {(method, near): 0.045 for method in ("adam", "mackay", "lbfgs")}
    for (method, bounds), end in ends.items():
        posterior = fit(regression, "gp")
        with pytest.warns(ntkl.NTKLaplaceWarning, match=f"beyond the bounds of 1 hyperparameters: noise = {end}"):
            history = posterior.fit_hyperparameters(method, "noise", bounds=bounds)
        assert history.message == "gradient below tolerance" and history.at_bounds == {"noise": pytest.approx(end)}
    posterior = fit(regression, "gp", 1e3)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not reached: 3 steps were not enough"):
        history = posterior.fit_hyperparameters("mackay", steps=3)
    assert not history.converged and len(history) == 4


def test_an_interruption_leaves_the_best_seen(regression, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, calls = fit(regression, "gp", 1e2), []
    whole = type(posterior).log_marginal_likelihood

    def stops(self, correction: bool = False) -> Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return whole(self, correction)

    monkeypatch.setattr(type(posterior), "log_marginal_likelihood", stops)
    start = whole(posterior).item()
    with pytest.raises(KeyboardInterrupt):
        posterior.fit_hyperparameters("mackay")
    assert whole(posterior).item() > start


@pytest.mark.slow
def test_a_line_search_recovers_from_values_that_are_not_finite(regression, monkeypatch) -> None:
    posterior, walls = fit(regression, "gp", 1e-3, noise=1.0), []
    whole = type(posterior).log_marginal_likelihood

    def breaks(self, correction: bool = False) -> Tensor:
        if self.likelihood.noise < 0.02:  # the first step goes there, to 1e-6, and the optimum is at 0.06
            walls.append(1)
            raise ntkl.NumericalError("a positive definite matrix", "another", "Go back.")
        return whole(self, correction)

    expected = fit(regression, "gp", 1e-3).fit_hyperparameters()
    monkeypatch.setattr(type(posterior), "log_marginal_likelihood", breaks)
    found = posterior.fit_hyperparameters()
    assert walls and found.converged
    assert found.evidence[found.best] == pytest.approx(expected.evidence[expected.best], abs=1e-4)
    posterior.likelihood.noise = 0.01
    with pytest.raises(ntkl.NumericalError):  # a start where nothing can be computed
        posterior.fit_hyperparameters()


def test_the_wall_of_a_line_search_is_a_parabola_up_from_the_last_step(regression, monkeypatch) -> None:
    seen, whole = [], _Search.wall

    def wall(self, logs: Tensor):
        value, slope = whole(self, logs)
        seen.append((value + self.history.evidence[-1], torch.as_tensor(slope) @ (logs - self.taken[-1].logs)))
        return value, slope

    posterior = fit(regression, "gp", 1e-3, noise=1.0)
    own = type(posterior).log_marginal_likelihood

    def breaks(self, correction: bool = False) -> Tensor:
        if self.likelihood.noise < 0.02:
            raise ntkl.NumericalError("a positive definite matrix", "another", "Go back.")
        return own(self, correction)

    monkeypatch.setattr(_Search, "wall", wall)
    monkeypatch.setattr(type(posterior), "log_marginal_likelihood", breaks)
    posterior.fit_hyperparameters()
    for height, climb in seen:  # of h |x - x0|² / |x1 - x0|²: h high at x1, with the slope 2 h along the way
        assert height > 0 and climb.item() == pytest.approx(2 * height, rel=1e-12)
    assert seen


def test_inf_far_outside_its_range_raises_a_clear_error(regression) -> None:
    """L-BFGS may ask for it; what it goes back from is one of the library's own errors.

    Its matrix overflows there. Where it only rounds, one processor factors it and another does not.
    """
    posterior = fit(regression, STRUCTURES["inf"], 1e-200, "all", 1e-200)
    with pytest.raises(ntkl.NumericalError, match="positive definite"):
        posterior.log_marginal_likelihood()


def test_wrong_requests(regression) -> None:
    posterior = fit(regression, "gp")
    with pytest.raises(ntkl.UnsupportedError, match="lbfgs, adam, mackay; got 'newton'"):
        posterior.fit_hyperparameters("newton")
    with pytest.raises(ntkl.HyperparameterError, match=r"precision, noise; got \['temperature'\]"):
        posterior.fit_hyperparameters(parameters=["temperature"])
    with pytest.raises(ntkl.HyperparameterError, match="positive bounds"):
        posterior.fit_hyperparameters(bounds=(1.0, 0.1))
    for wrong in ({"steps": 2.5}, {"steps": "a"}, {"steps": True}, {"tolerance": "a"}, {"tolerance": float("inf")},
                  {"bounds": 5}, {"bounds": ("a", 1)}, {"parameters": 5}, {"learning_rate": 0.0},
                  {"learning_rate": "a"}, {"parameters": [["precision"]]}):
        with pytest.raises(ntkl.HyperparameterError, match=r"expected .*; got .*\. .*\."):
            posterior.fit_hyperparameters("adam", **wrong)
    for name in ("correction", "progress"):
        with pytest.raises(ntkl.UnsupportedError, match=f"expected {name} True or False; got 'no'"):
            posterior.fit_hyperparameters(**{name: "no"})
    x = regression[1][0]
    labels = (x > 0).double()
    classifier = ntkl.laplace(nn.Linear(1, 2).double(), (x, labels.long().squeeze(1)), ntkl.Categorical())
    with pytest.raises(ntkl.UnsupportedError, match="temperature"):
        classifier.fit_hyperparameters("mackay", ["precision", "temperature"])
    with pytest.raises(ntkl.UnsupportedError, match="an evidence with correction"):
        posterior.fit_hyperparameters("mackay", correction=True)


def test_a_history_for_people(regression) -> None:
    history = fit(regression, "kfac", 10.0).fit_hyperparameters()
    frame = history.to_dataframe()
    assert list(frame.columns) == ["evidence", "precision[0]", "precision[2]", "noise"] and len(frame) == len(history)
    assert "converged after" in str(history) and "nats" in str(history)
    assert json.loads(json.dumps(history.to_dict()))["method"] == "lbfgs"
    top, bottom = history.plot().axes
    assert top.get_ylabel() == "evidence, nats" and len(bottom.get_lines()) == 3
    assert len(bottom.get_legend().get_texts()) == 3
    history.names = ["a group with a name that would cover the lines", *history.names[1:]]
    figure = history.plot()
    assert figure.axes[1].get_legend() is None and len(figure.legends[0].get_texts()) == 3


@pytest.mark.parametrize("structure", ["gp", "full", "ekfac"])
def test_separable_labels_cause_a_warning(structure, recwarn):
    """A separated data set has no best temperature: zero, with vague weights, says all of its labels at no cost."""
    torch.manual_seed(2)
    x = torch.randn(30, 2).double()
    y = (x[:, 0] > 0).long()
    network = nn.Linear(2, 2).double()
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[-2.0, 0.0], [2.0, 0.0]]))
        network.bias.zero_()
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=structure)
    posterior.fit_hyperparameters()
    assert not [str(one.message) for one in recwarn] and posterior.likelihood.temperature.item() == 1.0
    with pytest.warns(ntkl.NTKLaplaceWarning, match='no maximum over temperatures: .* leave "temperature" out'):
        posterior.fit_hyperparameters(parameters=["precision", "temperature"])
    assert posterior.log_marginal_likelihood() > -0.01 and posterior.likelihood.temperature < 0.5
