"""Where leave-one-out is not to be trusted: what is measured, against dense matrices, and where it is said."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.tools.explorer import explore
from reference import jacobian, outputs

DISTRUST = "leave-one-out is not to be trusted here"


@functools.cache
def problem(noise: float = 1.5) -> tuple[nn.Module, Tensor, Tensor]:
    """A network at its MAP under precisions of 1: three classes that overlap."""
    torch.manual_seed(0)
    x = torch.randn(60, 3).double()
    y = (x[:, :2] + noise * torch.randn(60, 2).double() > 0).sum(1)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    weights = list(network.parameters())
    optimizer = torch.optim.LBFGS(weights, max_iter=1000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        penalty = 0.5 * sum(w.square().sum() for w in weights)
        loss = nn.functional.cross_entropy(network(x), y, reduction="sum") + penalty
        loss.backward()
        return loss

    optimizer.step(objective)
    optimizer.zero_grad()
    return network.eval(), x, y


def fit(structure: object = "gp", precision: object = 1.0, groups: str = "layer", **options) -> ntkl.Posterior:
    network, x, y = problem()
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(precision, groups=groups), structure,
                        **options)


def moved(**options) -> ntkl.Posterior:
    """Under a prior that the weights were not trained with."""
    posterior = fit(**options)
    posterior.prior.precision = 20.0
    return posterior


def saturated(structure: str) -> ntkl.Posterior:
    """All points but one are certain: Kronecker factors spread its curvature over the others."""
    torch.manual_seed(2)
    x = torch.randn(20, 3).double()
    x[:, 0] = 5.0 * x[:, 0].sign()
    x[7, 0] = 0.0
    network = nn.Linear(3, 1).double()
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[3.0, 0.1, 0.0]]))
        network.bias.zero_()
    return ntkl.laplace(network, (x, (x[:, :1] > 0).double()), ntkl.Bernoulli(), ntkl.GaussianPrior(0.01), structure)


def quietly(posterior: ntkl.Posterior, **options) -> ntkl.LeaveOneOut:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return posterior.leave_one_out(**options)


@pytest.mark.slow
def test_at_the_optimum_leave_one_out_is_trusted() -> None:
    for structure in ("gp", "full"):
        found = fit(structure).leave_one_out()  # a warning would be an error
        assert found.trusted and found.reasons == () and str(found.reliability) == "" and "trusted" not in repr(found)
        assert found.reliability.decrement < 1e-9 and not found.reliability.moved
        assert fit(structure).loo_log_density() == found.log_density.sum()


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
def test_what_is_measured_is_that_of_the_dense_matrices(structure: str) -> None:
    """½ gᵀH⁻¹g/N, ρ, leverages and spread, away from the optimum."""
    network, x, y = problem()
    posterior = fit(structure, torch.tensor([0.2, 6.0]))
    found = quietly(posterior, strict=False)
    measured, theta = found.reliability, nn.utils.parameters_to_vector(network.parameters()).detach()
    precision = torch.tensor([0.2] * 16 + [6.0] * 15).double()
    p, jac = torch.softmax(outputs(network, x), 1), jacobian(network, x)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    gradient = precision * theta - torch.einsum("nc,ncp->p", nn.functional.one_hot(y, 3) - p, jac)
    if structure in ("gp", "full"):
        ggn = torch.einsum("ncp,ncd,ndq->pq", jac, hessian, jac)
        h = ggn + precision.diag()
        decrement = 0.5 * gradient @ torch.linalg.solve(h, gradient) / 60
        assert measured.decrement == pytest.approx(float(decrement), rel=1e-9)
        gamma = torch.linalg.solve(h, ggn).diagonal()
    else:  # its own H: that of the evidence's correction
        values = [posterior.log_marginal_likelihood(correction=c).item() for c in (False, True)]
        assert measured.decrement == pytest.approx((values[1] - values[0]) / 60, rel=1e-9)
        gamma = posterior.effective_parameters().repeat_interleave(torch.tensor([16, 15])) / torch.tensor(
            [16.0] * 16 + [15.0] * 15
        )
    energy = precision * theta.square()
    assert measured.prior_ratio == pytest.approx(float(energy.sum() / gamma.sum()), rel=1e-8)
    assert measured.precision_spread == pytest.approx(30.0) and not measured.moved
    assert measured.largest_leverage == float(found.leverage.max())
    assert measured.high_leverage == float((found.leverage > 0.9).double().mean())
    assert measured.exact == (structure in ("gp", "full"))


@pytest.mark.parametrize("structure, added", [("gp", "missing"), ("full", "weightless"), ("kfac", "both")])
def test_points_that_do_not_count_change_no_diagnostic(structure: str, added: str) -> None:
    """Without a target, or with a weight of zero: decrement and error of the score are per point that counts."""
    network, x, y = problem()
    missing = {"missing": 200, "weightless": 0, "both": 100}[added]
    more = torch.cat([x, torch.randn(200, 3, generator=torch.Generator().manual_seed(1)).double()])
    labels = torch.cat([y, torch.full((missing,), -100), torch.zeros(200 - missing, dtype=torch.long)])
    weights = torch.cat([torch.ones(60 + missing), torch.zeros(200 - missing)]).double()
    found = []
    for data in ((x, y), (more, labels, weights)):
        posterior = ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(20.0), structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
            left = posterior.leave_one_out(points=None if structure != "kfac" else range(6))  # one group
            score = posterior.loo_log_density(points=range(6))
        measured = left.reliability
        found.append([float(score), left.standard_error, measured.decrement, measured.prior_ratio,
                      measured.high_leverage, measured.effective_share, float(left.counts.sum())])
    assert found[1] == pytest.approx(found[0], rel=1e-8)


def test_weights_and_tempered_likelihoods_are_repeated_points_in_each_diagnostic() -> None:
    torch.manual_seed(0)
    x, network = torch.randn(10, 2).double(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    y = x.sin() + 0.1 * torch.randn(10, 2)
    y[0, 1] = torch.nan
    noise = ntkl.Gaussian(0.05, missing="nan")
    data = {"tempered": (x, y), "weights": (x, y, torch.full((10,), 3.0).double()), "repeated": (x.repeat(3, 1),
            y.repeat(3, 1))}
    found = {}
    for name, given in data.items():
        likelihood = ntkl.Tempered(noise, 3.0) if name == "tempered" else noise
        posterior = ntkl.laplace(network, given, likelihood, ntkl.GaussianPrior(0.1))
        found[name] = quietly(posterior).reliability, float(posterior.effective_parameters().sum())
    for measured, used in found.values():
        assert measured.effective_share == pytest.approx(used / (3 * 19), rel=1e-9)
        assert measured.decrement == pytest.approx(found["repeated"][0].decrement, rel=1e-9)


def test_the_error_of_a_score_weights_the_points() -> None:
    """By the jackknife: the weighted mean without each point."""
    _, x, y = problem()
    weights = torch.rand(60, generator=torch.Generator().manual_seed(3)).double()
    weights[::3] = 0.0
    network = problem()[0]
    found = quietly(ntkl.laplace(network, (x, y, weights), ntkl.Categorical(), ntkl.GaussianPrior(1.0)))
    one = quietly(ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0)))
    assert one.standard_error == pytest.approx(float(one.log_density.std() / 60**0.5), rel=1e-10)
    w, d = weights[weights > 0], found.log_density[weights > 0]
    means = torch.stack([(w @ d - a * b) / (w.sum() - a) for a, b in zip(w, d, strict=True)])
    jackknife = ((len(w) - 1) / len(w) * (means - means.mean()).square().sum()).sqrt()
    assert found.standard_error == pytest.approx(float(jackknife), rel=0.1)


@pytest.mark.slow
def test_moved_hyperparameters_cause_a_warning() -> None:
    posterior = moved()
    words = rf"{DISTRUST}: the weights are not at the optimum of this model, as hyperparameters have changed.*train on"
    with pytest.warns(ntkl.NTKLaplaceWarning, match=words):
        found = posterior.leave_one_out()
    with pytest.warns(ntkl.NTKLaplaceWarning, match=words):
        posterior.loo_log_density()
    assert not found.trusted and len(found.reasons) == 1 and DISTRUST in repr(found)
    assert "changed since the fit" in found.guarantees[-1]
    assert found.to_dataframe().attrs == {"trusted": False, "reasons": list(found.reasons)}
    # a part, and the posterior of a what-if, know it too
    assert all(quietly(other).reliability.moved for other in (posterior.subset(range(50)), posterior.remove([1])))
    posterior.prior.precision = 1.0
    assert posterior.leave_one_out().trusted  # back where they were
    posterior.fit_hyperparameters()
    found = quietly(posterior)
    assert found.reliability.moved and f"{found.reliability.decrement:.2g} nats a point" in found.guarantees[-1]


def test_a_checkpoint_remembers_the_fit(tmp_path) -> None:
    network, _, _ = problem()
    posterior = fit()
    for move in (lambda: None, posterior.fit_hyperparameters):
        move()
        posterior.save(tmp_path / "posterior.pt", include_data=True)
        loaded = ntkl.load(tmp_path / "posterior.pt", network)
        assert quietly(loaded).reliability.moved == (move.__name__ == "fit_hyperparameters")


def test_a_vague_prior_and_points_of_high_leverage_cause_a_warning() -> None:
    vague = fit(precision=1e-7)
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"the prior is vague, with δ‖θ-μ0‖²/γ of .*e-0"):
        vague.leave_one_out()
    torch.manual_seed(1)
    wide = nn.Linear(40, 1).double()
    x, y = torch.randn(30, 40).double(), torch.randn(30, 1).double()
    with torch.no_grad():  # more weights than points, and little noise: each point is its own
        design = torch.cat([x, torch.ones(30, 1).double()], 1)
        best = torch.linalg.solve(design.T @ design / 1e-4 + torch.eye(41).double(), design.T @ y / 1e-4)
        wide.weight.copy_(best[:40].T)
        wide.bias.copy_(best[40])
    with pytest.warns(ntkl.NTKLaplaceWarning, match="100% of the points have a leverage above 0.9"):
        ntkl.laplace(wide, (x, y), ntkl.Gaussian(1e-4)).leave_one_out()


class Scaled(nn.Module):
    """A linear layer whose outputs pass through a function, which may have a weight of its own."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(3, 1).double(), after.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(x))


def vague_regression(after: nn.Module, structure: str = "gp", frozen: bool = False, noise: float = 1.0,
                     dtype: torch.dtype = torch.float64) -> ntkl.Posterior:
    """A precision of 1e-7, and a linear layer at its optimum; what follows hardly changes outputs below 1."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 3, generator=generator).double()
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(30, 1, generator=generator).double()
    network = Scaled(after)
    design = torch.cat([x, torch.ones(30, 1).double()], 1)
    best = torch.linalg.solve(design.T @ design / noise + 1e-7 * torch.eye(4).double(), design.T @ y / noise)
    with torch.no_grad():
        network.layer.weight.copy_(best[:3].T)
        network.layer.bias.copy_(best[3])
    for weight in after.parameters():
        weight.requires_grad_(not frozen)
    return ntkl.laplace(network.to(dtype), (x.to(dtype), y.to(dtype)), ntkl.Gaussian(noise), ntkl.GaussianPrior(1e-7),
                        structure)


class Bent(nn.Module):
    """Differs from the identity by a millionth of a square: no linear network, though nearly one."""

    def forward(self, f: Tensor) -> Tensor:
        return f + 1e-6 * f.square()


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_vague_prior_is_no_reason_where_one_newton_step_is_exact(structure: str, dtype: torch.dtype) -> None:
    """A linear network with Gaussian noise: leave-one-out is the fit without the point, under every prior."""
    posterior = vague_regression(nn.Identity(), structure, dtype=dtype)
    state = torch.random.get_rng_state()
    found = posterior.leave_one_out()  # a warning would be an error
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found.trusted and found.reliability.linear and found.reliability.prior_ratio < 1e-5
    x, y = (t.double() for t in posterior.fitted.structure.source.first())
    design = torch.cat([x, torch.ones(30, 1).double()], 1)
    for i in (0, 7, 29):
        keep = torch.arange(30) != i
        h = design[keep].T @ design[keep] + 1e-7 * torch.eye(4).double()
        mean = design[i] @ torch.linalg.solve(h, design[keep].T @ y[keep])
        variance = design[i] @ torch.linalg.solve(h, design[i]) + 1.0
        expected = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[i])
        assert float(found.log_density[i]) == pytest.approx(float(expected), rel=1e-7 if dtype.itemsize == 8 else 1e-4)


def test_a_vague_prior_stays_a_reason_where_one_newton_step_is_not_exact(tmp_path) -> None:
    """Nonlinear, by little or by a weight after the layer; without the data; a curvature that is none of the GGN's."""
    own = nn.Linear(1, 1, bias=False)
    nn.init.ones_(own.weight)
    posteriors = {
        "tanh": vague_regression(nn.Tanh()), "nearly linear": vague_regression(Bent()),
        "two layers": vague_regression(own), "frozen": vague_regression(own, frozen=True),
    }
    for name, posterior in posteriors.items():
        found = quietly(posterior)
        assert found.reliability.prior_ratio < 0.03 and not found.reliability.linear, name
        assert any("the prior is vague" in reason for reason in found.reasons), name
    linear = vague_regression(nn.Identity())
    linear.save(tmp_path / "posterior.pt", include_data=True)
    for other in (ntkl.load(tmp_path / "posterior.pt", linear.network.module), vague_regression(nn.Identity(), "kfac")):
        found = quietly(other, strict=False)
        assert not found.reliability.linear and any("the prior is vague" in reason for reason in found.reasons)
    x, y = linear.fitted.structure.source.first()
    labels = ntkl.laplace(Scaled(nn.Identity()), (x, (y > 0).double()), ntkl.Bernoulli(), ntkl.GaussianPrior(1e-7))
    assert any("the prior is vague" in reason for reason in quietly(labels).reasons)


def test_leverages_above_one_are_refused() -> None:
    """KFAC holds less of some points than they have: no score, and a ranking where it is asked for."""
    posterior = saturated("kfac")
    leverage = quietly(posterior, strict=False).leverage
    assert leverage.max() > 1 and leverage.argmax() == 7 and quietly(saturated("gp")).leverage.max() < 1
    words = rf"{int((leverage > 1).sum())} of 20 points above it, the largest {float(leverage.max()):.3g}, under " \
            r"structure='kfac'.*\"full\" or \"iterative\".*other data.*strict=False"
    with pytest.raises(ntkl.UnsupportedError, match=words):
        posterior.leave_one_out()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="approximate curvature, with leverages up to .*fit with structure"):
        ranked = posterior.leave_one_out(strict=False)
    assert len(ranked.ranked(k=5)) == 5 and not ranked.trusted
    below = fit("kfac", 5.0)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="approximate curvature, which ranks"):
        assert below.leave_one_out().leverage.max() <= 1


def test_the_comparison_marks_the_column_and_gives_the_reason() -> None:
    tuned = moved()
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"not to be trusted for tuned, marked \*.*train on"):
        found = ntkl.compare_models({"own": fit(), "tuned": tuned, "kfac": fit("kfac")}, conditional="none")
    assert [row.loo_trusted for row in found.rows] == [True, False, None]
    text = str(found)
    assert f"{found['tuned'].loo:.2f}*" in text and f"{found['own'].loo:.2f}*" not in text
    assert "tuned: LOO*: the weights are not at the optimum" in text and found["own"].loo_note == ""
    assert found["kfac"].loo is None and 'kfac: LOO: expected structure="gp", "full" or "iterative"' in text


@pytest.mark.slow
def test_the_page_shows_the_warning_beside_the_columns() -> None:
    _, x, _ = problem()
    pages = {name: explore(posterior, x[:2]).html()
             for name, posterior in {"own": fit(), "tuned": moved(), "kfac": saturated("kfac")}.items()}
    assert DISTRUST not in pages["own"]
    for name, words in (("tuned", "the weights are not at the optimum"), ("kfac", "with leverages up to")):
        assert f'<p class="flag" role="note">Mind: {DISTRUST}' in pages[name] and words in pages[name]


def quietly_fitted(posterior: ntkl.Posterior) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return posterior.fit_predictive("loo", strict=False)


def doubted(likelihood: ntkl.Likelihood, weights: Tensor, y: Tensor) -> ntkl.Reliability:
    """Diagnostics of a network that was not trained, with many effective parameters."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    x = torch.randn(70, 3).double() * 2.0
    posterior, rough, iterative = (
        ntkl.laplace(network, (x, y, weights), likelihood, ntkl.GaussianPrior(1e-4), structure)
        for structure in ("full", "kfac", "iterative"))
    one, fit = quietly(posterior), quietly_fitted(posterior)
    found = one.reliability
    means = float(one.counts @ one.log_density / one.counts.sum()), fit.after
    assert (found.density, fit.reliability.density) == pytest.approx(means, rel=1e-12)
    # an approximate evidence, or an estimate of it, decides nothing
    assert quietly(rough, points=5).reliability.gain is None and quietly(iterative).reliability.gain is None
    if found.gain is not None:
        expected = float(posterior.log_marginal_likelihood()) / float(weights.sum()) / posterior.likelihood.weight
        assert found.gain == pytest.approx(expected - found.without_inputs, rel=1e-12)
    return found


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_the_evidence_beside_one_prediction_for_all_inputs(weight: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(70, generator=generator).double() + 0.5
    labels = torch.randint(3, (70,), generator=generator)
    shares = torch.stack([weights[labels == c].sum() for c in range(3)]) / weights.sum()
    classes = doubted(ntkl.Tempered(ntkl.Categorical(), weight), weights, labels)
    assert classes.without_inputs == pytest.approx(float((shares * shares.log()).sum()), rel=1e-12)
    y = torch.randn(70, 3, generator=generator).double() * torch.tensor([1.0, 2.0, 3.0])
    mean = (weights[:, None] * y).sum(0) / weights.sum()
    variance = (weights[:, None] * (y - mean).square()).sum(0) / weights.sum()
    alone = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(1) @ weights / weights.sum()
    normal = doubted(ntkl.Tempered(ntkl.Gaussian(0.3), weight), weights, y)
    assert normal.without_inputs == pytest.approx(float(alone), rel=1e-12)
    noisy = doubted(ntkl.Gaussian(1.5), weights, y)
    assert noisy.noise_share == pytest.approx(float(1.5 / variance.min()), rel=1e-12) and noisy.noise_share > 1.0
    assert classes.noise_share is None and doubted(ntkl.Gaussian(0.3), weights, torch.ones_like(y)).gain is None
    gaps = y.masked_fill(y > 1.0, torch.nan)
    assert doubted(ntkl.Gaussian(0.3, missing="nan"), weights, gaps).gain is None
    for found in (classes, normal):
        assert found.gain < -0.1
        for change, learned in (({"density": found.without_inputs + 0.06}, True), ({"linear": True}, False),
                                ({"density": found.without_inputs + 0.04}, False), ({"gain": -0.09}, False),
                                ({"noise_share": 1.01}, False), ({"noise_share": 0.99}, True),
                                ({"learned_share": 0.19}, False)):
            one = replace(found, **({"density": found.without_inputs + 0.06} | change))
            assert one.below_one_prediction != one.linear
            assert one.learned_targets == learned == any("learned its targets" in reason for reason in one.reasons)
