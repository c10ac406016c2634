"""Formats of the command: every file with the same numbers gives the same evidence; what is wrong is one line."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ntk_laplace as ntkl
from ntk_laplace.tools import cli
from ntk_laplace.tools.cli.images import ImageNetwork, read_images
from ntk_laplace.tools.cli.tables import read_table
from ntk_laplace.tools.report import Page

pytestmark = pytest.mark.usefixtures("one_perceptron")
NETWORK = """
from torch import nn


def classes():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))


def pair():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def image():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))


def image_to_train():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())
"""
KINDS = np.array(["cat", "ant", "bee"])  # not sorted: their numbers are 2, 0, 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: networks, their weights, and 20 rows of two inputs with two prices and a name."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(NETWORK)
    made: dict[str, Any] = {}
    exec(NETWORK, made)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in ("classes", "pair", "image", "Tied"):
            torch.save(made[name]().state_dict(), f"{name}.pt")
    random, rows = np.random.default_rng(0), np.arange(20)
    x = random.normal(size=(20, 2)) / 3
    frame = pandas.DataFrame({"height": x[:, 0], "kind": KINDS[rows % 3], "width": x[:, 1]})
    frame.to_csv("kind.csv", index=False)
    prices = random.normal(size=(20, 2)) * 1e-5
    frame = frame.drop(columns="kind").assign(buy=prices[:, 0], sell=prices[:, 1])
    frame[["buy", "height", "sell", "width"]].to_csv("prices.csv", index=False)
    np.savez("kind.npz", X=x, y=np.array([2, 0, 1])[rows % 3])
    np.savez("prices.npz", X=x, y=prices)
    return tmp_path


def line(command: str, data: str, network: str = "classes", *more: str) -> list[str]:
    likelihood = "gaussian" if network == "pair" else "categorical"
    return [command, f"model.py:{network}", "--checkpoint", f"{network}.pt", "--data", data, "--likelihood", likelihood,
            *more]


def evidence(*arguments: str) -> float:
    assert cli.main([*line("evidence", *arguments), "--structures", "gp", "--json", "o.json"]) == 0
    return json.loads(Path("o.json").read_text())["rows"][0]["evidence"]


def refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("ntk-laplace: expected ") and words in printed.err, printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""


# --------------------------------------------------------------------------------------------------------------- Arrow


def write_stream(frame: pandas.DataFrame, path: str) -> None:
    import pyarrow

    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


ARROW = {
    "t.feather": lambda frame, path: frame.to_feather(path),
    "t.arrow": lambda frame, path: frame.to_feather(path, compression="uncompressed"),
    "stream.arrow": write_stream,
}


@pytest.mark.parametrize("name", list(ARROW))
def test_arrow_gives_the_evidence_of_the_npz_to_all_digits(name: str, folder: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = read_table(Path("kind.csv"), "the data")
    ARROW[name](frame, name)
    assert evidence(name, "classes", "--target", "kind") == evidence("kind.npz")


def test_what_is_wrong_with_an_arrow_file_is_one_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    frame = pandas.read_csv("kind.csv")
    frame.assign(height=frame["height"].where(frame.index != 4)).to_feather("gap.feather")
    frame.iloc[:0].to_feather("rows.feather")
    table = pyarrow.table([[1.0], [2.0], ["ant"]], names=["height", "height", "kind"])
    pyarrow.feather.write_feather(table, "twice.arrow")
    Path("text.arrow").write_text("no table")
    Path("empty.feather").write_bytes(b"")
    for name, words in {
        "gap.feather": "a value in each row of column 'height' of gap.feather; got none in row 4,",
        "rows.feather": "at least one row below the names of its columns; got rows.feather without rows.",
        "twice.arrow": "columns with different names; got 'height' twice in twice.arrow.",
        "text.arrow": "an Arrow table; got text.arrow (",
        "empty.feather": "a Feather table; got empty.feather (",
    }.items():
        refused(line("evidence", name, "classes", "--target", "kind"), words, capsys)


# ------------------------------------------------------------------------------------------------- tensors and weights


def test_saved_tensors_give_the_evidence_of_the_npz_to_all_digits(folder: Path) -> None:
    arrays = np.load("kind.npz")
    x, y = torch.as_tensor(arrays["X"]), torch.as_tensor(arrays["y"])
    expected = evidence("kind.npz")
    for found in ((x, y), [x, y], TensorDataset(x, y), {"X": x, "y": y}, {"more": x[:0], "X": x, "y": y.short()}):
        torch.save(found, "t.pt")
        assert evidence("t.pt") == expected
    torch.save({"input": x, "labels": y}, "t.pth")
    assert evidence("t.pth", "classes", "--targets", "labels") == expected
    torch.save((x.bfloat16(), y), "t.pt")
    np.savez("rounded.npz", X=x.bfloat16().double().numpy(), y=y)
    assert evidence("t.pt") == evidence("rounded.npz")


class Unknown:
    pass


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (torch.zeros(3), "tensors X and y in t.pt; got 'X', and no y. Save it with torch.save({'X': X, 'y': y}"),
        ({}, "expected tensors X and y in t.pt; got nothing, and no X and no y."),
        ((torch.zeros(3), 4.0), "a .pt file with tensors X and y; got t.pt ('y' in it is no tensor)."),
        ((torch.zeros(3),) * 3, "a .pt file with tensors X and y; got t.pt (it contains a tuple of 3)."),
        ("text", "got t.pt (it contains a str)."),
        (Unknown(), "alone, which loads without running code; got t.pt, which torch.load(weights_only=True) refuses."),
        ((torch.zeros(3, 2).to_sparse(), torch.zeros(3)), "('X' in it is no tensor)"),
        ((torch.zeros(3, 2, dtype=torch.complex64), torch.zeros(3)), "X to be an array of numbers"),
    ],
)
def test_what_is_wrong_with_saved_tensors_is_one_line(
    saved: Any, words: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.save(saved, "t.pt")
    refused(line("evidence", "t.pt"), words, capsys)


@pytest.mark.parametrize("name", ["w", "sample_weight"])
def test_weights_of_examples_are_not_left_out_silently(
    name: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    x, y = np.ones((12, 2)), np.arange(12) % 3
    np.savez("weighted.npz", **{"X": x, "y": y, name: np.ones(12)})
    torch.save({"X": torch.from_numpy(x), "y": torch.from_numpy(y), name: torch.ones(12, device="cpu")}, "weighted.pt")
    for file in ("weighted.npz", "weighted.pt"):
        for command in (line("evidence", file), ["fit", file, "--out", "out"]):
            refused(command, f"expected X and y in {file}, whose examples count once each; got {name} too.", capsys)


def test_damaged_tensors_are_one_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    for content in (b"", b"no tensors"):
        Path("t.pt").write_bytes(content)
        refused(line("evidence", "t.pt"), "got t.pt, which ", capsys)


def test_weights_in_safetensors(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """The evidence of the .pt file; tied weights may be there once, under either name."""
    files = pytest.importorskip("safetensors.torch")
    files.save_file(torch.load("classes.pt"), "classes.safetensors")
    command = line("evidence", "kind.npz", "classes", "--structures", "gp", "--json", "o.json")
    values = []
    for checkpoint in ("classes.pt", "classes.safetensors"):
        command[3] = checkpoint
        assert cli.main(command) == 0
        values.append(json.loads(Path("o.json").read_text())["rows"][0]["evidence"])
    assert values[0] == values[1]
    state = torch.load("Tied.pt")
    x = np.load("kind.npz")["X"]
    np.savez("two.npz", X=x, y=np.arange(20) % 2)
    expected = evidence("two.npz", "Tied")
    for dropped in ("first.weight", "second.weight"):
        files.save_file({name: value for name, value in state.items() if name != dropped}, "tied.safetensors")
        command = line("evidence", "two.npz", "Tied", "--structures", "gp", "--json", "o.json")
        command[3] = "tied.safetensors"
        assert cli.main(command) == 0
        assert json.loads(Path("o.json").read_text())["rows"][0]["evidence"] == expected
    Path("tied.safetensors").write_bytes(b"no tensors")
    refused(command, "a checkpoint that torch.load or safetensors can read; got tied.safetensors, which", capsys)


# -------------------------------------------------------------------------------------------- posteriors in safetensors


def small_posterior(structure: str) -> tuple[ntkl.Posterior, nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))
    prior = ntkl.GaussianPrior(1.5, groups="layer")
    return ntkl.laplace(network, (x, torch.arange(12) % 3), ntkl.Categorical(), prior, structure), network, x


@pytest.mark.filterwarnings("ignore::ntk_laplace.NTKLaplaceWarning")
@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "inf", "diag"])
def test_a_posterior_in_safetensors_is_that_of_torch(structure: str, tmp_path: Path) -> None:
    """And the file is one of the format: tensors by name, which safetensors reads alone, and text."""
    files = pytest.importorskip("safetensors.torch")
    posterior, network, x = small_posterior(structure)
    names = [str(tmp_path / name) for name in ("p.pt", "p.safetensors")]
    for name in names:
        posterior.save(name, include_data=True)
    plain, other = (ntkl.load(name, network) for name in names)
    assert float(plain.log_marginal_likelihood()) == float(other.log_marginal_likelihood())
    for one, two in zip(plain.latent_moments(x), other.latent_moments(x), strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-14)  # the memory layout may differ
    if structure == "gp":  # which has the data
        assert torch.allclose(plain.remove([3]).outputs(x), other.remove([3]).outputs(x), rtol=1e-12)
    tensors = files.load_file(names[1])
    assert tensors and sum(value.numel() for value in tensors.values()) > 12
    assert [path.name for path in tmp_path.iterdir() if "block" in path.name] == []


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    """Types that JSON does not have, keys that are no text, names that collide, views, and nothing at all."""
    pytest.importorskip("safetensors")
    from ntk_laplace.runtime.serialization.safetensors_file import read_record, write_record

    one = torch.arange(6.0).reshape(2, 3)
    record = {
        "views": [one, one.T, one[:, :1].expand(2, 4), one[0, 0]], "a": {"b": one + 1}, "a.b": one + 2, 3: {None: ()},
        "kinds": (torch.float32, torch.Size((2, 3)), None, True, 2**60, 1e-300, float("inf"), float("nan"), "ü"),
        "empty": [torch.zeros(0, 2), {}, [], ""], "half": one.bfloat16(), "bits": one > 2, (1, "x"): torch.uint8,
    }
    write_record(record, tmp_path / "r.safetensors")
    found = read_record(tmp_path / "r.safetensors", torch.device("cpu"))
    assert same(found, record)


def same(one: Any, two: Any) -> bool:
    if isinstance(two, Tensor):
        return isinstance(one, Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(two, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in two)
    if isinstance(two, (list, tuple)):
        kind = tuple if isinstance(two, tuple) else list
        return isinstance(one, kind) and len(one) == len(two) and all(map(same, one, two))
    return one == two or (one != one and two != two)


def test_what_is_wrong_with_safetensors_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pytest.importorskip("safetensors.torch")
    posterior, network, _ = small_posterior("diag")
    path = tmp_path / "p.safetensors"
    with pytest.raises(ntkl.DataError, match="no such file"):
        ntkl.load(path, network)
    files.save_file(network.state_dict(), path)
    with pytest.raises(ntkl.DataError, match=r"a record of ntk_laplace in the metadata of the file; got .* without"):
        ntkl.load(path, network)
    path.write_bytes(b"no tensors")
    with pytest.raises(ntkl.DataError, match="what cannot be read as one"):
        ntkl.load(path, network)
    posterior.save(path)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: posterior.save(path), lambda: ntkl.load(path, network)):
        with pytest.raises(ntkl.DataError, match=r"the package safetensors.* Install it, pip install safetensors, or"):
            call()


# ------------------------------------------------------------------------------------------------------ several targets


def test_several_targets_are_those_of_the_npz(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they are named; predictions and pages have their names."""
    both = ["--target", "sell", "--target", "buy"]
    arrays = np.load("prices.npz")
    np.savez("turned.npz", X=arrays["X"], y=arrays["y"][:, ::-1])
    assert evidence("prices.csv", "pair", *both) == evidence("turned.npz", "pair") != evidence("prices.npz", "pair")
    inputs = [*line("explain", "prices.csv", "pair"), "--inputs", "prices.csv", "--out", "page.html"]
    assert cli.main([*inputs, *both]) == 0
    page = content("page.html")
    assert page["names"] == ["sell", "buy"] and page["rows"]["features"] == ["height", "width"]


def content(path: str) -> dict[str, Any]:
    """What an explorer page has."""
    return json.loads(Path(path).read_text().partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["buy", "sold"], "expected --target COLUMN, one of 'buy', 'height', 'sell' and 1 more in prices.csv; got "
         "--target sold."),
        (["buy", "buy"], "expected different columns of targets; got --target buy --target buy. Name each once."),
        (["buy", "sell", "height", "width"], "columns of inputs beside the target; got 'buy', 'sell', 'height' and 1"),
    ],
)
def test_targets_that_are_wrong_are_one_line(
    targets: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    named = [word for target in targets for word in ("--target", target)]
    refused([*line("evidence", "prices.csv", "pair"), *named], words, capsys)


# --------------------------------------------------------------------------------------------------------------- images


def write_images(place: str, count: int = 6, mode: str = "L", size: tuple[int, int] = (3, 4)) -> np.ndarray:
    """Folders "dark" and "light" of images of this size (width, height), and the pixels in the order of the paths."""
    random, found = np.random.default_rng(1), []
    for kind, low in (("dark", 0), ("light", 128)):
        (Path(place) / kind).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
            pixels = random.integers(low, low + 128, size=shape, dtype=np.uint8)
            Image.fromarray(pixels, mode).save(Path(place) / kind / f"{index:02}.png")
            found.append(pixels)
    return np.stack(found)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_a_folder_of_images_is_the_npz_of_its_pixels(folder: Path, capsys: pytest.CaptureFixture) -> None:
    pixels = write_images("train")
    x, y = pixels[:, None] / 255.0, np.arange(12) // 6
    np.savez("train.npz", X=x, y=y)
    assert evidence("train", "image") == evidence("train.npz", "image")
    Path("train/.DS_Store").write_text("hidden")
    Path("new").mkdir()
    for name in ("b", "a"):
        Path(f"train/light/0{3 + (name == 'b')}.png").rename(f"new/{name}.png")
    inputs = ["--inputs", "new", "--out", "page.html", "--structure", "gp"]
    assert cli.main([*line("explain", "train", "image"), *inputs]) == 0
    page = content("page.html")
    assert page["names"] == ["dark", "light"] and page["pictures"]["points"]["height"] == 4
    assert "target" not in page["points"][0] and page["examples"] == 10
    assert page["inputNames"] == ["a.png", "b.png"] and page["trainingNames"][::9] == ["dark/00.png", "light/05.png"]
    assert cli.main([*line("explain", "train", "image"), "--inputs", "train", "--out", "page.html"]) == 0
    assert [point["target"] for point in content("page.html")["points"]] == [0] * 6 + [1] * 4


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_color_and_gray_images(folder: Path) -> None:
    pixels = write_images("color", mode="RGB")
    found = read_images(Path("color"))
    np.testing.assert_array_equal(found.x, np.moveaxis(pixels, 3, 1) / 255.0)
    assert found.files[0] == str(Path("dark") / "00.png") and found.classes == ["dark", "light"]
    gray = write_images("color", count=1)  # one gray image in each folder
    mixed = read_images(Path("color"))
    np.testing.assert_array_equal(mixed.x[0], np.stack([gray[0]] * 3) / 255.0)
    np.testing.assert_array_equal(mixed.x[1], found.x[1])
    write_images("gray")
    assert read_images(Path("gray"), mixed.x.shape[1:]).x.shape == (12, 3, 4, 3)
    with pytest.raises(ntkl.DataError, match="gray images, as in the training data; got the color image"):
        read_images(Path("color"), read_images(Path("gray")).x.shape[1:])


def _add(name: str, content: bytes | tuple[str, tuple[int, int]] | None) -> None:
    path = Path("bad") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        Image.new(*content).save(path)


BAD = {
    "a size": ("light/z.png", ("L", (4, 3)), "images of one size, 3 x 4 pixels as in bad/dark/00.png; got 4 x 3 in "
               "bad/light/z.png. Resize them, or cut them out."),
    "no image": ("light/z.txt", b"text", "images alone in the folder; got bad/light/z.txt, which is none. Remove it."),
    "an empty file": ("light/z.png", b"", "images alone in the folder; got bad/light/z.png, which is none."),
    "half of one": ("light/z.png", None, "an image that Pillow can read; got bad/light/z.png ("),
    "a file beside": ("labels.txt", b"text", "folders of images alone; got bad/labels.txt beside them. Move the file"),
    "16 bits": ("light/z.png", ("I;16", (3, 4)), "images with 8 bits per channel; got mode I;16 in bad/light/z.png."),
    "nested folders": ("train/dark/z.png", ("L", (3, 4)), "images alone in the folder of each class; got the folder "
                       "bad/train/dark. If the folders of the classes are in bad/train, pass that folder."),
    "a name of other bytes": ("light/\udcff.png", ("L", (3, 4)), "names of images in UTF-8 in bad; got "
                              "'light/\\udcff.png'. Rename it."),
    "no images": ("gone/.hidden", b"", "images in the folder of each class; got none in bad/gone. Add images, or"),
}


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", list(BAD))
def test_what_is_wrong_with_images_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    file, made, words = BAD[name]
    write_images("bad")
    whole = Path("bad/dark/01.png").read_bytes()
    _add(file, whole[:50] if made is None else made)
    refused(line("evidence", "bad", "image"), words, capsys)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_folders_that_do_not_fit_are_one_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    write_images("train")
    write_images("large", size=(5, 4))
    write_images("other")
    Path("other/light").rename("other/bright")
    Path("flat").mkdir()
    refused(line("evidence", "flat", "image"), "one folder of images for each class; got flat without folders.", capsys)
    wrong = line("evidence", "train", "image")
    wrong[wrong.index("categorical")] = "gaussian"
    refused(wrong, "a likelihood of classes, for a folder of images; got Gaussian.", capsys)
    for inputs, words in {
        "flat": "a folder with images; got flat without one.",
        "large": "images of one size, 3 x 4 pixels as in the training data; got 5 x 4 in large/dark/00.png.",
    }.items():
        refused([*line("explain", "train", "image"), "--inputs", inputs], words, capsys)
    refused([*line("predict", "train", "image"), "--inputs", "train", "--held-out", "other"],
            "classes of the training data ('dark', 'light') in other; got 'bright'.", capsys)
    assert cli.main([*line("explain", "train", "image"), "--inputs", "other", "--out", "page.html"]) == 0
    points = json.loads(Path("page.html").read_text().partition('id="data">')[2].partition("</script>")[0])["points"]
    assert [point.get("target") for point in points] == [None] * (len(points) // 2) + [0] * (len(points) // 2)
    refused([*line("explain", "kind.npz"), "--inputs", "train"], "columns or arrays of the training data; got the "
            "folder train. A folder of images needs one as --data too.", capsys)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_predictions_of_images_name_their_own_files(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the held-out images, which are read after them."""
    monkeypatch.setattr("ntk_laplace.tools.cli.predict.build", lambda *_: Page("without pictures"))
    write_images("train")
    write_images("new", count=2)
    Path("new/light").rename("new/other")
    options = ["--inputs", "new", "--held-out", "train", "--out", "p.csv"]
    assert cli.main([*line("predict", "train", "image"), *options]) == 0
    files = [str(Path(kind) / f"0{index}.png") for kind in ("dark", "other") for index in range(2)]
    assert pandas.read_csv("p.csv")["file"].tolist() == files
    assert "Scores of 2 of 4 inputs; 2 are no class of the training data, such as 'other'" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------------ fit


@pytest.mark.parametrize("out", ["train", "train/results"])
def test_results_do_not_go_among_the_images(out: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    write_images("train")
    before = sorted(Path("train").rglob("*"))
    assert cli.main(["fit", "train", "--out", out]) == 1
    assert f"a folder outside of the data for the results; got --out {out}. Name another" in capsys.readouterr().err
    assert sorted(Path("train").rglob("*")) == before


QUICK = ["--epochs", "2", "--out", "out"]


def fitted(*arguments: str, capsys: pytest.CaptureFixture) -> tuple[pandas.DataFrame, str, dict[str, Any]]:
    """The predictions, what was printed, and what is on the page."""
    own = [] if "--network" in arguments else ["--hidden", "2"]
    assert cli.main(["fit", *arguments, *own, *QUICK]) == 0
    return pandas.read_csv("out/predictions.csv"), capsys.readouterr().out, content("out/explanations.html")


@pytest.mark.slow
def test_fit_of_several_targets(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Intervals of the level in the table and in print; the page shows features in their own units."""
    found, out, page = fitted("prices.csv", "--target", "sell", "--target", "buy", "--level", "0.5", capsys=capsys)
    frame = pandas.read_csv("prices.csv")
    model = joblib.load("out/model.joblib")
    x = frame.loc[found["row"], ["height", "width"]]
    mean, sd = model.predict(x, return_std=True)
    for index, name in enumerate(("sell", "buy")):
        np.testing.assert_allclose(found[f"target_{name}"], frame.loc[found["row"], name])
        np.testing.assert_allclose(found[f"mean_{name}"], mean[:, index])
        np.testing.assert_allclose(found[f"upper_{name}"] - mean[:, index], 0.6744897501960817 * sd[:, index])
        inside = found[f"target_{name}"].between(found[f"lower_{name}"], found[f"upper_{name}"]).mean()
        (row,) = re.findall(rf"^posterior, {name} +(.*)$", out, re.MULTILINE)
        assert float(row.split()[-1]) == pytest.approx(inside, abs=1e-4)
    assert "with intervals of 50%" in out
    assert re.search(rf"^ +{found['row'][0]} +{found['mean_sell'][0]:.4g} ", out, re.MULTILINE)
    assert page["names"] == ["sell", "buy"] and page["targetName"] == "sell, buy"
    np.testing.assert_allclose(page["rows"]["points"], x, rtol=1e-3)
    rest = frame.drop(index=found["row"]).reset_index(drop=True)
    for index, row in page["rows"]["training"].items():
        np.testing.assert_allclose(row, rest.loc[int(index), ["height", "width"]].astype(float), rtol=1e-3)


@pytest.mark.slow
def test_fit_of_arrays_is_that_of_the_table(folder: Path, capsys: pytest.CaptureFixture) -> None:
    arrays = np.load("kind.npz")
    frame = read_table(Path("kind.csv"), "the data")
    torch.save((torch.as_tensor(arrays["X"]), torch.as_tensor(arrays["y"])), "kind.pt")
    table, out, page = fitted("kind.csv", "--target", "kind", capsys=capsys)
    assert "with sets of labels of 90%" in out and page["names"] == ["ant", "bee", "cat"]
    assert set(table["set"].iloc[0].strip("{}").split(", ")) <= {"ant", "bee", "cat"}
    for name in ("kind.npz", "kind.pt"):
        found, out, _ = fitted(name, capsys=capsys)
        assert out.startswith("y is taken as 3 classes (--task says otherwise), from 2 inputs: 16 rows to train,")
        assert list(found["target"]) == list(frame.loc[found["row"], "kind"].map({"ant": 0, "bee": 1, "cat": 2}))
        for number, kind in enumerate(("ant", "bee", "cat")):
            np.testing.assert_allclose(found[f"probability_{number}"], table[f"probability_{kind}"], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("network", [None, "model.py:image_to_train"])
def test_fit_of_images(network: str | None, folder: Path, capsys: pytest.CaptureFixture) -> None:
    pixels = write_images("train", count=10)
    own = [] if network is None else ["--network", network]
    found, out, page = fitted("train", *own, capsys=capsys)
    assert out.startswith("folder is taken as 2 classes (--task says otherwise), from inputs of shape (1, 4, 3)")
    assert [Path(name).parts[0] for name in found["file"]] == list(found["target"])
    model = joblib.load("out/model.joblib")
    if network is None:
        convolutions = [layer for layer in model.network_ if isinstance(layer, nn.Conv2d)]
        assert [layer.out_channels for layer in convolutions] == [2]
    rows = [10 * (kind == "light") + int(name[:2]) for kind, name in (Path(file).parts for file in found["file"])]
    p = model.predict_proba(pixels[rows].reshape(len(rows), -1) / 255.0)
    np.testing.assert_allclose(found[["probability_dark", "probability_light"]], p, rtol=1e-9)
    assert page["pictures"]["points"]["height"] == 4 and page["rows"] is None


def test_the_default_network_takes_images_of_any_size() -> None:
    for shape in ((1, 1, 1), (3, 5, 2), (1, 28, 28), (3, 100, 40)):
        for widths in ((2,), (2, 3), (1, 1, 1, 1)):
            network = ImageNetwork(shape, widths)(int(np.prod(shape)), 4)
            assert network(torch.zeros(2, int(np.prod(shape)), dtype=torch.float64)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "arrays", "more", "words"),
    [
        ("t.npz", {"X": np.zeros((12, 2, 3)), "y": np.arange(12.0)}, [], "X of shape (N, features), or (N, channels, "
         "height, width) of images; got shape (N, 2, 3). Pass --network FILE.py."),
        ("t.npz", {"X": np.zeros((12, 2)), "y": np.zeros(11)}, [], "as many rows of X as of y, at least one; got 12 "
         "and 11 in t.npz."),
        ("t.npz", {"X": np.full((12, 2), np.nan), "y": np.zeros(12)}, [], "finite numbers in X of t.npz; got none in "
         "row 0"),
        ("t.npz", {"X": np.zeros((12, 2)), "y": np.zeros((12, 2, 2))}, [], "y of shape (N,), or (N, targets) of real "
         "numbers; got shape (12, 2, 2)"),
        ("prices.csv", None, ["--target", "buy", "--target", "sell", "--task", "classes"], "one target that is a "
         "class; got --target buy --target sell."),
        ("flat", None, [], "one folder of images for each class; got flat without folders."),
        ("flat", None, ["--task", "regression"], "a table or arrays, for regression; got the folder flat."),
        ("nowhere.pt", None, [], "a .pt file of the data; got nowhere.pt, where there is no file."),
    ],
)
def test_what_cannot_be_fitted_is_one_line(
    name: str, arrays: dict[str, np.ndarray] | None, more: list[str], words: str, folder: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    Path("flat").mkdir()
    if arrays is not None:
        np.savez(name, **arrays)
    refused(["fit", name, *more, *QUICK], words, capsys)


def test_numbers_of_64_bits_without_sign_are_refused_where_they_overflow(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    x, large = np.arange(60.0).reshape(30, 2), np.arange(30, dtype="u8") + np.uint64(2**63)
    np.savez("large.npz", X=x, y=large)
    refused(["fit", "large.npz", *QUICK], "whole numbers below 2^63 in y; got 9223372036854775837", capsys)
    pandas.DataFrame({"a": x[:, 0], "y": [1e19, 2e19, 3.0] * 10}).to_csv("large.csv", index=False)
    refused(["fit", "large.csv", "--target", "y", "--task", "classes", *QUICK], "whole numbers below 2^63", capsys)
    np.savez("none.npz", X=np.zeros((30, 0)), y=np.arange(30.0))
    refused(["fit", "none.npz", *QUICK], "columns of inputs", capsys)
    np.savez("plain.npz", X=x, y=np.arange(30.0))
    refused(["fit", "plain.npz", "--network", "model.py:classes", "--hidden", "7", *QUICK],
            "--hidden without --network", capsys)
