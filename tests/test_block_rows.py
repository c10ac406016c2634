"""A matrix in block rows on several processes: its factor, solves and inverse are those of the matrix in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from group_cases import inputs, labels, quantities, require_same, small
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.block_rows import BlockRows
from ntk_laplace.runtime.reduction import Reducer, SingleProcess
from ranks import on_ranks

BOUNDS = [0, 2, 5, 9, 12, 14, 17]


def matrix() -> Tensor:
    root = torch.randn(17, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return root @ root.T + torch.eye(17).double()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_factor_solves_and_columns_of_the_inverse(ranks: int) -> None:
    """Entries above the diagonal are never read."""
    whole = matrix()
    lower, inverse = torch.linalg.cholesky(whole), torch.linalg.inv(whole)
    right = torch.randn(17, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(reducer: Reducer) -> None:
        close = torch.testing.assert_close
        rows = BlockRows(BOUNDS, reducer, whole)
        for i in rows.own:
            rows.rows[i] = whole[BOUNDS[i] : BOUNDS[i + 1], : BOUNDS[i + 1]].clone()
            square = rows.rows[i][:, BOUNDS[i] :]
            square.masked_fill_(torch.ones_like(square).triu(1).bool(), torch.nan)
        rows.cholesky_()
        close(rows.whole(), lower, rtol=1e-12, atol=1e-12)
        close(rows.log_det(), torch.logdet(whole), rtol=1e-12, atol=0)
        rounding = (whole.diagonal() / lower.diagonal().square()).sum() * torch.finfo(whole.dtype).eps
        assert rows.pivot_rounding() == pytest.approx(float(rounding), rel=1e-12)
        own = right[:, reducer.rank :: ranks].clone()
        close(rows.solve(own.clone()), torch.linalg.solve(lower, own), rtol=1e-11, atol=1e-11)
        close(rows.solve_transposed(own.clone()), torch.linalg.solve(lower.T, own), rtol=1e-11, atol=1e-11)
        for first, last in ((0, 6), (2, 5)):
            for factor_only, expected in ((False, inverse), (True, torch.linalg.inv(lower))):
                found = rows.inverse_columns(first, last, factor_only)
                assert sorted(found) == [i for i in rows.own if first <= i < last]
                for i, panel in found.items():
                    start, stop = BOUNDS[i : i + 2]
                    close(panel, expected[start:, start:stop], rtol=1e-10, atol=1e-11)

    on_ranks(ranks, run) if ranks > 1 else run(SingleProcess())


def test_rows_are_dealt_once_and_evenly() -> None:
    def run(reducer: Reducer) -> tuple[list[int], int]:
        rows = BlockRows(range(0, 97 * 4, 4), reducer, matrix())
        return rows.own, sum((i + 1) ** 2 for i in rows.own)

    found = on_ranks(3, run)
    assert sorted(i for own, _ in found for i in own) == list(range(96))
    work = [each for _, each in found]
    assert max(work) < 1.03 * min(work)


def test_a_matrix_that_is_not_definite_is_an_error_on_all_processes() -> None:
    whole = matrix()
    whole[10, 10] = -1.0
    refused = []

    def run(reducer: Reducer) -> None:
        rows = BlockRows(BOUNDS, reducer, whole)
        rows.rows = {i: whole[BOUNDS[i] : BOUNDS[i + 1], : BOUNDS[i + 1]].clone() for i in rows.own}
        with pytest.raises(ntkl.NumericalError, match="a leading minor of order 10 to 12 of 17"):
            rows.cholesky_()
        refused.append(reducer.rank)

    on_ranks(3, run)
    assert sorted(refused) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
@pytest.mark.parametrize("groups", ["all", "layer", "parameter"])
def test_function_space_in_many_block_rows(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence, its gradient, predictions, samples and solves, for every grouping of the prior."""
    def look(**settings: object) -> dict[str, Tensor]:
        prior = ntkl.GaussianPrior(2.0, groups=groups)
        posterior = ntkl.laplace(small(), (inputs(), labels()), ntkl.Categorical(), prior,
                                 settings=ntkl.Settings(**settings))
        precision = posterior.posterior_precision
        vectors = torch.ones(2, precision.num_parameters, dtype=torch.float64)
        left_out = posterior.leave_one_out()
        return quantities(posterior) | {
            "samples": precision.sample(3, torch.Generator().manual_seed(3)), "solved": precision.solve(vectors),
            "one": precision.solve(vectors[0]), "blocks": precision.inverse_blocks, "left out": left_out.log_density,
        }

    monkeypatch.setattr(tuning, "DEALT_ROWS", 6)
    expected = look()
    monkeypatch.setattr(tuning, "COVARIANCE_BYTES", 1000)
    require_same(on_ranks(2, lambda reducer: look(reducer=reducer)), expected)
