"""What each optimization of `ntk_laplace.jacobian.fast` gains over its plain version.

    python examples/benchmarks/optimizations.py

Fits and Gram matrices with the optimization and without it take turns; the shortest processor time of ``--repeats``
turns counts, and memory is the peak above what the process held before. One thread, float32, 10 outputs: an MLP
784-256-256-10, and the CNN and the ResNet of ``gram.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _common import machine, parser, table, write
from _networks import gram_case, mlp

import ntk_laplace as ntkl
from ntk_laplace.jacobian import Block, Dense, JacobianPass, Products, gradients, passes
from ntk_laplace.jacobian.fast import FusedAccumulation
from ntk_laplace.model.network import Network
from ntk_laplace.runtime.linalg import add_outer_lower_
from ntk_laplace.runtime.meter import PeakMemory


def concatenated(blocks: list[Block], dtype: torch.dtype) -> list[Block]:
    """Written-out rows as one matrix; all blocks stay until the end."""
    converted = [block.to(dtype) for block in blocks]
    factors = [block for block in converted if not isinstance(block, Dense)]
    elsewhere = {name for block in factors for name in block.names}
    written = [block for block in converted if isinstance(block, Dense)]
    alone = [block for block in written if block.weight in elsewhere]
    rest = [block for block in written if block.weight not in elsewhere]
    return [*factors, *alone, *([Dense.cat(rest)] if rest else [])]


PLAIN: dict[str, tuple[Any, str, Callable]] = {
    "fused accumulation": (FusedAccumulation, "suits", lambda self, *layer: False),
    "shared products": (Products, "add_to", lambda self, total, rows: add_outer_lower_(total, rows)),
    "side by side": (passes, "side_by_side", concatenated),
    "gradient buffers": (gradients, "gradient_buffer", lambda values, k, axis: values.new_empty(k, *values.shape)),
}
"""Owner and name of each optimization, and its plain version."""


@contextmanager
def plain(name: str) -> Iterator[None]:
    """Run a block with the plain version of an optimization."""
    owner, attribute, version = PLAIN[name]
    fast = getattr(owner, attribute)
    setattr(owner, attribute, version)
    try:
        yield
    finally:
        setattr(owner, attribute, fast)


def fit(network: torch.nn.Module, x: torch.Tensor, structure: str, groups: str = "all") -> Callable[[], Any]:
    """A fit of labels in turn."""
    y, prior = torch.arange(len(x)) % 10, ntkl.GaussianPrior(1.0, groups=groups)
    settings = ntkl.Settings(progress=False, batch_size=128 if groups == "tensor" else None)
    return lambda: ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure=structure, settings=settings)


def measured(task: Callable[[], Any], name: str, repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Processor seconds and peak bytes of a task, fast and plain in turns."""
    seconds, peaks = {"fast": float("inf"), "plain": float("inf")}, {}
    task()
    for _ in range(repeats):
        for version in seconds:
            with PeakMemory(torch.device("cpu")) as memory:
                start = time.process_time()
                if version == "fast":
                    task()
                else:
                    with plain(name):
                        task()
                seconds[version] = min(seconds[version], time.process_time() - start)
            peaks[version] = max(peaks.get(version, 0), memory.bytes)
    return seconds, peaks


def main() -> None:
    """Measure every optimization on the cases that it is for, and print the table."""
    arguments = parser(__doc__, "optimizations.json")
    arguments.add_argument("--examples", type=int, default=5000)
    chosen = arguments.parse_args()
    if chosen.small:
        chosen.examples, chosen.repeats = 20, 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = mlp((16, 8, 8, 10) if chosen.small else (784, 256, 256, 10)).eval()
    x = torch.randn(chosen.examples, network[0].in_features)
    cnn, resnet = (gram_case(name, 4 if chosen.small else None) for name in ("cnn", "resnet"))
    rows_of = JacobianPass(Network(resnet.network), torch.float64)
    images = cnn.x.repeat(max(1, chosen.examples // len(cnn.x) // 4), 1, 1, 1)
    cases = [
        ("fused accumulation", "KFAC, MLP", fit(network, x, "kfac")),
        ("fused accumulation", "diagonal, MLP", fit(network, x, "diag")),
        ("shared products", "KFAC, one precision per tensor, batches of 128, MLP", fit(network, x, "kfac", "tensor")),
        ("side by side", "rows in float64, ResNet", lambda: rows_of.rows(resnet.x)),
        ("gradient buffers", "Gram, CNN", lambda: ntkl.empirical_ntk(cnn.network, cnn.x)),
        ("gradient buffers", "KFAC, CNN", fit(cnn.network, images, "kfac")),
    ]
    rows = []
    for name, what, task in cases:
        seconds, peaks = measured(task, name, chosen.repeats)
        mib = {version: f"{peak / 2**20:,.0f} MiB" for version, peak in peaks.items()}
        rows.append([name, what, f"{seconds['fast']:.2f} s", f"{seconds['plain']:.2f} s",
                     f"{seconds['plain'] / seconds['fast']:.2f}", mib["fast"], mib["plain"]])
    head = ["optimization", "case", "time", "plain", "ratio", "peak", "plain"]
    print(table(head, rows))
    write(chosen.out, {"machine": machine(1), "head": head, "rows": rows})


if __name__ == "__main__":
    main()
