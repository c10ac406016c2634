"""The import order of the packages: data flow from network to explanation, and imports only point backwards.

Read from the source with ``ast``: imports in functions and imports for annotations alone count as well. There is one
exception: a method `plot` of a result imports the function of ntk_laplace.plotting that draws it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ntk_laplace as ntkl

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ntk_laplace"

# Each line is a package or module, or several that are independent; each imports from earlier lines only.
# A package with several lines stands for its modules that have none of their own.
ORDER = [
    ["errors", "runtime.tuning"],
    ["runtime", "runtime.serialization"],
    ["model.data"],
    ["model.network"],
    ["model.likelihoods", "model.priors"],
    ["model", "model.predictive", "jacobian"],
    ["model.calibration"],
    ["jacobian.contractions"],
    ["jacobian.gram"],
    ["curvature"],
    ["structures.points"],
    ["structures"],
    ["structures.evidence", "structures.what_if"],
    ["structures.bounds", "structures.elbo"],
    ["posterior.estimates", "posterior.explain", "posterior.hyperparameters", "posterior.scores"],
    ["posterior.calibrate", "posterior.conformal"],
    ["posterior"],
    ["posterior.fit", "gp.ntk"],
    ["training", "variational_inference", "gp", "selection"],
    ["metrics"],
    ["plotting", "tools", "tools.report"],
    ["tools.comparison", "tools.explorer", "tools.active", "tools.attribution", "tools.estimators"],
    ["tools.botorch", "tools.callbacks"],
    [""],  # ntk_laplace/__init__.py; later packages call the public interface
    ["tools.demo"],
    ["tools.cli"],
    ["__main__"],
]
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, parsed once; tests do not change them."""
    return tuple(ast.walk(ast.parse(path.read_text(), str(path))))


def for_annotations(path: Path) -> set[ast.stmt]:
    """Imports below ``if TYPE_CHECKING``."""
    return {node for one in nodes(path) if isinstance(one, ast.If) and getattr(one.test, "id", None) == "TYPE_CHECKING"
            for node in one.body}


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of the package that a file imports, with the line (``from a import b`` is ``a.b`` if that is one)."""
    drawing = {node for one in nodes(path) if isinstance(one, ast.ClassDef)
               for method in one.body if isinstance(method, ast.FunctionDef) and method.name == "plot"
               for node in method.body if isinstance(node, ast.ImportFrom) and node.module == "ntk_laplace.plotting"}
    for node in nodes(path):
        if node in drawing:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == PACKAGE.name:
                yield name, node.lineno


def package_of(module: str) -> str:
    """The longest name in ORDER that begins the module's name below ntk_laplace; empty for ntk_laplace itself."""
    below = module.split(".")[1:]
    names = (".".join(below[:length]) for length in range(len(below), 0, -1))
    return next((name for name in names if name in LEVEL), below[0] if below else "")


def test_every_package_is_in_the_order() -> None:
    packages = {package_of(module) for module in MODULES}
    missing, unknown = packages - set(LEVEL), set(LEVEL) - packages
    assert packages == set(LEVEL), f"not in ORDER: {missing}; in ORDER without a module: {unknown}"


def test_the_top_level_has_few_packages() -> None:
    """Beside the errors, and the two files that Python itself asks for."""
    entries = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert len(entries - {"__init__", "__main__", "errors"}) <= 13, sorted(entries)


def test_imports_point_backwards() -> None:
    wrong = []
    for module, path in MODULES.items():
        here = package_of(module)
        for name, line in imported(path):
            there = package_of(name)
            if there != here and LEVEL[there] >= LEVEL[here]:
                wrong.append(f"{module}:{line} imports {name}, which is not earlier in ORDER")
    assert wrong == []


@pytest.mark.slow
def test_no_circles_between_modules() -> None:
    arrows = {module: {name for name, _ in imported(path)} for module, path in MODULES.items()}
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> None:
        assert module not in trail, "import circle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for name in arrows.get(module, ()):
            if name != module:
                walk(name, [*trail, module])
        done.add(module)

    for module in arrows:
        walk(module, [])


def test_only_plotting_draws() -> None:
    """Elsewhere matplotlib is a name in annotations."""
    for module, path in MODULES.items():
        for node in nodes(path):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in for_annotations(path):
                modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                if any(name.partition(".")[0] == "matplotlib" for name in modules):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert package_of(module) == "plotting", f"{where} imports matplotlib"


def test_no_table_of_likelihoods() -> None:
    """Callers ask a likelihood what it is able to do; saving and the command line look classes up in the registry."""
    names = {"Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Poisson"}
    for name in ("structures.checkpoint", "tools.comparison.models", "gp.likelihood", "tools.explorer.gather",
                 "tools.cli.options", "tools.cli.model", "tools.cli.likelihood"):
        tree = ast.parse(MODULES[f"ntk_laplace.{name}"].read_text())
        used = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(tree)}
        assert not used & names, f"{name} names {used & names}"


def test_tools_are_imported_by_their_public_names() -> None:
    for name in ("active", "attribution", "botorch", "callbacks"):
        assert importlib.import_module(f"ntk_laplace.{name}") is getattr(ntkl, name)


def test_the_table_of_contents_only_names_things() -> None:
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    for node in body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = bool(targets) and all(isinstance(t, ast.Name) and t.id.startswith("__") for t in targets)
        imports = isinstance(node, (ast.Import, ast.ImportFrom))
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        lazy = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"  # imports on first use
        aliases = ast.unparse(node).startswith("sys.modules.update")
        assert docstring or names or imports or typing or lazy or aliases, f"line {node.lineno} does something"


def test_all_documented_attributes_exist() -> None:
    import ntk_laplace

    missing = [name for name in ntk_laplace.__all__ if not hasattr(ntk_laplace, name)]
    assert missing == []


@pytest.mark.slow
def test_import_leaves_the_process_as_it_was() -> None:
    """No setting of torch, GPyTorch, NumPy or warnings moves, no random number is drawn; pictures need no pyplot."""
    script = """
import random, sys, warnings
import gpytorch, numpy, torch

def state():
    return (
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed(),
        torch.get_rng_state().sum().item(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(),
        gpytorch.settings.max_cholesky_size.value(), gpytorch.settings.cholesky_max_tries.value(),
        str(numpy.geterr()), numpy.random.get_state()[1].sum(), random.getstate()[1][-1], tuple(warnings.filters),
    )

before = state()
import ntk_laplace
assert state() == before, (before, state())
assert "matplotlib.pyplot" not in sys.modules, "importing the library imports pyplot"
assert not {"lightning", "transformers"} & set(sys.modules), "importing the library imports a trainer"
assert "pandas" not in sys.modules, "importing the library imports what only tables need"
assert "scipy" not in sys.modules, "importing the library imports what only some verbs need, for a second"
import ntk_laplace.plotting, ntk_laplace.tools.report
assert "matplotlib.pyplot" not in sys.modules, "importing what draws imports pyplot"
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.slow
def test_the_first_import_is_without_warnings_of_scripted_functions() -> None:
    script = """
import warnings
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import ntk_laplace
told = [str(one.message) for one in found if "torch.jit.script" in str(one.message)]
assert not told, told
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.slow
def test_lint() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_capability_is_asked_by_the_name_of_a_structure() -> None:
    """A structure declares what it can do: no comparison of anything with a structure's name, "auto" aside."""
    names = set(ntkl.structures.structure_names())
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                given = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                assert not names & given, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


MAKING = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
}


def test_every_tensor_names_its_device() -> None:
    """torch's default device is the caller's, and need not be that of what a tensor meets."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKING}:
                named = any(keyword.arg == "device" for keyword in node.keywords)
                assert named, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


# torch's own, without a public counterpart
FOREIGN = {
    "_C", "_input_metadata", "_modules", "_backward_hooks", "_backward_pre_hooks", "_version",
    "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported", "_interleaved",
}


def test_no_private_attribute_of_another_module() -> None:
    for path in FILES:
        own = {node.name for node in nodes(path) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
        own |= {node.target.id for node in nodes(path)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                known = node.attr in own or node.attr in FOREIGN
                assert known, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
