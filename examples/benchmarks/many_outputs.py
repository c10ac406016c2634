"""The last layer of a thousand classes, exactly and by KFAC, beside laplace-torch.

N=200 examples, C=1,000 classes, D=128 inputs of the layer, P=129,000, float64, prior precision 1; the evidence, and
the probit predictive of 1,000 inputs (laplace-torch: of 2). Each line is a process of its own, on one thread. Seconds
are those of the processor, bytes those above the process's before the fit. Command for all figures:

    python examples/benchmarks/many_outputs.py --peers-python PEERS/bin/python

where PEERS has laplace-torch; without it, its lines are left out. With ``--classes 10`` all structures run, and the
exact ones print the same evidence.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from _common import machine, parser, run_python, seconds, table, write
from _networks import mlp, to_arrays


def main() -> None:
    arguments = parser(__doc__, "many_outputs.json")
    arguments.add_argument("--peers-python", help="an interpreter with laplace-torch")
    arguments.add_argument("--classes", type=int, default=1000)
    arguments.add_argument("--examples", type=int, default=200)
    arguments.add_argument("--inputs", type=int, default=128)
    arguments.add_argument("--test", type=int, default=1000)
    arguments.add_argument("--structures", default="gp,kfac,ekfac,diag")
    arguments.add_argument("--peer-structures", default="kron,diag")
    options = arguments.parse_args()
    if options.small:
        options.classes, options.examples, options.inputs, options.test, options.structures = 4, 10, 4, 3, "gp"
    torch.manual_seed(0)
    widths = (16, options.inputs, options.classes)
    arrays = to_arrays(mlp(widths)) | {
        "widths": np.array(widths), "x": torch.randn(options.examples, 16).double().numpy(),
        "y": torch.randint(options.classes, (options.examples,)).numpy(),
        "x_test": torch.randn(options.test, 16).double().numpy(),
    }
    tasks = [("ntk_laplace", sys.executable, "ours", each) for each in options.structures.split(",")]
    if options.peers_python:
        peers = options.peer_structures.split(",")
        tasks += [("laplace-torch", options.peers_python, "laplace-torch", each) for each in peers]
    found, rows = {}, []
    for name, python, package, structure in tasks:
        result = run_python(python, ["_outputs.py", "--package", package, "--structure", structure], arrays)
        result.pop("probabilities", None)
        found[f"{name} {structure}"] = result
        if "error" in result:
            rows.append([f"{name} {structure}", result["error"].splitlines()[-1][:60], "-", "-", "-", "-"])
            continue
        rows.append([f"{name} {structure}", f"{result['evidence']:,.6f}",
                     seconds(result["fit_seconds"]), _mb(result["fit_bytes"]),
                     seconds(result["predict_seconds"]), _mb(result["predict_bytes"])])
        print(*rows[-1], flush=True)
    head = "posterior", "evidence", "fit and evidence", "memory", "probit, each input", "memory"
    print("\n" + table(head, rows))
    write(options.out, {"machine": machine(1), "widths": widths, "rows": found})


def _mb(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
