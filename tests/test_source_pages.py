"""Sources on the page of explanations and in the command."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from browser import CHROMIUM, Browser
from ntk_laplace.tools import cli
from ntk_laplace.tools.explorer import Naming, explore

SOURCES = [("anna", "ben", "eve")[i % 3] for i in range(30)]


@functools.cache
def case(kind: str):
    """A posterior, its training inputs, and inputs with targets to explain."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3 if kind == "classes" else 1)).double()
    x = torch.rand(42, 4).double()
    y = {"classes": torch.randint(3, (42,)), "binary": torch.randint(2, (42, 1)).double(),
         "values": torch.randn(42, 1).double()}[kind]
    likelihood = {"classes": ntkl.Categorical, "binary": ntkl.Bernoulli, "values": lambda: ntkl.Gaussian(0.3)}[kind]()
    posterior = ntkl.laplace(network, (x[:30], y[:30]), likelihood, ntkl.GaussianPrior(0.5))
    return posterior, x[:30], x[30:], y[30:]


@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
@pytest.mark.parametrize("kind", ["classes", "binary", "values"])
def test_the_page_has_the_effects_of_the_sources(kind: str) -> None:
    posterior, x, x_new, y_new = case(kind)
    found = posterior.source_effects(x_new, SOURCES, y=y_new)
    page = explore(posterior, x_new, x, y_new, k=2, sources=found)
    content, close = page.content, pytest.approx
    assert content["sources"]["names"] == ["anna", "ben", "eve"] and content["sources"]["points"] == [10, 10, 10]
    assert content["sources"]["without"] == close(found.own_log_prob_without.tolist(), rel=1e-3)
    for i, point in enumerate(content["points"]):
        own, sign = point["sources"], -1.0 if kind == "binary" and found.f[i, 0] < 0 else 1.0
        assert own["effect"] == close((sign * found.effect[i]).tolist(), rel=1e-3)
        assert own["single"] == close((sign * found.single[i]).tolist(), rel=1e-3)
        assert own["truth"] == close(found.log_prob_change[i].tolist(), rel=1e-3)
        after = found.outputs[i]
        if kind == "values":
            assert np.ravel(own["mean"]).tolist() == close(after.flatten().tolist(), rel=1e-3)
        else:
            p = after.softmax(1) if kind == "classes" else torch.cat([(-after).sigmoid(), after.sigmoid()], 1)
            assert own["p"] == close(p[:, point["output"]].tolist(), rel=1e-3) and own["best"] == p.argmax(1).tolist()
    assert 'id="by-source"' in page.html()
    plain = explore(posterior, x_new, x, y_new, k=2)
    assert "sources" not in plain.content and 'id="by-source"' not in plain.html()


@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
def test_effects_of_something_else_are_refused() -> None:
    posterior, x, x_new, _ = case("classes")
    for sources, words in (
        (SOURCES, "expected the sources as posterior.source_effects(x, labels); got a list"),
        (posterior.source_effects(x_new[:5], SOURCES), "outputs of the 12 inputs of the page; got effects on 'output'"),
        (posterior.source_effects(x_new, SOURCES, by="probability"), "got effects on 'probability' of 12"),
        (posterior.source_effects(x_new.flip(0), SOURCES), "those of other"),
    ):
        with pytest.raises(ntkl.DataError, match=re.escape(words)):
            explore(posterior, x_new, x, sources=sources)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
def test_a_person_reads_the_sources(tmp_path: Path) -> None:
    posterior, x, x_new, y_new = case("classes")
    found = posterior.source_effects(x_new, SOURCES, y=y_new)
    page = explore(posterior, x_new, x, y_new, naming=Naming(classes=["ant", "bee", "cat"]), sources=found)
    rows = "[...document.querySelectorAll('#source-rows th')].map((e) => e.innerText)"
    with Browser(page.write(tmp_path / "page.html"), tmp_path / "profile") as browser:
        for i in (0, 3):
            browser.click(f"#point-{i}")
            order = found.effect[i].abs().argsort(descending=True).tolist()
            assert browser.value(rows) == [found.names[s] for s in order]
            name = ["ant", "bee", "cat"][int(found.quantity.output[i])]
            assert f"the logit of {name} of input {i}" in browser.text("#source-caption")
        assert browser.errors == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two inputs, a price and an annotator, as a table and as arrays; a network and its weights."""
    monkeypatch.chdir(tmp_path)
    layers = "nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))"
    Path("model.py").write_text(f"from torch import nn\n\n\ndef make_network():\n    return {layers}\n")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.save(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).state_dict(), "w.pt")
    random = np.random.default_rng(0)
    x, price, who = random.normal(size=(30, 2)), random.normal(size=30), np.array(SOURCES)
    frame = pandas.DataFrame({"height": x[:, 0], "annotator": who, "width": x[:, 1], "price": price})
    frame.to_csv("train.csv", index=False)
    frame.head(4).drop(columns="annotator").to_csv("new.csv", index=False)
    frame.head(4).to_csv("also.csv", index=False)
    frame.assign(annotator=frame["annotator"].where(frame.index != 3)).to_csv("gap.csv", index=False)
    frame.assign(annotator=frame["annotator"] + np.where(frame.index == 3, " ", "")).to_csv("blank.csv", index=False)
    np.savez("train.npz", X=x, y=price, annotator=who)
    np.savez("new.npz", X=x[:4], y=price[:4])
    number = torch.arange(30) % 3
    torch.save({"X": torch.tensor(x), "y": torch.tensor(price), "annotator": number}, "train.pt")
    return tmp_path


def explained(data: str, inputs: str, *more: str) -> int:
    target = ["--target", "price"] if data.endswith(".csv") else []
    return cli.main(["explain", "model.py", "--checkpoint", "w.pt", "--likelihood", "gaussian", "--data", data,
                     "--inputs", inputs, "--out", "page.html", *target, *more])


def shown() -> dict:
    page = Path("page.html").read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
def test_the_command_takes_the_sources_from_a_column_or_an_array(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """The column is no input of the network, in the training data and in the inputs."""
    tables = {}
    for data, inputs in (("train.csv", "new.csv"), ("train.csv", "also.csv"), ("train.npz", "new.npz"),
                         ("train.pt", "new.npz")):
        assert explained(data, inputs, "--group", "annotator") == 0
        printed = capsys.readouterr().out
        assert "linearization='fixed'" in printed and "written to page.html" in printed
        assert f"the effect is the change of {'price' if data == 'train.csv' else 'target'}, mean over 4" in printed
        tables[data, inputs] = shown()
    first = tables["train.csv", "new.csv"]
    assert first["sources"]["names"] == ["anna", "ben", "eve"]
    assert first["rows"]["features"] == ["height", "width"]
    for other in tables.values():
        assert [point["sources"] for point in other["points"]] == [point["sources"] for point in first["points"]]
    assert explained("train.npz", "new.npz") == 0 and "sources" not in shown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
def test_effects_of_an_estimator_are_in_units_of_the_targets(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """So are the printed table, with the names of targets, and the page."""
    frame = pandas.read_csv("train.csv")
    told = []
    for factor in (1.0, 1000.0):
        frame.assign(price=factor * frame["price"], rent=frame["width"] ** 2).to_csv("two.csv", index=False)
        assert cli.main(["fit", "two.csv", "--target", "price", "--target", "rent", "--group", "annotator", "--hidden",
                         "3", "--epochs", "3", "--out", "fitted"]) == 0
        assert "the effect is the change of price, mean over 6 inputs" in capsys.readouterr().out
        for name in ("price", "rent"):
            assert cli.main(["explain", "fitted/model.joblib", "--inputs", "new.csv", "--out", "page.html",
                             "--output", name]) == 0
            printed = capsys.readouterr().out
            assert f"the effect is the change of {name}, mean over 4 inputs" in printed
            row = next(line for line in printed.splitlines() if line.split()[:1] == ["ben"]).split()
            told.append([float(row[2]), shown()["points"][0]["sources"]["effect"]])
    (price, page), (rent, page_of_rent), (price_of_1000, page_again), (rent_again, _) = told
    assert price_of_1000 == pytest.approx(1000 * price, rel=1e-2) and rent_again == pytest.approx(rent, rel=1e-2)
    assert np.allclose(np.multiply(page, 1000), page_again, rtol=2e-3)
    assert not np.allclose(page, page_of_rent, rtol=2e-3)


def test_a_wrong_group_is_one_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    Path("images").mkdir()
    for data, inputs, group, words in (
        ("train.csv", "new.csv", "who", "expected --group COLUMN, one of 'height', 'annotator', 'width' in train.csv"),
        ("train.csv", "new.csv", "price", "got --group price. Name the column of the sources, which is no target."),
        ("blank.csv", "new.csv", "annotator", "names that differ in more than blanks in column 'annotator' of"),
        ("gap.csv", "new.csv", "annotator", "expected a value in each row of column 'annotator' of gap.csv; got"),
        ("train.npz", "new.npz", "who", "expected arrays who in train.npz; got 'X', 'y', 'annotator', and no who"),
        ("train.npz", "new.npz", "X", "expected X to be an array of names or whole numbers, one per example"),
    ):
        assert explained(data, inputs, "--group", group) == 1
        error = capsys.readouterr().err
        assert error.startswith("ntk-laplace: ") and words in error and error.count("\n") == 1
    frame = pandas.read_csv("train.csv").drop(columns="annotator")
    frame.to_csv("train.csv", index=False)
    Path("model.py").write_text(Path("model.py").read_text().replace("nn.Linear(2, 3)", "nn.Linear(1, 3)"))
    torch.save(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).state_dict(), "w.pt")
    assert explained("train.csv", "new.csv", "--group", "width") == 1
    error = capsys.readouterr().err
    assert "expected sources of several rows in 'width' of train.csv; got another one in each of 30" in error
    assert cli.main(["fit", "images", "--group", "who"]) == 1
    assert "expected a table or arrays, for --group; got the folder images" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
@pytest.mark.parametrize("data", ["train.csv", "train.npz"])
def test_fit_shows_the_sources_of_its_training_rows(data: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    target = ["--target", "price"] if data.endswith(".csv") else []
    assert cli.main(["fit", data, *target, "--group", "annotator", "--epochs", "2", "--hidden", "3"]) == 0
    printed = capsys.readouterr().out
    assert "from 2 inputs" in printed and "Without each source" in printed
    page = Path("ntk-laplace-fit", "explanations.html").read_text()
    content = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    assert content["sources"]["names"] == ["anna", "ben", "eve"] and sum(content["sources"]["points"]) == 24
