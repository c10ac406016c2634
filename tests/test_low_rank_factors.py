"""KFAC(rank=...): wide Kronecker factors as a low rank and a multiple of the identity."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.curvature.block_summary import sketch_vectors
from ntk_laplace.errors import HyperparameterError, UnsupportedError
from ntk_laplace.runtime.reflections import Reflections
from reference import relative_error

WIDTHS = (11, 9, 3)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh(), nn.Linear(*WIDTHS[1:])).to(dtype)


def data(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


X_NEW = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@functools.cache
def fitted(rank: int | None, count: int = 40, batch_size: int | None = None):
    settings = ntkl.Settings(batch_size=batch_size)
    return ntkl.laplace(network(), data(count), ntkl.Categorical(), ntkl.GaussianPrior(0.7), ntkl.KFAC(rank=rank),
                        settings=settings)


def dense_factors() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """B and A of each layer, from autograd's gradients of each layer's output."""
    net, (x, _) = network(), data()
    found = []
    for place in (0, 2):
        a = net[:place](x).detach()
        z = net[place](a).detach().requires_grad_()
        f = net[place + 1 :](z)
        p = f.softmax(1).detach()
        root = torch.linalg.cholesky(torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1) + 1e-14 * torch.eye(3))
        b = [torch.autograd.grad(f, z, root[:, :, k], retain_graph=True)[0] for k in range(3)]
        a = torch.cat([a, a.new_ones(len(a), 1)], 1)
        found.append((sum(one.T @ one for one in b), a.T @ a))
    return found


def low_rank_plus_identity(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """The definition, with pseudoinverse and eigenvectors of matrices in full."""
    width = len(matrix)
    if width <= rank:
        return matrix
    drawn = sketch_vectors(width, rank, matrix)
    images = matrix @ drawn
    nystrom = images @ torch.linalg.pinv(drawn.T @ images, rcond=1e-10, hermitian=True) @ images.T
    values, vectors = torch.linalg.eigh(0.5 * (nystrom + nystrom.T))
    values, vectors = values[-rank:], vectors[:, -rank:]
    while len(values) and values[0] < (matrix.trace() - values.sum()) / (width - len(values)):
        values, vectors = values[1:], vectors[:, 1:]
    rest = (matrix.trace() - values.sum()) / (width - len(values))
    return vectors @ torch.diag(values - rest) @ vectors.T + rest * torch.eye(width, dtype=matrix.dtype)


@functools.cache
def reference(rank: int, precision: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """H in the library's order of parameters, and log det B."""
    h, log_det = [], torch.zeros((), dtype=torch.float64)
    for b, a in dense_factors():
        b, a = low_rank_plus_identity(b, rank), low_rank_plus_identity(a, rank)
        block = torch.kron(b, a) / 40 + precision * torch.eye(len(a) * len(b), dtype=torch.float64)
        log_det += torch.logdet(block / precision)
        entries = torch.arange(len(block)).view(len(b), len(a))
        order = torch.cat([entries[:, :-1].flatten(), entries[:, -1]])  # the weight, then the bias
        h.append(block[order][:, order])
    return torch.block_diag(*h), log_det


@pytest.mark.parametrize("rank", [1, 4, 7, 10])
def test_all_verbs_are_those_of_the_dense_matrices(rank):
    posterior = fitted(rank)
    precision, (h, log_det) = posterior.posterior_precision, reference(rank)
    inverse, vectors = torch.linalg.inv(h), torch.eye(len(h), dtype=torch.float64)
    rows = posterior.jacobian(X_NEW)
    jac = rows.dense(posterior.network.shapes).transpose(0, 1)
    covariance = torch.einsum("nkp,pq,nlq->nkl", jac, inverse, jac)
    flat = jac.flatten(0, 1)
    assert any(isinstance(one.basis.right, Reflections) for one in precision.algebras)
    assert relative_error(precision.log_det(), log_det) < 1e-9
    assert relative_error(precision.solve(vectors), inverse) < 1e-8
    assert relative_error(precision.multiply(vectors), h) < 1e-8
    assert relative_error(precision.covariance_blocks(rows), covariance) < 1e-8
    assert relative_error(precision.covariance(rows), flat @ inverse @ flat.T) < 1e-8
    assert relative_error(precision.variances_of_outputs(rows), covariance.diagonal(dim1=1, dim2=2)) < 1e-8
    one = rows.weighted(rows.f.unsqueeze(-1))
    across = torch.einsum("nkp,pq,mq->knm", jac, inverse, one.dense(posterior.network.shapes)[0])
    assert relative_error(precision.cross_covariance(one).products(rows), across) < 1e-8
    factor = precision.factor(vectors)  # rows F e_i
    assert relative_error(factor.T @ factor, inverse) < 1e-8
    assert relative_error(precision.information() + 0.7 * vectors, h) < 1e-8
    used = len(h) - 0.7 * inverse.trace()
    assert relative_error(precision.effective_parameters().sum(), used) < 1e-9
    curve = torch.stack([reference(rank, 0.7 * factor)[1] for factor in (0.1, 3.0)])
    assert relative_error(precision.log_det_curve(torch.tensor([0.1, 3.0], dtype=torch.float64)), curve) < 1e-9


def test_the_evidence_rises_to_that_of_all_eigenvectors():
    """log det is concave in the eigenvalues, and the trace is kept: every rank gives a lower bound."""
    whole = float(fitted(None).log_marginal_likelihood().detach())
    found = [float(fitted(rank).log_marginal_likelihood().detach()) for rank in (1, 2, 4, 7, 10, 12)]
    assert all(one <= whole + 1e-9 for one in found)
    assert abs(found[-1] - whole) < 1e-10 and found[0] < whole - 1.0


def test_few_examples_need_few_eigenvectors():
    """Sums over three examples of three classes have rank three and six: nothing is left out."""
    few, whole = fitted(6, 3), fitted(None, 3)
    assert isinstance(few.posterior_precision.algebras[0].basis.right, Reflections)
    pairs = [(p.log_marginal_likelihood().detach(), p.latent_moments(X_NEW)[1]) for p in (few, whole)]
    for one, other in zip(*pairs, strict=True):
        assert relative_error(one, other) < 1e-10


def test_batches_and_merging_change_nothing(tmp_path):
    whole, (x, y) = fitted(4), data()
    assert relative_error(fitted(4, batch_size=7).log_marginal_likelihood().detach(),
                          whole.log_marginal_likelihood().detach()) < 1e-10
    fit = functools.partial(ntkl.laplace, network(), likelihood=ntkl.Categorical(), prior=ntkl.GaussianPrior(0.7),
                            structure=ntkl.KFAC(rank=4))
    parts = [fit(data=(x[part], y[part])) for part in (slice(0, 15), slice(15, 40))]
    merged = parts[0].merge(parts[1])
    assert relative_error(merged.latent_moments(X_NEW)[1], whole.latent_moments(X_NEW)[1]) < 1e-9
    merged.save(tmp_path / "low.pt")
    loaded = ntkl.load(tmp_path / "low.pt", network())
    assert relative_error(loaded.latent_moments(X_NEW)[1], merged.latent_moments(X_NEW)[1]) < 1e-12
    given = ntkl.gaussian_posterior(network(), (x, y), ntkl.Categorical(), precision=whole.posterior_precision)
    given.save(tmp_path / "given.pt")
    again = ntkl.load(tmp_path / "given.pt", network(), (x, y))
    assert relative_error(again.latent_moments(X_NEW)[1], whole.latent_moments(X_NEW)[1]) < 1e-9


def test_the_gradient_is_that_of_finite_differences():
    posterior = ntkl.laplace(network(), data(), ntkl.Categorical(), ntkl.GaussianPrior(0.7), ntkl.KFAC(rank=4))
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(), [posterior.prior.log_precision])
    values, step = [], 1e-4
    for sign in (1, -2):
        with torch.no_grad():
            posterior.prior.log_precision += sign * step
        values.append(posterior.log_marginal_likelihood().detach())
    assert abs(float((values[0] - values[1]) / (2 * step) - slope)) < 1e-5 * abs(float(slope))


def test_single_precision_positions_and_other_layers():
    """A convolution, a grouped one, and an embedding; each with fewer eigenvectors, in float32 and float64."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(36, 3)
    net, x, y = nn.Sequential(*layers), torch.randn(20, 2, 6, 6), torch.randint(3, (20,))
    single, double = (ntkl.laplace(net.to(dtype), (x.to(dtype), y), ntkl.Categorical(), structure=ntkl.KFAC(rank=5),
                                   dtype=dtype).log_marginal_likelihood() for dtype in (torch.float32, torch.float64))
    assert abs(float(single - double)) < 1e-3 * abs(float(double))
    reduced = ntkl.laplace(net.double(), (x.double(), y), ntkl.Categorical(),
                           structure=ntkl.KFAC(rank=100, sharing="reduce")).log_marginal_likelihood()
    exact = ntkl.laplace(net, (x.double(), y), ntkl.Categorical(), structure=ntkl.KFAC(sharing="reduce"))
    assert relative_error(reduced.detach(), exact.log_marginal_likelihood().detach()) < 1e-10
    words = nn.Sequential(nn.Embedding(12, 8), nn.Flatten(), nn.Linear(24, 3)).double()
    tokens = torch.randint(12, (20, 3))
    assert ntkl.laplace(words, (tokens, y), ntkl.Categorical(), structure=ntkl.KFAC(rank=3)).predict(tokens).probs.shape


def test_eigenvectors_for_another_fit_and_bad_input():
    ekfac = ntkl.laplace(network(), data(), ntkl.Categorical(), structure=ntkl.EKFAC(basis=fitted(4)))
    assert torch.isfinite(ekfac.log_marginal_likelihood())
    with pytest.raises(UnsupportedError, match="all eigenvectors for INF"):
        ntkl.laplace(network(), data(), ntkl.Categorical(), structure=ntkl.INF(basis=fitted(4)))
    for bad in (0, -1, 2.5):
        with pytest.raises(HyperparameterError, match="rank"):
            ntkl.KFAC(rank=bad)


@pytest.mark.slow
def test_the_forecast_counts_vectors():
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(700, 2), nn.Linear(2, 700, bias=False), nn.Flatten(), nn.Linear(700, 2)).double()
    given = torch.randn(4, 700).double(), torch.randint(2, (4,))
    plan = ntkl.plan(wide, given, ntkl.Categorical(), structures=["kfac", ntkl.KFAC(rank=10)])
    exact, low = (sum(row.stored.values()) for row in plan.rows)
    assert exact > 4 * 8 * 700**2 and low < exact / 20
    posterior = ntkl.laplace(wide, given, ntkl.Categorical(), structure=ntkl.KFAC(rank=10))
    sums = posterior.fitted.structure.summaries(posterior.fitted.model)
    assert sum(value.nbytes for one in sums for value in one.sums.values()) <= plan.rows[1].stored["sums"] + 200


def test_reflections_complete_a_basis():
    columns = torch.linalg.qr(torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    assert torch.equal(Reflections.of(columns[:, :0]).columns()[0], torch.eye(9, dtype=torch.float64))
    for given in (columns, torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q):
        found = Reflections.of(given)
        full = found.columns()[0]
        eye = torch.eye(len(given), dtype=torch.float64)
        assert relative_error(full @ full.T, eye) < 1e-12 and relative_error(found.turned_back(full), eye) < 1e-12
        assert relative_error(full[:, : given.shape[1]].abs(), given.abs()) < 1e-12


class LoRA(nn.Module):
    """A frozen layer with a low-rank addition of another type, as peft makes it."""

    def __init__(self, width: int, rank: int, base: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).to(base).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.lora_b(self.lora_a(x))


class LanguageModel(nn.Module):
    def __init__(self, base: torch.dtype, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, width).requires_grad_(False)
        self.layers = nn.Sequential(LoRA(width, 2, base), nn.Tanh(), LoRA(width, 2, base))
        self.head = nn.Linear(width, 3).requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)).mean(1))


@pytest.mark.slow
def test_adapters_of_a_language_model():
    """The exact Gram of adapters, KFAC at a low rank, one prior precision for all A and one for all B."""
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(20, (12, 5), generator=generator), torch.randint(3, (12,), generator=generator)
    groups = {side: [f"layers.{place}.lora_{side}.weight" for place in (0, 2)] for side in "ab"}
    model = LanguageModel(torch.float64).double()
    fit = functools.partial(ntkl.laplace, model, data, ntkl.Categorical())
    gp, full = (fit(ntkl.GaussianPrior([1.0, 2.0], groups=groups), structure) for structure in ("gp", "full"))
    exact = gp.log_marginal_likelihood().detach()
    assert relative_error(exact, full.log_marginal_likelihood().detach()) < 1e-9
    assert len(gp.effective_parameters()) == 2
    mixed = ntkl.laplace(LanguageModel(torch.bfloat16), data, ntkl.Categorical(),
                         ntkl.GaussianPrior([1.0, 2.0], groups=groups))
    assert relative_error(mixed.log_marginal_likelihood().detach(), exact) < 5e-3
    plan = ntkl.plan(model, data, ntkl.Categorical(), structures=["gp", "kfac", ntkl.KFAC(rank=4)])
    assert plan["gp"].stored["B"] <= 8 * (12 * 2) ** 2 < 8 * gp.num_parameters**2
    every, low = (sum(row.stored.values()) for row in plan.rows[1:])
    assert low < every / 3
    found, whole = (fit(ntkl.GaussianPrior(1.0), ntkl.KFAC(rank=rank)).log_marginal_likelihood() for rank in (30, None))
    assert float(found) <= float(whole) + 1e-9 and float(whole - found) < 0.1
