"""Scale on one device: exact evidence at 90,000 and 170,000 rows, 10⁶ rows by products, and what a device does itself.

One run of at most ten minutes on an accelerator of 140 GB; the report is written anew after each part, so that a run
that is cut short leaves what it found:

    python examples/benchmarks/gpu.py                            # all parts, on CUDA
    python examples/benchmarks/gpu.py --device cpu --small       # the same code in seconds
    python examples/benchmarks/gpu.py --parts b1 b2 --minutes 5

* potrf: Cholesky in place of one square matrix by torch, and of its lower triangle in panels of several heights:
  seconds, rate, and the peak beside the matrix.
* solves: torch's triangular solve of a view beside the solve by panels; diagonal blocks of the inverse.
* tiles: one Gram matrix in tiles of several heights.
* digits: a float32 Gram with and without TF32, against float64: smallest eigenvalue of B, error; and whether the
  library refuses.
* b1: n = 90,000 rows (N=10,000, C=10, MLP 3072-2048-1600-10): evidence, and its gradients for a precision per layer.
* b2: n = 170,000 rows, the same network: a square of which does not fit.
* b4: ResNet-18 on 32 x 32 inputs, N = 10,000: one product with JᵀΛJ without kept rows, by torch.func, beside two
  forwards and two backwards of a training step; and 1 and 16 products of the library for 500 examples.
* eigenvalues: `eigvalsh` at sizes around cuSOLVER's limit.
* b3: 1,000,000 rows (N=111,112, C=10) of the MLP by products: evidence, standard error, gradients per layer; and the
  same structure on a small network against the exact weight space.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import machine, parser, table, write
from _networks import mlp, train
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.jacobian.gram import gram, gram_lower
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import cholesky_by_torch_
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.meter import PeakMemory, Stopwatch


@dataclass(frozen=True)
class Sizes:
    """How large each part is."""

    orders: tuple[int, ...] = (20_000, 50_000, 90_000)
    heights: tuple[int, ...] = (2048, 4096, 8192)
    solved: int = 20_000
    eigenvalues: tuple[int, ...] = (16_000, 26_000)
    widths: tuple[int, ...] = (3072, 2048, 1600, 10)
    tiled: int = 2_000
    b1: int = 10_000
    b2: int = 18_888
    b3: int = 111_112
    compared_widths: tuple[int, ...] = (64, 128, 64, 10)
    b4: int = 10_000
    channels: int = 64
    batch: int = 500
    steps: int = 100


SMALL = Sizes(orders=(60,), heights=(20, 60), solved=60, eigenvalues=(30,), widths=(12, 8, 6, 3), tiled=12,
              b1=20, b2=24, b3=40, compared_widths=(12, 4, 3), b4=6, channels=2, batch=3, steps=4)


Found = dict[str, Any]
"""The figures of a part, which stay where it is cut short."""


class OutOfTimeError(Exception):
    """The run's minutes are over."""


# --- what is measured


@contextlib.contextmanager
def measured(device: torch.device, found: dict[str, Any], name: str) -> Iterator[None]:
    """Seconds and peak bytes of a block, under its name."""
    with PeakMemory(device) as memory, Stopwatch(device) as watch:
        yield
    found[name] = {"seconds": watch.seconds, "peak_bytes": memory.bytes}


@contextlib.contextmanager
def set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and put it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def positive(n: int, device: torch.device) -> Tensor:
    """A positive definite matrix of which only the lower triangle counts."""
    matrix = torch.rand(n, n, dtype=torch.float64, device=device)
    matrix.diagonal().add_(n)
    return matrix


def positive_triangle(n: int, height: int, device: torch.device) -> LowerTriangle:
    """The same in panels of rows."""
    rows = [(start, min(start + height, n)) for start in range(0, n, height)]
    panels = [torch.rand(stop - start, stop, dtype=torch.float64, device=device) for start, stop in rows]
    return LowerTriangle(panels).add_to_diagonal_(float(n))


def potrf(sizes: Sizes, device: torch.device, found: Found) -> None:
    """In place or not, how fast, and which panels suit."""
    cholesky_by_torch_(positive(16, device))  # the library's handle, and its workspace
    for n in sizes.orders:
        matrix = positive(n, device)
        with measured(device, found, f"torch, n={n}"):
            cholesky_by_torch_(matrix)
        found[f"torch, n={n}"]["peak_of_matrix"] = _ratio(found[f"torch, n={n}"]["peak_bytes"], matrix.nbytes)
        del matrix
        for height in sizes.heights:
            triangle, name = positive_triangle(n, height, device), f"panels of {height}, n={n}"
            with measured(device, found, name):
                triangle.cholesky_()
            found[name]["peak_of_matrix"] = _ratio(found[name]["peak_bytes"], triangle.nbytes)
            found[name]["bytes"] = triangle.nbytes
            del triangle
        for name, own in found.items():
            if name.endswith(f"n={n}"):
                own["teraflops"] = n**3 / 3 / own["seconds"] / 1e12


def solves(sizes: Sizes, device: torch.device, found: Found) -> None:
    """Whether torch copies a view, and what panels take."""
    n, columns = sizes.solved, 256
    matrix = cholesky_by_torch_(positive(n, device))
    right, view = torch.rand(n, columns, dtype=torch.float64, device=device), matrix[n // 10 :, n // 10 :]
    own = LowerTriangle.of(matrix).trailing(n // 10)
    own.solve_lower_(right[n // 10 :].clone())
    with measured(device, found, "torch on a view"):
        torch.linalg.solve_triangular(view, right[n // 10 :], upper=False)
    with measured(device, found, "panels on a view"):
        own.solve_lower(right[n // 10 :])
    with measured(device, found, "diagonal blocks of the inverse"):
        LowerTriangle.of(matrix).inverse_diagonal(10)
    for each in found.values():
        each["peak_of_matrix"] = _ratio(each["peak_bytes"], matrix.nbytes)


def problem(
    num_examples: int, widths: tuple[int, ...], steps: int, device: torch.device
) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained float32 network with inputs that its classes depend on."""
    torch.manual_seed(0)
    x = torch.randn(num_examples, widths[0], device=device)
    y = (x @ torch.randn(widths[0], widths[-1], device=device)).argmax(1)
    return train(mlp(widths).to(device), x, y, steps=steps), x, y


def tiles(sizes: Sizes, device: torch.device, found: Found) -> None:
    """The Gram matrix of the MLP in tiles and panels of several heights."""
    network, x, _ = problem(sizes.tiled, sizes.widths, 1, device)
    rows = JacobianPass(Network(network), torch.float64).rows(x)
    variances = {name: torch.ones(1, dtype=torch.float64, device=device) for name, _ in network.named_parameters()}
    tile, panel = ("TILE_ROWS", "PANEL_ROWS") if device.type == "cpu" else ("TILE_DEVICE_ROWS", "PANEL_DEVICE_ROWS")
    gram_lower(rows.subset(slice(0, 2)), variances)
    for height in (1024, *sizes.heights):
        with set_to(tuning, tile, height), set_to(tuning, panel, height), measured(device, found, f"tiles of {height}"):
            gram_lower(rows, variances)


def digits(sizes: Sizes, device: torch.device, found: Found) -> None:
    """B from float32 rows, with all digits and with few, against float64."""
    network, x, _ = problem(min(sizes.tiled, 300), sizes.widths, sizes.steps, device)
    rows = JacobianPass(Network(network), torch.float32).rows(x)
    shapes = {name: p.shape for name, p in network.named_parameters()}
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    some = rows.subset(slice(0, 20))
    exact = some.to(torch.float64).dense(shapes).transpose(0, 1).flatten(0, 1)
    whole = exact @ exact.T
    found["largest eigenvalue"] = float(torch.linalg.eigvalsh(whole)[-1])
    for setting in ("ieee", "tf32", "bf16"):
        if setting == "bf16" and device.type == "cuda":
            continue  # no such setting there
        with set_to(backend.matmul, "fp32_precision", setting):
            own = exact.float() @ exact.float().T
            try:
                gram(some, {name: torch.ones(1, device=device) for name in shapes})
                refused = False
            except ntkl.UnsupportedError:
                refused = True
        values = torch.linalg.eigvalsh(own.double() + torch.eye(len(own), dtype=torch.float64, device=device))
        error = float((own.double() - whole).abs().max() / whole.abs().max())
        found[setting] = {"error": error, "smallest eigenvalue of B": float(values[0]), "refused": refused}


def exact(num_examples: int, sizes: Sizes, device: torch.device, found: Found, gradients: bool) -> None:
    """Fit and evidence in function space, then the gradients of a precision per layer."""
    network, x, y = problem(num_examples, sizes.widths, sizes.steps, device)
    prior = ntkl.GaussianPrior(precision=1.0, groups="layer")
    found["P"] = sum(p.numel() for p in network.parameters())
    with measured(device, found, "fit + evidence"):
        posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure="gp")
        value = posterior.log_marginal_likelihood()
    factor = posterior.posterior_precision.factor
    found |= {"n": len(factor), "bytes of the triangle": factor.nbytes, "bytes of a square": len(factor) ** 2 * 8}
    found |= {"evidence": value.item(), "bytes of the rows": posterior.fitted.structure.rows.nbytes}
    if gradients:
        with measured(device, found, "gradients"):
            value.backward()
        found["slopes"] = posterior.prior.log_precision.grad.tolist()


def b1(sizes: Sizes, device: torch.device, found: Found) -> None:
    """Exact evidence with gradients."""
    exact(sizes.b1, sizes, device, found, gradients=True)


def b2(sizes: Sizes, device: torch.device, found: Found) -> None:
    """Exact evidence where no square fits."""
    exact(sizes.b2, sizes, device, found, gradients=False)


def b3(sizes: Sizes, device: torch.device, found: Found) -> None:
    """Evidence by products, and the same on a small network beside weight space."""
    cases = {"small network": sizes.compared_widths, "large network": sizes.widths}
    for name, widths in cases.items():
        network, x, y = problem(sizes.b3, widths, sizes.steps // 4, device)
        own: dict[str, Any] = {"P": sum(p.numel() for p in network.parameters())}
        found[name] = own
        for structure in ("full", "iterative") if name == "small network" else ("iterative",):
            prior, dtype = ntkl.GaussianPrior(precision=1.0, groups="layer"), torch.float64
            if name == "large network":
                dtype = torch.float32  # half the memory of a sketch
            with measured(device, own, structure):
                posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure, dtype=dtype)
                result = posterior.evidence()
            own[structure] |= {"evidence": float(result), "standard_error": result.standard_error,
                               "lower": result.lower, "upper": result.upper}
            with measured(device, own, f"{structure}, gradients"):
                result.value.backward()
            own[f"{structure}, gradients"]["slopes"] = posterior.prior.log_precision.grad.tolist()
            del posterior, result


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm and a shortcut, as in ResNet-18."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False), nn.BatchNorm2d(d_out)
        self.conv2, self.norm2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False), nn.BatchNorm2d(d_out)
        same = stride == 1 and d_in == d_out
        shortcut = nn.Conv2d(d_in, d_out, 1, stride, bias=False), nn.BatchNorm2d(d_out)
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions and the shortcut."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def resnet18(channels: int) -> nn.Module:
    """ResNet-18 for 3 x 32 x 32 inputs; 11,173,962 parameters with 64 channels."""
    widths = [channels * 2**i for i in range(4)]
    blocks: list[nn.Module] = []
    for i, width in enumerate(widths):
        blocks += [Block(widths[max(0, i - 1)], width, 1 if i == 0 else 2), Block(width, width, 1)]
    stem = nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def b4(sizes: Sizes, device: torch.device, found: Found) -> None:
    """One product with JᵀΛJ, streamed, over all examples, beside what training takes for as many."""
    torch.manual_seed(0)
    network = resnet18(sizes.channels).to(device).eval()
    x = torch.randn(sizes.b4, 3, 32, 32, device=device)
    y = torch.randint(10, (sizes.b4,), device=device)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    vector = {name: torch.randn_like(p) for name, p in weights.items()}
    batches = x.split(sizes.batch)

    def training() -> None:
        for part, labels in zip(batches, y.split(sizes.batch), strict=True):
            for _ in range(2):
                nn.functional.cross_entropy(network(part), labels).backward()

    def curved(f: Tensor, pushed: Tensor) -> Tensor:
        p = f.softmax(1)
        return p * (pushed - (p * pushed).sum(1, keepdim=True))

    def product() -> None:
        total = {name: torch.zeros_like(p) for name, p in weights.items()}
        for part in batches:
            f, pushed = jvp(lambda w, part=part: functional_call(network, w, (part,)), (weights,), (vector,))
            _, pull = vjp(lambda w, part=part: functional_call(network, w, (part,)), weights)
            for name, own in pull(curved(f, pushed))[0].items():
                total[name] += own

    def push() -> None:
        for part in batches:
            jvp(lambda w, part=part: functional_call(network, w, (part,)), (weights,), (vector,))

    found["P"] = sum(p.numel() for p in weights.values())
    for name, work in {"two training steps": training, "jvp": push, "product": product}.items():
        work()
        with measured(device, found, name):
            work()
    found["ratio"] = found["product"]["seconds"] / found["two training steps"]["seconds"]
    some, rows = batches[0], JacobianPass(Network(network), torch.float32)
    with torch.no_grad():
        root = ntkl.Categorical().root(network(some), y[: sizes.batch])
    for count in (1, 16):
        vectors = rows.network.shapes.parts(torch.randn(count, found["P"], device=device))
        for _ in range(2):
            with measured(device, found, f"library, {sizes.batch} examples, {count} products"):
                for batch in rows.batches(some, root, None):
                    batch.transposed_products(batch.products(vectors), rows.network.shapes)


def eigenvalues(sizes: Sizes, device: torch.device, found: Found) -> None:
    """Seconds, or the error, of `eigvalsh` in float32, where the limit is the same."""
    for n in sizes.eigenvalues:
        matrix = torch.rand(n, n, device=device)
        try:
            with measured(device, found, f"n={n}"):
                torch.linalg.eigvalsh(matrix, UPLO="L")
        except RuntimeError as error:
            found[f"n={n}"] = {"error": str(error).splitlines()[0][:300]}


PARTS: dict[str, Callable[[Sizes, torch.device, Found], None]] = {
    "potrf": potrf, "solves": solves, "tiles": tiles, "digits": digits, "b1": b1, "b2": b2, "b4": b4,
    "eigenvalues": eigenvalues, "b3": b3,
}


# --- the run


def _ratio(part: int | None, whole: int) -> float | None:
    return None if part is None else part / whole


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block once its seconds are over; between two operations of Python at the earliest."""

    def over(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run(name: str, sizes: Sizes, device: torch.device, end: float) -> dict[str, Any]:
    """The figures of one part, or why there are none."""
    left, begin = end - time.monotonic(), time.monotonic()
    if left <= 0:
        return {"skipped": "no time was left"}
    found: Found = {}
    try:
        with at_most(left):
            PARTS[name](sizes, device, found)
    except OutOfTimeError:
        found["stopped"] = f"after {time.monotonic() - begin:.0f} s, when the run's time was over"
    except Exception as error:  # a part that fails is a finding, and the others go on
        found["error"] = f"{type(error).__name__}: {error}"[:1000]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found | {"seconds of the part": time.monotonic() - begin}


def goals(results: dict[str, Any]) -> list[list[str]]:
    """Each goal beside its figure; a dash where the part did not run."""

    def figure(part: str, *path: str) -> float | None:
        at: Any = results.get(part, {})
        for key in path:
            at = at.get(key) if isinstance(at, dict) else None
        return at

    def line(what: str, value: float | None, most: float, unit: str) -> list[str]:
        if value is None:
            return [what, "-", f"<= {most:g} {unit}", "-"]
        return [what, f"{value:.3g} {unit}", f"<= {most:g} {unit}", "yes" if value <= most else "no"]

    fit, more = figure("b1", "fit + evidence", "seconds"), figure("b1", "gradients", "seconds")
    peaks = [figure("b1", work, "peak_bytes") for work in ("fit + evidence", "gradients")]
    square, rows = figure("b1", "bytes of a square"), figure("b1", "bytes of the rows")
    # the triangle stands before the gradients begin
    held = figure("b1", "bytes of the triangle")
    peak = None
    if square and rows is not None and held is not None and None not in peaks:
        peak = (max(peaks[0], held + rows + peaks[1]) - rows) / square
    error = value = None
    if (value := figure("b3", "large network", "iterative", "evidence")) is not None:
        error = 100 * figure("b3", "large network", "iterative", "standard_error") / abs(value)
    pairs = [figure("b3", "large network", work, "seconds") for work in ("iterative", "iterative, gradients")]
    both = [figure("b3", "small network", structure, "evidence") for structure in ("full", "iterative")]
    gib = figure("b2", "fit + evidence", "peak_bytes")
    return [
        line("B1 fit + evidence", fit, 20, "s"),
        line("B1 with gradients per layer", None if None in (fit, more) else fit + more, 60, "s"),
        line("B1 peak without the rows, over one square B", peak, 1.1, "B"),
        line("B2 fit + evidence", figure("b2", "fit + evidence", "seconds"), 120, "s"),
        line("B2 peak", None if gib is None else gib / 1e9, 140, "GB"),
        line("B3 evidence with gradients per layer", None if None in pairs else sum(pairs), 600, "s"),
        line("B3 standard error", error, 0.5, "%"),
        line("B3 small network, off from weight space",
             None if None in both else 100 * abs(both[1] / both[0] - 1), 1, "%"),
        line("B4 streamed product, over two training steps", figure("b4", "ratio"), 3, "x"),
    ]


def flat(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The figures of a part, one name and one text each."""
    for key, value in found.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from flat(value, f"{name}: ")
        else:
            yield name, f"{value:.4g}" if isinstance(value, float) else f"{value}"


def report(results: dict[str, Any]) -> str:
    """The goals and all figures in Markdown."""
    parts = [table(["goal", "found", "wished", "met"], goals(results["parts"]))]
    for name, found in results["parts"].items():
        parts.append(f"## {name}\n\n" + table(["figure", "value"], [list(pair) for pair in flat(found)]))
    about = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n\n".join([f"# Scale on {results['device']}", about, *parts]) + "\n"


def main() -> None:
    """Run the parts and write what they found."""
    arguments = parser(__doc__, "gpu.json")
    arguments.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    arguments.add_argument("--minutes", type=float, default=9.5, help="of the whole run, at most (default 9.5)")
    arguments.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)
    device, end = torch.device(options.device), time.monotonic() + 60 * options.minutes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    results: dict[str, Any] = {"device": name, "machine": machine(options.threads), "parts": {}}
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
    for part in options.parts:
        print(f"{part} ...", flush=True)
        results["parts"][part] = run(part, SMALL if options.small else Sizes(), device, end)
        # after each part, so that a run that is cut short leaves what it found
        options.out.write_text(json.dumps(results, indent=2) + "\n")
        Path(options.out).with_suffix(".md").write_text(report(results))
    print(report(results))
    write(options.out, results)


if __name__ == "__main__":
    main()
