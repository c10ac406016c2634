"""How far are the structures from the exact information matrix? [S20] table 4 and figure 13 on real regressions.

    python examples/structures/frobenius.py [--data DIR] --out frobenius

Networks with one hidden layer of 50 ReLU units are trained on standardised data; DIR holds ``boston.npz`` and the like
(arrays ``X``, ``y``, ``train_idx_0`` ...), without it data that scikit-learn ships are taken (for wine, its proline is
the response). The exact matrix I = JᵀΛJ is built from dense Jacobians by ``torch.func``, apart from the library.
For each structure the table holds, over several splits,
* whole: ‖I - Î‖ / ‖I‖ in the Frobenius norm, I with everything between the layers;
* layers: the same with I's own blocks, one per layer (weight and bias), as [S20] has it;
* off-diagonal: the same without the diagonals, [S20]'s table 4, where the diagonal's error is 1 by definition.
INF is [S20]'s own: its matrix keeps the exact diagonal even where the correction becomes negative, which lemma 3 asks
not to happen; the script counts where it does, and shows beside it the library's default, whose low-rank part is
shrunk there. Checked, for every network: ‖I - I_inf‖ <= ‖I - I_efb‖ <= ‖I - I_kfac‖ at full rank (lemmas 1 and 2).
It writes frobenius.json, frobenius.png and eigenvalues.png.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _shared import machine, mlp, parser, table, train, write
from matplotlib.figure import Figure
from sklearn import datasets
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import ntk_laplace as ntkl

NOISE, PRECISION = 0.1, 1.0
UCI = ("boston", "concrete", "energy", "yacht")
SHIPPED = ("diabetes", "linnerud", "wine")
RANKS = (1.0, 0.75, 0.5, 0.25, 0.05, 0.01)
STRUCTURES: dict[str, Any] = {
    "diag": "diag",
    "kfac": "kfac",
    "ekfac": "ekfac",
    **{f"inf {rank:.0%}": ntkl.INF(rank=rank, violation="raise") for rank in RANKS},
    "inf 100% shrunk": ntkl.INF(rank=1.0),
}
# lemmas 1 and 2 compare numbers that may be equal: what rounding may add, relative to ‖I‖
ROUNDING = 1e-10


def raw(name: str, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, d) and responses (N, C)."""
    if folder is not None:
        with np.load(folder / f"{name}.npz") as found:
            return found["X"], found["y"].reshape(len(found["X"]), -1)
    if name == "wine":
        data = datasets.load_wine().data
        return data[:, :-1], data[:, -1:]
    found = {"diabetes": datasets.load_diabetes, "linnerud": datasets.load_linnerud}[name]()
    return found.data, found.target.reshape(len(found.data), -1)


def split(name: str, folder: Path | None, number: int) -> tuple[Tensor, Tensor]:
    """Training inputs and responses of one split, standardised."""
    x, y = raw(name, folder)
    if folder is not None:
        with np.load(folder / f"{name}.npz") as found:
            index = found[f"train_idx_{number}"]
    else:
        index = np.random.default_rng(number).permutation(len(x))[: int(0.9 * len(x))]
    x, y = x[index], y[index]
    spread = x.std(0)
    x = (x - x.mean(0)) / np.where(spread > 0, spread, 1.0)
    return torch.as_tensor(x), torch.as_tensor((y - y.mean(0)) / y.std(0))


def exact(network: nn.Module, x: Tensor) -> Tensor:
    """JᵀΛJ with Λ = 1/σ², (P, P), from dense Jacobians: nothing of the library takes part."""
    parameters = {k: v.detach() for k, v in network.named_parameters()}

    def outputs(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(network, p, (one.unsqueeze(0),)).squeeze(0)

    jacobian = vmap(jacrev(outputs), (None, 0))(parameters, x)
    rows = torch.cat([jacobian[k].flatten(2) for k in parameters], 2).flatten(0, 1)
    return rows.T @ rows / NOISE


def layers(network: nn.Module) -> dict[str, Tensor]:
    """Where the parameters of each layer stand in the flat order."""
    found: dict[str, list[Tensor]] = {}
    start = 0
    for name, parameter in network.named_parameters():
        found.setdefault(name.rpartition(".")[0], []).append(torch.arange(start, start + parameter.numel()))
        start += parameter.numel()
    return {name: torch.cat(parts) for name, parts in found.items()}


def structured(network: nn.Module, x: Tensor, y: Tensor, structure: Any, precision: float) -> Tensor:
    """The structure's approximation of JᵀΛJ, (P, P)."""
    prior = ntkl.GaussianPrior(precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # of shrinking, which is what is looked at here
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=NOISE), prior, structure)
    return posterior.posterior_precision.information()


def errors(information: Tensor, estimate: Tensor, places: dict[str, Tensor]) -> dict[str, float]:
    """Normalised Frobenius errors: whole, over the layers' blocks, without the diagonals, and layer by layer."""
    gap = information - estimate
    found = {"whole": (gap.norm() / information.norm()).item()}
    squares = {"error": 0.0, "size": 0.0, "off": 0.0, "off_size": 0.0}
    for name, index in places.items():
        block, own = gap[index][:, index], information[index][:, index]
        found[f"layer {name}"] = (block.norm() / own.norm()).item()
        squares["error"] += block.square().sum().item()
        squares["size"] += own.square().sum().item()
        squares["off"] += (block.square().sum() - block.diagonal().square().sum()).item()
        squares["off_size"] += (own.square().sum() - own.diagonal().square().sum()).item()
    found["layers"] = (squares["error"] / squares["size"]) ** 0.5
    found["off-diagonal"] = (max(squares["off"], 0.0) / squares["off_size"]) ** 0.5
    return found


def study(name: str, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One network: errors of all structures, what lemmas 1 to 3 say, eigenvalues of each layer."""
    x, y = split(name, options.data, number)
    torch.manual_seed(number)
    network = mlp((x.shape[1], *options.hidden, y.shape[1]), nn.ReLU).double()
    train(network, x, y, NOISE, PRECISION, options.steps)
    information, places = exact(network, x), layers(network)
    # the matrix does not depend on the prior; this one keeps H positive where [S20]'s correction is negative
    precision = 10 * information.diagonal().max().item()
    estimates = {key: structured(network, x, y, value, precision) for key, value in STRUCTURES.items()}
    found: dict[str, Any] = {key: errors(information, value, places) for key, value in estimates.items()}
    distance = [(information - estimates[key]).norm().item() for key in ("inf 100%", "ekfac", "kfac")]
    slack = ROUNDING * information.norm().item()
    kept = (estimates["inf 50%"].diagonal() - information.diagonal()).abs().max() / information.diagonal().max()
    violated = int((estimates["ekfac"].diagonal() > information.diagonal() * (1 + ROUNDING)).sum())
    return {
        "errors": found,
        "ordering_holds": distance[0] <= distance[1] + slack and distance[1] <= distance[2] + slack,
        "diagonal_error_of_inf": kept.item(),
        "lemma_3_violations": violated,
        "parameters": len(information),
        "eigenvalues": {
            layer: {
                key: torch.linalg.eigvalsh(matrix[index][:, index])
                for key, matrix in {"exact": information, **estimates}.items()
            }
            for layer, index in places.items()
        },
    }


def summary(studies: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """Mean and standard deviation over the splits, by data set, structure and measure."""
    return {
        name: {
            key: {
                measure: (float(np.mean(values)), float(np.std(values)))
                for measure in runs[0]["errors"][key]
                for values in [[run["errors"][key][measure] for run in runs]]
            }
            for key in STRUCTURES
        }
        for name, runs in studies.items()
    }


def error_picture(means: dict[str, dict[str, dict[str, tuple[float, float]]]]) -> Figure:
    """Errors over the layers' blocks, one group of bars for each data set."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    shown = [key for key in STRUCTURES if key != "inf 100% shrunk"]
    blues = ["#06395e", "#084c7d", "#0072B2", "#56B4E9", "#8cccf0", "#c5e5f8"]
    colours = ["#5B6470", "#E69F00", "#D55E00", *blues]
    for i, (key, colour) in enumerate(zip(shown, colours, strict=True)):
        places = np.arange(len(means)) + (i - 4) * 0.095
        values = [means[name][key]["layers"] for name in means]
        axes.bar(places, [v[0] for v in values], 0.088, yerr=[v[1] for v in values], color=colour, label=key)
    axes.set_xticks(np.arange(len(means)), list(means))
    axes.set_ylabel("‖I - Î‖ / ‖I‖ over the layers' blocks")
    axes.legend(ncols=9, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def eigenvalue_picture(studies: dict[str, list[dict[str, Any]]]) -> Figure:
    """Histograms of each layer's eigenvalues, of the first split ([S20] figure 13, with a logarithmic axis)."""
    rows = {name: runs[0]["eigenvalues"] for name, runs in studies.items()}
    columns = max(len(found) for found in rows.values())
    figure = Figure(figsize=(4.2 * columns, 2.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    look: dict[str, dict[str, Any]] = {
        "exact": {"color": "#5B6470", "alpha": 0.35},
        "kfac": {"color": "#E69F00", "histtype": "step", "linestyle": "--", "linewidth": 1.6},
        "ekfac": {"color": "#D55E00", "histtype": "step", "linestyle": "-.", "linewidth": 1.6},
        "inf 50%": {"color": "#0072B2", "histtype": "step", "linestyle": ":", "linewidth": 1.6},
    }
    bins = np.linspace(-10, 1, 34)
    for line, (name, found) in zip(grid, rows.items(), strict=True):
        for axes, (layer, spectra) in zip(line, found.items(), strict=False):
            top = spectra["exact"].max()
            for key, style in look.items():
                values = (spectra[key] / top).clamp_min(1e-10).log10().numpy()
                axes.hist(values, bins, label=key, log=True, **style)
            axes.set_title(f"{name}, layer {layer}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        "log10 of the eigenvalue over the exact block's largest; zero, negative and smaller ones are at -10", fontsize=9
    )
    for axes in grid[:, 0]:
        axes.set_ylabel("eigenvalues")
    grid[0, -1].legend(fontsize=8)
    return figure


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "frobenius")
    arguments.add_argument("--data", type=Path, help="folder of UCI .npz files; without it what scikit-learn ships")
    arguments.add_argument("--datasets", nargs="+", help="names (default: all)")
    arguments.add_argument("--splits", type=int, default=5, help="splits of each data set (default 5)")
    arguments.add_argument("--hidden", type=int, nargs="+", default=[50], help="hidden widths (default 50)")
    arguments.add_argument("--steps", type=int, default=1000, help="training steps (default 1000)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    names = options.datasets or (UCI if options.data else SHIPPED)
    if options.small:
        names, options.splits, options.hidden, options.steps = names[:1], 1, [8], 50
    options.out.mkdir(parents=True, exist_ok=True)
    studies = {name: [study(name, number, options) for number in range(options.splits)] for name in names}
    report(options, studies)


def report(options: argparse.Namespace, studies: dict[str, list[dict[str, Any]]]) -> None:
    """Print the tables, draw the pictures, write the JSON."""
    means = summary(studies)
    for measure in ("off-diagonal", "layers", "whole"):
        rows = [
            [name, *(f"{found[key][measure][0]:.3f} ± {found[key][measure][1]:.3f}" for key in STRUCTURES)]
            for name, found in means.items()
        ]
        print(f"\nnormalised Frobenius error, {measure}\n\n{table(['data', *STRUCTURES], rows)}")
    by_layer = [
        [f"{name}, {measure}", *(f"{found[key][measure][0]:.3f}" for key in STRUCTURES)]
        for name, found in means.items()
        for measure in found["diag"]
        if measure.startswith("layer ")
    ]
    print(f"\nlayer by layer\n\n{table(['data, layer', *STRUCTURES], by_layer)}")
    runs = [run for group in studies.values() for run in group]
    holds = sum(run["ordering_holds"] for run in runs)
    print(f"\nlemmas 1 and 2, INF <= EKFAC <= KFAC at full rank: {holds} of {len(runs)} networks")
    counts = {
        name: [f"{run['lemma_3_violations']} of {run['parameters']}" for run in group]
        for name, group in studies.items()
    }
    print("rows where the low-rank part exceeds the exact diagonal at full rank (lemma 3):", counts)
    error_picture(means).savefig(options.out / "frobenius.png", dpi=130)
    eigenvalue_picture(studies).savefig(options.out / "eigenvalues.png", dpi=130)
    keys = ("ordering_holds", "diagonal_error_of_inf", "lemma_3_violations", "parameters")
    checks = {name: [{k: run[k] for k in keys} for run in group] for name, group in studies.items()}
    result = {"machine": machine(options.threads), "hidden": options.hidden, "errors": means, "checks": checks}
    write(options.out / "frobenius.json", result)


if __name__ == "__main__":
    main()
