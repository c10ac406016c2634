"""What a release consists of: the sdist has everything, and the wheel made of it works without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import ntk_laplace as ntkl

ROOT = Path(__file__).resolve().parents[1]
# runs an installed script, and says whose code that is
INSTALLED = """
import runpy, sys, ntk_laplace
print(ntk_laplace.__file__, ntk_laplace.__version__)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """What a Python process prints."""
    found = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env={**os.environ, **environment},
                           capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.slow
def test_a_wheel_of_the_sdist_works_alone(tmp_path: Path) -> None:
    """Built without a network, the wheel from the sdist, and installed in a folder of its own."""
    pytest.importorskip("hatchling")
    pytest.importorskip("pip")
    name, place = f"ntk_laplace-{ntkl.__version__}", tmp_path / "place"
    run("-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    with tarfile.open(tmp_path / f"{name}.tar.gz") as archive:
        names = archive.getnames()
        assert {one.split("/")[1] for one in names} >= {"docs", "examples", "tests", "LICENSE", "README.md"}
        archive.extractall(tmp_path, [archive.getmember(one) for one in names if "/docs/" not in one], filter="data")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tmp_path / name)
    wheel = tmp_path / f"{name}-py3-none-any.whl"
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", place, wheel, cwd=tmp_path)
    rows = "\n".join(f"{i},{i * 7 % 5},{'high' if i > 15 else 'low'}" for i in range(30))
    (tmp_path / "t.csv").write_text(f"a,b,price\n{rows}\n")
    command = place / "bin" / "ntk-laplace"
    printed = run("-c", INSTALLED, command, "fit", "t.csv", "--target", "price", "--epochs", "1", "--hidden", "4",
                  "--out", "price", cwd=tmp_path, PYTHONPATH=str(place))
    assert printed.startswith(f"{place / 'ntk_laplace' / '__init__.py'} {ntkl.__version__}\n")
    assert "6 held out" in printed and {"predictions.csv", "explanations.html", "model.joblib"} <= {
        path.name for path in (tmp_path / "price").iterdir()}
