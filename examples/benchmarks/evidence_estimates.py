"""Evidences by sampling against what is known: quadrature, conjugate models, symmetries; and chains in one pass.

    python examples/benchmarks/evidence_estimates.py

* coverage: logistic regression with two parameters, 100 data sets: the share whose estimate is within three of its
  reported standard errors of quadrature; and 100 conjugate models whose evidence lies between the bounds.
* units: one hidden layer of 1, 2 and 3 tanh units, 25 points: annealing from the prior sees all 2^M M! modes,
  importance sampling and annealing from the posterior see one.
* starts: Laplace's Gaussian and that of VOGGN, as proposals of importance sampling and as starts of annealing.
* chains: 64 chains of annealing at once against 64 single ones.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _common import machine, parser, table, write
from torch import Tensor, nn

import ntk_laplace as ntkl

PARTS = ("coverage", "units", "starts", "chains")
NOISE = 0.2


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for each estimate."""
    return torch.Generator().manual_seed(seed)


def optimum(network: nn.Module, fit: Callable[[Tensor], Tensor], x: Tensor, precision: float) -> float:
    """Move a network to the optimum of its log joint; the energy there, without constants."""
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=2000, history_size=50, tolerance_grad=1e-10,
                                  tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * precision * sum((p**2).sum() for p in network.parameters()) - fit(network(x))
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(closure().detach())


# --- coverage


def logistic(seed: int) -> tuple[ntkl.Posterior, float]:
    """Logistic regression with two weights at its optimum, and its evidence by the trapezoidal rule."""
    x = torch.randn(15, 2, generator=seeded(seed), dtype=torch.float64)
    y = (torch.rand(15, 1, generator=seeded(seed + 10_000), dtype=torch.float64) < torch.sigmoid(2 * x[:, :1])).double()
    network = nn.Linear(2, 1, bias=False).double()
    optimum(network, lambda f: -nn.functional.binary_cross_entropy_with_logits(f, y, reduction="sum"), x, 0.5)
    line = torch.linspace(-15, 15, 601, dtype=torch.float64)
    weights = torch.cartesian_prod(line, line)
    f = weights @ x.T
    log_density = (y.T * f - nn.functional.softplus(f)).sum(1) - 0.25 * weights.square().sum(1)
    exact = float(log_density.logsumexp(0)) + math.log(0.5 / (2 * math.pi)) + 2 * math.log(float(line[1] - line[0]))
    return ntkl.laplace(network, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(0.5), "full"), exact


def conjugate(seed: int) -> tuple[ntkl.Posterior, float]:
    """Linear regression with six weights, and its evidence."""
    x = torch.randn(30, 5, generator=seeded(seed), dtype=torch.float64)
    y = x[:, :1] + 0.5 * torch.randn(30, 1, generator=seeded(seed + 10_000), dtype=torch.float64)
    posterior = ntkl.laplace(nn.Linear(5, 1).double(), (x, y), ntkl.Gaussian(0.25), ntkl.GaussianPrior(1.0), "full")
    return posterior, float(posterior.evidence(correction=True))


def coverage(seeds: int, small: bool) -> dict[str, Any]:
    """Shares of the data sets, with the mean standard error."""
    steps = 4 if small else 30
    estimates: dict[str, Callable[[ntkl.Posterior, int], Any]] = {
        "importance, network": lambda p, s: p.importance_evidence(2000, generator=seeded(s)),
        "importance, linearized": lambda p, s: p.importance_evidence(2000, model="glm", generator=seeded(s)),
        "annealed from the posterior, network": lambda p, s: p.annealed_evidence(steps, 64, generator=seeded(s)),
        "annealed from the posterior, linearized":
            lambda p, s: p.annealed_evidence(steps, 64, model="glm", generator=seeded(s)),
        "annealed from the prior, network":
            lambda p, s: p.annealed_evidence(2 * steps, 64, "prior", generator=seeded(s)),
    }
    problems = [logistic(seed) for seed in range(seeds)]
    found: dict[str, Any] = {}
    for name, estimate in estimates.items():
        results = [(estimate(posterior, seed), exact) for seed, (posterior, exact) in enumerate(problems)]
        trusted = [(own, exact) for own, exact in results if own.trusted]
        found[name] = {
            "within": sum(abs(own.value - exact) <= 3 * own.standard_error for own, exact in results) / seeds,
            "within, trusted": sum(abs(own.value - exact) <= 3 * own.standard_error for own, exact in trusted)
            / max(1, len(trusted)),
            "trusted": len(trusted) / seeds,
            "error": sum(own.standard_error for own, _ in results) / seeds,
        }
    errors = [abs(float(posterior.evidence()) - exact) for posterior, exact in problems]
    found["Laplace"] = {"mean distance": sum(errors) / seeds}
    held, plain, exact_ones = 0, 0, 0
    for seed in range(seeds):
        posterior, exact = conjugate(seed)
        own = posterior.annealed_evidence(2 * steps, 64, "prior", "glm", bounds=True, generator=seeded(seed))
        held += own.lower - 2 * own.lower_error <= exact <= own.upper + 2 * own.upper_error
        plain += own.lower <= exact <= own.upper
        once = posterior.annealed_evidence(1, 30, model="glm", bounds=True, generator=seeded(seed))
        exact_ones += abs(once.value - exact) < 1e-9 and abs(once.upper - exact) < 1e-9
    found["bounds, conjugate"] = {"within": plain / seeds, "within two standard errors": held / seeds}
    found["one temperature, conjugate"] = {"within": exact_ones / seeds}
    return found


# --- units


def perceptron(units: int) -> ntkl.Posterior:
    """One hidden layer at the best of twelve optima, for 25 points of as many steps of alternating signs."""
    x = 4 * torch.rand(25, 1, generator=seeded(0), dtype=torch.float64) - 2
    places = torch.linspace(-1, 1, units, dtype=torch.float64) if units > 1 else torch.zeros(1, dtype=torch.float64)
    signs = (-1.0) ** torch.arange(units, dtype=torch.float64)
    y = (1.5 * signs * torch.tanh(2 * (x - places))).sum(1, keepdim=True)
    y = y + NOISE**0.5 * torch.randn(25, 1, generator=seeded(1), dtype=torch.float64)
    best: tuple[float, nn.Module] | None = None
    for start in range(12):
        torch.manual_seed(start)
        network = nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1)).double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_()
        energy = optimum(network, lambda f: -0.5 * (f - y).square().sum() / NOISE, x, 1.0)
        best = (energy, network) if best is None or energy < best[0] else best
    assert best is not None
    return ntkl.laplace(best[1], (x, y), ntkl.Gaussian(NOISE), ntkl.GaussianPrior(1.0), "full")


def units(small: bool, temperatures: int, chains: int) -> dict[str, Any]:
    """Three estimates of each network."""
    found = {}
    for count in (1,) if small else (1, 2, 3):
        posterior = perceptron(count)
        options: dict[str, Any] = {"generator": seeded(count)}
        prior = posterior.annealed_evidence(temperatures, chains, "prior", **options)
        near = posterior.annealed_evidence(temperatures // 4, chains // 2, **options)
        drawn = posterior.importance_evidence(2000 if small else 500_000, 2.0, **options)
        symmetry = prior.symmetry or 0.0
        found[str(count)] = {
            "Laplace": float(posterior.evidence()), "symmetry": symmetry,
            **{name: {"value": own.value, "error": own.standard_error, "khat": own.khat, "trusted": own.trusted,
                      "from the prior's": own.value + symmetry * (own is not prior) - prior.value,
                      "joint error": math.hypot(own.standard_error, prior.standard_error)}
               for name, own in (("prior", prior), ("posterior", near), ("importance", drawn))},
        }
    return found


# --- starts


def starts(small: bool) -> dict[str, Any]:
    """Medians over data sets: Pareto shape, and effective share, from two Gaussians at one network."""
    found: dict[str, Any] = {}
    for width in (2,) if small else (2, 4, 8):
        rows: dict[str, list[list[float]]] = {"Laplace": [], "VOGGN": []}
        for seed in range(1 if small else 5):
            x = torch.linspace(-2, 2, 25, dtype=torch.float64).unsqueeze(1)
            y = torch.sin(2 * x) + 0.1**0.5 * torch.randn(25, 1, generator=seeded(seed), dtype=torch.float64)
            torch.manual_seed(seed)
            network = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
            optimum(network, lambda f, y=y: -5.0 * (f - y).square().sum(), x, 1.0)
            problem = network, (x, y), ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0)
            laplace = ntkl.laplace(*problem, "full")
            fit = ntkl.variational(*problem, start=laplace, step_size=0.1, steps=5 if small else 400, samples=4,
                                   average=True, elbo_every=0)
            for name, posterior in (("Laplace", laplace), ("VOGGN", fit.posterior)):
                drawn = posterior.importance_evidence(200 if small else 4000, generator=seeded(seed))
                chains = posterior.annealed_evidence(5 if small else 60, 64, leapfrog=4, generator=seeded(seed))
                rows[name].append([drawn.khat, drawn.ess / drawn.samples, chains.ess / chains.samples])
        found[str(width)] = {name: torch.tensor(own).median(0).values.tolist() for name, own in rows.items()}
    return found


# --- chains


def chains(count: int, temperatures: int) -> dict[str, Any]:
    """Seconds of `count` chains at once, and of as many single ones."""
    x = torch.linspace(-2, 2, 100, dtype=torch.float64).unsqueeze(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 25), nn.Tanh(), nn.Linear(25, 25), nn.Tanh(), nn.Linear(25, 1)).double()
    posterior = ntkl.laplace(network, (x, torch.sin(2 * x)), ntkl.Gaussian(0.1), structure="full")
    found: dict[str, Any] = {"P": posterior.num_parameters, "temperatures": temperatures}
    for model in ("nn", "glm"):
        posterior.annealed_evidence(2, 2, "prior", model, generator=seeded(0))
        start = time.perf_counter()
        posterior.annealed_evidence(temperatures, count, "prior", model, generator=seeded(0))
        together = time.perf_counter() - start
        start = time.perf_counter()
        for seed in range(count):
            posterior.annealed_evidence(temperatures, 1, "prior", model, generator=seeded(seed))
        alone = time.perf_counter() - start
        found[model] = {"together": together, "alone": alone, "ratio": alone / together}
    return found


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "evidence_estimates.json")
    arguments.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    arguments.add_argument("--seeds", type=int, default=100, help="data sets of the coverage")
    arguments.add_argument("--temperatures", type=int, default=1000, help="of the units")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # estimates that are not to be trusted are counted
    result: dict[str, Any] = {"machine": machine(options.threads)}
    parts, small = options.parts.split(","), options.small
    if "coverage" in parts:
        result["coverage"] = coverage(2 if small else options.seeds, small)
        names = ("within", "within, trusted", "within two standard errors", "trusted", "error", "mean distance")
        rows = [[name, *(f"{own[key]:.3g}" if key in own else "" for key in names)]
                for name, own in result["coverage"].items()]
        print("\ncoverage\n" + table(["estimate", *names], rows), flush=True)
    if "units" in parts:
        result["units"] = units(small, *((20, 64) if small else (options.temperatures, 512)))
        rows = [[count, name, f"{own[name]['value']:.3f} ± {own[name]['error']:.2g}", f"{own[name]['khat']:.2f}",
                 f"{own['symmetry']:.3f}", f"{own[name]['from the prior' + chr(39) + 's']:+.3f}",
                 f"{own[name]['joint error']:.3f}"]
                for count, own in result["units"].items() for name in ("prior", "posterior", "importance")]
        head = ["units", "estimate", "nats", "khat", "log 2^M M!", "with it, less the prior's", "joint error"]
        print("\nunits\n" + table(head, rows), flush=True)
    if "starts" in parts:
        result["starts"] = starts(small)
        rows = [[width, name, f"{shape:.2f}", f"{share:.2%}", f"{annealed:.0%}"]
                for width, both in result["starts"].items() for name, (shape, share, annealed) in both.items()]
        print("\nstarts\n" + table(["units", "Gaussian", "khat", "effective", "effective, annealed"], rows), flush=True)
    if "chains" in parts:
        result["chains"] = chains(*((2, 3) if small else (64, 10)))
        rows = [[model, *(f"{result['chains'][model][key]:.3g}" for key in ("together", "alone", "ratio"))]
                for model in ("nn", "glm")]
        print("\nchains\n" + table(["model", "at once, s", "one by one, s", "ratio"], rows))
    write(options.out, result)


if __name__ == "__main__":
    main()
