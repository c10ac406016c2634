"""Segmentation: pixels of noisy images, with the uncertainty of each.

    python examples/segmentation/shapes.py --threads 1 --out shapes

Images of 64 x 64 pixels with discs, squares, bars and rings on a noisy background: five classes, and outlines without a
label (255, ignored). A small U-Net is trained on 50 of them. Then

* the posterior of all its weights: structure "kfac", curvature "mc" (one backward pass), and the glm predictive of 50
  images from 100 draws of the linearized network: seconds and peak memory of both together;
* accuracy and log likelihood per pixel of 50 new images, of the network and of the posterior;
* on 16 x 16 pixels and 4 images: function space ("gp") against weight space ("full").

It writes shapes.json and shapes.png: an image, its labels, the predicted classes, the entropy of the predictive and its
epistemic part. The second image has a shape that the training images do not have.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.plotting import png

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, peak_bytes, table, write

CLASSES, IGNORED = 5, 255
KINDS = ("background", "disc", "square", "bar", "ring")


class UNet(nn.Module):
    """Three resolutions with skip connections."""

    def __init__(self, width: int, outputs: int = CLASSES) -> None:
        super().__init__()
        w = width
        self.first, self.second, self.third = block(1, w), block(w, 2 * w), block(2 * w, 4 * w)
        self.up_second, self.up_first = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.join_second, self.join_first = block(4 * w, 2 * w), block(2 * w, w)
        self.last = nn.Conv2d(w, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, H, W) to (N, 5, H, W)."""
        first = self.first(x)
        second = self.second(nn.functional.max_pool2d(first, 2))
        third = self.third(nn.functional.max_pool2d(second, 2))
        second = self.join_second(torch.cat([second, self.up_second(third)], 1))
        return self.last(self.join_first(torch.cat([first, self.up_first(second)], 1)))


def block(inputs: int, outputs: int) -> nn.Module:
    """A convolution and its activation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.SiLU())


def scenes(count: int, size: int, seed: int, unknown: bool = False) -> tuple[Tensor, Tensor]:
    """Images (n, 1, H, W) and labels (n, H, W); with `unknown` a triangle too, which is labeled as background."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(*2 * [torch.arange(size) / size], indexing="ij")
    images, labels = torch.zeros(count, size, size), torch.zeros(count, size, size, dtype=torch.long)
    for n in range(count):
        for kind in (1, 2, 3, 4):
            u, v = (0.15 + 0.7 * torch.rand((), generator=generator) for _ in range(2))
            r = 0.08 + 0.08 * torch.rand((), generator=generator)
            far = ((rows - u).square() + (columns - v).square()).sqrt()
            tall, wide = (rows - u).abs(), (columns - v).abs()
            edge = {1: far - r, 2: torch.maximum(tall, wide) - r, 3: torch.maximum(tall / 0.35, wide / 1.6) - r,
                    4: (far - r).abs() - 0.03}[kind]
            images[n][edge < 0] = 0.4 + 0.2 * kind
            labels[n][edge < 0] = kind
            labels[n][edge.abs() < 0.5 / size] = IGNORED
        if unknown:
            triangle = (rows > 0.55) & (rows < 0.9) & ((columns - 0.5).abs() < (rows - 0.55) / 2)
            images[n][triangle], labels[n][triangle] = 1.7, 0
    images = images + 0.25 * torch.randn(images.shape, generator=generator)
    return images.unsqueeze(1), labels


def train(network: nn.Module, x: Tensor, y: Tensor, epochs: int, precision: float) -> None:
    """Adam on the negative log joint."""
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 5)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).chunk(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(x[part]), y[part], ignore_index=IGNORED, reduction="sum")
            decay = 0.5 * precision * sum(p.square().sum() for p in network.parameters())
            (loss / len(part) + decay / len(x)).backward()
            optimizer.step()
            schedule.step()
    network.eval()


def exact(likelihood: ntkl.Everywhere, size: int) -> dict[str, float]:
    """Evidence and covariances at pixels of a tiny network in function space and in weight space."""
    torch.manual_seed(0)
    network = UNet(2).double()
    x, y = scenes(4, size, 5)
    found = [ntkl.laplace(network, (x.double(), y), likelihood, structure=s) for s in ("gp", "full")]
    evidences = [float(posterior.log_marginal_likelihood()) for posterior in found]
    blocks = [posterior.latent_moments(x[:1].double(), per_position=True)[1] for posterior in found]
    return {"gp": evidences[0], "full": evidences[1], "apart": abs(evidences[0] - evidences[1]) / abs(evidences[1]),
            "blocks_apart": float((blocks[0] - blocks[1]).abs().max() / blocks[1].abs().max())}


def picture(posterior: ntkl.Posterior, size: int, draws: int) -> Figure:
    """An image as in training, and one with an unknown shape."""
    figure = Figure(figsize=(12.5, 5.2), layout="constrained")
    panels = figure.subplots(2, 5)
    for row, unknown in zip(panels, (False, True), strict=True):
        x, y = scenes(1, size, 11, unknown)
        response = posterior.predict(x, samples=draws, generator=torch.Generator().manual_seed(0))
        p = response.probs[0]
        entropy, epistemic = -torch.xlogy(p, p).sum(-1), response.epistemic[0].sum(-1).sqrt()
        shown = [(x[0, 0], "gray", None), (y[0].where(y[0] != IGNORED, 0), "tab10", 9), (p.argmax(-1), "tab10", 9),
                 (entropy, "viridis", None), (epistemic, "magma", None)]
        titles = ("image", "labels", "predicted class", "entropy, nats", "epistemic deviation")
        for panel, (values, colors, top), title in zip(row, shown, titles, strict=True):
            drawn = panel.imshow(values, cmap=colors, vmin=0 if top else None, vmax=top, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            if not unknown:
                panel.set_title(title)
            if top is None and colors != "gray":
                figure.colorbar(drawn, ax=panel, shrink=0.8)
        row[0].set_ylabel("an unknown shape" if unknown else "as in training")
    return figure


def main() -> None:
    """Train, fit, predict, compare."""
    options = parser(__doc__, "shapes").parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    size, count, epochs, width = (16, 10, 2, 2) if options.small else (64, 50, 60, 8)
    torch.manual_seed(0)
    network = UNet(width)
    (x, y), (x_test, y_test) = scenes(count, size, 0), scenes(count, size, 1)
    train(network, x, y, epochs, 1.0)
    likelihood = ntkl.Everywhere(ntkl.Categorical(), (size, size), ignore_index=IGNORED)
    before, start = peak_bytes(), time.perf_counter()
    posterior = ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(1.0), "kfac", "mc")
    fit = time.perf_counter() - start
    draws = 10 if options.small else 100
    posterior.predict(x_test, samples=draws)
    took, memory = time.perf_counter() - start, peak_bytes() - before
    pixels = float((y_test != IGNORED).sum())
    rows, results = [], {}
    for method, words in (("map", "the network"), ("glm", "the posterior")):
        response = posterior.predict(x_test, method, samples=draws, generator=torch.Generator().manual_seed(0))
        right = float(((response.probs.argmax(-1) == y_test) & (y_test != IGNORED)).sum()) / pixels
        score = float(response.log_prob(y_test).sum()) / pixels
        results[method] = {"accuracy": right, "log_likelihood": score}
        rows.append([words, f"{right:.4f}", f"{score:.4f}"])
    print(f"{count} images of {size} x {size} x {CLASSES}, P = {posterior.num_parameters:,}")
    print(f"fit {fit:.1f} s, with the prediction of {count} images {took:.1f} s; peak memory above training "
          f"{memory / 2**30:.2f} GiB\n")
    print(table(["of new images", "accuracy of pixels", "log likelihood of a pixel"], rows))
    few = 8 if options.small else 16
    same = exact(ntkl.Everywhere(ntkl.Categorical(), (few, few), IGNORED), few)
    print(f"\n{few} x {few}: evidence in function space {same['gp']:.6f}, in weight space {same['full']:.6f}; "
          f"covariances of pixels apart by {same['blocks_apart']:.1e}")
    results |= {"fit_seconds": fit, "seconds": took, "memory": memory, "exact": same,
                "parameters": posterior.num_parameters}
    (options.out / "shapes.png").write_bytes(png(picture(posterior, size, draws)))
    write(options.out / "shapes.json", {"machine": machine(options.threads), "results": results})


if __name__ == "__main__":
    main()
