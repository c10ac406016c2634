"""Labels drawn for curvature "mc" stay with their points: stored sums and single points have one curvature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from pairwise import pairwise
from reference import jacobian, relative_error

F64 = torch.float64
N, FIRST, PRIOR = 12, 7, 1.3
LIKELIHOODS: dict[str, tuple[Callable[[], ntkl.Likelihood], Callable[[], Tensor]]] = {
    "gaussian": (lambda: ntkl.Gaussian(0.3), lambda: torch.randn(N, 3, dtype=F64)),
    "bernoulli": (ntkl.Bernoulli, lambda: torch.randint(2, (N, 3)).to(F64)),
    "student": (lambda: ntkl.StudentT(0.3), lambda: torch.randn(N, 3, dtype=F64)),
    "poisson": (ntkl.Poisson, lambda: torch.randint(4, (N, 3)).to(F64)),
    "negative binomial": (ntkl.NegativeBinomial, lambda: torch.randint(4, (N, 3)).to(F64)),
    "categorical": (lambda: ntkl.Categorical(1.2), lambda: torch.randint(3, (N,))),
    "everywhere": (lambda: ntkl.Everywhere(ntkl.Bernoulli(), (3,)), lambda: torch.randint(2, (N, 3)).to(F64)),
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def inputs() -> Tensor:
    return torch.randn(N, 3, dtype=F64, generator=torch.Generator().manual_seed(1))


def labels(likelihood: str) -> Tensor:
    torch.manual_seed(2)
    return LIKELIHOODS[likelihood][1]()


def fit(likelihood: str, structure: Any, part: slice = slice(None)) -> ntkl.Posterior:
    model = nn.Sequential(network(), nn.Unflatten(1, (3, 1))) if likelihood == "everywhere" else network()
    return ntkl.laplace(model, (inputs()[part], labels(likelihood)[part]), LIKELIHOODS[likelihood][0](),
                        ntkl.GaussianPrior(PRIOR), structure, ntkl.CurvatureType("mc", 2, 5))


def rest(likelihood: str, start: int = FIRST, stop: int = N) -> tuple[Tensor, Tensor]:
    return inputs()[start:stop], labels(likelihood)[start:stop]


def moved(posterior: ntkl.Posterior) -> ntkl.Posterior:
    with torch.no_grad():
        for parameter in posterior.likelihood.parameters():
            parameter.add_(0.4)
    return posterior


def merged(likelihood: str, structure: Any) -> ntkl.Posterior:
    return fit(likelihood, structure, slice(FIRST)).merge(fit(likelihood, structure, slice(FIRST, N)))


def conditioned(likelihood: str, structure: Any) -> ntkl.Posterior:
    first = fit(likelihood, structure, slice(FIRST)).condition(rest(likelihood, FIRST, 9))
    return first.condition(rest(likelihood, 9))


def reloaded(posterior: ntkl.Posterior, path: Path, likelihood: str) -> ntkl.Posterior:
    """By a file without data, opened without them in between."""
    model = posterior.network.module
    posterior.save(path / "p.pt")
    ntkl.load(path / "p.pt", model).save(path / "p.pt")
    return ntkl.load(path / "p.pt", model, data=(inputs(), labels(likelihood)))


WAYS: dict[str, Callable[[str, Any, Path], ntkl.Posterior]] = {
    "fit": lambda name, structure, path: fit(name, structure),
    "condition": lambda name, structure, path: conditioned(name, structure),
    "merge": lambda name, structure, path: merged(name, structure),
    "merge, moved": lambda name, structure, path: moved(merged(name, structure)),
    "float32": lambda name, structure, path: conditioned(name, structure).to(dtype=torch.float32),
    "there and back": lambda name, structure, path: fit(name, structure).to(dtype=torch.float32).to(dtype=F64),
    "merge, subset": lambda name, structure, path: merged(name, structure).subset([0, 3, 4, 8, 11]),
    "merge, file": lambda name, structure, path: reloaded(merged(name, structure), path, name),
    "file with data": lambda name, structure, path: with_data(conditioned(name, structure), path),
}


def with_data(posterior: ntkl.Posterior, path: Path) -> ntkl.Posterior:
    posterior.save(path / "p.pt", include_data=True)
    return ntkl.load(path / "p.pt", posterior.network.module)


def root_of(posterior: ntkl.Posterior) -> Tensor:
    return posterior.fitted.points.root(posterior.curvature_type, posterior.likelihood).detach()


def weighted_rows(posterior: ntkl.Posterior, index: Tensor) -> Tensor:
    """Rows of SᵀJ, (N, R, P), from autograd and the labels of the points."""
    return root_of(posterior).double().mT @ jacobian(network(), inputs()[index])


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize(("likelihood", "way", "structure"), pairwise(
    LIKELIHOODS, WAYS, ["gp", "full", "diag", "iterative"],
    allowed=lambda likelihood, way, structure: (way, structure) != ("merge, file", "gp"),  # made of its data
))
def test_sums_and_points_have_the_same_labels(likelihood: str, way: str, structure: str, tmp_path: Path) -> None:
    """H by the labels that the points tell, row by row; leverages below 1; without two points, that of the others."""
    posterior = WAYS[way](likelihood, structure, tmp_path)
    index = torch.tensor([0, 3, 4, 8, 11]) if way == "merge, subset" else torch.arange(N)
    limit = 1e-4 if way in ("float32", "there and back") else 1e-6 if structure == "iterative" else 1e-8
    rows = weighted_rows(posterior, index)

    def log_det(rows: Tensor) -> Tensor:
        flat = rows.flatten(0, 1)
        if structure == "diag":
            return (flat.square().sum(0) / PRIOR).log1p().sum()
        return torch.linalg.slogdet(torch.eye(len(flat), dtype=F64) + flat @ flat.T / PRIOR).logabsdet

    assert relative_error(posterior.log_det().double(), log_det(rows)) < limit
    if structure == "diag" or (way == "file with data" and structure != "gp"):
        return  # such a file has no inputs
    assert float(posterior.leave_one_out().leverage.max()) < 1.0
    assert relative_error(posterior.remove([0, 1]).log_det().double(), log_det(rows[2:])) < limit


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_old_labels_stay_and_new_points_have_their_own(structure: str) -> None:
    """As often as data are added, one point at a time too: the noise in equal labels would not average out."""
    posterior = fit("gaussian", structure)
    x, y = rest("gaussian", 0, 1)
    before, roots = root_of(posterior), []
    for _ in range(3):
        posterior = posterior.condition((x, y))
        roots.append(root_of(posterior))
    assert torch.equal(roots[-1][:N], before) and torch.equal(roots[-1][: N + 1], roots[0])
    assert len({float(one) for one in roots[-1][[0, N, N + 1, N + 2], 0, 0]}) == 4


def test_labels_in_single_precision_are_those_in_double() -> None:
    f, y = torch.randn(40, 3), torch.zeros(40, 3)
    for likelihood in (ntkl.Gaussian(0.3), ntkl.Bernoulli(), ntkl.Poisson()):
        single, double = (ntkl.CurvatureType("mc", 3).root(likelihood, f.to(t), y.to(t)) for t in (torch.float32, F64))
        assert relative_error(single, double) < 1e-5


def test_a_checkpoint_that_tells_no_draws_is_one_draw(tmp_path: Path) -> None:
    """As those of earlier versions, which drew other labels in float32 and are told so."""
    posterior = fit("bernoulli", "full")
    loaded = ntkl.load(without_draws(posterior, tmp_path), network())
    assert torch.equal(root_of(loaded), root_of(posterior)) and torch.equal(loaded.log_det(), posterior.log_det())
    single = without_draws(posterior.to(dtype=torch.float32), tmp_path)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="drew labels in float32.*fit again"):
        ntkl.load(single, network())


def without_draws(posterior: ntkl.Posterior, path: Path) -> Path:
    """A file as earlier versions wrote it."""
    posterior.save(path / "p.pt", include_data=True)
    saved = torch.load(path / "p.pt", weights_only=True)
    for key in ("drawn", "precision"):
        del saved["points"][key]
    torch.save(saved, path / "p.pt")
    return path / "p.pt"


class Linear(ntkl.Likelihood):
    """Of a user: its own layer in float32, which takes f of this type alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def distribution(self, f: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Independent(torch.distributions.Normal(self.layer(f), 0.5), 1)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.distribution(f).log_prob(y)


def test_a_likelihood_in_single_precision() -> None:
    torch.manual_seed(0)
    data, likelihood = (torch.randn(9, 3), torch.randn(9, 2)), Linear().requires_grad_(False)
    found = ntkl.laplace(nn.Linear(3, 2), data, likelihood, structure="full", curvature="mc", dtype=torch.float32)
    assert bool(found.log_marginal_likelihood().isfinite())
