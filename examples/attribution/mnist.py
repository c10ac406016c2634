"""MNIST, 60,000 images: the training images behind 100 test images, ranked with a KFAC posterior in bounded memory.

    python examples/attribution/mnist.py --data DIR --out mnist_attribution

The MLP 784-1024-512-256-128-10 (P = 1,494,154) of ../structures/mnist.py, trained there or here, its weights kept under
``--out``. In a process of its own for 30,000 and for 60,000 images: a KFAC fit that reads the images through a
DataLoader, float32, and ``posterior.explain`` of 100 test images, half of them classified wrongly: the 20 training
images most for and against each, by the effect of their removal on the predicted class's logit. Memory is the peak of
the process above what it held before (imports, images, network). Fits and rankings are kept: an interrupted run goes on
where it stood. Then a check: the same network trained on 1,000
images alone, where exact function space is within reach. Spearman's correlation, over the training images, of KFAC's
removal effects with the exact ones, and the share of the exact top 20 that KFAC finds, as means over the test images;
beside it the same for EKFAC, the diagonal, and for inner products of last-layer features.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _images import Split, as_floats, build, load, loader, miniature, train_weights
from _shared import in_child, machine, parser, peak_bytes, resident_bytes, table, write

import ntk_laplace as ntkl

PRECISION, EPOCHS, K = 10.0, 8, 20
SHOWN = 6  # training images on each side of a test image


def images(options: argparse.Namespace) -> Split:
    """MNIST, or little digits."""
    return miniature() if options.small else load(options.data)


def trained(options: argparse.Namespace, split: Split, count: int | None = None) -> nn.Module:
    """The network trained on all images, or on the first so many at the same weight decay for each; kept."""
    path = options.out / ("mlp.pt" if count is None else f"mlp-{count}.pt")
    network = build("mlp", options.small)
    if not path.exists():
        torch.manual_seed(0)
        own, epochs = split, EPOCHS
        if count is not None or options.small:
            own = Split(split.x[:count], split.y[:count], split.x_test, split.y_test)
            epochs = 60
        share = len(own.y) / len(split.y)
        torch.save(train_weights(build("mlp", options.small), own, PRECISION * share, epochs).state_dict(), path)
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def chosen(network: nn.Module, split: Split, count: int) -> Tensor:
    """Test images to explain: as many that are classified wrongly as there are, up to half, the first of each kind."""
    with torch.no_grad():
        right = torch.cat([network(as_floats(x)).argmax(1) for x in split.x_test.split(1000)]) == split.y_test
    wrong = (~right).nonzero()[: count // 2, 0]
    return torch.cat([wrong, right.nonzero()[: count - len(wrong), 0]])


def job(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """One fit and its rankings."""
    split = images(options)
    network = trained(options, split)
    index = chosen(network, split, options.test_examples)
    data, x = loader(split.x[:count].clone(), split.y[:count]), as_floats(split.x_test[index])
    before, kept = resident_bytes(), options.out / f"kfac-{count}.pt"
    if not kept.exists():
        start, start_cpu = time.perf_counter(), time.process_time()
        prior = ntkl.GaussianPrior(PRECISION)
        posterior = ntkl.laplace(network, data, ntkl.Categorical(), prior, "kfac", dtype=torch.float32)
        spent = {"fit_seconds": time.perf_counter() - start, "fit_cpu_seconds": time.process_time() - start_cpu}
        posterior.save(kept)
        kept.with_suffix(".json").write_text(json.dumps(spent | {"fit_peak_bytes": peak_bytes() - before}))
    found = json.loads(kept.with_suffix(".json").read_text())
    posterior = ntkl.load(kept, network, data=data)
    start, start_cpu = time.perf_counter(), time.process_time()
    ranking = posterior.explain(x, k=K)
    found |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - start_cpu}
    found |= {"peak_bytes": peak_bytes() - before, "parameters": posterior.num_parameters, "explained": len(x)}
    found |= {"flagged": int(ranking.flagged.sum()), "guarantees": ranking.guarantees}
    found |= {"logits": ranking.f.tolist(), "index": index.tolist()}
    for side in ("for", "against"):
        found |= {side: ranking.indices[side].tolist(), f"effects_{side}": ranking.effects[side].tolist()}
    return found


def agreement(options: argparse.Namespace) -> dict[str, Any]:
    """Rankings of structures against the exact one, on few images."""
    split, count = images(options), options.subset
    network = trained(options, split, count)
    index = chosen(network, split, options.test_examples)
    data = as_floats(split.x[:count]), split.y[:count]
    x, precision = as_floats(split.x_test[index]), PRECISION * count / len(split.y)

    def effects(structure: str) -> Tensor:
        prior = ntkl.GaussianPrior(precision)
        return ntkl.laplace(network, data, ntkl.Categorical(), prior, structure).removal_effects(x)

    with torch.no_grad():
        features = network[:-1]
        cosine = torch.nn.functional.cosine_similarity(features(x)[:, None], features(data[0])[None], dim=2)
    exact = effects("gp").numpy()
    others = {name: effects(name).numpy() for name in ("kfac", "ekfac", "diag")}
    others["cosine of last-layer features"] = -cosine.numpy()
    found = {}
    k = min(K, count // 5)
    for name, values in others.items():
        each = [spearmanr(a, b).statistic for a, b in zip(values, exact, strict=True)]
        top = [len(set(np.argsort(a)[:k]) & set(np.argsort(b)[:k])) / k for a, b in zip(values, exact, strict=True)]
        found[name] = {"spearman": float(np.mean(each)), "least": float(np.min(each)), "top": float(np.mean(top))}
    return found


def show(axes: Axes, image: Tensor, title: str, color: str) -> None:
    """One image and its words."""
    axes.imshow(image.numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=8, color=color)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color(color)


def draw(found: dict[str, Any], split: Split, path: Path) -> None:
    """Three test images that are classified wrongly and three rightly, with the training images for and against."""
    logits = torch.tensor(found["logits"])
    truth = split.y_test[torch.tensor(found["index"])]
    wrong = logits.argmax(1) != truth
    rows = torch.cat([wrong.nonzero()[:3, 0], (~wrong).nonzero()[:3, 0]]).tolist()
    figure = Figure(figsize=(13, 1.35 * len(rows) + 0.5), layout="constrained")
    axes = figure.subplots(len(rows), 2 * SHOWN + 1, squeeze=False)
    for line, i in zip(axes, rows, strict=True):
        said = int(logits[i].argmax())
        title = f"says {said}" + ("" if said == truth[i] else f", is {int(truth[i])}")
        show(line[0], split.x_test[found["index"][i]], title, "black")
        for start, side, color in ((1, "for", "#0072b2"), (1 + SHOWN, "against", "#d55e00")):
            for place in range(SHOWN):
                j, effect = found[side][i][place], found[f"effects_{side}"][i][place]
                show(line[start + place], split.x[j], f"{int(split.y[j])}: {effect:+.2g}", color)
    figure.suptitle("training images for (blue) and against (orange) what the network says: label, and change of "
                    "that logit if left out", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print, draw."""
    arguments = parser(__doc__, "mnist_attribution")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz")
    arguments.add_argument("--num-examples", type=int, default=60_000, help="N (default 60,000)")
    arguments.add_argument("--test-examples", type=int, default=100, help="images to explain (default 100)")
    arguments.add_argument("--subset", type=int, default=1000, help="images for the exact ranking (default 1,000)")
    arguments.add_argument("--job", help="so many images, or 'agreement', as JSON")
    options = arguments.parse_args()
    # weight decay drives weights that no image needs below 1e-38, where a float32 product takes many times as long
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    if options.data is None and not options.small:
        arguments.error("give the folder of mnist.npz with --data, or --small")
    if options.small:
        options.num_examples, options.test_examples, options.subset = 600, 12, 60
    options.out.mkdir(parents=True, exist_ok=True)
    if options.job:
        print(json.dumps(agreement(options) if options.job == "agreement" else job(int(options.job), options)))
        return
    split = images(options)
    trained(options, split)
    passed = ["--out", str(options.out), "--data", str(options.data), "--threads", str(options.threads)]
    passed += ["--test-examples", str(options.test_examples), "--subset", str(options.subset)]

    def run(what: int | str) -> dict[str, Any]:
        if options.small:  # seconds matter there, and memory does not
            return agreement(options) if what == "agreement" else job(what, options)
        return in_child(__file__, ["--job", str(what), *passed], options.out / f"job-{what}.json")

    sizes = options.num_examples // 2, options.num_examples
    results, close = {count: run(count) for count in sizes}, run("agreement")
    rows = [[f"{n:,}", *(f"{r[key]:.1f}" for key in ("fit_seconds", "fit_cpu_seconds", "seconds", "cpu_seconds")),
             f"{r['fit_peak_bytes'] / 1e6:.0f}", f"{r['peak_bytes'] / 1e6:.0f}", f"{r['flagged']:,}"]
            for n, r in results.items()]
    head = ["N", "fit, s", "CPU, s", "rankings, s", "CPU, s", "peak of the fit, MB", "peak, MB", "flagged"]
    print(f"{results[sizes[1]]['explained']} test images, {options.threads} threads\n\n{table(head, rows)}\n")
    rows = [[name, *(f"{r[key]:.2f}" for key in ("spearman", "least", "top"))] for name, r in close.items()]
    print(table([f"{options.subset:,} images, against exact", "Spearman", "least", f"of the top {K}"], rows))
    draw(results[sizes[1]], split, options.out / "rankings.png")
    write(options.out / "mnist.json", {
        "machine": machine(options.threads), "results": {str(n): r for n, r in results.items()}, "agreement": close,
    })


if __name__ == "__main__":
    main()
