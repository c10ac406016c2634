"""[L22] appendix G: the conditional evidence is a joint density, a validation score a product of marginals.

    python examples/selection/exact/joint_and_marginal.py --threads 1 --out joint_and_marginal

First the paper's example, two points under two samples, and its tempered form, p_T proportional to p^(1/T) for two
classes. Then both densities in closed form: a Gaussian process with a radial basis function kernel (lengthscale 0.3,
noise variance 0.04) is given 2 or 45 points on [0, 1], and 15 others are asked. Under the true model the joint log
density exceeds the sum of marginals by the total correlation of the predictions on average; under a wrong noise or
lengthscale the two differ otherwise, and disagree about models. It writes joint_and_marginal.json.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from _exact import ask, log_density, machine, means, normal, predictive, shown, table, write
from torch import Tensor

import ntk_laplace as ntkl

SAMPLES = torch.tensor([[0.1, 0.9], [0.9, 0.1]], dtype=torch.float64)  # p(d_i given w_s): rows are samples
TEMPERATURES = (0.5, 1.0, 2.0, 4.0, 8.0)
KNOWN, ASKED, LENGTH, NOISE = (2, 45), 15, 0.3, 0.04
MODELS = {"true": (LENGTH, NOISE), "noise / 4": (LENGTH, NOISE / 4), "noise x 4": (LENGTH, 4 * NOISE),
          "lengthscale / 2": (LENGTH / 2, NOISE), "lengthscale x 2": (2 * LENGTH, NOISE)}


def tempered(temperature: float) -> Tensor:
    """Densities of two classes at a temperature, of each sample."""
    logits = (SAMPLES.log() - (1 - SAMPLES).log()) / temperature
    return torch.sigmoid(logits)


def of_samples(densities: Tensor) -> tuple[float, float]:
    """Joint and marginal density."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # two samples are few
        return tuple(math.exp(float(ntkl.selection.conditional_from_samples(densities.log(), kind)))
                     for kind in ("joint", "marginal"))


def radial(x: Tensor, length: float) -> Tensor:
    """Radial basis function kernel of each row of inputs, (sets, n, n)."""
    return (-0.5 * (x[:, :, None] - x[:, None, :]).square() / length**2).exp()


def exact(sets: int, known: int) -> dict[str, dict[str, Tensor]]:
    """Joint log density, sum of marginals and total correlation of each data set, (sets,), by model."""
    generator, n = torch.Generator().manual_seed(0), known + ASKED
    x = torch.rand(sets, n, generator=generator, dtype=torch.float64)
    identity = torch.eye(n, dtype=torch.float64)
    z = torch.randn(sets, n, 1, generator=generator, dtype=torch.float64)
    y = (torch.linalg.cholesky(radial(x, LENGTH) + NOISE * identity) @ z)[..., 0]
    found = {}
    for name, (length, noise) in MODELS.items():
        prior, own = radial(x, length), noise * identity
        mean, spread = predictive(prior[:, :known, :known] + own[:known, :known], y[:, :known],
                                  prior[:, known:, :known], prior[:, known:, known:])
        spread = spread + own[known:, known:]
        variance = spread.diagonal(dim1=-2, dim2=-1)
        found[name] = {
            "joint": log_density(spread, y[:, known:] - mean), "marginal": normal(y[:, known:], mean, variance).sum(1),
            "correlation": 0.5 * (variance.log().sum(1) - torch.linalg.slogdet(spread).logabsdet),
        }
    return found


def main() -> None:
    options = ask(__doc__, "joint_and_marginal", 1000).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.sets = min(options.sets, 20) if options.small else options.sets
    torch.set_num_threads(options.threads)
    kept: dict[str, Any] = {"machine": machine(options.threads)}
    joint, marginal = of_samples(SAMPLES)
    equal = of_samples(torch.full((2, 2), 0.5, dtype=torch.float64))
    print(f"two points, two samples: joint {joint:.4f} (paper 0.09), marginal {marginal:.4f} (paper 0.25)")
    print("all densities 0.5: joint {:.4f}, marginal {:.4f} (paper 0.25 and 0.25)".format(*equal))
    kept["samples"] = {"joint": joint, "marginal": marginal, "equal": equal}
    kept["tempered"] = {str(t): of_samples(tempered(t)) for t in TEMPERATURES}
    rows = [[t, *(f"{value:.4f}" for value in values)] for t, values in kept["tempered"].items()]
    print(f"\n{table(['T', 'joint', 'marginal'], rows)}")
    heads = ["model", "joint", "sum of marginals", "joint less marginals", "total correlation"]
    kept["means"], kept["counts"] = {}, {}
    for known in KNOWN:
        found, rows, words = exact(options.sets, known), [], []
        for name, own in found.items():
            gap = own["joint"] - own["marginal"]
            rows.append([name, shown(own["joint"]), shown(own["marginal"]), shown(gap), shown(own["correlation"])])
            kept["means"][f"{known}, {name}"] = {kind: means(value) for kind, value in own.items()}
            if name != "true":
                better = {kind: own[kind] > found["true"][kind] for kind in ("joint", "marginal")}
                share = {kind: float(value.double().mean()) for kind, value in better.items()}
                share["disagree"] = float((better["joint"] != better["marginal"]).double().mean())
                kept["counts"][f"{known}, {name}"] = share
                words.append(f"{name} is above the true model in: joint {share['joint']:.0%}, marginals "
                             f"{share['marginal']:.0%}; the two disagree in {share['disagree']:.0%}")
        print(f"\n{options.sets} data sets, {ASKED} points asked given {known}, nats\n{table(heads, rows)}")
        print("\n".join(words))
    write(options.out / "joint_and_marginal.json", kept)


if __name__ == "__main__":
    main()
