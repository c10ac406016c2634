"""Structured weight space and its data: order, batches, merging, conditioning, interruption; and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.model.data import Batches, Joined, RowBuffer, fill_buffer
from ntk_laplace.model.network import Network
from ntk_laplace.structures import data_passes
from ntk_laplace.structures.batch_merging import merged_batches
from pairwise import pairwise
from reference import jacobian, num_examples, relative_error, take
from reference_structures import Structured, parts_of
from refusals import refused
from registry import LIKELIHOODS, PRIORS, fresh, problem, targets
from registry_cases import offered
from streams import Interrupted, interrupted_kfac, loader
from structured_cases import CHOSEN, CURVATURES, STRUCTURES, fresh_fit

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


def answers(posterior, x) -> list[Tensor]:
    evidences = [posterior.log_marginal_likelihood(), posterior.log_marginal_likelihood(correction=True)]
    moments = posterior.latent_moments(x)[1], posterior.fitted.newton_step()
    return [posterior.posterior_precision.information(), posterior.effective_parameters(), *evidences, *moments]


def assert_same(posterior, other, x, limit: float = 1e-9) -> None:
    for found, expected in zip(answers(posterior, x), answers(other, x), strict=True):
        assert relative_error(found, expected) < limit


# ---------------------------------------------------------------------------------------------------- order and batches


# two of the four ways to read the data for each fit; KFAC, EKFAC, INF, the diagonal and the main networks have all four
@pytest.mark.slow
@pytest.mark.parametrize(("network", "structure", "curvature", "shuffled"), [
    ("deep_mlp", "kfac", "ggn", False), ("deep_mlp", "ekfac", "ef", True), ("deep_mlp", "inf", "ggn", False),
    ("deep_mlp", "diag", "ef", True), ("cnn_groups", "kfac", "ef", True), ("cnn_groups", "kfac reduce", "ggn", False),
    ("cnn_groups", "inf", "ef", True), ("deep_mlp", "ekfac", "ggn", False), ("decoder_dict", "diag", "ggn", False),
    ("lstm", "kfac", "ggn", True),
])
def test_order_and_batches_change_nothing(network, structure, curvature, shuffled):
    """Identity 6: permuted data in batches of three (the last is smaller), and a loader that shuffles each pass.

    A loader's batches are read together, or, by a size that was asked for, as they are; so are tensors.
    """
    case, likelihood = problem(network), offered(network)[-1]
    y = targets(LIKELIHOODS[likelihood], case)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(4))
    permuted = loader(take(case.x, order), y[order], batch_size=3)
    if shuffled:
        drawn = loader(case.x, y, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))
        ways = [(2, drawn), (None, permuted)]
    else:
        ways = [(3, permuted), (2, None)]
    want = fresh_fit(network, likelihood, "layer", curvature, structure)
    for batch_size, data in ways:
        settings = ntkl.Settings(batch_size=batch_size)
        found = fresh_fit(network, likelihood, "layer", curvature, structure, data=data, settings=settings)
        assert_same(found, want, case.x_new)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag"])
def test_drawn_labels_do_not_depend_on_batches(structure):
    """The Monte-Carlo curvature: the same labels for the same data, in batches of any size and in every pass."""
    case, y = problem("deep_mlp"), targets(LIKELIHOODS["categorical"], problem("deep_mlp"))
    want = fresh_fit("deep_mlp", "categorical", "layer", "mc", structure)
    for batch_size, most in ((1, 1), (3, 3), (2, None)):
        data, settings = loader(case.x, y, batch_size=batch_size), ntkl.Settings(batch_size=most)
        found = fresh_fit("deep_mlp", "categorical", "layer", "mc", structure, data=data, settings=settings)
        assert_same(found, want, case.x_new)


class Shuffled(Sampler):
    """An order of its own in every pass, from a generator that nobody else knows of."""

    def __init__(self, n: int, numbers: torch.Generator | np.random.Generator) -> None:
        self.n, self.numbers = n, numbers

    def __iter__(self):
        torchs = isinstance(self.numbers, torch.Generator)
        order = torch.randperm(self.n, generator=self.numbers) if torchs else self.numbers.permutation(self.n)
        return iter(order.tolist())

    def __len__(self) -> int:
        return self.n


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag"])
def test_samplers_with_generators_of_their_own_keep_one_order(structure):
    """Where roots or residuals meet rows of a second pass, another order would pair them with other examples."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    want = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(), structure=structure)
    pairs = [(case.x[n], y[n]) for n in range(len(y))]

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    for data in (
        DataLoader(pairs, 2, sampler=RandomSampler(pairs, generator=generator())),
        DataLoader(pairs, 2, sampler=Shuffled(len(y), generator())),
        DataLoader(pairs, batch_sampler=BatchSampler(RandomSampler(pairs, generator=generator()), 2, drop_last=False)),
    ):
        before = next(iter(data))
        found = ntkl.laplace(case.network, data, ntkl.Categorical(), structure=structure)
        for correction in (False, True):
            value, expected = (p.log_marginal_likelihood(correction) for p in (found, want))
            assert relative_error(value, expected) < 1e-9
        after = next(iter(data))
        assert not torch.equal(before[0], after[0])  # the caller's own passes go on shuffling
    if structure == "gp":  # reads its data once
        return
    hidden = DataLoader(pairs, 2, sampler=Shuffled(len(y), np.random.default_rng(0)))
    with pytest.raises(ntkl.DataError, match=r"same order in every pass .*; got another order\. Pass a loader"):
        ntkl.laplace(case.network, hidden, ntkl.Categorical(), structure=structure).log_marginal_likelihood(True)
    random = np.random.default_rng(0)
    noisy = DataLoader(pairs, 2, collate_fn=lambda batch: (
        torch.stack([x + torch.from_numpy(random.normal(size=x.shape)) for x, _ in batch]),
        torch.stack([y for _, y in batch])))
    with refused(ntkl.DataError, "same examples in every pass", "other inputs with the same targets", "random transf"):
        ntkl.laplace(case.network, noisy, ntkl.Categorical(), structure=structure).log_marginal_likelihood(True)


@pytest.mark.slow
def test_workers_that_outlive_a_pass_keep_one_order_and_stay_the_callers():
    """Their second pass draws one number less from the generator, and a pass of ours would end one of the caller's."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    pairs = [(case.x[n], y[n]) for n in range(len(y))]
    fresh, data = (DataLoader(pairs, 2, shuffle=True, num_workers=1, persistent_workers=True) for _ in range(2))
    begun = iter(data)
    first = next(begun)
    want, *found = (
        ntkl.laplace(case.network, source, ntkl.Categorical(), structure="kfac")
        for source in ((case.x, y), fresh, data)
    )
    for each in (*found, copy.deepcopy(found[1]), pickle.loads(pickle.dumps(found[1]))):
        assert relative_error(each.log_marginal_likelihood(True), want.log_marginal_likelihood(True)) < 1e-9
    seen = torch.cat([first[1], *(labels for _, labels in begun)])
    assert torch.equal(seen.sort().values, y.sort().values)
    assert data.persistent_workers and iter(data) is begun


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag"])
def test_drawn_labels_stay_with_their_examples_in_a_shuffled_loader(structure):
    """Outputs are read in one pass and rows in another: the matrix must be of labels drawn at their own outputs."""
    case, y = problem("far_from_optimum"), targets(LIKELIHOODS["categorical"], problem("far_from_optimum"))
    data = loader(case.x, y, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(6))
    posterior = ntkl.laplace(
        case.network, data, ntkl.Categorical(), structure=structure, curvature=ntkl.CurvatureType("mc", samples=400),
        settings=ntkl.Settings(batch_size=2),
    )
    exact = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical(),
                         structure=structure).posterior_precision.information()
    # SSᵀ has expectation Λ: with so many draws only a mix-up of examples is further off
    assert (posterior.posterior_precision.information() - exact).norm() < 0.2 * exact.norm()


# --------------------------------------------------------------------------------------------- merging and conditioning


def with_basis(structure: str, basis):
    return {"ekfac": ntkl.EKFAC(basis=basis), "inf": ntkl.INF(rank=0.4, basis=basis)}.get(structure, structure)


class Turns(nn.Module):
    """A weight that a batch of positive inputs uses twice, and a bias that it shares with another layer there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.out(torch.tanh(self.inner(h)) if bool((x > 0).all()) else h)


@pytest.mark.parametrize("twice_first", [False, True])
def test_batches_through_other_branches_add_up(twice_first):
    """Of a weight that the first batch used once or twice, every batch gives what its part needs, or is refused."""
    torch.manual_seed(5)
    network, sign = Turns().double(), torch.tensor([1.0, -1.0] if twice_first else [-1.0, 1.0]).repeat_interleave(20)
    x = torch.rand(40, 3).double() * sign.double().unsqueeze(1)
    y, prior = torch.randint(2, (40,)), ntkl.GaussianPrior(precision=2.0, groups="layer")
    batches = DataLoader(list(zip(x, y, strict=True)), batch_size=20)
    both = ntkl.laplace(network, batches, ntkl.Categorical(), prior, "kfac")
    halves = [ntkl.laplace(network, (x[part], y[part]), ntkl.Categorical(), copy.deepcopy(prior), "kfac")
              for part in (slice(0, 20), slice(20, 40))]
    for number, part in enumerate(both.parameter_blocks):
        sums = [each.fitted.structure.at.accumulated.summaries[number].sums for each in (both, *halves)]
        for name in ("left", "right"):
            assert relative_error(sums[0][name].tril(), (sums[1][name] + sums[2][name]).tril()) < 1e-12, (part, name)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "curvature", "structure"), [
    ("resnet_batchnorm", "ef", "kfac reduce"), ("resnet_batchnorm", "ef", "ekfac"), ("resnet_batchnorm", "ef", "diag"),
    ("decoder_dict", "ggn", "kfac"), ("deep_mlp", "ggn", "inf"),
])
def test_disjoint_data_add_up(network, curvature, structure):
    """Identity 6: fits on three and four points merged, either way round, and one conditioned on the other's data.

    What INF keeps is decided once all the data are in: its merged matrix is compared at the full rank.
    """
    case, likelihood = problem(network), offered(network)[-1]
    y = targets(LIKELIHOODS[likelihood], case)
    asked = STRUCTURES[structure][0]()
    if structure in ("ekfac", "inf"):
        asked = with_basis(structure, fresh_fit(network, likelihood, "layer", curvature, structure))
    halves = [(take(case.x, part), y[part]) for part in (slice(0, 3), slice(3, 7))]
    first, second = (fresh_fit(network, likelihood, "layer", curvature, asked, data=half) for half in halves)
    before = [each.clone() for each in answers(first, case.x_new)]
    want = fresh_fit(network, likelihood, "layer", curvature, asked)
    assert relative_error(first.log_marginal_likelihood(), want.log_marginal_likelihood()) > 1e-3
    for merged in (first.merge(second), second.merge(first), first.condition(halves[1])):
        assert merged.num_examples == 7
        assert_same(merged, want, case.x_new)
    for now, then in zip(answers(first, case.x_new), before, strict=True):
        assert torch.equal(now, then), "a posterior that was merged is another afterwards"


@pytest.mark.parametrize("structure", ["ekfac", "inf"])
def test_new_points_do_not_depend_on_rounding(structure):
    """Their second moments are summed in a basis whose null space is any basis to an eigenvalue routine."""
    case = problem("conv3d")
    y, found = targets(LIKELIHOODS["categorical"], case), []
    for moved in (0.0, 1e-14):
        network = copy.deepcopy(case.network)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + moved * torch.randn_like(parameter))
        posterior = ntkl.laplace(network, (case.x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.3), structure)
        found.append(posterior.condition((case.x_new, y[: len(case.x_new)])).log_marginal_likelihood())
    assert relative_error(*found) < 1e-10


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "inf", "diag"])
def test_conditioning_step_by_step(structure):
    """Three steps are one, in the basis of the first; and the gradient in the noise sees all the data."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["gaussian"], case)
    pieces = [(case.x[part], y[part]) for part in (slice(0, 3), slice(3, 5), slice(5, 7))]
    first = fresh_fit("deep_mlp", "gaussian", "tensor", "ggn", structure, data=pieces[0])
    steps = first.condition(pieces[1]).condition(pieces[2])
    assert_same(steps, first.condition((case.x[3:], y[3:])), case.x_new)
    if structure in ("kfac", "diag"):
        want = fresh_fit("deep_mlp", "gaussian", "tensor", "ggn", structure)
    else:
        want = fresh_fit("deep_mlp", "gaussian", "tensor", "ggn", with_basis(structure, first))
    if structure != "inf":  # which keeps what the first data chose, or what all of them do
        assert_same(steps, want, case.x_new)
        gradients = [
            torch.autograd.grad(each.log_marginal_likelihood(correction=True), [*each.likelihood.parameters()])[0]
            for each in (steps, want)
        ]
        assert relative_error(*gradients) < 1e-9


def test_data_that_arrive_one_by_one_are_one_sequence():
    """However many parts they come in, and from either side: Python's stack has a limit."""
    device, parts = torch.device("cpu"), sys.getrecursionlimit()
    data = [Batches((torch.full((1, 1), float(n)), torch.zeros(1)), None, device) for n in range(parts + 2)]
    joined = Joined([data[0], data[1]])
    for one in data[2:]:
        joined = Joined([joined, one])
    assert joined.length == parts + 2 and joined.weights is None
    assert [int(x) for x, _ in joined] == list(range(parts + 2)) and joined.read == parts + 2
    assert Joined([data[0], joined]).length == parts + 3


def test_eigenvectors_are_made_when_they_are_asked_for(monkeypatch, tmp_path):
    """KFAC's sums are merged and saved without any; an algebra that is older than the sums keeps to its own."""
    made = []
    plain = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda *a, **k: made.append(1) or plain(*a, **k))
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    halves = [(case.x[part], y[part]) for part in (slice(0, 3), slice(3, 7))]
    first, second = (fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac", data=half) for half in halves)
    merged = first.merge(second)
    merged.save(tmp_path / "merged.pt")
    assert not made
    whole = fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac")
    assert_same(merged, whole, case.x_new)
    layers = len({part.weight for part in merged.parameter_blocks})
    assert len(made) == 2 * 2 * layers  # each factor once, of either posterior, whatever was asked of them
    assert relative_error(ntkl.load(tmp_path / "merged.pt", case.network).log_det(), whole.log_det()) < 1e-9
    older = fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac")
    algebra = older.posterior_precision
    with torch.no_grad():
        older.likelihood.log_temperature += 0.5
    assert relative_error(older.log_det(), whole.log_det()) > 1e-3
    assert relative_error(algebra.log_det(), whole.log_det()) < 1e-12


@pytest.mark.parametrize("structure", ["kfac", "diag"])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_merging_brings_both_to_one_likelihood(likelihood, structure):
    """Halves fitted at different noise (or temperature): the merged posterior has the first one's throughout."""
    case, other = problem("deep_mlp"), {"gaussian": ntkl.Gaussian(noise=2.0), "categorical": ntkl.Categorical()}
    y = targets(LIKELIHOODS[likelihood], case)
    first = fresh_fit("deep_mlp", likelihood, "layer", "ggn", structure, data=(case.x[:3], y[:3]))
    prior = PRIORS["layer"].build(case)
    second = ntkl.laplace(case.network, (case.x[3:], y[3:]), other[likelihood], prior=prior, structure=structure)
    assert_same(first.merge(second), fresh_fit("deep_mlp", likelihood, "layer", "ggn", structure), case.x_new)


@pytest.mark.parametrize("form", [ntkl.EKFAC, ntkl.INF])
def test_a_borrowed_basis_is_the_basis(form):
    """With the eigenbasis of a fit to the same data, one pass gives what two give."""
    basis = fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac")
    borrowed = fresh_fit("deep_mlp", "categorical", "layer", "ggn", form(basis=basis))
    assert_same(borrowed, fresh_fit("deep_mlp", "categorical", "layer", "ggn", form()), problem("deep_mlp").x_new)


# ------------------------------------------------------------------------------------------------------------- streams


class Once(IterableDataset):
    """A stream that runs dry."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.pairs = iter(list(zip(x, y, strict=True)))

    def __iter__(self):
        return self.pairs


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("structure", ["gp", "kfac", "diag", "ekfac", "inf"])
def test_a_stream_that_can_be_read_once(structure, batch_size):
    """One pass sees every example, the first batch, by which the network is probed, included."""
    case, asked = problem("deep_mlp"), structure
    if structure in ("ekfac", "inf"):
        basis = fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac")
        asked = ntkl.EKFAC(basis=basis) if structure == "ekfac" else ntkl.INF(rank=0.4, basis=basis)
    stream = DataLoader(Once(case.x, targets(LIKELIHOODS["categorical"], case)), batch_size=2)
    settings = ntkl.Settings(batch_size=batch_size)
    found = fresh_fit("deep_mlp", "categorical", "layer", "ggn", asked, data=stream, settings=settings)
    want = fresh_fit("deep_mlp", "categorical", "layer", "ggn", structure)
    assert relative_error(found.log_marginal_likelihood(), want.log_marginal_likelihood()) < 1e-12


@pytest.mark.parametrize(("structure", "curvature"), [("full", "ggn"), ("ekfac", "ggn"), ("inf", "ef"), ("kfac", "mc")])
def test_a_second_pass_over_such_a_stream_is_refused(structure, curvature):
    case = problem("deep_mlp")
    stream = DataLoader(Once(case.x, targets(LIKELIHOODS["categorical"], case)), batch_size=2)
    with pytest.raises(ntkl.DataError, match=r"the same 7 examples in every pass .*; got 0"):
        fresh_fit("deep_mlp", "categorical", "layer", curvature, structure, data=stream)


def test_a_stream_that_grows_is_refused():
    class Growing(IterableDataset):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([(torch.ones(2), torch.ones(1))] * (3 + self.passes))

    settings = ntkl.Settings(batch_size=3)
    with pytest.raises(ntkl.DataError, match=r"the same 4 examples in every pass over the data; got 5"):
        ntkl.laplace(nn.Linear(2, 1), Growing(), ntkl.Gaussian(), structure="full", settings=settings)


class Ways(nn.Module):
    """The way through the layer depends on the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.o = how, nn.Linear(3, 3, bias=how != "tied, bare"), nn.Linear(3, 2)

    def forward(self, d: dict[str, Tensor]) -> Tensor:
        x, weight, bias = d["x"], self.a.weight, self.a.bias
        if d["plain"].all():
            h = self.a(x)
        elif self.how == "bias elsewhere":
            h = (x @ weight.T) * bias
        elif self.how == "no bias":
            h = x @ weight.T
        elif self.how == "not used":
            h = x
        else:
            h = torch.tanh(self.a(x)) @ weight
        return self.o(torch.tanh(h))


def gradients(network: nn.Module, x) -> Tensor:
    """J (N C, P) by plain autograd, an output at a time; zero for what an output does not reach."""
    parameters = list(network.parameters())
    found = [torch.autograd.grad(f, parameters, retain_graph=True, allow_unused=True) for f in network(x).flatten()]
    return torch.stack([torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                                   for p, g in zip(parameters, row, strict=True)]) for row in found])


@pytest.mark.parametrize(("how", "order", "batch_size"), pairwise(
    ["bias elsewhere", "no bias", "not used", "tied", "tied, bare"], [(1, 0), (0, 1), (1, 0, 1)], [None, 4],
))
def test_the_diagonal_follows_any_graph(how, order, batch_size):
    """Whether the sums of a batch can be used depends on the batch; what no batch has reached has its prior."""
    torch.manual_seed(0)
    network = Ways(how).double()
    plain = [torch.full((8,), bool(flag)) for flag in order]
    data = [({"x": torch.randn(8, 3).double(), "plain": flags}, torch.randn(8, 2).double()) for flags in plain]
    loader, settings = DataLoader(data, batch_size=None), ntkl.Settings(batch_size=batch_size)
    found = ntkl.laplace(network, loader, ntkl.Gaussian(0.3), structure="diag", settings=settings)
    h = sum(gradients(network, x).square().sum(0) for x, _ in data) / 0.3
    assert relative_error(found.log_det(), torch.log1p(h).sum()) < 1e-10
    new = {"x": torch.randn(5, 3).double(), "plain": torch.ones(5, dtype=torch.bool)}
    want = (gradients(network, new).square() / (1 + h)).sum(1)
    assert relative_error(found.latent_moments(new)[1].diagonal(dim1=1, dim2=2).flatten(), want) < 1e-10


@pytest.mark.parametrize("how", ["bias elsewhere", "no bias", "not used", "tied"])
def test_factors_that_would_hang_on_the_cut_are_refused(how):
    network = Ways(how).double()
    data = [({"x": torch.randn(8, 3).double(), "plain": torch.full((8,), flag)}, torch.randn(8, 2).double())
            for flag in (how != "not used", how == "not used")]
    with pytest.raises(ntkl.UnsupportedError, match="every batch to reach"):
        ntkl.laplace(network, DataLoader(data, batch_size=None), ntkl.Gaussian(0.3), structure="kfac")


class Experts(nn.Module):
    """Each example takes one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 2)
        for number, layer in enumerate(self.layers):
            index = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(index):
                out = out.index_add(0, index, layer(x[index]))
        return out


@pytest.mark.parametrize("structure", ["full", "diag", "kfac", "ekfac", "inf"])
def test_what_no_example_reaches_has_its_prior(structure, tmp_path):
    network, x = Experts().double(), torch.randn(40, 3).double()
    x = x[x[:, 0] < 0]
    posterior = ntkl.laplace(network, (x, torch.randn(len(x), 2).double()), ntkl.Gaussian(0.3), structure=structure)
    new = torch.tensor([[1.0, 0.5, 0.2]]).double()
    want = torch.eye(2).double() * (1 + new.square().sum())
    posterior.save(tmp_path / "posterior.pt", include_data=True)
    for each in (posterior, ntkl.load(tmp_path / "posterior.pt", network)):
        assert relative_error(each.latent_moments(new)[1][0], want) < 1e-6  # weights are there, inputs are not: 1e-10
    posterior.prior.precision = 4.0
    assert relative_error(posterior.latent_moments(new)[1][0], want / 4) < 1e-6


class Failing(Dataset):
    """Data that cannot be read for a while."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.fails = x, y, False

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        if self.fails and index == 25:
            raise OSError("disk")
        return self.x[index], self.y[index]


@pytest.mark.parametrize("structure", ["kfac", "diag", "ekfac", "inf", "full"])
def test_a_pass_that_fails_leaves_the_sums_as_they_were(structure):
    """Another temperature asks for another pass."""
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = Failing(torch.randn(40, 3).double(), torch.arange(40) % 3)
    posterior = ntkl.laplace(
        network, DataLoader(data, batch_size=10), ntkl.Categorical(), structure=structure,
        settings=ntkl.Settings(batch_size=10),
    )
    before = posterior.log_marginal_likelihood().item(), posterior.latent_moments(data.x[:4])[1]
    posterior.likelihood.temperature, data.fails = 2.0, True
    with pytest.raises(OSError, match="disk"):
        posterior.log_marginal_likelihood()
    posterior.likelihood.temperature, data.fails = 1.0, False
    assert posterior.log_marginal_likelihood().item() == before[0]
    assert torch.equal(posterior.latent_moments(data.x[:4])[1], before[1])


@pytest.mark.parametrize("structure", ["kfac", "diag", "ekfac"])
def test_a_network_in_bfloat16(structure):
    torch.manual_seed(0)
    network, x, y = nn.Linear(3, 2).bfloat16(), torch.randn(12, 3).bfloat16(), torch.randn(12, 2)
    found = ntkl.laplace(network, (x, y), ntkl.Gaussian(1.0), structure=structure).log_det()
    want = ntkl.laplace(copy.deepcopy(network).double(), (x.double(), y), ntkl.Gaussian(1.0), structure=structure)
    assert relative_error(found, want.log_det()) < 2e-2


class Watched(IterableDataset):
    """Eight batches of five, and how many tensors there are when each is asked for."""

    SIZE = 5

    def __init__(self) -> None:
        self.batches, self.alive = torch.randn(8, 5, 3).double(), []

    def __iter__(self):
        for x in self.batches:
            gc.collect()
            self.alive.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
            yield x, torch.arange(5) % 2


@pytest.fixture
def _only_new_objects():
    """The garbage collector, which a test asks often, looks at what the test makes alone."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_new_objects")
@pytest.mark.parametrize("curvature", ["ggn", "mc"])
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "inf", "diag", "full"])
def test_a_batch_leaves_no_tensor_behind(structure, curvature):
    """One small tensor kept from each batch is enough to keep a heap from using its room again."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = Watched()
    posterior = ntkl.laplace(
        network, DataLoader(data, batch_size=None), ntkl.Categorical(), None, structure, curvature,
        settings=ntkl.Settings(batch_size=Watched.SIZE),
    )
    posterior.log_marginal_likelihood(correction=True)
    alive = torch.tensor(data.alive).view(-1, len(data.batches))  # pass by pass
    assert len(alive) >= 3 and alive.min() > 3
    assert (alive[:, 3:] == alive[:, 3:4]).all(), alive


def test_rows_gathered_in_one_tensor():
    parts = torch.randn(23, 2).split(5)
    for room in (0, 7, 23, 40):
        found = fill_buffer(parts[:2], room)
        other = found.copy()
        for part in parts[2:]:
            found.append(part)
        assert len(found) == 23 and torch.equal(found.rows, torch.cat(parts))
        assert found.rows.untyped_storage().nbytes() == 23 * 2 * 4  # what is handed on holds no spare room
        other.append(parts[0])
        assert torch.equal(other.rows, torch.cat([*parts[:2], parts[0]])) and torch.equal(found.rows, torch.cat(parts))
    assert len(RowBuffer(5)) == 0 and RowBuffer(5).rows.numel() == 0
    mixed = fill_buffer([torch.tensor([1, 2]), torch.tensor([0.5])], 9).rows
    assert mixed.dtype == torch.float32 and mixed.tolist() == [1.0, 2.0, 0.5]
    with pytest.raises(ntkl.DataError, match=r"rows of shape \(2,\), as in the batches before; got \(1,\)"):
        fill_buffer([torch.zeros(3, 2), torch.zeros(3, 1)])


# --------------------------------------------------------------------------------------------------------- interruption


# any two values meet
@pytest.mark.parametrize(("structure", "curvature", "by_path"),
                         pairwise(["kfac", "ekfac", "inf", "diag"], CURVATURES, [False, True]))
def test_an_interrupted_fit_resumes(structure, curvature, by_path, tmp_path):
    """Stopped twice, the second time in the second pass where there is one: the result is the uninterrupted one.

    Of the examples that are done only a first batch is read again, and all for drawn labels.
    """
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    path, resume = tmp_path / "fit.pt", None
    # examples read: seven in a pass, and seven before it for drawn labels
    passes = 7 if curvature == "mc" else 0
    stops = [passes + 5, 2 + passes + 3 + (passes + 3 if structure in ("ekfac", "inf") else 0)]
    for at, done in zip(stops, (4, 2 if structure in ("ekfac", "inf") else 6), strict=True):
        data = DataLoader(Interrupted(case.x, y, at), batch_size=2)
        settings = ntkl.Settings(batch_size=2, checkpoint=path if by_path else None, resume=resume)
        with pytest.raises(ntkl.FitInterrupted, match=f"after {done} of 7 examples") as stop:
            fresh_fit("deep_mlp", "categorical", "layer", curvature, structure, data=data, settings=settings)
        assert isinstance(stop.value, KeyboardInterrupt)
        resume = path if by_path else stop.value.state
    data = loader(case.x, y, batch_size=2)
    settings = ntkl.Settings(batch_size=2, resume=resume)
    found = fresh_fit("deep_mlp", "categorical", "layer", curvature, structure, data=data, settings=settings)
    assert_same(found, fresh_fit("deep_mlp", "categorical", "layer", curvature, structure), case.x_new, 1e-10)


@pytest.mark.parametrize("change", ["nothing", "batches", "curvature", "likelihood", "prior"])
def test_resuming_something_else_is_refused(change):
    """What was gathered belongs to its data, likelihood, curvature and prior groups: no other is taken in silence."""
    case = problem("deep_mlp")
    likelihood = "poisson" if change == "likelihood" else "categorical"
    data = loader(
        case.x, targets(LIKELIHOODS[likelihood], case), batch_size=3 if change == "batches" else 2
    )
    asked = likelihood, "tensor" if change == "prior" else "layer", "ef" if change == "curvature" else "ggn"
    if change == "nothing":
        found = fresh_fit("deep_mlp", *asked, "kfac", data=data, settings=interrupted_kfac())
        assert_same(found, fresh_fit("deep_mlp", *asked, "kfac"), case.x_new)
        return
    with pytest.raises(ntkl.NTKLaplaceError, match=r"(?s)expected .*; got .*"):
        fresh_fit("deep_mlp", *asked, "kfac", data=data, settings=interrupted_kfac())


def test_files_of_early_versions_resume_and_later_ones_are_refused(tmp_path):
    """Early files have no entry for their format, and numbers of batches and examples for those that are done."""
    case, path = problem("deep_mlp"), tmp_path / "fit.pt"
    y = targets(LIKELIHOODS["categorical"], case)
    with pytest.raises(ntkl.FitInterrupted):
        fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac",
                  data=DataLoader(Interrupted(case.x, y, 5), batch_size=2),
                  settings=ntkl.Settings(batch_size=2, checkpoint=path))
    record = torch.load(path, weights_only=True)
    assert record["format"] == "ntk_laplace fit" and record["version"] == 2
    asked = {"data": loader(case.x, y, batch_size=2), "settings": ntkl.Settings(batch_size=2, resume=path)}
    early = {name: value for name, value in record["accumulation"].items() if name != "done"}
    torch.save({"accumulation": early | {"batches_done": 2, "examples_done": 4}}, path)
    found = fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac", **asked)
    assert_same(found, fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac"), case.x_new, 1e-10)
    torch.save(record | {"version": 3}, path)
    with pytest.raises(ntkl.DataError, match="version 2 or older; got version 3"):
        fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac", **asked)


def test_resuming_with_other_weights_is_refused(tmp_path):
    """From memory and from a file, where the fingerprint of the weights that were is all there is."""
    case, network = problem("deep_mlp"), copy.deepcopy(problem("deep_mlp").network)
    y, path = targets(LIKELIHOODS["categorical"], case), tmp_path / "fit.pt"
    settings = ntkl.Settings(batch_size=2, checkpoint=path)
    with pytest.raises(ntkl.FitInterrupted) as stop:
        ntkl.laplace(network, DataLoader(Interrupted(case.x, y, 6), batch_size=2), ntkl.Categorical(),
                     structure="kfac", settings=settings)
    with torch.no_grad():
        next(network.parameters())[0, 0] += 1e-6
    for resume in (stop.value.state, path):
        again = ntkl.Settings(batch_size=2, resume=resume)
        with pytest.raises(ntkl.UnsupportedError, match="to resume with the network of the interrupted fit"):
            ntkl.laplace(network, loader(case.x, y, batch_size=2), ntkl.Categorical(), structure="kfac", settings=again)
        kept = ntkl.laplace(case.network, loader(case.x, y, batch_size=2), ntkl.Categorical(), structure="kfac",
                            settings=again)
        assert kept.num_examples == 7


def test_a_state_can_be_resumed_twice():
    case = problem("deep_mlp")
    data = loader(case.x, targets(LIKELIHOODS["categorical"], case), batch_size=2)
    settings = interrupted_kfac()
    for _ in range(2):
        found = fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac", data=data, settings=settings)
        assert_same(found, fresh_fit("deep_mlp", "categorical", "layer", "ggn", "kfac"), case.x_new)


# --------------------------------------------------------------------------------------------------- padding, untouched


def test_padding_is_no_position():
    """An embedding's padding has no gradient: its row has no information, and the others' does not thin out."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(5, 3, padding_idx=0).double(), nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.table(x)).sum(1))

    network, x = Words(), torch.randint(1, 5, (6, 4))
    x[:, 1:] *= torch.rand(6, 3) < 0.4
    curvature = torch.eye(2, dtype=torch.float64).expand(6, 2, 2)
    dense = Structured(parts_of(network, x, lambda *_: True), jacobian(network, x), curvature)
    for structure, want in (("kfac", dense.kfac()), ("ekfac", dense.ekfac()), ("diag", dense.diagonal)):
        posterior = ntkl.laplace(network, (x, torch.randn(6, 2).double()), ntkl.Gaussian(), structure=structure)
        found = posterior.posterior_precision.information()
        assert found[:3].abs().max() == 0
        assert relative_error(found, want) < 1e-10


@pytest.mark.parametrize("structure", CHOSEN)
def test_the_network_is_untouched(structure):
    case = fresh("cnn_groups")
    network, y = case.network.train(), targets(LIKELIHOODS["categorical"], case)
    network(case.x).sum().backward()
    network[0].bias.requires_grad_(False)
    state = copy.deepcopy(network.state_dict())
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in network.named_parameters()}
    before = {name: (id(p), p.data_ptr(), p._version, p.requires_grad) for name, p in network.named_parameters()}
    random, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in network.modules()]
    asked = STRUCTURES[structure][0]()
    posterior = ntkl.laplace(network, (case.x, y), ntkl.Categorical(), structure=asked, curvature="mc")
    posterior.log_marginal_likelihood(correction=True).backward()
    posterior.predict(case.x_new)
    posterior.condition((case.x_new, y[:4]))
    assert torch.equal(torch.get_rng_state(), random)
    posterior.sample(3)
    assert network.training and hooks == [len(m._forward_hooks) for m in network.modules()]
    now = {name: (id(p), p.data_ptr(), p._version, p.requires_grad) for name, p in network.named_parameters()}
    assert now == before
    for name, parameter in network.named_parameters():
        kept = gradients[name]
        assert parameter.grad is None if kept is None else torch.equal(parameter.grad, kept)
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize(("n", "width", "sizes"), [
    (10_000, 4, [2_000] * 5), (2_049, 4, [1_025, 1_024]), (7, 4, [7]), (3_000, 10_000, [750] * 4),
])
def test_tensors_come_in_even_batches_of_bounded_memory(n, width, sizes):
    """At most 2,048 examples and 32 MiB at a time, or what suits their use, and 512 examples at least."""
    def lengths(batches: Batches) -> list[int]:
        return [len(y) for _, y in batches]

    x, y = torch.zeros(n, width), torch.zeros(n)
    batches = Batches((x, y), None, torch.device("cpu"))
    assert lengths(batches) == sizes
    batches.first()
    batches.limit_batch_size(10**9)
    assert max(lengths(batches)) <= (5_000 if width == 4 else 838) and sum(lengths(batches)) == n
    assert len(lengths(batches)) == -(-n // (5_000 if width == 4 else 838))
    batches.limit_batch_size(1)
    assert max(lengths(batches)) == min(n, 512) or -(-n // 512) == len(lengths(batches))
    chosen = Batches((x[:7], y[:7]), 3, torch.device("cpu"))
    chosen.limit_batch_size(10**9)
    assert lengths(chosen) == [3, 3, 1]


def read_together(data, most: int | None) -> list[int]:
    """Sizes of the batches that are read."""
    return [len(y) for _, y in merged_batches(Batches(data, most, torch.device("cpu")), Network(Turns().double()))]


def test_small_batches_of_a_loader_are_read_together():
    """Up to a number of examples and of bytes, and never cut."""
    x, y = torch.rand(23, 3).double(), torch.zeros(23)
    sizes = {most: read_together(loader(x, y, batch_size=3), most) for most in (None, 2, 3, 5, 6, 9)}
    assert sizes == {None: [23], 2: [3] * 7 + [2], 3: [3] * 7 + [2], 5: [3] * 7 + [2], 6: [6, 6, 6, 5], 9: [9, 9, 5]}
    assert read_together((x, y), 10) == [10, 10, 3]
    wide = torch.zeros(1, 2**20).expand(100, -1)  # 4 MiB an example
    pairs = [(wide[:2], torch.zeros(2)) for _ in range(9)]
    flat = Network(nn.Sequential(nn.AdaptiveAvgPool1d(3), nn.Linear(3, 1)))
    found = merged_batches(Batches(DataLoader(pairs, batch_size=None), None, torch.device("cpu")), flat)
    assert [len(part) for part, _ in found] == [8, 8, 2]


@pytest.mark.parametrize("other", ["shape", "type", "targets", "key"])
def test_batches_of_another_form_stay_apart(other):
    """Those before and after are read together."""
    def pair(changed: bool) -> tuple:
        x = torch.zeros(2, 4 if changed and other == "shape" else 3, dtype=torch.int if changed and other == "type"
                        else torch.double)
        return {"y" if changed and other == "key" else "x": x}, torch.zeros((2, 1) if changed and other == "targets"
                                                                           else 2)

    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2).double())

        def forward(self, d: dict[str, Tensor]) -> Tensor:
            return next(iter(d.values())).sum(1, keepdim=True) + self.bias

    pairs = [pair(number == 3) for number in range(6)]
    batches = Batches(DataLoader(pairs, batch_size=None), None, torch.device("cpu"))
    assert [len(y) for _, y in merged_batches(batches, Network(Keys()))] == [6, 2, 4]


def test_batches_that_the_network_treats_otherwise_together_stay_apart():
    """Those of one kind are read together, whichever it is."""
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0]).double()
    x = torch.rand(4, 5, 3).double() * signs[:, None, None]
    for order, sizes in (([0, 1], [10]), ([2, 3], [10]), ([0, 2], [5, 5]), ([0, 1, 2], [5, 5, 5])):
        pairs = [(x[number], torch.zeros(5)) for number in order]
        assert read_together(DataLoader(pairs, batch_size=None), None) == sizes


def test_merged_batches_are_stored_once():
    """While the whole is in use, the parts are gone, but for the reader's last."""
    seen: list[weakref.ref] = []

    class Parts(IterableDataset):
        def __iter__(self):
            for _ in range(4):
                x = torch.rand(2, 3).double()
                seen.append(weakref.ref(x))
                yield x, torch.zeros(2)
                del x

    for x, _ in merged_batches(Batches(DataLoader(Parts(), batch_size=None), None, torch.device("cpu")),
                         Network(Turns().double())):
        assert len(x) == 8 and [part() for part in seen[:3]] == [None] * 3


def test_progress_counts_examples(monkeypatch):
    """Batches differ in size: the time left is reckoned from examples."""
    steps: list[tuple[int, int | None]] = []

    def track(items, what, total, show, size, delay):
        for item in items:
            steps.append((size(item), total))
            yield item

    monkeypatch.setattr(data_passes, "track", track)
    case = problem("deep_mlp")
    data = loader(case.x, targets(LIKELIHOODS["categorical"], case), batch_size=3)
    settings = ntkl.Settings(batch_size=3)
    fresh_fit("deep_mlp", "categorical", "layer", "ggn", "diag", data=data, settings=settings)
    assert steps == [(3, 7), (3, 7), (1, 7)]


@pytest.mark.parametrize(("structure", "conv", "batch"), [
    ("kfac", False, 4_000), ("kfac", True, 2_000), ("diag", False, 4_000), ("ekfac", True, 2_000),
])
def test_a_fit_reads_tensors_in_batches_that_suit_the_network(structure, conv, batch, monkeypatch):
    """Many examples at a time where little is done with each."""
    seen, plain = [], JacobianPass.batches
    monkeypatch.setattr(JacobianPass, "batches", lambda *a, **k: seen.append(num_examples(a[1])) or plain(*a, **k))
    wide = [nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 32, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
            nn.Linear(128, 3)]
    network = nn.Sequential(*wide) if conv else nn.Linear(64, 3)
    data = torch.randn(4_000, 64), torch.randint(3, (4_000,))
    ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, dtype=torch.float32)
    assert set(seen) == {batch}


def test_outputs_without_a_graph_are_made_in_pieces(monkeypatch):
    """As many examples as you like, a few of them at a time, and an error counts from the first."""
    case = problem("deep_mlp")
    network = Network(case.network)
    whole = network.without_grad(case.x)
    monkeypatch.setattr("ntk_laplace.runtime.tuning.FORWARD_EXAMPLES", 3)
    pieces = [network.without_grad(case.x[start : start + 3]) for start in (0, 3, 6)]
    assert torch.equal(network.without_grad(case.x), torch.cat(pieces))
    assert relative_error(network.without_grad(case.x), whole) < 1e-12
    theta = torch.cat([parameter.detach().flatten() for parameter in case.parameters.values()])
    assert torch.equal(network.with_parameters(theta, case.x), network.without_grad(case.x))
    broken = case.x.clone()
    broken[5] = float("inf")
    with pytest.raises(ntkl.NonFiniteError, match="example 25"):
        network.without_grad(broken, 20)
