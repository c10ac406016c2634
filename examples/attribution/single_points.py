"""What would the outputs be without one training point? Predicted, and retrained: how large, and how far to be trusted.

    python examples/attribution/single_points.py --problem digits --deltas 0.1 1 --out attribution

The networks of digits.py are trained again, from the weights of the whole, without each of some training points. For
the change of all outputs at all test points: correlation, and slope of truth on prediction through the origin, which is
1 where effects have the right size. Over all points together a few of them decide that slope: the script names those
that hold nine tenths of the squared change, and gives the median of the points' own slopes beside it. Predictions:

* one step, and the refit of the linearized network (`remove(..., steps=None)`);
* relinearized, so many Gauss-Newton steps of the network itself without the point;
* one step with the exact Hessian of the network in place of the Gauss-Newton matrix, from autograd, to see what the
  latter leaves out. Where the exact Hessian without a point has a negative eigenvalue, the minimum is gone with it.

A point *comes back* if training on all data, from the weights without it, leads back to the first weights' outputs.
Where it does not, retraining without the point slid into another minimum of the objective, which was there all the
time: that is no effect of the point alone, and nothing local can foretell it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _problems import PROBLEMS, Problem, small
from _shared import machine, parser, table, write
from _truth import put_back, relinearized, singles
from torch.func import functional_call, jvp

import ntk_laplace as ntkl
from ntk_laplace import attribution

SAME = 0.1  # of the change: nearer than that, a point came back
MOST = 0.9  # of the squared change


def main() -> None:
    """Retrain, predict, compare, for one weight decay after the other."""
    arguments = parser(__doc__, "attribution")
    arguments.add_argument("--problem", choices=PROBLEMS, default="digits")
    arguments.add_argument("--deltas", type=float, nargs="*", help="weight decays (1; 0.5, 5 for cancer, diabetes)")
    arguments.add_argument("--processes", type=int, default=1, help="that retrain (default 1)")
    arguments.add_argument("--single", type=int, default=40, help="points left out one by one (default 40)")
    arguments.add_argument("--steps", type=int, default=4, help="relinearized steps (default 4)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    build = PROBLEMS[options.problem]
    for problem in [build(delta) for delta in options.deltas] if options.deltas else [build()]:
        if options.small:
            options.single, options.steps = 4, min(options.steps, 2)
        own = small(problem) if options.small else problem
        write(options.out / f"{own.name_of_files}-points.json", compared(own, options))


def exact_newton(problem: Problem, theta: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Change of the outputs without each point by one Newton step of the network itself, (m, n, C).

    J (H - H_i)⁻¹ ∇ℓ_i, with second derivatives of the network in H, those of the data and the prior, and in H_i. And
    the least eigenvalue of H - H_i, (m,).
    """
    (network, x_test), count = (problem.network(theta), torch.as_tensor(problem.x_test)), len(problem.x)
    named, tangents = dict(network.named_parameters()), problem.network()
    hessian, prior = problem.hessian(theta, np.arange(count)), problem.delta * np.eye(len(theta))
    found, least = [], []
    for i in chosen:
        own = np.array([i])
        values, vectors = np.linalg.eigh(hessian - (problem.hessian(theta, own) - prior))
        gradient = problem.objective(theta, own)[1] - problem.delta * theta
        step = vectors @ ((vectors.T @ gradient) / values)
        torch.nn.utils.vector_to_parameters(torch.as_tensor(step), tangents.parameters())
        along = dict(tangents.named_parameters())
        found.append(jvp(lambda weights: functional_call(network, weights, (x_test,)), (named,), (along,))[1])
        least.append(values[0])
    return torch.stack(found).detach().numpy(), np.array(least)


def predictions(
    problem: Problem, theta: np.ndarray, chosen: np.ndarray, posterior: ntkl.Posterior, steps: int
) -> dict[str, np.ndarray]:
    """Change of the outputs without each point, (m, n, C) each."""
    x, before = torch.as_tensor(problem.x_test), problem.f(theta, problem.x_test)
    found = {"one step": posterior.explain(x).removal.transpose(0, 1)[chosen].numpy()}
    refitted = [posterior.remove(int(i), steps=None).outputs(x) - posterior.outputs(x) for i in chosen]
    found["refitted"] = torch.stack(refitted).numpy()
    weight_space = problem.posterior(theta, "full")
    moved = [list(relinearized(weight_space, i, steps)) for i in chosen]
    for step in range(steps):
        f = np.stack([problem.f(each[step], problem.x_test) for each in moved])
        found[f"relinearized, {step + 1} step{'s' if step else ''}"] = f - before
    return found


def slope(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Of truth on prediction through the origin; 0 for nothing."""
    return float((predicted * truth).sum() / (predicted**2).sum()) if predicted.any() else 0.0


def compared(problem: Problem, options: argparse.Namespace) -> dict:
    """One weight decay: two tables, and their numbers."""
    name, count = problem.name_of_files, len(problem.x)
    theta = problem.train(np.arange(count))
    before = problem.f(theta, problem.x_test)
    chosen, outputs = singles(problem, theta, options.single, options.out / f"{name}-single", options.processes)
    truth = outputs - before
    again = put_back(problem, theta, chosen, options.out / f"{name}-back", options.processes) - before
    back = np.linalg.norm(again, axis=(1, 2)) < SAME * np.linalg.norm(truth, axis=(1, 2))
    posterior = problem.posterior(theta)
    found = predictions(problem, theta, chosen, posterior, options.steps)
    found["one step, exact Hessian"], least = exact_newton(problem, theta, chosen)
    slopes = {words: np.array([slope(*pair) for pair in zip(own, truth, strict=True)]) for words, own in found.items()}
    rows, numbers = [], {}
    for words, own in found.items():
        everything = attribution.leave_one_out_agreement(own, truth)
        # a constant change cannot be correlated: at least three points, or none
        part = attribution.leave_one_out_agreement(own[back], truth[back]) if back.any() else None
        quarters = np.quantile(slopes[words], (0.25, 0.5, 0.75))
        rows.append([words, f"{everything.correlation:.2f}, {everything.slope:.2f}",
                     "" if part is None else f"{part.correlation:.2f}, {part.slope:.2f}",
                     f"{quarters[1]:.2f} ({quarters[0]:.2f} to {quarters[2]:.2f})"])
        numbers[words] = {"all": vars(everything), "back": part and vars(part), "quartiles": quarters.tolist()}
    print(f"\n{problem.name}, δ = {problem.delta:g}: outputs without {len(chosen)} of {count} points, one by one; "
          f"{int(back.sum())} come back")
    print(table(["prediction", "r, slope: all", "those that come back", "median of the points' slopes (quartiles)"],
                rows))
    points = {
        "points": chosen, "shares": (truth**2).sum((1, 2)) / (truth**2).sum(), "back": back, "least": least,
        "leverages": posterior.leave_one_out().leverage.numpy()[chosen],
    }
    tell(points, slopes, f"relinearized, {options.steps} step{'s' if options.steps > 1 else ''}")
    return {"machine": machine(options.threads), "problem": name, "agreement": numbers,
            **{words: values.tolist() for words, values in points.items()},
            "slopes": {words: values.tolist() for words, values in slopes.items()}}


def tell(points: dict[str, np.ndarray], slopes: dict[str, np.ndarray], last: str) -> None:
    """The points that hold most of the squared change, and a few more."""
    share, back, least, leverage = (points[words] for words in ("shares", "back", "least", "leverages"))
    order = np.argsort(-share)
    many = int(np.searchsorted(share[order].cumsum(), MOST)) + 1
    print(f"\n{many} points hold {share[order[:many]].sum():.0%} of the squared change; {int((~back).sum())} of "
          f"{len(back)} do not come back; flagged by their leverage {int((leverage > 0.9).sum())}; least eigenvalue "
          f"negative at {int((least < 0).sum())}, {int((least[~back] < 0).sum())} of which do not come back")
    head = ["point", "share of the squared change", "leverage", "least eigenvalue", "comes back", "slope, refitted"]
    rows = [[str(points["points"][k]), f"{share[k]:.3f}", f"{leverage[k]:.2f}", f"{least[k]:.2g}",
             "yes" if back[k] else "no", f"{slopes['refitted'][k]:.2f}", f"{slopes[last][k]:.2f}"]
            for k in order[: many + 4]]
    print(table([*head, f"slope, {last}"], rows))
    if (least >= 0).any():
        print(f"least eigenvalue of the others: {least[least >= 0].min():.2g} and more")


if __name__ == "__main__":
    main()
