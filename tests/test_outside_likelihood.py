"""A likelihood from outside the library, `outside_likelihood`, with every caller that takes a likelihood."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from outside_likelihood import Gamma
from torch import Tensor, nn
from torch.func import grad, vmap

import ntk_laplace as ntkl
from ntk_laplace.model.likelihoods import registered_likelihoods
from ntk_laplace.tools import cli
from reference import Dense, jacobian, relative_error

HERE = Path(__file__).resolve().parent


def network(seed: int = 0, outputs: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 3, dtype=torch.float64, generator=generator)
    return x, torch.rand(9, 2, dtype=torch.float64, generator=generator) + 0.1


def fit(structure: object = "gp", likelihood: ntkl.Likelihood | None = None) -> ntkl.Posterior:
    return ntkl.laplace(network(), data(), likelihood or Gamma(0.3), ntkl.GaussianPrior(2.0), structure)


def density(f: Tensor, y: Tensor) -> Tensor:
    mean, shape = f[:2].exp(), (f[2:] + 0.3).exp()
    return torch.distributions.Gamma(shape, shape / mean).log_prob(y).sum()


def fisher(f: Tensor) -> Tensor:
    """Products of autograd's gradients integrated over log y by the trapezoidal rule; responses are independent."""
    total = torch.zeros(4, 4, dtype=torch.float64)
    t = torch.linspace(-60, 6, 3001, dtype=torch.float64)
    gradient = vmap(grad(density), (None, 0))
    for d in range(2):
        mean, shape = f[d].exp(), (f[2 + d] + 0.3).exp()
        weight = torch.distributions.Gamma(shape, shape / mean).log_prob(t.exp()).add(t).exp() * (t[1] - t[0])
        g = gradient(f, t.exp()[:, None].expand(-1, 2))[:, [d, 2 + d]]
        total[[[d], [2 + d]], [d, 2 + d]] = torch.einsum("s,si,sj->ij", weight, g, g)
    return total


def test_no_file_of_the_library_mentions_it() -> None:
    words = ("outside_likelihood", "Gamma(")
    for path in (HERE.parent / "ntk_laplace").rglob("*.py"):
        assert not any(word in path.read_text() for word in words), path
    nodes = ast.walk(ast.parse((HERE / "outside_likelihood.py").read_text()))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    used = {node.attr for node in attributes if node.value.id == "ntkl"}
    assert used == {"Likelihood", "TargetError", "register_likelihood"} <= set(ntkl.__all__)


def test_its_evidence_is_that_of_dense_matrices() -> None:
    x, y = data()
    f = network()(x).detach()
    curvature = torch.stack([fisher(row) for row in f])
    torch.testing.assert_close(Gamma(0.3).curvature(f).detach(), curvature, rtol=1e-8, atol=1e-9)  # polygamma
    theta = nn.utils.parameters_to_vector(network().parameters()).detach()
    dense = Dense(vmap(density)(f, y), vmap(grad(density))(f, y), curvature,
                  jacobian(network(), x), theta, torch.full_like(theta, 2.0))
    for structure in ("gp", "full"):
        for correction in (False, True):
            found = fit(structure).log_marginal_likelihood(correction=correction)
            assert relative_error(found, dense.evidence(correction)) < 1e-8
    (slope,) = torch.autograd.grad((posterior := fit("full")).log_marginal_likelihood(), posterior.likelihood.log_shift)
    values = [fit("full", Gamma(0.3 + step)).log_marginal_likelihood().item() for step in (1e-4, -1e-4)]
    assert slope.item() == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5)


def test_its_predictions() -> None:
    posterior, (x, y) = fit(), data()
    mean, covariance = posterior.latent_moments(x)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40000, *mean.shape, dtype=torch.float64, generator=generator)
    f = mean + (torch.linalg.cholesky(covariance) @ noise.unsqueeze(-1)).squeeze(-1)
    found = posterior.predict(x, samples=2**13)
    assert found.mean.shape == (9, 2) and relative_error(found.mean, f[..., :2].exp().mean(0)) < 0.02
    total = f[..., :2].exp().var(0) + (2 * f[..., :2] - f[..., 2:] - 0.3).exp().mean(0)
    assert relative_error(found.variance, total) < 0.1
    exact = torch.distributions.Gamma((f[..., 2:] + 0.3).exp(), (f[..., 2:] + 0.3 - f[..., :2]).exp())
    expected = exact.log_prob(y).sum(-1).logsumexp(0) - np.log(len(f))
    assert relative_error(found.log_prob(y), expected) < 0.02
    blr = posterior.predict(x, "blr")
    torch.testing.assert_close(blr.mean, mean[:, :2].exp())
    torch.testing.assert_close(blr.epistemic, mean[:, :2].exp() ** 2 * covariance.diagonal(dim1=1, dim2=2)[:, :2])
    assert blr.log_prob(y).shape == (9,)
    with pytest.raises(ntkl.UnsupportedError, match="draw responses"):
        found.sample()


@pytest.mark.parametrize("tempered", [False, True])
def test_saved_and_loaded_by_name(tempered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood = ntkl.Tempered(Gamma(0.3), 2.0) if tempered else Gamma(0.3)
    posterior = fit("kfac", likelihood)
    posterior.likelihood.get_parameter("likelihood.log_shift" if tempered else "log_shift").data.fill_(0.4)
    posterior.save(tmp_path / "p.pt", include_data=True)
    loaded = ntkl.load(tmp_path / "p.pt", network())
    assert loaded.likelihood.state_dict() == posterior.likelihood.state_dict()
    torch.testing.assert_close(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood())
    torch.testing.assert_close(loaded.predict(data()[0]).mean, posterior.predict(data()[0]).mean)
    monkeypatch.delitem(ntkl.model.likelihoods.registry._REGISTERED, "Gamma")
    with pytest.raises(ntkl.UnsupportedError, match=r"the Gamma of the fit; got none.*register_likelihood"):
        ntkl.load(tmp_path / "p.pt", network())
    given = ntkl.Tempered(Gamma(), 2.0) if tempered else Gamma()
    again = ntkl.load(tmp_path / "p.pt", network(), likelihood=given)
    torch.testing.assert_close(again.log_marginal_likelihood(), posterior.log_marginal_likelihood())


def test_a_file_imports_nothing(tmp_path: Path) -> None:
    """The name in a file is looked up among registered classes, also where it is the name of something importable."""
    fit("kfac").save(tmp_path / "p.pt")
    saved = torch.load(tmp_path / "p.pt", weights_only=True)
    for name in ("os.system", "collections.OrderedDict", "Likelihood"):
        saved["likelihood"]["name"] = name
        torch.save(saved, tmp_path / "changed.pt")
        with pytest.raises(ntkl.UnsupportedError, match=f"the {name} of the fit; got none"):
            ntkl.load(tmp_path / "changed.pt", network())
    saved["likelihood"] |= {"name": "Gamma", "options": {"shape": 3}}
    torch.save(saved, tmp_path / "changed.pt")
    with pytest.raises(ntkl.UnsupportedError, match=r"a record with the arguments of Gamma; got .*'shape'"):
        ntkl.load(tmp_path / "changed.pt", network())


def test_compared_with_others() -> None:
    found = ntkl.compare_evidence(network(), data(), Gamma(0.3), structures=("gp", "full", "kfac"))
    assert found["gp"].evidence == pytest.approx(found["full"].evidence)
    models = {"gamma": fit(), "heteroscedastic": fit(likelihood=ntkl.HeteroscedasticGaussian("log variance"))}
    with pytest.warns(ntkl.NTKLaplaceWarning, match="leave-one-out is not to be trusted"):
        rows = ntkl.compare_models(models, conditional="none").rows
    assert [row.evidence for row in rows] == [model.log_marginal_likelihood().item() for model in models.values()]
    counts = ntkl.laplace(network(outputs=2), (data()[0], data()[1].round()), ntkl.Poisson())
    models = {"gamma": fit(likelihood=Rounded()), "counts": counts}
    with pytest.raises(ntkl.UnsupportedError, match="all densities or all probabilities; got Rounded and Poisson"):
        ntkl.compare_models(models, conditional="none")


class Rounded(Gamma):
    """Declares a density, and takes the targets of counts."""

    def targets(self, y: object, num_examples: int, num_outputs: int) -> Tensor:
        return super().targets(data()[1], num_examples, num_outputs).round()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y + 0.5)


def test_gpytorch() -> None:
    posterior, (x, y) = fit(), data()
    gp = ntkl.gp.LaplaceGP(posterior).eval()
    response = gp.likelihood(gp(x))
    torch.testing.assert_close(response.log_prob(y), posterior.predict(x).log_prob(y), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", [[], ["--likelihood-option", "shift=0.3"]])
def test_the_command_line(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("from torch import nn\n\n\ndef make_network():\n"
                                "    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))\n")
    torch.save(network().state_dict(), "w.pt")
    x, y = data()
    np.savez("d.npz", X=x.numpy(), y=y.numpy())
    shared = ["model.py", "--checkpoint", "w.pt", "--data", "d.npz", "--precision", "2"]
    own = [*shared, "--likelihood", f"{HERE / 'outside_likelihood.py'}:Gamma", *options]
    assert cli.main(["evidence", *own, "--structures", "gp,full", "--json", "o.json"]) == 0
    found = [row["evidence"] for row in json.loads(Path("o.json").read_text())["rows"]]
    expected = fit(likelihood=Gamma(0.3 if options else 0.0)).log_marginal_likelihood().item()
    assert found == pytest.approx([expected, expected], rel=1e-9)
    assert cli.main(["explain", *own, "--inputs", "d.npz", "--out", "o.html"]) == 0
    assert "Gamma likelihood" in Path("o.html").read_text()
    named = [*shared, "--likelihood", "heteroscedastic-gaussian", "--likelihood-option", "parametrization=log variance"]
    assert cli.main(["evidence", *named, "--structures", "gp", "--json", "o.json"]) == 0
    (row,) = json.loads(Path("o.json").read_text())["rows"]
    posterior = fit(likelihood=ntkl.HeteroscedasticGaussian("log variance"))
    assert row["evidence"] == pytest.approx(posterior.log_marginal_likelihood().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("likelihood", "words"),
    [
        ("none.py:Gamma", "a Python file with a function that returns the likelihood; got none.py"),
        ("own.py:Delta", "expected a function 'Delta' in own.py; got a file with"),
        ("own.py:number", "expected 'number' in own.py to be a function; got an int"),
        ("own.py:no_likelihood", "no_likelihood() in own.py to return a ntk_laplace.Likelihood; got a list"),
        ("own.py:fails", "fails() to run without arguments; got ValueError: no in line 9 of own.py"),
    ],
)
def test_files_without_a_likelihood(
    likelihood: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("from torch import nn\n\nmake_network = lambda: nn.Linear(3, 4)\nnumber = 3\n"
                              "no_likelihood = list\n\n\ndef fails():\n    raise ValueError('no')\n")
    torch.save(nn.Linear(3, 4).state_dict(), "w.pt")
    np.savez("d.npz", X=data()[0].numpy(), y=data()[1].numpy())
    line = ["evidence", "own.py", "--checkpoint", "w.pt", "--data", "d.npz", "--likelihood", likelihood]
    assert cli.main(line) == 1
    assert words in capsys.readouterr().err


def test_names_belong_to_one_class() -> None:
    assert registered_likelihoods()["gamma"].__name__ == "Gamma"
    poisson = type("Poisson", (ntkl.Likelihood,), {"__module__": "elsewhere"})
    with pytest.raises(ntkl.UnsupportedError, match=r"a unique name for the likelihood elsewhere\.Poisson"):
        ntkl.register_likelihood(poisson)
    for thing in (3, nn.Linear, Gamma()):
        with pytest.raises(ntkl.UnsupportedError, match=r"a subclass of ntk_laplace\.Likelihood"):
            ntkl.register_likelihood(thing)


def test_a_record_is_plain() -> None:
    class Odd(Gamma):
        def record(self) -> dict[str, object]:
            return {"shift": nn.Linear(1, 1)}

    with pytest.raises(ntkl.UnsupportedError, match="a record of Odd with numbers, strings"):
        fit("kfac", Odd(0.3)).save("never.pt")


class Exponential(ntkl.Likelihood):
    """Positive responses of rate exp(f) times a hyperparameter; `distribution` takes f alone, as the page shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.log_rate = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def distribution(self, f: torch.Tensor) -> torch.distributions.Distribution:  # type: ignore[override]
        return torch.distributions.Exponential((f + self.log_rate).exp(), validate_args=False)

    def log_prob(self, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rate = f + self.log_rate
        return (rate - rate.exp() * y).sum(1)

    def mean(self, f: torch.Tensor) -> torch.Tensor:
        return (-f - self.log_rate).exp()

    def response_covariance(self, f: torch.Tensor) -> torch.Tensor:
        return torch.diag_embed((-2 * f - 2 * self.log_rate).exp())


@pytest.mark.parametrize("method", ["map", "glm", "nn"])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("scalar", [False, True])
def test_a_distribution_of_f_alone_is_enough(method: str, scalar: bool, batch_size: int | None) -> None:
    """For every predictive: moments without a graph in the hyperparameters, densities, and draws."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 1), *([torch.nn.Flatten(0)] if scalar else [])]
    network = torch.nn.Sequential(*layers).double()
    x, y = torch.randn(30, 2).double(), torch.rand(30, 1).double() + 0.1
    likelihood = Exponential()
    predicted = ntkl.laplace(network, (x, y), likelihood).predict(x[:4], method, batch_size=batch_size)
    shape = (4,) if scalar else (4, 1)
    for moments in (predicted.mean, predicted.variance, predicted.epistemic, predicted.aleatoric):
        assert moments.shape == shape and not moments.requires_grad and bool((moments >= 0).all())
    assert predicted.sample((5,)).shape == (5, *shape)
    assert predicted.log_prob(y[:4]).shape == (4,) and not predicted.log_prob(y[:4]).requires_grad
    if method == "map":
        f, rate = network(x[:4]).detach().view(4, 1), likelihood.log_rate.detach()
        truth = torch.distributions.Exponential((f + rate).exp())
        assert torch.allclose(predicted.mean.view(4, 1), truth.mean)
        assert torch.allclose(predicted.variance.view(4, 1), truth.variance)
        assert torch.allclose(predicted.log_prob(y[:4]), truth.log_prob(y[:4])[:, 0])
        draws = predicted.sample((4000,)).reshape(4000, 4, 1)
        assert torch.allclose(draws.mean(0), truth.mean, rtol=0.1)
