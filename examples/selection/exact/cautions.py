"""[L22] with exact evidence: in which data sets a score misleads, and in which `compare_models` warns of it.

    python examples/selection/exact/cautions.py --threads 1 --out cautions

The models and data sets are those of density.py, fourier.py and multimodal.py. A score misleads in a data set if the
model that it prefers has a lower test log likelihood than the best of those compared. A warning about the evidence is
a model with a vague or narrow prior, and one about leave-one-out its star. Printed: in how many data sets each score
misleads, in how many of these and of the others `compare_models` warns, and how much the choice loses where it is
silent. Then Fig. 3, where the models differ in the number of modes alone. No threshold was chosen on these data sets.
It writes cautions.json.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import density
import fourier
import multimodal
import torch
from _exact import ask, machine, once, table, write
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.metrics import mean_log_likelihood

SCORES = {"evidence": "evidence", "loo": "LOO"}
Models = dict[str, tuple[ntkl.Posterior, float]]
"""A posterior and its mean test log likelihood, by name."""


def judged(models: Models, compared: ntkl.tools.comparison.ModelComparison, names: list[str]) -> dict[str, Any]:
    """What each score's choice among some models loses, nats a test point, and whether it is warned of."""
    rows, tests = [compared[name] for name in names], [models[name][1] for name in names]
    warned = {"evidence": any(row.vague or row.narrow for row in rows), "loo": any(not row.loo_trusted for row in rows)}
    found = {}
    for score in SCORES:
        values = [getattr(row, score) for row in rows]
        found[score] = {"loss": max(tests) - tests[values.index(max(values))], "warned": warned[score]}
    return found


def compared(models: Models) -> ntkl.tools.comparison.ModelComparison:
    """The models side by side, by evidence and leave-one-out."""
    return ntkl.compare_models({name: one for name, (one, _) in models.items()}, scores=list(SCORES))


def density_models(x: Tensor) -> Models:
    """The four models of one data set, x the 40 training and 960 test points."""
    train, test = x[: density.N], x[density.N :]
    models = {}
    for name, (variance, given) in density.MODELS.items():
        one = density.posterior(train, variance, float(train.mean()) if given is None else given)
        predicted = one.predict(torch.ones(len(test), 1).double())
        models[name] = one, mean_log_likelihood(predicted, test[:, None])
    return models


def fourier_models(problem: fourier.Problem) -> Models:
    """The four models of one data set."""
    n, models = fourier.POINTS, {}
    for name, (order, _) in fourier.MODELS.items():
        one = problem.posterior(name)
        predicted = one.predict(fourier.features(problem.x[n:], order))
        models[name] = one, mean_log_likelihood(predicted, problem.y[n:, None])
    return models


def run(make: Callable[[], Models], groups: dict[str, list[str]]) -> dict[str, Any]:
    """One data set, in each group of models."""
    models = make()
    found = compared(models)
    return {words: judged(models, found, names) for words, names in groups.items()}


def counted(words: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """In how many data sets each score misleads and is warned of."""
    found: dict[str, Any] = {"data sets": len(runs)}
    for score in SCORES:
        wrong = [one[words][score] for one in runs if one[words][score]["loss"] > 0]
        right = [one[words][score] for one in runs if one[words][score]["loss"] == 0]
        silent = [one["loss"] for one in wrong if not one["warned"]]
        found[score] = {
            "misled": len(wrong), "warned": sum(one["warned"] for one in wrong),
            "false": sum(one["warned"] for one in right), "most": max(silent, default=0.0),
        }
    return found


def modes(alphas: tuple[float, ...]) -> dict[str, Any]:
    """Fig. 3: the same data under priors of more and more modes."""
    x = multimodal.paper_data()
    test = math.sin(multimodal.TRUE) + torch.randn(1000, generator=torch.Generator().manual_seed(1)).double()
    models: Models = {}
    for alpha in alphas:
        _, one = multimodal.at_mode(alpha, x)
        predicted = one.predict(torch.zeros(len(test), 1).double())
        models[f"α = {alpha:g}"] = one, mean_log_likelihood(predicted, test[:, None])
    found = compared(models)
    print("\nFig. 3")
    print(table(
        ["α", "truth", "evidence", "warned of", "LOO", "starred", "test"],
        [[name.removeprefix("α = "), f"{truth:.3f}", f"{row.evidence:.3f}", "yes" if row.vague or row.narrow else "no",
          f"{row.loo:.3f}", "no" if row.loo_trusted else "yes", f"{models[name][1]:.4f}"]
         for name, truth, row in zip(models, truths(alphas, x), found.rows, strict=True)],
    ))
    return {
        "alphas": alphas, "truth": truths(alphas, x), "evidence": [row.evidence for row in found.rows],
        "vague": list(found.vague), "narrow": [row.name for row in found.rows if row.narrow],
        "loo": [row.loo for row in found.rows], "starred": [row.name for row in found.rows if not row.loo_trusted],
        "notes": [row.loo_note for row in found.rows], "test": [value for _, value in models.values()],
    }


def truths(alphas: tuple[float, ...], x: Tensor) -> list[float]:
    """The evidence by quadrature."""
    return [multimodal.truth(alpha, partial(multimodal.log_likelihood, x=x)) for alpha in alphas]


def main() -> None:
    arguments = ask(__doc__, "cautions", 1000)
    arguments.add_argument("--fourier", type=int, default=40, help="data sets of each kind of inputs (default 40)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.small:
        options.sets, options.fourier = min(options.sets, 12), min(options.fourier, 3)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # they are counted
    pairs = {
        "density: M_1, M_2 with μ = -0.4": ["M_1", "M_2, μ = -0.4"],
        "density: M_1, M_2 with μ = 2": ["M_1", "M_2, μ = 2"],
        "density: all but M_1": [name for name in density.MODELS if name != "M_1"],
    }
    orders = {"order 3, order 9": ["order 3", "order 9"], "order 9, 9c with 1/d⁴": ["order 9", "order 9c, 1/d⁴"],
              "all four": list(fourier.MODELS)}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.sets, density.N + density.TEST, generator=generator, dtype=torch.float64) + 1.0
    cases: dict[str, Any] = {}
    runs = once(options.out / "density.json", [str(options.sets)],
                lambda: [run(partial(density_models, one), pairs) for one in x])
    cases |= {words: counted(words, runs) for words in pairs}
    paper = {"density": run(lambda: density_models(torch.cat(density.paper_data())), pairs)}
    for words, printed in (("grid", False), ("printed inputs", True)):
        drawn = [partial(fourier.Problem.drawn, seed, printed) for seed in range(options.fourier)]
        runs = once(
            options.out / f"{words}.json", [str(options.fourier)],
            lambda drawn=drawn: [run(lambda one=one: fourier_models(one()), orders) for one in drawn],
        )
        cases |= {f"Fourier, {words}: {group}": counted(group, runs) for group in orders}
    paper["Fourier"] = run(lambda: fourier_models(fourier.Problem.of_paper()), orders)
    rows = [[words, str(found["data sets"]), *(
        text for score in SCORES for text in (str(found[score]["misled"]), str(found[score]["warned"]),
                                              str(found[score]["false"]), f"{found[score]['most']:.3f}")
    )] for words, found in cases.items()]
    heads = ["models", "data sets", *(f"{name}: {what}" for name in SCORES.values() for what in
                                      ("misled", "of these warned", "of the others warned", "most lost in silence"))]
    print(table(heads, rows))
    print("\nthe paper's data sets, nats a point lost by the choice")
    for groups in paper.values():
        for words, own in groups.items():
            print(f"  {words}: " + ", ".join(f"{SCORES[score]} {one['loss']:.4f}{' (warned)' * one['warned']}"
                                            for score, one in own.items()))
    kept = {"machine": machine(options.threads), "cases": cases, "paper": paper,
            "modes": modes((10.0, 100.0) if options.small else multimodal.ALPHAS)}
    write(options.out / "cautions.json", kept)


if __name__ == "__main__":
    main()
