"""Predictions in chunks: the same numbers as in one go, in bounded memory, over tensors, loaders and datasets."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace.errors import DataError, HyperparameterError, UnsupportedError
from ntk_laplace.model.likelihoods import Response
from pairwise import one_each
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

STRUCTURES = ("gp", "full", "kfac", "ekfac", "inf", "diag")
METHODS = ("glm", "blr", "probit", "map", "nn")
N, FRESH = 9, 11


def convolution() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()


def images(n: int, seed: int = 2) -> Tensor:
    return torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(n: int) -> Tensor:
    return torch.arange(n) % 3


@functools.cache
def posterior(structure: str) -> Any:
    return ntkl.laplace(convolution(), (images(N), labels(N)), ntkl.Categorical(), structure=structure)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def same_response(found: Response, expected: Response, y: Tensor) -> None:
    assert type(found) is type(expected) and found.batch_shape == expected.batch_shape
    for name in ("mean", "variance", "epistemic", "aleatoric"):
        close(getattr(found, name), getattr(expected, name))
    close(found.log_prob(y), expected.log_prob(y))


# ------------------------------------------------------------------------------------------------ chunks and one go


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("method", METHODS)
def test_chunks_are_one_go(method, structure):
    """Points of f and samples of the weights are the same for all chunks, and as many random numbers are drawn."""
    if method == "nn" and structure == "gp":
        return
    own, x, y = posterior(structure), images(FRESH), labels(FRESH)
    generators = [seeded(), seeded()]
    found, whole = (
        own.predict(x, method, 20, generator=generator, batch_size=size)
        for generator, size in zip(generators, (4, FRESH), strict=True)
    )
    same_response(found, whole, y)
    close(found.probs, whole.probs)
    assert torch.equal(*(generator.get_state() for generator in generators))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_moments_and_outputs_in_chunks(structure):
    own, x = posterior(structure), images(FRESH)
    close(own.outputs(x, batch_size=4), own.network.without_grad(x))
    joint = own.latent(x)
    blocks = joint.covariance_matrix.view(FRESH, 3, FRESH, 3).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    for mean in ("map", "posterior") if structure in ("gp", "full") else ("map",):
        f, covariance = own.latent_moments(x, mean, batch_size=4)
        close(f, own.latent(x, mean).mean)
        close(covariance, blocks)


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
@pytest.mark.parametrize("by", ["output", "log_likelihood", "probability_variance"])
def test_explanations_in_chunks(by, structure):
    own, x = posterior(structure), images(FRESH)
    y = labels(FRESH).flip(0) if by == "log_likelihood" else None
    found, whole = (own.explain(x, 3, by=by, y=y, batch_size=size) for size in (4, FRESH))
    assert whole.by_input().keys() == found.by_input().keys() and len(found.by_input()) >= 6
    for key, values in whole.by_input().items():
        close(found.by_input()[key], values)
    assert torch.equal(found.output, whole.output) and found.output.shape == (FRESH,)
    close(found.leverage, whole.leverage)
    assert found.to_dataframe().equals(found.to_dataframe())
    supporting = own.removal_effects(x[-1:], by=by, y=None if y is None else y[-1:]) * -found.quantity.good > 0
    assert len(found.entries(FRESH - 1, "for")) == min(3, int(supporting.sum())) > 0
    effects = own.removal_effects(x, by=by, y=y, batch_size=4)
    close(effects, own.removal_effects(x, by=by, y=y, batch_size=FRESH))
    assert effects.shape == (FRESH, N)
    if by == "log_likelihood":
        for wrong in (labels(FRESH - 1), labels(FRESH + 1)):
            with pytest.raises(ntkl.errors.TargetError):
                own.explain(x, by=by, y=wrong, batch_size=4)


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_what_if_in_chunks(structure):
    moved, x = posterior(structure).remove([0, 3]), images(FRESH)
    for found, whole in zip(moved.latent_moments(x, batch_size=4), moved.latent_moments(x), strict=True):
        close(found, whole)
    close(moved.outputs(x, batch_size=4), moved.latent(x).mean)
    assert not torch.allclose(moved.outputs(x), posterior(structure).outputs(x))


LIKELIHOODS: dict[str, tuple[Callable[[], ntkl.Likelihood], int | None, Callable[[Tensor], Tensor]]] = {
    "one output": (lambda: ntkl.Gaussian(0.3), None, lambda f: f.squeeze(1) + 0.1),
    "several outputs": (lambda: ntkl.Gaussian(0.3), 2, lambda f: f + 0.1),
    "coupled": (lambda: ntkl.Gaussian(torch.tensor([[1.0, 0.3], [0.3, 0.5]])), 2, lambda f: f + 0.1),
    "yes or no": (ntkl.Bernoulli, None, lambda f: (f.squeeze(1) > 0).double()),
    "several yes or no": (ntkl.Bernoulli, 2, lambda f: (f > 0).double()),
    "outliers": (ntkl.StudentT, None, lambda f: f.squeeze(1) + 0.1),
    "counts": (ntkl.Poisson, 2, lambda f: f.exp().round()),
    "one count": (ntkl.Poisson, None, lambda f: f.squeeze(1).exp().round()),
    "counts that vary": (ntkl.NegativeBinomial, None, lambda f: f.squeeze(1).exp().round()),
    "classes": (ntkl.Categorical, 2, lambda f: f.argmax(1)),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_responses_are_put_together(name):
    """Every response that a likelihood makes, by every method it has, and from batches put together by hand."""
    build, outputs, truth = LIKELIHOODS[name]
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs or 1),
                            *([] if outputs else [nn.Flatten(0)])).double()
    x = torch.randn(FRESH, 4).double()
    f = network(x).detach().view(FRESH, -1)
    own = ntkl.laplace(network, (x, truth(f)), build(), structure="kfac")
    y = truth(f)
    for method in ("glm", "blr", "map", "nn", *(["probit"] if own.likelihood.classifies else [])):
        options = {"method": method, "samples": 16}
        whole = own.predict(x, **options, generator=seeded())
        same_response(own.predict(x, **options, generator=seeded(), batch_size=4), whole, y)
        if method != "nn":
            by_hand = type(whole).join([own.predict(part, **options, generator=seeded()) for part in x.split(4)])
            same_response(by_hand, whole, y)


def test_a_likelihood_of_the_new_inputs():
    """Noise of their own is that of all inputs, whatever the chunks; moments are put together before."""
    x = torch.randn(FRESH, 4).double()
    torch.manual_seed(5)
    network = nn.Linear(4, 2).double()
    own = ntkl.laplace(network, (x, network(x).detach()), ntkl.Gaussian(0.5), structure="full")
    noise = torch.linspace(0.1, 2.0, FRESH).double()
    for method in ("glm", "blr", "map", "nn"):
        options = {"method": method, "samples": 4, "batch_size": 4}
        found = own.predict(x, **options, likelihood=ntkl.Gaussian(noise), generator=seeded())
        close(found.aleatoric, noise[:, None].expand(-1, 2))
        whole = own.predict(x, method, 4, likelihood=ntkl.Gaussian(noise), generator=seeded())
        same_response(found, whole, network(x).detach() + 0.1)


class Unjoined(Response):
    """A response of somebody's own, which cannot be put together."""

    def __init__(self, count: int) -> None:
        super().__init__(torch.Size([count]), validate_args=False)


class Bare(ntkl.Categorical):
    def linearize(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        return Unjoined(len(mean))


def test_a_response_that_cannot_be_put_together():
    own = ntkl.laplace(convolution(), (images(N), labels(N)), Bare(), structure="diag")
    with pytest.raises(UnsupportedError, match=r"put together; got Unjoined\. Define .*join.*batch_size=len"):
        own.predict(images(FRESH), "blr", batch_size=4)
    assert own.predict(images(FRESH), "blr", batch_size=FRESH).batch_shape == (FRESH,)


# --------------------------------------------------------------------------------------------------- bounded memory


class Watched(ntkl.Categorical):
    """Counts the responses of earlier chunks that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.most = 0

    def linearize(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        self.most = max(self.most, sum(one() is not None for one in self.seen))
        found = super().linearize(mean, covariance, scalar)
        self.seen.append(weakref.ref(found))
        return found


def test_few_responses_are_kept_until_the_end():
    """Each chunk's own would fragment the memory: it grew with the chunks, by more than the responses take."""
    torch.manual_seed(0)
    x = torch.randn(64, 3).double()
    own = ntkl.laplace(nn.Linear(3, 3).double(), (x, torch.arange(64) % 3), Watched(), structure="diag")
    found = own.predict(x, "blr", batch_size=1)
    assert len(own.likelihood.seen) == 64 and own.likelihood.most <= 2
    close(found.probs, own.predict(x, "blr").probs)


class Recorded(nn.Module):
    """Keeps the largest batch that it saw."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.sizes = inner, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.inner(x)


def recorded(structure: str) -> tuple[Any, list[int]]:
    own = ntkl.laplace(Recorded(convolution()), (images(N), labels(N)), ntkl.Categorical(), structure=structure)
    sizes = own.network.module.sizes
    sizes.clear()
    return own, sizes


VERBS: dict[str, Callable[..., Any]] = {
    **{method: lambda own, x, method=method, **options: own.predict(x, method, 2, **options) for method in METHODS},
    "outputs": lambda own, x, **options: own.outputs(x, **options),
    "moments": lambda own, x, **options: own.latent_moments(x, **options),
    "explain": lambda own, x, **options: own.explain(x, 2, **options),
    "removal": lambda own, x, **options: own.removal_effects(x, **options),
}


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_more_than_a_chunk_at_a_time(structure):
    """The largest batch that the network sees: 512 by default, and what was asked for."""
    own, sizes = recorded(structure)
    x = images(600)
    for name, ask in VERBS.items():
        if name == "nn" and structure == "gp":
            continue
        ask(own, x)
        assert 300 < max(sizes) <= 512, name
        sizes.clear()
        ask(own, x[:60], batch_size=25)
        assert max(sizes) == 25, name
        sizes.clear()


def even(count: int, most: int) -> int:
    """Size of the largest of as few even chunks as are no larger than `most`."""
    return math.ceil(count / math.ceil(count / most))


def test_memory_bounds_a_chunk(monkeypatch):
    """Jacobian, and what is made of them; outputs at weight samples; layers' outputs; the inputs themselves."""
    own, sizes = recorded("kfac")
    rows = own.network.num_parameters * 3 * 8
    monkeypatch.setattr("ntk_laplace.runtime.tuning.CHUNK_BYTES", 20 * rows)
    own.predict(images(200), "probit")
    # of each example: 36 inputs and 24 gradients of the convolution, 8 inputs of the linear layer
    assert max(sizes) == even(180, 20 * rows // (8 * (36 + 24 + 8)))  # after the first 20
    sizes.clear()
    monkeypatch.setattr("ntk_laplace.runtime.tuning.SAMPLED_OUTPUTS", 3 * 5 * 7)
    own.predict(images(200), "nn", 5)
    assert max(sizes) == 7
    sizes.clear()
    monkeypatch.setattr("ntk_laplace.runtime.tuning.WORKING_SET_BYTES", 9 * 8 * (2 * 4 + 3) // 8 * 8)
    own.outputs(images(200))
    assert 9 <= max(sizes) <= 8 * 9
    sizes.clear()
    monkeypatch.setattr("ntk_laplace.model.data.input_batches.BATCH_BYTES", 5 * 16 * 8)
    own.outputs(images(200))
    assert max(sizes) == 5


def test_an_explanation_counts_what_is_made_of_its_rows(monkeypatch):
    own, sizes = recorded("gp")
    own.explain(images(200))
    assert max(sizes) == 200
    sizes.clear()
    monkeypatch.setattr("ntk_laplace.runtime.tuning.CHUNK_BYTES", 2**18)
    own.explain(images(200))
    each = N * 3 * (7 + 3 * 2) * 8  # contributions, effects and what they are made of: C = 3, R = 2
    assert max(sizes) == even(200, 2**18 // each) < 200


@pytest.mark.parametrize("structure", ["full", "kfac", "inf"])
@pytest.mark.parametrize("generator", [None, seeded], ids=["global", "own"])
def test_weight_samples_are_drawn_again_for_every_chunk(generator, structure, monkeypatch):
    """Those that are too many to be kept come from the same random state, which ends where one pass leaves it."""
    own, x = posterior(structure), images(FRESH)

    def ask(size: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(4)
        source = generator() if generator else None
        probabilities = own.predict(x, "nn", 7, generator=source, batch_size=size).probs
        return probabilities, source.get_state() if source else torch.get_rng_state()

    monkeypatch.setattr("ntk_laplace.runtime.tuning.WEIGHT_SAMPLE_BYTES", 3 * 8 * own.num_parameters)
    whole, chunks = ask(FRESH), ask(4)
    close(chunks[0], whole[0])
    assert torch.equal(chunks[1], whole[1])


# ------------------------------------------------------------------------------------------------ loaders and datasets


class Pairs(Dataset):
    """Jacobian as they are, of any form."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset):
    """Rows that can be read once."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = iter(rows)

    def __iter__(self) -> Any:
        return self.rows


def test_items_that_make_no_batch_are_refused() -> None:
    """By fits, predictions and trainings, which stack the items of a data set."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.EmbeddingBag(4, 3), nn.Linear(3, 2)).double()
    pairs = [(torch.arange(max(1, index) + 2, device="cpu") % 4, index % 2) for index in range(6)]  # two are alike
    likelihood = ntkl.Categorical()
    objects = [(torch.ones(2, device="cpu"), object())] * 2
    for items, got in ((pairs, "stack expects"), (objects, "found <class 'object'>")):
        for use in (lambda data: ntkl.laplace(network, data, likelihood),
                    lambda data: ntkl.train_with_evidence(network, data, likelihood, epochs=1, batch_size=2)):
            with refused(ntkl.DataError, "one type and shape from the data set", got, "collate_fn"):
                use(Pairs(items))
    same = [(torch.arange(3, device="cpu"), index % 2) for index in range(6)]
    posterior = ntkl.laplace(network, Pairs(same), likelihood, structure="kfac")
    with refused(ntkl.DataError, "one type and shape", "stack expects", "collate_fn"):
        posterior.predict(Pairs([x for x, _ in pairs]))


SOURCES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loader of pairs": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=3),
    "loader of triples": lambda x, y: DataLoader(TensorDataset(x, y, y.double()), batch_size=4),
    "loader of inputs": lambda x, y: DataLoader(TensorDataset(x), batch_size=3),
    "loader of tensors": lambda x, y: DataLoader(x, batch_size=20),
    "loader of float32": lambda x, y: DataLoader(TensorDataset(x.float().double(), y), batch_size=2),
    "dataset of pairs": lambda x, y: TensorDataset(x, y),
    "dataset of inputs": lambda x, y: Pairs(list(x)),
    "stream": lambda x, y: Stream(list(zip(x, y, strict=True))),
}


# how a source is read does not depend on the structure: each source meets two of them, and each structure two sources
@pytest.mark.parametrize(("source", "structure"), one_each([*SOURCES, *SOURCES], STRUCTURES))
def test_a_loader_is_its_tensor(source, structure):
    own, x, y = posterior(structure), images(FRESH).float().double(), labels(FRESH)
    state = torch.get_rng_state()
    for name, ask in VERBS.items():
        if name == "nn":
            continue
        found, whole = ask(own, SOURCES[source](x, y)), ask(own, x)
        if isinstance(whole, Response):
            same_response(found, whole, y)
        elif isinstance(whole, ntkl.Explanation | ntkl.Ranking):
            for key, values in whole.by_input().items():
                close(found.by_input()[key], values)
        else:
            close(found, whole)
    close(own.latent(SOURCES[source](x, y)).covariance_matrix, own.latent(x).covariance_matrix)
    assert torch.equal(state, torch.get_rng_state())
    draws = [own.sample(2, inputs, generator=seeded()) for inputs in (SOURCES[source](x, y), x)]
    close(*draws)
    if structure != "gp":
        for size in (None, 4):
            torch.manual_seed(3)
            found = own.predict(SOURCES[source](x, y), "nn", 5, batch_size=size)
            torch.manual_seed(3)
            same_response(found, own.predict(x, "nn", 5), y)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4).double(), nn.Linear(4, 3).double()

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.out(torch.tanh((self.table(words) * mask[..., None]).sum(1)))


def texts(n: int, length: int = 5) -> dict[str, Tensor]:
    words = torch.randint(7, (n, length), generator=seeded())
    return {"words": words, "mask": (words > 1).double()}


def test_mappings_and_several_inputs():
    """The keys of the fit are taken, whatever else a batch holds; a pair of inputs is no pair of inputs and targets."""
    torch.manual_seed(0)
    x, y = texts(FRESH), labels(FRESH)
    rows = [{"id": i, **{key: value[i] for key, value in x.items()}, "labels": y[i]} for i in range(FRESH)]
    own = ntkl.laplace(Words(), (texts(N), labels(N)), ntkl.Categorical(), structure="kfac")
    want = own.predict(x).probs
    close(own.predict(DataLoader(Pairs(rows), batch_size=3)).probs, want)
    close(own.predict(Pairs([(row, row["labels"]) for row in rows])).probs, want)
    with pytest.raises(DataError, match=r"\{'words': int64 \(n, 5\).*got \{'words'"):
        own.predict(Pairs([{"words": row["words"]} for row in rows]))

    two = ntkl.laplace(Words(), ((x["words"], x["mask"]), y), ntkl.Categorical(), structure="kfac")
    want = two.predict((x["words"], x["mask"])).probs
    pairs = list(zip(x["words"], x["mask"], strict=True))
    close(two.predict(DataLoader(Pairs(pairs), batch_size=4)).probs, want)
    close(two.predict(Pairs(list(zip(pairs, y, strict=True)))).probs, want)
    lengths = DataLoader([(texts(3, 4), 0), (texts(2, 6), 0), (texts(2, 6), 0)], batch_size=None)
    parts = [own.predict(texts(n, length)).probs for n, length in ((3, 4), (2, 6), (2, 6))]
    close(own.predict(lengths).probs, torch.cat(parts))


def test_what_a_checkpoint_knows_of_inputs(tmp_path):
    """Two inputs stay two inputs after loading; of a form that no checkpoint holds, the first member is input."""
    torch.manual_seed(0)
    x, y, network = texts(N), labels(N), Words()
    own = ntkl.laplace(network, ((x["words"], x["mask"]), y), ntkl.Categorical(), structure="kfac")
    own.save(tmp_path / "p.pt")
    pairs = DataLoader(Pairs(list(zip(x["words"], x["mask"], strict=True))), batch_size=4)
    want = own.predict((x["words"], x["mask"])).probs
    close(ntkl.load(tmp_path / "p.pt", network).predict(pairs).probs, want)
    old = ntkl.load(tmp_path / "p.pt", network)
    old.network.input_format = None
    with pytest.raises(DataError, match="missing 1 required"):
        old.predict(pairs)
    close(old.predict(Pairs([(pair, 0) for pair in zip(x["words"], x["mask"], strict=True)])).probs, want)


def test_batches_of_a_loader_are_read_together():
    """Once in a while, after a look at two examples of each, and never beyond a chunk."""
    own, sizes = recorded("kfac")
    data = TensorDataset(images(60), labels(60))
    close(own.outputs(DataLoader(data, batch_size=3), batch_size=30), own.network.without_grad(images(60)))
    assert sizes[:-1].count(30) == 2 and max(sizes[:-1]) == 30


@pytest.mark.slow
def test_workers_of_a_loader():
    own, x = posterior("diag"), images(FRESH)
    loader = DataLoader(TensorDataset(x, labels(FRESH)), batch_size=3, num_workers=1, persistent_workers=True)
    state = torch.get_rng_state()
    close(own.outputs(loader), own.outputs(x))
    assert torch.equal(state, torch.get_rng_state())


def test_loaders_whose_order_nobody_knows():
    own, data = posterior("diag"), TensorDataset(images(4), labels(4))
    for loader in (
        DataLoader(data, shuffle=True), DataLoader(data, sampler=SubsetRandomSampler([0, 1])),
        DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 2, False)),
        DataLoader(data, sampler=torch.utils.data.DistributedSampler(data, 2, 0)),
    ):
        with pytest.raises(DataError, match=r"keeps the order.*shuffles.*shuffle=False"):
            own.predict(loader)
    for size in (0, 2.5, "all"):
        with pytest.raises(HyperparameterError, match="batch_size as a whole number"):
            own.predict(images(3), batch_size=size)


# ------------------------------------------------------------------------------------------------- gradients in inputs


@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_gradients_in_inputs_are_refused(structure):
    """Where they would be dropped in silence; without gradients enabled, nothing is dropped."""
    own, x = posterior(structure), images(2)
    asked = x.clone().requires_grad_()
    verbs = {
        **VERBS, "latent": lambda own, x: own.latent(x).mean, "prior": lambda own, x: own.prior_latent(x).mean,
        "sample": lambda own, x: own.sample(2, x, generator=seeded()),
    }
    for name, ask in verbs.items():
        if name == "nn" and structure == "gp":
            continue
        loader = DataLoader([asked], batch_size=None)
        for inputs in (asked, asked * 2, [asked], loader):
            with pytest.raises(UnsupportedError, match=r"require no gradient.*x\.detach\(\).*torch\.no_grad\(\)"):
                ask(own, inputs)
        with torch.no_grad():
            torch.manual_seed(1)
            found = ask(own, asked)
        torch.manual_seed(1)
        whole = ask(own, x)
        if isinstance(whole, Tensor):
            close(found, whole)


# ------------------------------------------------------------------------------------- weight samples of a last layer


class Body(nn.Module):
    """Counts how many examples pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 5), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += len(x)
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    """A body and a last layer; `end` is what follows, or how the two are put together."""

    def __init__(self, end: str = "") -> None:
        super().__init__()
        self.body, self.end, self.most = Body(), end, 1e6
        self.head = nn.Linear(5, 5 if end in ("elsewhere", "twice") else 1 if end == "squeezed" else 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.end == "elsewhere":
            return self.head(h @ self.head.weight)
        if self.end == "twice":
            return self.head(torch.tanh(self.head(h)))
        if self.end == "by keyword":
            return self.head(input=h)
        out = self.head(h)
        if self.end == "in place":
            return out.mul_(2.0)
        if self.end == "bounded":
            return out.clamp_(max=self.most)
        return {"scaled": lambda: 2 * out, "squeezed": lambda: out.squeeze(-1), "reshaped": lambda: out.view(-1, 3),
                "turned": lambda: out.flip(1)}.get(self.end, lambda: out)()


@pytest.mark.parametrize(
    "end, alone",
    [("", True), ("squeezed", True), ("reshaped", True), ("by keyword", True), ("in place", False), ("scaled", False),
     ("turned", False), ("elsewhere", False), ("twice", False)],
)
@pytest.mark.parametrize("structure", ["full", "kfac"])
def test_a_last_layer_alone_for_each_draw(structure, end, alone):
    """Samples of a last layer run what comes before it once for each chunk, if its outputs are the network's."""
    torch.manual_seed(2)
    network, x = Net(end).double(), torch.randn(FRESH, 4).double()
    f = network(x).detach()
    likelihood = ntkl.Gaussian(0.2)
    own = ntkl.laplace(network, (x, f), likelihood, structure=structure, parameters="last_layer")
    assert own.num_parameters == sum(p.numel() for p in network.head.parameters())
    seen = own.network.module.body.seen
    seen[0] = 0
    draws = own.sample(30, generator=seeded())
    assert seen == [0]
    found = own.predict(x, "nn", 30, generator=seeded(), batch_size=4).f
    # once for what the last layer is given, once to see that the first draw agrees
    assert seen[0] == (2 if alone else 31) * FRESH
    other = copy.deepcopy(network)
    for one, theta in zip(found, draws, strict=True):
        torch.nn.utils.vector_to_parameters(theta, other.head.parameters())
        close(one, other(x).detach().view(FRESH, -1))


def test_what_follows_a_last_layer_may_show_at_later_draws_alone():
    """Outputs that are cut off in place, at a bound that the first draw does not meet."""
    torch.manual_seed(2)
    network, x = Net("bounded").double(), torch.randn(FRESH, 4).double()
    own = ntkl.laplace(network, (x, network(x).detach()), ntkl.Gaussian(0.2), structure="kfac",
                       parameters="last_layer")
    draws = own.sample(40, generator=seeded())
    free = torch.stack([own.network.with_parameters(theta, x) for theta in draws])
    own.network.module.most = float(free[0].max()) + 1e-3
    found = own.predict(x, "nn", 40, generator=seeded()).f
    close(found, free.clamp(max=own.network.module.most))
    assert not torch.equal(found, free)


def test_the_module_that_all_chosen_parameters_belong_to():
    """Two layers of one block, and parameters of two blocks, which belong to no module but the network."""
    torch.manual_seed(2)
    block = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    network, x = nn.Sequential(Body(), block).double(), torch.randn(FRESH, 4).double()
    for chosen, passes in (("1", 2), (["1.0.bias", "1.2"], 2), (["0.layer.bias", "1.2"], 20), (None, 20)):
        own = ntkl.laplace(network, (x, labels(FRESH)), ntkl.Categorical(), structure="diag", parameters=chosen)
        seen = own.network.module[0].seen
        seen[0] = 0
        found = own.predict(x, "nn", 20, generator=seeded()).probs
        assert seen[0] == passes * FRESH
        draws = own.sample(20, generator=seeded())
        want = [torch.softmax(own.network.with_parameters(theta, x), 1) for theta in draws]
        close(found, torch.stack(want).mean(0))
    assert not any(module._forward_hooks for module in own.network.module.modules())
