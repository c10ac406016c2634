"""Every structure and verb on CUDA against the CPU: `pytest -m gpu` where there is a GPU.

The same bodies run here on the CPU, on one small case, so that they are known to be right before a GPU sees them.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.jacobian import gram as engine
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import linalg, tuning
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.meter import PeakMemory
from ntk_laplace.structures import structure_named, structure_names
from reference import relative_error
from registry import LIKELIHOODS, NETWORKS, fresh, targets
from registry_cases import offered
from verbs import MORE, VERBS, answers, gap, moved

pytestmark = [
    pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning"),
    # torch's own, where the first product of a process is one of a backward pass
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")], id="cuda"
)
CPU = pytest.param("cpu", id="cpu")
DEVICES = [CPU, CUDA]
ASKED = MORE | VERBS
DRAWN = {"glm", "left out density", "annealed"}
"""Verbs that average draws, of which each device has its own."""
CLASSES = [name for name in NETWORKS if "categorical" in offered(name)]
WORK = [pytest.param("deep_mlp", *CPU.values, id="deep_mlp-cpu")]
WORK += [pytest.param(name, *CUDA.values, marks=CUDA.marks, id=f"{name}-cuda") for name in CLASSES]


@pytest.mark.parametrize("structure", structure_names())
@pytest.mark.parametrize("device", DEVICES)
def test_a_generator_of_the_cpu_serves_every_device(structure, device):
    """The same draws of weights and of functions as on the CPU, up to rounding."""
    case = fresh("deep_mlp")
    data = case.x, targets(LIKELIHOODS["categorical"], case)
    posterior = ntkl.laplace(case.network, data, ntkl.Categorical(), structure=structure)
    for x in (None, case.x_new):
        here = posterior.to("cpu").sample(4, x, generator=torch.Generator().manual_seed(1))
        there = posterior.to(device).sample(4, x, generator=torch.Generator().manual_seed(1))
        assert there.device.type == device and relative_error(there.cpu(), here) < 1e-5


@pytest.mark.parametrize("structure", structure_names())
@pytest.mark.parametrize(("network", "device"), WORK)
def test_every_verb_of_every_structure(network, device, structure):
    """Answers on the device are those on the CPU, and what one refuses the other refuses."""
    case = fresh(network)
    y = targets(LIKELIHOODS["categorical"], case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = answers(case, y, structure, torch.device("cpu"), ASKED)
        # on the same device only what draws can differ
        again = ASKED if device != "cpu" else {verb: ask for verb, ask in ASKED.items() if verb in DRAWN}
        there = {**here, **answers(case, y, structure, torch.device(device), again)}
    assert sum(not isinstance(value, str) for value in here.values()) >= len(ASKED) // 2, here
    gaps = {verb: gap(here[verb], there[verb]) for verb in ASKED}
    exact = 1e-5 if hasattr(structure_named(structure), "relative_error") else 1e-7  # conjugate gradients stop early
    limits = {verb: 0.2 if verb in DRAWN else 1e-3 if verb == "float32" else exact for verb in ASKED}
    assert not {verb: own for verb, own in gaps.items() if isinstance(own, str) or not own <= limits[verb]}


@pytest.mark.parametrize("device", DEVICES)
def test_residuals_of_neighbors_are_as_alike(device):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, n, generator=generator).double() for n in (3, 1))
    y = y + 9.0 * torch.sin(2.5 * x[:, 1:2])  # a wave along one of them, beside another that is known
    network, found = torch.nn.Sequential(ntkl.FourierFeatures([(0, 3.0)]), torch.nn.Linear(5, 1)).double(), []
    for name in ("cpu", device):
        data = x.to(name), y.to(name)
        posterior = ntkl.laplace(network.to(name), data, ntkl.Gaussian(1.0), ntkl.GaussianPrior(groups="input"))
        found.append(posterior.lack_of_fit())
    assert found[1].deviations == pytest.approx(found[0].deviations, rel=1e-7) and found[0].left_out
    assert found[0].input == 1 and found[1].period == pytest.approx(found[0].period, rel=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("likelihood", ["gaussian", "classes"])
def test_the_network_moves_to_the_same_optimum(likelihood, device):
    assert gap(*(moved(likelihood, torch.device(name)) for name in ("cpu", device))) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
def test_factorizations_solves_and_inverses(device, monkeypatch):
    """The square by torch's routine, the triangle by panels that are cut small, against float64 on the CPU."""
    for name in ("PANEL_ROWS", "PANEL_DEVICE_ROWS"):
        monkeypatch.setattr(tuning, name, 100)
    monkeypatch.setattr(tuning, "SOLVE_ROWS", 30)
    monkeypatch.setattr(tuning, "INVERSE_COLUMNS", 60)
    root = torch.randn(300, 400, dtype=torch.float64)
    matrix, right = root @ root.T / 400 + torch.eye(300), torch.randn(300, 3, dtype=torch.float64)
    inverse = torch.linalg.inv(matrix)
    for dtype, limit in ((torch.float64, 1e-11), (torch.float32, 1e-3)):
        own, b = matrix.to(device, dtype), right.to(device, dtype)
        triangle = LowerTriangle.empty(300, 4, own)
        for panel in triangle.panels:
            panel.copy_(own[panel.shape[1] - panel.shape[0] : panel.shape[1], : panel.shape[1]])
        triangle.cholesky_()
        assert len(triangle.panels) == 3
        assert relative_error(linalg.cholesky_(own.clone()).tril().cpu(), torch.linalg.cholesky(matrix)) < limit
        assert relative_error(triangle.to_dense().cpu(), torch.linalg.cholesky(matrix)) < limit
        assert relative_error(triangle.log_det().cpu(), torch.logdet(matrix)) < limit
        assert relative_error(triangle.solve(b).cpu(), inverse @ right) < limit
        assert relative_error(triangle.inverse().cpu(), inverse) < limit
        blocks = torch.stack([inverse[i : i + 4, i : i + 4] for i in range(0, 300, 4)])
        assert relative_error(triangle.inverse_diagonal(4).cpu(), blocks) < limit


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_factorizations(device, monkeypatch):
    """No second matrix: neither for torch's routine in place, nor for the triangle and the diagonal of its inverse."""
    n = 8000 if device == "cuda" else 2000
    matrix = torch.eye(n, dtype=torch.float64, device=device).add_(1e-4)
    for name in ("PANEL_ROWS", "PANEL_DEVICE_ROWS"):
        monkeypatch.setattr(tuning, name, n // 10)
    triangle = LowerTriangle.of(matrix.clone()).cholesky_()
    linalg.cholesky_by_torch_(matrix[:500, :500].clone())
    triangle.trailing(n // 2).inverse_diagonal(10)
    with PeakMemory(matrix.device) as square:
        linalg.cholesky_by_torch_(matrix)
    with PeakMemory(matrix.device) as diagonal:
        triangle.inverse_diagonal(10)
    assert square.bytes < 0.4 * matrix.nbytes and diagonal.bytes < 0.6 * matrix.nbytes


@pytest.mark.parametrize("device", DEVICES)
def test_gram_tiles_of_a_device(device, monkeypatch):
    """Tiles and panels of the device's sizes, cut small, are the whole matrix of the CPU."""
    case = fresh("cnn_groups")
    delta = {key: torch.full((1,), 0.5 + i).double() for i, key in enumerate(case.parameters)}
    want = engine.gram(JacobianPass(Network(case.network), torch.float64).rows(case.x), delta)
    rows = JacobianPass(Network(case.network.to(device)), torch.float64).rows(case.x.to(device))
    own = {key: value.to(device) for key, value in delta.items()}
    for name in ("PANEL_ROWS", "PANEL_DEVICE_ROWS", "TILE_ROWS", "TILE_DEVICE_ROWS"):
        monkeypatch.setattr(tuning, name, 6)
    assert relative_error(engine.gram_lower(rows, own).to_dense().cpu(), want.tril()) < 1e-10
    assert relative_error(engine.gram(rows, own).cpu(), want) < 1e-10


@pytest.mark.parametrize(("device", "setting"), [("cpu", "bf16"), pytest.param("cuda", "tf32", marks=CUDA.marks)])
def test_fewer_digits_are_refused_at_the_fit(device, setting):
    """And allowed in float64, which no setting rounds."""
    case = fresh("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case).to(device)
    backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
    before = backend.matmul.fp32_precision
    try:
        backend.matmul.fp32_precision = setting
        for structure in ("gp", "full"):
            model = case.network.to(device), (case.x.to(device), y), LIKELIHOODS["categorical"].build()
            with pytest.raises(ntkl.UnsupportedError, match=f"{device}.*{setting}"):
                ntkl.laplace(*model, structure=structure, dtype=torch.float32)
            assert ntkl.laplace(*model, structure=structure).log_marginal_likelihood().isfinite()
        assert backend.matmul.fp32_precision == setting
    finally:
        backend.matmul.fp32_precision = before
