"""Tensors stay on the device of the network. No GPU is needed: the device is one that refuses what CUDA would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

CASES = [("deep_mlp", "kfac"), ("deep_mlp", "inf"), ("deep_mlp", "full"), ("cnn_groups", "gp"), ("cnn_groups", "diag"),
         ("embedding_bag", "ekfac"), ("deep_mlp", "iterative")]
HELPERS = Path(__file__).parent / "helpers"


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="a torch that makes none"
)
def test_another_device_gives_the_same_answers():
    """Evidence, slopes, predictions, effects, what-ifs: nothing of it mixes tensors of two devices."""
    path = os.pathsep.join([str(HELPERS.parents[1]), str(HELPERS)])
    script = [sys.executable, str(HELPERS / "elsewhere.py"), json.dumps(CASES)]
    ran = subprocess.run(script, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr[-2000:]
    found, moves = json.loads(ran.stdout).values()
    assert len(found) == len(CASES) and all(len(answers) == 12 for answers in found.values())
    wrong = {f"{case} {verb}": gap for case, answers in found.items() for verb, gap in answers.items()
             if not isinstance(gap, float) or not gap < 1e-9}
    assert not wrong
    assert len(moves) == 2 and max(moves.values()) < 1e-9
