"""Language models of transformers with adapters of peft, in 16 bits and at their start; random weights, no download."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from packages import OnUse
from pairwise import one_each
from reference import relative_error

transformers, peft = OnUse("transformers"), OnUse("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class NextToken(nn.Module):
    """Logits of four tokens behind the prompt, as a multiple choice is scored."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, -1, 7:11]


def llama(base: torch.dtype, adapters: torch.dtype = torch.float32, zero: bool = False) -> nn.Module:
    """Two layers with adapters on queries and values; equal weights whatever their types."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=60, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        low_rank = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), low_rank)
        for name, parameter in model.named_parameters():
            if "lora_B" in name and not zero:
                parameter.data = 0.3 * torch.randn_like(parameter)
            numbers = parameter.data.bfloat16().to(base)
            parameter.data = numbers.to(adapters) if "lora_" in name else numbers
    return NextToken(model).eval()


@functools.cache
def data() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, 60, (24, 6), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::3, :2] = 0
    return {"input_ids": tokens, "attention_mask": mask}, torch.randint(0, 4, (24,), generator=generator)


@functools.cache
def in_32_bits(structure: str) -> ntkl.Posterior:
    return fit(llama(torch.float32), structure)


def fit(network: nn.Module, structure: str) -> ntkl.Posterior:
    return ntkl.laplace(network, data(), ntkl.Categorical(), structure=structure)


TYPES = {
    "bf16 base": (torch.bfloat16, torch.float32),
    "f16 base": (torch.float16, torch.float32),
    "all bf16": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "types"), [*itertools.product(["gp", "kfac"], TYPES), *one_each(["full", "ekfac", "diag"], TYPES)]
)
def test_a_base_in_16_bits(types, structure):
    """Within rounding of the float32 run, and without a fallback, which would be a warning."""
    exact, found = in_32_bits(structure), fit(llama(*TYPES[types]), structure)
    assert relative_error(found.log_det(), exact.log_det()) < 2e-2
    assert relative_error(found.log_marginal_likelihood(), exact.log_marginal_likelihood()) < 5e-3
    x = {name: values[:5] for name, values in data()[0].items()}
    assert relative_error(found.predict(x).probs, exact.predict(x).probs) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_under_autocast(structure):
    network = llama(torch.float32)
    exact = fit(network, structure)
    with torch.autocast("cpu", torch.bfloat16):
        found = fit(network, structure)
    assert relative_error(found.log_det(), exact.log_det()) < 2e-2


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "ekfac", "diag"])
def test_adapters_at_their_start(structure, base):
    """B = 0: the rows of A are zero, and those of B are all that counts."""
    network = llama(base, zero=True)
    found = fit(network, structure).log_det()
    only = [name for name, _ in network.named_parameters() if "lora_B" in name]
    alone = ntkl.laplace(network, data(), ntkl.Categorical(), structure=structure, parameters=only).log_det()
    assert relative_error(found, alone) < 1e-9


@pytest.mark.slow
def test_two_spaces_agree():
    network = llama(torch.bfloat16)
    one, other = fit(network, "gp").log_marginal_likelihood(), fit(network, "full").log_marginal_likelihood()
    assert relative_error(one, other) < 1e-3  # batches of another size round in another way
