"""Pictures: figures of their own that hold the numbers they were given, and touch nothing global."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import ntk_laplace as ntkl
from ntk_laplace import plotting
from ntk_laplace.errors import DataError
from ntk_laplace.metrics import Reliability
from ntk_laplace.posterior.estimates import AnnealedEvidence, ApproximationErrors
from ntk_laplace.posterior.hyperparameters import HyperparameterHistory
from ntk_laplace.posterior.scores import LearningCurve
from ntk_laplace.training import EvidenceHistory


def panels(figure: Figure) -> list:
    """Axes that hold a picture, not a colour bar, in reading order."""
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def drawn(axes, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of the line with this label."""
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def line_figure() -> Figure:
    x = np.linspace(-1, 1, 20)
    return plotting.predictive_1d(x, x**2, 0.1 + 0 * x, 0.2 + 0 * x, ([0.0], [0.1]), x**2, "a title")


def fitted() -> tuple[ntkl.Posterior, torch.Tensor]:
    """A linear network with four training points, and their inputs."""
    network = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    x = torch.tensor([[1.0], [2.0], [-1.0], [0.5]], dtype=torch.float64)
    torch.nn.init.ones_(network.weight)
    return ntkl.laplace(network, (x, x + 0.5), ntkl.Gaussian(1.0), structure="gp"), x


def explained() -> ntkl.Explanation:
    """Two training points behind the prediction of a linear network."""
    posterior, x = fitted()
    return posterior.explain(x[:1])


def reranked() -> Figure:
    posterior, x = fitted()
    return plotting.reranking(posterior.rerank(x, 3))


def two_sources() -> Figure:
    posterior, x = fitted()
    return plotting.source_effects(posterior.source_effects(x, ["Ann", "Ben", "Ann", "Ben"], y=x + 0.4))


BINS = Reliability(np.array([0.6, 0.95]), np.array([0.5, 0.97]), np.array([4, 30]))
ROW = plotting.ImageExplanation(
    np.eye(8), "is 4, said 4", [(np.eye(8), "4: +1")] * 3, [(np.eye(8), "9: -1"), (np.eye(8), "9: -0")]
)
FIGURES = {
    "predictive_1d": line_figure,
    "predictive_2d": lambda: plotting.predictive_2d(
        np.arange(4), np.arange(3),
        [plotting.Panel(np.eye(3, 4), "p", "probability", True), plotting.Panel(np.ones((3, 4)), "s", "sd", False)],
        np.array([[0.0, 1.0], [2.0, 1.5]]), [0, 1],
    ),
    "reliability_diagram": lambda: plotting.reliability_diagram({"one": {"MAP": BINS, "posterior": BINS}}),
    "coverage_diagram": lambda: plotting.coverage_diagram([0.5, 0.9], {"MAP": [0.4, 0.8]}, "title"),
    "confidence_histograms": lambda: plotting.confidence_histograms({"MAP": {"a": [0.6, 0.9], "b": [0.99]}}),
    "evidence_comparison": lambda: plotting.evidence_comparison(
        ["gp", "kfac", "diag"], [-10.0, -12.5, None], [(0.5, 0.1), (0.2, 0.1), None], [2**21, None, None], -10.0
    ),
    "model_ranking": lambda: plotting.model_ranking(
        ("evidence", [-2.0, -1.0]), ("test", [0.1, 0.3]), ["small", "large"], [10, 1000], 1.0, [True, False]
    ),
    "prediction_intervals": lambda: plotting.prediction_intervals(
        [1.0, 0.0], [0.5, -np.inf], [2.0, 0.3], [np.nan, 0.5], 0.9
    ),
    "selection_curves": lambda: plotting.selection_curves({"one": ([0.1, 1.0], {"evidence": [-2.0, -1.0]})}),
    "image_explanations": lambda: plotting.image_explanations([ROW, ROW], "log odds"),
    "explanation": lambda: plotting.explanation(explained()),
    "hyperparameter_history": lambda: plotting.hyperparameter_history(
        HyperparameterHistory("gradient", ["noise"], [-9.0, -5.0], [[2.0], [1.0]], message="done")
    ),
    "training_history": lambda: plotting.training_history(
        EvidenceHistory(["noise"], [1, 3], [-9.0, -5.0], [-9.5, -5.5], [[2.0], [1.0]], [8.0, 7.0, 6.0])
    ),
    "variational_history": lambda: plotting.variational_history(ntkl.VariationalHistory(
        [0.1, 0.1], [3.0, 1.0], [], [0, 2], [-9.0, -5.0], [0.1, 0.2], [-8.0, -4.0], [0.0, 0.0]
    )),
    "approximation_errors": lambda: plotting.approximation_errors(ApproximationErrors(
        -9.0, 0.1, *(AnnealedEvidence(value, 0.2, 20.0, 0.3, value < -8.0, model, None, torch.zeros(30))
                     for value, model in ((-8.5, "glm"), (-7.0, "nn")))
    )),
    "learning_curve": lambda: plotting.learning_curve(LearningCurve(torch.linspace(-2, -1, 24).reshape(2, 12))),
    "removal_curves": lambda: plotting.removal_curves([0, 5, 10], {"ours": [0.1, 0.3, 0.6], "chance": [0.1, 0.1, 0.2]}),
    "reranking": reranked,
    "source_effects": two_sources,
}
UNTITLED = {"image_explanations", "explanation", "hyperparameter_history", "training_history", "learning_curve",
            "removal_curves", "variational_history"}


def test_every_public_picture_is_drawn_here() -> None:
    functions = {name for name in plotting.__all__ if name.islower() and name != "png"}
    assert functions == set(FIGURES)


def test_a_history_of_bounds_shows_both_at_their_last_values() -> None:
    """A start far below, bounds that are infinite, and a run that computed none."""
    nn, glm = [-1e5, -70.0, -65.0, -64.0, -63.0], [-30.0, -60.0, -59.0, -math.inf, -58.0]
    history = ntkl.VariationalHistory([0.1] * 4, [9.0, 5.0, 3.0, 2.0], [], [*range(5)], nn, [1.0] * 5, glm, [0.0] * 5)
    low, high = plotting.variational_history(history).axes[0].get_ylim()
    assert -100.0 < low < -71.0 and -30.0 < high < 0.0
    alone = plotting.variational_history(ntkl.VariationalHistory([0.1] * 4, [9.0, 5.0, 3.0, 2.0]))
    assert [axes.get_ylabel() for axes in alone.axes] == ["norm of the natural gradient"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_same_numbers_give_the_same_bytes(name: str) -> None:
    first, second = (plotting.png(FIGURES[name](), dpi=60) for _ in range(2))
    assert first == second and first.startswith(b"\x89PNG") and len(first) > 2000


@pytest.mark.parametrize("name", sorted(set(FIGURES) - UNTITLED))
def test_axes_are_labelled_and_titled(name: str) -> None:
    axes = panels(FIGURES[name]())
    assert all(a.get_xlabel() for a in axes if a.get_subplotspec().is_last_row())
    assert any(a.get_ylabel() for a in axes) or name == "approximation_errors"  # its rows have names
    assert all(a.get_title(loc="left") for a in axes if a.get_subplotspec().is_first_row())


def test_bands_are_two_standard_deviations() -> None:
    (axes,) = panels(line_figure())
    total, epistemic = (band.get_paths()[0].vertices for band in axes.collections)
    assert total[:, 1].max() == pytest.approx(1.4) and total[:, 1].min() == pytest.approx(0.0 - 0.4, abs=0.01)
    assert epistemic[:, 1].max() == pytest.approx(1.2)


def test_reliability_shows_its_bins() -> None:
    top, bottom = panels(FIGURES["reliability_diagram"]())
    error = (4 * 0.1 + 30 * 0.02) / 34
    x, y = drawn(top, f"MAP: ECE {error:.3f}")
    np.testing.assert_array_equal(x, BINS.confidence)
    np.testing.assert_array_equal(y, BINS.accuracy)
    assert any(np.array_equal(line.get_ydata(), BINS.count) for line in bottom.lines)


def test_histograms_show_shares_of_each_group() -> None:
    (axes,) = panels(FIGURES["confidence_histograms"]())
    heights = [patch.get_data().values for patch in axes.patches]
    assert [h.sum() for h in heights] == pytest.approx([100.0] * 4)
    assert [patch.get_label() for patch in axes.patches if "mean" in patch.get_label()] == [
        "a: mean 0.75", "b: mean 0.99",
    ]


def test_best_candidate_is_ringed() -> None:
    (axes,) = panels(FIGURES["selection_curves"]())
    (ring,) = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (1.0, -1.0)


def test_structures_show_their_distance_from_the_exact_one_and_what_they_cost() -> None:
    evidence, seconds, memory = panels(FIGURES["evidence_comparison"]())
    assert [tick.get_text() for tick in evidence.get_yticklabels()] == ["gp", "kfac", "diag"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in evidence.lines if line.get_marker() == "o"] == [
        (-10.0, 0), (-12.5, 1),
    ]
    assert [text.get_text() for text in evidence.texts] == ["\N{MINUS SIGN}10.0", "\N{MINUS SIGN}2.5", "no value"]
    assert [bar.get_width() for bar in seconds.patches] == pytest.approx([0.5, 0.1, 0.2, 0.1])
    assert [bar.get_width() for bar in memory.patches] == [2.0]
    low, high = evidence.get_ylim()
    assert low > 2.3 and high < -0.3  # every line is inside, the first on top


def test_explanations_show_every_image_with_its_caption() -> None:
    axes = [a for a in panels(FIGURES["image_explanations"]()) if a.images]
    assert len(axes) == 2 * (1 + 3 + 2)
    assert sorted({a.get_title() for a in axes}) == ["4: +1", "9: -0", "9: -1", "is 4, said 4"]


def test_nothing_to_explain_is_an_error() -> None:
    with pytest.raises(DataError, match="at least one image to explain; got none"):
        plotting.image_explanations([], "log odds")


def test_a_ranking_marks_size_and_vague_priors() -> None:
    (axes,) = FIGURES["model_ranking"]().axes
    small, large, *_ = axes.lines
    assert small.get_xydata().tolist() == [[-2.0, 0.1]] and large.get_xydata().tolist() == [[-1.0, 0.3]]
    assert small.get_markersize() < large.get_markersize()
    assert small.get_markerfacecolor() == "white" != large.get_markerfacecolor()
    assert [text.get_text() for text in axes.texts] == ["small", "large"]
    assert "1.00" in axes.get_title(loc="left")


def test_long_names_become_numbers_with_a_key() -> None:
    names = [f"a network of width {width}" for width in (1, 2)]
    figure = plotting.model_ranking(("evidence", [-2.0, -1.0]), ("test", [0.1, 0.3]), names, [1, 2], 1.0, [False] * 2)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1", "2"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"{i}  {n}" for i, n in enumerate(names, 1)]


@pytest.mark.parametrize(("value", "scale"), [(1.0, "log"), (-1.0, "symlog")])
def test_hyperparameters_that_are_no_logarithms_are_on_the_axis(value, scale):
    history = HyperparameterHistory("lbfgs", ["noise", "shift"], [-9.0, -5.0], [[2.0, value], [1.0, value]])
    assert plotting.hyperparameter_history(history).axes[1].get_yscale() == scale
