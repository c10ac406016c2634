"""What-ifs that move the network, on several processes: those of one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from group_cases import require_same
from minima import parts, trained
from ntk_laplace.runtime.reduction import Reducer
from processes import on_processes
from ranks import on_ranks, shares, take_all
from refusals import N, inputs

GROUPS = [[0], [1, 2], [4, 6, 8]]


def fit(
    structure: Any = "gp", likelihood: str = "classes", part: slice = slice(None), own: Any = None, **settings: Any
) -> Any:
    y, fresh = parts(likelihood)
    return ntkl.laplace(trained(likelihood), take_all((inputs(), y), part), fresh if own is None else own,
                        ntkl.GaussianPrior(3.0), structure, settings=ntkl.Settings(batch_size=4, **settings))


def answers(posterior: Any, part: slice = slice(None)) -> dict[str, Tensor]:
    """Of groups, of one group, and of Gauss-Newton steps."""
    found, x = posterior.what_ifs(GROUPS), inputs(3) + 0.1
    result = {
        "thetas": found.thetas, "log densities": found.log_prob(), "outputs": found.outputs(x),
        "evidence": found.posterior(1).log_marginal_likelihood().detach(), "converged": found.converged.double(),
        "alone": posterior.remove([1, 2], linearization="moving").network.theta,
    }
    if posterior.fitted.exact:
        x = None if posterior.structure == "full" else inputs()[part]
        result["Gauss-Newton"] = posterior.remove([1, 2], steps=None).relinearize(x).network.theta
    return result


def compared(found: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    """Those of one process to the rounding of an optimum, and between processes to that of a sum."""
    for own in found:
        assert own.keys() == wanted.keys()
        for name, value in wanted.items():
            assert float((own[name] - value).abs().max()) <= 1e-7 * float(value.abs().max()), name
    require_same(found[1:], found[0])


@functools.cache
def expected(structure: str) -> dict[str, Tensor]:
    """Of one process."""
    return answers(fit(structure))


@pytest.mark.parametrize(("structure", "world_size"), [("gp", 2), ("full", 2), ("kfac", 3)])
def test_processes_share_the_passes(structure: str, world_size: int) -> None:
    compared(on_ranks(world_size, lambda reducer: answers(fit(structure, reducer=reducer))), expected(structure))


def test_each_process_has_its_own_data() -> None:
    cut = shares(N, 2)

    def run(reducer: Reducer) -> dict[str, Tensor]:
        part = cut[reducer.rank]
        posterior = fit(part=part, reducer=reducer, sharded=True)
        with pytest.raises(ntkl.DataError, match=r"inputs of the 9 training points, .*; got 18"):
            posterior.remove(0, steps=None).relinearize(inputs())
        return answers(posterior, part)

    compared(on_ranks(2, run), expected("gp"))


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_new_points_follow_all_old_ones_where_the_network_moves(structure: str) -> None:
    """Processes read their old and new share in turn; outputs, rows and targets are in the order of the numbers."""
    new = inputs(N + 7)[N:], parts("classes")[0][:7]

    def run(own: slice, added: slice, **settings: Any) -> dict[str, Tensor]:
        posterior = fit(structure, part=own, **settings).condition(take_all(new, added))
        moved = posterior.remove([0, N + 1], linearization="moving")
        found = {"theta": moved.network.theta, "f": moved.f, "evidence": moved.log_marginal_likelihood().detach(),
                 "outputs": moved.latent_moments(inputs(3))[0]}
        if structure == "full":  # "gp" needs the inputs of one share for both parts
            found["Gauss-Newton"] = posterior.remove([0, N + 1]).relinearize().network.theta
        return found

    cut, added = shares(N, 2), shares(7, 2)
    found = on_ranks(2, lambda reducer: run(cut[reducer.rank], added[reducer.rank], reducer=reducer, sharded=True))
    compared(found, run(slice(None), slice(None)))


@pytest.mark.slow
def test_folds_weights_and_noise_per_point_have_global_numbers() -> None:
    noise = torch.linspace(0.2, 0.6, N).double()

    def run(**settings: Any) -> dict[str, Tensor]:
        posterior = fit("full", "real", own=ntkl.Gaussian(noise, kind="point"), **settings)
        found = posterior.cross_validate(torch.arange(N) % 3)
        back = posterior.what_ifs([[0]]).comes_back()
        weighted = posterior.reweight([2, 5], [0.5, 2.0], linearization="moving")
        return {"densities": found.log_density, "f": found.f, "weighted": weighted.network.theta, "back": back.double()}

    compared(on_ranks(2, lambda reducer: run(reducer=reducer)), run())


def _answers(reducer: Reducer) -> dict[str, Tensor]:
    return answers(fit(reducer=reducer))


@pytest.mark.slow
def test_real_processes(tmp_path: Path) -> None:
    compared(on_processes(2, _answers, tmp_path), expected("gp"))
