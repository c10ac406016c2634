"""Networks with a sparse matrix as a buffer, such as the adjacency of a graph: as with the dense one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:Sparse CSC tensor support")

LAYOUTS = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}


class Spread(nn.Module):
    """Mixes four features along the edges of a graph between two layers."""

    def __init__(self, layout: str, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        edges = scale * torch.randn(4, 4).double().relu()
        self.register_buffer("edges", LAYOUTS[layout](edges) if layout in LAYOUTS else edges)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.edges @ self.first(x).tanh().T).T)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(9, 3, generator=generator, dtype=torch.float64), torch.arange(9) % 2


def fit(network: nn.Module, structure: Any) -> ntkl.Posterior:
    # the prior is so strong that rounding does not choose among minima of a network that is not trained
    return ntkl.laplace(network, data(), ntkl.Categorical(), ntkl.GaussianPrior(5.0), structure)


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_buffer_is_the_dense_one(layout: str, structure: str) -> None:
    sparse, dense = fit(Spread(layout), structure), fit(Spread("dense"), structure)
    x = data()[0] + 0.1
    torch.testing.assert_close(sparse.log_marginal_likelihood(), dense.log_marginal_likelihood(), rtol=1e-10, atol=0)
    torch.testing.assert_close(sparse.predict(x).probs, dense.predict(x).probs, rtol=1e-10, atol=0)
    moved = [one.remove([2], linearization="moving").predict(x).probs for one in (sparse, dense)]
    torch.testing.assert_close(*moved, rtol=1e-7, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_values_are_compared(layout: str, tmp_path: Path) -> None:
    posterior = fit(Spread(layout), "kfac")
    posterior.save(tmp_path / "p.pt")
    ntkl.load(tmp_path / "p.pt", Spread(layout))
    assert posterior.merge(fit(Spread(layout), "kfac")).num_examples == 18
    with refused(ntkl.NetworkError, "frozen parameters and buffers", "others", "whole network"):
        ntkl.load(tmp_path / "p.pt", Spread(layout, 2.0))
    with refused(ntkl.UnsupportedError, "equal parameters and buffers", "two networks", "Fit both"):
        posterior.merge(fit(Spread(layout, 2.0), "kfac"))
