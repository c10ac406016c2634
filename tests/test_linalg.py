"""In-place algebra in blocks of any width, against torch's own; memory that is refused before it is taken."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from ntk_laplace.errors import MemoryBudgetError, NumericalError, UnsupportedError
from ntk_laplace.runtime import linalg, resources, tuning
from ntk_laplace.runtime.lower_triangle import LowerTriangle, require_full_precision
from ntk_laplace.runtime.meter import PeakMemory
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.progress import track
from ntk_laplace.runtime.resources import available_memory, format_bytes, require_memory
from ntk_laplace.runtime.sampling import normal
from reference import relative_error

BLOCKS = [1, 2, 5, 11, 12, 64]
on_linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")


def positive(n: int = 11) -> torch.Tensor:
    root = torch.randn(n, n + 2, dtype=torch.float64)
    return root @ root.T


def spoiled(matrix: torch.Tensor) -> torch.Tensor:
    """The lower triangle, with NaN above it."""
    return matrix.tril() + torch.full_like(matrix, float("nan")).triu(1)


def packed(matrix: torch.Tensor, block: int, unit: int = 1) -> LowerTriangle:
    """Panels of `block` rows that are stored alone."""
    own = spoiled(matrix)
    cuts = range(0, len(own), max(1, block // unit) * unit)
    return LowerTriangle([own[start : start + cuts.step, : min(start + cuts.step, len(own))].clone() for start in cuts])


def views(matrix: torch.Tensor, block: int) -> LowerTriangle:
    with mock.patch.object(tuning, "PANEL_ROWS", block):
        return LowerTriangle.of(spoiled(matrix))


STORED = {"views": views, "packed": packed}
stored = pytest.mark.parametrize("store", STORED.values(), ids=STORED)


@pytest.mark.parametrize("block", BLOCKS)
def test_cholesky_reads_and_writes_the_lower_triangle(block, monkeypatch):
    monkeypatch.setattr(tuning, "PANEL_ROWS", block)
    matrix = positive()
    own = spoiled(matrix)
    factor = linalg.cholesky_(own)
    assert factor.data_ptr() == own.data_ptr()
    assert relative_error(factor.tril(), torch.linalg.cholesky(matrix)) < 1e-13
    assert relative_error(linalg.cholesky_log_det(factor), torch.logdet(matrix)) < 1e-13


@stored
@pytest.mark.parametrize("block", BLOCKS)
def test_rounding_of_a_matrix_in_its_log_determinant(store, block):
    """Σ A_ii/L_ii², and in single precision the error that it foretells."""
    matrix = positive()
    factor = torch.linalg.cholesky(matrix)
    expected = torch.finfo(torch.float64).eps * (matrix.diagonal() / factor.diagonal().square()).sum()
    assert relative_error(expected.new_tensor(store(matrix, block).cholesky_().pivot_rounding()), expected) < 1e-13
    root = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)).double()  # five eigenvalues of 1
    for scale in (1.0, 10.0, 100.0):
        matrix = scale**2 * root @ root.T + torch.eye(11).double()
        rounded = store(matrix.float(), block).cholesky_()
        error = abs(rounded.log_det().double() - torch.logdet(matrix))
        assert 0.01 < error / rounded.pivot_rounding() < 3


@stored
@pytest.mark.parametrize("block", BLOCKS)
def test_factorization_and_solves_by_panels(store, block, monkeypatch):
    matrix, right = positive(), torch.randn(11, 3, dtype=torch.float64)
    monkeypatch.setattr(tuning, "SOLVE_ROWS", 4)
    triangle = store(matrix, block)
    assert len(triangle) == 11 and torch.equal(triangle.to_dense(), matrix.tril())
    before = [panel.data_ptr() for panel in triangle.panels]
    factor = triangle.cholesky_()
    assert [panel.data_ptr() for panel in factor.panels] == before
    want = torch.linalg.cholesky(matrix)
    assert relative_error(factor.to_dense(), want) < 1e-13
    assert relative_error(factor.log_det(), torch.logdet(matrix)) < 1e-13
    assert relative_error(factor.trailing(4).to_dense(), want[4:, 4:]) < 1e-13
    for transpose in (False, True):
        own = right.clone()
        assert factor.solve_lower_(own, transpose) is own
        assert relative_error(own, torch.linalg.solve(want.T if transpose else want, right)) < 1e-11
    assert relative_error(factor.solve(right), torch.linalg.solve(matrix, right)) < 1e-11
    for columns in (tuning.INVERSE_COLUMNS, block):
        monkeypatch.setattr(tuning, "INVERSE_COLUMNS", columns)
        own = factor.inverse()
        assert own.is_contiguous() and relative_error(own, torch.linalg.inv(matrix)) < 1e-11
    shifted = store(matrix, block).add_to_diagonal_(2.0).to_dense()
    assert torch.equal(shifted, (matrix + 2.0 * torch.eye(11)).tril())


@stored
@pytest.mark.parametrize("block", [1, 2, 4, 5, 12, 64])
@pytest.mark.parametrize("size", [1, 3])
def test_inverse_in_panels(store, block, size, monkeypatch):
    """Panels of blocks of rows, of widths that divide 12 and that do not; the factor keeps its values."""
    monkeypatch.setattr(tuning, "INVERSE_COLUMNS", block)
    matrix = positive(12)
    inverse = torch.linalg.inv(matrix)
    for height in (1, 5, 12):
        factor = store(torch.linalg.cholesky(matrix), height)
        before = factor.to_dense()
        for start, panel in factor.inverse_panels(size):
            assert start % size == panel.shape[1] % size == 0 and panel.shape[1] <= max(block, size)
            assert relative_error(panel, inverse[start:, start : start + panel.shape[1]]) < 1e-11
        assert start + panel.shape[1] == 12
        want = torch.stack([inverse[i : i + size, i : i + size] for i in range(0, 12, size)])
        assert relative_error(factor.inverse_diagonal(size), want) < 1e-11
        assert torch.equal(factor.to_dense(), before)


def test_solves_with_a_square_factor():
    matrix, right = positive(), torch.randn(11, 3, dtype=torch.float64)
    factor = torch.linalg.cholesky(matrix)
    assert relative_error(linalg.solve_spd(factor, right), torch.linalg.solve(matrix, right)) < 1e-11
    assert relative_error(linalg.solve_lower(factor, right), torch.linalg.solve(factor, right)) < 1e-11
    transposed = linalg.solve_lower(factor, right, transpose=True)
    assert relative_error(transposed, torch.linalg.solve(factor.T, right)) < 1e-11


def test_eigenvalues_that_single_precision_loses_are_those_of_double_precision(monkeypatch):
    matrix = positive().float()
    values, vectors = torch.linalg.eigh(matrix.double())
    eigh, eigvalsh = torch.linalg.eigh, torch.linalg.eigvalsh

    def lost(found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return found if like.dtype == torch.float64 else torch.full_like(found, torch.nan)

    monkeypatch.setattr(torch.linalg, "eigh", lambda a, UPLO: tuple(lost(part, a) for part in eigh(a, UPLO=UPLO)))
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a, UPLO: lost(eigvalsh(a, UPLO=UPLO), a))
    found = linalg.symmetric_eigen(matrix.tril())
    assert [part.dtype for part in found] == [torch.float32, torch.float32]
    assert torch.equal(found[0], values.float()) and torch.equal(linalg.symmetric_eigenvalues(matrix), found[0])
    assert relative_error(found[1].abs(), vectors.float().abs()) < 1e-6
    with pytest.raises(NumericalError, match="finite eigenvalues"):
        linalg.symmetric_eigen(torch.full((2, 2), torch.nan))


def test_the_basis_of_a_null_space_depends_on_it_alone():
    root, turn = torch.randn(2, 9, 4, dtype=torch.float64), torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    matrix = root @ root.mT
    values, vectors = linalg.symmetric_eigen(matrix)
    other = vectors.clone()
    other[..., :5] = other[..., :5] @ turn
    found, again = (linalg.unique_null_space_(values, one.clone()) for one in (vectors, other))
    assert not torch.allclose(other, vectors) and relative_error(again, found) < 1e-12
    assert torch.equal(found[..., 5:], vectors[..., 5:])
    assert relative_error(found.mT @ found, torch.eye(9).expand(2, 9, 9)) < 1e-13
    assert relative_error(found * values.unsqueeze(1) @ found.mT, matrix) < 1e-13
    full = vectors[..., 5:, 5:]
    assert torch.equal(linalg.unique_null_space_(torch.ones(2, 4, dtype=torch.float64), full.clone()), full)
    assert linalg.unique_null_space_(torch.zeros(3), torch.eye(3)).isfinite().all()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before == torch.float32 else torch.float32)
    try:
        assert torch.equal(linalg.unique_null_space_(values, vectors.clone()), found)
    finally:
        torch.set_default_dtype(before)


def test_panels_cover_a_long_axis_once():
    """As many rows as fit, at least one; none of no rows; rows that take nothing are all in one."""
    assert list(panels(7, 10, 30)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(panels(2, 100, 30)) == [slice(0, 1), slice(1, 2)]
    assert list(panels(0, 10, 30)) == [] and list(panels(5, 0, 30)) == [slice(0, 5)]


def test_normal_numbers_are_drawn_where_the_generator_is():
    """A generator of the CPU serves tensors of any device, and gives the numbers that it gives on the CPU."""
    def drawn(device: str) -> torch.Tensor:
        like = torch.empty(0, dtype=torch.float64, device=device)
        return normal((2, 3), like, torch.Generator().manual_seed(0))

    expected = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(drawn("cpu"), expected)
    with mock.patch.object(torch, "randn", wraps=torch.randn) as randn:
        assert drawn("meta").device.type == "meta" and randn.call_args.kwargs["device"] == torch.device("cpu")
    torch.manual_seed(3)
    free = normal((2, 3), expected, None)
    torch.manual_seed(3)
    assert torch.equal(free, torch.randn(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("unit", [1, 3, 50])
def test_the_bytes_of_a_triangle_are_predicted(unit, monkeypatch):
    monkeypatch.setattr(tuning, "PANEL_ROWS", 20)
    n, like = 150, torch.empty(0, dtype=torch.float32)
    triangle = LowerTriangle.empty(n, unit, like)
    assert triangle.nbytes == LowerTriangle.predicted_bytes(n, unit, like.dtype, like.device)
    assert len(triangle) == n and triangle.like.dtype == torch.float32
    assert all(len(panel) % unit == 0 for panel in triangle.panels)
    height = max(20 // unit, 1) * unit
    assert triangle.nbytes <= 4 * n * (n + height) / 2


@pytest.mark.slow
@on_linux
def test_torch_factors_in_place():
    """What a device does instead of panels: correct, in the same storage, without a second matrix."""
    matrix = positive(40)
    own = spoiled(matrix)
    assert linalg.cholesky_by_torch_(own).data_ptr() == own.data_ptr()
    assert relative_error(own, torch.linalg.cholesky(matrix)) < 1e-13
    with pytest.raises(NumericalError, match=r"order 3 of 11"):
        linalg.cholesky_by_torch_(torch.eye(11, dtype=torch.float64).index_fill_(0, torch.tensor([2]), -1.0))
    large = torch.eye(3000, dtype=torch.float64).add_(1e-4)
    linalg.cholesky_by_torch_(large[:300, :300].clone())
    with PeakMemory(large.device) as memory:
        linalg.cholesky_by_torch_(large)
    assert memory.bytes < 0.3 * large.nbytes


@pytest.mark.slow
@on_linux
def test_no_second_matrix_for_the_diagonal_of_an_inverse():
    factor = torch.randn(3000, 3000, dtype=torch.float64).tril_().div_(3000)
    factor.diagonal().add_(2.0)
    triangle = packed(factor, 300)
    LowerTriangle.of(factor[:1600, :1600]).inverse_diagonal(10)
    for own in (LowerTriangle.of(factor), triangle):
        with PeakMemory(factor.device) as memory:
            own.inverse_diagonal(10)
        assert memory.bytes < 0.24 * factor.nbytes


@pytest.mark.parametrize(
    ("dtype", "device", "setting", "refused"),
    [
        (torch.float32, "cuda", "tf32", True), (torch.float32, "cpu", "bf16", True),
        (torch.float32, "cuda", "ieee", False), (torch.float32, "cpu", "none", False),
        (torch.float64, "cuda", "tf32", False), (torch.float64, "cpu", "bf16", False),
    ],
)
def test_products_of_fewer_digits_are_refused(dtype, device, setting, refused, monkeypatch):
    """TF32 would make B indefinite. The setting is read for the device that multiplies, and left as it is."""
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}[device]
    before = backend.matmul.fp32_precision
    try:
        backend.matmul.fp32_precision = setting
        if refused:
            with pytest.raises(UnsupportedError, match=rf"all digits on {device}, .*; got .*'{setting}'\. Call "):
                require_full_precision(dtype, torch.device(device))
        else:
            require_full_precision(dtype, torch.device(device))
        assert backend.matmul.fp32_precision == setting
    finally:
        backend.matmul.fp32_precision = before


@pytest.mark.parametrize("n", [1, 11, 96, 97, 300])
def test_outer_products_of_the_lower_triangle(n):
    matrix, rows = positive(n), torch.randn(7, n, dtype=torch.float64)
    want = (matrix + rows.T @ rows).tril()
    linalg.add_outer_lower_(matrix, rows)
    assert relative_error(matrix.tril(), want) < 1e-14


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("where", [0, 4, 10])
def test_a_matrix_that_is_not_positive_is_refused_with_the_place(where, block, monkeypatch):
    monkeypatch.setattr(tuning, "PANEL_ROWS", block)
    matrix = torch.eye(11, dtype=torch.float64)
    matrix[where, where] = -1.0
    with pytest.raises(NumericalError, match=rf"order {where + 1} of 11 .*float64.*"):
        linalg.cholesky_(matrix)


def test_roots_of_singular_matrices():
    """No jitter: the root of a matrix of rank 2 has rank 2, and a zero matrix has a zero root."""
    half = torch.randn(4, 6, 2, dtype=torch.float64)
    matrix = half @ half.mT
    root = linalg.symmetric_root(matrix)
    assert relative_error(root @ root.mT, matrix) < 1e-13
    assert linalg.symmetric_root(torch.zeros(2, 3, 3)).abs().max() == 0


def test_memory_is_predicted_and_named():
    device = torch.device("cpu")
    assert available_memory(device) > 2**20
    require_memory(10, device, "this", "Do that.", budget=10)
    with pytest.raises(MemoryBudgetError, match=r"expected this to fit into 10 B on cpu; got .* 11 B\. Do that\."):
        require_memory(11, device, "this", "Do that.", budget=10)
    with pytest.raises(MemoryBudgetError):
        require_memory(2**60, device, "this", "Do that.")


def test_free_memory_is_not_asked_for_where_little_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(resources, "available_memory", lambda device: asked.append(device) or 2**30)
    device = torch.device("cpu")
    require_memory(2**18, device, "this", "Do that.")
    assert not asked
    require_memory(2**18 + 1, device, "this", "Do that.")
    assert asked == [device]
    with pytest.raises(MemoryBudgetError):  # a caller's limit counts, however small
        require_memory(2, device, "this", "Do that.", budget=1)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2**10, "1.0 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.0 TiB")]
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("enabled", [True, False, None])
def test_progress_passes_everything_on(enabled, capsys):
    assert list(track(iter(range(5)), "counting", 5, enabled)) == list(range(5))
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""  # no terminal, and not long


def test_long_work_writes_lines_where_there_is_no_terminal(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for _ in track(range(2), "outer", 2, True):
        for _ in track(range(3), lambda: f"inner at {now:g}", None, True):  # noqa: B023
            now += 20.0
        now += 15.0
    assert capsys.readouterr().err.splitlines() == [
        "inner at 40 after 40 s", "outer, 50% after 75 s", "inner at 115 after 40 s", "outer, 100% after 150 s"]
    assert list(track(range(2), "again", 2, True)) == [0, 1]
    assert capsys.readouterr().err == ""


def test_nested_progress_shares_a_display(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for _ in track(range(2), "outer", 2, True):
        list(track(range(2), "inner", 2, True))
        unfinished = iter(track(range(2), "left", 2, True))
        next(unfinished)
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("outer", "inner", "left"))
    assert list(track(range(2), "again", 2, True)) == [0, 1]
    assert "again" in capsys.readouterr().err


def test_short_work_shows_no_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert list(track(range(3), "short", 3, None, delay=60.0)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert list(track(range(3), "long", 3, None, delay=1e-9)) == [0, 1, 2]
    assert "long" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_matrices_are_short_sums(dtype):
    """Eigenvalues of a damped Kronecker product: within rounding of the largest in every entry, or nothing."""
    left, right = torch.logspace(-9, 4, 50, dtype=dtype), torch.logspace(-6, 3, 40, dtype=dtype).flip(0)
    matrix = 1.0 / (left.unsqueeze(1) * right + 10.0)
    u, v = linalg.cross_approximation(matrix, 40)
    assert len(u) == len(v) < 30 and u.dtype == torch.float64
    assert (u.T @ v - matrix).abs().max() <= 8 * torch.finfo(dtype).eps * matrix.max()
    assert linalg.cross_approximation(matrix, len(u) - 1) is None
    assert len(linalg.cross_approximation(matrix, len(u))[0]) == len(u)
    assert linalg.cross_approximation(torch.randn(50, 40, dtype=dtype), 20) is None
    nothing = linalg.cross_approximation(torch.zeros(3, 2, dtype=dtype), 1)
    assert (nothing[0].T @ nothing[1]).tolist() == [[0.0] * 2] * 3
