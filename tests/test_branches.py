"""Networks whose examples take different ways: routed, masked, sorted and marked ones, and ways of a few alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.jacobian.layout import Layout, find_layouts
from ntk_laplace.model.network import Network
from reference import jacobian, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:no factor rule covers")


class Body(nn.Module):
    """A layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)


class Scaled(Body):
    """The head's outputs, three times as large where the first input is positive."""

    def forward(self, x: Tensor) -> Tensor:
        f, m = self.head(self.body(x).tanh()), x[:, :1] > 0
        return torch.where(m, 3 * f, f) if bool(m.any()) else f


class Routed(nn.Module):
    """One of two layers, by the sign of the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        k, out = x[:, 0] > 0, x.new_zeros(len(x), 4)
        out[k], out[~k] = self.a(x[k]).tanh(), self.b(x[~k]).tanh()
        return self.head(out)


class Marked(Body):
    """The sum over the marked tokens, one in most examples."""

    def forward(self, x: Tensor) -> Tensor:
        m = x[..., 2] > 0
        h = self.body(x[m]).tanh()
        return self.head(torch.zeros(len(x), 4, dtype=x.dtype).index_add(0, m.nonzero()[:, 0], h))


class Sorted(nn.Module):
    """One layer for examples in the order of their kind, and back; a scale for each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(3, 4), nn.Parameter(torch.tensor([0.5, 2.0]))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        kind = (x[:, 2] > 0).long()
        order = kind.argsort(stable=True)
        return self.head((self.body(x[order])[order.argsort()] * self.scale[kind][:, None]).tanh())


class Tokens(nn.Module):
    """A layer on tokens whose first entry is positive, as many as they are."""

    def __init__(self, size: int = 3, outputs: int = 2) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(size, size), nn.Linear(size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        m, y = x[..., 0] > 0, x.clone()
        y[m] = self.layer(x[m]).tanh()
        return self.head(y.amax(1))


class TimeFirst(nn.Module):
    """Time steps come first; a correction that few of them need."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.correction, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.transpose(0, 1).reshape(-1, 3)
        h = self.body(steps).tanh() + (steps[:, 2:] > 0) * self.correction(steps)
        return self.head(h.reshape(x.shape[1], len(x), 4).mean(0))


class OfTwoHeads(nn.Module):
    """A second head for inputs of a second kind, in a batch that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        m = x[:, :1] > 0
        if bool(m.all()):
            return self.a(x)
        return torch.where(m, self.a(x), self.b(x)) if bool(m.any()) else self.b(x)


class Experts(nn.Module):
    """The chosen one of two layers, by its own gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        share, out = self.gate(x).softmax(1), x.new_zeros(len(x), 2)
        for k, expert in enumerate((self.a, self.b)):
            chosen = share.argmax(1) == k
            if bool(chosen.any()):
                out = out.masked_scatter(chosen[:, None], share[chosen, k, None] * expert(x[chosen]))
        return out


class Choices(nn.Module):
    """One score for each of several choices."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.body(x).tanh()).squeeze(2)


class Averaged(Body):
    """Sequences of any length."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh().mean(1))


class Gate(nn.Module):
    """A masked weight behind units that are dead in most examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w, self.head = nn.Linear(2, 4), nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 1)
        self.register_buffer("mask", torch.ones(3, 4))
        nn.init.zeros_(self.first.bias)
        nn.init.uniform_(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.linear(self.first(x).relu(), self.w * self.mask).tanh())


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().eval()


def signed(n: int, *negative: int) -> Tensor:
    """Inputs whose first entry is positive but for some."""
    x = torch.randn(n, 3).double()
    x[:, 0] = x[:, 0].abs()
    x[list(negative), 0] *= -1
    return x


def marked(n: int = 40) -> Tensor:
    """Two tokens of each example; the first is marked, none in example 5, both in example 6."""
    x = torch.randn(n, 2, 3).double()
    x[..., 2] = -1.0
    x[:, 0, 2] = 1.0
    x[5, 0, 2], x[6, 1, 2] = -1.0, 1.0
    return x


def timed(n: int = 40) -> Tensor:
    """Two steps of each example, of which two in all need the correction: one is among the first examples."""
    x = torch.randn(n, 2, 3).double()
    x[..., 2] = -1.0
    x[0, 0, 2] = x[5, 1, 2] = 1.0
    return x


def kinds(n: int = 40) -> Tensor:
    """Examples of one kind, and one of another."""
    x = torch.randn(n, 3).double()
    x[:, 2] = 1.0
    x[1, 2] = -1.0
    return x


CASES = {
    "scaled": (Scaled, signed(12, 0, 1, 2, 3, 4, 5)), "routed, first alike": (Routed, signed(12, 5, 6, 9)),
    "routed, first others": (Routed, signed(12, 0, 6, 9)), "one routed otherwise": (Routed, signed(40, 20)),
    "marked": (Marked, marked()), "sorted": (Sorted, kinds()), "time first": (TimeFirst, timed()),
    "tokens": (Tokens, torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(3)).double()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 4, 64])
def test_rows_are_those_of_each_example_alone(name: str, size: int) -> None:
    kind, x = CASES[name]
    network = made(kind)
    rows = JacobianPass(Network(network), torch.float64).rows(x, batch_size=size)
    shapes = {name: p.shape for name, p in network.named_parameters()}
    assert relative_error(rows.dense(shapes).transpose(0, 1), jacobian(network, x)) < 1e-12


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parameters", [None, "last_layer"])
def test_diagonals_and_evidences_are_exact(name: str, parameters: str | None) -> None:
    """Sums of the fused paths and of a last layer in closed form, from rows that autograd gives one by one."""
    kind, x = CASES[name]
    network, y = made(kind), torch.arange(len(x)) % 2
    jac = jacobian(network, x)
    last = sum(p.numel() for p in network.head.parameters())  # the head is registered last
    jac = jac if parameters is None else jac[..., -last:]
    p = torch.softmax(network(x).detach(), 1)
    curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    whole = torch.einsum("ncp,ncd,ndq->pq", jac, curvature, jac)
    for structure, h in (("full", whole), ("diag", whole.diagonal().diag())):
        for size in (4, None):
            posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure,
                                     parameters=parameters, settings=ntkl.Settings(batch_size=size))
            expected = torch.logdet(h + torch.eye(len(h)).double())
            assert relative_error(posterior.log_det(), expected) < 1e-9, (structure, size)


def test_a_few_reach_the_chosen_parameters() -> None:
    network, y = made(OfTwoHeads), torch.arange(40) % 2
    for rare in (0, 2, 20):
        x = signed(40, rare)
        found = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="full", parameters="b")
        jac = jacobian(network, x)[..., -8:]
        p = torch.softmax(network(x).detach(), 1)
        curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        whole = torch.einsum("ncp,ncd,ndq->pq", jac, curvature, jac)
        assert relative_error(found.log_det(), torch.logdet(whole + torch.eye(8).double())) < 1e-9
    with pytest.raises(ntkl.NetworkError, match=r"in the first 40 examples.*begin the data with one that does"):
        ntkl.laplace(network, (signed(40), y), ntkl.Categorical(), parameters="b")


@pytest.mark.parametrize("parameters", ["a", "b"])
def test_one_expert_alone(parameters: str) -> None:
    network, x = made(Experts), torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).double()
    found = ntkl.laplace(network, (x, torch.zeros(8, 2)), ntkl.Gaussian(1.0), structure="full", parameters=parameters)
    mine = slice(8, 16) if parameters == "a" else slice(16, 24)
    jac = jacobian(network, x)[..., mine].flatten(0, 1)
    assert 0 < int(jac.any(1).sum()) < 16
    assert relative_error(found.log_det(), torch.logdet(jac.T @ jac + torch.eye(8).double())) < 1e-9


@pytest.mark.parametrize("structure", ["full", "diag", "kfac"])
def test_gradients_that_cancel_are_no_mixed_examples(structure: str) -> None:
    network, x, y = made(Choices), torch.randn(9, 3, 4).double(), torch.arange(9) % 3
    x[8] = x[8, :1]  # three equal choices
    values = [float(ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=structure,
                                 settings=ntkl.Settings(batch_size=size)).log_det()) for size in (1, 4, 9)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-9)


class Rolled(torch.autograd.Function):
    """The gradient of another example."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.roll(1, 0)


class Shifted(Body):
    """Outputs far from zero, whose gradients are mixed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Rolled.apply(self.body(x).tanh())) + 1e6


def test_large_outputs_hide_no_mixed_gradients() -> None:
    network = made(Shifted).float()
    with pytest.raises(ntkl.errors.MixedExamplesError):
        JacobianPass(Network(network), torch.float32).rows(torch.randn(32, 3))


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1)])
def test_the_diagonal_of_sequences_of_several_lengths(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(8, t, 3).double(), torch.arange(8) % 2) for t in lengths]
    network, likelihood = made(Averaged), ntkl.Categorical()
    found = ntkl.laplace(network, DataLoader(parts, batch_size=None), likelihood, structure="diag")
    total = torch.zeros(26).double()
    for x, _ in parts:
        jac, p = jacobian(network, x), torch.softmax(network(x).detach(), 1)
        curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        total += torch.einsum("ncp,ncd,ndp->p", jac, curvature, jac)
    assert relative_error(found.log_det(), total.log1p().sum()) < 1e-9


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_one_example_teaches_nothing_wrong(size: int) -> None:
    """A plan for zero gradients is made anew in a batch of one; a batch of several comes after it."""
    network = made(Gate)
    x = torch.rand(6, 2).double()
    x[:5] *= -1  # dead units
    rows = JacobianPass(Network(network), torch.float64)
    shapes = {name: p.shape for name, p in network.named_parameters()}
    for part in (x[:5], torch.rand(1, 2).double(), torch.rand(size, 2).double()):
        assert relative_error(rows.rows(part).dense(shapes).transpose(0, 1), jacobian(network, part)) < 1e-12


def test_positions_are_not_taken_for_features() -> None:
    """A gradient of few tokens fits an axis of features too, whose outer products are not those of the weight."""
    torch.manual_seed(62)
    x = torch.randn(9, 4, 4).double()
    network = Tokens(4, 1).double()
    rows = JacobianPass(Network(network), torch.float64).rows(x, batch_size=1)
    shapes = {name: p.shape for name, p in network.named_parameters()}
    assert relative_error(rows.dense(shapes).transpose(0, 1), jacobian(network, x)) < 1e-12


def test_layouts_that_a_gradient_fits() -> None:
    """All of them, where few examples have a gradient."""
    weights, plain = torch.tensor([1.0, 0.3]).double(), torch.zeros(4, 3).double()
    plain[0] = 1.0
    both = [Layout(0), Layout(0, positions_first=True)]
    assert find_layouts(plain, plain, weights, torch.float64) == both
    plain[2] = 1.0  # example 1 if its positions come together, else the second position of example 0
    scaled = plain * torch.tensor([1.0, 1.0, 0.3, 0.3]).double()[:, None]
    assert find_layouts(plain, scaled, weights, torch.float64) == [Layout(0)]
    assert find_layouts(torch.zeros(4, 3), torch.zeros(4, 3), weights, torch.float64) == []
