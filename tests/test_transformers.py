"""Networks of transformers, with and without LoRA by peft, as they come: from their configurations, random weights.

Without the extra ``huggingface`` these tests are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ntk_laplace as ntkl
from packages import OnUse
from reference import Dense, differentiate, jacobian

transformers, peft = OnUse("transformers"), OnUse("peft")
C, N, VOCABULARY, LENGTH = 3, 7, 12, 6
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 10, "num_labels": C}
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NAMED = {"output": "logits", "targets": "labels"}


@dataclass(frozen=True)
class Case:
    """A family of networks.

    Attributes
    ----------
    build : callable
    head : str
        Trained beside the adapters.
    adapted : tuple of str
        Endings of names of layers that get adapters; both ways in which releases of transformers name them.
    images : bool
        Whether inputs are images and not tokens.
    dtype : torch.dtype
        Llama computes norms and angles in float32, whatever its weights are.
    tolerance : float
        Of gp against full, and against the dense reference.
    """

    build: Callable[[], nn.Module]
    head: str
    adapted: tuple[str, ...]
    images: bool = False
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9


def bert() -> nn.Module:
    config = transformers.BertConfig(max_position_embeddings=8, **TEXT, **SMALL)
    return transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SMALL))


def gpt2() -> nn.Module:
    shape = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 10}
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(num_labels=C, **shape, **TEXT))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(max_position_embeddings=8, num_key_value_heads=1, **TEXT, **SMALL)
    return transformers.LlamaForSequenceClassification(config)


CASES = {
    "bert": Case(bert, "classifier", ("query", "value")),
    "vit": Case(vit, "classifier", ("query", "value", "q_proj", "v_proj"), images=True),
    "gpt2": Case(gpt2, "score", ("c_attn",)),
    # its norms and rotations are computed in float32 whatever the weights are
    "llama": Case(llama, "score", ("q_proj", "v_proj"), tolerance=1e-7),
}


def network(name: str, lora: bool) -> nn.Module:
    case = CASES[name]
    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = case.build()
        if lora:
            transposed = name == "gpt2"  # its layers hold their weights so
            adapters = {"target_modules": list(case.adapted), "modules_to_save": [case.head]}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                found = peft.get_peft_model(found, peft.LoraConfig(r=2, fan_in_fan_out=transposed, **adapters))
        with torch.no_grad():
            for parameter in found.parameters():  # adapters begin at zero, and heads near it
                parameter.add_(0.2 * torch.randn_like(parameter))
    return found.to(case.dtype).eval()


def rows(name: str, n: int = N) -> list[dict[str, Any]]:
    """Items of a dataset; texts are padded on the right."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(n):
        label = torch.randint(C, (), generator=generator)
        if CASES[name].images:
            found.append({"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": label})
            continue
        mask = (torch.arange(LENGTH) < 2 + i % 5).long()
        words = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator) * mask
        found.append({"input_ids": words, "attention_mask": mask, "labels": label})
    return found


def batch(name: str) -> dict[str, Tensor]:
    return next(iter(DataLoader(rows(name), batch_size=N)))


def fit(name: str, lora: bool, structure: str = "gp", **options: Any) -> ntkl.Posterior:
    loader = DataLoader(rows(name), batch_size=3)
    prior = ntkl.GaussianPrior(3.0)
    return ntkl.laplace(network(name, lora), loader, ntkl.Categorical(), prior, structure, **NAMED, **options)


class Logits(nn.Module):
    """The wrapper that `output` takes the place of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.inner(**inputs).logits


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", CASES)
def test_the_evidence_is_that_of_dense_matrices(name: str, lora: bool) -> None:
    """Function space, weight space, and all matrices written out, from one backward pass per example and class."""
    case, wrapped = CASES[name], Logits(network(name, lora))
    x = {key: value.to(case.dtype) if value.is_floating_point() else value for key, value in batch(name).items()}
    y = x.pop("labels")

    def log_density(f_n: Tensor, y_n: Tensor) -> Tensor:
        return f_n.log_softmax(-1).gather(0, y_n[None]).sum()

    theta = torch.cat([p.detach().flatten() for p in wrapped.parameters() if p.requires_grad]).double()
    parts = differentiate(log_density, wrapped(**x).detach().double(), y)
    dense = Dense(*parts, jacobian(wrapped, x), theta, torch.full_like(theta, 3.0))
    values = [fit(name, lora, structure).log_marginal_likelihood().item() for structure in ("gp", "full")]
    assert values == pytest.approx([dense.evidence().item()] * 2, rel=case.tolerance)


@pytest.mark.parametrize("structure", ["kfac", "diag"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", CASES)
def test_structures_for_many_data(name: str, lora: bool, structure: str) -> None:
    """No layer falls back to dense rows, which would warn; predictions take a batch as the loader gives it."""
    posterior, x = fit(name, lora, structure), batch(name)
    inputs = {key: value for key, value in x.items() if key != "labels"}
    probs = posterior.predict(x).probs
    torch.testing.assert_close(probs.sum(1), torch.ones(N).to(probs))
    torch.testing.assert_close(posterior.predict(inputs).probs, probs)
    wrapped = Logits(network(name, lora))
    expected = ntkl.laplace(wrapped, (inputs, x["labels"]), ntkl.Categorical(), ntkl.GaussianPrior(3.0), structure)
    found = posterior.log_marginal_likelihood().item()
    assert found == pytest.approx(expected.log_marginal_likelihood().item(), rel=CASES[name].tolerance)


def test_tokenizers_and_image_processors_give_mappings_of_their_own() -> None:
    for name, kind in (("bert", transformers.BatchEncoding), ("vit", transformers.BatchFeature)):
        data = kind(batch(name))
        posterior = ntkl.laplace(network(name, True), data, ntkl.Categorical(), ntkl.GaussianPrior(3.0), **NAMED)
        want = fit(name, True)
        torch.testing.assert_close(posterior.log_marginal_likelihood(), want.log_marginal_likelihood())
        torch.testing.assert_close(posterior.predict(data).probs, want.predict(batch(name)).probs)


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing(name: str) -> None:
    """Batches of different lengths, each as long as its longest text."""
    if CASES[name].images:
        return

    def shorter(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(int(item["attention_mask"].sum()) for item in items)
        found = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        return {key: value if key == "labels" else value[:, :longest] for key, value in found.items()}

    loader = DataLoader(rows(name), batch_size=2, collate_fn=shorter)
    posterior = ntkl.laplace(network(name, True), loader, ntkl.Categorical(), ntkl.GaussianPrior(3.0), **NAMED)
    want = fit(name, True).log_marginal_likelihood().item()
    assert posterior.log_marginal_likelihood().item() == pytest.approx(want, rel=CASES[name].tolerance)


def test_a_key_that_forward_does_not_name() -> None:
    """Their `forward` takes any keywords, and would do who knows what with them."""
    for name in ("bert", "vit"):
        data = batch(name) | {"idx": torch.arange(N)}
        with pytest.raises(ntkl.DataError, match="Leave out 'idx', which the network's"):
            ntkl.laplace(network(name, True), data, ntkl.Categorical(), **NAMED)
    with pytest.raises(ntkl.NetworkError, match="got a SequenceClassifierOutput with the tensors 'logits'"):
        ntkl.laplace(network("bert", False), batch("bert"), ntkl.Categorical(), targets="labels")


def test_a_checkpoint_of_adapters(tmp_path: Path) -> None:
    """It is loaded with the network as it was fitted; merged adapters are another network."""
    posterior, path = fit("bert", True, "kfac"), tmp_path / "posterior.pt"
    posterior.save(path)
    loaded = ntkl.load(path, network("bert", True))
    torch.testing.assert_close(loaded.predict(batch("bert")).probs, posterior.predict(batch("bert")).probs)
    with pytest.raises(ntkl.NetworkError, match="a network with the parameters of the fit; got no base_model"):
        ntkl.load(path, network("bert", True).merge_and_unload())


def test_training_adapters_with_evidence() -> None:
    """The labels stay with the likelihood; precisions for each layer are learned."""
    torch.manual_seed(0)
    net = network("bert", True)
    frozen = {name: p.clone() for name, p in net.named_parameters() if not p.requires_grad}
    found = ntkl.train_with_evidence(
        net, DataLoader(rows("bert"), batch_size=4), ntkl.Categorical(), optimizer=torch.optim.Adam, epochs=2,
        schedule=ntkl.EvidenceSchedule(frequency=1, steps=5), **NAMED,
    )
    assert found.history.evidence[-1] > found.history.evidence_before[0]
    assert all(torch.equal(p, frozen[name]) for name, p in net.named_parameters() if name in frozen)
