"""One trained state, many Bayesian scores: by which reading of [I21]'s predictive is the paper's figure met.

    python examples/uci/readings.py --data DIR --dataset yacht --out protocol

It takes the states that `protocol.py` left in --out (it trains them otherwise), of any structure but KFAC, and scores
the test data, negative log likelihood in the original units, under the variance [I21] gives, Var[f] + σ², and under
what a program may have computed instead: the posterior precision in float32, its curvature or prior other than meant,
weights sampled, units mixed. Everything by dense algebra on the Jacobians; nothing of the library takes part. It prints
mean ± standard error over the splits and the distance from the paper's in standard errors, and writes it as JSON.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _batched import Networks
from protocol import CHANGES, kept, load, states, variants
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call, jacrev
from uci import PAPER, mean_and_error, standardised

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

SAMPLES = 100


def jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """Rows of one output, (N, P)."""
    weights = {name: w.detach() for name, w in network.named_parameters()}
    parts = jacrev(lambda w: functional_call(network, w, x).squeeze(-1))(weights)
    return torch.cat([part.flatten(1) for part in parts.values()], 1)


def by_cholesky(precision: Tensor) -> Tensor:
    """A root of the covariance as torch.distributions makes it of a precision, in its dtype."""
    root = torch.linalg.cholesky(precision.flip(-2, -1)).flip(-2, -1).mT
    return torch.linalg.solve_triangular(root, torch.eye(len(root), dtype=root.dtype), upper=False)


def covariances(curvature: Tensor, prior: Tensor, noise: float) -> dict[str, Callable[[], Tensor]]:
    """Of the weights, by reading, of a curvature not yet divided by σ²."""

    def of(factor: float, prior: Tensor = prior) -> Tensor:
        return torch.linalg.inv(factor * curvature + prior.diag())

    def single(how: Callable[[Tensor], Tensor]) -> Tensor:
        return how(curvature.float() / noise + prior.float().diag()).double()

    def from_root(precision: Tensor) -> Tensor:
        root = by_cholesky(precision)
        return root @ root.T

    return {
        "as in [I21]": lambda: of(1 / noise),
        "float32, Cholesky": lambda: single(from_root),
        "float32, inverse": lambda: single(torch.linalg.inv),
        "half the curvature": lambda: of(0.5 / noise),
        "twice the curvature": lambda: of(2 / noise),
        "curvature not divided by σ²": lambda: of(1.0),
        "curvature divided by σ": lambda: of(noise**-0.5),
        "prior precisions of 1": lambda: of(1 / noise, torch.ones_like(prior)),
        "1 added to all precisions": lambda: of(1 / noise, prior + 1.0),
    }


def readings(
    network: nn.Module, prior: Tensor, noise: float, curvature: Tensor, test: tuple[Tensor, Tensor, float]
) -> dict[str, float]:
    """Negative log likelihood of one split's test data by reading."""
    with torch.no_grad():
        mean = network(test[0]).squeeze(-1)
    at, y, spread = jacobian(network, test[0]), *test[1:]
    found = {"MAP": score(mean, torch.full_like(mean, noise), y)}
    for name, covariance in covariances(curvature, prior, noise).items():
        try:
            variance = ((at @ covariance()) * at).sum(1)
        except torch.linalg.LinAlgError:
            variance = torch.full_like(mean, math.nan)
        found[name] = score(mean, variance + noise, y)
        if name == "as in [I21]":
            exact, root = variance, torch.linalg.cholesky(covariance())
    generator = torch.Generator().manual_seed(0)
    noises = torch.randn(SAMPLES, len(root), generator=generator, dtype=root.dtype) @ root.T
    weights = nn.utils.parameters_to_vector(network.parameters()).detach()
    drawn = torch.stack([outputs(network, weights + one, test[0]) for one in noises])
    linear = mean + noises @ at.T
    for name, samples in (("weights sampled", drawn), ("linearized network sampled", linear)):
        found[f"{name}, their mixture"] = mixture(samples, noise, y)
        found[f"{name}, their moments"] = score(samples.mean(0), samples.var(0) + noise, y)
    found["10 samples of the linearized network, their mixture"] = mixture(linear[:10], noise, y)
    found["deviations added"] = score(mean, (exact.sqrt() + noise**0.5).square(), y)
    found["the variance taken for a deviation"] = score(mean, (exact + noise).square(), y)
    # brought to the original units: var[f] s^a + σ²s² is (var[f] s^(a-2) + σ²) s²
    found["Var[f] in standardized units, σ² in the original"] = score(mean, exact / spread**2 + noise, y)
    found["Var[f] times the responses' deviation, σ² times its square"] = score(mean, exact / spread + noise, y)
    return {name: value + math.log(spread) for name, value in found.items()}


def outputs(network: nn.Module, weights: Tensor, x: Tensor) -> Tensor:
    """With other weights."""
    named = dict(network.named_parameters())
    parts = weights.split([w.numel() for w in named.values()])
    moved = {name: part.view_as(w) for (name, w), part in zip(named.items(), parts, strict=True)}
    with torch.no_grad():
        return functional_call(network, moved, x).squeeze(-1)


def score(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    """Of one Gaussian for each point."""
    if not variance.min() > 0:
        return math.nan
    return -Normal(mean, variance.sqrt()).log_prob(y).mean().item()


def mixture(samples: Tensor, noise: float, y: Tensor) -> float:
    """Of the samples' Gaussians with equal weights."""
    densities = Normal(samples, math.sqrt(noise)).log_prob(y)
    return (math.log(len(samples)) - densities.logsumexp(0).mean()).item()


def main() -> None:
    """One data set and structure."""
    arguments = parser(__doc__, "protocol")
    arguments.add_argument("--data", type=Path, help="folder of the .npz files; scikit-learn's diabetes otherwise")
    arguments.add_argument("--dataset", default=None, help="boston, concrete, energy or yacht (default)")
    arguments.add_argument("--structure", choices=("ggn", "ef", "diag-ggn", "diag-ef"), default="ggn")
    arguments.add_argument("--change", choices=CHANGES, default="hyper", help="of protocol.py (default hyper)")
    arguments.add_argument("--splits", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=10_000)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.small:
        options.splits, options.epochs = 2, 40
    name = options.dataset or ("diabetes" if options.data is None else "yacht")
    problem, tests = standardised(name, options.data, options.splits, 60 if options.small else None)
    options.out.mkdir(parents=True, exist_ok=True)
    (protocol,) = variants([options.change], options.structure, False, options.epochs).values()
    states_file = kept(options.out, name, options.structure, options.change, options.splits, options.epochs)
    trained = states(problem, options.structure, protocol, states_file)
    found: dict[str, dict[str, list[float]]] = {}
    for state in ("best", "last"):
        networks = load(Networks(problem, len(tests)), trained[state])
        log_precision, log_noise = (tensor.double() for tensor in trained[state][-2:])
        for split, test in enumerate(tests):
            network = networks.one(split)
            prior = log_precision[split].exp().repeat_interleave(networks.sizes().long())
            rows, noise = jacobian(network, problem.x[split]), log_noise[split].exp().item()
            if options.structure.endswith("ef"):
                with torch.no_grad():
                    residual = problem.y[split] - network(problem.x[split]).squeeze(-1)
                rows = rows * residual[:, None] * math.sqrt(protocol.squared_error_fisher or 1 / noise)
            curvature = rows.square().sum(0).diag() if options.structure.startswith("diag") else rows.T @ rows
            own = readings(network, prior, noise, curvature, test)
            for reading, value in own.items():
                found.setdefault(reading, {}).setdefault(state, []).append(value)
    paper = PAPER.get(name, {}).get(options.structure)
    rows = []
    for reading, values in found.items():
        cells = [reading]
        for each in values.values():
            mean, error = mean_and_error(each)
            cells.append(f"{mean:.2f} ± {error:.2f}")
            if paper is not None:
                theirs = paper[reading == "MAP"]
                cells[-1] += f" ({(mean - theirs[0]) / math.hypot(error, theirs[1]):+.1f})"
        rows.append(cells)
    print(f"{name}, {options.structure}, {options.splits} splits\n")
    print(table(["reading", "highest evidence", "last epoch"], rows))
    file = options.out / f"readings_{name}_{options.structure}.json"
    write(file, {"machine": machine(options.threads), "results": found})


if __name__ == "__main__":
    main()
