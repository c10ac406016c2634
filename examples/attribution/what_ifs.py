"""What-ifs of the linearized network and of the network that moves, held against retraining.

    python examples/attribution/what_ifs.py --problem digits --delta 1 --out attribution

The problems, halves and single points are those of digits.py and single_points.py. `Posterior.what_ifs` gives the
network without each half, and without each single point, with a fixed and with a moving linearization. Nothing is
tuned. Scores are the linear datamodeling score over the halves, and the slope of the true change on the predicted one
over the single points. Where retraining without a point stops at a saddle point, it is pushed off it and goes on: a
minimum is what training with any noise reaches. Retraining and answers are kept in the folder: an interrupted run goes
on where it stood.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _problems import PROBLEMS, Problem, mnist, small
from _shared import machine, parser, table, write
from _truth import halves, without

import ntk_laplace as ntkl
from ntk_laplace import attribution

_TIMED = 5  # halves whose retraining is timed: some take twice as many steps as others


def main() -> None:
    """Retrain, predict, compare."""
    arguments = parser(__doc__, "attribution")
    arguments.add_argument("--problem", choices=[*PROBLEMS, "mnist"], default="digits")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz, for the problem mnist")
    arguments.add_argument("--delta", type=float, help="weight decay")
    arguments.add_argument("--single", type=int, default=40, help="points left out one by one (default 40)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    if options.problem == "mnist" and options.data is None and not options.small:
        arguments.error("give the folder of mnist.npz with --data, or --small")
    build = (PROBLEMS | {"mnist": partial(mnist, options.data)})[options.problem]
    problem = build() if options.delta is None else build(options.delta)
    if options.small:
        problem, options.single = small(problem), 3
    folder = options.out / problem.name_of_files
    theta = problem.train(np.arange(len(problem.x)))
    kept, outcomes = halves(problem, folder)
    chosen, outputs, saddles = without(problem, theta, options.single, options.out / f"{folder.name}-single")
    alone = attribution.without_each_in_turn(chosen, len(problem.x))
    before = problem.f(theta, problem.x_test)
    some = [np.flatnonzero(each) for each in kept[:_TIMED]]
    seconds = float(np.median([_seconds(partial(problem.train, half))[1] for half in some]))
    trained_by_torch(problem, some[0])  # its first run imports parts of torch: up to 2 s more
    by_torch = float(np.median([_seconds(partial(trained_by_torch, problem, half))[1] for half in some]))
    # halves and points each ask a posterior of their own: what it keeps between what-ifs is timed for both
    posterior, of_points = (problem.posterior(theta, "full") for _ in range(2))
    rows, scores = [], {}
    for each in (posterior, of_points):
        each.posterior_precision  # noqa: B018 - the fit is not timed
    for linearization in ("fixed", "moving"):
        f, spent, converged = answers(problem, posterior, ~kept, linearization, folder)
        one, spent_one, back = answers(problem, of_points, ~alone, linearization, folder.parent / f"{folder.name}-one")
        score = attribution.datamodeling_score(np.stack([problem.measured(each) for each in f]), outcomes[0])
        found = attribution.leave_one_out_agreement(one - before, outputs - before)
        medians = [float(np.sum(a * b) / np.sum(a * a)) for a, b in zip(one - before, outputs - before, strict=True)]
        each, each_one = spent / len(kept), spent_one / len(chosen)
        rows.append([linearization, str(score), f"{found.correlation:.2f}, {found.slope:.2f}",
                     f"{np.median(medians):.2f}", f"{converged}/{len(kept)}, {back}/{len(chosen)}", f"{each:.3f}",
                     f"{each_one:.3f}"])
        scores[linearization] = {"score": score.value, "error": score.error, "slope": found.slope, "each": each,
                                 "correlation": found.correlation, "median slope": float(np.median(medians)),
                                 "each single point": each_one}
    home = come_back(problem, posterior, ~alone, folder.parent / f"{folder.name}-one")
    one, *_ = answers(problem, posterior, ~alone, "moving", folder.parent / f"{folder.name}-one")
    at_home = attribution.leave_one_out_agreement((one - before)[home], (outputs - before)[home])
    scores["moving"] |= {"come back": int(home.sum()), "slope of those that come back": at_home.slope}
    ceiling = attribution.seed_ceiling(outcomes)
    print(f"{problem.name}, δ = {problem.delta:g}, {len(kept)} halves, {len(chosen)} single points; another seed of "
          f"retraining (ceiling): {ceiling}; retraining on a half, median of {len(some)}: {seconds:.2f} s of processor "
          f"time in numpy, {by_torch:.2f} s in torch")
    print(table(["linearization", "LDS", "one out: r, slope", "median slope", "converged", "s a half", "s a point"],
                rows))
    print(f"retraining without a point stopped at a saddle point, and a push led to other outputs: {saddles} points")
    print(f"moving, the {home.sum()} of {len(home)} points that come back: correlation, slope "
          f"{at_home.correlation:.2f}, {at_home.slope:.2f}")
    write(options.out / f"{folder.name}-what-ifs.json",
          {"machine": machine(options.threads), "problem": folder.name, "scores": scores, "numpy": seconds,
           "torch": by_torch, "ceiling": {"score": ceiling.value, "error": ceiling.error}})


def answers(
    problem: Problem, posterior: ntkl.Posterior, gone: np.ndarray, linearization: str, folder: Path
) -> tuple[np.ndarray, float, int]:
    """Outputs at the test points for each group (G, n, C), processor seconds, and how many groups converged."""
    file = folder.parent / f"{folder.name}-{linearization}.npz"
    if not file.exists():
        found, spent = _seconds(lambda: posterior.what_ifs(torch.as_tensor(gone), linearization=linearization))
        f = found.outputs(torch.as_tensor(problem.x_test)).numpy()
        np.savez(file, f=f, spent=spent, converged=int(found.converged.sum()))
    kept = np.load(file)
    return kept["f"], float(kept["spent"]), int(kept["converged"])


def come_back(problem: Problem, posterior: ntkl.Posterior, gone: np.ndarray, folder: Path) -> np.ndarray:
    """Which single points the network returns from when they are put back, (G,) of bool."""
    file = folder.parent / f"{folder.name}-come-back.npy"
    if not file.exists():
        np.save(file, posterior.what_ifs(torch.as_tensor(gone)).comes_back().numpy())
    found: np.ndarray = np.load(file)
    return found


def trained_by_torch(problem: Problem, indices: np.ndarray) -> None:
    """Train the network on some of the data as most people would, by torch's L-BFGS, to the same gradient."""
    network = problem.network()
    x, y = torch.as_tensor(problem.x[indices]), torch.as_tensor(problem.y[indices])
    parameters, likelihood = list(network.parameters()), problem.likelihood()
    optimizer = torch.optim.LBFGS(parameters, max_iter=20_000, max_eval=40_000, tolerance_grad=1e-5, history_size=30,
                                  tolerance_change=0.0, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        decay = 0.5 * problem.delta * sum(p.square().sum() for p in parameters)
        loss = decay - likelihood.log_prob(network(x), y).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def _seconds(work: Callable):
    """What a function returns, and the processor time of this process."""
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


if __name__ == "__main__":
    main()
