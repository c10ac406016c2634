"""The command: help, version, good messages, exit codes."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.tools import cli, demo
from ntk_laplace.tools.cli import arrays, inputs
from ntk_laplace.tools.cli.python_files import load_network
from ntk_laplace.tools.comparison import compare


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], []])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    if arguments:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0
    else:
        assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert ("--out" in out and "--seed" in out) if "demo" in arguments else "demo" in out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """As a module; `test_a_wheel_of_the_sdist_works_alone` starts the command in a process of its own."""
    monkeypatch.setattr(sys, "argv", ["ntk-laplace", "--version"])
    monkeypatch.delitem(sys.modules, "ntk_laplace.__main__", raising=False)  # of a test that imports all modules
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("ntk_laplace", run_name="__main__")
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"ntk-laplace {ntkl.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demon"], "invalid choice: 'demon'"),
        (["demo", "--seed", "-1"], "expected a whole number from 0 to 2147483647; got '-1'"),
        (["demo", "--seed", "1.5"], "got '1.5'"),
        (["demo", "--seed", "99999999999"], "got '99999999999'"),
        (["demo", "--out", __file__], "expected a directory; got the file"),
        (["demo", "--what"], "unrecognized arguments: --what"),
    ],
)
def test_wrong_usage_leaves_with_two(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cause", "code", "words"),
    [
        (
            PermissionError(13, "Permission denied"),
            1,
            "cannot write to there: Permission denied. Choose another --out.",
        ),
        (ntkl.DataError("data", "none", "Pass some."), 1, "expected data; got none. Pass some."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_are_one_line(
    cause: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr(demo, "run_demo", fail)
    assert cli.main(["demo", "--out", "there"]) == code
    error = capsys.readouterr().err
    assert error.startswith("ntk-laplace: ") and words in error and error.count("\n") == 1


def test_unwritable_directory_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("ntk_laplace.tools.demo.run.study", lambda *_: pytest.fail("work began"))
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert f"cannot write to {tmp_path}: Permission denied" in capsys.readouterr().err


def test_directory_below_a_file_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["demo", "--out", f"{__file__}/below"]) == 1
    assert "cannot write to" in capsys.readouterr().err


def test_options_reach_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(demo, "run_demo", lambda out, seed, small: seen.append((out, seed, small)))
    assert cli.main(["demo", "--out", str(tmp_path / "x"), "--seed", "7"]) == 0
    assert cli.main(["demo"]) == 0
    assert seen == [(tmp_path / "x", 7, False), (Path("ntk-laplace-demo"), 0, False)]


# --- evidence: the user's own network and data

NETWORK = '''
import torch
from torch import nn

from neighbour import WIDTH

number = 3


class Named(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, WIDTH), nn.Tanh(), nn.Dropout(), nn.Linear(WIDTH, 3))


def make_network():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Dropout(), nn.Linear(WIDTH, 3))


def wants(width):
    return nn.Linear(width, 3)


def returns_weights():
    return {"weight": 1}


def single():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


built = make_network()
'''


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a network, its checkpoint, and its data, which is the working directory too."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(NETWORK)
    Path("neighbour.py").write_text("WIDTH = 6\n")
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 3))
    torch.save(network.state_dict(), "w.pt")
    single = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    torch.save(single.state_dict(), "single.pt")
    x = torch.randn(20, 4).numpy()
    np.savez("d.npz", X=x, y=np.arange(20) % 3)
    np.savez("real.npz", X=x, y=x[:, :1])
    np.savez("counts.npz", X=x, y=np.arange(20) % 5)
    np.savez("two.npz", X=x, y=np.arange(20) % 2)
    yield tmp_path
    sys.modules.pop("neighbour", None)


def evidence(*more: str, network: str = "model.py", checkpoint: str = "w.pt", data: str = "d.npz") -> list[str]:
    return ["evidence", network, "--checkpoint", checkpoint, "--data", data, "--structures", "gp,full",
            *(more if "--likelihood" in more else ("--likelihood", "categorical", *more))]


def own_value(checkpoint: str, data: str, likelihood: ntkl.Likelihood, **options: object) -> float:
    """The evidence without the command."""
    state = torch.load(checkpoint)
    width, outputs = 6, len(list(state.values())[-1])
    network = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    network.load_state_dict(dict(zip(network.state_dict(), state.values(), strict=True)))
    arrays = np.load(data)
    x, y = torch.as_tensor(arrays["X"]).double(), torch.as_tensor(arrays["y"])
    correction = options.pop("correction", False)
    return ntkl.laplace(network, (x, y), likelihood, **options).log_marginal_likelihood(correction).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "checkpoint", "data", "likelihood", "options"),
    [
        ([], "w.pt", "d.npz", ntkl.Categorical(), {}),
        (["--precision", "2.5", "--groups", "layer", "--correction"], "w.pt", "d.npz", ntkl.Categorical(),
         {"prior": ntkl.GaussianPrior(2.5), "correction": True}),
        (["--curvature", "ef"], "w.pt", "d.npz", ntkl.Categorical(), {"curvature": "ef"}),
        (["--likelihood", "gaussian", "--noise", "0.3"], "single.pt", "real.npz", ntkl.Gaussian(noise=0.3), {}),
        (["--likelihood", "gaussian"], "single.pt", "real.npz", ntkl.Gaussian(noise=1.0), {}),
        (["--likelihood", "poisson"], "single.pt", "counts.npz", ntkl.Poisson(), {}),
        (["--likelihood", "bernoulli"], "single.pt", "two.npz", ntkl.Bernoulli(), {}),
    ],
)
def test_evidence_of_ones_own_network(
    arguments: list[str], checkpoint: str, data: str, likelihood: ntkl.Likelihood, options: dict,
    brought: Path, capsys: pytest.CaptureFixture,
) -> None:
    network = "model.py:single" if checkpoint == "single.pt" else "model.py"
    line = evidence(*arguments, network=network, checkpoint=checkpoint, data=data)
    assert cli.main([*line, "--json", "o.json"]) == 0
    found = json.loads(Path("o.json").read_text())
    expected = own_value(checkpoint, data, likelihood, **options)
    assert [row["structure"] for row in found["rows"]] == ["gp", "full"]
    assert [row["evidence"] for row in found["rows"]] == pytest.approx([expected] * 2, rel=1e-9)
    printed = capsys.readouterr()
    assert f"{expected:.3f}" in printed.out and printed.err == ""


def test_evidence_with_table_and_picture(brought: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(evidence("--plot", "o.png", "--memory", "0.00001")) == 0
    out = capsys.readouterr().out
    assert out.startswith("Log marginal likelihood, in nats\nN = 20, C = 3, P = 51; Categorical")
    assert "gp: refused: expected B of 40 x 40" in out and "\nfull       refused  " not in out
    assert (brought / "o.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "model.py"
    for width in (2, 3):
        file.write_text(f"from torch import nn\n\n\ndef make_network(width: int = {width}):\n"
                        "    assert make_network.__annotations__ == {'width': int}  # none postponed\n"
                        "    return nn.Linear(width, 1)\n")
        os.utime(file, (1e9, 1e9))
        assert load_network(file, "make_network").in_features == width
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_single_precision_is_single(brought: Path) -> None:
    values = []
    for more in ([], ["--float32"]):
        assert cli.main([*evidence(*more), "--json", "o.json"]) == 0
        values.append(json.loads(Path("o.json").read_text())["rows"][0]["evidence"])
    double, single = values
    assert single != double and single == pytest.approx(double, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["state_dict", "model", "module", "compiled", "lightning", "nested", "class",
                                     "instance"])
def test_checkpoints_as_people_save_them(wrapped: str, brought: Path, capsys: pytest.CaptureFixture) -> None:
    state = torch.load("w.pt")
    saved = {
        "state_dict": {"state_dict": state, "epoch": 3},
        "model": {"model": state, "optimizer": {"lr": 0.1}},
        "module": {f"module.{name}": value for name, value in state.items()},
        "compiled": {f"_orig_mod.{name}": value for name, value in state.items()},
        "lightning": {"state_dict": {f"net.{name}": value for name, value in state.items()}, "epoch": 3},
        "nested": {f"model.net.{name}": value for name, value in state.items()},
    }
    torch.save(saved.get(wrapped, state), "other.pt")
    network = {"class": "model.py:Named", "instance": "model.py:built"}.get(wrapped, "model.py")
    assert cli.main(evidence(checkpoint="other.pt", network=network)) == 0
    assert f"{own_value('w.pt', 'd.npz', ntkl.Categorical()):.3f}" in capsys.readouterr().out


BAD_FILES = {
    "text.py": "WIDTH = (\n",
    "fails.py": "x = 1\nimport torch_geometric_of_nobody\n",
    "script.py": "import sys\n\nsys.exit('usage: script.py DATA')\n",
    "empty.py": "",
    "late.py": "def make_network():\n    return 1 / 0\n",
    "text.pt": "no checkpoint",
    "text.npz": "no arrays",
    "train.xlsx": "no sheet",
    "train.h5": "HDF",
}


@pytest.fixture
def bad_files(brought: Path) -> Path:
    for name, text in BAD_FILES.items():
        Path(name).write_text(text)
    Path("model.txt").write_text(NETWORK)
    Path("folder.py").mkdir()
    state = torch.load("w.pt")
    first, *others = state
    torch.save({name: state[name] for name in others}, "less.pt")
    torch.save({**state, "extra.weight": state[first]}, "more.pt")
    torch.save({**state, first: torch.zeros(7, 4)}, "shape.pt")
    torch.save([1.0], "list.pt")
    torch.save({}, "none.pt")
    torch.save({"epoch": 3, "lr": 0.1}, "no_weights.pt")
    torch.save(nn.Linear(4, 3), "module.pt")
    x, y = np.zeros((20, 4)), np.arange(20) % 3
    np.savez("no_y.npz", X=x, labels=y)
    np.savez("nothing.npz")
    np.savez("words.npz", X=x, y=np.array(["a"] * 20))
    np.savez("objects.npz", X=x, y=np.array([None] * 20))
    np.savez("short.npz", X=x[:19], y=y)
    np.savez("wide.npz", X=np.zeros((20, 5)), y=y)
    np.savez("whole.npz", X=np.zeros((20, 4), dtype=int), y=y)
    np.savez("four.npz", X=x, y=y + 1)
    np.savez("gaps.npz", X=np.where(np.arange(20)[:, None] == 7, np.nan, x), y=y)
    np.savez("no_rows.npz", X=x[:0], y=y[:0])
    for name in ("array.npz", "X.npy"):
        with open(name, "wb") as file:
            np.save(file, x)
    return brought


@pytest.mark.parametrize(
    "name", ["t.tsv", "t.txt", "T.TSV", "t.tsv.gz", "t.txt.zip", "t.json", "t.jsonl", "t.ndjson.gz"]
)
def test_the_error_for_another_table_shows_the_line_that_converts_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is run as it is printed: a line of Python; the file that it writes holds the table."""
    monkeypatch.chdir(tmp_path)
    table = pandas.DataFrame({"height": [1, 2, 3], "weight": [0.5, 1.5, -2.5], "kind": [0, 1, 2]})
    if "json" in name:
        table.to_json(name, orient="records", lines=name != "t.json")
    else:
        table.to_csv(name, index=False, sep=";" if ".txt" in name else "\t")
    with pytest.raises(ntkl.DataError) as refused:
        arrays.load_data(Path(name), torch.float64)
    message = str(refused.value)
    assert message.startswith(f"expected an .npz file with arrays X and y of numbers; got {name}. A table can be .csv")
    assert "pickle" not in message
    exec(message[message.index("pandas.") : -1], {"pandas": pandas})
    data = inputs.Files(torch.float64, ntkl.Categorical(), columns=["kind"]).training(Path(name[0] + ".csv"))
    assert torch.equal(data.x, torch.as_tensor(table.iloc[:, :2].to_numpy())) and data.y.tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # the network's file
        ({"network": "nowhere.py"}, "expected a Python file with a function that returns the network; got nowhere.py, "
         "where there is no file. Check the path."),
        ({"network": "folder.py"}, "got the directory folder.py"),
        ({"network": "model.txt:make_network"}, "expected a Python file, whose name ends with .py; got model.txt"),
        ({"network": "text.py"}, "SyntaxError: '(' was never closed (text.py, line 1) in line 1 of text.py"),
        ({"network": "fails.py"}, "No module named 'torch_geometric_of_nobody' in line 2 of fails.py"),
        ({"network": "script.py"}, "SystemExit: usage: script.py DATA in line 3 of script.py. Training and"),
        ({"network": "empty.py"}, "expected a function 'make_network' in empty.py; got a file without functions"),
        ({"network": "model.py:make_net"}, "got a file with 'Named', 'make_network', 'wants' and 2 more. "
         "Name the function: model.py:Named"),
        ({"network": "model.py:number"}, "expected 'number' in model.py to be a function; got an int"),
        ({"network": "model.py:wants"}, "expected wants() to run without arguments; got TypeError: wants() missing 1"),
        ({"network": "model.py:returns_weights"}, "to return a torch.nn.Module; got a dict"),
        ({"network": "late.py"}, "ZeroDivisionError: division by zero in line 2 of late.py"),
        # the checkpoint
        ({"checkpoint": "nowhere.pt"}, "expected a checkpoint; got nowhere.pt, where there is no file"),
        ({"checkpoint": "text.pt"}, "expected a checkpoint"),
        ({"checkpoint": "d.npz"}, "expected a checkpoint"),
        ({"checkpoint": "module.pt"}, "expected a checkpoint of tensors alone, which loads without running code; got "
         "module.pt, which torch.load(weights_only=True) refuses. Save it with torch.save(network.state_dict(), path)"),
        ({"checkpoint": "list.pt"}, "expected a state dict: names and tensors; got a list in list.pt"),
        ({"checkpoint": "none.pt"}, "got an empty dict in none.pt"),
        ({"checkpoint": "no_weights.pt"}, "got 'epoch', 'lr' in no_weights.pt, which are no tensors"),
        ({"checkpoint": "less.pt"}, "checkpoint with the network's 4 tensors; got less.pt with '0.weight' missing"),
        ({"checkpoint": "more.pt"}, "got more.pt with 'extra.weight' that it does not know"),
        ({"checkpoint": "single.pt"}, "got single.pt with '3.weight', '3.bias' missing, and '2.weight', '2.bias' that"),
        ({"checkpoint": "shape.pt"}, "got 0.weight (7, 4) instead of (6, 4) in shape.pt"),
        # the data
        ({"data": "nowhere.npz"}, "an .npz file of the training data; got nowhere.npz, where there is no file"),
        ({"data": "folder.py"}, "one folder of images for each class; got folder.py without folders. Move the images"),
        ({"data": "text.npz"}, "arrays X and y of numbers; got text.npz, which is no such file. Save it with"),
        ({"data": "array.npz"}, "got array.npz (it contains one array without a name). Save it with "
         "numpy.savez('array.npz', X=X, y=y)."),
        ({"data": "X.npy"}, "an .npz file with arrays X and y of numbers; got X.npy. An .npy file contains one array: "
         "numpy.savez('X.npz', X=numpy.load('X.npy'), y=numpy.load('y.npy')) puts several into one file."),
        ({"data": "w.pt"}, "tensors X and y in w.pt; got '0.weight', '0.bias', '3.weight' and 1 more, and no X "
         "and no y. Save it with torch.save({'X': X, 'y': y}, 'w.pt')."),
        ({"data": "train.xlsx"}, "got train.xlsx. A table can be .csv, .parquet, .feather or .arrow, with --target "
         "COLUMN. Convert it in Python: pandas.read_excel('train.xlsx').to_csv('train.csv', index=False)."),
        ({"data": "train.h5"}, "got train.h5, which is no such file. Save it with numpy.savez('train.npz', X=X, y=y)."),
        ({"data": "no_y.npz"}, "expected arrays X and y in no_y.npz; got 'X', 'labels', and no y"),
        ({"data": "nothing.npz"}, "got nothing, and no X and no y"),
        ({"data": "words.npz"}, "expected y to be an array of numbers with one row per example; got shape (20,) and "
         "type <U1. Number the names before they are saved: names, y = numpy.unique(y, return_inverse=True)."),
        ({"data": "objects.npz"}, "got objects.npz, which contains Python objects. Save it with"),
        ({"data": "short.npz"}, "expected as many targets as inputs"),
        ({"data": "no_rows.npz"}, "expected at least one example; got empty data"),
        ({"data": "gaps.npz"}, "expected finite inputs; got NaN at example 7"),
        ({"data": "wide.npz"}, "network that takes X of shape (2, 5) and type torch.float64; got RuntimeError: "),
        ({"data": "whole.npz"}, "save X as floats if they are values"),
        # and whether they fit together
        ({"data": "four.npz"}, "expected class labels in 0..2; got 3 at example 2"),
        ({"likelihood": "gaussian"}, "expected targets of shape (20, 3); got shape (20,)"),
        ({"likelihood": "poisson"}, "expected targets of shape (20, 3)"),
        ({"likelihood": "bernoulli"}, "got shape (20,)"),
        ({"device": "typewriter"}, "expected a device that torch can use here for torch.float64; got 'typewriter'"),
    ],
)
def test_what_does_not_fit_is_one_line(
    changed: dict[str, str], words: str, bad_files: Path, capsys: pytest.CaptureFixture
) -> None:
    brought = {name: changed[name] for name in ("network", "checkpoint", "data") if name in changed}
    more = [part for name in ("likelihood", "device") if name in changed for part in (f"--{name}", changed[name])]
    path = list(sys.path)
    assert cli.main(evidence(*more, **brought)) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("ntk-laplace: expected ") and words in printed.err, printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""
    assert sys.path == path and "_ntk_laplace_network_fails" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evidence"], "the following arguments are required"),
        (evidence(network="model.py:"), "expected FILE.py:FACTORY with the name of a function; got 'model.py:'"),
        (evidence(network="model.py:a.b"), "got 'model.py:a.b'"),
        (evidence("--likelihood", "normal"), "invalid choice: 'normal'"),
        (evidence("--noise", "0.1"), "expected options of --likelihood categorical: one of temperature; got noise."),
        (evidence("--likelihood", "poisson", "--likelihood-option", "noise=1"), "one of missing; got noise."),
        (evidence("--likelihood-option", "temperature"), "expected NAME=VALUE; got 'temperature'"),
        (evidence("--likelihood", "tempered"), "invalid choice: 'tempered' (choose from bernoulli, categorical, "),
        (evidence("--precision", "0"), "expected a positive number; got '0'"),
        (evidence("--precision", "inf"), "expected a positive number; got 'inf'"),
        (evidence("--precision", "one"), "expected a positive number; got 'one'"),
        (evidence("--structures", "gp,gp"), "got one twice in 'gp,gp'"),
        (evidence("--structures", ""), "got ''"),
        (evidence("--curvature", "fisher"), "invalid choice: 'fisher'"),
        (evidence("--plot", "o.pdf"), "expected a file name that ends with .png; got 'o.pdf'"),
    ],
)
def test_wrong_options_leave_with_two(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_an_unknown_structure_is_refused_before_the_work(brought: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(evidence("--structures", "gp,kfak")) == 1
    names = "gp, full, iterative, nystrom, kfac, ekfac, inf, diag"
    assert f"expected structure among {names}, auto; got 'kfak'" in capsys.readouterr().err


def test_output_that_is_closed_is_named(
    brought: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As by ``head``; the message was "cannot write to None"."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert cli.main(evidence()) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err.startswith("ntk-laplace: its output was closed before the end, as by head; files")


def test_files_that_cannot_be_written_are_refused_before_the_work(
    brought: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(ntkl, "compare_evidence", lambda *_, **__: pytest.fail("work began"))
    (brought / "is_folder").mkdir()
    for option, name in (("--json", "no/o.json"), ("--plot", "no/o.png"), ("--json", "is_folder")):
        assert cli.main(evidence(option, name)) == 1
        assert f"ntk-laplace: cannot write to {name}: " in capsys.readouterr().err
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert cli.main(evidence("--json", "o.json")) == 1
    assert "cannot write to o.json: Permission denied. Choose another name." in capsys.readouterr().err


def test_inputs_are_not_overwritten(
    brought: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("ntk_laplace.tools.cli.evidence.bring", lambda *_: pytest.fail("work began"))
    before = {path: path.read_bytes() for path in brought.iterdir()}
    (brought / "same.json").symlink_to("d.npz")
    predict = ["predict", *evidence()[1:-4], "--likelihood", "categorical", "--inputs", "new.csv", "--out", "new.csv"]
    Path("new.csv").write_text("a,b\n")
    for arguments, name in (
        (evidence("--json", "d.npz"), "d.npz"), (evidence("--json", "w.pt"), "w.pt"),
        (evidence("--json", "./model.py"), "model.py"), (evidence("--json", "same.json"), "same.json"),
        (predict, "new.csv"),
    ):
        assert cli.main(arguments) == 1
        words = f"expected another name for what is written; got {name}, which is an input."
        assert words in capsys.readouterr().err
    assert all(path.read_bytes() == content for path, content in before.items())


def test_memory_that_runs_out_is_one_line(
    brought: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(cause: Exception) -> None:
        raise cause

    for cause in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory:\n9 bytes")):
        monkeypatch.setattr("ntk_laplace.tools.cli.evidence.bring", lambda _, cause=cause: fail(cause))
        assert cli.main(evidence()) == 1
        error = capsys.readouterr().err
        assert error.startswith("ntk-laplace: expected more memory; got ") and error.count("\n") == 1
    monkeypatch.setattr("ntk_laplace.tools.cli.evidence.bring", lambda _: fail(RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        cli.main(evidence())


@pytest.mark.slow
def test_interruption_prints_what_was_finished(
    brought: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fit = compare.laplace

    def second_is_interrupted(*arguments: object, **options: object) -> ntkl.Posterior:
        if "full" in arguments:
            raise KeyboardInterrupt
        return fit(*arguments, **options)

    monkeypatch.setattr(compare, "laplace", second_is_interrupted)
    assert cli.main(evidence("--json", "o.json")) == 130
    printed = capsys.readouterr()
    assert "\ngp  " in printed.out and "full" not in printed.out
    assert printed.err == "ntk-laplace: interrupted; no file was written\n" and not Path("o.json").exists()


@pytest.mark.slow
def test_warnings_stand_below_the_table_once(
    brought: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fit = compare.laplace

    def warning(*arguments: object, **options: object) -> ntkl.Posterior:
        warnings.warn("a layer that no rule covers", ntkl.NTKLaplaceWarning, stacklevel=1)
        return fit(*arguments, **options)

    monkeypatch.setattr(compare, "laplace", warning)
    assert cli.main(evidence()) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.count("a layer that") == 1
    assert printed.out.endswith("\ngp: note: a layer that no rule covers\n")


@pytest.mark.slow
def test_commands_on_the_docs_page_run(brought: Path, capsys: pytest.CaptureFixture) -> None:
    """Those lines, on other data of the same shapes; the page's own blocks are run with the docs."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "comparison.md").read_text()
    (shell,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (network,) = re.findall(r'Path\("model.py"\).write_text\("""\n(.*?)"""\)', page, re.DOTALL)
    Path("model.py").write_text(network)
    torch.save(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).state_dict(), "weights.pt")
    np.savez("data.npz", X=torch.rand(12, 64).numpy(), y=np.arange(12) % 10)
    commands = [shlex.split(line) for line in shell.replace("\\\n", "").splitlines()]
    assert [command[:2] for command in commands] == [["ntk-laplace", "evidence"]] * 2
    for command in commands:
        assert cli.main(command[1:]) == 0
    assert capsys.readouterr().out.count("Log marginal likelihood, in nats") == 2
    written = json.loads(Path("evidence.json").read_text())
    assert Path("evidence.png").exists() and [row["structure"] for row in written["rows"]] == ["gp", "kfac"]


# ------------------------------------------------------------------------------------------------------------- explain


@pytest.mark.slow
def test_a_page_of_explanations(brought: Path, capsys: pytest.CaptureFixture) -> None:
    line = ["explain", "model.py", "--checkpoint", "w.pt", "--data", "d.npz", "--likelihood", "categorical"]
    naming = ["--classes", "ant,bee,cat", "--features", "a,b,c,d"]
    assert cli.main([*line, "--inputs", "d.npz", "--most", "7", "--k", "2", *naming, "--out", "page.html",
                     "--title", "Beasts & <more>"]) == 0
    assert "ExplorerPage(7 inputs, 20 training points); written to page.html" in capsys.readouterr().out
    page = Path("page.html").read_text()
    assert "<h1>Beasts &amp; &lt;more&gt;</h1>" in page
    content = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert content["names"] == ["ant", "bee", "cat"] and content["rows"]["features"] == ["a", "b", "c", "d"]
    assert [point["target"] for point in content["points"]] == [0, 1, 2, 0, 1, 2, 0]
    assert all(len(point["for"]) <= 2 for point in content["points"])
    np.savez("unknown.npz", X=np.load("d.npz")["X"][:3])
    assert cli.main([*line, "--inputs", "unknown.npz", "--structure", "kfac", "--out", "page.html"]) == 0
    content = json.loads(Path("page.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    assert "structure kfac" in content["summary"] and content["approximate"] and "total" in content["points"][0]
    single = ["explain", "model.py:single", "--checkpoint", "single.pt", "--data", "two.npz", "--likelihood",
              "bernoulli", "--inputs", "unknown.npz", "--shape", "2x2"]
    assert cli.main(single) == 0
    content = json.loads(Path("explanations.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    assert content["kind"] == "binary" and "target" not in content["points"][0]
    assert content["pictures"]["points"]["height"] == 2


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--inputs", "nowhere.npz"], 1, "an .npz file of inputs to explain; got nowhere.npz, where there is no file"),
        (["--inputs", "wide_only.npz"], 1, "network that takes X of shape (2, 5) and type torch.float64; got"),
        (["--inputs", "d.npz", "--classes", "a,b"], 1, "expected 3 names of classes or outputs; got 2"),
        (["--inputs", "d.npz", "--shape", "3x3"], 1, "expected inputs of 9 numbers"),
        (["--inputs", "d.npz", "--shape", "3"], 2, "expected HEIGHTxWIDTH, such as 28x28, or 32x32x3; got '3'"),
        (["--inputs", "d.npz", "--k", "0"], 2, "expected a whole number of at least 1; got '0'"),
        (["--inputs", "d.npz", "--classes", "a,,b"], 2, "expected names with commas between"),
        (["--inputs", "d.npz", "--structure", "exact"], 1, "expected structure among gp, full, "
         "iterative, nystrom, kfac, ekfac, inf, diag, auto; got 'exact'"),
        (["--inputs", "d.npz", "--out", "page.txt"], 2, "expected a file name that ends with .html"),
        (["--inputs", "d.npz", "--out", "nowhere/page.html"], 1, "cannot write to nowhere/page.html"),
    ],
)
def test_a_page_that_cannot_be(
    more: list[str], code: int, words: str, brought: Path, capsys: pytest.CaptureFixture
) -> None:
    np.savez("wide_only.npz", X=np.zeros((20, 5)))
    line = ["explain", "model.py", "--checkpoint", "w.pt", "--data", "d.npz", "--likelihood", "categorical", *more]
    if code == 2:
        with pytest.raises(SystemExit) as left:
            cli.main(line)
        assert left.value.code == 2
    else:
        assert cli.main(line) == code
    assert words in capsys.readouterr().err
    assert not Path("explanations.html").exists()


# ------------------------------------------------------------------------ several outputs, and inputs of several arrays


PARTS = """
import torch
from torch import nn


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, words, mask):
        hidden = torch.tanh((self.words(words) * mask[..., None]).sum(1))
        return {"hidden": hidden, "logits": self.last(hidden)}


class Pair(nn.Linear):
    def forward(self, x):
        return x, super().forward(x)


def make_pair():
    return Pair(4, 3)
"""


@pytest.fixture
def parts(brought: Path) -> dict[str, np.ndarray]:
    """A network of two inputs that returns two things, in a folder with its data; these by name."""
    Path("parts.py").write_text(PARTS)
    made: dict[str, type[nn.Module]] = {}
    exec(PARTS, made)
    torch.save(made["Parts"]().state_dict(), "parts.pt")
    torch.save(nn.Linear(4, 3).state_dict(), "pair.pt")
    words = np.random.default_rng(0).integers(0, 5, (12, 6))
    arrays = {"words": words, "mask": (words > 0).astype(float), "label": np.arange(12) % 3}
    np.savez("parts.npz", **arrays)
    np.savez("new.npz", words=words[:4], mask=arrays["mask"][:4])
    np.savez("more.npz", idx=np.arange(12), **arrays)
    np.savez("labels.npz", label=arrays["label"])
    np.savez("mask.npz", words=words, mask=arrays["mask"])
    return arrays


def of_parts(*more: str, command: str = "evidence", data: str = "parts.npz") -> list[str]:
    return [command, "parts.py:Parts", "--checkpoint", "parts.pt", "--data", data, "--likelihood", "categorical", *more]


@pytest.mark.slow
def test_outputs_and_targets_by_name(parts: dict[str, np.ndarray], capsys: pytest.CaptureFixture) -> None:
    named = ["--output", "logits", "--targets", "label"]
    assert cli.main([*of_parts(*named), "--structures", "gp,full", "--json", "o.json"]) == 0
    made: dict[str, type[nn.Module]] = {}
    exec(PARTS, made)
    network = made["Parts"]().double()
    network.load_state_dict(torch.load("parts.pt"))
    data = {name: torch.as_tensor(array) for name, array in parts.items()}
    posterior = ntkl.laplace(network, data, ntkl.Categorical(), output="logits", targets="label")
    found = [row["evidence"] for row in json.loads(Path("o.json").read_text())["rows"]]
    assert found == pytest.approx([posterior.log_marginal_likelihood().item()] * 2, rel=1e-9)
    for file, count in (("parts.npz", 12), ("new.npz", 4)):
        assert cli.main([*of_parts(*named, "--inputs", file, command="explain"), "--out", "page.html"]) == 0
        assert f"ExplorerPage({count} inputs, 12 training points)" in capsys.readouterr().out
    pair = ["evidence", "parts.py:make_pair", "--checkpoint", "pair.pt", "--data", "d.npz", "--likelihood",
            "categorical", "--structures", "gp", "--output"]
    assert cli.main([*pair, "1"]) == 0 and "C = 3" in capsys.readouterr().out
    assert cli.main([*pair, "2"]) == 1 and "got a tuple with the tensors 0, 1." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (of_parts("--targets", "label"), "got a dict with the tensors 'hidden', 'logits'. Name the outputs to linearize"
         ", --output logits."),
        (["evidence", "parts.py:make_pair", "--checkpoint", "pair.pt", "--data", "d.npz", "--likelihood",
          "categorical"], "got a tuple with the tensors 0, 1. Name the outputs to linearize, --output 0."),
        (["evidence", "model.py", "--checkpoint", "w.pt", "--data", "d.npz", "--likelihood", "categorical", "--output",
          "logits"], "(2, 3). Leave --output out."),
        (of_parts("--targets", "label", "--output", "score"), "expected a tensor 'score' in what the network returns"),
        (of_parts("--output", "logits"), "expected arrays X and y in parts.npz; got 'words', 'mask', 'label', and no X "
         "and no y. If the network takes the arrays by name, pass --targets label, that of the targets. Save it with"),
        (of_parts("--output", "logits", data="mask.npz"), "pass --targets NAME, that of the targets. Save it with"),
        (of_parts("--output", "logits", "--targets", "labels"), "expected arrays labels in parts.npz; got 'words', "
         "'mask', 'label', and no labels. Save it with numpy.savez('parts.npz', labels=labels, **inputs)."),
        (of_parts("--output", "logits", "--targets", "label", data="more.npz"), "Leave out 'idx', which the network's"),
        (of_parts("--output", "logits", "--targets", "label", data="labels.npz"), "inputs beside 'label'; got none."),
        (of_parts("--output", "logits", "--targets", "label", "--inputs", "array.npz", command="explain"),
         "expected an .npz file with arrays by name of numbers; got array.npz"),
    ],
)
def test_missing_outputs_and_targets_are_refused(
    arguments: list[str], words: str, parts: dict[str, np.ndarray], capsys: pytest.CaptureFixture
) -> None:
    with open("array.npz", "wb") as file:
        np.save(file, np.zeros(3))
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error
