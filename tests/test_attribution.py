"""Scores of attribution against other implementations and against models whose retraining is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

import ntk_laplace as ntkl
from ntk_laplace import attribution
from refusals import inputs, labels, network, refused
from retraining import data, ridge, weights


@pytest.fixture
def ridge_posterior():
    x, y, _ = data()
    model = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.as_tensor(weights(np.arange(20))))
    pairs = torch.as_tensor(x), torch.as_tensor(y)
    return ntkl.laplace(model, pairs, ntkl.Gaussian(noise=0.3), ntkl.GaussianPrior(0.7))


@pytest.mark.slow
def test_a_linear_model_is_predicted_without_error(ridge_posterior):
    """Joint removal is retraining itself; leave-one-out has slope 1; additive effects only come near."""
    x_new = torch.as_tensor(data()[2])
    kept = attribution.random_halves(30, 20)
    outcomes = attribution.retrain(ridge, kept)
    joint = attribution.predicted(ridge_posterior, kept, lambda p: p.outputs(x_new)[:, 0])
    assert np.abs(joint - outcomes[0]).max() < 1e-10
    score = attribution.datamodeling_score(joint, outcomes)
    assert score.value == pytest.approx(1.0, abs=1e-12) and score.each.shape == (6,)
    effects = ridge_posterior.removal_effects(x_new)
    single = attribution.datamodeling_score(attribution.additive(effects, kept), outcomes)
    assert 0.5 < single.value < 0.999 and 0 < single.error < 0.1
    each = attribution.without_each_in_turn(range(20), 20)
    before = ridge(np.arange(20), 0)
    agreement = attribution.leave_one_out_agreement(effects.T, attribution.retrain(ridge, each)[0] - before)
    assert agreement.slope == pytest.approx(1.0, abs=1e-9)
    assert agreement.correlation == pytest.approx(1.0, abs=1e-9)
    assert agreement.rank_correlation == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
def test_scores_are_scipys():
    generator = np.random.default_rng(1)
    predictions = generator.integers(0, 6, (25, 4)).astype(float)  # with ties
    outcomes = generator.normal(size=(2, 25, 4)) + 0.4 * predictions
    score = attribution.datamodeling_score(predictions, outcomes)
    expected = [spearmanr(predictions[:, j], outcomes.mean(0)[:, j]).statistic for j in range(4)]
    assert np.allclose(score.each, expected, atol=1e-12)
    assert score.value == pytest.approx(np.mean(expected))
    ceiling = attribution.seed_ceiling(outcomes)
    between = [spearmanr(outcomes[0, :, j], outcomes[1, :, j]).statistic for j in range(4)]
    assert np.allclose(ceiling.each, between, atol=1e-12)
    rows = [np.random.default_rng(0).integers(0, 25, 25)]
    again = np.random.default_rng(0)
    rows = [again.integers(0, 25, 25) for _ in range(50)]
    means = [np.mean([spearmanr(predictions[r, j], outcomes.mean(0)[r, j]).statistic for j in range(4)]) for r in rows]
    assert attribution.datamodeling_score(predictions, outcomes, 50).error == pytest.approx(np.std(means, ddof=1))
    constant = attribution.datamodeling_score(np.ones((25, 4)), outcomes)
    assert constant.value == 0 and str(score).startswith(f"{score.value:.3f} ±")


def test_slopes_above_one_mean_effects_that_are_too_small():
    truth = np.random.default_rng(2).normal(size=(5, 7))
    assert attribution.leave_one_out_agreement(truth / 3, truth).slope == pytest.approx(3.0)
    assert "slope 3.00" in str(attribution.leave_one_out_agreement(truth / 3, truth))


def test_mislabels():
    generator = np.random.default_rng(3)
    wrong = generator.random(60) < 0.2
    suspicion = generator.normal(size=60) + wrong
    assert attribution.mislabel_auroc(suspicion, wrong) == pytest.approx(roc_auc_score(wrong, suspicion))
    found = attribution.mislabels_found(suspicion, wrong, (0.1, 1.0))
    worst = np.argsort(-suspicion)[:6]
    assert found == {0.1: pytest.approx(wrong[worst].sum() / wrong.sum()), 1.0: 1.0}


def test_removal_curves_retrain_without_the_first():
    seen = []

    def train(kept):
        seen.append(kept.tolist())
        return float(kept.sum())

    curve = attribution.removal_curve(train, {"up": np.arange(5), "down": np.arange(5)[::-1]}, (0, 2))
    assert seen == [[0, 1, 2, 3, 4], [2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2]]
    assert curve.outcomes["up"].tolist() == [10.0, 9.0] and curve.removed.tolist() == [0, 2]
    axes = curve.plot("loss").axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["up", "down"]
    assert axes.get_ylabel() == "loss"


def test_retraining_resumes(tmp_path):
    kept, calls = attribution.random_halves(4, 20), []

    def train(indices, seed):
        calls.append((seed, tuple(indices)))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ridge(indices, seed)

    with pytest.raises(KeyboardInterrupt):
        attribution.retrain(train, kept, (0, 5), folder=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 2
    found = attribution.retrain(train, kept, (0, 5), folder=tmp_path)
    assert len(calls) == 3 + 6
    assert np.array_equal(found, attribution.retrain(ridge, kept, (0, 5)))
    assert found.shape == (2, 4, 6) and not np.array_equal(found[0], found[1])
    attribution.retrain(train, kept, (0, 5), folder=tmp_path)
    assert len(calls) == 9, "trained again what was there"
    with refused(ntkl.DataError, "same subsets", "another experiment", "another folder"):
        attribution.retrain(train, kept[:3], folder=tmp_path)


@pytest.mark.slow
def test_retraining_in_parallel_processes():
    kept = attribution.random_halves(3, 20)
    assert np.array_equal(attribution.retrain(ridge, kept, processes=2), attribution.retrain(ridge, kept))
    with refused(ntkl.UnsupportedError, "importable module", "lambda|local", "processes=1"):
        attribution.retrain(lambda indices, seed: 0.0, kept, processes=2)


def test_halves_are_those_of_their_seeds():
    kept = attribution.random_halves(3, 21)
    drawn = np.random.default_rng(1001).choice(21, 10, replace=False)
    assert sorted(drawn) == np.flatnonzero(kept[1]).tolist() and kept.sum(1).tolist() == [10] * 3


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_the_shape_that_benchmarks_expect(structure):
    """explain(test) -> (test, train), positive where a point helps, whatever the batches."""
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure=structure)
    x, y = inputs(5) + 0.1, labels(5)
    scores = attribution.Attributor(posterior, batch_size=2).explain(x, y)
    assert scores.shape == (5, 9)
    assert torch.allclose(scores, attribution.Attributor(posterior)(x, y), rtol=1e-10, atol=0)
    effects = posterior.explain(x, k=9, by="log_likelihood", y=y)
    best = effects.supporting()[:, 0]
    assert torch.equal(scores.argmax(1), best)
    sure = attribution.Attributor(posterior, by="variance").explain(x)
    assert (sure >= 0).all()
    predicted = posterior.removal_effects(x, by="log_likelihood", y=posterior.outputs(x).argmax(1))
    assert torch.allclose(attribution.Attributor(posterior).explain(x), -predicted)


def test_refusals(ridge_posterior):
    with refused(ntkl.DataError, "one shape", r"\(4, 2\)", "one row per subset"):
        attribution.datamodeling_score(np.zeros((4, 2)), np.zeros((4, 3)))
    with refused(ntkl.NonFiniteError, "finite outcomes", "1", "diverged"):
        attribution.datamodeling_score(np.zeros((3, 1)), [[1.0], [np.nan], [0.0]])
    with refused(ntkl.DataError, "two seeds", r"\(1, 3, 2\)", "seeds"):
        attribution.seed_ceiling(np.zeros((1, 3, 2)))
    with refused(ntkl.DataError, "effects", r"\(2, 3\)", "boolean"):
        attribution.additive(np.zeros((2, 3)), np.ones((4, 5)))
    with refused(ntkl.DataError, "not all the same", "3", "more points"):
        attribution.leave_one_out_agreement([1, 1, 1], [1, 2, 3])
    with refused(ntkl.DataError, "some labels wrong", "0 wrong", "mask of booleans"):
        attribution.mislabel_auroc([1.0, 2.0], [False, False])
    with refused(ntkl.DataError, "every training point once", "2 entries", "argsort"):
        attribution.removal_curve(lambda kept: 0.0, {"x": [0, 0]}, [1])
    with refused(ntkl.DataError, "non-empty subsets", ".", "random_halves"):
        attribution.retrain(ridge, np.zeros((2, 20)))
    with refused(ntkl.DataError, "outcomes of one shape", ".", "same test points"):
        attribution.retrain(lambda indices, seed: np.zeros(len(indices)), np.tril(np.ones((3, 3))))
    with refused(ntkl.DataError, "training points from 0 to 4", "7", "numbers"):
        attribution.without_each_in_turn([7], 5)
    with refused(ntkl.DataError, "at least one half", "0", "more"):
        attribution.random_halves(0, 5)
    with refused(ntkl.DataError, "masks of subsets", r"\(2, 5\)", "boolean"):
        attribution.predicted(ridge_posterior, np.ones((2, 5)), lambda p: p.f)


def test_arguments_of_the_wrong_kind(ridge_posterior):
    for size in (0, 1.5, "a", True):
        with refused(ntkl.DataError, "one test point", ".", "Leave"):
            attribution.Attributor(ridge_posterior, batch_size=size)
    with refused(ntkl.DataError, "a Posterior", "Linear", "laplace"):
        attribution.Attributor(torch.nn.Linear(3, 1))
    with refused(ntkl.DataError, "at least one test point", "none", "inputs"):
        attribution.Attributor(ridge_posterior).explain(torch.zeros(0, 3))
    assert attribution.Attributor(ridge_posterior, by="output").explain(np.zeros((2, 3))).shape == (2, 20)
    for count in (2.5, "a", True):
        with refused(ntkl.DataError, "at least one half", ".", "more"):
            attribution.random_halves(count, 10)
    for more in ({"seeds": "a"}, {"seeds": []}, {"seeds": [0.5]}, {"processes": "2"}, {"processes": 0}):
        with refused(ntkl.DataError, "one seed and one process", ".", "random_halves"):
            attribution.retrain(ridge, np.ones((2, 20)), **more)
    assert attribution.retrain(ridge, np.ones((2, 20)), seeds=3).shape == (1, 2, 6)
    with refused(ntkl.UnsupportedError, "a function train", "None", "Define"):
        attribution.retrain(None, np.ones((2, 20)))
    for indices in (3, [0.5], [-1], [3]):
        with refused(ntkl.DataError, "training points from 0 to 2", ".", "numbers"):
            attribution.without_each_in_turn(indices, 3)
    with refused(ntkl.DataError, "predictions as an array of numbers", "'a'", "NumPy"):
        attribution.datamodeling_score("a", np.zeros((3, 1)))
    with refused(ntkl.NonFiniteError, "finite suspicions", "1", "diverged"):
        attribution.mislabels_found([1, np.nan, 3], [0, 1, 1])
    for shares in (2.0, [0.0], ["a"]):
        with refused(ntkl.DataError, "shares of the data", ".", "0.1"):
            attribution.mislabels_found([1, 2, 3], [0, 1, 1], shares)
    assert attribution.mislabels_found([1, 2, 3], [0, 1, 1], 1.0) == {1.0: 1.0}
    for rankings, removed in (({}, [1]), ({"up": [0, 1]}, [])):
        with refused(ntkl.DataError, "at least one ranking", ".", "removed="):
            attribution.removal_curve(lambda kept: 0.0, rankings, removed)
