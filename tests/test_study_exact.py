"""The studies of [L22], in miniature: each runs from its command line, and shows what its page says."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood

import ntk_laplace as ntkl
from scripts import run_script

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "selection"


def run(script: str, folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a study printed in an empty folder, and the figures that it wrote."""
    printed = run_script(FOLDER / script, folder, "--small", "--threads", "1", "--out", "out", *arguments)
    name = Path(script).stem
    found = json.loads((folder / "out" / f"{name}.json").read_text())
    picture = folder / "out" / f"{name}.png"
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")
    return printed, found


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the exact studies."""
    monkeypatch.syspath_prepend(str(FOLDER / "exact"))
    return importlib.import_module


def gp(x: torch.Tensor, y: torch.Tensor, kernel: Any, noise: float) -> tuple[Any, Any]:
    """A model of GPyTorch with zero mean, in training mode, and its likelihood."""

    class Model(gpytorch.models.ExactGP):
        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(x.new_zeros(len(x)), kernel(x))

    constraint = gpytorch.constraints.GreaterThan(1e-6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint).double()
    likelihood.noise = noise
    return Model(x, y, likelihood).double().train(), likelihood


def test_scores_of_batches_are_those_of_gpytorch(exact: Any) -> None:
    """Evidence, conditional evidence and leave-one-out of the studies' kernels, of two data sets at once."""
    scores, x = exact("lengthscale"), torch.linspace(0, 2, 12).double()
    y, order = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).double(), scores.orders(12, 3, 1)
    rbf, rq = gpytorch.kernels.RBFKernel().double(), gpytorch.kernels.RQKernel().double()
    rbf.lengthscale, rq.lengthscale, rq.alpha = 0.7, 0.3, 0.05
    scaled = gpytorch.kernels.ScaleKernel(rq).double()
    scaled.outputscale = math.log(2)
    length = torch.tensor(0.7).double()
    cases = {
        "rbf": (rbf, exact("lengthscale").radial(x, x, length)),
        "rq": (scaled, exact("rational_quadratic").kernel(x, x, 0.05, 0.3, math.log(2))),
    }
    for name, (kernel, own) in cases.items():
        covariance = (own + 0.04 * torch.eye(12).double()).expand(2, 12, 12)
        found = (scores.log_density(covariance, y), scores.conditional(covariance, y, 9, order),
                 scores.left_out(covariance, y))
        for i in range(2):
            model, likelihood = gp(x, y[i], kernel, 0.04)
            output = model(x)
            expected = (
                12 * ExactMarginalLogLikelihood(likelihood, model)(output, y[i]),
                3 * ntkl.gp.ConditionalMarginalLogLikelihood(likelihood, model, 0.75, order)(output, y[i]),
                12 * LeaveOneOutPseudoLikelihood(likelihood, model)(output, y[i]),
            )
            for mine, theirs in zip(found, expected, strict=True):
                assert float(mine[i]) == pytest.approx(theirs.item(), rel=1e-6), name


def test_density(tmp_path: Path, exact: Any) -> None:
    printed, found = run("exact/density.py", tmp_path)
    recomputed = {"M_MML": -60.05, "M_1": -66.94, "M_2, μ = -0.4": -66.32, "M_2, μ = 2": -66.55}
    models = found["models"]
    for name, evidence in recomputed.items():
        assert models[name]["evidence"] == pytest.approx(evidence, abs=0.01)
        assert sum(models[name]["terms"]) == pytest.approx(models[name]["evidence"])
    mean, variance = exact("density").predictions(exact("density").paper_data()[0], 0.07, 2.0)
    assert models["M_2, μ = 2"]["predictive"] == pytest.approx([float(mean[-1]), float(variance[-1])])
    # both readings of M_2 have more evidence than M_1; one of them predicts worse
    assert models["M_2, μ = -0.4"]["test"] < models["M_1"]["test"] - 0.09 < models["M_2, μ = 2"]["test"]
    assert models["M_1"]["left_out"] > models["M_2, μ = 2"]["left_out"]
    best, closed = found["best_variance"]
    assert best == pytest.approx(closed, abs=0.01) and "paper 0.6" in printed
    assert found["vague"] == ["M_1"]  # the page says so
    assert "leave-one-out is not to be trusted" not in printed  # it is exact here


def test_fourier(tmp_path: Path, exact: Any) -> None:
    """On the authors' inputs the evidences of the paper; with files of the right form the comparison."""
    fourier, folder = exact("fourier"), tmp_path / "data" / "l22"
    folder.mkdir(parents=True)
    problem, grid = fourier.Problem.of_paper(), np.linspace(-1, 11, 7)
    for name in ("m3", "m9", "m9c"):
        np.savez(folder / f"fourier_{name}.npz", x_train=problem.x[:100], y_train=problem.y[:100], x_test=grid,
                 pred_mu=np.zeros(7))
    names = ("m3_cmlls", "m9_cmlls", "m9c_cmlls")
    np.savez(folder / "fourier_cmll_results.npz", **{name: np.arange(120.0) for name in names})
    printed, found = run("exact/fourier.py", tmp_path, "--data", str(tmp_path / "data"))
    for name, evidence in {"order 3": 53.80, "order 9": 28.92, "order 9c, 1/d²": 54.23}.items():
        assert found["one"][name]["evidence"] == pytest.approx(evidence, abs=0.01)
        assert found["authors"][name]["evidence"] == pytest.approx(found["one"][name]["evidence"])
        assert found["authors"][name]["points"] == 0.0
    one = found["one"]
    assert one["order 9"]["conditional"] > one["order 3"]["conditional"] and one["order 9"]["conditional"] < 20
    assert one["order 9"]["test"] > one["order 3"]["test"]
    assert found["bound"] == pytest.approx(13.25, abs=0.01) and "paper 296 or 297" in printed
    assert found["vague"] == ["order 3", "order 9", "order 9c, 1/d²"]  # the page says so: not the prior of the data
    assert "leave-one-out" not in found["warning"]
    assert found["uniform on [0, 1], as printed"]["counts"]["evidence"] == 0.0


def test_multimodal(tmp_path: Path) -> None:
    printed, found = run("exact/multimodal.py", tmp_path)
    for name in ("Laplace in w", "Laplace"):
        assert found["slopes"][name] == pytest.approx(-math.log(10), abs=0.01)
    first, second = found["rows"]
    assert abs(first["truth"] - second["truth"]) < 0.2
    assert second["Laplace"] == pytest.approx(second["Laplace in w"], abs=0.01)
    assert second["ELBO"] < second["AIS, posterior"] < second["truth"] - 2 < second["AIS, prior"]
    assert not second["trusted"]["importance"] or second["importance"] < second["truth"] - 2
    assert "nats a decade" in printed


def test_cautions(tmp_path: Path, exact: Any) -> None:
    """Counts of the density model against the closed forms; leave-one-out of linear networks has no star."""
    printed, found = run("exact/cautions.py", tmp_path)
    density = exact("density")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, density.N + density.TEST, generator=generator, dtype=torch.float64) + 1.0
    train, test = x[:, : density.N], x[:, density.N :]
    for mean in (-0.4, 2.0):
        scores = {}
        for name, (variance, at) in {"M_1": (1e6, 1.0), "M_2": (0.07, mean)}.items():
            covariance = torch.eye(density.N).double() + variance
            ahead, spread = density.predictions(train, variance, at)
            scores[name] = (density.log_density(covariance.expand(12, -1, -1), train - at),
                            density.left_out(covariance.expand(12, -1, -1), train - at),
                            density.normal(test, ahead[:, -1:], spread[-1:]).mean(1))
        case = found["cases"][f"density: M_1, M_2 with μ = {mean:g}"]
        better = scores["M_2"][2] > scores["M_1"][2]
        for score, index in (("evidence", 0), ("loo", 1)):
            misled = (scores["M_2"][index] > scores["M_1"][index]) != better
            assert case[score]["misled"] == int(misled.sum()) and case["data sets"] == 12
    assert all(case["loo"]["warned"] == case["loo"]["false"] == 0 for case in found["cases"].values())
    assert found["paper"]["Fourier"]["order 3, order 9"]["evidence"]["warned"]
    modes = found["modes"]
    assert modes["evidence"][0] > modes["evidence"][1] + 2 and abs(modes["truth"][0] - modes["truth"][1]) < 0.1
    assert modes["vague"] == [] and modes["starred"] == ["α = 10", "α = 100"] and "Fig. 3" in printed


def test_mean_function(tmp_path: Path, exact: Any) -> None:
    """The first score of training is GPyTorch's, at its starting values; the perceptron already fits more."""
    printed, found = run("exact/mean_function.py", tmp_path)
    assert set(found["histories"]) == {f"{mean} mean, {by}" for mean in ("constant", "perceptron") for by in
                                       ("evidence", "conditional", "one subset", "left out")}
    mean_function = exact("mean_function")
    y = mean_function.DataSets.drawn(3).y[:, :50]
    scores = []
    for one in y:
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
        model, likelihood = gp(mean_function.X[:50], one, kernel, math.log(2) + 1e-4)
        scores.append(ExactMarginalLogLikelihood(likelihood, model)(model(mean_function.X[:50]), one).item())
    assert found["histories"]["constant mean, evidence"][0] == pytest.approx(np.mean(scores), rel=1e-6)
    history = found["histories"]["perceptron mean, evidence"]
    assert history[-1] > history[0] and "coverage" in printed


def test_lengthscale(tmp_path: Path) -> None:
    folder, files = tmp_path / "data" / "l22", {"human_kernel_results": "", "human_kernel_results_cmll": "clml_"}
    folder.mkdir(parents=True)
    for file, prefix in files.items():
        np.savez(folder / f"{file}.npz", **{f"{prefix}lengthscales": np.linspace(3, 5, 4)[:, None] * np.ones(149)})
    printed, found = run("exact/lengthscale.py", tmp_path, "--data", str(tmp_path / "data"))
    assert {name.split(", ")[0] for name in found["found"]} == {"5", "10"} and "authors' file" in printed
    for row in found["found"].values():
        assert 0.0 <= row["above"] <= 1.0 and math.log(0.05) <= row["median"] <= math.log(60)
    row = found["found"]["10, Adam, evidence"]
    assert row["authors"] == pytest.approx(np.log(np.linspace(3, 5, 4)).mean())
    assert abs(row["mean"] - math.log(4)) < 20 * 0.01  # 20 steps of Adam from the truth


def test_rational_quadratic(tmp_path: Path) -> None:
    folder, random = tmp_path / "data" / "l22", np.random.default_rng(0)
    folder.mkdir(parents=True)
    x = random.permutation(np.linspace(0, 1, 200))
    np.savez(folder / "gp_rq_data.npz", x_train=x[:50], x_test=x[50:], y_train=x[:50] ** 2, y_test=x[50:] ** 2)
    for size in ("big", "small"):
        np.savez(folder / f"gp_rq_alpha_optimization_{size}_noise.npz", alpha=np.array([0.0, 0.01, 0.1, 0.3]),
                 mll=np.arange(4.0), cmll=np.arange(4.0), test_likelihood=np.arange(4.0))
    np.savez(folder / "gp_rq_learning_curve.npz", **{f"mlls_{a}": np.zeros(200) for a in ("0001", "001", "01", "03")})
    printed, found = run("exact/rational_quadratic.py", tmp_path, "--data", str(tmp_path / "data"))
    assert len(found["results"]) == 4 and "the authors' data set, noise 0.2" in printed
    for result in found["results"].values():
        assert all(result[name]["regret"][0] >= 0 and -1 <= result[name]["test"][0] <= 1
                   for name in ("evidence", "conditional", "left out"))
    assert found["authors"]["0.2"]["largest"]["evidence"] == [pytest.approx(0.3), 3.0]


def test_joint_and_marginal(tmp_path: Path) -> None:
    printed, found = run("exact/joint_and_marginal.py", tmp_path)
    assert found["samples"]["joint"] == pytest.approx(0.09) and found["samples"]["marginal"] == pytest.approx(0.25)
    assert found["tempered"]["1.0"] == pytest.approx([0.09, 0.25]) and "paper 0.09" in printed
    joint = [values[0] for values in found["tempered"].values()]
    assert joint == sorted(joint) and joint[-1] < 0.25
    one = found["means"]["2, true"]
    gap, error = one["joint"][0] - one["marginal"][0], one["joint"][1] + one["marginal"][1]
    assert abs(gap - one["correlation"][0]) < 3 * error
