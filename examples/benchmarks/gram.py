"""The empirical NTK's full Gram, ours beside dense Jacobians, nngeometry, neural-tangents and a floor.

Four networks, C=10 outputs, float32: MLP 64-256-256-10 (N=1,000), a CNN on 28 x 28 inputs (conv 8@5, 16@5, fc 32;
N=300), a small ResNet (16/32/64 channels, 32 x 32 inputs, BatchNorm in eval mode; N=32) and a transformer (d=64,
2 layers of 4 heads and width 256, T=16; N=64). One command makes all figures:

    python examples/benchmarks/gram.py --peers-python PEERS/bin/python --nt-python JAX/bin/python

PEERS has ``torch==2.13.0 nngeometry`` (no torchvision); JAX has ``neural-tangents==0.6.5 jax==0.4.23
jaxlib==0.4.23 'numpy<2' 'scipy<1.12'``. Either may be left out.

* ours: ``ntkl.empirical_ntk(network, x)``, the interleaved (N*C, N*C) matrix in float32.
* dense: ``vmap(jacrev)`` one example at a time in chunks, then one matmul per parameter.
* nngeometry: ``GramMatrix`` in one batch, for the MLP and the CNN (the ResNet takes it minutes already at N=8;
  it has no Embedding).
* neural-tangents: the same function in JAX with the same weights, compiled, the faster of structured
  derivatives and Jacobian contraction (structured alone for the MLP).
* floor: the plain dense matmuls ``b @ b.T`` alone, full square, into matrices that are already there.
  MLP: the two hidden layers' output gradients, (N*C x 256) each. CNN: the cheapest exact contraction, rows of
  (N*C x 200) and (N*C x 3,200) for the convolutions, the two small Grams (N x 256), (N*C x 32) of the hidden
  linear layer, (N x 32) of the last. ResNet and transformer: the dense Jacobian's, (N*C x P_layer) per parameter.
* memory: peak of a fresh process above what it held before, for ours and dense (not for the MLP's dense rows).

Ours, dense and the floor take turns in one process; the shortest of ``--repeats`` turns counts. Every peer's
Gram is checked against ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _common import (
    best_times,
    in_process,
    machine,
    parser,
    peak_bytes,
    ratio,
    resident_bytes,
    run_python,
    seconds,
    table,
    write,
)
from _networks import GramCase, gram_case, to_arrays
from torch import Tensor
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = ("mlp", "cnn", "resnet", "transformer")
GOALS = {
    "mlp": "<= 2.1x floor, ahead of all",
    "cnn": "<= 2x floor, ahead of all",
    "resnet": "not slower than dense, less memory",
    "transformer": "not slower than dense, less memory",
}


def ours(case: GramCase) -> Tensor:
    """Our Gram."""
    import ntk_laplace as ntkl

    return ntkl.empirical_ntk(case.network, case.x, dtype=torch.float32)


def dense(case: GramCase, chunk: int = 64) -> Tensor:
    """Gram from dense Jacobians by ``vmap(jacrev)``, contracted parameter by parameter."""
    parameters = {k: v.detach() for k, v in case.network.named_parameters()}
    buffers = dict(case.network.named_buffers())

    def one(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(case.network, (p, buffers), (x[None],))[0]

    with sdpa_kernel(SDPBackend.MATH):  # flash attention has no batching rule
        blocks = [vmap(jacrev(one), (None, 0))(parameters, x) for x in case.x.split(chunk)]
    rows = len(case.x) * next(iter(blocks[0].values())).shape[1]
    gram = torch.zeros(rows, rows)
    for name in parameters:
        jac = torch.cat([block.pop(name).flatten(2).flatten(0, 1) for block in blocks])
        gram.addmm_(jac, jac.T)
    return gram


def floor(case: GramCase, outputs: int = 10) -> Callable[[], None]:
    """The matmuls of the row called ``floor`` above, ready to run."""
    n = len(case.x)
    rows = n * outputs
    shapes = {
        "mlp": [(rows, 256), (rows, 256)],
        "cnn": [(rows, 200), (rows, 3200), (n, 256), (rows, 32), (n, 32)],
    }.get(case.name) or [(rows, p.numel()) for p in case.network.parameters()]
    factors = [torch.randn(shape) for shape in shapes]
    results = {size: torch.empty(size, size) for size in {shape[0] for shape in shapes}}

    def run() -> None:
        for factor in factors:
            torch.mm(factor, factor.T, out=results[len(factor)])

    return run


def corner(gram: Tensor, outputs: int = 10) -> Tensor:
    """The Gram of the first 8 examples."""
    return gram[: 8 * outputs, : 8 * outputs].clone()


def relative(gram: Tensor, reference: Tensor) -> float:
    """Largest difference over largest entry."""
    return ((gram - reference).abs().max() / reference.abs().max()).item()


def measure(case: GramCase, repeats: int) -> dict[str, Any]:
    """Ours, dense and floor in turns; dense of the MLP once: its products are 2 (N C)² P = 1.7e13 operations."""
    tasks: dict[str, Callable[[], Any]] = {"floor": floor(case), "ours": lambda: ours(case)}
    if case.name == "mlp":
        found = best_times(tasks, repeats)
        found |= best_times({"dense": lambda: dense(case)}, 1, warmup=0)
    else:
        found = best_times(tasks | {"dense": lambda: dense(case)}, repeats)
    reference = dense(GramCase(case.name, case.title, case.network, case.x[:8]))
    found["error_ours"] = relative(corner(ours(case)), reference)
    return found


def peers(case: GramCase, options: argparse.Namespace, reference: Tensor) -> dict[str, Any]:
    """The peers in their own interpreters, where they know the network."""
    arrays = to_arrays(case.network) | {"x": case.x.numpy()}
    common = ["--case", case.name]
    found: dict[str, Any] = {}
    if options.peers_python and case.name in ("mlp", "cnn"):
        script = ["_peer_nngeometry.py", *common, "--repeats", "3", "--threads", str(options.threads)]
        answer = run_python(options.peers_python, script, arrays)
        _keep(found, "nngeometry", answer, answer.get("seconds"), reference)
    if options.nt_python and case.name != "transformer":
        script = ["_peer_neural_tangents.py", *common, "--repeats", str(options.repeats)]
        answer = run_python(options.nt_python, script, arrays)
        kinds = [v for k, v in answer.items() if k in ("structured_derivatives", "jacobian_contraction")]
        _keep(found, "neural_tangents", answer, min(kinds, default=None), reference)
    return found


def _keep(found: dict[str, Any], name: str, answer: dict[str, Any], value: float | None, reference: Tensor) -> None:
    """Store a peer's time and its distance to the reference, or say why it has none."""
    if value is None:
        print(f"{name} failed: {answer['error']}")
        return
    found[name] = value
    found[f"error_{name}"] = relative(torch.as_tensor(answer["corner"]), reference)


def memory(name: str, method: str, few: int | None = None) -> int:
    """Peak bytes of one Gram above what the process held before. Run in a fresh process."""
    function = {"ours": ours, "dense": dense}[method]
    case = gram_case(name, few)
    function(GramCase(name, case.title, case.network, case.x[:2]))
    before = resident_bytes()
    function(case)
    return peak_bytes() - before


def row(case: GramCase, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    mine = found["ours"]
    return [
        case.title, *(seconds(found.get(k)) for k in ("dense", "nngeometry", "neural_tangents", "floor")),
        seconds(mine), ratio(mine, found["floor"]), ratio(mine, found["dense"]),
        " / ".join(f"{found[k] / 1e6:.0f}" for k in ("memory_ours", "memory_dense") if k in found) + " MB",
        GOALS[case.name],
    ]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "gram.json")
    arguments.add_argument("--peers-python", help="interpreter that has nngeometry")
    arguments.add_argument("--nt-python", help="interpreter that has neural-tangents")
    arguments.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments.add_argument("--memory-of", nargs=2, metavar=("CASE", "METHOD"), help="print one peak in bytes and stop")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(json.dumps(memory(*options.memory_of)))
        return
    for name, python in (("nngeometry", options.peers_python), ("neural-tangents", options.nt_python)):
        if not python:
            print(f"{name} left out: give its interpreter (see --help)", file=sys.stderr)
    few = 2 if options.small else None
    rows, result = [], {"machine": machine(options.threads)}
    # Children first: on Linux a process's peak begins with its parent's.
    methods = {c: ("ours",) if c == "mlp" else ("ours", "dense") for c in options.cases}
    given = ["--threads", str(options.threads), "--memory-of"]
    peaks = {(c, m): in_process(__file__, [*given, c, m], partial(memory, c, m, few), options.small)
             for c, found in methods.items() for m in found}
    for name in options.cases:
        case = gram_case(name, few)
        found = measure(case, 1 if options.small else options.repeats)
        found |= peers(case, options, corner(ours(case)))
        found |= {f"memory_{method}": peaks[name, method] for method in methods[name]}
        result[name] = found
        rows.append(row(case, found))
        print(f"{case.title}: {json.dumps(found)}", file=sys.stderr, flush=True)
    head = ["network, C=10", "dense", "nngeometry", "neural-tangents", "floor", "ours", "ours/floor", "ours/dense",
            "memory ours / dense", "goal"]
    print("\n" + table(head, rows))
    write(options.out, result)


if __name__ == "__main__":
    main()
