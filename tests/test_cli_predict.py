"""The command ``predict``: its numbers are those of the library, in the inputs' order; wrong inputs are refused."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace import metrics, plotting
from ntk_laplace.runtime import tuning
from ntk_laplace.tools import cli
from ntk_laplace.tools.cli import predict
from ntk_laplace.tools.cli.predictions import Judged
from ntk_laplace.tools.cli.scores import as_set

NETWORK = """
from torch import nn


def make_network():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def real():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


def single():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
"""
LIKELIHOODS = {
    "labels": ("categorical", ntkl.Categorical()),
    "real": ("gaussian", ntkl.Gaussian(noise=0.25)),
    "single": ("bernoulli", ntkl.Bernoulli()),
    "both": ("bernoulli", ntkl.Bernoulli()),
    "counts": ("poisson", ntkl.Poisson()),
}
FACTORIES = {"labels": "make_network", "real": "real", "single": "single", "both": "real", "counts": "single"}
PRECISION = 0.5


def trained(outputs: int, likelihood: ntkl.Likelihood, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A network at the optimum of the log joint."""
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    weights = list(network.parameters())
    optimizer = torch.optim.LBFGS(weights, max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 0.5 * PRECISION * sum(w.square().sum() for w in weights) - likelihood.log_prob(network(x), y).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks, checkpoints, and data of 30 training points, 25 held-out points and 7 inputs for each likelihood."""
    place = tmp_path_factory.mktemp("own")
    (place / "model.py").write_text(NETWORK)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(62, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(62, 2, generator=generator, dtype=torch.float64)
    targets = {
        "labels": (x[:, 0] + 0.5 * noise[:, 0] > 0).long() + (x[:, 1] + 0.5 * noise[:, 1] > 0.5),
        "real": torch.sin(x) + 0.5 * noise,
        "single": (x[:, :1] + noise[:, :1] > 0).double(),
        "both": (x + noise > 0).double(),
        "counts": torch.poisson((0.5 * x[:, :1]).exp(), generator=generator),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, y in targets.items():
            outputs = {"labels": 3, "real": 2, "both": 2}.get(name, 1)
            torch.save(trained(outputs, LIKELIHOODS[name][1], x[:30], y[:30]).state_dict(), place / f"{name}.pt")
            for part, rows in {"data": slice(30), "held": slice(30, 55), "new": slice(55, None)}.items():
                np.savez(place / f"{part}_{name}.npz", X=x[rows], y=y[rows])
    np.savez(place / "plain.npz", X=x[55:])
    return place


@pytest.fixture(scope="module")
def dot() -> bytes:
    """A small PNG, for pictures that no test looks at: drawing takes longer than all the rest."""
    return plotting.png(Figure(figsize=(0.1, 0.1)), dpi=10)


@pytest.fixture
def here(folder: Path, tmp_path: Path, dot: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory for the outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plotting, "png", lambda figure: dot)
    return tmp_path


def line(folder: Path, name: str, *more: str, inputs: str | None = None) -> list[str]:
    likelihood = LIKELIHOODS[name][0]
    noise = ["--noise", "0.25"] if likelihood == "gaussian" else []
    return ["predict", f"{folder}/model.py:{FACTORIES[name]}", "--checkpoint", f"{folder}/{name}.pt", "--data",
            f"{folder}/data_{name}.npz", "--likelihood", likelihood, *noise, "--precision", str(PRECISION),
            "--inputs", f"{folder}/{inputs or f'new_{name}'}.npz", *more]


def arrays(folder: Path, name: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = np.load(folder / f"{part}_{name}.npz")
    return torch.as_tensor(found["X"]), torch.as_tensor(found["y"])


def fitted(folder: Path, name: str, structure: str = "gp") -> ntkl.Posterior:
    """The posterior without the command."""
    outputs = {"labels": 3, "real": 2, "both": 2}.get(name, 1)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    network.load_state_dict(torch.load(folder / f"{name}.pt"))
    likelihood, prior = LIKELIHOODS[name][1], ntkl.GaussianPrior(PRECISION)
    return ntkl.laplace(network, arrays(folder, name, "data"), likelihood, prior, structure)


def score_lines(text: str) -> dict[str, list[float]]:
    """Numbers of the table of scores by the name of the prediction."""
    rows = re.findall(r"^(network alone|posterior as it is|calibrated posterior) +([-\d. ]+)$", text, re.MULTILINE)
    return {name: [float(number) for number in numbers.split()] for name, numbers in rows}


def compare(told: list[float], response: Any, y: torch.Tensor, covered: float) -> None:
    """A line of the table with the scores of a response."""
    terms = response.log_prob(y)
    assert told.pop(1) == pytest.approx(float(terms.std()) / len(terms) ** 0.5, rel=0.05)  # two digits
    assert told == pytest.approx([*metrics.held_out_scores(response, y).values(), covered], abs=6e-5)


@pytest.mark.parametrize("name", ["labels", "real", "single", "both", "counts"])
@pytest.mark.parametrize("held_out", [False, True], ids=["leave-one-out", "held out"])
def test_points_of_the_pictures_are_those_of_the_fit(name: str, held_out: bool, folder: Path) -> None:
    """Their mean log likelihoods are what the calibration maximized."""
    posterior = fitted(folder, name)
    held = arrays(folder, name, "held")
    fit = posterior.calibrate(held) if held_out else posterior.fit_predictive(strict=False)
    judged = Judged.of(posterior, *held) if held_out else Judged.without_themselves(posterior, fit.calibration)
    found = [row["log_likelihood"] for row in judged.scores(0.9).values()]
    # the fit averages densities over the points of f, a response of several labels over probabilities
    assert found == pytest.approx([fit.network, fit.before, fit.after], abs=0.05 if name == "both" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True], ids=["leave-one-out", "held out"])
def test_classes(held_out: bool, folder: Path, here: Path, capsys: pytest.CaptureFixture) -> None:
    more = ["--held-out", f"{folder}/held_labels.npz", "--structure", "kfac"] if held_out else []
    assert cli.main([*line(folder, "labels", "--classes", "ant,bee,cat", "--level", "0.8", *more)]) == 0
    printed, frame = capsys.readouterr(), pandas.read_csv("predictions.csv")
    posterior = fitted(folder, "labels", "kfac" if held_out else "gp")
    held = arrays(folder, "labels", "held") if held_out else None
    fit = posterior.calibrate(held) if held_out else posterior.fit_predictive()
    x, y = arrays(folder, "labels", "new")
    response = posterior.predict(x)
    p = response.probs.numpy()
    assert frame["input"].tolist() == list(range(7))
    assert frame[["probability_ant", "probability_bee", "probability_cat"]].to_numpy() == pytest.approx(p, abs=1e-9)
    names = np.array(["ant", "bee", "cat"])
    assert frame["predicted"].tolist() == names[p.argmax(1)].tolist()
    assert frame["probability"].to_numpy() == pytest.approx(p.max(1), abs=1e-9)
    parts = frame["epistemic_sd"] ** 2 + frame["aleatoric_sd"] ** 2
    assert parts.to_numpy() == pytest.approx(p.max(1) * (1 - p.max(1)), abs=1e-6)
    best = response.epistemic.numpy()[np.arange(7), p.argmax(1)]
    assert frame["epistemic_sd"].to_numpy() == pytest.approx(np.sqrt(best), abs=1e-9)
    plain = posterior.predict(x, calibrated=False)
    assert frame["unfamiliarity"].to_numpy() == pytest.approx(plain.entropy().numpy(), abs=1e-6)
    sets = posterior.predict_set(x, 0.8, data=held, never_empty=True)
    assert frame["set"].tolist() == ["{" + ", ".join(one) + "}" for one in sets.labels(names.tolist())]
    assert frame["set_size"].tolist() == sets.size.tolist()
    found = [as_set(["ant", 3, "a, b", 'x"y'])]
    assert found == ['{ant, 3, "a, b", "x\\"y"}']
    assert frame["target"].tolist() == names[y.numpy()].tolist()
    assert frame["covered"].tolist() == sets.contains(y).tolist()
    assert str(fit.calibration) in printed.out and f"calibrated posterior {fit.after:.4f}" in printed.out
    scores = score_lines(printed.out)
    for name, one in (("network alone", posterior.predict(x, "map")), ("posterior as it is", plain),
                      ("calibrated posterior", response)):
        compare(scores[name], one, y, metrics.set_coverage(one.probs, y, [0.8])[0])
    assert printed.err == "" and "WARNING" not in printed.out
    page = Path("predictions.html").read_text()
    assert page.count("<img ") == 4 and "Nothing speaks against" in page and 'href="predictions.csv"' in page
    points = "25 held-out points" if held_out else "30 training points, each left out"
    assert f"Fitted to {points}" in page and ("Split conformal" if held_out else "Jackknife+") in page


def test_responses_of_several_outputs(folder: Path, here: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main([*line(folder, "real", "--classes", "u,v", "--out", "sub.csv")]) == 0
    frame, (x, y) = pandas.read_csv("sub.csv"), arrays(folder, "real", "new")
    posterior = fitted(folder, "real")
    posterior.fit_predictive(strict=False)
    response, intervals = posterior.predict(x), posterior.predict_interval(x, 0.9)
    for index, name in enumerate("uv"):
        for column, values in (("mean", response.mean), ("lower", intervals.lower), ("upper", intervals.upper),
                               ("epistemic_sd", response.epistemic.sqrt()), ("sd", response.variance.sqrt()),
                               ("aleatoric_sd", response.aleatoric.sqrt()), ("target", y)):
            assert frame[f"{column}_{name}"].to_numpy() == pytest.approx(values[:, index].numpy(), abs=1e-9), column
        assert frame[f"covered_{name}"].tolist() == intervals.contains(y)[:, index].tolist()
    printed = capsys.readouterr().out
    assert f"They contain {intervals.coverage(y):.1%} of the 14 known targets." in printed
    own = metrics.interval_coverage(response.mean, response.variance, y, [0.9])[0]
    compare(score_lines(printed)["calibrated posterior"], response, y, own)
    assert Path("sub.html").exists() and not Path("predictions.html").exists()


def test_coverage_of_noise_with_heavy_tails_is_that_of_its_quantiles(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The posterior is the command's own: to fit it a second time takes seconds."""
    seen, fit = [], ntkl.Posterior.fit_predictive
    monkeypatch.setattr(ntkl.Posterior, "fit_predictive",
                        lambda posterior, *given, **more: seen.append(posterior) or fit(posterior, *given, **more))
    options = [one if one != "gaussian" else "student-t" for one in line(folder, "real")]
    assert cli.main([*options, "--likelihood-option", "df=2.2", "--level", "0.8"]) == 0
    printed = capsys.readouterr().out
    (posterior,) = seen
    assert float(posterior.likelihood.noise) == 0.25 and float(posterior.likelihood.df) == 2.2
    x, y = arrays(folder, "real", "new")
    with torch.no_grad():
        low, high = posterior.predict(x).quantiles([0.1, 0.9])
    told = score_lines(printed)["calibrated posterior"]
    assert told[-1] == pytest.approx(float(((low <= y) & (y <= high)).double().mean()), abs=5.1e-5)
    assert "leaves out as much on either side" in Path("predictions.html").read_text()


@pytest.mark.slow
def test_the_network_is_trained_on_first(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "RETRAINING_STEPS", 100)
    assert cli.main(line(folder, "real", "--retrain")) == 0
    frame, (x, _) = pandas.read_csv("predictions.csv"), arrays(folder, "real", "new")
    posterior = fitted(folder, "real").retrain(arrays(folder, "real", "data"))
    assert frame["mean_0"].to_numpy() == pytest.approx(posterior.predict(x).mean[:, 0].numpy(), abs=1e-5)
    noise, printed = float(posterior.likelihood.noise), capsys.readouterr().out
    for text in (printed, Path("predictions.html").read_text()):
        assert "trained on from the checkpoint" in text and f"noise variance {noise:.3g}." in text


@pytest.mark.slow
def test_warnings_of_more_training_are_told(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def warning(posterior: ntkl.Posterior, *_: object, **__: object) -> ntkl.Posterior:
        warnings.warn("an optimum was not reached", ntkl.NTKLaplaceWarning, stacklevel=1)
        return posterior

    monkeypatch.setattr(ntkl.Posterior, "retrain", warning)
    assert cli.main(line(folder, "labels", "--retrain")) == 0
    printed = capsys.readouterr()
    assert "\nWARNING: an optimum was not reached\n" in printed.out and printed.err == ""
    assert "Warning: an optimum was not reached" in Path("predictions.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "both", "counts"])
def test_other_likelihoods(name: str, folder: Path, here: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(line(folder, name)) == 0
    frame, (x, _) = pandas.read_csv("predictions.csv"), arrays(folder, name, "new")
    posterior = fitted(folder, name)
    posterior.fit_predictive(strict=False)
    mean = posterior.predict(x).mean.numpy()
    if name == "single":
        assert frame["probability_1"].to_numpy() == pytest.approx(mean[:, 0], abs=1e-9)
        assert frame["predicted"].tolist() == (mean[:, 0] > 0.5).astype(int).tolist()
    elif name == "both":  # several labels of an input: probabilities, and no sets
        assert frame[["probability_0", "probability_1"]].to_numpy() == pytest.approx(mean, abs=1e-9)
        assert not [column for column in frame if "set" in column or "covered" in column]
        assert "no picture of coverage" in Path("predictions.html").read_text()
    else:
        assert frame["mean"].to_numpy() == pytest.approx(mean[:, 0], abs=1e-9)
        assert (frame["lower"] <= frame["mean"]).all() and (frame["mean"] <= frame["upper"]).all()


def test_inputs_without_targets(folder: Path, here: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(line(folder, "labels", inputs="plain")) == 0
    frame = pandas.read_csv("predictions.csv")
    assert len(frame) == 7 and not {"target", "covered"} & set(frame)
    assert "Scores" not in capsys.readouterr().out
    page = Path("predictions.html").read_text()
    assert "Scores of the inputs" not in page and page.count("<img ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels", "real"])
def test_missing_targets_have_no_score(name: str, folder: Path, here: Path, capsys: pytest.CaptureFixture) -> None:
    x, y = arrays(folder, name, "new")
    absent = [number == 2 for number in range(7)]
    marked = [] if name == "labels" else ["--likelihood-option", "missing=nan"]
    if name == "labels":
        y[2] = -100
    else:
        y[2, 1] = torch.nan
    np.savez("gaps.npz", X=x, y=y)
    assert cli.main([*line(folder, name), "--inputs", "gaps.npz", *marked]) == 0
    frame, end = pandas.read_csv("predictions.csv"), "" if name == "labels" else "_1"
    assert frame[f"target{end}"].isna().tolist() == absent and frame[f"covered{end}"].isna().tolist() == absent
    if name == "labels":
        sets = [one.strip("{}").split(", ") for one in frame["set"]]
        inside = [str(label) in one for label, one in zip(y.tolist(), sets, strict=True)]
        known = [number for number in range(7) if number != 2]
        assert {inside[number] for number in known} == {True, False}
        assert [frame["covered"][number] for number in known] == [inside[number] for number in known]
    assert f"of the {6 if name == 'labels' else 13} known targets" in capsys.readouterr().out


@pytest.mark.slow
def test_leave_one_out_that_is_not_to_be_trusted_is_told(
    folder: Path, here: Path, capsys: pytest.CaptureFixture
) -> None:
    """Under another precision than that of the training, the weights are at no optimum."""
    assert cli.main([*line(folder, "labels", inputs="plain"), "--precision", "30"]) == 0
    printed, page = capsys.readouterr(), Path("predictions.html").read_text()
    for text in (printed.out, page):
        assert "leave-one-out is not to be trusted for this network" in text
        assert "the weights are not at the optimum of this model" in text and "--held-out" in text
    assert "Read the warning below." in page and printed.err == ""
    assert cli.main([*line(folder, "labels", inputs="plain"), "--precision", "30", "--held-out",
                     f"{folder}/held_labels.npz"]) == 0
    assert "leave-one-out is not" not in capsys.readouterr().out


@pytest.mark.slow
def test_known_targets_outside_their_intervals_are_told(
    folder: Path, here: Path, capsys: pytest.CaptureFixture
) -> None:
    """30 of them, at the level of 0.9: a coverage below 0.9 - 4 sqrt(0.09/30) = 0.68 is no chance."""
    x, _ = arrays(folder, "real", "data")
    for wrong, told in ((0, False), (40, True)):
        off = torch.arange(60).view(30, 2) < wrong
        np.savez("off.npz", X=x, y=torch.where(off, 20.0, fitted(folder, "real").outputs(x)))
        assert cli.main([*line(folder, "real"), "--inputs", "off.npz"]) == 0
        assert ("intervals of level 90% contain 33.3% of the known targets" in capsys.readouterr().out) is told


def test_predictions_far_from_zero_differ_on_the_page(folder: Path, here: Path) -> None:
    weights, (x, y) = torch.load(folder / "real.pt"), arrays(folder, "real", "data")
    weights["2.bias"] += 2e5
    torch.save(weights, "far.pt")
    np.savez("far.npz", X=x, y=y + 2e5)
    assert cli.main([*line(folder, "real"), "--checkpoint", "far.pt", "--data", "far.npz"]) == 0
    rows = re.findall(r"<tr><t[hd][^>]*>(\d)</t[hd]><t[hd][^>]*>([\d.]+)<", Path("predictions.html").read_text())
    means = pandas.read_csv("predictions.csv")["mean_0"]
    assert len({mean for _, mean in rows}) == 7
    assert all(float(mean) == pytest.approx(means[int(row)], abs=1e-3) for row, mean in rows)


def test_too_few_points_for_a_level_are_told(folder: Path, here: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(line(folder, "real", "--level", "0.99")) == 0
    assert "too few points for level 0.99: the intervals are the whole line" in capsys.readouterr().out
    assert np.isinf(pandas.read_csv("predictions.csv")["upper_0"]).all()


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--inputs", "nowhere.npz"], 1, "an .npz file of inputs to predict; got nowhere.npz, where there is no file"),
        (["--inputs", "wide.npz"], 1, "network that takes X of shape (2, 5) and type torch.float64; got"),
        (["--inputs", "labels.npz"], 1, "expected class labels in 0..2; got 7 at example 0"),
        (["--held-out", "nowhere.npz"], 1, "an .npz file of held-out data; got nowhere.npz, where there is no file"),
        (["--held-out", "wide.npz"], 1, "network that takes X of shape (2, 5)"),
        (["--held-out", "plain.npz"], 1, "expected arrays X and y in plain.npz; got 'X', and no y"),
        (["--structure", "kfac"], 1, "Pass data that training did not use: --held-out FILE."),
        (["--curvature", "ef"], 1, "--structure auto and --curvature ef without --held-out"),
        (["--structure", "exact"], 1,
         "expected structure among gp, full, iterative, nystrom, kfac, ekfac, inf, diag, auto; got 'exact'"),
        (["--classes", "a,b"], 1, "expected 3 names of classes or outputs; got 2"),
        (["--classes", "a,a,b"], 1, "expected different names; got 'a' twice"),
        (["--out", "nowhere/p.csv"], 1, "cannot write to nowhere/p.csv"),
        (["--out", "taken.csv"], 1, "cannot write to taken.html"),
        (["--out", "p.txt"], 2, "expected a file name that ends with .csv; got 'p.txt'"),
        (["--level", "1"], 2, "expected a probability between 0 and 1, such as 0.9; got '1'"),
        (["--level", "most"], 2, "got 'most'"),
    ],
)
def test_what_does_not_fit_is_one_line(
    more: list[str], code: int, words: str, folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    np.savez("wide.npz", X=np.zeros((4, 5)), y=np.zeros(4, int))
    np.savez("labels.npz", X=np.zeros((4, 2)), y=np.full(4, 7))
    np.savez("plain.npz", X=np.zeros((4, 2)))
    (here / "taken.html").mkdir()
    if words.startswith(("Pass", "--structure auto", "expected structure", "cannot")):
        monkeypatch.setattr(ntkl, "laplace", lambda *_, **__: pytest.fail("work began"))
    if code == 2:
        with pytest.raises(SystemExit) as left:
            cli.main(line(folder, "labels", *more))
        assert left.value.code == 2
        assert words in capsys.readouterr().err
    else:
        assert cli.main(line(folder, "labels", *more)) == code
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1 and printed.out == "", printed
    assert not list(here.glob("*.csv")) and not (here / "predictions.html").exists()


@pytest.mark.slow
def test_products_alone_predict_the_same(folder: Path, here: Path) -> None:
    tables = []
    for structure in ("gp", "iterative"):
        assert cli.main(line(folder, "labels", "--structure", structure)) == 0
        tables.append(pandas.read_csv("predictions.csv").filter(like="probability").to_numpy())
    assert tables[0].size and np.allclose(*tables, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(folder: Path, here: Path, capsys: pytest.CaptureFixture) -> None:
    x, y = arrays(folder, "labels", "held")
    np.savez("few.npz", X=x[:6], y=y[:6])
    assert cli.main(line(folder, "labels", "--structure", "iterative", "--memory", "1e-5",
                         "--held-out", "few.npz")) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("ntk-laplace: warning: the evidence's standard error is"), told


@pytest.mark.slow
def test_an_interruption_writes_nothing(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "build", interrupted)
    assert cli.main(line(folder, "labels")) == 130
    assert capsys.readouterr().err == "ntk-laplace: interrupted; no file was written\n" and not list(here.iterdir())


@pytest.mark.slow
def test_progress_on_a_terminal(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert cli.main(line(folder, "labels", inputs="plain")) == 0
    told = capsys.readouterr().err
    for words in ("fitting the posterior", "predicting each training point from all others", "predicting the inputs"):
        assert f"ntk-laplace: {words}\n" in told


@pytest.mark.slow
def test_commands_on_the_docs_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With real pictures, on other data of the same shapes; the page's own blocks are run with the docs."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[1] / "docs" / "predictions.md").read_text()
    (shell,) = re.findall(r"^```bash\n(ntk-laplace .*?)^```$", page, re.MULTILINE | re.DOTALL)
    (network,) = re.findall(r'Path\("model.py"\).write_text\("""\n(.*?)"""\)', page, re.DOTALL)
    Path("model.py").write_text(network)
    torch.save(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).state_dict(), "weights.pt")
    for name in ("data", "held_out", "new"):
        np.savez(f"{name}.npz", X=torch.rand(24, 4).numpy(), y=np.arange(24) % 3)
    commands = [shlex.split(one) for one in shell.replace("\\\n", "").splitlines()]
    assert [command[:2] for command in commands] == [["ntk-laplace", "predict"]] * 2
    for command in commands:
        assert cli.main(command[1:]) == 0
    columns = [re.findall(r"`([a-z_]+)`", row) for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)]
    named = {name for group in columns for name in group}
    found = pandas.read_csv("predictions.csv")
    assert {name for name in found if not name.startswith("probability_")} <= named
    assert {"probability_a", "probability_b", "probability_c"} <= set(pandas.read_csv("large.csv"))
    assert Path("large.html").stat().st_size > 10_000
