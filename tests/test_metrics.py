"""Metrics against slow references, scikit-learn, and cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss
from torch.distributions import Categorical, MultivariateNormal, Normal

import ntk_laplace as ntkl
from ntk_laplace import metrics
from ntk_laplace.errors import DataError, HyperparameterError, TargetError


@pytest.fixture
def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(4) * 0.5, size=200)
    labels = np.array([rng.choice(4, p=row) for row in probabilities])
    return probabilities, labels


def slow_calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Follow the definition, one bin and one example at a time."""
    total = 0.0
    for b in range(bins):
        inside = [i for i, row in enumerate(probabilities) if b / bins < row.max() <= (b + 1) / bins]
        if inside:
            confidence = np.mean([probabilities[i].max() for i in inside])
            right = np.mean([probabilities[i].argmax() == labels[i] for i in inside])
            total += len(inside) / len(labels) * abs(right - confidence)
    return total


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_calibration_error_is_its_definition(table: tuple[np.ndarray, np.ndarray], bins: int) -> None:
    expected = slow_calibration_error(*table, bins)
    assert metrics.expected_calibration_error(*table, bins=bins) == pytest.approx(expected, abs=1e-14)


def test_sure_and_right_is_calibrated_and_sure_and_wrong_is_not() -> None:
    labels = torch.tensor([0, 1, 2])
    sure = torch.eye(3)
    assert metrics.expected_calibration_error(sure, labels) == 0.0
    assert metrics.accuracy(sure, labels) == 1.0
    assert metrics.expected_calibration_error(sure, labels.roll(1)) == 1.0
    assert metrics.accuracy(sure, labels.roll(1)) == 0.0
    assert metrics.accuracy(1.000001 * sure, labels) == 1.0  # sums of float32 are no nearer to one


def test_binary_probabilities_are_two_classes() -> None:
    p = torch.tensor([0.9, 0.2, 0.6, 0.4])
    y = torch.tensor([1, 0, 0, 1])
    pair = torch.stack([1 - p, p], dim=1)
    for form in (p, p[:, None], pair):
        assert metrics.accuracy(form, y) == 0.5
        np.testing.assert_allclose(metrics.class_probabilities(form), pair.numpy(), atol=1e-7)
    # confidences .9 and .8 are right, .6 and .6 are wrong; all in bins of their own but the last two
    assert metrics.expected_calibration_error(p, y, bins=10) == pytest.approx((0.1 + 0.2 + 2 * 0.6) / 4, abs=1e-6)


def test_a_confidence_on_an_edge_is_in_the_bin_below() -> None:
    bins = metrics.reliability([[0.75, 0.25], [0.375, 0.625], [0.875, 0.125]], [0, 0, 0], bins=4)
    assert bins.count.tolist() == [2, 1] and bins.accuracy.tolist() == [0.5, 1.0]


def test_reliability_counts_every_example_once(table: tuple[np.ndarray, np.ndarray]) -> None:
    bins = metrics.reliability(*table, bins=12)
    assert bins.count.sum() == 200 and (bins.count > 0).all()
    overall = np.average(bins.accuracy, weights=bins.count)
    assert overall == pytest.approx(metrics.accuracy(*table), abs=1e-14)


def test_mean_log_likelihood_is_minus_log_loss(table: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, labels = table
    ours = metrics.mean_log_likelihood(Categorical(torch.tensor(probabilities)), torch.tensor(labels))
    assert ours == pytest.approx(-log_loss(labels, probabilities, labels=range(4)), rel=1e-12)


def test_brier_score_of_two_classes_is_twice_that_of_one() -> None:
    rng = np.random.default_rng(3)
    p, y = rng.random(50), rng.integers(0, 2, 50)
    assert metrics.brier_score(p, y) == pytest.approx(2 * brier_score_loss(y, p), rel=1e-12)
    assert metrics.brier_score([[0.0, 1.0, 0.0]], [1]) == 0.0 and metrics.brier_score([[0.0, 1.0, 0.0]], [2]) == 2.0


def test_detection_is_the_share_of_pairs_in_the_right_order() -> None:
    inside, outside = torch.tensor([0.1, 0.5, 0.5]), torch.tensor([[0.5], [0.9]])
    # pairs: 0.5 beats 0.1 and ties twice; 0.9 beats all
    assert metrics.detection_auroc(inside, outside) == pytest.approx((1 + 0.5 + 0.5 + 3) / 6)
    for wrong in ([], [np.nan]):
        with pytest.raises(DataError, match="finite scores of both kinds"):
            metrics.detection_auroc([0.1], wrong)


def test_held_out_scores_are_those_that_fit(table: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, labels = torch.tensor(table[0]), torch.tensor(table[1])
    found = metrics.held_out_scores(Categorical(probabilities), labels, bins=7)
    assert found == pytest.approx({
        "log_likelihood": metrics.mean_log_likelihood(Categorical(probabilities), labels),
        "accuracy": metrics.accuracy(*table),
        "brier": metrics.brier_score(*table),
        "ece": metrics.expected_calibration_error(*table, bins=7),
    }, rel=1e-12)
    real = MultivariateNormal(torch.zeros(5, 2), torch.eye(2))
    assert metrics.held_out_scores(real, torch.ones(5, 2)).keys() == {"log_likelihood", "rmse"}
    several = ntkl.Bernoulli().distribution(torch.zeros(5, 2))
    assert metrics.held_out_scores(several, torch.ones(5, 2)) == {"log_likelihood": pytest.approx(-2 * np.log(2))}
    assert "accuracy" in metrics.held_out_scores(ntkl.Bernoulli().distribution(torch.zeros(5, 1)), torch.ones(5, 1))


def test_mean_log_likelihood_wants_one_number_per_example() -> None:
    assert np.isfinite(
        metrics.mean_log_likelihood(MultivariateNormal(torch.zeros(5, 2), torch.eye(2)), torch.zeros(5, 2))
    )
    with pytest.raises(TargetError, match="one log probability per example"):
        metrics.mean_log_likelihood(Normal(torch.zeros(5, 2), 1.0), torch.zeros(5, 2))


def test_rmse_ignores_a_trailing_one_and_broadcasts_nothing() -> None:
    assert metrics.rmse(torch.tensor([[1.0], [3.0]]), np.array([1.0, 1.0])) == pytest.approx(2**0.5)
    with pytest.raises(TargetError, match=r"of the predictions, \(2,\); got \(3,\)"):
        metrics.rmse([1.0, 2.0], [1.0, 2.0, 3.0])


def test_coverage_of_central_intervals() -> None:
    """The interval of a skewed distribution is not around its mean."""
    exponential = torch.distributions.Exponential(torch.ones(4).double(), validate_args=False)
    y = exponential.icdf(torch.tensor([0.04, 0.06, 0.94, 0.96]).double())
    np.testing.assert_array_equal(metrics.central_coverage(exponential, y, [0.9, 0.95, 0.5]), [0.5, 1.0, 0.0])
    with pytest.raises(TargetError, match=r"targets of shape \(4,\), at least one; got \(3,\)"):
        metrics.central_coverage(exponential, y[:3], [0.9])
    with pytest.raises(DataError, match="strictly between 0 and 1"):
        metrics.central_coverage(exponential, y, [1.0])
    with pytest.raises(TargetError, match="NaN"):
        metrics.central_coverage(exponential, torch.full((4,), torch.nan), [0.5])


def test_coverage_of_gaussian_intervals() -> None:
    # ±1 standard deviation holds 68.27 %, so targets at 0.99 and 1.01 deviations tell the level's edge
    mean, variance, y = np.zeros(2), np.full(2, 4.0), np.array([1.98, -2.02])
    np.testing.assert_array_equal(metrics.interval_coverage(mean, variance, y, [0.6827, 0.99, 0.1]), [0.5, 1.0, 0.0])
    column = metrics.interval_coverage(np.reshape(mean, (-1, 1)), variance, y, [0.6827])
    np.testing.assert_array_equal(column, [0.5])
    draws = torch.distributions.Normal(1.0, 3.0).sample((20000,)) if torch.manual_seed(0) else None
    found = metrics.interval_coverage(torch.ones(20000), torch.full((20000,), 9.0), draws, [0.5, 0.9])
    np.testing.assert_allclose(found, [0.5, 0.9], atol=0.01)


def slow_set_coverage(probabilities: np.ndarray, labels: np.ndarray, level: float, draws: np.ndarray) -> float:
    """Build each set class by class; the last one belongs to it if a uniform number is below its share."""
    inside = 0
    for row, label in zip(probabilities, labels, strict=True):
        for u in draws:
            total, members = 0.0, set()
            for c in sorted(range(len(row)), key=lambda c: -row[c]):
                if total + row[c] <= level or u < (level - total) / row[c]:
                    members.add(c)
                total += row[c]
                if total > level:
                    break
            inside += label in members
    return inside / (len(labels) * len(draws))


def test_coverage_of_sets(table: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, labels = table[0][:60], table[1][:60]
    uniform = (np.arange(400) + 0.5) / 400
    for level in (0.1, 0.5, 0.9):
        expected = slow_set_coverage(probabilities, labels, level, uniform)
        assert metrics.set_coverage(probabilities, labels, [level])[0] == pytest.approx(expected, abs=2e-3)
    # labels of classes in the shares of their probabilities: coverage is the level
    levels, p = [0.05, 0.3, 0.62, 0.99], np.array([0.5, 0.3, 0.0, 0.2])
    shares = np.repeat(np.arange(4), (10 * p).astype(int))
    np.testing.assert_allclose(metrics.set_coverage(np.tile(p, (10, 1)), shares, levels), levels, atol=1e-12)
    assert metrics.set_coverage([0.9, 0.2], [1, 1], [0.8]) == pytest.approx(0.5 * 0.8 / 0.9)
    assert metrics.set_coverage([[1.0, 0.0]], [1], [0.999]) == 0.0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: metrics.set_coverage([[0.5, 0.5]], [0], [0.0]), DataError, "strictly between 0 and 1"),
        (lambda: metrics.accuracy([[2.0, -1.0]], [0]), DataError, "sum to one.*at example 0.*not logits"),
        (lambda: metrics.accuracy([[0.5, 0.5], [np.nan, 0.5]], [0, 1]), DataError, "at example 1"),
        (lambda: metrics.accuracy([[0.5, 0.5], [0.5, 0.499]], [0, 1]), DataError, "at example 1"),
        (lambda: metrics.accuracy([[0.6, 0.6, -0.2]], [0]), DataError, "at example 0"),
        (lambda: metrics.accuracy([[0.5, 0.5]], [2]), TargetError, r"labels in 0..1; got 2 at example 0"),
        (lambda: metrics.accuracy([[0.5, 0.5]], [0.5]), TargetError, r"labels in 0..1; got 0.5 at example 0"),
        (lambda: metrics.accuracy([[0.5, 0.5]], [0, 1]), TargetError, "1 labels, one per prediction; got 2"),
        (lambda: metrics.accuracy(np.ones((0, 2)), []), DataError, "got shape"),
        (lambda: metrics.reliability([[1.0, 0.0]], [0], bins=0), HyperparameterError, "bins as a whole number"),
        (
            lambda: metrics.interval_coverage([0.0], [1.0], [0.0], [1.0]),
            DataError,
            "strictly between 0 and 1",
        ),
        (lambda: metrics.interval_coverage([0.0], [1.0], [0.0, 1.0], [0.5]), TargetError, r"targets of shape \(2,\)"),
        (lambda: metrics.interval_coverage(np.zeros((3, 2)), np.ones((3, 2)), np.zeros((2, 3)), [0.5]), TargetError,
         r"shape of the means, \(3, 2\); got targets of shape \(2, 3\)"),
        (lambda: metrics.interval_coverage([0.0, 0.0], [1.0, 1.0], [0.0, np.nan], [0.5]), TargetError, "NaN.*Leave"),
        (lambda: metrics.interval_coverage([0.0], [-1.0], [0.0], [0.5]), DataError, "at least 0; got -1"),
        (lambda: metrics.rmse([1.0, 2.0], [1.0, np.nan]), TargetError, "all there; got NaN"),
        (lambda: metrics.rmse(np.zeros((2, 3)), np.zeros((3, 2))), TargetError, r"\(2, 3\); got \(3, 2\)"),
        (lambda: metrics.expected_calibration_error([[1.0, 0.0]], [0], True), HyperparameterError, "bins as a whole"),
        (lambda: metrics.accuracy([[0.5, 0.5], [1.0]], [0, 1]), DataError, "a list of equal rows"),
    ],
)
def test_bad_input_is_named(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_levels_and_16_bits() -> None:
    """A number is one level; an exact prediction without a spread is covered."""
    table = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    assert metrics.brier_score(table.bfloat16(), [1, 0]) == metrics.brier_score(table, [1, 0])
    np.testing.assert_array_equal(metrics.set_coverage(table, [1, 0], 0.9), metrics.set_coverage(table, [1, 0], [0.9]))
    np.testing.assert_array_equal(metrics.interval_coverage([1.0, 2.0], [0.0, 0.0], [1.0, 3.0], [0.9]), [0.5])
