"""Parameters of a spectral mixture kernel by LML, CLML and leave-one-out, inside the data and beyond them ([L22] 8.1).

    python examples/selection/spectral_mixture.py --out spectral_mixture

[L22] learns kernels of one or two parameters; a spectral mixture of GPyTorch with four components has 14 with the noise
and the mean, and many optima. Data sets: draws of a Gaussian process of two quasi-periodic components (frequencies of
[0.2, 0.5] and [0.5, 1], bandwidth 0.02, weight 0.5 each) with noise of sd 0.1, at times 0, 0.2, ..., 19.8. 60 of the
first 75 times train, the other 15 ask for interpolation, the last 25 for extrapolation. Each objective is maximized by
Adam from the same random starts, and keeps the start with the highest value of its own. Objectives: LML; CLML of the
last tenth in new random orders, in one random order, and in the order of time given the first two thirds; GPyTorch's
leave-one-out. All data sets and starts are one batch. Scores are means over data sets with standard errors, paired
with the LML's; the kernel that made the data stands beside them. It writes spectral_mixture.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import SpectralMixtureKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from torch import Generator, Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _deep import standard_error
from _shared import machine, parser, table, write

from ntk_laplace.gp import ConditionalMarginalLogLikelihood

NOISE, BANDWIDTH, WITHIN = 0.1**2, 0.02, 75
OBJECTIVES = ("LML", "CLML", "CLML, one order", "CLML, in time", "LOO")


class Mixture(gpytorch.models.ExactGP):
    """Spectral mixture kernels, one for each of a batch."""

    def __init__(self, x: Tensor, y: Tensor, components: int) -> None:
        batch = x.shape[:-2]
        super().__init__(x, y, GaussianLikelihood(batch_shape=batch))
        self.mean = ConstantMean(batch_shape=batch)
        self.kernel = SpectralMixtureKernel(num_mixtures=components, batch_shape=batch)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at inputs."""
        return MultivariateNormal(self.mean(x), self.kernel(x))


def data_sets(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Times (T,), targets (B, T), the true covariances with noise (B, T, T), and the training times of each, (B, 60).

    Training times are in the order of time.
    """
    generator = Generator().manual_seed(0)
    times = 0.2 * torch.arange(100, dtype=torch.float64)
    low, width = torch.tensor([0.2, 0.5]).double(), torch.tensor([0.3, 0.5]).double()
    frequency = low + width * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    lag = times[:, None] - times
    waves = (2 * torch.pi * lag * frequency[..., None, None]).cos()
    covariance = (0.5 * waves * (-2 * (torch.pi * BANDWIDTH * lag).square()).exp()).sum(1)
    covariance = covariance + NOISE * torch.eye(len(times), dtype=torch.float64)
    white = torch.randn(count, len(times), 1, generator=generator, dtype=torch.float64)
    y = (torch.linalg.cholesky(covariance) @ white).squeeze(-1)
    train = torch.stack([torch.randperm(WITHIN, generator=generator)[:60].sort().values for _ in range(count)])
    return times, y, covariance, train


def random_start(model: Mixture, starts: int) -> None:
    """Frequencies up to 1.5, bandwidths of 0.05, equal weights that sum to 1, noise 0.1; other ones for each start."""
    shape = model.kernel.mixture_means.shape
    drawn = 1.5 * torch.rand(starts, *shape[1:], generator=Generator().manual_seed(1), dtype=torch.float64)
    model.kernel.mixture_means = drawn.repeat(shape[0] // starts, 1, 1, 1)
    model.kernel.mixture_scales = torch.full(shape, 0.05, dtype=torch.float64)
    weights = model.kernel.mixture_weights
    model.kernel.mixture_weights = torch.full_like(weights, 1 / weights.shape[-1])
    model.likelihood.noise = torch.full_like(model.likelihood.noise, 0.1)


def objective(name: str, model: Mixture) -> Callable[[], Tensor]:
    """What is maximized, (B,), one of OBJECTIVES."""
    likelihood, in_time = model.likelihood, torch.arange(model.train_targets.shape[-1])[None]
    score = {
        "LML": lambda: ExactMarginalLogLikelihood(likelihood, model),
        "CLML": lambda: ConditionalMarginalLogLikelihood(likelihood, model, orders=4),
        "CLML, one order": lambda: ConditionalMarginalLogLikelihood(likelihood, model, fresh=False),
        "CLML, in time": lambda: ConditionalMarginalLogLikelihood(likelihood, model, share=2 / 3, orders=in_time),
        "LOO": lambda: LeaveOneOutPseudoLikelihood(likelihood, model),
    }[name]()
    return lambda: score(model(*model.train_inputs), model.train_targets)


def scores(mean: Tensor, covariance: Tensor, y: Tensor, train: Tensor) -> dict[str, Tensor]:
    """Of each data set, from the mean (B,) and covariance with noise (B, T, T) of all points: conditioned on training.

    Root mean squared error and negative log likelihood, inside the training times and beyond.
    """
    names = [f"{where} {what}" for where in ("inside", "beyond") for what in ("RMSE", "NLL")]
    found: dict[str, list[float]] = {name: [] for name in names}
    for one, joint, values, given in zip(mean, covariance, y, train, strict=True):
        asked = torch.ones(len(values), dtype=torch.bool)
        asked[given] = False
        gain = torch.linalg.solve(joint[given][:, given], joint[given][:, asked]).T
        predicted = one + gain @ (values[given] - one)
        spread = joint[asked][:, asked].diagonal() - (gain * joint[asked][:, given]).sum(1)
        density = -torch.distributions.Normal(predicted, spread.sqrt()).log_prob(values[asked])
        square = (predicted - values[asked]).square()
        for where, part in (("inside", slice(None, WITHIN - len(given))), ("beyond", slice(WITHIN - len(given), None))):
            found[f"{where} RMSE"].append(square[part].mean().sqrt().item())
            found[f"{where} NLL"].append(density[part].mean().item())
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def learned(name: str, options: argparse.Namespace) -> dict[str, Tensor]:
    """Scores of one objective's kernels."""
    times, y, _, train = data_sets(options.sets)
    x_all = times[:, None].expand(options.sets * options.starts, -1, -1)
    rows = train.repeat_interleave(options.starts, 0)
    targets = y.gather(1, train).repeat_interleave(options.starts, 0)
    model = Mixture(times[rows].unsqueeze(-1), targets, 4).double()
    random_start(model, options.starts)
    value = objective(name, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    recent = torch.zeros(len(targets), dtype=torch.float64)
    for step in range(options.steps):
        optimizer.zero_grad()
        found = value()
        (-found.sum()).backward()
        optimizer.step()
        if step >= options.steps * 3 // 4:  # a mean, because new orders change the value
            recent += found.detach()
    best = recent.view(-1, options.starts).argmax(1) + options.starts * torch.arange(options.sets)
    with torch.no_grad():
        noisy = model.likelihood(model.forward(x_all))
        return scores(noisy.mean[best, 0], noisy.covariance_matrix[best], y, train)


def main() -> None:
    arguments = parser(__doc__, "spectral_mixture")
    arguments.add_argument("--sets", type=int, default=30, help="data sets (default 30)")
    arguments.add_argument("--starts", type=int, default=3, help="random starts (default 3)")
    arguments.add_argument("--steps", type=int, default=400, help="of Adam (default 400)")
    options = arguments.parse_args()
    if options.small:
        options.sets, options.starts, options.steps = 3, 2, 4
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    _, y, covariance, train = data_sets(options.sets)
    found = {name: learned(name, options) for name in OBJECTIVES}
    found["truth"] = scores(torch.zeros(options.sets, dtype=torch.float64), covariance, y, train)
    rows, kept = [], {}
    for name, own in found.items():
        row, kept[name] = [name], {}
        for score, values in own.items():
            difference = values - found["LML"][score]
            summary = {"mean": values.mean().item(), "median": values.median().item(),
                       "difference": difference.mean().item(), "standard_error": standard_error(difference),
                       "better": int((difference < 0).sum())}
            kept[name][score] = summary
            less = f" ({summary['difference']:+.3f} ± {summary['standard_error']:.3f}, {summary['better']})"
            row.append(f"{summary['mean']:.3f} [{summary['median']:.3f}]" + ("" if name == "LML" else less))
        rows.append(row)
    print(f"{options.sets} data sets: mean [median] (mean less the LML's ± standard error, data sets in which it is "
          f"smaller)\n{table(['objective', *found['LML']], rows)}")
    write(options.out / "spectral_mixture.json", {"machine": machine(options.threads), "results": kept})


if __name__ == "__main__":
    main()
