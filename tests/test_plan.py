"""Forecasts: what the posterior stores to the byte, and a fit that is refused exactly where the plan says so."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import ntk_laplace as ntkl
from live_bytes import LiveBytes
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import Reducer
from ntk_laplace.structures import Auto, structure_names
from ntk_laplace.structures.forecast import Forecast, Problem, Work
from ntk_laplace.tools.cli import main
from processes import on_processes
from unregistered import Eigen

MIB, QUIET = 2**20, ntkl.Settings(progress=False)
ntkl.structures.REGISTERED.pop(Eigen.name, None)  # other tests go through all registered structures
EXACT = ["gp", "full", ntkl.Iterative(rank=8), ntkl.Nystrom(rank=8)]
SUMMED = ["kfac", "ekfac", "inf", "diag"]
pytestmark = pytest.mark.filterwarnings("ignore:INF's low-rank part", "ignore:the evidence's standard error")


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not tested."""
    monkeypatch.setattr(tuning, "PROBED_ORDER", 16)
    monkeypatch.setitem(ntkl.structures.REGISTERED, Eigen.name, Eigen)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def conv() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(),
                         nn.Linear(12, 3)).double()


def words() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(20, 3)).double()


def problem(make: Any, n: int = 30) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    if make is words:
        x = torch.randint(0, 6, (n, 5), generator=generator)
    else:
        x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return make().eval(), (x, torch.arange(n) % 3)


def of(make: Any, structure: Any, **settings: Any) -> tuple[ntkl.Posterior, ntkl.StructurePlan]:
    """The posterior, and the plan's row."""
    network, data = problem(make)
    own = replace(QUIET, **settings)
    (row,) = ntkl.plan(network, data, ntkl.Categorical(), structures=[structure], settings=own).rows
    return ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, settings=own), row


# --- what is stored, to the byte


@pytest.mark.parametrize("make", [mlp, conv, words])
def test_function_space_stores_what_was_forecast(make: Any) -> None:
    posterior, row = of(make, "gp")
    precision = posterior.fitted.function_space
    assert row.stored == {"B": precision.factor.nbytes, "rows of J": precision.rows.nbytes,
                          "rows of SᵀJ": precision.weighted.nbytes, "S": precision.root.nbytes}


def test_weight_space_stores_two_matrices() -> None:
    posterior, row = of(mlp, "full")
    structure: Any = posterior.fitted.structure
    factor: Any = posterior.fitted.precision
    assert row.stored == {"JᵀΛJ": structure.at.sums["ggn"].nbytes, "factor of H": factor.factor.nbytes}


@pytest.mark.parametrize("structure", EXACT[2:], ids=str)
@pytest.mark.parametrize("make", [mlp, conv])
def test_a_sketch_stores_its_vectors_and_rows(structure: Any, make: Any) -> None:
    posterior, row = of(make, structure)
    posterior.log_marginal_likelihood()
    found: Any = posterior.fitted.structure
    sketch = found.at.sketch
    precision: Any = posterior.fitted.precision
    assert getattr(precision, "base", precision).factor is sketch.factor
    vectors = sketch.factor.nbytes + (0 if sketch.tests is None else sketch.tests.nbytes)
    assert row.stored == {"sketch": vectors, "rows of J": sum(rows.nbytes for rows in found.rows)}
    assert row.note == "rank 8, rows kept"


@pytest.mark.parametrize("structure", SUMMED)
@pytest.mark.parametrize("make", [mlp, conv, words])
def test_sums_and_eigenvectors(structure: str, make: Any) -> None:
    posterior, row = of(make, structure)
    gathered = posterior.fitted.structure.at.accumulated  # type: ignore[attr-defined]
    sums = sum(t.nbytes for summary in gathered.summaries for name, t in summary.sums.items() if name != "count")
    precision: Any = posterior.fitted.precision
    bases = [part.basis for part in precision.algebras] if structure != "inf" else []
    bases += [eigenbasis.basis for eigenbasis in gathered.eigenbases] if structure == "inf" else []
    vectors = sum(t.nbytes for basis in bases for t in (basis.left, basis.right) if t is not None)
    assert row.stored["sums"] == sums
    assert structure == "inf" or row.stored["eigenvectors"] == vectors


# --- the peak


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 400), nn.Tanh(), nn.Linear(400, 250), nn.Tanh(), nn.Linear(250, 6))


def shared() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 20, 3, padding=1), nn.Tanh(),
                         nn.Conv2d(20, 20, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(400, 6))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 90), nn.Tanh(), nn.Linear(90, 60), nn.Tanh(), nn.Linear(60, 6))


def slim() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 6))


SMALL_BUFFERS = {"WORKING_SET_BYTES": 2 * MIB, "GRADIENT_BYTES": MIB, "WRITTEN_BYTES": MIB, "CHUNK_BYTES": MIB // 4,
                 "PRODUCT_BYTES": 4 * MIB, "PRODUCT_COLUMNS": 512, "AVERAGED_OUTPUTS": 2**14,
                 "FULL_ROWS_BYTES": 4 * MIB, "COVARIANCE_BYTES": 4 * MIB}
PEAKS = [*((name, make) for name in SUMMED for make in (wide, shared)), ("full", slim), ("gp", narrow), ("gp", wide),
         (ntkl.Iterative(rank=64), narrow), (ntkl.Nystrom(rank=64), narrow)]
SHARES = [("gp", narrow), ("gp", wide), ("kfac", shared), ("ekfac", wide), (ntkl.Nystrom(rank=64), narrow)]


@contextmanager
def small_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SMALL_BUFFERS.items():
            patch.setattr(tuning, name, size)
        yield


def six_classes(make: Any) -> tuple[nn.Module, tuple[Tensor, Tensor], ntkl.GaussianPrior]:
    torch.manual_seed(0)
    data = torch.randn(150, 20, dtype=torch.float64), torch.arange(150) % 6
    return make().double(), data, ntkl.GaussianPrior(300.0)


def planned(structure: Any, make: Any, processes: int = 1) -> ntkl.StructurePlan:
    network, data, prior = six_classes(make)
    with small_buffers():
        return ntkl.plan(network, data, ntkl.Categorical(), prior, [structure], processes=processes,
                         settings=QUIET).rows[0]


def live(structure: Any, make: Any, settings: ntkl.Settings = QUIET) -> int:
    """Most bytes of the tensors that are alive in a fit, its evidence and predictions of several chunks of points."""
    network, data, prior = six_classes(make)
    with small_buffers(), LiveBytes() as found, torch.no_grad():
        posterior = ntkl.laplace(network, data, ntkl.Categorical(), prior, structure, settings=settings)
        posterior.log_marginal_likelihood()
        posterior.predict(data[0][:50])
    return found.peak


live_alone = functools.cache(live)


@pytest.mark.parametrize(("structure", "make"), PEAKS, ids=[f"{one}-{make.__name__}" for one, make in PEAKS])
def test_the_peak_of_a_fit_and_predictions(structure: Any, make: Any) -> None:
    """Within 20 % of the tensors that are alive."""
    assert planned(structure, make).memory == pytest.approx(live_alone(structure, make), rel=0.2)


def live_shares(reducer: Reducer) -> list[int]:
    return [live(*share, replace(QUIET, reducer=reducer)) for share in SHARES]


@pytest.mark.slow
def test_the_peak_of_each_of_two_processes(tmp_path: Path) -> None:
    """Within 20 %; of function space, whose B and solves are shared, it is less than in one process."""
    forecasts = [planned(structure, make, 2).shared_memory for structure, make in SHARES]
    found = on_processes(2, live_shares, tmp_path)
    assert found == [pytest.approx(forecasts, rel=0.2)] * 2, SHARES
    assert max(peaks[0] for peaks in found) < 0.8 * live_alone(*SHARES[0])


def live_and_planned(likelihood: ntkl.Likelihood, structure: Any, outputs: int, y: Tensor) -> tuple[int, int]:
    """Bytes of the tensors that are alive in a fit, its evidence and predictions of its inputs, and the plan's."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    x, prior = torch.randn(len(y), 5, dtype=torch.float64), ntkl.GaussianPrior(300.0)
    (row,) = ntkl.plan(network, (x, y), likelihood, prior, [structure], settings=QUIET).rows
    with LiveBytes() as found, torch.no_grad():
        posterior = ntkl.laplace(network, (x, y), likelihood, prior, structure, settings=QUIET)
        posterior.log_marginal_likelihood()
        posterior.predict(x)
    assert row.memory is not None
    return found.peak, row.memory


@pytest.mark.parametrize("structure", [*EXACT, *SUMMED], ids=str)
@pytest.mark.parametrize(("classes", "n"), [(3, 40), (3, 400), (45, 45)])
def test_predictions_of_classes_take_what_was_forecast(structure: Any, classes: int, n: int) -> None:
    """Where samples of f are most of the peak: for small problems it is small."""
    found, forecast = live_and_planned(ntkl.Categorical(), structure, classes, torch.arange(n) % classes)
    assert forecast == pytest.approx(found, rel=0.2)
    assert n > 40 or forecast < 6 * MIB


@pytest.mark.parametrize(
    ("likelihood", "outputs", "n"),
    [(ntkl.Gaussian(0.1), 70, 80), (ntkl.Bernoulli(), 1, 400), (ntkl.Bernoulli(), 8, 600), (ntkl.Poisson(), 2, 100),
     (ntkl.HeteroscedasticGaussian(), 2, 300), (ntkl.Tempered(ntkl.Categorical(), 2.0), 3, 100)],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value))
def test_predictions_of_every_likelihood_take_what_was_forecast(likelihood: Any, outputs: int, n: int) -> None:
    """Of covariances in closed form, averages, or mixtures, which keep the samples of all inputs."""
    columns = likelihood.num_responses(outputs)
    y = torch.arange(n * columns).view(n, columns) % 2 + 0.0
    y = torch.arange(n) % 3 if isinstance(likelihood, ntkl.Tempered) else y
    found, forecast = live_and_planned(likelihood, "diag", outputs, y)
    assert forecast == pytest.approx(found, rel=0.2)


def test_predictions_at_positions_are_averaged_position_by_position() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    data = torch.randn(40, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (40, 4, 4))
    likelihood = ntkl.Everywhere(ntkl.Categorical(), (4, 4))
    (row,) = ntkl.plan(network, data, likelihood, structures=["diag"], settings=QUIET).rows
    with LiveBytes() as found, torch.no_grad():
        ntkl.laplace(network, data, likelihood, structure="diag", settings=QUIET).predict(data[0])
    assert row.memory == pytest.approx(found.peak, rel=0.2)


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (5, 4)), nn.Linear(4, 16), layer, nn.Flatten(), nn.Linear(80, 6))


def peak(make: Any, structure: str, n: int) -> int:
    """Of a fit."""
    torch.manual_seed(0)
    network, x, y = make().double(), torch.randn(n, 20, dtype=torch.float64), torch.arange(n) % 6
    with LiveBytes() as live, torch.no_grad():
        ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=structure, settings=QUIET)
    return live.peak


@pytest.mark.parametrize("structure", SUMMED)
@pytest.mark.parametrize("make", [shared, attention])
def test_a_batch_is_freed_before_the_next(make: Any, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "WRITTEN_BYTES", MIB // 4)
    monkeypatch.setattr(tuning, "WORKING_SET_BYTES", 2 * MIB)  # less than 100 examples
    one, several = (peak(make, structure, n) for n in (100, 200))
    assert several < 1.25 * one  # beside the sums


@pytest.mark.parametrize("structure", ["ekfac", "diag"])
def test_a_panel_is_freed_before_the_next(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are written out, and nothing else of their size."""
    peaks = []
    for size in (MIB, 3 * MIB):
        monkeypatch.setattr(tuning, "WRITTEN_BYTES", size)
        peaks.append(peak(shared, structure, 40))
    assert 0.5 * MIB < peaks[1] - peaks[0] < 2.5 * MIB


def test_sums_that_nothing_scales_are_not_copied() -> None:
    network, data = problem(conv)
    fitted = ntkl.laplace(network, data, ntkl.Categorical(), structure="ekfac", settings=QUIET).fitted
    once, again = (fitted.structure.summaries(fitted.model) for _ in range(2))
    assert all(again[i].sums[name] is value for i, one in enumerate(once) for name, value in one.sums.items())


# --- the refusal and the plan agree


@pytest.mark.parametrize("structure", [*EXACT, *SUMMED], ids=str)
def test_a_fit_is_refused_where_the_plan_says_so(structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    required: list[int] = []
    plain = Forecast.required.fget  # type: ignore[attr-defined]

    def heard(forecast: Forecast) -> int:
        required.append(plain(forecast))
        return required[-1]

    monkeypatch.setattr(Forecast, "required", property(heard))
    of(conv, structure)
    least = required[0]
    assert of(conv, structure, memory_budget=least)[1].fits
    network, data = problem(conv)
    less = replace(QUIET, memory_budget=least - 1)
    assert not ntkl.plan(network, data, ntkl.Categorical(), structures=[structure], settings=less).rows[0].fits
    with pytest.raises(ntkl.MemoryBudgetError):
        ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, settings=less)


def test_auto_takes_what_fits() -> None:
    network, data = problem(mlp)  # N R = 60, P = 66

    def chosen(budget: float) -> ntkl.Posterior:
        return ntkl.laplace(network, data, ntkl.Categorical(), structure="auto",
                            settings=replace(QUIET, memory_budget=int(budget)))

    needs = {row.structure: sum(row.stored.values()) for row in
             ntkl.plan(network, data, ntkl.Categorical(), structures=["gp", "full"], settings=QUIET).rows}
    assert needs["gp"] < needs["full"]
    assert chosen(needs["gp"]).structure == "gp"
    small = problem(mlp, 200)
    found = ntkl.laplace(*small, ntkl.Categorical(), structure="auto", settings=replace(QUIET, memory_budget=10**6))
    assert found.structure == "full"
    neither = chosen(needs["gp"] - 1)
    assert neither.structure == "iterative" and "factors neither" in neither.reason and "'full'" in neither.reason
    wide = problem(lambda: nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 3)).double())
    larger = ntkl.laplace(*wide, ntkl.Categorical(), structure="auto", settings=QUIET)
    assert larger.structure == "full" and "smaller" in larger.reason


def test_auto_takes_the_larger_matrix_if_only_that_fits() -> None:
    """Function space stores S and rows too: with many outputs it may need more than the larger matrix."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 30), nn.Tanh()).double()  # no last linear layer
    data = torch.randn(2, 1, dtype=torch.float64), torch.arange(2)  # N R = 58, P = 60
    rows = ntkl.plan(network, data, ntkl.Categorical(), structures=["gp", "full"], settings=QUIET).rows
    gp, full = (sum(row.stored.values()) for row in rows)
    assert full == 2 * 60**2 * 8 < gp
    found = ntkl.laplace(network, data, ntkl.Categorical(), structure="auto",
                         settings=replace(QUIET, memory_budget=full))
    assert found.structure == "full" and "factors the larger matrix" in found.reason


def test_auto_takes_no_matrix_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure without a matrix is taken where it needs far fewer operations; the end of a training refuses."""
    network, data = problem(mlp, 900)  # P = 66
    monkeypatch.setattr(tuning, "EXACT_OPERATIONS", 1e6)

    def chosen(faster: float) -> ntkl.Posterior:
        monkeypatch.setattr(tuning, "FASTER", faster)
        return ntkl.laplace(network, data, ntkl.Categorical(), structure="auto", settings=QUIET)

    assert chosen(1.0).structure == "full"  # products with these rows take longer
    found = chosen(0.01)
    assert found.structure == "iterative" and "'full' would take 8e+06 operations, so" in found.reason
    model = Auto(None, 0.125)
    with pytest.raises(ntkl.UnsupportedError, match=r"at most 1e\+05 operations; got \S+ of 'full'"):
        ntkl.laplace(network, data, ntkl.Categorical(), structure=model, settings=QUIET)  # type: ignore[arg-type]


def test_auto_computes_no_spectrum_of_examples_with_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of two examples alone would take longer, and more memory, than a fit of few parameters."""
    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.linspace(1.0, 2.0, 1_100)

    monkeypatch.setattr(tuning, "EXACT_OPERATIONS", 1.0)
    monkeypatch.setattr(tuning, "FASTER", 1e-9)
    data = torch.ones(2, 1), torch.ones(2, 1_100)
    assert ntkl.laplace(Wide(1, 1), data, ntkl.Gaussian(), structure="auto", settings=QUIET).structure == "full"


def test_auto_samples_noise_of_each_point_from_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, _) = problem(mlp)
    monkeypatch.setattr(tuning, "EXACT_OPERATIONS", 1.0)
    monkeypatch.setattr(tuning, "FASTER", 1e-9)

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return zip(x, x[:, :3], strict=True)

    likelihood, settings = ntkl.Gaussian(0.1 + x[:, 0].square()), replace(QUIET, batch_size=10)
    found = ntkl.laplace(network, Stream(), likelihood, structure="auto", settings=settings)
    assert found.structure == "iterative"


# --- formulas


class Steps(nn.Module):
    """One layer used several times, with a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.layer = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(self.frozen(x) * self.scale))
        return x


@pytest.mark.parametrize("name", ["mlp", "steps", "convolution", "normed"])
def test_the_graph_of_a_forward_pass_is_what_torch_saves(name: str) -> None:
    """By torch's hooks on a batch, without weights and buffers."""
    torch.manual_seed(0)
    layers = {"mlp": lambda: nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), "steps": Steps,
              "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(),
                                                   nn.Flatten(), nn.Linear(24, 3)),
              "normed": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 30)), nn.Tanh(),
                                              nn.Linear(30, 3))}  # converted weights do not grow with the examples
    network, x = layers[name]().double(), torch.randn(40, 8).double()
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}

    def saved_bytes(few: Tensor) -> int:
        saved = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = network(few.clone().requires_grad_())
            return sum(saved.values()) * bool(out.requires_grad)

    posterior = ntkl.laplace(network, (x, network(x).detach()), ntkl.Gaussian(0.1), structure="diag", settings=QUIET)
    found = posterior.fitted.model.jacobian_pass.sizes.graph_bytes
    assert found == pytest.approx((saved_bytes(x) - saved_bytes(x[:20])) / 20, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_has_its_graph_and_rows_of_both_types_while_they_are_converted(dtype: torch.dtype) -> None:
    network, (x, y) = problem(mlp, 30)
    data = x.to(dtype), y
    model = ntkl.laplace(network.to(dtype), data, ntkl.Categorical(), structure="diag", settings=QUIET).fitted.model
    found = Problem(model, 30, model.jacobian_pass.rows(data[0]))
    assert found.sample.dtype == torch.float64
    gradients = 3 * (7 + 3) * dtype.itemsize  # C output gradients of each layer; the cotangents are those of the last
    converted = 3 * (7 + 3) * 8 if dtype == torch.float32 else 0
    assert found.batch_bytes == 30 * (gradients + converted + 2 * model.jacobian_pass.sizes.graph_bytes)


class _Doubled(torch.autograd.Function):
    """Saves a constant that backward never reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(constant)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return 2 * gradient, None


class Changed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        constant = torch.ones(3)
        out = _Doubled.apply(self.layer(x), constant)
        constant.add_(1.0)
        return out


def test_what_a_graph_has_saved_may_have_changed_since() -> None:
    """It is only a size: nothing that backward does not read is refused."""
    torch.manual_seed(0)
    network, x = Changed(), torch.randn(20, 8).double()
    plain = copy.deepcopy(network.layer)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2.0)
    values = []
    for one, precision in ((network, 4.0), (plain, 1.0)):  # f = 2Wx: twice the rows at a quarter of the variance
        prior = ntkl.GaussianPrior(precision)
        values.append(float(ntkl.laplace(one, (x, x[:, :2]), ntkl.Gaussian(0.1), prior, settings=QUIET).log_det()))
    assert values[0] == pytest.approx(values[1], rel=1e-10)


@pytest.mark.parametrize("structure", ["kfac", "diag", "full"])
def test_batches_keep_within_the_budget(structure: str) -> None:
    """Half of it: output gradients, rows in the algebra's type, and the graph; the numbers are the same."""
    network, data = problem(mlp, 200)
    found = {}
    for budget in (None, 2**20, 2**16):
        settings = replace(QUIET, memory_budget=budget)
        if budget != 2**16 or structure != "full":
            found[budget] = ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, settings=settings)
    values = {budget: float(one.log_marginal_likelihood()) for budget, one in found.items()}
    assert max(values.values()) - min(values.values()) < 1e-9 * abs(values[None])
    counts = {budget: one.fitted.model.jacobian_pass.sizes.batch()[0] for budget, one in found.items()}
    for budget, count in counts.items():
        if budget is not None:
            own = found[budget].fitted.model.jacobian_pass.sizes
            gradients = sum(layer.out_features for layer in network if isinstance(layer, nn.Linear)) * 8
            each = 2 * gradients * found[budget].num_outputs + own.graph_bytes
            assert 1 <= count < counts[None] and count * each <= budget / 2 < 1.01 * (count + 1) * each


def test_shares_of_processes() -> None:
    network, data = problem(mlp, 200)
    built_in = [name for name, spec in ntkl.structures.REGISTERED.items() if spec.__module__.startswith("ntk_laplace")]
    names = [name for name in structure_names() if name in built_in]  # others need not make a forecast
    alone, shared = (ntkl.plan(network, data, ntkl.Categorical(), structures=names, processes=k, settings=QUIET)
                     for k in (1, 4))
    for one, other in zip(alone.rows, shared.rows, strict=True):
        assert other.memory is not None and other.shared_memory is not None and other.communication is not None
        assert other.shared_memory <= other.memory == one.memory and one.shared_memory is None
        assert other.shared_fits and other.communication > 0
    gp = shared["gp"]
    assert gp.memory is not None and gp.shared_memory is not None
    # B is dealt to the processes; rows and S are on all of them
    assert sum(gp.stored.values()) - 0.75 * gp.stored["B"] < gp.shared_memory < gp.memory - 0.7 * gp.stored["B"]
    assert "each of 4" in str(shared) and "each of" not in str(alone)


def test_seconds_are_work_over_rates() -> None:
    rates = Work(passes=10.0, products=4.0, matmul=2.0, cholesky=5.0, eigh=8.0)
    work = Work(passes=20.0, products=2.0, matmul=3.0, cholesky=10.0, eigh=2.0)
    assert work.seconds(rates) == 2 + 0.5 + 1.5 + 2 + 0.25
    assert Work().seconds(Work()) == 0.0  # no rate is needed where there is no work


def test_the_spectrum_of_all_examples_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    network, data = problem(mlp)
    seen: list[Problem] = []
    monkeypatch.setattr(ntkl.Nystrom, "forecast", lambda self, problem: seen.append(problem))
    prior = ntkl.GaussianPrior(3.0)
    ntkl.plan(network, data, ntkl.Categorical(), prior, structures=[ntkl.Nystrom()], settings=QUIET)
    posterior = ntkl.laplace(network, data, ntkl.Categorical(), prior, settings=QUIET)
    expected = posterior.fitted.precision.spectrum()
    assert expected is not None and seen[0].spectrum is not None
    torch.testing.assert_close(seen[0].spectrum, expected.flip(0), rtol=1e-9, atol=1e-10)
    assert seen[0].log_joint == pytest.approx(float(posterior.log_joint()), rel=1e-12)


def test_a_sample_shows_the_spectrum_of_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of copies of one example a sample knows everything but their number."""
    network, (x, y) = problem(mlp)
    seen: list[Problem] = []
    monkeypatch.setattr(ntkl.Nystrom, "forecast", lambda self, problem: seen.append(problem))
    monkeypatch.setattr(tuning, "PROBED_ROWS", 10)
    data = x[:1].repeat(40, 1), y[:1].repeat(40)
    ntkl.plan(network, data, ntkl.Categorical(), structures=[ntkl.Nystrom()], settings=QUIET)
    expected = ntkl.laplace(network, data, ntkl.Categorical(), settings=QUIET).fitted.precision.spectrum()
    assert expected is not None and seen[0].spectrum is not None and len(seen[0].spectrum) <= 10 < len(expected)
    exact = expected.flip(0)[: len(seen[0].spectrum)]
    torch.testing.assert_close(seen[0].spectrum, exact, rtol=1e-9, atol=1e-10)


def test_the_rank_follows_the_spectrum() -> None:
    network, data = problem(mlp)
    row = ntkl.plan(network, data, ntkl.Categorical(), structures=[ntkl.Nystrom()], settings=QUIET).rows[0]
    posterior = ntkl.laplace(network, data, ntkl.Categorical(), structure=ntkl.Nystrom(), settings=QUIET)
    assert row.note == "rank 60, rows kept"  # N R = 60 is below the first rank
    assert len(posterior.fitted.structure.at.sketch.factor) <= 60  # type: ignore[attr-defined]


def test_predictions_by_draws_alone_take_no_larger_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FIRST_RANK", 4)
    network, data = problem(mlp)
    found = {}
    for wished in (0.05, 0.2):
        spec = ntkl.Iterative(variance_error=wished, relative_error=0.5)
        row = ntkl.plan(network, data, ntkl.Categorical(), structures=[spec], settings=QUIET).rows[0]
        found[wished] = int(row.note.split(",")[0].removeprefix("rank "))
    assert found[0.2] == 4 < found[0.05]


# --- the table


def test_every_structure_has_a_row_and_outside_ones_say_that_they_do_not_know() -> None:
    network, data = problem(mlp)
    before = copy.deepcopy(network.state_dict())
    likelihood, prior = ntkl.Categorical(), ntkl.GaussianPrior(groups="parameter")
    found = ntkl.plan(network, data, likelihood, prior, settings=QUIET)
    assert [row.structure for row in found.rows] == list(structure_names())
    assert found["eigh"].memory is None and found["eigh"].fits is None and "no forecast" in found["eigh"].note
    assert Eigen().forecast is not None and found["kfac"].note.startswith("refused: expected one prior precision")
    assert (found.num_examples, found.num_outputs, found.num_parameters, found.processes) == (30, 3, 66, 1)
    text, page = str(found), found._repr_html_()
    for row in found.rows:
        assert row.structure in text and f"<td>{row.structure}</td>" in page
    assert max(map(len, text.split("\n"))) <= 100 and "N = 30, C = 3, P = 66" in text and "<script" not in page
    frame = found.to_dataframe()
    assert list(frame["structure"]) == [row.structure for row in found.rows]
    assert json.loads(found.to_json())["rows"][0]["stored"] == found["gp"].stored
    with pytest.raises(KeyError, match="no structure 'kfax'"):
        found["kfax"]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [({"processes": 0}, "processes"), ({"structures": ["auto"]}, "whose cost"), ({"structures": []}, "a list"),
     ({"structures": ["kfax"]}, "structure among")],
)
def test_bad_questions(options: dict[str, Any], words: str) -> None:
    network, data = problem(mlp)
    with pytest.raises(ntkl.NTKLaplaceError, match=words):
        ntkl.plan(network, data, ntkl.Categorical(), settings=QUIET, **options)


def test_the_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    monkeypatch.chdir(tmp_path)
    source = "from torch import nn\n\n\ndef make_network():\n    return nn.Linear(4, 3)\n"
    (tmp_path / "planned_model.py").write_text(source)
    torch.save(nn.Linear(4, 3).state_dict(), "w.pt")
    np.savez("d.npz", X=np.random.default_rng(0).normal(size=(20, 4)), y=np.arange(20) % 3)
    arguments = ["plan", "planned_model.py", "--checkpoint", "w.pt", "--data", "d.npz", "--likelihood", "categorical",
                 "--structures", "gp,kfac", "--processes", "2", "--json", "p.json"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "each of 2" in printed and "kfac" in printed and "full" not in printed
    assert [row["structure"] for row in json.loads((tmp_path / "p.json").read_text())["rows"]] == ["gp", "kfac"]
    assert main([*arguments[:-4], "--memory", "1e-7"]) == 0
    assert "no" in capsys.readouterr().out.split()


@pytest.mark.parametrize("structure", ["ekfac", "inf"])
def test_tokens_of_an_embedding_are_not_its_vocabulary(structure: str) -> None:
    """A second pass over the data has buffers for the rows of a batch's tokens, which the vocabulary does not enter."""
    network = nn.Sequential(nn.Embedding(3000, 8), nn.Flatten(), nn.Linear(96, 10))
    data = torch.arange(480).view(40, 12), torch.arange(40) % 10
    one, two = ntkl.plan(network, data, ntkl.Categorical(), structures=["kfac", structure]).rows
    assert one.memory is not None and two.memory is not None
    assert two.memory < 1.2 * one.memory
