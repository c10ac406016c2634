"""The library and what a user writes with it type-check, and wrong calls are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("outside_likelihood.py", "outside_structure.py")

# the settings of mypy --strict that a file can set for itself
RIGHT = '''
# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-defs
# mypy: disallow-untyped-decorators, warn-return-any, strict-equality, extra-checks
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import ntk_laplace as ntkl
from ntk_laplace.model.data import Inputs

network: nn.Module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
x, y = torch.randn(20, 2), torch.randint(3, (20,))
loader = DataLoader(TensorDataset(x, y), batch_size=5)
prior = ntkl.GaussianPrior(1.0, groups="layer")
posterior: ntkl.Posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure="gp")
kfac = ntkl.laplace(network, loader, ntkl.Categorical(), structure="kfac", curvature="ef")
ekfac = ntkl.laplace(network, loader, ntkl.Categorical(), structure=ntkl.EKFAC(basis=kfac))

history: ntkl.HyperparameterHistory = posterior.fit_hyperparameters("lbfgs", parameters=["precision"], steps=50)
evidence: Tensor = posterior.log_marginal_likelihood(correction=True)
torch.autograd.backward(evidence)
precision: Tensor = posterior.prior.precision
slope = posterior.prior.log_precision.grad
found = posterior.predict(x, method="nn", samples=10)
widths: Tensor = found.epistemic + found.aleatoric + found.mean
scores: Tensor = posterior.predict(loader).log_prob(y)
several: list[Tensor] = [x, x]
named: dict[str, Tensor] = {"x": x}
inputs: Sequence[Inputs] = [x, several, named, (x, named), {"a": several}]
posterior.predict(several)
posterior.predict(named)
posterior.outputs(x.numpy())
kept: ntkl.Posterior = posterior.remove([3, 4]).reweight(0, 2.0).condition((x, y)).to("cpu")
explained = kept.explain(x[:2], k=3)
if isinstance(explained, ntkl.Explanation):
    shares: Tensor = explained.contributions
with_shapes: Mapping[str, torch.Size] = posterior.network.shapes
step: dict[str, Tensor] = posterior.network.shapes.named(posterior.network.theta)
adam = torch.optim.Adam(network.parameters())
trained = ntkl.train_with_evidence(network, (x, y), ntkl.Categorical(), optimizer=adam, epochs=2)
better: ntkl.Posterior = trained.posterior
comparison: ntkl.EvidenceComparison = ntkl.compare_evidence(network, (x, y), ntkl.Categorical(), structures=["gp"])


def probabilities(structure: str) -> Tensor:
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=structure).remove(0).predict(x).probs


others: list[ntkl.Posterior] = [
    posterior.relabel([0], [1]), posterior.add(x[:1], y[:1]), posterior.merge(posterior), posterior.retrain((x, y)),
    ntkl.load("p.pt", network),
]
first: int = posterior.explain(x).entries(0, "for")[0].training_index
table = posterior.explain(x[:2], k=3).to_dataframe()
value: float = float(posterior.evidence().value)
labels: list[list[str]] = posterior.predict_set(x).labels(["a", "b", "c"])
model = ntkl.LaplaceClassifier(epochs=2).fit(x.numpy(), y.numpy())
of_model: Tensor = model.posterior_.predict(model.network_inputs(x.numpy())).probs
regressor = ntkl.LaplaceRegressor(epochs=2).fit(x.numpy(), y.numpy())
means: NDArray[Any] = regressor.predict(x.numpy())
mean, std = regressor.predict(x.numpy(), return_std=True)
joint: NDArray[Any] = std + regressor.predict(x.numpy(), return_cov=True)[1].diagonal() + mean
of_the_regressor: float = regressor.log_marginal_likelihood()
of_the_model, gradient = model.log_marginal_likelihood(model.theta_, eval_gradient=True)
steps: NDArray[Any] = gradient + model.log_marginal_likelihood(eval_gradient=True)[1] * of_the_model
assert_type(ntkl.botorch.LaplaceModel.fit("fourier", x, x), ntkl.botorch.LaplaceModel)
assert_type(ntkl.botorch.LaplaceEnsemble.fit("mlp", x, x), ntkl.botorch.LaplaceEnsemble)
chosen: list[int] = ntkl.active.select(posterior, x, 3).indices.tolist()
segments = ntkl.laplace(network, (x, y), ntkl.Everywhere(ntkl.Categorical(), ignore_index=255))
ntkl.laplace(network, (x, y), ntkl.CustomLikelihood(lambda f, y: -(y - f).square().sum(1), mean=lambda f: f))
'''

# each line is wrong, and the error is of this kind
WRONG = {
    "posterior.predict(3)": "arg-type",
    "posterior.predict(x, sample=10)": "call-arg",
    'posterior.predict(x, samples="many")': "arg-type",
    "posterior.predicts(x)": "attr-defined",
    "posterior.explain(x, k=2).contribution": "union-attr",
    'ntkl.laplace(network, (x, y), "categorical")': "arg-type",
    "ntkl.laplace(network, (x, y), ntkl.Categorical(), prior=0.1)": "arg-type",
    "ntkl.EKFAC(base=posterior)": "call-arg",
    "ntkl.Gaussian(noise=[1.0, 2.0])": "arg-type",
    'evidence: float = posterior.log_marginal_likelihood()': "assignment",
    "posterior.remove([0], step=2)": "call-arg",
    "posterior.network.shapes.named([0.0])": "arg-type",
    "posterior.predict(x).probs = x": "misc",
    "posterior.predict(x).probability": "attr-defined",
    "posterior.remove(0).probs": "attr-defined",
    "numbers: list[list[str]] = posterior.predict_set(x).labels()": "assignment",
    'wrong: list[list[int]] = posterior.predict_set(x).labels(["a", "b", "c"])': "list-item",
    "regressor.predict(x, return_std=True).mean()": "attr-defined",
    "both: float = regressor.log_marginal_likelihood(eval_gradient=True)": "assignment",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Errors of one run over the library, the outside files and a user's two files, as ``file:line: error: ...``."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "right.py").write_text(RIGHT)
    head = "from right import network, posterior, regressor, x, y\nimport ntk_laplace as ntkl\n"
    (folder / "wrong.py").write_text(head + "\n".join(WRONG) + "\n")
    files = ["ntk_laplace", *(str(ROOT / "tests" / name) for name in OUTSIDE)]
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "--no-error-summary", *files,
               str(folder / "right.py"), str(folder / "wrong.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if ": error:" in line]


@pytest.mark.slow
def test_the_library_is_well_typed(errors: list[str]) -> None:
    assert [line for line in errors if line.startswith("ntk_laplace")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OUTSIDE, "right.py"])
def test_a_users_file_is_well_typed(errors: list[str], name: str) -> None:
    assert [line for line in errors if name in line] == []


@pytest.mark.slow
def test_wrong_calls_are_found(errors: list[str]) -> None:
    found: dict[int, set[str]] = {}
    for line in errors:
        match = re.search(r"wrong\.py:(\d+): error: .*\[([a-z-]+)\]", line)
        if match:
            found.setdefault(int(match[1]), set()).add(match[2])
    for number, (call, kind) in enumerate(WRONG.items(), start=3):
        assert kind in found.get(number, set()), f"{call}: {kind} expected, got {found.get(number)}"
