"""Comparison of models: the numbers of the verbs side by side, refusals, the warning about vague priors."""

from __future__ import annotations

import functools
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from sklearn.metrics import log_loss
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace import metrics
from ntk_laplace.structures.evidence import Evidence
from ntk_laplace.tools.comparison import ModelComparison, ModelScores
from ntk_laplace.tools.comparison.priors import check_prior
from ntk_laplace.tools.comparison.rows import plus_minus
from refusals import inputs, labels, network, refused

WIDTHS = (1, 2, 4, 8)


@functools.cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.rand(90, 2).double() * 4 - 2
    y = x[:, :1].sin() * x[:, 1:] + 0.3 * torch.randn(90, 1).double()
    return x[:50], y[:50], x[50:], y[50:]


@functools.cache
def regression(width: int, precision: float, inputs: int = 2) -> nn.Module:
    x, y, *_ = data()
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1)).double()
    weights = list(network.parameters())
    optimizer = torch.optim.LBFGS(weights, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = 0.5 * precision * sum(p.square().sum() for p in weights)
        loss = (network(x[:, :inputs]) - y).square().sum() / 0.18 + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return network


def posterior(width: int = 4, precision: float = 1.0, structure: str = "gp", groups: str = "layer", part: int = 50):
    x, y, *_ = data()
    prior = ntkl.GaussianPrior(precision, groups=groups)
    return ntkl.laplace(regression(width, precision), (x[:part], y[:part]), ntkl.Gaussian(0.09), prior, structure)


def tuned(width: int, **options) -> ntkl.Posterior:
    found = posterior(width, **options)
    found.fit_hyperparameters(parameters=["precision"])
    return found


def quietly(*arguments, **options) -> ModelComparison:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return ntkl.compare_models(*arguments, **options)


def alone(one: ntkl.Posterior) -> ntkl.LeaveOneOut:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return one.leave_one_out()


@functools.cache
def four() -> ModelComparison:
    return quietly({f"width {w}": tuned(w) for w in WIDTHS}, data()[2:], permutations=3, seed=4)


@pytest.mark.slow
def test_every_number_is_that_of_its_verb():
    _, _, x_new, y_new = data()
    for width in WIDTHS:
        row, one = four()[f"width {width}"], tuned(width)
        predicted = one.predict(x_new)
        wanted = {
            "parameters": 4 * width + 1,
            "effective_parameters": one.effective_parameters().sum(),
            "evidence": one.log_marginal_likelihood().detach(),
            "conditional": one.conditional_log_marginal_likelihood(40, 3, 4),
            "loo": alone(one).log_density.sum(),
            "bic": one.bic(), "aic": one.aic(),
            "test_log_likelihood": predicted.log_prob(y_new).mean().detach(),
            "test_rmse": (predicted.mean - y_new).square().mean().sqrt(),
        }
        for name, value in wanted.items():
            assert getattr(row, name) == pytest.approx(float(value), rel=1e-9), name
        assert row.test_accuracy is None and row.structure == "gp"
    assert four().m == 40 and four().conditional == "evidence"


@pytest.mark.slow
def test_differences_have_standard_errors_point_by_point():
    """Of two means over the same points, the difference is known better than either."""
    left_out = {width: alone(tuned(width)).log_density for width in WIDTHS}
    tested = {width: tuned(width).predict(data()[2]).log_prob(data()[3]).detach() for width in WIDTHS}
    for prefix, found, total in ("loo", left_out, 50), ("test", tested, 1):
        best = max(found, key=lambda width: found[width].mean())
        for width in WIDTHS:
            row, own, ahead = four()[f"width {width}"], found[width], found[best] - found[width]
            assert getattr(row, f"{prefix}_error") == pytest.approx(total * float(own.std()) / len(own) ** 0.5)
            assert getattr(row, f"{prefix}_behind") == pytest.approx(total * float(ahead.mean()), abs=1e-9)
            error = total * float(ahead.std()) / len(ahead) ** 0.5
            assert getattr(row, f"{prefix}_behind_error") == pytest.approx(error, abs=1e-9)
        assert f"that of width {best}, in nats" in str(four())
    first = quietly([posterior(2), posterior(4)], {"model 1": data()[2:], "model 2": (data()[2][:9], data()[3][:9])})
    assert first.rows[1].test_behind in (0.0, None) and first.rows[1].test_error > 0
    shown = [plus_minus(error) for error in (155.3, 5.43, 0.0634, 0.0, float("nan"))]
    assert shown == [(" ± 155", 0), (" ± 5.4", 1), (" ± 0.063", 3), ("", 2), ("", 2)]
    weighted = ntkl.laplace(regression(2, 1.0), (*data()[:2], torch.arange(50) % 3), ntkl.Gaussian(0.09))
    (row,) = quietly([weighted]).rows
    found = alone(weighted)
    assert row.loo_error == pytest.approx(found.standard_error * float(found.counts.sum()))


@pytest.mark.slow
def test_rank_correlations_are_those_of_the_ranks():
    frame = four().to_dataframe()
    for criterion in ("evidence", "conditional", "loo", "bic", "aic"):
        ranks = [rankdata(frame[name]) for name in (criterion, "test_log_likelihood")]
        assert four().spearman(criterion) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)
    # less is better: the sign is turned
    assert four().spearman("evidence", "test_rmse") == pytest.approx(
        np.corrcoef(rankdata(frame["evidence"]), rankdata(-frame["test_rmse"]))[0, 1], abs=1e-12
    )
    assert np.isnan(quietly([posterior(2), posterior(4)], data()[2:]).spearman())


def test_equal_scores_have_no_ranks_and_one_model_is_called_by_its_name():
    shared = {"structure": "gp", "parameters": 1, "effective_parameters": 1.0, "conditional": None, "loo": None}
    shared |= {"bic": 1.0, "aic": 0.0, "prior_gap": 0.0, "vague": True, "narrow": False, "prior": ""}
    rows = tuple(ModelScores(name=name, evidence=float(ord(name)), **shared) for name in "abc")
    three, one = (ModelComparison(some, 5, None, "none") for some in (rows, rows[:1]))
    assert np.isnan(three.spearman("evidence", "bic")) and np.isnan(three.spearman("bic", "evidence"))
    assert "concerns all 3 models: fit" in three.warning and "concerns a: fit" in one.warning


@pytest.mark.slow
def test_table_json_and_picture_contain_the_numbers():
    found, text = four(), str(four())
    read = json.loads(found.to_json())
    for row, kept, line in zip(found.rows, read["rows"], text.splitlines()[4:8], strict=True):
        assert kept["evidence"] == row.evidence and kept["name"] == row.name
        assert row.name in line and f"{row.evidence:.2f}" in line and f"{row.test_rmse:.4g}" in line
    assert read["spearman"]["evidence"] == found.spearman()
    assert f"evidence {found.spearman():.2f}" in text and "given 40 points, the others joint" in text
    assert list(found.to_dataframe()["loo"]) == [row.loo for row in found.rows]
    (axes,) = found.plot("conditional", "test_rmse").axes
    points = [line.get_xydata()[0].tolist() for line in axes.lines]
    assert points == [[row.conditional, row.test_rmse] for row in found.rows]
    assert f"{found.spearman('conditional', 'test_rmse'):.2f}" in axes.get_title(loc="left")


@pytest.mark.slow
def test_vague_priors_are_named_and_tuned_ones_are_not():
    """At MacKay's fixed point no prior is vague; the gap foretells what tuning adds at the same weights."""
    assert "vague" not in four().warning and four().vague == ()
    models = {"vague": posterior(8, 1e-3), "tuned": tuned(8, precision=1e-3), "narrow": posterior(8, 30.0)}
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"often ranks badly at fixed vague priors.*concerns vague: fit"):
        found = ntkl.compare_models(models, conditional="none")
    assert found.vague == ("vague",) and found["tuned"].prior == "" and found["tuned"].prior_gap < 1e-3
    assert found["vague"].prior_gap == pytest.approx(found["tuned"].evidence - found["vague"].evidence, rel=0.2)
    assert found["narrow"].narrow and not found["narrow"].vague and "narrow" in found.warning
    assert "variance" in found["vague"].prior and found["vague"].prior in " ".join(str(found).split())
    assert found["vague"].conditional is None and "conditional" not in str(found).splitlines()[2]
    # one precision for all weights, and one for each
    for groups in ("all", "parameter"):
        assert quietly([posterior(8, 1e-3, groups=groups)], conditional="none").vague == ("model 1",)


@pytest.mark.parametrize(("share", "evidence", "kinds"), [
    (1.0, -60.0, ("vague", "narrow")), (1.0, -80.0, ("narrow",)), (1.0, -300.0, ()), (0.1, 0.0, ()),
])
def test_two_groups_one_vague_and_one_narrow(share, evidence, kinds):
    """γ of 10 and 20 with energies of 1 and 100: ρ of 10 and 1/5, and gaps of 7.01 and 23.9 nats, or a tenth of all."""
    distances, used = share * torch.tensor([2.0, 25.0]), share * torch.tensor([10.0, 20.0])
    prior = SimpleNamespace(precision=torch.tensor([0.5, 4.0]), group_names=["a", "b"])
    prior.group_distances = lambda _: distances
    posterior = SimpleNamespace(prior=prior, fitted=SimpleNamespace(theta=None))
    found = check_prior(posterior, used, evidence_of(evidence))
    assert found.gap == pytest.approx(share * (5 * (np.log(10) - 0.9) + 10 * (4 - np.log(5))))
    assert (found.vague, found.narrow) == ("vague" in kinds, "narrow" in kinds)
    words = {
        "vague": "vague in 1 of 2 groups, most in 'a': precision 0.5, a variance 10 times wider than the weights'; "
                 "better precisions would add about 7.01 nats",
        "narrow": "narrow in 1 of 2 groups, most in 'b': precision 4, a variance 5 times tighter than the weights'; "
                  "better precisions would add about 23.9 nats",
    }
    assert found.words == "; ".join(words[kind] for kind in kinds)
    distances = torch.tensor([2000.0, 250.0])  # ρ of 1.5 and 0.7: gaps of 54 and 25 nats, but near the weights
    near = check_prior(posterior, torch.tensor([1500.0, 700.0]), evidence_of(0.0))
    assert not near.vague and not near.narrow and near.gap > 70
    distances = torch.zeros(2)  # weights that are the prior's mean
    assert np.isfinite(check_prior(posterior, used, evidence_of(0.0)).gap)
    assert not check_prior(posterior, used, evidence_of(0.0, log_det=3.0)).vague  # at most 1.5 nats to gain


@pytest.mark.parametrize("groups", [1, 6, 18, 400])
def test_weights_drawn_from_their_prior_make_no_prior_vague(groups):
    """One precision for each weight: by chance many weights are small. A hundredfold variance is seen."""
    draws = np.random.default_rng(0)
    precision = torch.full((groups,), 4.0, dtype=torch.float64)
    alarms = {1.0: 0, 100.0: 0}
    for _ in range(200):
        squares = torch.as_tensor(draws.chisquare(1, groups)) / 4.0
        for wide in alarms:
            prior = SimpleNamespace(precision=precision / wide, group_names=[str(i) for i in range(groups)])
            prior.group_distances = lambda _, squares=squares: squares
            posterior = SimpleNamespace(prior=prior, fitted=SimpleNamespace(theta=None))
            alarms[wide] += check_prior(posterior, torch.ones(groups), evidence_of(-1e-3, log_det=1e4)).vague
    assert alarms[1.0] <= 6 and (groups == 1 or alarms[100.0] >= 180)


def test_a_prior_around_the_trained_weight_is_not_vague():
    """Its distance from the weight is zero, which says nothing of its width: at most ½ log det B is to be gained."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    network = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_((x * (2 * x + 0.1)).sum()[None, None] / x.square().sum())
    there = ntkl.GaussianPrior(1.0, mean=float(network.weight.detach()))
    fitted = ntkl.laplace(network, (x, 2 * x + 0.1), ntkl.Gaussian(1.0), there)
    found = check_prior(fitted, fitted.effective_parameters(), fitted.evidence())
    assert found.gap > 5 and not found.vague
    with torch.no_grad():
        fitted.prior.log_precision -= 25
    assert check_prior(fitted, fitted.effective_parameters(), fitted.evidence()).gap > 5


def test_the_warning_in_the_cases_of_l22():
    """[L22] section 6 and Fig. 4: priors that misled the evidence are vague, the right prior and MML's are not."""
    x = np.linspace(0, 10, 500)
    weights = np.random.RandomState(15).randn(2, 9) / np.arange(1, 10) ** 2
    draws = np.random.RandomState(6)
    draws.shuffle(x)

    def features(order):
        d = np.arange(1, order + 1)
        return np.concatenate([np.sin(x[:, None] * d), np.cos(x[:, None] * d)], 1)

    y = torch.as_tensor(features(9) @ weights.ravel() + 0.1 * draws.randn(500))[:100, None]
    vague = {}
    for name, order, precision in (("3", 3, None), ("9", 9, None), ("9c", 9, 4)):
        a = torch.as_tensor(features(order))[:100]
        p0 = torch.arange(1, order + 1).double().repeat(2) ** (precision or 0)
        network = nn.Linear(2 * order, 1, bias=False).double()
        with torch.no_grad():
            network.weight.copy_(torch.linalg.solve(a.T @ a / 0.01 + p0.diag(), a.T @ y / 0.01).T)
        prior = ntkl.GaussianPrior() if precision is None else ntkl.GaussianPrior(p0, groups="parameter")
        fitted = ntkl.laplace(network, (a, y), ntkl.Gaussian(0.01), prior)
        vague[name] = check_prior(fitted, fitted.effective_parameters(), fitted.evidence()).vague
    assert vague == {"3": True, "9": True, "9c": False}
    z = torch.as_tensor(np.random.RandomState(2).normal(size=1000)[:40] + 1.0)[:, None]
    for mean, precision, expected in ((float(z.mean()), 1.0, False), (1.0, 1e-6, True), (-0.4, 1 / 0.07, False)):
        network = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            network.weight.fill_((z.sum() + precision * mean) / (40 + precision))
        prior = ntkl.GaussianPrior(precision, mean=mean)
        fitted = ntkl.laplace(network, (torch.ones_like(z), z), ntkl.Gaussian(1.0), prior)
        assert check_prior(fitted, fitted.effective_parameters(), fitted.evidence()).vague is expected


def evidence_of(value, log_det=1000.0):
    """An evidence with these numbers."""
    terms = (torch.tensor(number, dtype=torch.float64) for number in (value, 0.0, 0.0, log_det, 0.0))
    total, likelihood, prior, det, correction = terms
    return Evidence(total, 0.0, value, value, likelihood, prior, det, correction)


def test_one_method_for_all_structures():
    models = [("exact", posterior(4)), ("kfac", posterior(4, structure="kfac"))]
    mixed = quietly(models)
    assert mixed.conditional == "average" and mixed["kfac"].loo is None and "one by one" in str(mixed)
    alone = posterior(4).conditional_log_marginal_likelihood(40, method="average")
    assert mixed["exact"].conditional == pytest.approx(float(alone), rel=1e-12)
    assert np.isnan(mixed.spearman("evidence", "conditional"))  # of two models
    with pytest.raises(ntkl.DataError, match="'loo' for every model"):
        mixed.plot("loo", "evidence")


def test_a_model_without_its_inputs_has_no_leave_one_out(tmp_path):
    posterior(2, structure="full").save(tmp_path / "full.pt", include_data=True)
    loaded = ntkl.load(tmp_path / "full.pt", regression(2, 1.0))
    row = quietly([loaded], conditional="none").rows[0]
    assert row.loo is None and row.evidence == pytest.approx(posterior(2).log_marginal_likelihood().item())


@pytest.mark.slow
def test_models_of_different_inputs_bring_their_own_test_data():
    x, y, x_new, y_new = data()
    one = ntkl.laplace(regression(3, 1.0, inputs=1), (x[:, :1], y), ntkl.Gaussian(0.09))
    tests = {"both": (x_new, y_new), "first": (x_new[:, :1], y_new)}
    found = quietly({"both": posterior(3), "first": one}, tests)
    assert found["first"].test_log_likelihood == pytest.approx(
        one.predict(x_new[:, :1]).log_prob(y_new).mean().item(), rel=1e-12
    )


def test_classes_are_scored_as_classes():
    torch.manual_seed(0)
    x = torch.randn(60, 3).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    network = nn.Linear(3, 3).double()
    one = ntkl.laplace(network, (x[:40], y[:40]), ntkl.Categorical())
    row = quietly([one], (x[40:], y[40:])).rows[0]
    probabilities = one.predict(x[40:]).probs.detach().numpy()
    assert row.test_log_likelihood == pytest.approx(-log_loss(y[40:], probabilities, labels=range(3)))
    assert row.test_accuracy == pytest.approx((probabilities.argmax(1) == y[40:].numpy()).mean())
    truth = np.eye(3)[y[40:]]
    assert row.test_brier == pytest.approx(((probabilities - truth) ** 2).sum(1).mean())
    assert row.test_ece == pytest.approx(metrics.expected_calibration_error(probabilities, y[40:]))
    assert row.test_rmse is None


def test_networks_and_priors_come_back_as_they_were():
    model = posterior(4)
    before = [t.detach().clone() for t in (model.network.theta, model.prior.log_precision)]
    state = torch.random.get_rng_state()
    quietly([model], data()[2:])
    assert torch.equal(before[0], model.network.theta) and torch.equal(before[1], model.prior.log_precision)
    assert torch.equal(torch.random.get_rng_state(), state) and model.prior.log_precision.grad is None


# --- what is not comparable


@pytest.mark.slow
def test_different_data_are_refused():
    x, y, *_ = data()
    network = regression(4, 1.0)
    moved = y.clone()
    moved[7] += 0.1
    others = {
        "50 examples.*45": posterior(4, part=45),
        "other targets": ntkl.laplace(network, (x, moved), ntkl.Gaussian(0.09)),
        "another order": ntkl.laplace(network, (x.flip(0), y.flip(0)), ntkl.Gaussian(0.09)),
        "points that a what-if removed": posterior(4).remove([3]),
    }
    twice = nn.Linear(2, 2).double(), (x, y.repeat(1, 2))
    others["other targets, or another"] = ntkl.laplace(*twice, ntkl.Gaussian(0.09))
    for words, other in others.items():
        with pytest.raises(ntkl.DataError, match=f"(?s)same data.*{words}.*without shuffling"):
            ntkl.compare_models([posterior(4), other])
    counts = torch.randint(0, 4, (50, 1)).double()
    for wrap in (lambda likelihood: likelihood, lambda likelihood: ntkl.Tempered(likelihood, 2.0)):
        pair = [ntkl.laplace(network, (x, counts), wrap(model)) for model in (ntkl.Gaussian(), ntkl.Poisson())]
        with pytest.raises(ntkl.UnsupportedError, match=r"densities or all probabilities.*Gaussian and Poisson"):
            ntkl.compare_models(pair)
    weighed = [ntkl.laplace(network, (x, y), ntkl.Tempered(ntkl.Gaussian(0.09), weight)) for weight in (1.0, 5.0)]
    with pytest.raises(ntkl.UnsupportedError, match=r"equally often; got weights 1 for 'model 1' and 5 for 'model 2'"):
        ntkl.compare_models(weighed)
    own = ntkl.CustomLikelihood(lambda f, y: -0.5 * (y - f).square().sum(1) - (y - f).pow(4).sum(1))  # a density too
    assert len(quietly([posterior(4), ntkl.laplace(network, (x, y), own)]).rows) == 2
    # float32 rounds the targets, which is no other data
    single = ntkl.laplace(network.float(), (x.float(), y.float()), ntkl.Gaussian(0.09))
    network.double()
    quietly([posterior(4), single])


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda one: ntkl.compare_models([]), ntkl.DataError, "got none"),
        (lambda one: ntkl.compare_models([one.network]), ntkl.DataError, "Fit each model"),
        (lambda one: ntkl.compare_models([("a", one), ("a", one)]), ntkl.DataError, "a unique name"),
        (lambda one: ntkl.compare_models([one], conditional="all"), ntkl.UnsupportedError, "conditional=.*'all'"),
        (lambda one: ntkl.compare_models([one], m=50), ntkl.DataError, "0 to 49; got 50"),
        (lambda one: ntkl.compare_models([one], data()[2:], predictive="all"), ntkl.UnsupportedError, "a method among"),
        (lambda one: quietly([one]).spearman("evidence"), ntkl.DataError, "'test_log_likelihood' for every"),
        (lambda one: quietly([one]).plot("clml"), ntkl.DataError, "a column among"),
        (lambda one: quietly([one])["b"], KeyError, "no model 'b' among model 1"),
    ],
)
def test_bad_questions_are_answered(ask, error, words):
    with pytest.raises(error, match=words):
        ask(posterior(2))


def test_wrong_test_data_raise_an_error_before_any_score(monkeypatch):
    monkeypatch.setattr(ntkl.Posterior, "conditional_log_marginal_likelihood", None)
    for test in (data()[2], (data()[2], data()[3][:3]), (data()[2], data()[3].repeat(1, 2))):
        with pytest.raises(ntkl.DataError):
            ntkl.compare_models([posterior(2), posterior(4)], test)


def test_names_that_are_numbers_and_numbers_of_numpy():
    found = quietly({1: posterior(2), 2: posterior(4)}, {1: data()[2:], 2: data()[2:]}, m=np.int64(40), permutations=2)
    assert [row.name for row in found.rows] == ["1", "2"] and json.loads(found.to_json())["m"] == 40
    assert quietly([["a", posterior(2)]]).rows[0].name == "a"


@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_one_point_or_two(structure):
    """A mean of predictions needs three points: one to fit, one to tune, one to predict."""
    for part, words in ((1, "1 model of 1 point;"), (2, "1 model of 2 points;")):
        found = quietly([posterior(2, structure=structure, part=part)])
        assert str(found).startswith(words)
        assert (found.rows[0].conditional is None) == (found.m is None) == (structure == "kfac")
    three = quietly([posterior(2, structure=structure, part=3)])
    assert three.m == 2 and three.conditional == ("evidence" if structure == "gp" else "average")
    with pytest.raises(ntkl.DataError, match="at least 3 training points, to condition on 2 and predict one; got 2"):
        posterior(2, structure="kfac", part=2).conditional_log_marginal_likelihood(1)


def test_a_prior_is_checked_at_the_weights_that_a_what_if_moved_to():
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure="gp")
    moved = posterior.relabel(range(9), (labels() + 1) % 3)
    used, prior = moved.effective_parameters(), moved.prior.requires_grad_(False)
    theta = moved.network.theta.to(moved.dtype) + moved.fitted.model.displacement
    ratio = used.sum() / (prior.precision * (theta - prior.flat_mean()).square().sum())
    gap = 0.5 * used.sum() * (ratio.log() - 1 + 1 / ratio)
    assert abs(quietly([moved], conditional="none").rows[0].prior_gap - float(gap)) < 1e-9
    for models in (posterior, None, torch.tensor(1.0)):
        with refused(ntkl.DataError, "posteriors", ".", "Fit each model"):
            ntkl.compare_models(models)
    with refused(ntkl.DataError, "test data for a", "b", "its own"):
        ntkl.compare_models({"a": posterior}, test={"b": (inputs(), labels())})
