"""Do explanations predict what retraining does? Linear datamodeling score and leave-one-out, on three data sets.

    python examples/attribution/digits.py --problem digits --delta 1 --out attribution

A small network (one hidden layer of 16 tanh units) is trained to a gradient below 1e-5, and again on random halves of
its training data, from two seeds, and without single training points, from the weights of the whole. Effects of removal
from one posterior are then held against the loss at each test point (linear datamodeling score: Spearman's correlation
over the halves, mean over test points) and against the outputs without single points (slope of truth on prediction).
Nothing is tuned. Retraining is kept in the folder: an interrupted run goes on where it stood.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _problems import PROBLEMS, Problem
from _shared import machine, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace import attribution

STRUCTURES = ("full", "ekfac", "kfac", "diag")


def main() -> None:
    """Retrain, predict, compare."""
    arguments = parser(__doc__, "attribution")
    arguments.add_argument("--problem", choices=PROBLEMS, default="digits")
    arguments.add_argument("--delta", type=float, help="weight decay (1, 0.5 and 5 by default)")
    arguments.add_argument("--processes", type=int, default=1, help="that retrain (default 1)")
    arguments.add_argument("--single", type=int, default=40, help="points left out one by one (default 40)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    build = PROBLEMS[options.problem]
    problem = build() if options.delta is None else build(options.delta)
    if options.small:
        problem = replace(problem, x=problem.x[:40], y=problem.y[:40], x_test=problem.x_test[:8],
                          y_test=problem.y_test[:8], halves=6, hidden=4)  # fmt: skip
    name = f"{options.problem}-{problem.delta:g}"
    started = time.perf_counter()
    theta = problem.train(np.arange(len(problem.x)))
    halves = datamodeling(problem, theta, options.out / name, options.processes)
    single = leave_one_out(problem, theta, 3 if options.small else options.single)
    found = {"machine": machine(options.threads), "problem": name, "seconds": time.perf_counter() - started}
    write(options.out / f"{name}.json", found | halves | single)


def test_loss(problem: Problem):
    """From a posterior to the loss at each test point."""
    x = torch.as_tensor(problem.x_test)

    def measure(posterior: ntkl.Posterior) -> torch.Tensor:
        return torch.as_tensor(problem.loss(posterior.outputs(x).numpy(), problem.y_test)[0])

    return measure


def datamodeling(problem: Problem, theta: np.ndarray, folder: Path, processes: int) -> dict:
    """Scores over random halves."""
    kept = attribution.random_halves(problem.halves, len(problem.x))
    begun = time.perf_counter()
    outcomes = attribution.retrain(problem.outcome, kept, (0, 1), folder=folder, processes=processes)
    spent = {"retraining (kept ones are free)": time.perf_counter() - begun}
    x, y = torch.as_tensor(problem.x_test), torch.as_tensor(problem.y_test)
    posterior = problem.posterior(theta)
    predictions = {}

    def take(words: str, predict) -> None:
        begun = time.perf_counter()
        predictions[words] = predict()
        spent[words] = time.perf_counter() - begun

    measure = test_loss(problem)
    take("joint removal, one step", lambda: attribution.predicted(posterior, kept, measure))
    take("joint removal, refitted", lambda: attribution.predicted(posterior, kept, measure, steps=None))

    def added(structure: str) -> np.ndarray:
        chosen = posterior if structure == "gp" else problem.posterior(theta, structure)
        return attribution.additive(-chosen.removal_effects(x, by="log_likelihood", y=y), kept)

    take("leave-one-out effects, added", lambda: added("gp"))
    for structure in STRUCTURES:
        take(f"the same, structure {structure!r}", lambda structure=structure: added(structure))

    def shares() -> np.ndarray:
        explanation = posterior.explain(x)
        slope = torch.as_tensor(problem.loss(explanation.f.numpy(), problem.y_test)[1])
        return attribution.additive(-torch.einsum("xnc,xc->xn", explanation.contributions, slope), kept)

    take("contributions k r, added (they decompose)", shares)
    scores = {words: attribution.datamodeling_score(values, outcomes[0]) for words, values in predictions.items()}
    ceiling = attribution.seed_ceiling(outcomes)
    rows = [[words, str(score), f"{spent[words]:.1f}"] for words, score in scores.items()]
    rows.append(["another seed of retraining (ceiling)", str(ceiling), ""])
    print(f"{problem.name}, δ = {problem.delta:g}: linear datamodeling score over {len(kept)} halves")
    print(table(["prediction", "score", "seconds"], rows))
    # the wall time of retraining two seeds, if none was kept
    print(f"retraining in this run: {spent['retraining (kept ones are free)']:.0f} s")
    values = {words: {"score": score.value, "error": score.error} for words, score in scores.items()}
    return {"scores": values, "ceiling": {"score": ceiling.value, "error": ceiling.error}, "spent": spent}


def leave_one_out(problem: Problem, theta: np.ndarray, many: int) -> dict:
    """Outputs at test points without single training points, retrained from the weights of the whole."""
    count = len(problem.x)
    chosen = np.random.default_rng(7).choice(count, many, replace=False)
    before = problem.f(theta, problem.x_test)
    everything = np.arange(count)
    start = problem.train(everything, start=theta)
    truth = np.stack([
        problem.f(problem.train(np.delete(everything, i), start=start), problem.x_test) - before for i in chosen
    ])  # fmt: skip
    posterior, x = problem.posterior(theta), torch.as_tensor(problem.x_test)
    effects = posterior.explain(x).removal.transpose(0, 1)[chosen].numpy()
    refitted = np.stack([(posterior.remove(int(i), steps=None).outputs(x) - posterior.outputs(x)).numpy()
                         for i in chosen])  # fmt: skip
    found = {}
    print(f"\noutputs without single points ({many} of {count}), truth on prediction")
    for words, values in (("one step", effects), ("refitted", refitted)):
        agreement = attribution.leave_one_out_agreement(values, truth)
        print(f"{words}: {agreement}")
        found[words] = vars(agreement)
    loo = posterior.leave_one_out()
    print(f"effective parameters {float(loo.effective_parameters.sum()):.0f} of {posterior.num_parameters}, largest "
          f"leverage {float(loo.leverage.max()):.2f}, {int((loo.leverage > 0.9).sum())} points above 0.9")
    return {"leave_one_out": found}


if __name__ == "__main__":
    main()
