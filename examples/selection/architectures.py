"""Which score should choose among networks? [L22] section 7, appendices D and F, in small.

    python examples/selection/architectures.py [--data DIR] [--minutes M] --threads 1 --out architectures

25 CNNs of 1 to 5 layers and 2 to 16 channels and four residual networks, in float32, on scikit-learn's digits, and with
``--data`` on MNIST (DIR/mnist.npz, shrunk to 14 x 14); six of them on up to 45,000 images. Each cell is a network, a
number of images N, a seed (of images and weights) and a prior: one precision λ, or "layerwise", a precision for each
layer that maximizes KFAC's evidence. The network is trained by Adam on 80 % of the images, which are all that the
scores below of the others know, and then trained on with all of them. `DESIGN` lists what is run, in its order.

Scores, more is better: evidence of all images (KFAC, and for the six the diagonal); the conditional evidence of [L22]
appendix B given 80 %, image by image under the linearized average, with scale and temperature tuned on 5 % and the
score taken on 15 % ("CLML, scaled and tempered"), or as the joint density under 20 draws of the weights, from a
covariance scaled by the factor that suits the 5 % ("CLML, 20 joint draws"); leave-one-out of the last layer; log
likelihood of the 20 % under the Bayesian average and under the network; minus a PAC-Bayes bound of the random network's
error; and the number of parameters, to compare with. Test scores: log likelihood and accuracy of the scaled and
tempered average, of the average as it is, and of the network.

A column is one N and prior; it is shown once all its networks are there. Every cell is kept in OUT/cells as JSON, with
both networks' weights beside it, so a run that was interrupted, or stopped by ``--minutes``, goes on with the same
command. The script prints the tables, and writes architectures.json and the pictures.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _cells_l22 import Cell, images, trained_and_scored
from _networks_l22 import NETWORKS, SIX
from _shared import machine, once, parser, write
from _summary_l22 import TESTS, Column, heat_map, printed, scatter, summary

from ntk_laplace.plotting import png


@dataclass(frozen=True)
class Study:
    """Networks of one data set at several priors."""

    data: str
    count: int
    priors: tuple[str, ...]
    steps: int
    batch: int = 50
    networks: tuple[str, ...] = tuple(NETWORKS)
    structures: tuple[str, ...] = ("kfac",)
    asked: int = 1000
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its columns in the tables."""
        few = "" if self.networks == tuple(NETWORKS) else f", {len(self.networks)} networks"
        return f"{'MNIST' if self.data == 'mnist' else self.data} {self.count:,}{few}"

    def cells(self, prior: str) -> list[Cell]:
        """One for each network."""
        return [Cell(self.data, self.count, prior, name, self.seed, self.steps, self.batch, self.asked, self.structures)
                for name in self.networks]


_SIX = {"networks": SIX, "structures": ("kfac", "diag")}
DESIGN = (  # in the order of the run
    Study("digits", 250, ("1", "1e-3", "layerwise", "1e-1", "1e-6"), 300),
    Study("mnist", 250, ("1e-3",), 300, **_SIX),
    Study("mnist", 1000, ("1e-3",), 400, **_SIX),
    Study("mnist", 1000, ("1e-3",), 400),
    Study("digits", 250, ("1e-3", "layerwise"), 300, seed=1),
    Study("mnist", 4000, ("1e-3",), 800, **_SIX),
    Study("mnist", 45_000, ("1e-3",), 2000, 100, asked=4000, **_SIX),
    Study("digits", 250, ("1", "1e-1", "1e-6"), 300, seed=1),
    Study("mnist", 1000, ("1", "layerwise"), 400),
    Study("mnist", 45_000, ("1e2",), 2000, 100, asked=4000, **_SIX),
    Study("digits", 250, ("1e-2", "1e-4", "1e2"), 300),
    Study("mnist", 1000, ("1e-6", "1e-1"), 400),
    Study("mnist", 1000, ("1e-3", "1", "layerwise"), 400, seed=1),
    Study("mnist", 250, ("1e-3", "1", "layerwise", "1e-6", "1e-1"), 300),
    Study("digits", 250, ("1e-2", "1e-4", "1e2"), 300, seed=1),
    # ranks of six networks change with the images: more seeds where they are cheap
    *(Study("mnist", 250, ("1e-3",), 300, seed=seed, **_SIX) for seed in range(1, 11)),
    *(Study("mnist", 1000, ("1e-3",), 400, seed=seed, **_SIX) for seed in range(1, 5)),
    *(Study("mnist", 4000, ("1e-3",), 800, seed=seed, **_SIX) for seed in range(1, 5)),
)
SMALL = (Study("digits", 80, ("1e-3", "layerwise"), 30, 20, ("conv 1 x 2", "conv 2 x 4", "res 6 x 4"), asked=100),)


def scores(study: Study, prior: str, options: argparse.Namespace, deadline: float) -> list[dict[str, Any]] | None:
    """All networks of a study at one prior, computed or kept; None if the time is over before the last one."""
    problem, found = None, []
    for cell in study.cells(prior):
        kept = options.out / "cells" / f"{cell.label}.json"
        if not kept.exists():
            if time.monotonic() > deadline:
                return None
            problem = problem or images(cell.data, cell.count, cell.asked, cell.seed, options.data)
        compute = partial(trained_and_scored, cell, problem, kept.with_suffix(".pt"))
        row = once(kept, cell.arguments(), compute)
        found.append({"network": cell.network} | row)
        if problem is not None:
            own = row["structures"]["kfac"]
            print(f"{cell.label}: lml {own['lml']:.1f} clml {own['clml']:.3f} bma {own['bma_log_likelihood']:.3f} map "
                  f"{own['map_log_likelihood']:.3f} {own['map_accuracy']:.3f}, {row['seconds']:.1f} s",
                  file=sys.stderr, flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__, "architectures")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz; without it, digits alone")
    arguments.add_argument("--minutes", type=float, default=float("inf"), help="start no new cell after so many")
    options = arguments.parse_args()
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    deadline = time.monotonic() + 60 * options.minutes
    found: dict[tuple[str, str], Column] = {}
    for study in SMALL if options.small else DESIGN:
        if study.data == "mnist" and options.data is None:
            continue
        for prior in study.priors:
            rows = scores(study, prior, options, deadline)
            if rows is not None:
                column = found.setdefault((study.name, prior), Column(study.name, study.count, prior, []))
                column.seeds.append(rows)
    columns = sorted(found.values(), key=lambda column: column.place)
    results = [summary(column) for column in columns]
    print(printed(columns, results))
    seconds = [row["seconds"] for column in columns for rows in column.seeds for row in rows]
    print(f"\n{len(seconds)} cells, {sum(seconds) / 60:.0f} minutes of processor time")
    for test in TESTS:
        (options.out / f"choice_{test}.png").write_bytes(png(heat_map(columns, results, test)))
    (options.out / "scatter.png").write_bytes(png(scatter(columns)))
    write(options.out / "architectures.json", {"machine": machine(options.threads), "results": results})


if __name__ == "__main__":
    main()
