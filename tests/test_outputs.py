"""Networks that return more than one tensor (``output=``), and batches that are one mapping (``targets=``).

Each is held to the same network behind a wrapper that returns the tensor alone, fitted to pairs.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ntk_laplace as ntkl
from ntk_laplace.errors import DataError, NetworkError, NTKLaplaceError, UnsupportedError
from ntk_laplace.model.network import Caller, Network
from ntk_laplace.structures.data_passes import ModelSignature
from pairwise import one_each
from reference import Dense, differentiate, jacobian

N, C = 9, 3
Pair = namedtuple("Pair", ["hidden", "logits"])


@dataclass
class Fields:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class ModelOutput(OrderedDict):
    """As transformers has it: a mapping whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str | int]] = {
    "dict": (lambda h, f: {"hidden": h, "logits": f}, "logits"),
    "mapping": (lambda h, f: UserDict(hidden=h, logits=f), "logits"),
    "model output": (lambda h, f: ModelOutput(loss=None, logits=f, hidden=h), "logits"),
    "dataclass": (lambda h, f: Fields(f, h), "logits"),
    "named tuple": (Pair, "logits"),
    "named tuple, by position": (Pair, 1),
    "tuple": (lambda h, f: (h, f), 1),
    "list": (lambda h, f: [f, h], 0),
    "object": (lambda h, f: SimpleNamespace(hidden=h, logits=f), "logits"),
}


class Several(nn.Module):
    """Takes tokens and a mask, and labels too, for a loss that nobody asked for; returns several things."""

    def __init__(self, form: str | None) -> None:
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, C)
        self.form = form

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is None, "the network was given its labels"
        hidden = torch.tanh(self.first((self.words(words) * mask[..., None]).sum(1)))
        outputs = self.last(hidden)
        return outputs if self.form is None else FORMS[self.form][0](hidden, outputs)


def several(form: str | None) -> Several:
    torch.manual_seed(3)
    return Several(form).double().eval()


def inputs(n: int = N, seed: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(7, (n, 6), generator=generator)
    return {"words": words, "mask": (torch.rand(n, 6, generator=generator) < 0.8).double()}


def labels(n: int = N, seed: int = 5) -> Tensor:
    return torch.randint(C, (n,), generator=torch.Generator().manual_seed(seed))


def rows(n: int = N) -> list[dict[str, Tensor]]:
    """Items of a dataset."""
    x, y = inputs(n), labels(n)
    return [{"words": x["words"][i], "labels": y[i], "mask": x["mask"][i]} for i in range(n)]


class Jacobian(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return rows()[index]


def prior() -> ntkl.GaussianPrior:
    return ntkl.GaussianPrior(2.0, groups="layer")


NAMED: dict[str, Any] = {"output": "logits", "targets": "labels"}


def fit(structure: str = "gp", form: str = "dict", data: Any = None, **options: Any) -> ntkl.Posterior:
    """Of the network that returns several things, from a loader of dicts."""
    data = DataLoader(rows(), batch_size=4) if data is None else data
    options = NAMED | {"output": FORMS[form][1]} | options
    return ntkl.laplace(several(form), data, ntkl.Categorical(), prior(), structure, **options)


def plain(structure: str = "gp", **options: Any) -> ntkl.Posterior:
    """Of the network that returns its outputs alone, from a pair."""
    return ntkl.laplace(several(None), (inputs(), labels()), ntkl.Categorical(), prior(), structure, **options)


def close(one: Tensor, other: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def same(one: ntkl.Posterior, other: ntkl.Posterior) -> None:
    """Evidence and predictions."""
    close(one.log_marginal_likelihood(correction=True), other.log_marginal_likelihood(correction=True))
    for ours, theirs in zip(one.latent_moments(inputs(4, 8)), other.latent_moments(inputs(4, 8)), strict=True):
        close(ours, theirs)


# --- the fit


@pytest.mark.parametrize("form", FORMS)
def test_the_named_output_of_any_return_type_is_linearized(form: str) -> None:
    """Against dense matrices of the wrapped network, in function space and in weight space."""
    network = several(None)
    x, y = inputs(), labels()
    jac, f = jacobian(network, x), network(**x).detach()

    def log_density(f_n: Tensor, y_n: Tensor) -> Tensor:
        return f_n.log_softmax(-1).gather(0, y_n[None]).sum()

    theta = torch.cat([p.detach().flatten() for p in network.parameters()])
    dense = Dense(*differentiate(log_density, f, y), jac, theta, torch.full_like(theta, 2.0))
    for structure in ("gp", "full"):
        posterior = fit(structure, form)
        for correction in (False, True):
            found = posterior.log_marginal_likelihood(correction)
            torch.testing.assert_close(found, dense.evidence(correction), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag"])
def test_every_structure_gives_what_the_wrapped_network_gives(structure: str) -> None:
    same(fit(structure), plain(structure))


DATA: dict[str, Callable[[], Any]] = {
    "a loader": lambda: DataLoader(rows(), batch_size=2),
    "a dataset": Jacobian,
    "a dict": lambda: inputs() | {"labels": labels()},
    "a mapping": lambda: UserDict(inputs() | {"labels": labels()}),
    "a dict of lists": lambda: {key: value.tolist() for key, value in (inputs() | {"labels": labels()}).items()},
    "a loader of mappings": lambda: DataLoader(rows(), 5, collate_fn=lambda items: UserDict(stacked(items))),
    "a loader of pairs": lambda: DataLoader([({k: r[k] for k in ("words", "mask")}, r["labels"]) for r in rows()]),
    "a pair whose inputs have them too": lambda: (inputs() | {"labels": labels()}, labels()),
}


def stacked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


@pytest.mark.parametrize(
    ("data", "structure"), [*((data, "kfac") for data in DATA), *one_each(DATA, ["gp", "full"])]
)
def test_batches_that_are_one_mapping(data: str, structure: str) -> None:
    """The exact weight space and KFAC read them again: for the correction, and at another temperature."""
    posterior, expected = fit(structure, data=DATA[data]()), plain(structure)
    same(posterior, expected)
    for one in (posterior, expected):
        one.likelihood.temperature = 1.4
    same(posterior, expected)


class Anything(nn.Module):
    """The wrapper that people write around a network of several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = several("dict")

    def forward(self, **batch: Tensor) -> Tensor:
        return self.inner(**batch)["logits"]


class Adapted(nn.Module):
    """As peft wraps a network: anything is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = several("dict")

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(("network", "output"), [(Anything, None), (Adapted, "logits")])
def test_wrappers_that_take_anything(network: Callable[[], nn.Module], output: str | None) -> None:
    data = DataLoader(rows(), batch_size=4)
    found = ntkl.laplace(network().eval(), data, ntkl.Categorical(), prior(), output=output, targets="labels")
    same(found, plain())


def test_a_network_around_data_parallel_is_called_as_the_one_inside() -> None:
    found = Caller(nn.DataParallel(several("dict")), "logits", "labels")(inputs() | {"labels": labels()})
    torch.testing.assert_close(found, several(None)(**inputs()))


class Recurrent(nn.Module):
    """No rule covers it: its rows come from torch.func, which meets the dict as well."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, C)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        states, _ = self.cells(x)
        return {"states": states, "logits": self.last(states[:, -1])}


@pytest.mark.filterwarnings("ignore:no factor rule covers")
def test_layers_without_a_rule() -> None:
    torch.manual_seed(0)
    network, x = Recurrent().double().eval(), torch.randn(N, 4, 2).double()
    data, likelihood = {"x": x, "y": labels()}, ntkl.Categorical()
    gp, full = (
        ntkl.laplace(network, data, likelihood, structure=structure, output="logits", targets="y")
        for structure in ("gp", "full")
    )
    close(gp.log_marginal_likelihood(), full.log_marginal_likelihood(), 1e-9)

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)["logits"]

    close(ntkl.empirical_ntk(network, x, output="logits"), ntkl.empirical_ntk(Alone(), x))


# --- what the posterior does later


def test_inputs_may_contain_the_labels() -> None:
    """As a batch of the loader does; those of new data may be missing, or be nonsense."""
    posterior, x = fit(), inputs(4, 8)
    expected = posterior.predict(x).probs
    for there in (labels(4), torch.full((4,), -100), torch.full((4,), torch.nan)):
        full = x | {"labels": there}
        close(posterior.predict(full).probs, expected)
        close(posterior.latent(full).mean, posterior.latent(x).mean)
        close(posterior.explain(full).f, posterior.explain(x).f)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
def test_the_output_name_applies_to_every_method() -> None:
    """Copies, what-ifs, weight draws, the network that follows a what-if, and both models of GPyTorch."""
    x = inputs(4, 8)
    found, expected = fit(), plain()
    same(copy.deepcopy(found), expected)
    same(pickle.loads(pickle.dumps(found)), expected)
    for method in ("map", "probit", "blr"):
        close(found.predict(x, method=method).probs, expected.predict(x, method=method).probs)
    close(*(one("full").predict(x, "nn", 5, generator=torch.Generator().manual_seed(0)).probs for one in (fit, plain)))
    close(found.leave_one_out().suspicion, expected.leave_one_out().suspicion)
    close(found.explain(x).contributions, expected.explain(x).contributions)
    changed = [one.remove([1, 4]) for one in (found, expected)]
    close(*(one.latent_moments(x)[0] for one in changed))
    added = [one.add(more, labels(4)) for one, more in ((found, x | {"labels": labels(4)}), (expected, x))]
    close(*(one.latent_moments(x)[0] for one in added))
    moved = [one.relinearize(inputs()) for one in changed]
    close(*(one.network.theta for one in moved), 1e-9)
    close(*(one.latent_moments(x)[1] for one in moved), 1e-9)
    models = [ntkl.gp.LaplaceGP(one).eval() for one in (found, expected)]
    close(*(model(x).covariance_matrix for model in models))


@pytest.mark.filterwarnings("ignore:the precisions of it")
def test_more_data_come_as_the_first_did() -> None:
    """`condition` and `merge` against the fit to all of the data, and test data for `compare_models`."""
    all_rows = rows(N + 4)
    first, second = (DataLoader(part, batch_size=4) for part in (all_rows[:N], all_rows[N:]))
    want = fit(data=DataLoader(all_rows, batch_size=4))
    first, other = fit(data=first), fit(data=DataLoader(all_rows[N:], batch_size=3))
    for found in (first.condition(second), first.merge(other)):
        close(found.log_marginal_likelihood(), want.log_marginal_likelihood())
    whole = stacked(all_rows[N:])
    pair = {key: whole[key] for key in ("words", "mask")}, whole["labels"]
    scores = [
        ntkl.compare_models({"it": one}, test=data, conditional="none").rows[0].test_log_likelihood
        for one, data in ((plain(), pair), (fit(), second), (fit(), whole), (fit(), {"it": whole}))
    ]
    assert scores[1:] == pytest.approx(scores[:1] * 3, rel=1e-9)


def test_two_outputs_of_one_network_are_two_models() -> None:
    """The digest of the weights does not tell them apart: what is merged or resumed must."""
    one, other = fit(), fit(output="hidden", data=(inputs(), labels()))
    with pytest.raises(UnsupportedError, match="one trained network"):
        one.merge(other)
    names = [ModelSignature(posterior.fitted.model)["network"] for posterior in (one, other, plain())]
    assert len(set(names)) == 3


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_a_checkpoint_knows_the_output_and_the_targets(structure: str, tmp_path: Path) -> None:
    posterior, path = fit(structure), tmp_path / "posterior.pt"
    posterior.save(path, include_data=True)
    saved = torch.load(path, weights_only=True)
    assert (saved["output"], saved["targets"]) == ("logits", "labels")
    loaded = ntkl.load(path, several("dict"))
    for one, other in zip(loaded.latent_moments(inputs(4)), posterior.latent_moments(inputs(4)), strict=True):
        close(one, other)
    same(ntkl.load(path, several("dict"), data=DataLoader(rows(), batch_size=5)), posterior)
    del saved["output"], saved["targets"]  # of a file that was written before they were
    torch.save(saved, path)
    same(ntkl.load(path, several(None), data=(inputs(), labels())), posterior)


@pytest.mark.slow
def test_training_with_evidence() -> None:
    """Minibatches and evidence both, from a loader and from one dict; it resumes with the same output alone."""

    def train(network: nn.Module, data: Any, **options: Any) -> ntkl.EvidenceTraining:
        torch.manual_seed(0)
        return ntkl.train_with_evidence(
            network, data, ntkl.Categorical(), structure="kfac", optimizer=torch.optim.Adam, epochs=3, batch_size=4,
            schedule=ntkl.EvidenceSchedule(frequency=1, steps=2), **options,
        )

    pairs = DataLoader([({key: row[key] for key in ("words", "mask")}, row["labels"]) for row in rows()], batch_size=4)
    want = train(several(None), pairs)
    found = train(several("dict"), DataLoader(rows(), batch_size=4), **NAMED)
    assert found.history.evidence == pytest.approx(want.history.evidence, rel=1e-11)
    assert found.history.loss == pytest.approx(want.history.loss, rel=1e-11)
    same(found.posterior, want.posterior)
    want = train(several(None), (inputs(), labels()))
    whole = inputs() | {"labels": labels()}
    for data in (whole, UserDict(whole), (whole, labels())):
        found = train(several("tuple"), data, output=1, targets="labels")
        assert found.history.evidence == pytest.approx(want.history.evidence, rel=1e-11)
    def stop(state: ntkl.TrainingState) -> None:
        if state.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(ntkl.TrainingInterrupted) as caught:
        train(several("tuple"), whole, output=1, targets="labels", callbacks=stop)
    with pytest.raises(UnsupportedError, match="to resume with the output"):
        train(several("tuple"), whole, output=0, targets="labels", settings=ntkl.Settings(resume=caught.value.state))


@pytest.mark.slow
def test_comparisons_of_structures() -> None:
    found = ntkl.compare_evidence(several("dict"), DataLoader(rows(), batch_size=4), ntkl.Categorical(), prior(),
                                  ["gp", "kfac"], **NAMED)
    assert found["gp"].evidence == pytest.approx(plain().log_marginal_likelihood().item(), rel=1e-11)
    assert found["kfac"].evidence == pytest.approx(plain("kfac").log_marginal_likelihood().item(), rel=1e-11)


class Vectors(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, super().forward(x)


def test_kernels_alone() -> None:
    layers = nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)
    network, bare = Vectors(*layers).double(), nn.Sequential(*layers).double()
    x = torch.randn(5, 4).double()
    close(ntkl.empirical_ntk(network, x, output=1), ntkl.empirical_ntk(bare, x))
    close(ntkl.gp.NTKKernel(network, output=1)(x).to_dense(), ntkl.gp.NTKKernel(bare)(x).to_dense())


# --- what is refused


class OneInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class TwoInputs(nn.Linear):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a) + b


class Nothing(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, str]:
        return {"answer": "no tensor"}


def numbers() -> Tensor:
    return torch.ones(N, 4)


WITH_LABELS = "a dict with the keys 'words', 'mask', 'labels'"
REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Any, dict[str, Any]]], type[NTKLaplaceError], str]] = {
    "several outputs": (
        lambda: (several("dict"), DATA["a dict"](), {"targets": "labels"}), NetworkError,
        "network outputs as one tensor; got a dict with the tensors 'hidden', 'logits'. Name the outputs to "
        "linearize, output='logits'.",
    ),
    "outputs that are None do not count": (
        lambda: (several("dataclass"), DATA["a dict"](), {"targets": "labels"}), NetworkError,
        "got a Fields with the tensors 'logits', 'hidden'. Name the outputs to linearize, output='logits'.",
    ),
    "a tuple": (
        lambda: (several("tuple"), DATA["a dict"](), {"targets": "labels"}), NetworkError,
        "got a tuple with the tensors 0, 1. Name the outputs to linearize, output=0.",
    ),
    "a named tuple": (
        lambda: (several("named tuple"), DATA["a dict"](), {"targets": "labels"}), NetworkError,
        "got a Pair with the tensors 'hidden', 'logits'. Name the outputs",
    ),
    "an object": (
        lambda: (several("object"), DATA["a dict"](), {"targets": "labels"}), NetworkError,
        "got a SimpleNamespace with the tensors 'hidden', 'logits'. Name",
    ),
    "no tensor at all": (
        lambda: (Nothing(4, 3), (numbers(), labels()), {}), NetworkError,
        "got a dict without tensors. Wrap the network in a module that returns one row of outputs per example.",
    ),
    "another name": (
        lambda: (several("dict"), DATA["a dict"](), NAMED | {"output": "scores"}), NetworkError,
        "expected a tensor 'scores' in what the network returns; got a dict with the tensors 'hidden', 'logits'. "
        "Name the outputs to linearize, output='logits'.",
    ),
    "a name that is no tensor": (
        lambda: (several("dataclass"), DATA["a dict"](), NAMED | {"output": "loss"}), NetworkError,
        "expected a tensor 'loss' in what the network returns; got a Fields with",
    ),
    "the name of a method": (
        lambda: (several("tuple"), DATA["a dict"](), NAMED | {"output": "count"}), NetworkError,
        "expected a tensor 'count' in what the network returns; got a tuple with the tensors 0, 1",
    ),
    "a position behind the end": (
        lambda: (several("tuple"), DATA["a dict"](), NAMED | {"output": 2}), NetworkError,
        "expected a tensor 2 in what",
    ),
    "an output of a tensor": (
        lambda: (several(None), DATA["a dict"](), NAMED | {"output": 0}), NetworkError,
        "a network that returns several outputs, to take output=0 of; got a Tensor of shape (4, 3). Leave output= out.",
    ),
    "an attribute of a tensor": (
        lambda: (OneInput(4, 3), (numbers(), labels()), {"output": "data"}), NetworkError, "Leave output= out.",
    ),
    "an output with an axis too many": (
        lambda: (Vectors(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)), (numbers(), labels()), {"output": 1}),
        NetworkError, "network outputs of shape (4, C) or (4,), floating point; got (4, 2, 3)",
    ),
    "an output of no kind": (
        lambda: (several("dict"), DATA["a dict"](), {"output": 1.5}), NetworkError,
        "output= as the name of one of the network's outputs, or its position; got 1.5. Pass for instance",
    ),
    "an output True": (
        lambda: (several("dict"), DATA["a dict"](), {"output": True}), NetworkError, "got True. Pass for instance",
    ),
    "targets of no kind": (
        lambda: (several("dict"), DATA["a dict"](), {"targets": 3}), NetworkError,
        'targets= as the key of the targets in a batch; got 3. Pass for instance targets="labels".',
    ),
    "a mapping alone": (
        lambda: (several("dict"), DATA["a dict"](), {"output": "logits"}), DataError,
        f"batches that are pairs (inputs, targets); got {WITH_LABELS}. Name the key of the targets, targets='labels'",
    ),
    "a loader of mappings alone": (
        lambda: (several("dict"), DATA["a loader of mappings"](), {"output": "logits"}), DataError,
        "batches that are pairs (inputs, targets); got a UserDict with the keys 'words', 'labels', 'mask'. Name the",
    ),
    "two keys are no pair": (
        lambda: (OneInput(4, 3), DataLoader([{"x": numbers()[0], "target": 1}]), {}), DataError,
        "got a dict with the keys 'x', 'target'. Name the key of the targets, targets='target' for instance.",
    ),
    "no such targets": (
        lambda: (several("dict"), DATA["a dict"](), NAMED | {"targets": "label"}), DataError,
        f"expected targets under the key 'label' of each batch; got {WITH_LABELS}. Name the key",
    ),
    "targets missing in a later batch": (
        lambda: (several("dict"), DataLoader([*rows()[:4], *({k: r[k] for k in ("words", "mask")} for r in rows()[4:])],
                                             batch_size=4), NAMED), DataError,
        "expected targets under the key 'labels' of each batch; got a dict with the keys 'words', 'mask'.",
    ),
    "targets that are names": (
        lambda: (OneInput(4, 3), {"x": numbers(), "y": list("abcabcabc")}, {"targets": "y"}), DataError,
        "expected targets under the key 'y' as one tensor or array of numbers; got a list. Number classes from 0",
    ),
    "targets alone": (
        lambda: (OneInput(4, 3), {"y": labels()}, {"targets": "y"}), DataError,
        "expected inputs that are a tensor",
    ),
    "as many as there are inputs": (
        lambda: (OneInput(4, 3), {"x": numbers(), "y": labels(5)}, {"targets": "y"}), DataError,
        "expected as many targets as inputs; got 9 inputs and targets of shape (5,)",
    ),
    "a key too many": (
        lambda: (several("dict"), DATA["a dict"]() | {"idx": torch.arange(N)}, NAMED), DataError,
        "Leave out 'idx', which the network's forward() does not name.",
    ),
    "a key too many, which is no tensor": (
        lambda: (several("dict"), DATA["a dict"]() | {"text": list("abcdefghi")}, NAMED), DataError,
        "Leave out 'text', which the network's forward() does not name.",
    ),
    "other keys": (
        lambda: (OneInput(4, 3), {"image": numbers(), "y": labels()}, {"targets": "y"}), DataError,
        "Its forward() names none of these keys and was given the dict: rename them, or wrap the network.",
    ),
    "a key too few": (
        lambda: (TwoInputs(4, 3), {"a": numbers(), "y": labels()}, {"targets": "y"}), DataError,
        "missing 1 required positional argument: 'b'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unreadable_data_raise_a_clear_error(case: str) -> None:
    make, kind, words = REFUSED[case]
    network, data, options = make()
    with pytest.raises(kind, match=re.escape(words)) as caught:
        ntkl.laplace(network.eval(), data, ntkl.Categorical(), **options)
    assert re.fullmatch(r"expected .+; got .+\. [A-Z].+\.", str(caught.value), re.DOTALL)


def test_an_extra_key_in_later_inputs_raises_an_error_with_the_keys_of_the_fit() -> None:
    with pytest.raises(DataError, match="Give it the keys 'words', 'mask'"):
        fit().predict(inputs(4) | {"idx": torch.arange(4)})


def test_training_refuses_batches_without_targets_before_the_first_epoch() -> None:
    def train(**options: Any) -> None:
        ntkl.train_with_evidence(several("dict"), DataLoader(rows(), batch_size=4), ntkl.Categorical(),
                                 optimizer=torch.optim.Adam, epochs=1, **options)

    with pytest.raises(DataError, match="Name the key of the targets, targets='labels'"):
        train(output="logits")
    with pytest.raises(NetworkError, match="output='logits'"):
        train(targets="labels")


def modes(module: nn.Module) -> Iterator[bool]:
    return (part.training for part in module.modules())


def test_the_network_is_unchanged() -> None:
    network = several("dict")
    before = copy.deepcopy(network.state_dict()), list(modes(network))
    ntkl.laplace(network, DATA["a loader"](), ntkl.Categorical(), **NAMED).predict(inputs(4))
    assert list(modes(network)) == before[1] and all(p.grad is None for p in network.parameters())
    assert all(torch.equal(value, before[0][name]) for name, value in network.state_dict().items())


def test_a_network_keeps_its_options() -> None:
    network = Network(several("dict"), None, "logits", "labels")
    for one in (network, network.at(network.theta + 1), copy.deepcopy(network)):
        assert (one.output, one.targets) == ("logits", "labels")
        assert one.without_grad(inputs() | {"labels": labels()}).shape == (N, C)
