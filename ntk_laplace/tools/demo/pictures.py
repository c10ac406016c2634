"""The demo's figures, with alternative texts and captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

import ntk_laplace as ntkl
from ntk_laplace import metrics, plotting
from ntk_laplace.structures import structure_named
from ntk_laplace.tools.comparison import StructureEvidence
from ntk_laplace.tools.demo.data import Split
from ntk_laplace.tools.demo.problems import Problem
from ntk_laplace.tools.demo.study import BINS, LEVELS, Choice, Study, confidence


@dataclass(frozen=True)
class Picture:
    """A figure with its texts."""

    name: str  # of its file, without extension
    image: bytes  # PNG data
    alt: str  # alternative text
    caption: str  # what to notice


def uncertainty_1d(problem: Problem, choice: Choice) -> Picture:
    """Draw the prediction along one input, with epistemic uncertainty and noise."""
    split = problem.split
    posterior = choice.posterior(problem, "gp")
    predictive = posterior.predict(split.x_test)
    figure = plotting.predictive_1d(split.x_test, predictive.mean, predictive.epistemic.sqrt(),
                                    predictive.variance.sqrt(), (split.x_train, split.y_train), split.y_test,
                                    "Sure where there are data, unsure in the gap and outside")
    x, spread = split.x_test.ravel(), predictive.epistemic.sqrt().ravel()
    gap, near = float(spread[(x > -0.9) & (x < 1.1)].max()), float(spread[(x > -3.5) & (x < -1.7)].mean())
    return Picture(
        "uncertainty_1d",
        plotting.png(figure),
        "Curve of a network's prediction over one input with two bands around it. The inner band is narrow at the "
        "training data on the left and on the right, and wide in the gap between them and beyond both ends.",
        f"A 1-16-16-1 network trained on {len(split.x_train)} points. The dark band is what the posterior leaves open "
        f"about the function: its standard deviation is {near:.2f} amid the data and {gap:.2f} in the gap. "
        "The light band adds the observation noise.",
    )


def uncertainty_2d(problem: Problem, choice: Choice, seed: int) -> Picture:
    """Draw class probabilities of MAP and posterior over two inputs, and the standard deviation of f."""
    split = problem.split
    posterior = choice.posterior(problem, "gp")
    across, up = split.x_test[:, 0].unique(), split.x_test[:, 1].unique()
    shape = (len(up), len(across))
    _, covariance = posterior.latent_moments(split.x_test)
    plugged = posterior.predict(split.x_test, method="map").mean
    averaged = posterior.predict(split.x_test, generator=torch.Generator().manual_seed(seed)).mean
    label = "probability of class 1"
    panels = [
        plotting.Panel(plugged.reshape(shape), "MAP: one sharp boundary", label, True),
        plotting.Panel(averaged.reshape(shape), "Posterior: it fans out away from data", label, True),
        plotting.Panel(covariance.sqrt().reshape(shape), "What is not known", "sd of the log odds", False),
    ]
    figure = plotting.predictive_2d(across, up, panels, split.x_train, split.y_train)
    sure = [float((metrics.class_probabilities(p).max(1) > 0.95).mean()) for p in (plugged, averaged)]
    return Picture(
        "uncertainty_2d",
        plotting.png(figure),
        "Three maps over the plane with two interleaved half circles of training points. In the first, the plain "
        "network's probability changes from 0 to 1 across a narrow boundary everywhere. In the second, that of the "
        "posterior, the boundary is as narrow between the points and widens to a fan beyond them. The third, the "
        "standard deviation of the log odds, is small at the points and large along the fan.",
        f"A 2-16-16-1 network trained on {len(split.x_train)} points; the black line is probability one half. The MAP "
        f"is more than 95% sure on {sure[0]:.0%} of this area, the posterior on {sure[1]:.0%}.",
    )


def predictions(found: Study) -> dict[str, Distribution]:
    """Predictions of the held-out data: the network, the calibrated network, the calibrated posterior."""
    return {"network": found.map_predictive, "calibrated network": found.calibrated_predictive,
            "posterior": found.predictive}


def calibration(studies: Sequence[Study]) -> Picture:
    """Draw reliability diagrams of the network's, the calibrated network's and the posterior's predictions."""
    panels, words = {}, []
    for found in studies:
        truth = found.problem.split.y_test
        bins = {name: metrics.reliability(one.mean, truth, BINS) for name, one in predictions(found).items()}
        panels[found.problem.title] = bins
        errors = [f"{one.error:.3f}" for one in bins.values()]
        words.append(f"{found.problem.title}: {', '.join(errors[:-1])} and {errors[-1]}")
    return Picture(
        "reliability",
        plotting.png(plotting.reliability_diagram(panels)),
        "Reliability diagrams, one for each set of digits: fraction of right predictions against confidence, for the "
        "network, for the calibrated network and for the posterior, with the diagonal of perfect calibration and the "
        "number of images in each bin.",
        "Above the diagonal a prediction is too cautious, below it too sure. Expected calibration error of the "
        f"network, of the calibrated network and of the posterior, {'; '.join(words)}. The calibrated network gave a "
        "tenth of its training images away for one temperature; the posterior found scale and temperature by "
        "leave-one-out, with all images in the training.",
    )


def unseen(found: Study, seed: int) -> Picture:
    """Draw the confidence of predictions on held-out digits and on digits of unseen classes."""
    split, classes = found.problem.split, found.problem.split.classes
    groups = {f"held-out {classes[0]} and {classes[1]}": split.x_test, "all other digits": split.x_unseen}
    panels = {
        name: {group: confidence(one, x, seed, method) for group, x in groups.items() if x is not None}
        for name, one, method in (("Network", found.network, "map"), ("Posterior as it is", found.posterior, "glm"))
    }
    scores = found.summary
    return Picture(
        "unseen",
        plotting.png(plotting.confidence_histograms(panels)),
        "Two histograms of confidence, for the network and for the posterior as it is. Held-out digits of the two "
        "known classes crowd near confidence one. Digits of other classes spread out, around a mean confidence of "
        f"{scores['map_unseen_confidence']:.2f} for the network and {scores['unseen_confidence']:.2f} for the "
        "posterior.",
        f"A network that knows {classes[0]} and {classes[1]} alone is shown the other eight digits. Ranking images by "
        f"confidence tells known from unknown with an area under the ROC curve of {scores['map_unseen_auroc']:.3f} for "
        f"the network and {scores['unseen_auroc']:.3f} for the posterior as it is: a scale that is fitted to familiar "
        "images is not for unfamiliar ones.",
    )


def coverage(found: Study) -> Picture:
    """Draw the coverage of the regression's predictive intervals."""
    truth = found.problem.split.y_test
    series = {name: metrics.interval_coverage(one.mean, one.variance, truth, LEVELS)
              for name, one in predictions(found).items()}
    held = [f"{values[LEVELS.index(0.9)]:.0%} ({name})" for name, values in series.items()]
    return Picture(
        "coverage",
        plotting.png(plotting.coverage_diagram(LEVELS, series, f"{found.problem.title}: how often intervals hold")),
        "Fraction of held-out targets inside predictive intervals against the intervals' nominal probability, for the "
        "network, the calibrated network and the posterior, beside the diagonal of perfect calibration.",
        f"Of {len(truth)} held-out patients, the nominal 90% interval holds {', '.join(held[:-1])} and {held[-1]}.",
    )


def selection(studies: Sequence[Study]) -> Picture:
    """Draw evidence, leave-one-out and held-out log likelihood against the prior precision."""
    curves, words = {}, []
    for found in studies:
        noise = max(found.candidates, key=lambda candidate: candidate.leave_one_out).noise
        used = [c for c in found.candidates if c.noise == noise]
        scores = {
            "evidence (training data alone)": [c.evidence for c in used],
            "leave-one-out (training data alone)": [c.leave_one_out for c in used],
            "held-out log likelihood": [c.held_out_log_likelihood for c in used],
        }
        precisions = [c.precision for c in used]
        curves[found.problem.title] = precisions, scores
        best = [f"{precisions[int(np.argmax(score))]:g}" for score in scores.values()]
        words.append(f"{found.problem.title}: {', '.join(best[:2])} and {best[2]}")
    return Picture(
        "model_selection",
        plotting.png(plotting.selection_curves(curves)),
        "Evidence, leave-one-out log density and held-out log likelihood, per example, against the prior precision on "
        "a logarithmic axis, one panel for each problem, with the best candidate of each curve ringed.",
        "Two scores that need no held-out data, and the one they stand in for. Best precision by evidence, by "
        f"leave-one-out, and on held-out data, {'; '.join(words)}.",
    )


def _distance(row: StructureEvidence) -> float:
    return float("inf") if row.difference is None else abs(row.difference)


def structures(found: Study) -> Picture:
    """Draw evidence, time and memory of every structure."""
    comparison = found.comparison
    assert comparison is not None  # of the problem that `compares`
    approximate = [row for row in comparison.rows if not structure_named(row.structure).exact]
    near, far = (pick(approximate, key=_distance) for pick in (min, max))
    return Picture(
        "structures",
        plotting.png(comparison.plot()),
        "Three panels with a line for each structure: the evidence beside that of exact function space, the seconds of "
        "fit and evidence, and the extra memory.",
        f"{found.problem.title}: exact (gp, full) and approximate structures of the same posterior. "
        f"{near.structure} comes nearest to the exact evidence, {_distance(near):.1f} nats away, "
        f"{far.structure} is the farthest, by {_distance(far):.1f}. "
        f"With {comparison.num_examples} examples and {comparison.num_parameters:,} parameters the exact ones are "
        "cheap; the others are made for sizes at which those no longer fit. Memory is estimated from the process.",
    )


def explanation(found: Study, many: int = 4) -> Picture:
    """Draw test images with the training images that support or oppose their predictions."""
    split = found.problem.split
    pair = [metrics.class_probabilities(one.mean) for one in (found.map_predictive, found.predictive)]
    chosen = _telling(pair[0], split.y_test.numpy())
    explained = cast(ntkl.Explanation, found.posterior.explain(split.x_test[chosen], k=many))
    rows = []
    for index, support in zip(chosen, support_of_prediction(explained), strict=True):
        order = support.argsort(descending=True)
        sides = [
            [_training(split, explained, support, int(j)) for j in side]
            for side in (order[:many], order.flip(0)[:many])
        ]
        caption = _verdict(split, int(split.y_test[index]), [probabilities[index] for probabilities in pair])
        rows.append(plotting.ImageExplanation(split.x_test[index, 0], caption, *sides))
    flagged = int(explained.flagged.sum())
    extrapolated = f"Effects of {flagged} training images of high leverage are extrapolations; they bear a !."
    return Picture(
        f"explanation_{found.problem.name}",
        plotting.png(plotting.image_explanations(rows, "log odds")),
        f"Three test images. Beside each are the {many} training images that raise the log odds of its prediction "
        f"most, and the {many} that lower them most, with their labels and effects.",
        "From top to bottom: a sure prediction, the least sure right one, and the surest error (or the next least sure "
        "one). Above each training image: its label, and by how much it moves the log odds of the predicted class over "
        "the runner-up, that is, how far they would fall if it were left out. The shares behind it add up to the "
        f"prediction: offset and contributions leave {float(explained.gap.abs().max()):.0e} logits at most. "
        + (extrapolated if flagged else ""),
    )


def support_of_prediction(explained: ntkl.Explanation) -> Tensor:
    """Effect of each training point on the log odds of the predicted class over the runner-up, (n, N).

    With one output f is the log odds of class 1.
    """
    if explained.f.shape[1] == 1:
        return -explained.removal[:, :, 0] * explained.f.sign()
    top = explained.f.topk(2, dim=1).indices
    each = explained.removal.gather(2, top[:, None, :].expand(-1, explained.removal.shape[1], -1))
    return each[:, :, 1] - each[:, :, 0]


def _telling(probabilities: np.ndarray, truth: np.ndarray) -> list[int]:
    """Select a certain prediction, the least certain correct one, and the most certain wrong one (else the next)."""
    sure, right = probabilities.max(1), probabilities.argmax(1) == truth
    doubtful = [int(i) for i in sure.argsort() if right[i]]
    wrong = [int(i) for i in sure.argsort()[::-1] if not right[i]]
    return [doubtful[-1], doubtful[0], wrong[0] if wrong else doubtful[1]]


def _verdict(split: Split, truth: int, pair: Sequence[np.ndarray]) -> str:
    """True class, predicted class and runner-up, with the confidence of the network and the posterior."""
    first, second = pair[0].argsort()[::-1][:2]
    sure = [f"{probabilities[first]:.0%}" for probabilities in pair]
    return (
        f"is {split.classes[truth]}; said {split.classes[first]}, not {split.classes[second]}\n"
        f"net {sure[0]}, posterior {sure[1]}"
    )


def _training(split: Split, explained: ntkl.Explanation, support: Tensor, index: int) -> tuple[Tensor, str]:
    mark = " !" if bool(explained.flagged[index]) else ""
    value = f"{float(support[index]):+.2f}".replace("-", "\N{MINUS SIGN}")
    return split.x_train[index, 0], f"{split.classes[int(split.y_train[index])]}: {value}{mark}"
