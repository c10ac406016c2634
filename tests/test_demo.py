"""The demo in miniature: its parts against independent computations, its files as they are promised."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.tools.demo import data, run_demo
from ntk_laplace.tools.demo.networks import cnn, mlp, seeded, train_map
from ntk_laplace.tools.demo.page import EVIDENCE, evidence_rows
from ntk_laplace.tools.demo.pictures import support_of_prediction
from ntk_laplace.tools.demo.problems import miniature, problems
from ntk_laplace.tools.demo.screen import table
from ntk_laplace.tools.demo.study import score_candidates, settled
from scripts import sketches

SCORES = {"log_likelihood", "map_log_likelihood", "calibrated_log_likelihood"}
CLASS_SCORES = {"accuracy", "ece", "map_accuracy", "map_ece", "calibrated_ece"}


# --- data


def test_digits_are_split_without_overlap_and_by_class() -> None:
    split = data.digits(seed=3, train=200, held_out=161, pair=(4, 9))
    assert split.x_train.shape == (200, 1, 8, 8) and split.x_train.dtype == torch.float64
    assert float(split.x_train.min()) == 0.0 and float(split.x_train.max()) == 1.0
    rows = torch.cat([split.x_train, split.x_test]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows) == 361
    assert abs(float(split.y_train.double().mean() - split.y_test.double().mean())) < 0.01
    assert split.classes == ("4", "9") and set(split.y_train.tolist()) == {0, 1}


def test_unseen_digits_are_of_other_classes() -> None:
    split = data.digits(seed=0, train=200, held_out=161, pair=(4, 9))
    known = {tuple(row.tolist()) for row in torch.cat([split.x_train, split.x_test]).flatten(1)}
    assert len(split.x_unseen) == 300
    assert not any(tuple(row.tolist()) in known for row in split.x_unseen.flatten(1))


def test_seed_decides_the_split() -> None:
    first, again, other = (data.digits(seed, 100, 50) for seed in (0, 0, 1))
    assert torch.equal(first.x_train, again.x_train) and not torch.equal(first.x_train, other.x_train)


def test_diabetes_is_standardized_by_its_training_part() -> None:
    split = data.diabetes(seed=0, train=330)
    for values in (split.x_train, split.y_train):
        torch.testing.assert_close(
            values.mean(0), torch.zeros(values.shape[1], dtype=torch.float64), atol=1e-12, rtol=0
        )
        torch.testing.assert_close(values.std(0), torch.ones(values.shape[1], dtype=torch.float64))
    assert len(split.y_test) == 112 and abs(float(split.y_test.mean())) > 1e-3


def test_wave_has_a_gap_and_moons_a_grid() -> None:
    wave, moons = data.wave(0), data.moons(0)
    assert not ((wave.x_train > -1.2) & (wave.x_train < 1.4)).any()
    assert ((wave.x_test > -1.2) & (wave.x_test < 1.4)).any()
    assert len(moons.x_test) == len(moons.x_test[:, 0].unique()) * len(moons.x_test[:, 1].unique())


# --- networks and training


def test_networks_are_seeded_and_leave_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (seeded(lambda: mlp((3, 4, 2)), seed) for seed in (0, 0, 1))
    assert torch.equal(first[1].weight, again[1].weight) and not torch.equal(first[1].weight, other[1].weight)
    assert torch.equal(state, torch.random.get_rng_state())
    assert seeded(lambda: cnn((2, 3), 1), 0)(torch.zeros(5, 1, 8, 8).double()).shape == (5, 1)


def training_case() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], ntkl.Categorical, ntkl.GaussianPrior]:
    split = data.digits(seed=0, train=60, held_out=20)
    prior = ntkl.GaussianPrior(precision={"1": 2.0, "3": 0.7}, groups="layer", mean=0.1)
    return seeded(lambda: mlp((64, 5, 10)), 0), (split.x_train, split.y_train), ntkl.Categorical(), prior


@pytest.mark.slow
def test_training_reaches_a_stationary_point_of_the_log_joint() -> None:
    network, (x, y), likelihood, prior = training_case()
    train_map(network, (x, y), likelihood, prior, tolerance=1e-9)
    # the objective once more, in other words: cross entropy and weight decay
    decay = sum(d * (p - 0.1).square().sum() for d, p in zip((2.0, 2.0, 0.7, 0.7), network.parameters(), strict=True))
    loss = nn.functional.cross_entropy(network(x), y, reduction="sum") + 0.5 * decay
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    bound = sum(0.5 * g.square().sum() / d for d, g in zip((2.0, 2.0, 0.7, 0.7), gradients, strict=True)) / len(x)
    assert float(bound) <= 1e-9


def test_training_leaves_gradients_and_hyperparameters_alone() -> None:
    network, pairs, likelihood, prior = training_case()
    train_map(network, pairs, likelihood, prior, tolerance=1e-3)
    assert all(p.grad is None for module in (network, likelihood, prior) for p in module.parameters())
    torch.testing.assert_close(prior.precision.detach(), torch.tensor([2.0, 0.7], dtype=torch.float64))


@pytest.mark.slow
def test_training_is_repeatable_and_stops_on_request() -> None:
    ends = []
    for steps in (40, 40, 20):
        network, *rest = training_case()
        train_map(network, *rest, tolerance=0.0, steps=steps)
        ends.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


# --- the study


@pytest.fixture(scope="module")
def small_classes() -> Any:
    return miniature(problems(0)[1])


@pytest.mark.slow
def test_candidates_are_scored_by_training_data(small_classes: Any) -> None:
    said: list[str] = []
    candidates = score_candidates(small_classes, 0, said.append)
    assert [one.precision for one in candidates] == list(small_classes.precisions)
    assert len(said) == 2 and "prior precision" in said[0]
    network = seeded(small_classes.build, 0)
    data, prior = (small_classes.split.x_train, small_classes.split.y_train), ntkl.GaussianPrior(3.0)
    train_map(network, data, ntkl.Categorical(), prior)
    posterior = ntkl.laplace(network, data, ntkl.Categorical(), prior)
    assert candidates[0].evidence == pytest.approx(float(posterior.log_marginal_likelihood()) / 40)
    assert candidates[0].leave_one_out == pytest.approx(float(posterior.leave_one_out().log_density.mean()))


@pytest.mark.slow
def test_support_is_the_log_odds_lost_on_removal(small_classes: Any) -> None:
    one = replace(small_classes, precisions=(1.0,))
    explained = settled(one, 0, lambda words: None).posterior(one, "gp").explain(small_classes.split.x_test[:3])
    support = support_of_prediction(explained)
    for i in range(3):
        first, second = explained.f[i].argsort(descending=True)[:2].tolist()
        for j in (0, 7):
            before = explained.f[i, first] - explained.f[i, second]
            without = explained.f[i] + explained.removal[i, j]
            assert float(support[i, j]) == pytest.approx(float(before - (without[first] - without[second])), abs=1e-12)


# --- the whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any], str]]:
    out, screen = tmp_path_factory.mktemp("demo") / "not" / "there", io.StringIO()
    with sketches():
        summary = run_demo(out, seed=1, console=Console(file=screen, width=80), small=True)
    yield out, summary, screen.getvalue()


@pytest.mark.slow
def test_the_summary_is_complete(finished: tuple[Path, dict[str, Any], str]) -> None:
    out, summary, _ = finished
    assert json.loads((out / "summary.json").read_text()) == summary
    assert list(summary["runs"]) == ["digits_4_vs_9", "digits_ten_classes", "diabetes"]
    for name, run in summary["runs"].items():
        keys = {"evidence_gp", "evidence_full", "relative_difference", "n", "outputs", "parameters", "seconds"}
        keys |= SCORES | ({"rmse", "map_rmse"} if name == "diabetes" else CLASS_SCORES)
        assert keys <= set(run)
        assert all(np.isfinite(run[key]) for key in keys)
        assert run["newton_decrement"] <= 0.05 and len(run["prior_precisions"]) >= 2
        assert run["leave_one_out"] >= run["leave_one_out_before"]


@pytest.mark.slow
def test_evidence_is_the_same_from_both_spaces(finished: tuple[Path, dict[str, Any], str]) -> None:
    for run in finished[1]["runs"].values():
        assert run["evidence_gp"] == pytest.approx(run["evidence_full"], rel=1e-10)
        assert run["relative_difference"] < 1e-10 and run["variance_relative_difference"] < 1e-8


@pytest.mark.slow
def test_one_run_compares_the_structures(finished: tuple[Path, dict[str, Any], str]) -> None:
    out, summary, text = finished
    assert [name for name, run in summary["runs"].items() if "structures" in run] == ["digits_ten_classes"]
    run = summary["runs"]["digits_ten_classes"]
    found = run["structures"]
    assert list(found) == ["gp", "full", "iterative", "nystrom", "kfac", "ekfac", "inf", "diag"]
    assert found["gp"]["evidence"] == pytest.approx(run["evidence_gp"], rel=1e-12)
    page = (out / "report.html").read_text(encoding="utf-8")
    for name, row in found.items():
        assert row["difference"] == (None if name == "gp" else row["evidence"] - found["gp"]["evidence"])
        assert row["fit_seconds"] > 0 and not row["note"].startswith(("refused", "failed"))
        for shown in (text, page):
            assert f"{row['evidence']:.3f}" in shown and f"{row['log_det']:.3f}" in shown
    iterative = f"<td>{found['iterative']['evidence']:.3f}</td><td>{found['iterative']['standard_error']:.2g}</td>"
    assert iterative in page
    assert "structures.png" in summary["pictures"] and "Evidence under every structure" in page


@pytest.mark.slow
def test_every_picture_is_written_and_in_the_report(finished: tuple[Path, dict[str, Any], str]) -> None:
    out, summary, _ = finished
    files = {path.name for path in out.iterdir()}
    assert files == {"summary.json", "report.html", "explanations.html", *summary["pictures"]}
    assert len(summary["pictures"]) == 9
    for name in summary["pictures"]:
        image = (out / name).read_bytes()
        assert image.startswith(b"\x89PNG") and 5_000 < len(image) < 200_000
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<img ") == page.count('src="data:image/png;base64,') == 9
    assert "http://" not in page and "https://" not in page
    for run in summary["runs"].values():
        assert f"{run['evidence_gp']:#.10g}" in page


@pytest.mark.slow
def test_explanations_are_linked_from_the_report(finished: tuple[Path, dict[str, Any], str]) -> None:
    out, summary, _ = finished
    assert 'href="explanations.html"' in (out / "report.html").read_text(encoding="utf-8")
    page = (out / "explanations.html").read_text(encoding="utf-8")
    content = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert content["names"] == ["4", "9"] and content["pictures"]["training"] is not None
    run = summary["runs"]["digits_4_vs_9"]
    assert content["examples"] == run["n"] and len(content["points"]) == min(200, run["n_held_out"])
    wrong = [point["target"] != point["output"] for point in content["points"]]
    assert wrong == sorted(wrong, reverse=True)


@pytest.mark.slow
def test_the_screen_shows_steps_and_tables(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, summary, text = finished
    assert "Digits 0 to 9: evidence in function space" in text and "report.html" in text
    for run in summary["runs"].values():
        assert f"{run['evidence_gp']:#.10g}" in text
    assert "…" not in text


def test_evidence_table_fits_eighty_columns() -> None:
    run = dict(n=1500, outputs=10, parameters=12345, evidence_gp=-1234.567890123, evidence_full=-1234.567890124,
               relative_difference=1e-12, seconds=103.4)
    screen = io.StringIO()
    rows = evidence_rows({"Digits 4 and 9": run})
    Console(file=screen, width=80).print(table("evidence", EVIDENCE, rows, words=1))
    assert "…" not in screen.getvalue() and "-1234.567890" in screen.getvalue()
