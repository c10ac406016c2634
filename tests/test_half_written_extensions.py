"""Half-written structures and rules, and wrong arguments of what registers them, are refused by one clear error."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import register_rule
from refusals import inputs, labels, network, refused
from unregistered import Eigen

ntkl.structures.REGISTERED.pop("eigh", None)  # other tests go through all registered structures


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ntkl.structures.registry, "REGISTERED", known := dict(ntkl.structures.REGISTERED))
    monkeypatch.setattr(ntkl.structures, "REGISTERED", known)


class DiagonalPrecision(ntkl.PosteriorPrecision):
    """H = P0 + diag(s)."""

    def __init__(self, sums: Tensor, model: ntkl.LinearizedModel, error: float = 0.0) -> None:
        super().__init__(model.prior, like=sums)
        self.diagonal, self.standard_error = self.prior_precision + sums, error

    def log_det(self) -> Tensor:
        return (self.diagonal / self.prior_precision).log().sum()

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.diagonal

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(count, len(self.diagonal), dtype=self.diagonal.dtype, generator=generator)
        return noise * self.diagonal.rsqrt()

    def spectrum(self) -> Tensor:
        return self.diagonal / self.prior_precision - 1.0


@dataclass(frozen=True)
class AbsoluteRows(ntkl.SummedSpec):
    """s_p = Σ |SᵀJ|: multiplying Λ by c multiplies it by √c."""

    name: ClassVar[str] = "absolute"
    scales: ClassVar[bool] = False
    error: float = 0.0

    def zeros(self, model: ntkl.LinearizedModel) -> dict[str, Tensor]:
        return {"sum": model.theta.new_zeros(model.network.num_parameters)}

    def add(self, sums: dict[str, Tensor], rows: ntkl.Jacobian, model: ntkl.LinearizedModel) -> None:
        sums["sum"] += rows.dense(model.network.shapes).abs().sum((0, 1))

    def precision(self, sums: dict[str, Tensor], model: ntkl.LinearizedModel) -> DiagonalPrecision:
        return DiagonalPrecision(sums["sum"], model, self.error)


def fit(structure: object, **options: object) -> ntkl.Posterior:
    return ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), structure=structure, **options)


# --- what registers a structure


@pytest.mark.parametrize("wrong", [3, ntkl.KFAC(), type("Plain", (), {"name": "plain"})], ids=repr)
def test_only_specification_classes_are_registered(wrong: object) -> None:
    with refused(UnsupportedError, "subclass of ntk_laplace.StructureSpec", ".", "class itself"):
        ntkl.register_structure(wrong)


def test_a_class_without_all_methods_is_not_registered() -> None:
    half = type("Half", (ntkl.SummedSpec,), {"name": "half", "zeros": AbsoluteRows.zeros})
    with refused(UnsupportedError, "add, precision of the structure Half", "without them", "Define"):
        ntkl.register_structure(half)
    assert "half" not in ntkl.structures.structure_names()


@pytest.mark.parametrize("name", [None, 7, "", "auto"])
def test_names_that_no_call_could_use(name: object) -> None:
    own = type("Own", (AbsoluteRows,), {"name": name})
    with refused(UnsupportedError, "a name of the structure Own", "none|7|''|'auto'", "name ="):
        ntkl.register_structure(own)
    with refused(UnsupportedError, "a name of the structure Own", "none|7|''|'auto'", "name ="):
        fit(own())


def test_a_class_in_place_of_an_object() -> None:
    for wrong in (ntkl.KFAC, AbsoluteRows):
        with refused(UnsupportedError, "a structure's name or an object", f"class {wrong.__name__}", r"\(\)"):
            fit(wrong)


def test_a_name_whose_class_needs_options(tmp_path: Path) -> None:
    own = make_dataclass("Needs", [("k", int)], bases=(Eigen,), frozen=True, namespace={"name": "needs"})
    ntkl.register_structure(own)
    with refused(UnsupportedError, "options of the structure 'needs'", "none .*'k'", r"structure=Needs\(\.\.\.\)"):
        fit("needs")
    fit(own(3)).save(tmp_path / "p.pt")
    assert ntkl.load(tmp_path / "p.pt", network()).fitted.structure.spec.k == 3
    del ntkl.structures.registry.REGISTERED["needs"]
    ntkl.register_structure(type("Needs", (AbsoluteRows,), {"name": "needs"}))  # the class has changed since
    with refused(UnsupportedError, "options of the structure 'needs'", "k .*", "options"):
        ntkl.load(tmp_path / "p.pt", network())


@pytest.mark.parametrize("kind", [3, "AddmmBackward0", lambda use: None], ids=["number", "numbered", "rule"])
def test_names_of_nodes_that_no_rule_matches(kind: object) -> None:
    with refused(UnsupportedError, "autograd node without its number", ".", "register_rule"):
        register_rule(kind)


def test_a_rule_that_is_no_function() -> None:
    with refused(UnsupportedError, "a function as the rule of FilterBackward", "3", "Extractor"):
        register_rule("FilterBackward")(3)


def test_an_eigenbasis_of_another_dtype() -> None:
    basis = fit("kfac", dtype=torch.float32)
    with refused(UnsupportedError, "dtype=torch.float64", "float32", "same dtype"):
        fit(ntkl.EKFAC(basis=basis))


# --- what an outside structure declares


def noisy() -> ntkl.Posterior:
    y = torch.randn(9, 3, generator=torch.Generator().manual_seed(3)).double()
    return ntkl.laplace(network(), (inputs(), y), ntkl.Gaussian(0.3), structure=AbsoluteRows())


def test_sums_that_do_not_scale_have_no_gradient_in_the_noise() -> None:
    posterior = noisy()
    assert posterior.log_scale() is None
    with refused(UnsupportedError, "gradient in the likelihood's hyperparameters", "absolute", "alone"):
        torch.autograd.grad(posterior.log_marginal_likelihood(), list(posterior.likelihood.parameters()))
    with pytest.raises(UnsupportedError, match="alone"):
        posterior.fit_hyperparameters(parameters=["noise"], steps=3, progress=False)
    before = float(posterior.log_marginal_likelihood().detach())
    posterior.fit_hyperparameters(parameters=["precision"], steps=30, progress=False)
    assert float(posterior.log_marginal_likelihood().detach()) > before


def test_a_what_if_keeps_the_standard_error_of_the_structure() -> None:
    posterior = fit(AbsoluteRows(error=0.4))
    assert posterior.evidence().standard_error == posterior.remove([0]).evidence().standard_error == 0.2


# --- checkpoints without data


@pytest.mark.parametrize("structure", ["full", AbsoluteRows()], ids=["full", "outside"])
@pytest.mark.parametrize("include_data", [False, True])
def test_a_refused_change_of_the_likelihood_leaves_the_sums(
    structure: object, include_data: bool, tmp_path: Path
) -> None:
    ntkl.register_structure(AbsoluteRows)
    fit(structure).save(tmp_path / "p.pt", include_data)
    loaded = ntkl.load(tmp_path / "p.pt", network())
    before, temperature = loaded.log_marginal_likelihood(), next(loaded.likelihood.parameters())
    with torch.no_grad():
        temperature += 0.1
    with pytest.raises(ntkl.NTKLaplaceError, match=r"expected .*training data.*data="):
        loaded.predict(inputs(3))
    with torch.no_grad():
        temperature -= 0.1
    assert torch.isclose(loaded.log_marginal_likelihood(), before)


def test_a_what_if_without_data_says_so(tmp_path: Path) -> None:
    fit("kfac").save(tmp_path / "p.pt")
    with refused(UnsupportedError, "training data, for", "a checkpoint", "data="):
        ntkl.load(tmp_path / "p.pt", network()).remove([0])


# --- what the methods return


class Wrong(DiagonalPrecision):
    """One method returns something else."""

    wrong = ""

    def log_det(self) -> Tensor:
        return self.diagonal.log() if self.wrong == "log_det" else super().log_det()

    def solve(self, vectors: Tensor) -> Tensor:
        found = super().solve(vectors)
        return {"solve": found[..., :2], "dtype": found.float()}.get(self.wrong, found)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        found = super().sample(count, generator)
        return torch.cat([found, found]) if self.wrong == "sample" else found


@dataclass(frozen=True)
class WrongRows(AbsoluteRows):
    wrong: str = ""

    def zeros(self, model: ntkl.LinearizedModel) -> dict[str, Tensor]:
        found = super().zeros(model)
        return {"zeros": None, "device": {"sum": found["sum"].to("meta")}}.get(self.wrong, found)

    def precision(self, sums: dict[str, Tensor], model: ntkl.LinearizedModel) -> object:
        found = Wrong(sums["sum"], model)
        found.wrong = self.wrong
        return None if self.wrong == "precision" else found


@pytest.mark.parametrize(("wrong", "expected", "got"), [
    ("zeros", r"tensors by name on cpu of WrongRows.zeros", "None"),
    ("device", r"tensors by name on cpu of WrongRows.zeros", "meta"),
    ("precision", r"a PosteriorPrecision of structure='absolute'", "None"),
    ("log_det", r"a scalar tensor of Wrong.log_det", "tensor"),
    ("solve", r"a tensor .* in torch.float64 on cpu of Wrong.solve", "2"),
    ("dtype", r"a tensor .* in torch.float64 on cpu of Wrong.solve", "float32"),
    ("sample", r"a tensor \(3, 43\) in torch.float64 on cpu of Wrong.sample", r"\(6, 43\)"),
])
def test_what_a_method_returns_has_its_form(wrong: str, expected: str, got: str) -> None:
    with refused(UnsupportedError, expected, got, "."):
        posterior = fit(WrongRows(wrong=wrong))
        posterior.log_marginal_likelihood()
        posterior.sample(3)
        posterior.latent_moments(inputs(3))
    good = fit(WrongRows())
    assert good.sample(3).shape == (3, 43) and good.latent_moments(inputs(3))[1].isfinite().all()
