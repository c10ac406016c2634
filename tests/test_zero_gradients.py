"""Output gradients that are zero: layers before a zero-initialized head keep their form, and no fallback is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass, search
from ntk_laplace.jacobian.layout import shape_layout
from ntk_laplace.model.network import Network
from reference import Dense, differentiate, jacobian, outputs, relative_error
from registry import LIKELIHOODS

STRUCTURES = ["gp", "full", "kfac", "ekfac", "diag", "inf"]
pytestmark = pytest.mark.filterwarnings("ignore:INF's low-rank part")


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, pre-norm attention, and a head, as torchvision builds them."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=batch_first), nn.LayerNorm(8)
        self.wide, self.narrow, self.last = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        h = self.norm(x) if self.batch_first else self.norm(x).transpose(0, 1)
        h, _ = self.attention(h, h, h, need_weights=False)
        x = x + (h if self.batch_first else h.transpose(0, 1))
        x = x + self.narrow(torch.nn.functional.gelu(self.wide(x)))
        return self.head(self.last(x)[:, 0])


class Residual(nn.Module):
    """Two residual blocks whose last norm starts at zero, `zero_init_residual` and `zero_init_last`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4),
            ) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Adapted(nn.Module):
    """Frozen layers with low-rank additions B A, on positions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 3).requires_grad_(False)
        self.one_a, self.one_b = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.two_a, self.two_b = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x[:, 0]) + self.one_b(self.one_a(x[:, 0])))
        return (self.two(x) + self.two_b(self.two_a(x))).mean(1)


class Products(nn.Module):
    """A vector of the weight's outputs that is no bias of it, and a bias that an addition of its own brings in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight, self.bias = (nn.Parameter(torch.randn(*size)) for size in ((5,), (5, 16), (5,)))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh((x.flatten(1) @ self.weight.T + self.bias) * self.scale))


class Dead(nn.Module):
    """Its hidden units are below zero for every input, where the threshold is high."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.head = nn.Conv2d(1, 4, 3), nn.Linear(16, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.linear(torch.tanh(self.conv(x)).flatten(1))))


def _zero(*names: str) -> Callable[[nn.Module], None]:
    def change(network: nn.Module) -> None:
        for name in names:
            network.get_parameter(name).data.zero_()

    return change


def _kill(network: nn.Module) -> None:
    network.linear.bias.data.fill_(-100.0)


# name -> the network, what makes output gradients zero in it, and the parameters that speak all the same
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None], str]] = {
    "vision transformer": (VisionTransformer, _zero("head.weight", "head.bias"), "head"),
    "positions first": (lambda: VisionTransformer(batch_first=False), _zero("head.weight", "head.bias"), "head"),
    "residual": (Residual, _zero("blocks.0.4.weight", "blocks.1.4.weight"), "stem head blocks.0.4 blocks.1.4"),
    "adapters at zero": (Adapted, _zero("one_b.weight", "two_b.weight"), "one_b two_b"),
    "products": (Products, _zero("head.weight", "head.bias"), "head"),
    "dead units": (Dead, _kill, "head"),
}


def _build(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The network in general, the one with zero gradients, and inputs."""
    make, change, _ = NETWORKS[name]
    network = make().double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    zero = copy.deepcopy(network)
    change(zero)
    return network, zero, torch.randn(12, 1, 4, 4).double()


@pytest.mark.parametrize("keep_factors", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_are_those_of_any_other_weights(name, keep_factors):
    """The same forms, no more bytes, no warning, and rows that are exactly zero where they should be."""
    network, zero, x = _build(name)
    expected = JacobianPass(Network(network), torch.float64, keep_factors).rows(x)
    door = Network(zero)
    found = JacobianPass(door, torch.float64, keep_factors).rows(x)
    kinds = [sorted(str(block.kind) for block in rows.blocks) for rows in (found, expected)]
    assert kinds[0] == kinds[1]
    assert found.nbytes <= expected.nbytes
    truth, own = jacobian(zero, x), found.dense(door.shapes).transpose(0, 1)
    assert relative_error(own, truth) < 1e-12
    spoken = tuple(NETWORKS[name][2].split())
    silent = [span for each, span in door.shapes.slices().items() if not each.startswith(spoken)]
    assert silent and all(not own[..., span].any() for span in silent)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_structure(name, structure):
    """Exact ones equal the dense reference; in all of them parameters without rows count for nothing."""
    _, zero, x = _build(name)
    y = torch.arange(len(x)) % 3
    found = ntkl.laplace(zero, (x, y), ntkl.Categorical(temperature=1.7), structure=structure)
    spoken = NETWORKS[name][2].split()
    alone = ntkl.laplace(zero, (x, y), ntkl.Categorical(temperature=1.7), structure=structure, parameters=spoken)
    assert relative_error(found.log_det(), alone.log_det()) < 1e-10
    assert relative_error(found.latent_moments(x)[1], alone.latent_moments(x)[1]) < 1e-10
    reference = _dense(zero, x, y)
    if structure in ("gp", "full"):
        assert relative_error(found.log_marginal_likelihood(), reference.evidence()) < 1e-9
    if structure == "diag":
        diagonal = torch.einsum("ncp,ncd,ndp->p", reference.jac, reference.hessian, reference.jac)
        assert relative_error(found.log_det(), torch.log1p(diagonal).sum()) < 1e-9


def _dense(network: nn.Module, x: Tensor, y: Tensor) -> Dense:
    parts = differentiate(LIKELIHOODS["categorical"].log_density, outputs(network, x), y)
    theta = torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])
    return Dense(*parts, jacobian(network, x), theta, torch.ones_like(theta))


class Gated(nn.Module):
    """Positions first inside; silent for inputs whose mean is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.mixer(x.transpose(0, 1).reshape(-1, 3)).tanh().view(x.shape[1], len(x), 4)
        return self.head(positions.sum(0) * torch.relu(x.mean((1, 2)))[:, None])


@pytest.mark.parametrize("loud", [[4], [9], [11], [23], [38], [], list(range(2, 12))])
@pytest.mark.parametrize("keep_factors", [False, True])
def test_a_layout_from_shapes_is_used_for_zeros_alone(keep_factors, loud):
    """A single example that speaks, whether the check looks at it or not, has the batch planned anew."""
    network, x = Gated().double(), torch.randn(40, 4, 3).double()
    x = x - x.mean((1, 2), keepdim=True) - 1.0
    x[loud] += 2.0
    door = Network(network)
    for batch_size in (None, 12):
        factors = JacobianPass(door, torch.float64, keep_factors)
        found = factors.rows(x, batch_size=batch_size)
        assert relative_error(found.dense(door.shapes).transpose(0, 1), jacobian(network, x)) < 1e-12
        assert not any(plan.unmatched for plan in factors.checked.plans.values())


def test_the_axis_that_grows_with_the_examples():
    def axis(shape: tuple[int, ...], other: tuple[int, ...]) -> int | None:
        layout = shape_layout(torch.Size(shape), 2, torch.Size(other), 3)
        return None if layout is None else layout.dim

    assert axis((2, 5), (3, 5)) == 0 and axis((4, 8), (4, 12)) == 1 and axis((7, 2, 2), (7, 2, 3)) == 2
    assert axis((6, 2), (6, 2)) is None  # a parameter's own
    assert axis((2, 2), (3, 3)) is None and axis((4, 5), (5, 5)) is None and axis((2, 5), (3, 1, 5)) is None


def test_what_no_plan_knows_takes_the_fallback(monkeypatch):
    """Where a plan finds zeros again and the batch has none, its rows are still exact."""
    network, x = Gated().double(), torch.randn(40, 4, 3).double()
    x = x - x.mean((1, 2), keepdim=True) - 1.0
    x[[4, 23]] += 2.0  # none that the check of the whole batch looks at
    monkeypatch.setattr(search.Search, "draw", lambda self, *shape: self.out.new_zeros(shape))
    door = Network(network)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="no factor rule covers"):
        found = JacobianPass(door, torch.float64).rows(x)
    assert relative_error(found.dense(door.shapes).transpose(0, 1), jacobian(network, x)) < 1e-12


class Twice(nn.Module):
    """One layer used twice; the second use is silent for inputs whose mean is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer(x).tanh()
        return self.head(first.detach() * first + self.layer(x * x).tanh() * torch.relu(x.mean(1))[:, None])


@pytest.mark.parametrize("keep_factors", [False, True])
def test_a_silent_use_beside_another_is_watched(keep_factors):
    """It gives no rows and no positions, until a batch in which it has a gradient."""
    network, x = Twice().double(), torch.randn(40, 3).double()
    x -= x.mean(1, keepdim=True) + 1.0
    door = Network(network)
    factors = JacobianPass(door, torch.float64, keep_factors)
    silent = {block.weight: block for block in factors.rows(x).blocks if hasattr(block, "weight")}
    x[37] += 2.0
    found = factors.rows(x)
    assert relative_error(found.dense(door.shapes).transpose(0, 1), jacobian(network, x)) < 1e-12
    if keep_factors:
        assert silent["layer.weight"].b.shape[3] == 1
        assert [block.b.shape[3] for block in found.blocks if block.weight == "layer.weight"] == [2]


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "inf", "diag"])
def test_an_embedding_of_padding_alone(structure):
    """No term enters its factors: it has no curvature."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        network[0].weight[0] = 1.0
    data = torch.zeros(8, 2, dtype=torch.long), torch.arange(8) % 2
    found, rest = (ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, parameters=own)
                   for own in (None, "2"))
    assert relative_error(found.log_det(), rest.log_det()) < 1e-12
    assert relative_error(found.latent_moments(data[0])[1], rest.latent_moments(data[0])[1]) < 1e-12


@pytest.mark.parametrize("structure", ["full", "kfac"])
def test_the_joint_gradient_of_sparse_and_unread_parameters(structure):
    """A structure that keeps no rows reads autograd's gradients, which are sparse, or not there."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2)).double()
    network.register_parameter("unread", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    data = torch.arange(18).view(9, 2) % 5, torch.arange(9) % 2
    posterior = ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, settings=ntkl.Settings(4))
    dense = copy.deepcopy(network)
    dense[0].sparse = False
    loss = nn.functional.cross_entropy(dense(data[0]), data[1], reduction="sum")
    (loss + 0.5 * sum(p.square().sum() for p in dense.parameters())).backward()
    expected = torch.cat([p.grad.flatten() for p in dense.parameters()])
    assert relative_error(posterior.fitted.joint_gradient(), expected) < 1e-12
    weights = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)).double()
    dense.zero_grad()
    (dense(data[0]) * weights).sum().backward()
    expected = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in dense.parameters()])
    found = posterior.fitted.model.jacobian_pass.vjp(data[0], weights, batch_size=4)
    assert relative_error(found, expected) < 1e-12
