"""[L22] section 7: conditional evidence from SGLD and SGHMC, beside Laplace's and beside what is known exactly.

    pip install posteriors
    python examples/selection/sampling.py --threads 1 --out sampling

The posterior p(θ given the first 80 %) is sampled, and the other 20 % are asked, jointly and one by one. Samplers:
Hamiltonian Monte Carlo of 32 chains, preconditioned by Laplace's H (written out here); SGHMC with full gradients and
with minibatches of a quarter, and SGLD, by the library `posteriors`. Without it, its updates as they are written out in
_samplers.py take its place, and the output says so. All chains start at draws of Laplace's posterior and first forget
them.

* "conjugate": Bayesian linear regression, P = 10; the exact values are known.
* "toy": noisy sines, one hidden layer of 8 tanh units; also the difference of two evidences by the library's annealed
  importance sampling, which uses no samples of p(θ given the first 80 %), and says whether it is to be trusted.
* "digits": 200 of scikit-learn's digits, one hidden layer of 4 tanh units, prior precision 1.

Beside them are Laplace's: the closed form ("evidence"), draws of the linearized network ("samples", "average"), those
with scale and temperature from held-out points, and 20 and 2,000 draws of the weights in the network itself, which is
what [L22] does. The network knows the first 80 % alone. Printed: value less the reference, mean and standard deviation
over data sets; standard errors that the estimates report; how often they warn. It writes sampling.json and
sampling.png. Finished data sets are kept in the folder: an interrupted run goes on.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _samplers import CHAINS, LIBRARY, Problem, stochastic
from _shared import machine, mlp, once, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace.plotting import SERIES, png
from ntk_laplace.selection import ConditionalEstimate, conditional_from_samples

LEAPFROG = 10


def problem(kind: str, seed: int, small: bool) -> Problem:
    torch.manual_seed(seed)
    if kind == "conjugate":
        x = torch.randn(200, 10).double() / 10**0.5
        y = x @ torch.randn(10, 1).double() + 0.1**0.5 * torch.randn(200, 1).double()
        return trained(Problem(kind, x, y, 170, nn.Linear(10, 1, bias=False).double(), ntkl.Gaussian(0.1), 1.0))
    if kind == "toy":
        x = torch.rand(60, 1).double() * 4 - 2
        y = torch.sin(2.5 * x) + 0.2 * torch.randn(60, 1).double()
        return trained(Problem(kind, x, y, 48, mlp((1, 8, 1)).double(), ntkl.Gaussian(0.04), 1.0),
                       20 if small else 1000)
    from sklearn.datasets import load_digits

    data, order = load_digits(), np.random.default_rng(seed).permutation(1797)[: 40 if small else 200]
    x, y = torch.as_tensor(data.data[order] / 16), torch.as_tensor(data.target[order])
    network = mlp((64, 2 if small else 4, 10)).double()
    return trained(Problem(kind, x, y, round(0.8 * len(y)), network, ntkl.Categorical(), 1.0),
                   20 if small else 1000)


def trained(problem: Problem, steps: int = 100) -> Problem:
    """The same, at the MAP of the first m points."""
    weights = list(problem.network.parameters())
    optimizer = torch.optim.LBFGS(weights, max_iter=steps, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = -problem.log_posterior(torch.cat([w.flatten() for w in weights]).unsqueeze(0)).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    optimizer.zero_grad()
    return problem


# --- samplers: chains of weights, (chains, draws, P)


def hamiltonian(problem: Problem, draws: int, warmup: int) -> Tensor:
    """Leapfrog trajectories, preconditioned by Laplace's H; the warmup adapts the step to an acceptance of .8."""
    given = problem.given
    matrix = given.posterior_precision.multiply(torch.eye(given.num_parameters).double())
    inverse = torch.linalg.inv(matrix)
    root = torch.linalg.cholesky(inverse)  # velocities are draws from N(0, H⁻¹)
    theta, step, kept = given.sample(CHAINS), 0.5, []
    value, slope = problem.slope(theta)
    for number in range(warmup + draws):
        velocity = torch.randn_like(theta) @ root.T
        size = step * (0.8 + 0.4 * torch.rand(CHAINS, 1).double())
        before, moved, moved_slope = value - 0.5 * (velocity @ matrix * velocity).sum(1), theta, slope
        velocity = velocity + 0.5 * size * (moved_slope @ inverse)
        for leap in range(LEAPFROG):
            moved = moved + size * velocity
            moved_value, moved_slope = problem.slope(moved)
            velocity = velocity + (1.0 if leap < LEAPFROG - 1 else 0.5) * size * (moved_slope @ inverse)
        change = moved_value - 0.5 * (velocity @ matrix * velocity).sum(1) - before
        taken = torch.rand(CHAINS).double().log() < change
        theta, slope = (torch.where(taken[:, None], a, b) for a, b in ((moved, theta), (moved_slope, slope)))
        value = torch.where(taken, moved_value, value)
        if number < warmup:
            step *= math.exp(0.3 * (float(change.clamp_max(0).exp().nan_to_num(0.0).mean()) - 0.8))
        else:
            kept.append(theta)
    return torch.stack(kept, 1)


# --- one data set


def study(kind: str, seed: int, small: bool) -> dict[str, Any]:
    """Joint and marginal conditional evidence by each way, [value, standard error, variance, trusted]."""
    case = problem(kind, seed, small)
    m, rest, found = case.known, slice(case.known, None), {}
    torch.manual_seed(1000 + seed)
    draws, warmup, every = (10, 5, 1) if small else (100, 50, 8)
    samplers: dict[str, Callable[[], Tensor]] = {
        "HMC": lambda: hamiltonian(case, draws, warmup),
        "SGHMC": lambda: stochastic(case, "sghmc", draws, warmup, every),
        "SGHMC, minibatches": lambda: stochastic(case, "sghmc", draws, warmup, every, 0.25),
        "SGLD": lambda: stochastic(case, "sgld", draws, warmup, every),
    }
    for name, sample in samplers.items():
        thetas = sample()
        log_p = torch.stack([case.log_likelihood(chain, rest).detach() for chain in thetas])
        found[name] = both(log_p)
        if name != "HMC":
            few = log_p[:20, -1:]  # the last state of each of 20 chains
            found[f"{name}, 20 samples"] = both(few)
    weights = case.given.sample(2000)
    log_p = case.log_likelihood(weights, rest).detach()
    found["Laplace, weights"] = both(log_p.unsqueeze(1))
    found["Laplace, 20 weights"] = both(log_p[:20].unsqueeze(1))
    posterior, quiet = case.posterior, warnings.catch_warnings()
    with quiet:
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        verb = posterior.conditional_log_marginal_likelihood
        warm = "draws" if case.likelihood.classifies else None
        found["Laplace, closed form"] = {"joint": [float(verb(m, 0)), 0.0, 0.0, True]}
        for words, options in (("Laplace, linearized", {"scale": 1.0}), ("Laplace, tuned", {"temperature": warm})):
            found[words] = {"joint": [float(verb(m, 0, method="samples", draws=5000, **options)), 0.0, 0.0, True],
                            "marginal": [float(verb(m, 0, method="average", **options)), 0.0, 0.0, True]}
        if kind == "toy":
            steps = 4 if small else 1000
            source = torch.Generator().manual_seed(seed)
            ends = [one.annealed_evidence(steps, CHAINS, generator=source) for one in (posterior, case.given)]
            error = math.hypot(*(end.standard_error for end in ends))
            found["annealed"] = {"joint": [ends[0].value - ends[1].value, error, 0.0, all(e.trusted for e in ends)]}
    if kind == "conjugate":
        found["exact"] = {form: [value, 0.0, 0.0, True] for form, value in conjugate(case).items()}
    return found


def both(log_p: Tensor) -> dict[str, list[Any]]:
    """Joint and marginal estimate of log likelihoods (chains, draws, n)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # counted in the table
        found: dict[str, ConditionalEstimate] = {
            kind: conditional_from_samples(log_p, kind) for kind in ("joint", "marginal")
        }
    return {kind: [one.value, one.standard_error, one.variance, one.trusted] for kind, one in found.items()}


def conjugate(case: Problem) -> dict[str, float]:
    """Closed forms of Bayesian linear regression, from its formulas."""
    x, y, m, noise = case.x, case.y[:, 0], case.known, float(case.likelihood.noise)
    matrix = case.precision * torch.eye(x.shape[1]).double() + x[:m].T @ x[:m] / noise
    error = y[m:] - x[m:] @ torch.linalg.solve(matrix, x[:m].T @ y[:m] / noise)
    covariance = noise * torch.eye(len(y) - m).double() + x[m:] @ torch.linalg.solve(matrix, x[m:].T)
    joint = torch.distributions.MultivariateNormal(torch.zeros_like(error), covariance).log_prob(error)
    marginal = torch.distributions.Normal(0.0, covariance.diagonal().sqrt()).log_prob(error).sum()
    return {"joint": float(joint), "marginal": float(marginal)}


# --- all of them

REFERENCE = {"conjugate": {"joint": "exact", "marginal": "exact"}, "toy": {"joint": "HMC", "marginal": "HMC"},
             "digits": {"joint": "HMC", "marginal": "HMC"}}


def main() -> None:
    arguments = parser(__doc__, "sampling")
    arguments.add_argument("--seeds", type=int, default=5, help="data sets of each problem (default 5)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    if LIBRARY == "written out":
        print("posteriors is not installed (pip install posteriors): its updates are those written out in _samplers.py")
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in REFERENCE:
        found[kind] = [once(options.out / f"{kind}_{seed}.json", [str(options.small), LIBRARY],
                            lambda kind=kind, seed=seed: study(kind, seed, options.small))
                       for seed in range(2 if options.small else options.seeds)]
        print(f"\n{report(kind, found[kind])}", flush=True)
    write(options.out / "sampling.json", {"machine": machine(options.threads), "library": LIBRARY, "results": found})
    (options.out / "sampling.png").write_bytes(png(picture(found)))


def differences(kind: str, runs: list[dict[str, Any]], name: str, form: str) -> np.ndarray | None:
    """Values less the reference's, one for each data set."""
    if form not in runs[0][name]:
        return None
    reference = REFERENCE[kind][form]
    return np.array([run[name][form][0] - run[reference][form][0] for run in runs])


def report(kind: str, runs: list[dict[str, Any]]) -> str:
    rows = []
    for name in runs[0]:
        row = [name]
        for form in ("joint", "marginal"):
            away = differences(kind, runs, name, form)
            if away is None:
                row += ["-", "-", "-"]
                continue
            if name == REFERENCE[kind][form]:
                values = [run[name][form][0] for run in runs]
                row += [f"reference: {np.mean(values):.2f}"]
            else:
                row += [f"{away.mean():+.2f} ± {away.std(ddof=1):.2f}"]
            errors = [run[name][form][1] for run in runs]
            row += ["-" if max(errors) == 0.0 else f"{np.median(errors):.2g}",
                    "-" if max(errors) == 0.0 else f"{sum(not run[name][form][3] for run in runs)} of {len(runs)}"]
        rows.append(row)
    heads = [kind, "joint", "its error", "warned", "marginal", "its error", "warned"]
    return f"less the reference, nats; ± is the spread of {len(runs)} data sets\n{table(heads, rows)}"


def picture(found: dict[str, list[dict[str, Any]]]) -> Figure:
    """Differences from the reference of each problem."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    for axes, (kind, runs) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        names = [name for name in runs[0] if name not in ("exact", "annealed")][::-1]
        for form, (color, marker, _), shift in zip(("joint", "marginal"), SERIES, (0.15, -0.15), strict=False):
            for place, name in enumerate(names):
                away = differences(kind, runs, name, form)
                if away is not None:
                    axes.plot(away, np.full(len(away), place + shift), marker, color=color, alpha=0.7, markersize=4,
                              label=form if place == len(names) - 1 else None)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=1.0)
        axes.set_yticks(range(len(names)), names if kind == "conjugate" else [""] * len(names))
        axes.set_title(kind)
        axes.set_xlabel("less the reference, nats")
        axes.margins(x=0.08)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
