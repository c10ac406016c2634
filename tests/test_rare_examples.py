"""Examples unlike those that the rules of the rows were searched with: what differs in a few of them is exact too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.jacobian.blocks import Dense, Outer
from ntk_laplace.jacobian.gradient_check import GradientCheck
from ntk_laplace.model.network import Network
from reference import relative_error


class Biased(nn.Module):
    """A weight with a bias that is added apart; the last input says how."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))


class Gated(Biased):
    """The bias is added where the last input is 1."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x[:, :3], self.weight) + x[:, 3:] * self.bias


class Mixed(Biased):
    """A graph of two nodes: their mean is biased, and an isolated node has none."""

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(torch.stack([x[:, :3], 1 - x[:, :3]], 1), self.weight)
        mean = torch.stack([torch.full_like(x[:, 3], 0.5), 0.5 * x[:, 3]], 1).unsqueeze(1)
        return (mean @ h + self.bias).squeeze(1)


class Twice(Biased):
    """What the bias is added to is read again, where the last input is 0."""

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(x[:, :3], self.weight)
        return (h + self.bias).sin() + (1 - x[:, 3:]) * h


class Before(Biased):
    """The same, where the other reading comes first."""

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(x[:, :3], self.weight)
        return (1 - x[:, 3:]) * h + (h + self.bias).sin()


class Apart(Biased):
    """The bias is added to the whole output, through views: one block has both rows."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x[:, :3] @ self.weight.T).view(-1, 2, 2) + self.bias.view(2, 2)).flatten(1)


def rare(layer: type[Biased]) -> tuple[nn.Module, Tensor]:
    """A network, and 200 inputs of which three beyond the first have another last entry."""
    torch.manual_seed(0)
    x = torch.randn(200, 4).double()
    x[:, 3] = 1.0
    x[[50, 90, 150], 3] = 0.0
    return nn.Sequential(layer(), nn.Tanh(), nn.Linear(4, 2)).double(), x


@pytest.mark.parametrize("layer", [Gated, Mixed, Twice, Before, Apart])
def test_a_bias_has_rows_of_its_own_where_it_acts_otherwise(layer: type[Biased]) -> None:
    """In the examples of the search its rows are those of the weight's output gradients; that is no rule."""
    network, x = rare(layer)
    rows = JacobianPass(Network(network), torch.float64).rows(x)
    shapes, parameters = {name: p.shape for name, p in network.named_parameters()}, list(network.parameters())
    found = rows.dense(shapes)
    for i in (0, 50, 90, 150):
        for c in range(2):
            own = torch.autograd.grad(network(x[i : i + 1])[0, c], parameters)
            assert relative_error(found[c, i], torch.cat([part.flatten() for part in own])) < 1e-12
    together = [set(block.names) for block in rows.blocks if isinstance(block, Outer)]
    assert ({"0.weight", "0.bias"} in together) == (layer is Apart)
    assert {"2.weight", "2.bias"} in together


def test_the_check_of_a_batch_knows_parameters_without_rows() -> None:
    """A gradient that no row adds up to, rows without a gradient, and neither."""
    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(3)) for name in ("read", "unread")}
    x, cotangents = torch.randn(5, 3), torch.ones(1, 5, 1)
    check = GradientCheck((x @ weights["read"]).unsqueeze(1), cotangents, torch.ones(1, 5), weights, torch.float32)
    right, wrong = Dense.of("read", x[None]), Dense.of("unread", x[None])
    assert check.disagreeing([]) == ("read",) and check.disagreeing([right]) == ()
    assert check.disagreeing([wrong]) == ("read", "unread") and check.disagreeing([wrong], ["unread"]) == ("unread",)
    assert check.disagreeing([], ["unread"]) == ()


class Slices(nn.Module):
    """Two slices of one parameter, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(2, 3, 3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.w[0]) + torch.tanh(x @ self.w[1]) + x @ self.w.mean(0))


@pytest.mark.parametrize("structure", ["gp", "iterative"])
def test_a_parameter_as_slices_and_as_a_whole(structure: str) -> None:
    torch.manual_seed(0)
    network, data = Slices().double(), (torch.randn(12, 3).double(), torch.arange(12) % 2)
    full, found = (ntkl.laplace(network, data, ntkl.Categorical(), structure=own) for own in ("full", structure))
    assert relative_error(found.log_marginal_likelihood(), full.log_marginal_likelihood()) < 1e-9
    for other in ("kfac", "ekfac", "diag"):
        assert bool(ntkl.laplace(network, data, ntkl.Categorical(), structure=other).log_det().isfinite())


@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_embeddings_with_sparse_gradients(structure: str) -> None:
    """The library's copy has dense ones; the caller's network stays as it is."""
    torch.manual_seed(0)
    tokens, y = torch.randint(0, 9, (20, 5)), torch.arange(20) % 2
    values = []
    for sparse in (True, False):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(20, 2)).double()
        values.append(float(ntkl.laplace(network, (tokens, y), ntkl.Categorical(), structure=structure).log_det()))
        assert network[0].sparse == sparse
    assert values[0] == pytest.approx(values[1], rel=1e-12)


class Looked(nn.Module):
    """An embedding by function."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.head, self.sparse = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 2), sparse

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(functional.embedding(x, self.table, sparse=self.sparse).sum(1)))


@pytest.mark.filterwarnings("ignore:no factor rule covers")
@pytest.mark.parametrize("structure", ["gp", "full", "diag"])
def test_a_function_with_sparse_gradients(structure: str) -> None:
    torch.manual_seed(0)
    data, values = (torch.randint(0, 9, (20, 5)), torch.arange(20) % 2), []
    for sparse in (True, False):
        torch.manual_seed(1)
        network = Looked(sparse).double()
        values.append(float(ntkl.laplace(network, data, ntkl.Categorical(), structure=structure).log_det()))
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_noise_of_each_point_of_a_linear_network() -> None:
    """Its kind follows from its shape before the memory of a single example is asked for."""
    torch.manual_seed(0)
    network, x, y = nn.Linear(3, 4).double(), torch.randn(9, 3).double(), torch.randn(9, 4).double()
    noise = torch.linspace(0.1, 1.0, 9).double()
    values = [float(ntkl.laplace(network, (x, y), ntkl.Gaussian(noise, kind), structure=structure).log_det())
              for structure in ("gp", "full", "auto") for kind in ("auto", "point")]
    assert values == pytest.approx([values[0]] * 6, rel=1e-9)


def test_the_last_layer_is_a_whole_module_of_its_own() -> None:
    """A parametrized layer with its bias, whatever names it has; a head that is tied to an embedding is refused."""
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), head).double()
    chosen = Network(network, "last_layer").shapes
    assert set(chosen) == {name for name, _ in network.named_parameters() if name.startswith("2.")} and len(chosen) == 3
    network.alias = nn.Sequential(network[1], head)
    assert list(Network(network, "last_layer").shapes) == list(chosen)
    tied = nn.Module()
    tied.embedding, tied.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    tied.head.weight = tied.embedding.weight
    with pytest.raises(ntkl.NetworkError, match=r"got 'head.weight', which is 'embedding.weight' too\. Untie it, "):
        Network(tied, "last_layer")


class HeadFirst(nn.Module):
    """A head that is registered before its body, and a scale around it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.scale = nn.Linear(4, 2), nn.Linear(3, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(torch.tanh(self.body(x)))


def test_the_last_layer_runs_last() -> None:
    """What is registered last and runs earlier is refused; what runs around the last layer is not asked."""
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    network = HeadFirst()
    with pytest.raises(ntkl.NetworkError, match=r"got 'head', which runs after 'body'\. Pass parameters='head'\."):
        ntkl.laplace(network, (x, y), ntkl.Categorical(), parameters="last_layer")
    assert list(ntkl.laplace(network, (x, y), ntkl.Categorical(), parameters="head").network.shapes) == [
        "head.weight", "head.bias"]
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inner.register_parameter("shift", nn.Parameter(torch.zeros(2)))  # of a module around the last layer
    network.head.requires_grad_(False)  # a frozen head is no last layer
    for other, names in ((nn.Sequential(inner), ["0.2.weight", "0.2.bias"]), (network, ["body.weight", "body.bias"])):
        found = ntkl.laplace(other, (x, y), ntkl.Categorical(), parameters="last_layer")
        assert list(found.network.shapes) == names
        assert not any(module._forward_hooks for module in found.network.module.modules())
