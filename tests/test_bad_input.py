"""Bad input gets an error of its own, held by its text: what was expected, what came, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace import errors
from pairwise import pairwise
from refusals import N, inputs, labels, network, refused


def changed(values: Tensor, index: Any, value: float) -> Tensor:
    values = values.clone()
    values[index] = value
    return values


class Function(nn.Module):
    """A network that is one linear layer and then anything."""

    def __init__(self, function: Callable[[Tensor], Any], outputs: int = 3) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, outputs).double(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def fit(net: Any = None, data: Any = None, likelihood: Any = None, structure: str = "gp", **options: Any) -> Any:
    net = network() if net is None else net
    data = (inputs(), torch.zeros(N, 3).double()) if data is None else data
    return ntkl.laplace(net, data, likelihood or ntkl.Gaussian(), structure=structure, **options)


# ------------------------------------------------------------------------------------------------- not a number


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_targets_that_are_not_numbers(value, structure):
    y = changed(torch.zeros(N, 3).double(), (6, 1), value)
    with refused(errors.NonFiniteError, "finite targets", "example 6", "Remove or impute"):
        fit(data=(inputs(), y), structure=structure)


@pytest.mark.parametrize("batch_size", [2, 4, 20])
def test_the_first_bad_example_is_counted_over_all_batches(batch_size):
    y = changed(torch.zeros(N, 3).double(), (slice(5, None), 0), float("nan"))
    with refused(errors.NonFiniteError, "finite targets", "example 5", "."):
        fit(data=DataLoader(TensorDataset(inputs(), y), batch_size=batch_size), settings=ntkl.Settings(batch_size))


@pytest.mark.parametrize("batch_size", [2, 4, 20])
def test_inputs_that_are_not_numbers(batch_size):
    x = changed(inputs(), (slice(7, None), 2), float("nan"))
    data = TensorDataset(x, torch.zeros(N, 3).double())
    with refused(errors.NonFiniteError, "finite inputs", "NaN at example 7", "Remove or impute"):
        fit(data=DataLoader(data, batch_size=batch_size), settings=ntkl.Settings(batch_size))


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("batch_size", [2, 4, 20])
def test_outputs_that_are_not_numbers(batch_size, structure):
    """exp overflows at one example in the middle of the data."""
    x = changed(inputs(), 5, 1e4)
    net = Function(lambda h: torch.exp(h.abs()))
    data = DataLoader(TensorDataset(x, torch.zeros(N, 3).double()), batch_size=batch_size)
    with refused(errors.NonFiniteError, "finite network outputs", "infinity at example 5", "input"):
        fit(net, data, structure=structure, settings=ntkl.Settings(batch_size))


class Kink(nn.Module):
    """sqrt of the first weight's square: finite where the inputs vanish, its derivative is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).abs().sqrt()


@pytest.mark.parametrize("structure", ["gp", "full"])
@pytest.mark.parametrize("batch_size", [2, 20])
def test_jacobians_that_are_not_numbers(batch_size, structure):
    x = changed(inputs(), 7, 0.0)
    data = DataLoader(TensorDataset(x, torch.zeros(N, 3).double()), batch_size=batch_size)
    with refused(errors.NonFiniteError, "finite Jacobians", "example 7", "input"):
        fit(Kink(), data, structure=structure, settings=ntkl.Settings(batch_size))


def test_weights_that_are_not_numbers():
    net = network()
    with torch.no_grad():
        net[2].weight[0, 0] = float("nan")
    with refused(errors.NonFiniteError, "finite network outputs", "NaN at example 0", "weights"):
        fit(net)


def test_new_inputs_that_are_not_numbers():
    posterior = fit()
    for verb in (posterior.latent, posterior.latent_moments, posterior.predict):
        with refused(errors.NonFiniteError, "finite", "NaN at example 4", "."):
            verb(changed(inputs(), (4, 0), float("nan")))


# ------------------------------------------------------------------------------------------------------- targets

CLASS, REAL, BINARY, COUNT = ntkl.Categorical, ntkl.Gaussian, ntkl.Bernoulli, ntkl.Poisson
ZEROS = torch.zeros(N, 3).double()
TARGETS: dict[str, tuple[Any, Any, str, str, str]] = {
    "class 3 of 3": (CLASS, changed(labels(), 4, 3), r"0\.\.2", "3 at example 4", "from 0"),
    "class -1": (CLASS, changed(labels(), 2, -1), r"0\.\.2", "-1 at example 2", "from 0"),
    "half a class": (CLASS, changed(labels().double(), 5, 0.5), "whole numbers", "0.5 at example 5", "Gaussian"),
    "one-hot classes": (CLASS, torch.eye(3)[labels()].long(), r"shape \(9,\)", r"\(9, 3\)", r"argmax"),
    "a column of classes": (CLASS, labels()[:, None].expand(-1, 2), r"shape \(9,\)", r"\(9, 2\)", "one label"),
    "one output short": (REAL, ZEROS[:, :2], r"\(9, 3\)", r"\(9, 2\)", "one target per"),
    "a vector for three outputs": (REAL, ZEROS[:, 0], r"\(9, 3\)", r"\(9,\)", "one target per"),
    "transposed": (REAL, ZEROS.T, "as many targets", r"9 inputs and targets of shape \(3, 9\)", "one target"),
    "a third axis": (REAL, ZEROS[:, :, None], r"\(9, 3\)", r"\(9, 3, 1\)", "one target per"),
    "complex": (REAL, ZEROS.to(torch.complex128), "real targets", "complex128", "two outputs"),
    "neither 0 nor 1": (BINARY, changed(ZEROS, (3, 2), 2.0), "0 or 1|0 and 1|in {0, 1}", "example 3", "."),
    "minus one for no": (BINARY, changed(ZEROS, (1, 0), -1.0), "0 or 1|0 and 1|in {0, 1}", "example 1", "."),
    "a probability above 1": (BINARY, changed(ZEROS, (8, 0), 1.4), "0 or 1|0 and 1|in {0, 1}", "example 8", "."),
    "rows that sum to 2": (CLASS, 2.0 * torch.eye(3)[labels()], "probabilities that sum to 1", "example 0", "sum"),
    "a negative probability": (CLASS, changed(torch.eye(3)[labels()], (2, slice(0, 2)), -0.5), "sum to 1", "example 2",
                               "missing label"),
    "a negative count": (COUNT, changed(ZEROS, (2, 1), -1.0), "count|whole|integer", "example 2", "."),
    "half a count": (COUNT, changed(ZEROS, (6, 1), 1.5), "count|whole|integer", "example 6", "."),
    "too few": (REAL, ZEROS[:7], "9|as many targets", "7", "one target|one row"),
    "a number": (REAL, torch.tensor(0.0), "as many targets|targets for", r"shape \(\)", "one target|one row"),
}


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "objects": lambda x: x.astype(object),
    "a table of objects": lambda x: pandas.DataFrame(x, dtype=object),
}


@pytest.mark.filterwarnings("error")
def test_arrays_backwards_in_another_byte_order_or_read_only():
    """Of the last, torch warns, once in a process."""
    x = inputs().numpy()
    want = fit(data=(inputs(), labels()), likelihood=CLASS()).predict(inputs()).probs
    for array in (x[::-1].copy()[::-1], x.astype(">f8"), np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)):
        found = fit(data=(array, labels()), likelihood=CLASS())
        assert torch.equal(found.predict(inputs()).probs, want) and torch.equal(found.predict(array).probs, want)


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_torch_does_not_read(case):
    """The remedy that the error names is one."""
    x = ARRAYS[case](inputs().numpy())
    for verb in (lambda x: fit(data=(x, labels()), likelihood=CLASS()), fit().predict):
        with refused(errors.DataError, "a tensor", type(x).__name__, r"tensor\(numpy\.array\(X, dtype=float\)\)"):
            verb(x)
        verb(torch.tensor(np.array(x, dtype=float)))


def test_masked_entries_are_refused():
    """torch reads what the mask hides."""
    x, y = inputs(), labels()
    hidden, unknown = np.ma.masked_greater(x.numpy(), 1.0), np.ma.masked_equal(y.numpy(), 2)
    for verb in (lambda: fit(data=(hidden, y), likelihood=CLASS()), lambda: fit(data=(x, unknown), likelihood=CLASS()),
                 lambda: fit().predict(hidden)):
        with refused(errors.DataError, "without masked entries", r"\d of \d+ masked", 'missing="nan"'):
            verb()


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_tables_are_read_by_position_with_any_index():
    """As a split into training and test data leaves them."""
    x, y, rows = inputs(), labels(), [11, 3, 5, 8, 1, 0, 2, 9, 4]
    want, table = fit(data=(x, y), likelihood=CLASS()), pandas.DataFrame(x.numpy(), index=rows)
    for names in (range(4), list("abcd")):
        table.columns = names
        for start in (0, 1):
            column = pandas.Series(y.numpy()[start:], index=rows[start:])
            found = fit(data=(table[start:], column), likelihood=CLASS())
            exact = fit(data=(x[start:], y[start:]), likelihood=CLASS())
            assert torch.equal(found.log_marginal_likelihood(), exact.log_marginal_likelihood())
            assert torch.equal(found.predict(table).probs, exact.predict(x).probs)
    index = pandas.Series([2, 5], index=[7, 8])
    assert torch.equal(want.remove(index).predict(table).probs, want.remove([2, 5]).predict(x).probs)
    changed = want.reweight(index, pandas.Series([0.5, 2.0], index=[7, 8]))
    assert torch.equal(changed.log_det(), want.reweight([2, 5], [0.5, 2.0]).log_det())
    changed = want.relabel(index, pandas.Series([0, 1], index=[7, 8]))
    assert torch.equal(changed.log_marginal_likelihood(), want.relabel([2, 5], [0, 1]).log_marginal_likelihood())


@pytest.mark.parametrize("kind", [list, np.array, pandas.Series])
def test_names_of_classes_as_targets(kind):
    names = kind(["ant", "bee", "cat"] * 3)
    with refused(errors.DataError, "of numbers", type(names).__name__, "Number classes from 0"):
        fit(data=(inputs(), names), likelihood=CLASS())


@pytest.mark.parametrize("case", TARGETS)
def test_targets(case):
    likelihood, y, expected, got, remedy = TARGETS[case]
    with refused(errors.DataError, expected, got, remedy):
        fit(data=(inputs(), y), likelihood=likelihood())


@pytest.mark.parametrize("case", ["class 3 of 3", "neither 0 nor 1", "a negative count", "half a class"])
@pytest.mark.parametrize("batch_size", [2, 20])
def test_bad_targets_are_counted_over_all_batches(case, batch_size):
    likelihood, y, expected, got, remedy = TARGETS[case]
    with refused(errors.TargetError, expected, got, remedy):
        data = DataLoader(TensorDataset(inputs(), y), batch_size=batch_size)
        fit(data=data, likelihood=likelihood(), settings=ntkl.Settings(batch_size))


def test_one_output_for_classes():
    with refused(errors.NTKLaplaceError, "two|2", "1", "Bernoulli"):
        fit(network(1), (inputs(), labels(classes=1)), ntkl.Categorical())


# ---------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    "data",
    [
        (torch.zeros(0, 4).double(), torch.zeros(0, 3).double()),
        TensorDataset(torch.zeros(0, 4).double(), torch.zeros(0, 3).double()),
        DataLoader(TensorDataset(torch.zeros(0, 4).double(), torch.zeros(0, 3).double())),
        DataLoader(TensorDataset(inputs(3), torch.zeros(3, 3).double()), batch_size=4, drop_last=True),
    ],
    ids=["pair", "dataset", "loader", "loader that drops its only batch"],
)
@pytest.mark.parametrize("structure", ["gp", "full"])
def test_empty_data(data, structure):
    with refused(errors.DataError, "at least one example", "empty data", "Pass data"):
        fit(data=data, structure=structure)


@pytest.mark.parametrize("data", [inputs(), 3, "mnist", None, [inputs(), ZEROS, ZEROS]], ids=str)
def test_data_of_another_kind(data):
    with refused(errors.DataError, "DataLoader, a Dataset, or a pair", "an? ", "DataLoader|pass"):
        ntkl.laplace(network(), data, ntkl.Gaussian())


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_noise_of_each_point_takes_no_loader_that_shuffles(structure: str) -> None:
    """Each point would have the noise of another one."""
    noise, data = torch.linspace(0.1, 2.0, N).double(), TensorDataset(inputs(), ZEROS)
    for likelihood in (ntkl.Gaussian(noise), ntkl.Tempered(ntkl.Gaussian(noise), 2.0)):
        with refused(errors.DataError, "a known order.*its noise", "DataLoader that shuffles", "shuffle=False"):
            ntkl.laplace(network(), DataLoader(data, 4, shuffle=True), likelihood, structure=structure)
    kept, whole = (ntkl.laplace(network(), given, ntkl.Gaussian(noise), structure=structure).log_marginal_likelihood()
                   for given in (DataLoader(data, 4), data))
    assert torch.allclose(kept, whole, rtol=1e-12)


def test_lists_and_iterators_of_batches_name_the_loader_that_takes_them():
    halves = [(inputs()[:4], ZEROS[:4]), (inputs()[4:], ZEROS[4:])]
    for data in (halves, iter(halves), [*halves, *halves, *halves]):
        with refused(errors.DataError, "a pair|one tensor", "", r"DataLoader\(batches, batch_size=None\)"):
            fit(data=data)
    found = fit(data=DataLoader(halves, batch_size=None)).log_marginal_likelihood()
    assert torch.allclose(found, fit().log_marginal_likelihood(), rtol=1e-12)


def test_inputs_and_targets_of_other_lengths():
    with refused(errors.DataError, "as many targets as inputs", "9 inputs", "one target"):
        fit(data=(inputs(), torch.zeros(8, 3).double()))


def test_inputs_of_other_lengths_among_themselves():
    with refused(errors.DataError, "share their first axis", r"\(9, 4\).*\(5, 4\)", "one row per example"):
        fit(data=((inputs(), inputs(5)), ZEROS))


def test_batches_that_are_no_pairs():
    with refused(errors.DataError, "pairs", "length 3", "such as names; group several inputs"):
        fit(data=DataLoader(TensorDataset(inputs(), inputs(), ZEROS), batch_size=3))


def test_arrays_are_welcome():
    """NumPy arrays and lists are data too; float32 arrays for a float64 network follow the network."""
    want = fit().log_marginal_likelihood()
    for x, y in ((inputs().numpy(), ZEROS.numpy()), (inputs().tolist(), ZEROS.tolist())):
        assert torch.allclose(fit(data=(x, y)).log_marginal_likelihood(), want, rtol=1e-6)
    assert isinstance(inputs().numpy(), np.ndarray)


def test_no_new_inputs():
    posterior = fit()
    for verb in (posterior.latent, posterior.latent_moments, posterior.predict):
        with refused(errors.DataError, "at least one", "none|empty", "Pass one or more"):
            verb(inputs(0))


# ------------------------------------------------------------------------------------ inputs that no network takes


def tokens(n: int = N, length: int = 5) -> dict[str, Tensor]:
    words = torch.randint(0, 7, (n, length), generator=torch.Generator().manual_seed(4))
    return {"words": words, "mask": torch.ones(n, length).double()}


class Words(nn.Module):
    """A bag of words, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4).double(), nn.Linear(4, 3).double()

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.out(torch.tanh((self.table(words) * mask[..., None]).sum(1)))


class Images(nn.Module):
    """Takes images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Conv2d(2, 4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(x)).mean((2, 3)))


def images(n: int = N, channels: int = 2, size: int = 6) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(5)).double()


KINDS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "rows": lambda: (network(), inputs()),
    "square": lambda: (nn.Linear(3, 3).double(), torch.randn(N, 3).double()),
    "words": lambda: (Words(), tokens()),
    "images": lambda: (Images(), images()),
}
FORM = r"inputs that the network takes, such as float64 \(n, 4\)"
MISFITS: dict[str, tuple[str, Any, str, str, str]] = {
    "features": ("rows", torch.zeros(5, 3), FORM, r"float64 \(5, 3\), which raise RuntimeError: .*mat1", "that form"),
    "integers": ("rows", torch.ones(5, 4).long(), FORM, r"int64 \(5, 4\).*dtype", r"x\.to\(torch\.float64\)"),
    "truths": ("rows", torch.ones(5, 4) > 0, FORM, r"bool \(5, 4\)", r"x\.to\(torch\.float64\)"),
    "whole numbers in a list": ("rows", [[1, 2, 3, 4]], FORM, r"int64 \(1, 4\)", r"x\.to\(torch\.float64\)"),
    "complex": ("rows", inputs().to(torch.complex128), FORM, "complex128", r"x\.to\(torch\.float64\)"),
    "not a number": ("rows", changed(inputs(), (4, 0), float("nan")), "finite", "NaN at example 4", "Look"),
    "a dict": ("rows", {"x": inputs()}, FORM, r"\{'x': float64 \(9, 4\)\}.*TypeError", "that form"),
    "a pair": ("rows", (inputs(), inputs()), FORM, r"\(float64 \(9, 4\), float64 \(9, 4\)\)", "that form"),
    "a list of rows": ("rows", list(inputs()), FORM, r"\[float64 \(4,\).*, \.\.\.\]", r"torch\.stack\(x\)"),
    "a loader": ("rows", DataLoader(TensorDataset(tokens()["words"])), r"float64 \(n, 4\), or tuples", r"\[int64 \(1,",
                 "form that the fit's had"),
    "a dataset": ("words", TensorDataset(inputs(), inputs()), r"\{'words'.*first member", r"\[float64", "form that"),
    "four tensors": ("rows", TensorDataset(*[inputs()] * 4), "tuples", r"\[float64.*, float64", "form that the fit's"),
    "a shuffling loader": ("rows", DataLoader(TensorDataset(inputs()), shuffle=True), "keeps the order",
                           "RandomSampler", "shuffle=False.*dataset itself"),
    "an empty dataset": ("rows", TensorDataset(inputs(0)), "at least one", "none", "one or more"),
    "text": ("rows", "images", "a tensor", "a str", "Convert"),
    "ragged": ("rows", [[1.0, 2.0], [1.0]], "a tensor", "a list", "rows of one length"),
    "a number": ("rows", 3.0, "first axis", r"shapes \(\)", "one row per example"),
    "sparse": ("rows", inputs().to_sparse(), "dense", "sparse_coo", "to_dense"),
    "no values": ("rows", torch.zeros(5, 4, device="meta"), "values", "meta", "holds no values"),
    "an axis more": ("rows", torch.zeros(5, 2, 4), r"outputs of shape \(5, C\)", r"\(5, 2, 3\).*from", "that form"),
    "one row": ("square", torch.ones(3), r"shape \(3, 3\), as before", r"\(3,\) from", r"x\.unsqueeze\(0\)"),
    "one image": ("images", images()[0], r"float64 \(n, 2, 6, 6\)", r"\(2, 6, 6\)", r"x\.unsqueeze\(0\)"),
    "channels": ("images", images(3, 1), r"float64 \(n, 2, 6, 6\)", r"\(3, 1, 6, 6\).*2 channels", "that form"),
    "small images": ("images", images(3, 2, 2), r"\(n, 2, 6, 6\)", r"\(3, 2, 2, 2\).*padded input", "another on which"),
    "keys": ("words", {"word": tokens()["words"]}, r"\{'words': int64 \(n, 5\)", "'word'", "keys 'words', 'mask'"),
    "floating words": ("words", {k: v.double() for k, v in tokens().items()}, "int64", "float64", "those types"),
    "unknown words": ("words", {**tokens(), "words": 9 + tokens()["words"]}, "int64", "IndexError", "their values"),
}


@pytest.fixture(scope="module")
def posteriors() -> dict[tuple[str, str], Any]:
    made = {}
    for kind, make in KINDS.items():
        net, x = make()
        for structure in ("gp", "full", "kfac"):
            made[kind, structure] = fit(net, (x, torch.zeros(N, 3).double()), structure=structure)
    return made


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
@pytest.mark.parametrize("case", MISFITS)
def test_new_inputs_that_the_network_does_not_take(case, structure, posteriors):
    """Told at the door of every verb, with what the fit saw; the posterior is as it was."""
    kind, x, expected, got, remedy = MISFITS[case]
    posterior = posteriors[kind, structure]
    good = KINDS[kind]()[1]
    before = posterior.latent_moments(good)
    verbs = [
        posterior.latent_moments, posterior.latent, posterior.predict, posterior.outputs, posterior.explain,
        posterior.removal_effects, posterior.prior_latent, lambda x: posterior.sample(2, x),
        lambda x: posterior.predict(x, "map"), lambda x: posterior.predict(x, "nn", samples=2),
    ]
    for verb in verbs[:-1] if structure == "gp" else verbs:
        with refused(errors.DataError, expected, got, remedy):
            verb(x)
    assert posterior.network.num_outputs == 3 and not posterior.network.scalar
    assert all(torch.equal(one, other) for one, other in zip(before, posterior.latent_moments(good), strict=True))


def test_the_error_of_torch_is_the_cause():
    with pytest.raises(errors.DataError) as caught:
        fit().predict(torch.zeros(5, 3))
    assert isinstance(caught.value.__cause__, RuntimeError) and "5x3" in str(caught.value.__cause__)


@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_data_that_the_network_does_not_take(structure):
    """At the fit nothing is known of inputs that went well; from the second batch on it is."""
    with refused(errors.DataError, "the network takes$", "int64.*dtype", r"x\.to\(torch\.float32\).*no indices"):
        fit(data=(torch.ones(N, 4).long(), ZEROS), structure=structure)
    with refused(errors.DataError, "the network takes$", r"\(4, 3\).*mat1", r"network\(x\) runs"):
        fit(data=(torch.ones(N, 3), ZEROS), structure=structure)
    ragged = [(inputs(5), torch.zeros(5, 3)), (torch.ones(4, 2).double(), torch.zeros(4, 3))]
    with refused(errors.DataError, FORM, r"\(4, 2\) in the batch from example 5 on", "that form"):
        fit(data=DataLoader(ragged, batch_size=None), structure=structure)


def test_outputs_of_another_width_in_a_later_batch():
    """C is one for all batches: a network that gives another is refused, as far as the inputs are not to blame."""
    net = Function(lambda h: h if len(h) < 6 else torch.cat([h, h], 1))
    with refused(errors.NetworkError, r"shape \(9, 3\), as before", r"\(9, 6\)", "Wrap the network"):
        fit(net)


def test_memory_that_runs_out_in_the_network_is_no_bad_input():
    def allocate(h: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        fit(Function(allocate))


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_other_inputs_that_the_network_takes_are_welcome(structure, posteriors):
    """Images of another size, texts of another length, arrays, lists, other floating types."""
    rows, words, images_ = (posteriors[kind, structure] for kind in ("rows", "words", "images"))
    want = rows.predict(inputs()).mean
    for x in (inputs().numpy(), inputs().tolist(), TensorDataset(inputs(), labels()), DataLoader(inputs(), 2)):
        for method in ("glm", "map"):
            assert torch.allclose(rows.predict(x, method).mean, want, rtol=1e-6)
    assert torch.allclose(rows.predict(inputs().float()).mean, want, rtol=1e-5)
    assert words.latent_moments(tokens(2, 8))[1].shape == (2, 3, 3)
    assert words.latent_moments((tokens()["words"], tokens()["mask"]))[1].shape == (N, 3, 3)
    assert images_.latent_moments(images(2, 2, 9))[1].shape == (2, 3, 3)


# ------------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_networks_that_are_not_deterministic(structure):
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double().train()
    with refused(errors.NonDeterministicError, "deterministic", "differ by", r"network\.eval\(\)"):
        fit(net, structure=structure)


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_networks_that_mix_examples(structure):
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double().train()
    with refused(errors.MixedExamplesError, "own example", "batch statistics", r"network\.eval\(\)"):
        fit(net, structure=structure)


def test_networks_that_mix_examples_without_statistics():
    with refused(errors.MixedExamplesError, "own example", "other examples of the batch", "."):
        fit(Function(lambda h: h - h.mean(0)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize(("of", "most", "structure"), pairwise(
    ["one example", "the mean", "a constant"], [4, 10], ["gp", "kfac", "diag"]
))
def test_networks_that_mix_examples_in_large_batches_alone(of, most, structure):
    """The probe's few examples do not show it, and rows from a fallback, one example at a time, do not either."""
    mean = {"one example": lambda h: h[7:8], "the mean": lambda h: h.mean(0), "a constant": lambda h: h.detach().sum()}
    net = Function(lambda h: h + 0.1 * mean[of](h) if len(h) > most else h)
    data = inputs(20), torch.zeros(20, 3).double()
    with refused(errors.MixedExamplesError, "own example", "other examples of the batch|over the batch", r"eval\(\)"):
        fit(net, data, structure=structure)
    small, settings = DataLoader(TensorDataset(*data), batch_size=4), ntkl.Settings(batch_size=4)
    assert fit(net, small, structure=structure, settings=settings).num_examples == 20


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_networks_that_change_their_buffers():
    with refused(errors.NetworkError, "buffers", "calls", r"eval\(\)"):
        fit(Counter())


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a third axis": (lambda h: h[:, None], r"\(9, 1, 3\)|\(\d, 1, 3\)"),
    "one number": (lambda h: h.sum(), r"\(\)"),
    "one row too few": (lambda h: h[1:], r"\(\d, 3\)"),
    "whole numbers": (lambda h: h.round().long(), "int64"),
    "complex": (lambda h: torch.complex(h, h), "complex128"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_of_another_shape(case):
    function, got = OUTPUTS[case]
    with refused(errors.NetworkError, r"outputs of shape \(\d+, C\) or \(\d+,\)", got, "Wrap the network"):
        fit(Function(function))


@pytest.mark.parametrize(
    ("function", "structure"),
    [(torch.detach, "gp"), (torch.no_grad()(lambda h: 2 * h), "kfac"), (torch.ones_like, "full"),
     (torch.inference_mode()(lambda h: 2 * h), "iterative")],
)
def test_outputs_without_a_graph(function, structure):
    """Their rows would all be zero, the posterior the prior, and the evidence without an Occam factor."""
    with refused(errors.NetworkError, "outputs that autograd can follow", "without a graph", r"no_grad.*detach"):
        fit(Function(function), structure=structure)


@pytest.mark.parametrize("net", [lambda x: x, 3, None], ids=["function", "number", "None"])
def test_networks_that_are_no_modules(net):
    with refused(errors.NetworkError, r"torch\.nn\.Module", "an? ", "Wrap"):
        ntkl.laplace(net, (inputs(), ZEROS), ntkl.Gaussian())


def test_lazy_modules_without_values():
    with refused(errors.NetworkError, "parameters with values", r"'1\.weight' of a lazy module", "once"):
        fit(nn.Sequential(nn.Tanh(), nn.LazyLinear(3)))


@pytest.mark.parametrize("net", [network().requires_grad_(False), nn.Tanh()], ids=["all frozen", "none"])
def test_no_parameter_left(net):
    with refused(errors.NetworkError, "at least one parameter that requires a gradient", "none of", "requires_grad"):
        fit(net, (inputs(), torch.zeros(N, 4).double()))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_networks_without_outputs_or_entries():
    with refused(errors.NetworkError, r"shape \(4, C\), C at least 1", r"\(4, 0\)", "Wrap"):
        fit(Function(lambda h: h[:, :0]))
    with refused(errors.NetworkError, "parameter with entries", "weight, which are empty", "inputs and outputs"):
        fit(nn.Linear(0, 3, bias=False).double(), (inputs()[:, :0], ZEROS))


class Stale(nn.Linear):
    """Computes its weight in train mode alone, and reads that one ever after."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scaled = 2 * self.weight
        return x @ self.scaled.T


def test_networks_that_read_what_an_earlier_pass_left():
    net = Stale(4, 2).double()
    net(inputs())
    with refused(errors.NetworkError, "computes its outputs from inputs, parameters", "reads 0.scaled", "register"):
        fit(nn.Sequential(net).eval(), (inputs(), torch.zeros(N, 2).double()))


def test_complex_parameters():
    net = network()
    net.spectrum = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    with refused(errors.NetworkError, "real parameters", "'spectrum' of torch.complex128", r"torch\.complex"):
        fit(net)


def test_names_of_no_parameter():
    with refused(errors.NetworkError, "parameter names among 0.weight", "'3.weight'", "named_parameters"):
        fit(parameters=["3.weight"])


def test_frozen_parameters_asked_for_by_name():
    """They are left out in silence only where nobody asked for them."""
    net = network()
    net[0].requires_grad_(False)
    assert fit(net).network.names == ["2.weight", "2.bias"]
    with refused(errors.NetworkError, "require", "0.weight|0.bias|none of", "requires_grad"):
        fit(net, parameters=["0.weight"])


def test_frozen_parameters_among_those_asked_for():
    net = network()
    net[0].weight.requires_grad_(False)
    with refused(errors.NetworkError, "require", "0.weight", "requires_grad"):
        fit(net, parameters=["0.weight", "2.weight"])


def test_tied_parameters_are_chosen_by_any_of_their_names():
    """A head that is tied to the first layer is the whole head, not its bias alone."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    net[2].weight = net[0].weight
    for chosen, names in ((["2"], ["0.weight", "2.bias"]), (["2.weight"], ["0.weight"]), ("0", ["0.weight", "0.bias"])):
        data = inputs(), labels(classes=4)
        assert list(ntkl.laplace(net, data, ntkl.Categorical(), parameters=chosen).network.shapes) == names
    net[0].weight.requires_grad_(False)
    with refused(errors.NetworkError, "require a gradient", "'2.weight', which is frozen", "requires_grad"):
        fit(net, parameters=["2.weight"])


def test_unsupported_layers_are_named_with_their_cost():
    net = nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.Flatten()).double()
    net.append(nn.Bilinear(3, 3, 3).double())
    net = Square(net[0], net[3])
    with pytest.warns(
        errors.NTKLaplaceWarning, match=r"no factor rule covers Bilinear.*27 parameters.*costs.*N x C x 27"
    ):
        fit(net)


class Square(nn.Module):
    def __init__(self, layer: nn.Module, product: nn.Module) -> None:
        super().__init__()
        self.layer, self.product = layer, product

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.product(h, h)


# ------------------------------------------------------------------------------------------------ hyperparameters


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_precisions(value):
    with refused(errors.HyperparameterError, "precision.*positive|positive.*precision", re.escape(f"{value:g}"), "."):
        ntkl.GaussianPrior(precision=value)
    prior = ntkl.GaussianPrior(precision=1.0)
    with refused(errors.HyperparameterError, "precision.*positive|positive.*precision", re.escape(f"{value:g}"), "."):
        prior.precision = value
    assert prior.precision.item() == 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_noises(value):
    with refused(errors.HyperparameterError, "noise variances that are positive", re.escape(f"{value:g}"), "above 0"):
        ntkl.Gaussian(noise=value)
    with refused(errors.HyperparameterError, "noise variances that are positive", re.escape(f"{value:g}"), "above 0"):
        ntkl.Gaussian(noise=torch.tensor([0.1, value]))
    likelihood = ntkl.Gaussian(noise=1.0)
    with refused(errors.HyperparameterError, "noise variances that are positive", re.escape(f"{value:g}"), "above 0"):
        likelihood.noise = value
    assert likelihood.noise.item() == 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures(value):
    with refused(errors.HyperparameterError, "temperature", re.escape(f"{value:g}"), "."):
        ntkl.Categorical(temperature=value)


@pytest.mark.parametrize(
    "noise",
    [torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), torch.triu(torch.ones(3, 3))],
    ids=["indefinite", "not symmetric"],
)
def test_noise_covariances(noise):
    with refused(errors.HyperparameterError, "symmetric and positive definite", "not", "point"):
        ntkl.Gaussian(noise=noise, kind="covariance")


def test_noise_that_fits_no_shape():
    with refused(errors.HyperparameterError, r"\(3,\), \(9,\), \(9, 3\) or \(3, 3\)", r"\(4,\)", "one per output"):
        fit(likelihood=ntkl.Gaussian(noise=torch.ones(4)))


def test_noise_that_could_mean_two_things():
    data = inputs(3), torch.zeros(3, 3).double()
    with refused(errors.HyperparameterError, "3 examples of 3 outputs", r"\(3,\)", 'kind="output".*kind="point"'):
        fit(data=data, likelihood=ntkl.Gaussian(noise=torch.ones(3)))
    assert fit(data=data, likelihood=ntkl.Gaussian(noise=torch.ones(3), kind="point")).likelihood.kind == "point"


def test_noise_per_point_is_undefined_at_new_points():
    posterior = fit(likelihood=ntkl.Gaussian(noise=torch.ones(N)))
    with refused(errors.UnsupportedError, "9 points", "new points|other points", r"predict\(x, likelihood="):
        posterior.predict(inputs(4))
    predicted = posterior.predict(inputs(4), likelihood=ntkl.Gaussian(noise=0.5))
    assert predicted.variance.min() > 0.5
    more = inputs(2), torch.zeros(2, posterior.num_outputs).double()
    for change in (lambda: posterior.add(*more), lambda: posterior.condition(more)):
        with refused(errors.UnsupportedError, "9 points", "new points", "Fit all points together"):
            change()


ALL = dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 0.0)


@pytest.mark.parametrize(
    ("options", "expected", "got"),
    [
        ({"groups": "module"}, "all.*layer.*tensor.*parameter", "'module'"),
        ({"groups": {"a": ["0.weight", "0.bias"]}}, "every parameter|exactly one|once", r"2\.weight"),
        ({"groups": {"a": ["0", "2"], "b": ["2.bias"]}}, r"one group; '2\.bias' once", "'a', 'b'"),
        ({"groups": {"a": ["0", "2", "4"]}}, "parameter", "4"),
        ({"groups": "layer", "precision": torch.ones(3)}, "2", "3"),
        ({"groups": "layer", "precision": {"0": 1.0}}, "precision|group", "2"),
        ({"groups": "layer", "precision": {"0": 1.0, "2": 1.0, "9": 1.0}}, "group|precision", "9"),
        ({"mean": torch.zeros(7)}, "mean|42|43", "7"),
        ({"mean": {"0.weight": 0.0}}, "a mean for every parameter", r"none for '0\.bias', '2\.weight'"),
        ({"mean": {**ALL, "0.weight": torch.zeros(2, 2)}}, "mean|shape", r"\(2, 2\)"),
        ({"mean": float("nan")}, "mean", "nan"),
    ],
    ids=lambda value: (
        re.sub(r"tensor\(.*?\)", "tensor", str(value), flags=re.DOTALL) if isinstance(value, dict) else ""
    ),
)
def test_priors_that_do_not_fit(options, expected, got):
    with refused(errors.HyperparameterError, expected, got, "."):
        fit(prior=ntkl.GaussianPrior(**options))


# -------------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("options", "expected", "got", "remedy"),
    [
        ({"structure": "fulll"}, "gp.*full", "'fulll'", '^Use "gp"'),
        ({"structure": ["gp"]}, "gp.*full", "'gp'", '^Use "gp"'),
        ({"structure": "kron"}, "gp.*full", "'kron'", '"kfac" here'),
        ({"structure": "last_layer"}, "gp.*full", "'last_layer'", 'parameters="last_layer"'),
        ({"curvature": "hessian"}, "ggn", "'hessian'", "."),
    ],
)
def test_unknown_choices(options, expected, got, remedy):
    with refused(errors.UnsupportedError, expected, got, remedy):
        fit(**options)


def test_unknown_methods_and_means():
    posterior = fit()
    with refused(errors.UnsupportedError, "method among .*blr.*glm", "'laplace'", "."):
        posterior.predict(inputs(), method="laplace")
    with refused(errors.UnsupportedError, "map.*posterior", "'median'", "."):
        posterior.latent(inputs(), mean="median")
    with refused(errors.UnsupportedError, "probit", "Gaussian", "glm"):
        posterior.predict(inputs(), method="probit")


@pytest.fixture(scope="module")
def classes() -> Any:
    return fit(data=(inputs(), labels()), likelihood=CLASS())


NAMED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "sharing": (lambda posterior, name: ntkl.KFAC(sharing=name), "expand, reduce"),
    "violation": (lambda posterior, name: ntkl.INF(violation=name), "shrink"),
    "device": (lambda posterior, name: posterior.to(name), "a device"),
    "parameters": (lambda posterior, name: posterior.fit_predictive(parameters=name), "scale, temperature"),
    "temperature": (lambda posterior, name: posterior.conditional_log_marginal_likelihood(
        4, method="average", temperature=name), "draws"),
    "by of rerank": (lambda posterior, name: posterior.rerank(inputs(), by=name), "output, logit"),
    "by of source_effects": (lambda posterior, name: posterior.source_effects(inputs(), [0, 1, 2] * 3, by=name),
                             "output, logit"),
    "linearization of source_effects": (lambda posterior, name: posterior.source_effects(
        inputs(), [0, 1, 2] * 3, by="variance", linearization=name), "fixed"),
    "scores of models": (lambda posterior, name: ntkl.compare_models([posterior], scores=name), "evidence, "),
    "scores of structures": (lambda posterior, name: ntkl.compare_evidence(
        network(), (inputs(), labels()), CLASS(), scores=name), "elbo"),
    "predictive": (lambda posterior, name: ntkl.train_from_starts(
        network(), (inputs(), labels()), CLASS(), starts=[1.0, 2.0], epochs=1, predictive=name), "loo"),
}


@pytest.mark.parametrize("case", NAMED)
def test_arrays_and_other_objects_in_place_of_names(case, classes):
    verb, known = NAMED[case]
    for wrong in (np.array(["gp", "full"]), torch.ones(2), torch.tensor(1.0), [torch.ones(2)], {"gp": 1}, 0.5):
        with refused(errors.UnsupportedError, known, ".", "."):
            verb(classes, wrong)


FLAGS: dict[str, Callable[..., Any]] = {
    "progress, distributed, sharded": lambda posterior, **flag: ntkl.Settings(**flag),
    "relinearize, average, inplace": lambda posterior, **flag: ntkl.variational(
        network(), (inputs(), labels()), CLASS(), steps=1, **flag),
    "correction": lambda posterior, **flag: posterior.log_marginal_likelihood(**flag),
    "correction of structures": lambda posterior, correction: ntkl.compare_evidence(
        network(), (inputs(), labels()), CLASS(), correction=correction),
    "gradient": lambda posterior, **flag: posterior.evidence_bound(**flag),
    "strict": lambda posterior, **flag: posterior.fit_predictive(**flag),
    "strict of leave_one_out": lambda posterior, strict: posterior.leave_one_out(strict=strict),
    "differentiable": lambda posterior, **flag: posterior.latent(inputs(), **flag),
    "differentiable, per_position": lambda posterior, **flag: posterior.latent_moments(inputs(), **flag),
    "calibrated": lambda posterior, **flag: posterior.predict(inputs(), **flag),
    "bounds": lambda posterior, **flag: posterior.annealed_evidence(**flag),
    "effective": lambda posterior, **flag: posterior.bic(**flag),
    "never_empty": lambda posterior, **flag: posterior.predict_set(inputs(), **flag),
    "include_data": lambda posterior, **flag: posterior.save("unwritten", **flag),
}


@pytest.mark.parametrize("names", FLAGS)
def test_options_that_are_neither_true_nor_false(names, classes):
    """A word would count as True, and an array has no truth value."""
    for name in names.split(" of ")[0].split(", "):
        for wrong in ("no", np.array([True, False]), torch.ones(2), 2, [0]):
            with refused(errors.UnsupportedError, f"{name} True or False", ".", "Choose"):
                FLAGS[names](classes, **{name: wrong})


def test_numbers_and_flags_of_numpy_are_taken():
    errors.require_flags(one=True, two=np.bool_(False), three=1, four=np.int64(0))


@pytest.mark.parametrize("likelihood", [None, "gaussian", nn.MSELoss()], ids=["None", "text", "loss"])
def test_likelihoods_that_are_none(likelihood):
    with refused(errors.NTKLaplaceError, "a likelihood object", "None|'gaussian'|MSELoss", "Gaussian"):
        ntkl.laplace(network(), (inputs(), ZEROS), likelihood)


# --------------------------------------------------------------------------------------------------------- memory


def test_a_problem_too_large_is_refused_before_it_is_allocated(monkeypatch):
    """Predicted bytes, and which structure would fit: here 60,000 outputs against 43 parameters."""
    from ntk_laplace.runtime import resources

    monkeypatch.setattr(resources, "available_memory", lambda device: 2**20)
    big = inputs(2000), torch.zeros(2000, 3).double()
    with refused(errors.MemoryBudgetError, r"1\.0 MiB", r"MiB|GiB", 'structure="full".* structure="iterative", exact'):
        fit(data=big, structure="gp")
    assert all(fit(data=big, structure=own).num_parameters == 43 for own in ("full", "iterative"))
    # the matrices of "full", of 43 x 43 numbers, do not fit either and are not proposed
    with refused(errors.MemoryBudgetError, "B of", "a predicted need", '^Fit with structure="iterative"'):
        fit(data=big, structure="gp", settings=ntkl.Settings(memory_budget=20_000))


def test_too_many_parameters_are_refused_before_they_are_allocated(monkeypatch):
    from ntk_laplace.runtime import resources

    net = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 3)).double()
    monkeypatch.setattr(resources, "available_memory", lambda device: 2**20)
    with refused(errors.MemoryBudgetError, r"1\.0 MiB", "MiB", 'structure="iterative".* structure="gp"'):
        fit(net, structure="full")
    assert all(fit(net, structure=own).num_parameters == 1603 for own in ("iterative", "gp"))


def test_a_joint_covariance_too_large_is_refused(monkeypatch):
    from ntk_laplace.runtime import resources

    posterior = fit()
    monkeypatch.setattr(resources, "available_memory", lambda device: 2**20)
    with refused(errors.MemoryBudgetError, r"1\.0 MiB", "MiB", "latent_moments"):
        posterior.latent(inputs(500))
    mean, blocks = posterior.latent_moments(inputs(500))
    assert blocks.shape == (500, 3, 3) and mean.shape == (500, 3)


FAR = 10**12
COUNTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "draws of weights": (lambda posterior: posterior.sample(FAR), "draws of 43 weights"),
    "draws of outputs": (lambda posterior: posterior.sample(FAR, inputs()), "draws of 27 outputs"),
    "points of a prediction": (lambda posterior: posterior.predict(inputs(), samples=FAR), "points of f"),
    "points of a bound": (lambda posterior: posterior.elbo(samples=FAR), "points of f"),
    "weights of a bound": (lambda posterior: posterior.elbo("nn", FAR, x=inputs()), f"{FAR:,} weights"),
    "weights of an estimate": (lambda posterior: posterior.importance_evidence(FAR), f"{FAR:,} weights"),
    "orders": (lambda posterior: posterior.conditional_log_marginal_likelihood(4, FAR), "orders of 9 points"),
    "points of a step": (lambda posterior: ntkl.variational(
        network(), (inputs(), labels()), CLASS(), algorithm="lgva", start=10.0, samples=FAR), "points of f"),
}


@pytest.mark.parametrize("case", COUNTS)
def test_counts_that_do_not_fit_in_memory(case, classes):
    verb, what = COUNTS[case]
    with refused(errors.MemoryBudgetError, what, "TiB", "fewer"):
        verb(classes)


def test_draws_within_a_budget():
    """A bound of the risk takes as many at a time as fit; the caller's own draws are refused."""
    data = inputs(), labels()
    few, more = (fit(data=data, likelihood=CLASS(), settings=ntkl.Settings(memory_budget=b)) for b in (2**15, None))
    with refused(errors.MemoryBudgetError, "100 draws of 43 weights to fit into 32.0 KiB", "67.2 KiB", "fewer"):
        few.sample(100)
    unseen = 2.0 * inputs() + 1.0, labels()
    found, wanted = (ntkl.risk_bound(one, unseen, one, draws=100) for one in (few, more))
    assert found.draws == 100 and found.sampled_risk == pytest.approx(wanted.sampled_risk, abs=0.1)


# ---------------------------------------------------------------------------------------------- no silent repair


def test_float32_that_cannot_be_factored_raises_an_error():
    """No jitter: in float32 a curvature of 1e9 beside 1 is lost, and the error names float64 as the way out."""
    torch.manual_seed(5)
    net = network().float()
    prior = ntkl.GaussianPrior(precision=1e-12)
    x, y = inputs(), ZEROS
    with pytest.raises(errors.NTKLaplaceError) as caught:
        posterior = fit(
            net, (x.float(), y.float()), ntkl.Gaussian(noise=1e-8), "full", prior=prior, dtype=torch.float32
        )
        posterior.log_marginal_likelihood()
    assert "float64" in str(caught.value)


def test_every_error_is_of_one_family():
    family = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    for error in family:
        assert issubclass(error, (errors.NTKLaplaceError, Warning))
        assert error.__doc__
    error = errors.TargetError("this", "that", "Do so.")
    assert str(error) == "expected this; got that. Do so."
    assert (error.expected, error.got, error.remedy) == ("this", "that", "Do so.")


def test_numbers_and_objects_of_the_wrong_kind():
    """What torch or Python would say of them in words of their own, somewhere inside."""
    data, likelihood = (inputs(), labels()), ntkl.Categorical()
    gp, kfac = (ntkl.laplace(network(), data, likelihood, structure=name) for name in ("gp", "kfac"))
    for samples in (0, 10.5, "a", True):
        for posterior, method in ((gp, "glm"), (kfac, "glm"), (kfac, "nn")):
            with refused(errors.HyperparameterError, "samples as a whole number, at least 1", ".", "1000"):
                posterior.predict(inputs(), method, samples)
    for count in (-1, 1.5, "a"):
        with refused(errors.HyperparameterError, "count as a whole number", ".", "draws"):
            kfac.sample(count)
    for verb in (lambda: gp.predict(inputs(), generator=3), lambda: kfac.sample(2, generator=3)):
        with refused(errors.UnsupportedError, "torch.Generator", "3", "manual_seed"):
            verb()
    with refused(errors.UnsupportedError, "likelihood object", "3", "Gaussian"):
        gp.predict(inputs(), likelihood=3)
    for device in ("cuda:99", torch.device("cuda:99"), "x"):
        with refused(errors.UnsupportedError, "device that torch can use", "cuda:99|x", "cpu"):
            gp.to(device)
    for seed in (-1, 0.5, 2**70):
        with refused(errors.HyperparameterError, "seed", re.escape(f"{seed}"), "Leave it out"):
            gp.evidence_bound(seed=seed)
    for groups in (None, 1.5, 3):
        with refused(errors.DataError, "groups, each of training points", ".", r"groups=\[\["):
            gp.rerank(inputs(), groups=groups)
    for factors in ("a", None, []):
        with refused(errors.HyperparameterError, "positive finite factors", ".", "logarithms"):
            kfac.evidence_curve(factors)
    with refused(errors.UnsupportedError, "another posterior", "an int", "condition"):
        kfac.merge(5)
    noisy = fit(likelihood=ntkl.Gaussian(torch.full((9, 3), 0.1)))
    with refused(errors.UnsupportedError, "noise per point", "new points", "Fit all points together"):
        noisy.merge(noisy)
    for samples, seed in ((0, 0), ("a", 0), (1, -1)):
        with refused(errors.HyperparameterError, "as a whole number", ".", "CurvatureType"):
            ntkl.CurvatureType("mc", samples, seed)
    for wrong in ({"batch_size": 0}, {"batch_size": "a"}, {"memory_budget": "a"}, {"memory_budget": -1}):
        with refused(errors.HyperparameterError, next(iter(wrong)), ".", "[a-z]"):
            ntkl.Settings(**wrong)
    with refused(errors.UnsupportedError, "Settings object", "3", "batch_size"):
        ntkl.laplace(network(), data, likelihood, settings=3)
    for dtype in ("float64", torch.int32, torch.float16):
        with refused(errors.UnsupportedError, "float64 or torch.float32", ".", "Leave it out"):
            ntkl.laplace(network(), data, likelihood, dtype=dtype)
    for parameters in (3, [3], network()[2]):
        with refused(errors.NetworkError, "names of parameters", "3", "leave"):
            ntkl.laplace(network(), data, likelihood, parameters=parameters)
    with refused(errors.UnsupportedError, "list of structures", "5", "gp"):
        ntkl.compare_evidence(network(), data, likelihood, structures=5)


@pytest.mark.parametrize("sampler", [
    torch.utils.data.WeightedRandomSampler(torch.ones(N), N),
    torch.utils.data.RandomSampler(range(N), replacement=True),
], ids=lambda sampler: type(sampler).__name__)
def test_loaders_that_resample_are_refused(sampler: torch.utils.data.Sampler) -> None:
    """A resample would be taken as the data; weights of examples have a form of their own."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs(), labels()), 4, sampler=sampler)
    for fit in (lambda: ntkl.laplace(network(), loader, ntkl.Categorical()),
                lambda: ntkl.train_with_evidence(network(), loader, ntkl.Categorical(), epochs=1)):
        with refused(ntkl.DataError, "every example once", "with replacement", r"\(X, y, w\)"):
            fit()
    own = inputs(), labels()
    found = ntkl.train_with_evidence(network(), loader, ntkl.Categorical(), epochs=1, evidence_data=own)
    assert found.posterior.num_examples == N  # minibatches alone are resampled


@pytest.mark.parametrize("options", [
    {"batch_size": 4, "drop_last": True},
    {"batch_sampler": torch.utils.data.BatchSampler(range(N), 4, drop_last=True)},
], ids=list)
def test_a_loader_that_drops_examples_warns(options: dict[str, Any]) -> None:
    """Training loaders do; the evidence would be that of fewer examples."""
    loader = DataLoader(TensorDataset(inputs(), labels()), **options)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="leaves out 1 of its examples.*drop_last=True.*without it"):
        assert ntkl.laplace(network(), loader, ntkl.Categorical()).num_examples == N - 1


# ------------------------------------------------------------------------------------------ likelihoods of a user


@pytest.mark.parametrize(("data", "likelihood", "remedy"), [
    ((inputs(), pandas.DataFrame({"time": [1.0] * N, "event": [True] * N})), None, r"frame.to_numpy\(float\)"),
    (None, ntkl.Poisson, r"Call the class: Poisson\(...\)"),
    (None, lambda f, y: f, r"of your own is CustomLikelihood\(log_density\)"),
])
def test_what_a_user_brings_has_the_line_that_mends_it(data, likelihood, remedy):
    with refused(errors.NTKLaplaceError, "targets as one|a likelihood object", ".", remedy):
        fit(data=data, likelihood=likelihood)


def test_data_in_place_of_a_number_are_shown_in_one_line():
    with pytest.raises(errors.HyperparameterError, match=r"at least 1; got \(tensor[^\n]*$"):
        fit().importance_evidence((inputs(), inputs()))


class Alarmed(nn.Linear):
    """A network during whose call an alarm goes off, once it is set."""

    due = False

    def forward(self, x: Tensor) -> Tensor:
        if self.due:
            raise TimeoutError("time is up")
        return super().forward(x)


def test_an_alarm_is_not_about_the_inputs():
    network = Alarmed(2, 1).double()
    posterior = ntkl.laplace(network, (torch.ones(3, 2), torch.ones(3, 1)), ntkl.Gaussian())
    Alarmed.due = True
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            posterior.predict(torch.ones(1, 2))
    finally:
        Alarmed.due = False
