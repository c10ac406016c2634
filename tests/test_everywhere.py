"""A likelihood at every position: against dense references of the whole vector of outputs, in both layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace.metrics import held_out_scores
from ntk_laplace.model.likelihoods import likelihood_from_record as from_record
from ntk_laplace.model.likelihoods import likelihood_record
from ntk_laplace.model.network import linearized
from ntk_laplace.model.predictive import predictive
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.meter import PeakMemory
from ntk_laplace.structures import forecast
from reference import relative_error
from refusals import refused

F64 = torch.float64
SHAPE, LENGTH = (4, 3), 12


class UNet(nn.Module):
    """Two resolutions, a skip connection; channels first."""

    def __init__(self, outputs: int, width: int = 3) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(width, width, 2, 2), nn.Conv2d(2 * width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x).tanh()
        second = self.inner(nn.functional.avg_pool2d(first, 2)).tanh()
        return self.last(torch.cat([first, self.up(second)], 1))


class Permuted(nn.Module):
    """The same outputs with channels last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).movedim(1, -1)


def convolutional(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, outputs, 3, padding=1)).double()


def images(n: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    return torch.randn(n, 1, *shape, dtype=F64, generator=torch.Generator().manual_seed(1))


def labels(n: int, classes: int = 3, shape: tuple[int, int] = SHAPE) -> Tensor:
    y = torch.randint(0, classes, (n, *shape), generator=torch.Generator().manual_seed(2))
    y[0, 0, 0] = y[-1, 1] = -100
    return y


def everywhere(ignore_index: int = -100) -> ntkl.Everywhere:
    return ntkl.Everywhere(ntkl.Categorical(), SHAPE, ignore_index)


def fitted(structure: str = "gp", **options: Any) -> ntkl.Posterior:
    return ntkl.laplace(convolutional(), (images(4), labels(4)), everywhere(), ntkl.GaussianPrior(0.7), structure,
                        **options)


# --- the likelihood of one position, many times

NORMAL = torch.randn(5, LENGTH * 2, dtype=F64, generator=torch.Generator().manual_seed(3))
INNER: dict[str, tuple[Callable[[], ntkl.Likelihood], int, Callable[[], Tensor]]] = {
    "categorical": (ntkl.Categorical, 3, lambda: labels(5)),
    "gaussian": (lambda: ntkl.Gaussian(noise=0.3), 2, lambda: NORMAL.reshape(5, *SHAPE, 2)),
    "bernoulli": (lambda: ntkl.Bernoulli(missing="nan"), 1, lambda: labels(5, 2)),
    "heteroscedastic": (ntkl.HeteroscedasticGaussian, 2, lambda: NORMAL[:, :LENGTH].reshape(5, *SHAPE)),
    "poisson": (ntkl.Poisson, 1, lambda: labels(5).abs() % 7),
}


@pytest.mark.parametrize("kind", INNER)
def test_it_is_the_likelihood_of_each_position(kind: str) -> None:
    """Sums, blocks and moments, position by position; derivatives from the log density by autograd."""
    inner, outputs, y = INNER[kind]
    likelihood, one, targets = ntkl.Everywhere(inner(), SHAPE), inner(), y()
    f = torch.randn(5, LENGTH * outputs, dtype=F64)
    own = likelihood.targets(targets, 5, LENGTH * outputs)
    assert torch.equal(torch.nan_to_num(likelihood.targets(own, 5, LENGTH * outputs)), torch.nan_to_num(own))
    flat = own.reshape(5 * LENGTH, *own.shape[3:])
    log_prob = torch.stack([
        one.log_prob(f[:, i * outputs : (i + 1) * outputs], flat.unflatten(0, (5, LENGTH))[:, i]) for i in range(LENGTH)
    ])
    assert relative_error(likelihood.log_prob(f, own).detach(), log_prob.sum(0).detach()) < 1e-12
    residual = torch.func.grad(lambda f: likelihood.log_prob(f, own).sum())(f)
    assert torch.allclose(likelihood.residual(f, own), residual, atol=1e-12)
    curvature = likelihood.curvature(f, own).detach()
    if kind != "heteroscedastic":
        second = torch.stack([
            torch.func.hessian(lambda g, y=y: likelihood.log_prob(g[None], y[None]).sum())(one_row)
            for one_row, y in zip(f, own, strict=True)
        ])
        assert torch.allclose(curvature, -second, atol=1e-10)
    root = likelihood.root(f, own).detach()
    assert root.shape == (5, LENGTH * outputs, likelihood.rank(LENGTH * outputs))
    assert torch.allclose(root @ root.mT, curvature, atol=1e-12)
    inverse = likelihood.left_inverse(f)
    if inverse is not None:
        whole = likelihood.root(f).detach()
        assert torch.allclose(inverse @ whole, torch.eye(whole.shape[-1], dtype=F64).expand(5, -1, -1), atol=1e-10)
    responses = likelihood.num_responses(LENGTH * outputs)
    assert likelihood.mean(f).shape == likelihood.response_variance(f).shape == (5, responses)
    slope = torch.stack([torch.func.jacrev(lambda g: likelihood.mean(g[None])[0])(row) for row in f])
    assert torch.allclose(likelihood.mean_jacobian(f).detach(), slope.detach(), atol=1e-12)
    spread = likelihood.response_covariance(f).detach()
    assert torch.allclose(spread.diagonal(dim1=1, dim2=2), likelihood.response_variance(f).detach(), atol=1e-12)


def test_missing_positions_contribute_nothing() -> None:
    """Whatever the label under the mark; and any whole number can be the mark."""
    f, y = torch.randn(4, 3 * LENGTH, dtype=F64), labels(4)
    likelihood = everywhere()
    there = likelihood.observed(y)
    assert there is not None and int((~there).sum()) == 4
    assert torch.equal(likelihood.hidden(torch.where(y < 0, 2, y), there), y)
    assert torch.equal(likelihood.hidden(y, torch.tensor([True, True, True, False]))[3], torch.full(SHAPE, -100))
    residual = likelihood.residual(f, y).unflatten(1, (LENGTH, 3))
    assert not residual[~there].any() and residual[there].any(-1).all()
    other = everywhere(255)
    assert torch.equal(other.targets(torch.where(y < 0, 255, y), 4, 3 * LENGTH), y)
    masks = ntkl.Everywhere(ntkl.Bernoulli(missing="nan"), SHAPE, 255)
    found = masks.targets(torch.where(y < 0, 255, y % 2), 4, LENGTH)
    assert torch.equal(found.isnan().squeeze(-1), y < 0)


# --- posteriors


def dense(posterior: ntkl.Posterior, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """P0 + JᵀΛJ, and the evidence, from torch.func alone; the channels of the network stay first."""
    network = posterior.network.module
    own = {name: p.detach() for name, p in network.named_parameters()}
    flat = torch.cat([p.flatten() for p in own.values()])

    def outputs(theta: Tensor, x: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in own.values()])
        values = {name: part.view_as(p) for (name, p), part in zip(own.items(), parts, strict=True)}
        return torch.func.functional_call(network, values, (x,))

    jac = torch.func.jacrev(outputs)(flat, x)  # (n, C, *positions, P)
    p = outputs(flat, x).softmax(1)
    seen = (y >= 0).to(p)
    middle = torch.einsum("nc...,cd->ncd...", p, torch.eye(p.shape[1], dtype=F64)) - p.unsqueeze(2) * p.unsqueeze(1)
    curvature = torch.einsum("nchwp,ncdhw,nhw,ndhwq->pq", jac, middle, seen, jac)
    precision = posterior.prior.flat_precision().detach()
    full = torch.diag(precision) + curvature
    fit = -nn.functional.cross_entropy(p.log(), y, reduction="sum", ignore_index=-100)
    value = fit - 0.5 * (precision * flat.square()).sum() - 0.5 * (torch.logdet(full) - precision.log().sum())
    return full, value


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_evidence_and_moments_are_those_of_the_dense_model(structure: str) -> None:
    posterior, x = fitted(structure), images(6)[4:]
    full, value = dense(posterior, images(4), labels(4))
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(float(value), rel=1e-9)
    _, joint = posterior.latent_moments(x)
    weights = list(posterior.network.parameters.values())
    jac = torch.stack([
        nn.utils.parameters_to_vector(torch.autograd.grad(row, weights, retain_graph=True))
        for row in posterior.network.evaluate(x[:1]).flatten()
    ])
    assert relative_error(joint[0], jac @ torch.linalg.solve(full, jac.mT)) < 1e-8


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag", "iterative"])
def test_blocks_at_positions_are_those_of_the_joint(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted(structure), images(7)[4:]
    monkeypatch.setattr(tuning, "POSITION_BLOCK", 5)
    mean, joint = posterior.latent_moments(x)
    f, blocks = posterior.latent_moments(x, per_position=True)
    assert f.shape == (3, LENGTH, 3) and blocks.shape == (3, LENGTH, 3, 3)
    assert torch.equal(f.flatten(1), mean)
    for i in range(LENGTH):
        own = slice(3 * i, 3 * i + 3)
        assert relative_error(blocks[:, i], joint[:, own, own]) < 1e-10


def test_layouts_are_the_same_model() -> None:
    torch.manual_seed(0)
    network, x, y = UNet(3).double(), images(4, (4, 4)), labels(4, 3, (4, 4))
    likelihood = ntkl.Everywhere(ntkl.Categorical(), (4, 4))
    first, last, full = (ntkl.laplace(n, (x, y), likelihood, structure=s)
                         for n, s in ((network, "gp"), (Permuted(network), "gp"), (network, "full")))
    for other in (last, full):
        assert float(first.log_marginal_likelihood()) == pytest.approx(float(other.log_marginal_likelihood()), rel=1e-9)
        assert relative_error(first.predict(x[:2]).probs, other.predict(x[:2]).probs) < 1e-8
    assert relative_error(first.predict(x, "map").probs, network(x).detach().softmax(1).movedim(1, -1)) < 1e-12


@pytest.mark.parametrize("method", ["glm", "probit", "blr", "map", "nn"])
def test_predictions_are_those_of_each_position(method: str) -> None:
    posterior, x, y = fitted("kfac"), images(7)[4:], labels(3)
    found = posterior.predict(x, method, samples=64, generator=torch.Generator().manual_seed(0))
    assert found.batch_shape == (3,) and found.mean.shape == found.variance.shape == (3, *SHAPE, 3)
    assert found.log_prob(y).shape == (3,) and found.log_prob(y.expand(2, *y.shape)).shape == (2, 3)
    if method in ("glm", "probit", "blr"):
        f, blocks = posterior.latent_moments(x, per_position=True)
        one = predictive(ntkl.Categorical(), f.flatten(0, 1), blocks.flatten(0, 1), method, 64,
                         torch.Generator().manual_seed(0))
        assert relative_error(found.mean, one.mean.reshape(found.mean.shape)) < 1e-12
        wanted = one.log_prob(y.flatten()).view(3, -1).sum(1)
        assert relative_error(found.log_prob(y), wanted) < 1e-12
    if method != "nn":
        apart = posterior.predict(x, method, samples=64, generator=torch.Generator().manual_seed(0), batch_size=2)
        assert relative_error(apart.mean, found.mean) < 1e-10
    if method != "blr":
        drawn = found.sample((5,))
        assert drawn.shape == (5, 3, *SHAPE) and int(drawn.max()) < 3
        assert float((found.tempered(2.0).probs.sum(-1) - 1).abs().max()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("inner", [ntkl.Categorical(), ntkl.Bernoulli(), ntkl.Gaussian(0.3)], ids=repr)
def test_one_position_keeps_its_axis(inner: ntkl.Likelihood) -> None:
    """In every method, and calibrated: the response is that of the likelihood, at a position."""
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)).double()
    outputs = 1 if isinstance(inner, ntkl.Bernoulli) else 3
    y = (3 * x[:, :1]).long().clamp(0, outputs - 1 if outputs > 1 else 1)
    if isinstance(inner, ntkl.Gaussian):
        y = x.unsqueeze(1)
    network = nn.Linear(3, outputs).double()
    placed = ntkl.laplace(network, (x, y), ntkl.Everywhere(inner, positions=1), structure="gp")
    plain = ntkl.laplace(network, (x, y[:, 0]), inner, structure="gp")
    for calibrated in (False, True):
        for method in ("map", "glm", "nn", *(["probit"] if inner.classifies else [])):
            found, alone = (one.predict(x, method, calibrated=calibrated, generator=torch.Generator().manual_seed(1))
                            for one in (placed, plain))
            assert found.mean.shape == (10, 1, outputs)
            torch.testing.assert_close(found.log_prob(y), alone.log_prob(y[:, 0]).view(10), rtol=1e-9, atol=1e-12)
        for posterior, labels in ((placed, y), (plain, y[:, 0])):
            posterior.calibrate((x, labels))


@pytest.mark.slow
def test_many_outputs_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit f is drawn, f + J(θ - θ*), by forward-mode differentiation: moments are those of the blocks."""
    posterior, x = fitted("kfac"), images(7)[4:]
    f, blocks = posterior.latent_moments(x, per_position=True)
    exact = posterior.predict(x)
    monkeypatch.setattr(tuning, "POSITION_OUTPUTS", 1)
    drawn = posterior.predict(x, samples=500, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(drawn.probs, exact.probs, atol=0.04)
    step = torch.randn(posterior.num_parameters, dtype=F64)
    moved = linearized(posterior.network, x)(posterior.network.theta + step)
    jvp = posterior.jacobian(x).jvp(posterior.network.unflatten(step))
    assert relative_error(moved, f.flatten(1) + jvp) < 1e-10
    at = linearized(posterior.network, x)
    many = torch.stack([at(theta) for theta in posterior.sample(500)])
    ratio = many.var(0) / blocks.diagonal(dim1=-2, dim2=-1).flatten(1)
    assert abs(float(ratio.mean()) - 1) < 0.1 and float((ratio - 1).abs().max()) < 0.4


@pytest.mark.filterwarnings("ignore:the fitted predictive is not to be trusted")
def test_calibration_counts_positions() -> None:
    """What it maximizes is the mean log density of the labeled positions that `predict` reports."""
    posterior, x, y = fitted(), images(9)[4:], labels(5)
    found = posterior.calibrate((x, y))
    seen = int((y >= 0).sum())
    assert found.num_points == seen
    assert float(posterior.predict(x).log_prob(y).sum()) / seen == pytest.approx(found.after, abs=2e-3)
    assert found.after >= found.before
    each, seen_of_each = posterior.predict(x).log_prob(y), (y >= 0).flatten(1).sum(1)
    apart = each - seen_of_each * found.after  # the positions of an image are not independent
    assert found.standard_error == pytest.approx(float(apart.norm()) / seen * (5 / 4) ** 0.5, rel=1e-2)
    left = fitted().fit_predictive("loo", strict=False)
    assert left.num_points == int((labels(4) >= 0).sum())


def test_memory_of_joint_covariances_is_known() -> None:
    posterior, x = fitted("diag"), images(2)
    vars(posterior.fitted.settings)["memory_budget"] = 1000  # the class is frozen
    with refused(ntkl.MemoryBudgetError, "36 outputs", "need of", "per_position"):
        posterior.latent_moments(x)
    assert posterior.latent_moments(x, per_position=True)[1].shape == (2, LENGTH, 3, 3)
    with refused(ntkl.UnsupportedError, "one row", "positions", "explain"):
        ntkl.explore(fitted(), x)


def test_memory_of_leave_one_out_is_known() -> None:
    posterior = fitted("full")
    vars(posterior.fitted.settings)["memory_budget"] = 1000  # the class is frozen
    with refused(ntkl.MemoryBudgetError, "36 outputs", "need of", "calibrate"):
        posterior.leave_one_out()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the meter reads /proc")
def test_memory_of_a_segmentation() -> None:
    """50 images of 64 x 64 pixels and 5 classes, fitted and predicted from draws. Time is on the page."""
    torch.manual_seed(0)
    network, x, y = UNet(5, 8), images(50, (64, 64)).float(), labels(50, 5, (64, 64))
    with PeakMemory(torch.device("cpu")) as memory:
        posterior = ntkl.laplace(network, (x, y), ntkl.Everywhere(ntkl.Categorical()), structure="kfac", curvature="mc")
        assert posterior.predict(x, samples=3).probs.shape == (50, 64, 64, 5)
    assert memory.bytes is not None and 50 * 64 * 64 * 5 * 8 < memory.bytes < 2e9


def test_images_as_targets() -> None:
    """Gaussian responses at each position, channels first in outputs and targets, equal one Gaussian of all outputs."""
    x = images(5)
    y = torch.randn(5, 2, *SHAPE, dtype=F64)
    network = convolutional(2)
    found = ntkl.laplace(network, (x, y), ntkl.Everywhere(ntkl.Gaussian(0.2), SHAPE))
    plain = ntkl.laplace(nn.Sequential(network, nn.Flatten()), (x, y.flatten(1)), ntkl.Gaussian(0.2))
    assert float(found.log_marginal_likelihood()) == pytest.approx(float(plain.log_marginal_likelihood()), rel=1e-9)
    response = found.predict(x)
    assert relative_error(response.mean, plain.predict(x).mean.view(5, 2, *SHAPE).movedim(1, -1)) < 1e-10
    assert torch.equal(response.log_prob(y), response.log_prob(y.movedim(1, -1)))


def test_masks_without_an_axis_of_channels() -> None:
    """One output per position, (N, *positions): the likelihood of C independent labels."""
    network, x, y = nn.Sequential(convolutional(1), nn.Flatten(2), nn.Flatten(1)), images(5), labels(5, 2) % 2
    spread = nn.Sequential(convolutional(1), nn.Unflatten(1, (1, 1)), nn.Flatten(0, 1), nn.Flatten(0, 1))
    own = ntkl.laplace(spread, (x, y), ntkl.Everywhere(ntkl.Bernoulli(), SHAPE))
    plain = ntkl.laplace(network, (x, y.flatten(1)), ntkl.Bernoulli())
    assert float(own.log_marginal_likelihood()) == pytest.approx(float(plain.log_marginal_likelihood()), rel=1e-10)
    assert relative_error(own.predict(x, "probit").mean.flatten(1), plain.predict(x, "probit").mean) < 1e-10


@pytest.mark.filterwarnings("ignore:the removed points", "ignore:leave-one-out is not to be trusted")
def test_other_verbs(tmp_path: Path) -> None:
    """What-ifs, explanations, leave-one-out, hyperparameters, checkpoints: as for one row of outputs."""
    posterior, x, y = fitted(), images(4), labels(4)
    full = fitted("full")
    for change in (lambda p: p.remove([1], steps=None), lambda p: p.relabel([2], 2 - y[2], steps=None)):
        assert relative_error(change(posterior).outputs(x), change(full).outputs(x)) < 1e-6
    assert relative_error(posterior.leave_one_out().log_density, full.leave_one_out().log_density) < 1e-8
    assert len(posterior.explain(x[:1], 2, output=5).to_dataframe()) > 0
    place = (1, 0, 2)  # row, column, class: its number is that of the flat outputs
    named = posterior.explain(x[:1], 2, place)
    number = (place[0] * SHAPE[1] + place[1]) * 3 + place[2]
    assert torch.equal(named.effect, posterior.explain(x[:1], 2, number).effect)
    assert "output 2 at position (1, 0) by" in named.to_dataframe()["meaning"][0]
    words = full.explain(x[:1], 2, place, by="probability").to_dataframe()["meaning"][0]
    assert "the probability of class 2 at position (1, 0) by" in words
    for row in named.to_dataframe().to_dict("records"):
        assert row["target"] == int(posterior.targets[row["training_index"], 1, 0])  # the label there
    figure = named.plot(x[:1], images(len(posterior.targets)))
    assert figure.axes[0].get_title() == "input 0\noutput 2\nat position (1, 0)"
    assert [line.get_xydata().tolist() for line in figure.axes[0].lines] == [[[0.0, 1.0]]]  # column, row
    for wrong in ((1, 0), (*SHAPE, 0), (0, 0, 3), (0, 0, -1), "102"):
        with refused(ntkl.DataError, "an output as its position and number, below", "", "network's outputs"):
            posterior.explain(x[:1], 2, wrong)
    posterior.fit_hyperparameters(steps=20)
    full.fit_hyperparameters(steps=20)
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(float(full.log_marginal_likelihood()), rel=1e-7)
    full.save(tmp_path / "p.pt")
    loaded = ntkl.load(tmp_path / "p.pt", convolutional())
    assert torch.equal(loaded.predict(x).probs, full.predict(x).probs)
    assert isinstance(loaded.likelihood, ntkl.Everywhere) and loaded.likelihood.positions == SHAPE


def test_the_evidence_of_many_positions_needs_no_dense_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient in the precision is exact; the one in the temperature, which needs Λ of all outputs, is refused."""
    exact, posterior = fitted("diag"), fitted("diag")
    value = exact.log_marginal_likelihood()
    slope = torch.autograd.grad(value, exact.prior.log_precision)[0]
    monkeypatch.setattr(forecast, "available_memory", lambda device: 1000)
    monkeypatch.setattr(ntkl.Everywhere, "curvature", None)
    found = posterior.log_marginal_likelihood()
    assert float(found) == pytest.approx(float(value), rel=1e-12)
    with refused(ntkl.MemoryBudgetError, "all positions", "too many", "requires_grad_.False"):
        found.backward()
    posterior.likelihood.requires_grad_(False)
    found = posterior.log_marginal_likelihood()
    assert relative_error(torch.autograd.grad(found, posterior.prior.log_precision)[0], slope) < 1e-12


@pytest.mark.parametrize("curvature", ["mc", "ef"])
def test_curvature_from_labels(curvature: str) -> None:
    """Of drawn labels and of the data's, one backward pass each: near the whole curvature, missing labels apart."""
    posterior = fitted("diag", curvature=ntkl.CurvatureType(curvature, 400) if curvature == "mc" else curvature)
    exact = fitted("diag")
    ratio = float(posterior.evidence().log_det / exact.evidence().log_det)
    assert 0.8 < ratio < 1.25 if curvature == "ef" else abs(ratio - 1) < 0.05


class PlainGaussian(ntkl.Gaussian):
    """A user's class, whose response is torch's own."""

    def distribution(self, f: Tensor) -> Any:  # type: ignore[override]
        return torch.distributions.Independent(torch.distributions.Normal(f, self.noise.sqrt()), 1)


@pytest.mark.parametrize("structure", ["gp", "kfac"])
@pytest.mark.parametrize("wrap", [
    lambda noise: ntkl.Everywhere(ntkl.Gaussian(noise), (3,)),
    lambda noise: ntkl.Everywhere(PlainGaussian(noise), (3,)),
    lambda noise: ntkl.Tempered(PlainGaussian(noise.repeat(3)), 1.0),
], ids=["everywhere", "everywhere, a user's class", "tempered, a user's class"])
def test_drawn_labels_follow_the_noise(structure: str, wrap: Callable[[Tensor], ntkl.Likelihood]) -> None:
    """The evidence's gradient is its difference quotient, and that of one Gaussian of all outputs."""
    x, y, noise = torch.randn(12, 3, dtype=F64), torch.randn(12, 6, dtype=F64), torch.tensor([0.2, 0.7], dtype=F64)
    linear = nn.Linear(3, 6).double()
    likelihood = wrap(noise)
    placed = isinstance(likelihood, ntkl.Everywhere)
    network = nn.Sequential(linear, nn.Unflatten(1, (3, 2))) if placed else linear
    found = ntkl.laplace(network, (x, y.view(12, 3, 2) if placed else y), likelihood, structure=structure,
                         curvature="mc")
    parameter = next(found.likelihood.parameters())

    def value() -> Tensor:
        return found.log_marginal_likelihood(correction=True)

    slope, = torch.autograd.grad(value(), parameter)
    with torch.no_grad():
        start, numeric = parameter.clone(), torch.zeros_like(slope)
        for i in range(len(slope)):
            step = 1e-5 * torch.nn.functional.one_hot(torch.tensor(i), len(slope)).to(F64)
            sides = []
            for sign in (1.0, -1.0):
                parameter.copy_(start + sign * step)
                sides.append(float(value()))
            numeric[i] = (sides[0] - sides[1]) / 2e-5
        parameter.copy_(start)
    assert relative_error(slope, numeric) < 1e-6
    if isinstance(likelihood, ntkl.Everywhere) and type(likelihood.likelihood) is ntkl.Gaussian:  # the same draws
        plain = ntkl.laplace(linear, (x, y), ntkl.Gaussian(noise.repeat(3)), structure=structure, curvature="mc")
        one = plain.log_marginal_likelihood(correction=True)
        expected, = torch.autograd.grad(one, next(plain.likelihood.parameters()))
        assert relative_error(slope, expected.view(3, 2).sum(0)) < 1e-9


def test_rsample_of_many_samples_of_f_is_refused() -> None:
    response = ntkl.Poisson().average(torch.zeros(4, 2, 1, dtype=F64))
    assert not response.has_rsample
    with refused(ntkl.UnsupportedError, "one sample of f", "4 samples", "sample"):
        response.rsample()


def test_positions_are_those_of_the_first_targets(tmp_path: Path) -> None:
    """In every way to fit, from a pair or a loader; the caller's likelihood stays free for other data."""
    x, y, free = images(4), labels(4), ntkl.Everywhere(ntkl.Categorical())
    posterior = ntkl.laplace(convolutional(), (x, y), free)
    value = float(ntkl.laplace(convolutional(), (x, y), everywhere()).log_marginal_likelihood())
    assert float(posterior.log_marginal_likelihood()) == value and posterior.likelihood.positions == SHAPE
    assert not free.positions and "positions=None" in repr(free)
    posterior.save(tmp_path / "p.pt", include_data=True)
    loaded = ntkl.load(tmp_path / "p.pt", convolutional())
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)
    loader = DataLoader(TensorDataset(images(4, (2, 5)), labels(4, 3, (2, 5))), batch_size=2)
    assert ntkl.laplace(convolutional(), loader, free, structure="kfac").likelihood.positions == (2, 5)
    tempered = ntkl.laplace(convolutional(), (x, y), ntkl.Tempered(free, 2.0))
    assert tempered.likelihood.positions == SHAPE
    assert ntkl.compare_evidence(convolutional(), (x, y), free, structures=["gp"]).rows[0].evidence == value
    noisy = ntkl.Everywhere(ntkl.Gaussian(0.1))
    assert ntkl.laplace(convolutional(1), (x, y.double()), noisy).likelihood.scaled_noise(2.0).positions == SHAPE
    again = from_record(likelihood_record(noisy))
    assert isinstance(again, ntkl.Everywhere) and not again.positions
    assert torch.equal(again.targets(y.double(), 4, LENGTH).squeeze(-1), y.double()) and again.positions == SHAPE


@pytest.mark.parametrize("structure", ["gp", "kfac"])
@pytest.mark.parametrize("positions", [SHAPE, None])
def test_examples_of_another_shape_are_refused(structure: str, positions: tuple[int, int] | None) -> None:
    """In a later batch, in its targets alone, and in what is predicted: both shapes, and to pad."""
    likelihood, other = ntkl.Everywhere(ntkl.Categorical(), positions), images(2, (5, 3))
    first, words = (images(4), labels(4)), ("4, 3", "5, 3", "one shape in all batches|pad .* of other shapes")
    batches = DataLoader([first, (other, labels(2, 3, (5, 3)))], batch_size=None)
    with refused(ntkl.NTKLaplaceError, *words):
        ntkl.laplace(convolutional(), batches, likelihood, structure=structure)
    batches = DataLoader([first, (images(2), labels(2, 3, (5, 3)))], batch_size=None)
    with refused(ntkl.DataError, *words):
        ntkl.laplace(convolutional(), batches, likelihood, structure=structure)
    with refused(ntkl.NetworkError, *words):
        ntkl.laplace(convolutional(), first, likelihood, structure=structure).predict(other)


def test_training_sees_the_positions() -> None:
    network = convolutional()
    before = nn.functional.cross_entropy(network(images(4)), labels(4)).item()
    likelihood = ntkl.Everywhere(ntkl.Categorical())
    found = ntkl.train_with_evidence(network, (images(4), labels(4)), likelihood, epochs=30, structure="diag")
    assert nn.functional.cross_entropy(network(images(4)), labels(4)).item() < before
    assert found.posterior.predict(images(4)).probs.shape == (4, *SHAPE, 3)


@pytest.mark.slow
def test_tokens_of_transformers() -> None:
    """Token labels with padding: a model with random weights, its logits (N, L, C)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=8, num_labels=4, max_position_embeddings=16)
    model = transformers.BertForTokenClassification(config).double().eval()
    ids, mask = torch.randint(0, 30, (5, 6)), torch.ones(5, 6, dtype=torch.long)
    y = torch.randint(0, 4, (5, 6))
    mask[1, 4:], y[1, 4:] = 0, -100
    batch = {"input_ids": ids, "attention_mask": mask}
    likelihood = ntkl.Everywhere(ntkl.Categorical(), 6)
    names = ["classifier"]
    found = [ntkl.laplace(model, (batch, y), likelihood, structure=s, output="logits", parameters=names)
             for s in ("gp", "full")]
    gp, full = (float(posterior.log_marginal_likelihood()) for posterior in found)
    assert gp == pytest.approx(full, rel=1e-9)
    assert found[0].predict(batch).probs.shape == (5, 6, 4)


def test_refusals() -> None:
    x, y, network = images(4), labels(4), convolutional()
    with refused(ntkl.NetworkError, "(N, C, 3, 4)", "(4, 2, 4, 3)", "positions"):
        ntkl.laplace(convolutional(2), (x, y), ntkl.Everywhere(ntkl.Categorical(), (3, 4)))
    with refused(ntkl.TargetError, "(4, 4, 3)", "(4, 2, 3)", "each position"):
        ntkl.laplace(network, (x, y[:, :2]), everywhere())
    with refused(ntkl.NetworkError, "(4, C)", "(4, 3, 4, 3)", "Everywhere"):
        ntkl.laplace(network, (x, y), ntkl.Categorical())
    square = nn.Conv2d(1, 3, 1).double()
    with refused(ntkl.NetworkError, "Everywhere", "fits both", "rows"):
        ntkl.laplace(square, (images(4, (3, 3)), labels(4, 3, (3, 3))), ntkl.Everywhere(ntkl.Categorical(), (3, 3)))
    with refused(ntkl.TargetError, "0..2", "7", "Number the classes"):
        ntkl.laplace(network, (x, y.clamp_min(7)), everywhere())
    for wrong in (0, (), "ab", (2.5, 2), (3, 0)):
        with refused(ntkl.HyperparameterError, "positions", repr(wrong), "shape"):
            ntkl.Everywhere(ntkl.Categorical(), wrong)  # type: ignore[arg-type]
    free = ntkl.Everywhere(ntkl.Categorical())
    with refused(ntkl.TargetError, r"N, \*positions", "(4,)", "likelihood, positions"):
        ntkl.laplace(network, (x, y[:, 0, 0]), free)
    with refused(ntkl.UnsupportedError, "positions are known", "positions=None", "first"):
        free.bind(4, 36)
    with refused(ntkl.HyperparameterError, "ignore_index", "0.5", "-100"):
        ntkl.Everywhere(ntkl.Categorical(), 2, 0.5)  # type: ignore[arg-type]
    for inner in (ntkl.Everywhere(ntkl.Categorical(), 2), ntkl.Tempered(ntkl.Categorical(), 2.0)):
        with refused(ntkl.UnsupportedError, "one position", type(inner).__name__, "temper"):
            ntkl.Everywhere(inner, 2)
    with refused(ntkl.TargetError, "3 inputs", "4", "each"):
        fitted("kfac").predict(x[:3], "map").log_prob(y)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.float32])
def test_ignored_labels_of_any_type(dtype: torch.dtype) -> None:
    """A byte does not hold -100, the label that marks a missing one."""
    network, x = nn.Linear(1, 160).double(), torch.randn(4, 3, 1).double()
    y = torch.randint(100, (4, 3))
    y[:, 0] = 255
    likelihood = ntkl.Everywhere(ntkl.Categorical(), 3, ignore_index=255)
    posterior = ntkl.laplace(network, (x, y.to(dtype)), likelihood, structure="diag")
    expected = network(x).detach().log_softmax(-1)[:, 1:].gather(-1, y[:, 1:, None]).sum()
    assert posterior.log_likelihood().item() == pytest.approx(expected.item(), rel=1e-12)
    assert posterior.predict(x, "map").log_prob(y.to(dtype)).sum().item() == pytest.approx(expected.item(), rel=1e-12)


def test_labels_that_are_no_whole_numbers_are_refused() -> None:
    y = torch.tensor([[255.0, 0.5], [1.0, 0.0]])
    got = r"0.5 at position \(1\) of example 0"
    with refused(ntkl.TargetError, "class labels that are whole", got, "Regression targets"):
        ntkl.laplace(nn.Linear(1, 3), (torch.randn(2, 2, 1), y), ntkl.Everywhere(ntkl.Categorical(), 2, 255))


def test_targets_that_fit_both_layouts_are_refused() -> None:
    network, x, y = nn.Conv2d(1, 6, 1).double(), torch.randn(5, 1, 3, 3).double(), torch.randn(5, 3, 3, 3).double()
    likelihood = ntkl.Everywhere(ntkl.HeteroscedasticGaussian(), (3, 3))
    with refused(ntkl.TargetError, expected="targets whose layout their shape tells", got="(5, 3, 3, 3)",
                 remedy="Flatten the positions"):
        ntkl.laplace(network, (x, y), likelihood)
    rows = nn.Sequential(network, nn.Flatten(2))
    posterior = ntkl.laplace(rows, (x, y.flatten(2)), ntkl.Everywhere(ntkl.HeteroscedasticGaussian(), 9))
    inner = ntkl.HeteroscedasticGaussian()
    f = network(x).detach().movedim(1, -1).reshape(-1, 6)
    expected = inner.log_prob(f, y.movedim(1, -1).reshape(-1, 3)).sum()
    assert posterior.log_likelihood().item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("fitted", "other", "got"),
    [
        (ntkl.Everywhere(ntkl.Categorical(), (2, 4)), ntkl.Categorical(), "one response per input"),
        (ntkl.Everywhere(ntkl.Categorical(), (2, 4)), ntkl.Everywhere(ntkl.Categorical(), (4, 2)),
         r"positions \(4, 2\)"),
        (ntkl.Everywhere(ntkl.Categorical(), (2, 4)), ntkl.Everywhere(ntkl.Categorical()), "positions not given"),
        (ntkl.Gaussian(), ntkl.Everywhere(ntkl.Gaussian(), 24), r"positions \(24,\)"),
    ],
)
def test_predictions_have_the_positions_of_the_fit(fitted: ntkl.Likelihood, other: ntkl.Likelihood, got: str) -> None:
    network, x = nn.Linear(2, 24).double(), torch.randn(5, 2).double()
    y = torch.randn(5, 24).double() if fitted.positions is None else torch.randint(3, (5, 2, 4))
    posterior = ntkl.laplace(network, (x, y), fitted)
    for method in ("glm", "map", "nn"):
        with refused(ntkl.UnsupportedError, "as in the fit", got, "Use Everywhere"):
            posterior.predict(x, method, likelihood=other)


def test_errors_name_the_position_and_the_example() -> None:
    """And not the number among all positions of all examples."""
    y = labels(5)
    y[3, 2, 1] = 255
    with refused(ntkl.TargetError, "labels in 0", r"255 at position \(2, 1\) of example 3", "ignore_index=255"):
        ntkl.laplace(convolutional(), (images(5), y), ntkl.Everywhere(ntkl.Categorical()))
    real = torch.randn(5, *SHAPE).double()
    real[4, 0, 1] = torch.inf
    with refused(ntkl.NonFiniteError, "finite targets", "^inf at example 4", "Remove"):
        ntkl.laplace(convolutional(1), (images(5), real), ntkl.Everywhere(ntkl.Gaussian()))


def test_masks_with_an_axis_of_channels() -> None:
    with refused(ntkl.NetworkError, r"\(N, C, 1, ", r"shape \(", r"y\.squeeze\(1\)"):
        ntkl.laplace(convolutional(), (images(5), labels(5).unsqueeze(1)), ntkl.Everywhere(ntkl.Categorical()))


def test_intervals_are_of_one_response() -> None:
    one = convolutional(1)
    posterior = ntkl.laplace(one, (images(5), torch.randn(5, *SHAPE)), ntkl.Everywhere(ntkl.Gaussian()))
    with refused(ntkl.UnsupportedError, "one point an example", "Everywhere", "mean and variance"):
        posterior.predict_interval(images(2))


def test_entropy_and_mode_of_each_position() -> None:
    posterior = ntkl.laplace(convolutional(), (images(5), labels(5)), ntkl.Everywhere(ntkl.Categorical()))
    for method in ("map", "glm"):
        found = posterior.predict(images(2), method)
        expected = torch.distributions.Categorical(found.probs)
        torch.testing.assert_close(found.entropy(), expected.entropy())
        assert torch.equal(found.mode, found.probs.argmax(-1)) and found.mode.shape == (2, *SHAPE)


@pytest.mark.filterwarnings("ignore:the evidence often ranks badly")
def test_held_out_scores_are_those_of_positions() -> None:
    x, y = images(5), labels(5)
    posterior = ntkl.laplace(convolutional(), (x, y), ntkl.Everywhere(ntkl.Categorical()))
    response, there = posterior.predict(x, "map"), y >= 0
    found = held_out_scores(response, y)
    plain = held_out_scores(torch.distributions.Categorical(response.probs[there]), y[there])
    assert found["log_likelihood"] == pytest.approx(float(response.log_prob(y).mean()))
    for name in ("accuracy", "brier", "ece"):
        assert found[name] == pytest.approx(plain[name])
    table = ntkl.compare_models({"one": posterior}, (x, y))
    assert table["one"].test_accuracy == pytest.approx(held_out_scores(posterior.predict(x), y)["accuracy"])
    images_as_targets = ntkl.laplace(convolutional(1), (x, y.double()), ntkl.Everywhere(ntkl.Gaussian(missing="nan")))
    response = images_as_targets.predict(x)
    error = (response.mean.reshape(y.shape) - y).square().mean().sqrt()
    assert held_out_scores(response, y.double())["rmse"] == pytest.approx(float(error))
