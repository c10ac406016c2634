"""Laplace-LoRA of a language model on paper: what each structure would take, from the sizes of its adapters alone.

The adapters of queries and values of 32 layers of width 4,096 at rank 8 (those of a 7B model), without the model: each
reads the tokens' embeddings, and their sum goes into four logits. P is that of the real adapters, and so are the bytes
of rows, factors and B, which depend on nothing else. Times are those of the algebra on this machine; the model's own
passes come on top: one forward and R backward passes per example. Command for the table:

    python examples/benchmarks/lora.py
"""

from __future__ import annotations

import torch
from _common import machine, parser, write
from torch import Tensor, nn

import ntk_laplace as ntkl


class Adapters(nn.Module):
    """Low-rank additions to `count` frozen layers, side by side, and frozen logits of four answers."""

    def __init__(self, count: int, width: int, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width).requires_grad_(False)
        self.lora_a = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(count))
        self.lora_b = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(count))
        self.head = nn.Linear(width, 4).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, 4) of tokens (N, T)."""
        x = self.embedding(tokens)
        total = sum(b(a(x)).tanh() for a, b in zip(self.lora_a, self.lora_b, strict=True))
        return self.head(total.mean(1))


def main() -> None:
    arguments = parser(__doc__, "lora.json")
    arguments.add_argument("--modules", type=int, default=64)
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument("--rank", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--examples", type=int, default=1000)
    options = arguments.parse_args()
    if options.small:
        options.modules, options.width, options.tokens, options.examples = 2, 32, 4, 6
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    network = Adapters(options.modules, options.width, options.rank)
    data = torch.randint(16, (options.examples, options.tokens)), torch.randint(4, (options.examples,))
    found = ntkl.plan(network, data, ntkl.Categorical(), structures=["gp", "kfac", ntkl.KFAC(rank=10), "diag"],
                      dtype=torch.float32)
    print(found)
    for row in found.rows:
        print(f"{row.structure}: " + ", ".join(f"{name} {size / 2**20:,.2f} MiB" for name, size in row.stored.items()))
    write(options.out, {"machine": machine(options.threads), "plan": found.to_dataframe().to_dict("records")})


if __name__ == "__main__":
    main()
