"""The command: help, version, good messages, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ntk_laplace as ntkl
from ntk_laplace import cli, demo


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ntk_laplace", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], []])
def test_help_says_what_there_is(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0 and done.stderr == ""
    assert ("--out" in done.stdout and "--seed" in done.stdout) if "demo" in arguments else "demo" in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"ntk-laplace {ntkl.__version__}\n")


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
    monkeypatch.setattr("ntk_laplace.demo.run.study", lambda *_: pytest.fail("work began"))
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
