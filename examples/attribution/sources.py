"""Which annotator made the labels wrong? Effects of each source of the training data, beside retraining without it.

    python examples/attribution/sources.py --out sources

Six annotators have labeled digits. A third of the labels of one of them, Eve, are wrong. `Posterior.source_effects`
leaves out each annotator as a whole, with a fixed and with a moving linearization. Two figures show it: how the others
predict the annotator's own labels, and what leaving the annotator out does to log p of clean test labels. The network
is also trained again without each of them, from the same initial weights.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace import plotting

NAMES = ("Anna", "Ben", "Carl", "Dora", "Eve", "Finn")
PRECISION = 1.0


def main() -> None:
    """Train, leave out, retrain, compare."""
    options = parser(__doc__, "sources").parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    count, tests, tolerance = (120, 40, 1e-2) if options.small else (900, 300, 1e-6)
    x, y, wrong, annotators = annotated(count)
    x_test, y_test = (part[count : count + tests] for part in digits())
    network = trained(x, y, tolerance)
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(PRECISION), "full")
    posterior.posterior_precision  # noqa: B018 - the fit is not timed
    found, rows, figures = {}, [], {}
    for linearization in ("fixed", "moving"):
        start = time.process_time()
        found[linearization] = posterior.source_effects(x_test, annotators, y=y_test, linearization=linearization)
        figures[f"seconds, {linearization}"] = time.process_time() - start
        print(f"{found[linearization]}\n")
    before = mean_log_prob(network, x_test, y_test)
    start = time.process_time()
    for s, name in enumerate(NAMES):
        gone = torch.tensor([each == name for each in annotators])
        alone = trained(x[~gone], y[~gone], tolerance)
        truth = [mean_log_prob(alone, x_test, y_test) - before, mean_log_prob(alone, x[gone], y[gone])]
        ours = [[float(one.log_prob_change[:, s].mean()), float(one.own_log_prob_without[s])] for one in found.values()]
        cells = [f"{value:.3f}" for both in zip(*ours, truth, strict=True) for value in both]
        rows.append([name, str(int(wrong[gone].sum())), *cells])
        figures[name] = {"fixed": ours[0], "moving": ours[1], "retrained": truth}
    figures["seconds, retrained"] = time.process_time() - start
    print(table(["left out", "wrong labels", "Δ test log p: fixed", "moving", "retrained", "own log p without: fixed",
                 "moving", "retrained"], rows))
    print(", ".join(f"{words.partition(', ')[2]} {value:.1f} s" for words, value in figures.items()
                    if words.startswith("seconds")), "of processor time for all annotators")
    (options.out / "sources.png").write_bytes(plotting.png(found["moving"].plot()))
    write(options.out / "sources.json", {"machine": machine(options.threads), **figures})


def digits() -> tuple[Tensor, Tensor]:
    """All digits, in random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(data.data / 16.0)[order], torch.as_tensor(data.target)[order]


def annotated(count: int) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Digits, their labels, whether each is wrong, and its annotator."""
    x, y = (part[:count] for part in digits())
    random = torch.Generator().manual_seed(1)
    number = torch.arange(count) % len(NAMES)
    wrong = (number == NAMES.index("Eve")) & (torch.rand(count, generator=random) < 1 / 3)
    other = (y + torch.randint(1, 10, (count,), generator=random)) % 10
    return x, torch.where(wrong, other, y), wrong, [NAMES[i] for i in number.tolist()]


def trained(x: Tensor, y: Tensor, tolerance: float) -> nn.Module:
    """A network of 16 tanh units at a minimum, to a gradient of `tolerance`, always from the same initial weights."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=5000, max_eval=10_000, tolerance_grad=tolerance,
                                  tolerance_change=0.0, history_size=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * PRECISION * sum(p.square().sum() for p in network.parameters()) - log_prob(network, x, y).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return network.eval()


def mean_log_prob(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean log p(y | x), nats."""
    with torch.no_grad():
        return float(log_prob(network, x, y).mean())


def log_prob(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """log p(y | x), (n,)."""
    return -nn.functional.cross_entropy(network(x), y, reduction="none")


if __name__ == "__main__":
    main()
