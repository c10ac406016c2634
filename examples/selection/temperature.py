"""[L22] section 7 and appendix G: what a temperature does to the joint and to the marginal conditional evidence.

    python examples/selection/temperature.py --threads 1 --out temperature

* "toy": 40 labels of a Gaussian process classification, f ~ N(0, K) with K of standard deviation 3 and length scale .3
  on [0, 1]; the labels come from a function with a third of these latent values, so that the model is overconfident.
  Temperatures .5, 1, 2, 3, 6 divide each draw of f. Joint density: by annealed importance sampling of f (the
  reference), from 200,000 samples, and from 20 (mean and standard deviation over 1,000 repetitions); sum of marginals.
  For the labels of one set, and the means over more sets.
* "digits": networks trained by L-BFGS on 80 % of 500 of scikit-learn's digits, KFAC-Laplace; scale of the covariance
  and temperature fitted to 5 % by `calibrate`; the other 15 % are predicted by joint draws of f. [L22]'s claims are
  about rankings: Spearman's ρ of the joint density of 20 and 2,000 draws and of the sum of marginals, each before and
  after, with test accuracy and test log likelihood of the averaged predictions of networks trained on all 500 and asked
  1,000 other digits.
* "sampled": the same networks at the first precision by SGHMC's dynamics (`baoa` of the library `posteriors`; without
  it, the same update written out in _samplers.py): 8 chains from the MAP of the 80 %, 800 draws after a warmup that
  ends when the virial theorem holds; temperatures of each draw and of the average fitted to the 5 %; the draws
  themselves predict the test digits.

It writes temperature.json and temperature.png. Finished cells are kept in the folder: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import minimize_scalar
from scipy.stats import spearmanr
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _samplers import LIBRARY, Problem, underdamped
from _shared import machine, mlp, once, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace.metrics import accuracy, mean_log_likelihood
from ntk_laplace.model.calibration import CalibratedPredictive
from ntk_laplace.plotting import SERIES, png
from ntk_laplace.selection import ConditionalEstimate, conditional_from_samples

TEMPERATURES = (0.5, 1.0, 2.0, 3.0, 6.0)
LABELS = "0110000111101110010111110111111001111100"  # those that the specification's numbers belong to
JOINT = {0.5: -32.1, 1.0: -29.6, 2.0: -27.7, 3.0: -27.1, 6.0: -26.9}  # its numbers
FEW = 20  # draws in [L22]
HIDDEN = {"linear": (), "4": (4,), "8": (8,), "16": (16,), "32": (32,), "64": (64,), "128": (128,), "8-8": (8, 8),
          "16-16": (16, 16), "32-32": (32, 32), "64-64": (64, 64), "16-16-16": (16, 16, 16),
          "32-32-32": (32, 32, 32)}
BEFORE = {"none": ntkl.Calibration()}


def main() -> None:
    arguments = parser(__doc__, "temperature")
    arguments.add_argument("--seeds", type=int, default=3, help="splits and initial weights of the digits (default 3)")
    arguments.add_argument("--precisions", default="0.1,0.001", help="prior precisions of the digits' networks")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    toy = once(options.out / "toy.json", [str(options.small)], lambda: toy_study(options.small))
    print(toy_table(toy))
    precisions = [float(word) for word in options.precisions.split(",")][: 1 if options.small else None]
    cells = {str(precision): [cell(name, precision, seed, options)
                              for seed in range(1 if options.small else options.seeds)
                              for name in list(HIDDEN)[:: 8 if options.small else 1]] for precision in precisions}
    summaries = {precision: summary(found) for precision, found in cells.items()}
    for precision, found in summaries.items():
        print(f"\ndigits, prior precision {precision}: {found['networks']} networks, {found['seeds']} splits")
        print(digits_table(found))
    drawn = [sampled_cell(name, precisions[0], seed, options) for seed in range(1 if options.small else options.seeds)
             for name in list(HIDDEN)[:: 8 if options.small else 1]]
    sampling = summary(drawn)
    print(f"\nsampled, prior precision {precisions[0]:g}, {LIBRARY}\n{sampled_table(drawn)}\n{digits_table(sampling)}")
    kept = {"machine": machine(options.threads), "toy": toy, "digits": summaries, "cells": cells,
            "sampled": {"library": LIBRARY, "summary": sampling, "cells": drawn}}
    write(options.out / "temperature.json", kept)
    (options.out / "temperature.png").write_bytes(png(picture(toy, cells)))


# --- the toy


def toy_study(small: bool) -> dict[str, Any]:
    """The forms at each temperature, for the labels of the specification and on average over sets of labels."""
    count, sets, chains, steps = (2_000, 2, 8, 30) if small else (200_000, 40, 64, 1000)
    x = torch.linspace(0, 1, len(LABELS), dtype=torch.float64)
    kernel = 9.0 * torch.exp(-0.5 * (x[:, None] - x).square() / 0.3**2) + 1e-8 * torch.eye(len(x)).double()
    root = torch.linalg.cholesky(kernel)
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(count, len(x), generator=generator, dtype=torch.float64) @ root.T
    given = torch.tensor([float(label) for label in LABELS], dtype=torch.float64)
    found: dict[str, Any] = {"one": {}, "sets": {}}
    for t in TEMPERATURES:
        found["one"][str(t)] = forms(f / t, given) | {"exact": annealed(root / t, given, chains, steps)}
    for t in TEMPERATURES:
        runs = []
        for number in range(sets):
            source = torch.Generator().manual_seed(1 + number)
            latent = root @ torch.randn(len(x), generator=source, dtype=torch.float64) / 3
            labels = (torch.rand(len(x), generator=source, dtype=torch.float64) < torch.sigmoid(latent)).double()
            runs.append(forms(f[: count // 10] / t, labels))
        keys = ("joint", "few", "few_sd", "marginal", "gap")
        found["sets"][str(t)] = {key: [float(np.mean([run[key] for run in runs])),
                                       float(np.std([run[key] for run in runs], ddof=1) / sets**0.5)] for key in keys}
    return found


def forms(f: Tensor, labels: Tensor) -> dict[str, Any]:
    """Joint and marginal log densities of labels 0 and 1 from draws f (S, N), and the joint one from 20 at a time."""
    log_p = -nn.functional.softplus(torch.where(labels == 1, -f, f))
    joint, marginal = estimate(log_p), estimate(log_p, "marginal")
    few = in_parts(log_p[:20_000])
    return {"joint": joint.value, "joint_error": joint.standard_error, "variance": joint.variance,
            "trusted": joint.trusted, "marginal": marginal.value, "gap": marginal.value - joint.value,
            "few": float(few.mean()), "few_sd": float(few.std())}


def in_parts(log_p: Tensor) -> Tensor:
    """The joint form from 20 samples at a time."""
    total = log_p.sum(1)[: len(log_p) // FEW * FEW].view(-1, FEW)
    return total.logsumexp(1) - math.log(FEW)


def annealed(features: Tensor, labels: Tensor, chains: int, steps: int) -> list[float]:
    """log p(labels) of f = features w, w ~ N(0, I), by the library's annealed importance sampling, and its error."""
    network = nn.Linear(features.shape[1], 1, bias=False).double()
    nn.init.zeros_(network.weight)
    fitted = ntkl.laplace(network, (features, labels[:, None]), ntkl.Bernoulli(), structure="full",
                          settings=ntkl.Settings(progress=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # of few chains, in miniature
        found = fitted.annealed_evidence(steps, chains, start="prior", model="glm",
                                         generator=torch.Generator().manual_seed(0))
    return [found.value, found.standard_error]


def toy_table(found: dict[str, Any]) -> str:
    heads = ["T", "joint, annealed", "specification", "200,000 samples", "20 samples", "marginal", "gap",
             "mean gap of the sets", "mean noise of 20"]
    rows = []
    for t in TEMPERATURES:
        one, sets = found["one"][str(t)], found["sets"][str(t)]
        exact, error = one["exact"]
        star = "" if one["trusted"] else " *"
        rows.append([f"{t:g}", f"{exact:.2f} ± {error:.2f}", f"{JOINT[t]}", f"{one['joint']:.2f}{star}",
                     f"{one['few']:.1f} ± {one['few_sd']:.1f}", f"{one['marginal']:.2f}",
                     f"{one['marginal'] - exact:+.2f}", f"{sets['gap'][0]:+.2f} ± {sets['gap'][1]:.2f}",
                     f"{sets['few_sd'][0]:.2f}"])
    return f"toy; ± of 20 samples is their spread, * a warning\n{table(heads, rows)}"


# --- digits


def cell(name: str, precision: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One network of one split, kept in a file."""
    kept = options.out / f"digits_{precision:g}_{name}_{seed}.json"
    return once(kept, [str(options.small)], lambda: digits(name, precision, seed, options.small))


def split(seed: int, small: bool) -> tuple[tuple[Tensor, Tensor], tuple[slice, ...]]:
    """The digits in the order of a seed; those known, those that calibrate, those that score, and the test digits."""
    from sklearn.datasets import load_digits

    data, order = load_digits(), np.random.default_rng(seed).permutation(1797)
    n, asked = (100, 60) if small else (500, 1000)
    ends = [0, round(0.8 * n), round(0.85 * n), n, n + asked]
    parts = tuple(slice(*pair) for pair in itertools.pairwise(ends))
    return (torch.as_tensor(data.data[order] / 16), torch.as_tensor(data.target[order])), parts


def digits(name: str, precision: float, seed: int, small: bool) -> dict[str, Any]:
    """The forms of one network, for each calibration, beside its test scores."""
    (x, y), parts = split(seed, small)
    known, tuned, rest, asked = parts
    test, draws = (x[asked], y[asked]), 100 if small else 2000
    blind, whole = (fitted(trained(name, (x[part], y[part]), precision, seed, 20 if small else 300),
                           (x[part], y[part]), precision) for part in (known, slice(asked.start)))
    torch.manual_seed(seed)
    mean = blind.outputs(x[rest])
    away = blind.sample(draws, x[rest]) - mean
    moments = whole.latent_moments(test[0])
    found: dict[str, Any] = {"name": name, "seed": seed, "parameters": blind.num_parameters,
                             "map_accuracy": accuracy(whole.predict(test[0], "map").probs, test[1])}
    for words, calibration in calibrations(blind, (x[tuned], y[tuned])).items():
        scaled = mean + calibration.scale**0.5 * away
        average = calibration.average_temperature
        log_p = torch.log_softmax(scaled / calibration.temperature, 2)
        own = log_p.gather(2, y[rest].expand(draws, -1)[..., None]).squeeze(2)
        marginal = log_p.logsumexp(0) - math.log(draws)
        marginal = torch.log_softmax(marginal / average, 1).gather(1, y[rest][:, None]).sum()
        blind.predictive = calibration
        # a temperature of each draw or of the average never changes which class the network alone prefers
        same = torch.equal(blind.predict(x[rest], "map").probs.argmax(1), mean.argmax(1))
        predicted = CalibratedPredictive(calibration, ntkl.Categorical(), samples=500)(*moments)
        found[words] = {"scale": calibration.scale, "temperature": calibration.temperature, "average": average,
                        "marginal": float(marginal), "map_unchanged": same,
                        "accuracy": accuracy(predicted.probs, test[1]),
                        "log_likelihood": mean_log_likelihood(predicted, test[1])}
        if average == 1.0:  # the joint density has no average for each point
            joint, few = estimate(own), in_parts(own)
            found[words] |= {"joint": joint.value, "variance": joint.variance, "trusted": joint.trusted,
                             "few": float(few[0]), "few_sd": float(few.std())}
    return found


def trained(name: str, data: tuple[Tensor, Tensor], precision: float, seed: int, steps: int) -> nn.Module:
    """A network at its MAP."""
    torch.manual_seed(seed)
    network = mlp((64, *HIDDEN[name], 10)).double()
    weights = list(network.parameters())
    optimizer = torch.optim.LBFGS(weights, max_iter=steps, tolerance_grad=1e-3, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(data[0]), data[1], reduction="sum")
        loss = loss + 0.5 * precision * sum(w.square().sum() for w in weights)
        loss.backward()
        return loss

    optimizer.step(objective)
    optimizer.zero_grad()
    return network.eval()


def fitted(network: nn.Module, data: tuple[Tensor, Tensor], precision: float) -> ntkl.Posterior:
    """Its posterior, with KFAC."""
    return ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(precision), structure="kfac",
                        settings=ntkl.Settings(progress=False))


def calibrations(posterior: ntkl.Posterior, held_out: tuple[Tensor, Tensor]) -> dict[str, ntkl.Calibration]:
    """None; the scale of the covariance alone; and with it the temperature of each draw, or of the average."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # few held-out points may all be right
        found = BEFORE | {
            "scale": posterior.fit_predictive(held_out, ["scale"]).calibration,
            "temperature of draws": posterior.fit_predictive(held_out, ["temperature"]).calibration,
            "temperature of the average": posterior.fit_predictive(held_out, ["average_temperature"]).calibration,
            "scale, draws": posterior.calibrate(held_out, "draws").calibration,
            "scale, average": posterior.calibrate(held_out, "average").calibration,
        }
    return found


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the splits: mean and range of Spearman's ρ with both test scores, gaps, noise and warnings."""
    seeds, kinds = sorted({one["seed"] for one in cells}), [key for key in cells[0] if isinstance(cells[0][key], dict)]
    found: dict[str, Any] = {"networks": len(cells) // len(seeds), "seeds": len(seeds), "calibrations": {}}
    for words in kinds:
        has_joint = "joint" in cells[0][words]
        own: dict[str, Any] = {"rho": {}}
        for score in ("few", "joint", "marginal") if has_joint else ("marginal",):
            for target in ("accuracy", "log_likelihood"):
                rhos = []
                for seed in seeds:
                    mine = [one for one in cells if one["seed"] == seed]
                    pairs = [one[words][score] for one in mine], [one[words][target] for one in mine]
                    rhos.append(float(spearmanr(*pairs).statistic))
                own["rho"][f"{score}, {target}"] = [float(np.mean(rhos)), min(rhos), max(rhos)]
        for key in ("accuracy", "log_likelihood", "scale", "temperature", "average"):
            own[key] = float(np.mean([one[words][key] for one in cells]))
        if has_joint:
            own["gap"] = float(np.mean([one[words]["marginal"] - one[words]["joint"] for one in cells]))
            own["few_gap"] = float(np.mean([one[words]["marginal"] - one[words]["few"] for one in cells]))
            own["few_sd"] = float(np.mean([one[words]["few_sd"] for one in cells]))
            own["warned"] = float(np.mean([not one[words]["trusted"] for one in cells]))
            own["variance"] = float(np.median([one[words]["variance"] for one in cells]))
        if "map_unchanged" in cells[0][words]:
            own["map_unchanged"] = all(one[words]["map_unchanged"] for one in cells)
        found["calibrations"][words] = own
    return found


def digits_table(found: dict[str, Any]) -> str:
    heads = ["fitted", "test log lik.", "accuracy", "gap", "gap of 20", "noise of 20", "warned",
             "ρ 20, acc.", "ρ joint, acc.", "ρ marginal, acc.", "ρ 20, lik.", "ρ joint, lik.", "ρ marginal, lik."]

    def rho(own: dict[str, Any], key: str) -> str:
        if key not in own["rho"]:
            return "-"
        mean, low, high = own["rho"][key]
        return f"{mean:.2f} ({low:.2f} to {high:.2f})"

    rows = []
    for words, own in found["calibrations"].items():
        joint = [f"{own['gap']:.1f}", f"{own['few_gap']:.1f}", f"{own['few_sd']:.1f}", f"{own['warned']:.0%}"
                 ] if "gap" in own else ["-"] * 4
        rows.append([words, f"{own['log_likelihood']:.3f}", f"{own['accuracy']:.3f}", *joint,
                     *(rho(own, f"{score}, {target}") for target in ("accuracy", "log_likelihood")
                       for score in ("few", "joint", "marginal"))])
    return table(heads, rows)


# --- the same networks, sampled


def sampled_cell(name: str, precision: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One network of one split, kept in a file."""
    kept = options.out / f"sampled_{precision:g}_{name}_{seed}.json"
    return once(kept, [str(options.small), LIBRARY], lambda: sampled(name, precision, seed, options.small))


def sampled(name: str, precision: float, seed: int, small: bool) -> dict[str, Any]:
    """The forms of one network from draws of its weights, for each temperature, beside the test scores of the draws."""
    (x, y), (known, tuned, rest, asked) = split(seed, small)
    network = trained(name, (x[known], y[known]), precision, seed, 20 if small else 300).float()
    problem = Problem(name, x.float(), y, known.stop, network, ntkl.Categorical(), precision)
    start = torch.cat([w.detach().flatten() for w in network.parameters()])
    torch.manual_seed(seed)
    began = time.process_time()
    chains = underdamped(problem, start.repeat(8, 1), *((40, 2, 40) if small else (1000, 10, 5000)))
    seconds = time.process_time() - began
    with torch.no_grad():
        f = problem.outputs(chains.draws.flatten(0, 1), slice(tuned.start, asked.stop)).double()
    f = f[torch.randperm(len(f))]  # twenty at a time are of all chains and times
    parts = f[:, : rest.start - tuned.start], f[:, rest.start - tuned.start : rest.stop - tuned.start], \
        f[:, asked.start - tuned.start :]
    found: dict[str, Any] = {"name": name, "seed": seed, "parameters": len(start), "warmup": chains.warmup,
                             "virial": chains.virial, "kinetic": chains.kinetic, "seconds": seconds}
    for words in ("none", "temperature of draws", "temperature of the average"):
        of_draws = words == "temperature of draws"
        t = 1.0 if words == "none" else best_temperature(parts[0], y[tuned], of_draws)
        draws, average = (t, 1.0) if of_draws else (1.0, t)
        scored = averaged(parts[2], draws, average)
        own = torch.log_softmax(parts[1] / draws, 2).gather(2, y[rest].expand(len(f), -1)[..., None]).squeeze(2)
        marginal = averaged(parts[1], draws, average).gather(1, y[rest][:, None]).sum()
        found[words] = {"scale": 1.0, "temperature": draws, "average": average, "marginal": float(marginal),
                        "accuracy": accuracy(scored.exp(), y[asked]),
                        "log_likelihood": float(scored.gather(1, y[asked][:, None]).mean())}
        if average == 1.0:
            joint, few = estimate(own), in_parts(own)
            found[words] |= {"joint": joint.value, "variance": joint.variance, "trusted": joint.trusted,
                             "few": float(few[0]), "few_sd": float(few.std())}
    return found


def averaged(f: Tensor, draws: float, average: float) -> Tensor:
    """Log probabilities (n, C) of draws of f (S, n, C), at a temperature of each draw and one of their average."""
    mean = torch.log_softmax(f / draws, 2).logsumexp(0) - math.log(len(f))
    return torch.log_softmax(mean / average, 1)


def best_temperature(f: Tensor, y: Tensor, of_draws: bool) -> float:
    """The temperature of the highest density of the labels."""
    def loss(log_t: float) -> float:
        pair = (math.exp(log_t), 1.0) if of_draws else (1.0, math.exp(log_t))
        return -float(averaged(f, *pair).gather(1, y[:, None]).sum())

    return math.exp(minimize_scalar(loss, bounds=(math.log(0.05), math.log(20.0)), method="bounded").x)


def sampled_table(cells: list[dict[str, Any]]) -> str:
    """What says whether the chains have reached the posterior, of each network: the worst of the splits."""
    rows = []
    for name in dict.fromkeys(cell["name"] for cell in cells):
        mine = [cell for cell in cells if cell["name"] == name]
        ranges = [[cell[key] for cell in mine] for key in ("virial", "kinetic")]
        rows.append([name, str(mine[0]["parameters"]), str(max(cell["warmup"] for cell in mine)),
                     *(f"{min(own):.3f} to {max(own):.3f}" for own in ranges),
                     f"{np.mean([cell['seconds'] for cell in mine]):.0f}"])
    return table(["layers", "weights", "warmup", "virial", "momenta", "seconds"], rows)


# --- both


def estimate(log_p: Tensor, kind: str = "joint") -> ConditionalEstimate:
    """The estimate; its warning is counted in the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return conditional_from_samples(log_p, kind)


def picture(toy: dict[str, Any], cells: dict[str, list[dict[str, Any]]]) -> Figure:
    """The toy's forms against the temperature; the digits' joint form of 20 draws against accuracy."""
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(cells))
    one = [toy["one"][str(t)] for t in TEMPERATURES]
    left.errorbar(TEMPERATURES, [v["few"] for v in one], [v["few_sd"] for v in one], color=SERIES[0][0], marker="s",
                  linestyle="--", capsize=3, label="joint, 20 samples ± spread")
    left.plot(TEMPERATURES, [v["exact"][0] for v in one], color=SERIES[1][0], marker="o", label="joint, annealed")
    left.plot(TEMPERATURES, [v["marginal"] for v in one], color=SERIES[2][0], marker="^", linestyle=":",
              label="sum of marginals")
    left.set_xscale("log")
    left.set_xticks(TEMPERATURES, [f"{t:g}" for t in TEMPERATURES])
    left.minorticks_off()
    left.set_xlabel("temperature of each draw")
    left.set_ylabel("log density of 40 labels, nats")
    left.set_title("toy")
    left.legend(fontsize=8)
    for axes, (precision, found) in zip(others, cells.items(), strict=True):
        for (color, marker, _), words in zip(SERIES, ("none", "scale, draws"), strict=False):
            label = "as fitted" if words == "none" else "scale and temperature fitted"
            axes.plot([v[words]["accuracy"] for v in found], [v[words]["few"] for v in found], marker, color=color,
                      alpha=0.7, label=label)
        axes.set_xlabel("test accuracy of the averaged predictions")
        axes.set_ylabel("joint of 75 points, 20 draws, nats")
        if min(v["none"]["few"] for v in found) < -1000:
            axes.set_yscale("symlog", linthresh=20)
        axes.set_title(f"digits, prior precision {precision}")
    others[-1].legend(fontsize=8, loc="upper left")
    return figure


if __name__ == "__main__":
    main()
