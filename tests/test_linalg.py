"""In-place algebra in blocks of any width, against torch's own; memory that is refused before it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ntk_laplace.errors import MemoryBudgetError, NumericalError
from ntk_laplace.runtime import linalg
from ntk_laplace.runtime.meter import PeakMemory
from ntk_laplace.runtime.progress import track
from ntk_laplace.runtime.resources import available_memory, format_bytes, require_memory
from reference import relative_error

BLOCKS = [1, 2, 5, 11, 12, 64]
on_linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")


def positive(n: int = 11) -> torch.Tensor:
    root = torch.randn(n, n + 2, dtype=torch.float64)
    return root @ root.T


@pytest.mark.parametrize("block", BLOCKS)
def test_cholesky_reads_and_writes_the_lower_triangle(block):
    matrix = positive()
    spoiled = matrix.tril() + torch.full_like(matrix, float("nan")).triu(1)
    factor = linalg.cholesky_(spoiled, block=block)
    assert factor.data_ptr() == spoiled.data_ptr()
    assert relative_error(factor.tril(), torch.linalg.cholesky(matrix)) < 1e-13
    assert relative_error(linalg.cholesky_log_det(factor), torch.logdet(matrix)) < 1e-13


@pytest.mark.parametrize("block", BLOCKS)
def test_inverse_and_solves(block):
    matrix, right = positive(), torch.randn(11, 3, dtype=torch.float64)
    factor = torch.linalg.cholesky(matrix)
    spoiled = factor + torch.full_like(factor, float("nan")).triu(1)
    inverse = torch.linalg.inv(matrix)
    for own in (linalg.inverse_from_cholesky(spoiled), linalg.inverse_from_cholesky(spoiled, block)):
        assert own.is_contiguous()
        assert relative_error(own, inverse) < 1e-11
    for size in (1, 11):
        places = torch.arange(11).view(-1, size)
        want = inverse[places[:, :, None], places[:, None]]
        assert relative_error(linalg.inverse_diagonal(spoiled, size, block=block), want) < 1e-11
    assert relative_error(linalg.solve_spd(factor, right), torch.linalg.solve(matrix, right)) < 1e-11
    assert relative_error(linalg.solve_lower(factor, right), torch.linalg.solve(factor, right)) < 1e-11
    transposed = linalg.solve_lower(factor, right, transpose=True)
    assert relative_error(transposed, torch.linalg.solve(factor.T, right)) < 1e-11


@pytest.mark.parametrize("block", [1, 2, 4, 5, 12, 64])
@pytest.mark.parametrize("size", [1, 3])
def test_inverse_in_panels(block, size):
    """Panels of blocks of rows, of widths that divide 12 and that do not; a factor that is a view keeps its values."""
    matrix = positive(12)
    inverse, large = torch.linalg.inv(matrix), torch.full((15, 15), float("nan"), dtype=torch.float64)
    factor = large[3:, 3:]
    factor.copy_(torch.linalg.cholesky(matrix) + torch.full_like(matrix, float("nan")).triu(1))
    before = factor.clone()
    for start, panel in linalg.inverse_panels(factor, size, block):
        assert start % size == panel.shape[1] % size == 0 and panel.shape[1] <= max(block, size)
        assert relative_error(panel, inverse[start:, start : start + panel.shape[1]]) < 1e-11
    assert start + panel.shape[1] == 12
    want = torch.stack([inverse[i : i + size, i : i + size] for i in range(0, 12, size)])
    assert relative_error(linalg.inverse_diagonal(factor, size, block), want) < 1e-11
    assert torch.equal(factor.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_triangular_solves_in_place(block, transpose):
    factor, right = torch.linalg.cholesky(positive()), torch.randn(11, 3, dtype=torch.float64)
    want = torch.linalg.solve(factor.T if transpose else factor, right)
    spoiled = factor + torch.full_like(factor, float("nan")).triu(1)
    assert linalg.solve_lower_(spoiled, right, transpose, block) is right
    assert relative_error(right, want) < 1e-11


@pytest.mark.slow
@on_linux
def test_no_second_matrix_for_the_diagonal_of_an_inverse():
    factor = torch.randn(3000, 3000, dtype=torch.float64).tril_().div_(3000)
    factor.diagonal().add_(2.0)
    linalg.inverse_diagonal(factor[:600, :600], 10)
    with PeakMemory(factor.device) as memory:
        linalg.inverse_diagonal(factor, 10)
    assert memory.bytes < 0.24 * factor.nbytes


@pytest.mark.parametrize("block", BLOCKS)
def test_outer_products_of_the_lower_triangle(block):
    matrix, rows = positive(), torch.randn(7, 11, dtype=torch.float64)
    want = (matrix + rows.T @ rows).tril()
    linalg.add_outer_lower_(matrix, rows, block=block)
    assert relative_error(matrix.tril(), want) < 1e-14


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("where", [0, 4, 10])
def test_a_matrix_that_is_not_positive_is_refused_with_the_place(where, block):
    matrix = torch.eye(11, dtype=torch.float64)
    matrix[where, where] = -1.0
    with pytest.raises(NumericalError, match=rf"order {where + 1} of 11 .*float64.*"):
        linalg.cholesky_(matrix, block=block)


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


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2**10, "1.0 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.0 TiB")]
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("enabled", [True, False, None])
def test_progress_passes_everything_on(enabled, capsys):
    assert list(track(iter(range(5)), "counting", 5, enabled)) == list(range(5))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert bool(shown.err) == bool(enabled)


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
