"""Do explanations predict what retraining does? The linear datamodeling score on four data sets.

    python examples/attribution/digits.py --problem digits --delta 1 --out attribution

A small network (one hidden layer of 16 tanh units) is trained to a gradient below 1e-5, and again on random halves of
its training data, from two seeds. Effects of removal from one posterior are then held against the loss at each test
point, or the output (linear datamodeling score: Spearman's correlation over the halves, mean over test points). What
happens without single points is in single_points.py.
Nothing is tuned. Further rows relinearize: the network itself moves to the weights that the removal implies, and
Jacobians are taken anew there. Retraining is kept in the folder: an interrupted run goes on where it stood.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _problems import PROBLEMS, Problem, small
from _shared import machine, parser, table, write
from _truth import halves, relinearized

import ntk_laplace as ntkl
from ntk_laplace import attribution

STRUCTURES = ("full", "ekfac", "kfac", "diag")


def main() -> None:
    """Retrain, predict, compare."""
    arguments = parser(__doc__, "attribution")
    arguments.add_argument("--problem", choices=PROBLEMS, default="digits")
    arguments.add_argument("--delta", type=float, help="weight decay (1, and 0.5 and 5 for cancer and diabetes)")
    arguments.add_argument("--processes", type=int, default=1, help="that retrain (default 1)")
    arguments.add_argument("--target", choices=("loss", "output"), help="at the test points (diabetes: output)")
    arguments.add_argument("--steps", type=int, default=5, help="relinearized steps (default 5; 0 leaves them out)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    build = PROBLEMS[options.problem]
    problem = build() if options.delta is None else build(options.delta)
    if options.small:
        problem, options.steps = small(problem), min(options.steps, 2)
    problem = replace(problem, target=options.target or problem.target)
    name = problem.name_of_files
    started = time.perf_counter()
    theta = problem.train(np.arange(len(problem.x)))
    found = datamodeling(problem, theta, options.out / name, options)
    spent = {"machine": machine(options.threads), "problem": name, "seconds": time.perf_counter() - started}
    write(options.out / f"{name}.json", spent | found)


def relinearized_targets(problem: Problem, theta: np.ndarray, kept: np.ndarray, steps: int) -> np.ndarray:
    """Target at each test point after each relinearized step towards each subset, (steps, M, n)."""
    posterior = problem.posterior(theta, "full")
    found = [
        [problem.f(moved, problem.x_test) for moved in relinearized(posterior, ~one, steps)] for one in kept
    ]
    return np.array([[problem.measured(f) for f in each] for each in found]).transpose(1, 0, 2)


def datamodeling(problem: Problem, theta: np.ndarray, folder: Path, options) -> dict:
    """Scores over random halves."""
    begun = time.perf_counter()
    kept, outcomes = halves(problem, folder, options.processes)
    spent = {"retraining (kept ones are free)": time.perf_counter() - begun}
    x, posterior = torch.as_tensor(problem.x_test), problem.posterior(theta)
    predictions = {}

    def take(words: str, predict) -> None:
        begun = time.perf_counter()
        predictions[words] = predict()
        spent[words] = time.perf_counter() - begun

    def measure(posterior: ntkl.Posterior) -> torch.Tensor:
        return torch.as_tensor(problem.measured(posterior.outputs(x).numpy()))

    take("joint removal, one step", lambda: attribution.predicted(posterior, kept, measure))
    take("joint removal, refitted", lambda: attribution.predicted(posterior, kept, measure, steps=None))

    def added(structure: str) -> np.ndarray:
        chosen = posterior if structure == "gp" else problem.posterior(theta, structure)
        return attribution.additive(problem.effects(chosen), kept)

    take("leave-one-out effects, added", lambda: added("gp"))
    for structure in STRUCTURES:
        take(f"the same, structure {structure!r}", lambda structure=structure: added(structure))

    def shares() -> np.ndarray:
        explanation = posterior.explain(x)
        slope = torch.as_tensor(problem.slope(explanation.f.numpy()))
        return attribution.additive(-torch.einsum("xnc,xc->xn", explanation.contributions, slope), kept)

    take("contributions k r, added (they decompose)", shares)
    if options.steps:
        begun = time.perf_counter()
        losses = relinearized_targets(problem, theta, kept, options.steps)
        each = (time.perf_counter() - begun) / options.steps
        for step, values in enumerate(losses, start=1):
            words = f"relinearized, {step} step{'s' if step > 1 else ''}"
            predictions[words], spent[words] = values, step * each
    scores = {words: attribution.datamodeling_score(values, outcomes[0]) for words, values in predictions.items()}
    ceiling = attribution.seed_ceiling(outcomes)
    rows = [[words, str(score), f"{spent[words]:.1f}"] for words, score in scores.items()]
    rows.append(["another seed of retraining (ceiling)", str(ceiling), ""])
    print(f"{problem.name}, δ = {problem.delta:g}, {problem.target}: linear datamodeling score over {len(kept)} halves")
    print(table(["prediction", "score", "seconds"], rows))
    # the wall time of retraining two seeds, if none was kept
    print(f"retraining in this run: {spent['retraining (kept ones are free)']:.0f} s")
    values = {words: {"score": score.value, "error": score.error} for words, score in scores.items()}
    return {"scores": values, "ceiling": {"score": ceiling.value, "error": ceiling.error}, "spent": spent}


if __name__ == "__main__":
    main()
