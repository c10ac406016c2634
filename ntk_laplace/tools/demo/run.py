"""The complete demo: studies, figures, summary, report, and tables in the terminal."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import ntk_laplace as ntkl
from ntk_laplace.tools.demo import page, pictures
from ntk_laplace.tools.demo.pictures import Picture
from ntk_laplace.tools.demo.problems import DIABETES, DIGITS, DIGITS_PAIR, Problem, miniature, problems, toys
from ntk_laplace.tools.demo.screen import Screen, table
from ntk_laplace.tools.demo.study import Choice, Study, settled, study

_EXPLAINED = 200  # held-out images on the page of explanations


def run_demo(out: Path, seed: int = 0, console: Console | None = None, small: bool = False) -> dict[str, Any]:
    """Run everything and write ``summary.json``, pictures, ``report.html`` and ``explanations.html``.

    The directory is made if needed, and files of an earlier run are replaced; OSError, before any computation, if it
    cannot be written to. The seed is that of splits, initial weights and integration points: the same seed gives the
    same numbers. A small run has a few examples and candidates of each problem. The content of ``summary.json`` is
    returned.
    """
    console = Console() if console is None else console
    chosen, (wave, moons) = problems(seed), toys(seed)
    if small:
        chosen = [miniature(problem) for problem in chosen]
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):  # checked before the computation
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out))
    steps = sum(len(problem.candidates) + 5 + problem.compares for problem in chosen) + 4
    with Screen(console, steps) as screen:
        studies = [study(problem, seed, screen.step) for problem in chosen]
        trained = [(toy, settled(toy, seed, screen.step)) for toy in (wave, moons)]
        screen.step("drawing")
        drawn = _draw({found.problem.name: found for found in studies}, trained, seed)
        screen.step("writing explanations")
        explanations = _explorer(studies[0])
        summary = {
            "version": ntkl.__version__,
            "torch": torch.__version__,
            "seed": seed,
            "runs": {found.problem.name: found.summary for found in studies},
            "pictures": [f"{picture.name}.png" for picture in drawn],
            "seconds": screen.seconds,
        }
    for picture in drawn:
        (out / f"{picture.name}.png").write_bytes(picture.image)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    explanations.write(out / page.EXPLORER)
    page.build(studies, {picture.name: picture for picture in drawn}, summary).write(out / "report.html")
    _show(console, studies, summary, out)
    return summary


def _draw(found: dict[str, Study], trained: list[tuple[Problem, Choice]], seed: int) -> list[Picture]:
    wave, moons = trained
    pair, ten, regression = found[DIGITS_PAIR], found[DIGITS], found[DIABETES]
    return [
        pictures.uncertainty_1d(*wave),
        pictures.uncertainty_2d(*moons, seed),
        pictures.structures(ten),
        pictures.calibration([pair, ten]),
        pictures.unseen(pair, seed),
        pictures.coverage(regression),
        pictures.selection(list(found.values())),
        pictures.explanation(pair),
        pictures.explanation(ten),
    ]


def _explorer(found: Study) -> ntkl.ExplorerPage:
    """Explorer page of held-out images of the pair, misclassified ones first."""
    split, classes = found.problem.split, found.problem.split.classes
    truth = split.y_test.reshape(-1).long()
    wrong = (found.predictive.mean.reshape(-1) >= 0.5).long() != truth
    order = torch.cat([wrong.nonzero()[:, 0], (~wrong).nonzero()[:, 0]])[:_EXPLAINED]
    return ntkl.explore(found.posterior, split.x_test[order], split.x_train, truth[order],
                        naming=ntkl.Naming(classes=classes),
                        title="Four or nine? The training images behind each answer", progress=False)


def _show(console: Console, studies: list[Study], summary: dict[str, Any], out: Path) -> None:
    evidence = page.evidence_rows({found.problem.title: found.summary for found in studies})
    console.print(table("Evidence of one network from two spaces (nats)", page.EVIDENCE, evidence, 1,
                        "N examples, C outputs, P parameters; sec. with all training"))
    for found in studies:
        if found.comparison is not None:
            console.print(f"{found.problem.title}\n{found.comparison}\n", soft_wrap=True, highlight=False, markup=False)
    console.print(table("Held-out scores: network, calibrated network, posterior", page.SCORES,
                        page.score_rows(studies), 2))
    console.print(f"{summary['seconds']:.0f} s; written to {out}:", soft_wrap=True, highlight=False, markup=False)
    for name in ("report.html", page.EXPLORER, "summary.json", *summary["pictures"]):
        console.print(f"  {out / name}", soft_wrap=True, highlight=False, markup=False)
