"""Tensors stay on the device of the network. No GPU is needed: the device is one that refuses what CUDA would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import backend_registration

import ntk_laplace as ntkl
from minima import trained
from refusals import inputs, labels

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


def answers(structure: str, path: Path, module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of verbs that draw, count, sort, sum and store."""
    posterior = ntkl.laplace(module, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(3.0), structure)
    new = x[:3] + 0.1
    found = [posterior.log_marginal_likelihood(), posterior.leave_one_out(points=4).log_density,
             posterior.leave_one_out().mean, posterior.remove([1], linearization="moving").network.theta,
             posterior.evidence_bound(5).value, posterior.elbo(samples=20).value]
    found += [posterior.predict(new, method, samples=20).probs for method in ("glm", "probit", "nn")]
    posterior.explain(new)
    posterior.calibrate((x, y))
    posterior.fit_hyperparameters(steps=2)
    posterior.save(path, include_data=True)
    loaded = ntkl.load(path, module, data=(x, y))
    found += [loaded.predict(new).probs, loaded.condition((new, y[:3])).f, loaded.subset(range(5)).f]
    return found


@pytest.mark.parametrize("structure", ["gp", "kfac", "iterative"])
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
def test_nothing_is_made_on_the_default_device(structure: str, tmp_path: Path) -> None:
    """As after torch.set_default_device("cuda") in a script whose data are elsewhere: here it has no values."""
    given = trained("classes"), inputs(), labels()
    torch.manual_seed(0)
    expected = answers(structure, tmp_path / "one.pt", *given)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = answers(structure, tmp_path / "two.pt", *given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
