"""Rows of the Jacobian from one pass over data: exact for every network, or the network is refused in words."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntk_laplace.errors import DataError, NetworkError, NonFiniteError, NTKLaplaceWarning
from ntk_laplace.jacobian import FusedLayers, FusedSums, Outer, rules
from ntk_laplace.jacobian.fast import FusedAccumulation
from ntk_laplace.jacobian.passes import JacobianPass
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning
from reference import call, jacobian, jacobian_by_func, num_examples, relative_error, take
from registry import NETWORKS, fresh, problem
from registry_cases import jacobians

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


def rows(module: nn.Module, x, **options) -> Tensor:
    """J, (N, C, P), by the library."""
    network = Network(module)
    return JacobianPass(network, torch.float64).rows(x, **options).dense(network.shapes).transpose(0, 1)


def limit(name: str) -> float:
    return 1e-10 if NETWORKS[name].dtype == torch.float64 else 1e-6


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_are_the_jacobian(name):
    case, truth = problem(name), jacobians(name)[0]
    for batch_size in (None, 1):
        assert relative_error(rows(case.network, case.x, batch_size=batch_size), truth) < limit(name)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_root_enters_the_cotangents(name):
    """Jacobian seeded with S, and rows weighted with S afterwards, are both SᵀJ."""
    case = problem(name)
    n, c = case.case.examples, case.case.outputs
    root = torch.randn(n, c, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = torch.einsum("ncr,ncp->nrp", root, jacobians(name)[0])
    assert relative_error(rows(case.network, case.x, root=root), truth) < limit(name)
    network = Network(case.network)
    weighted = JacobianPass(network, torch.float64).rows(case.x).weighted(root)
    assert weighted.num_cotangents == 2
    assert relative_error(weighted.dense(network.shapes).transpose(0, 1), truth) < limit(name)


@pytest.mark.parametrize("name", NETWORKS)
def test_products_with_vectors(name):
    case = problem(name)
    network, jac = Network(case.network), jacobians(name)[0]
    found = JacobianPass(network, torch.float64).rows(case.x)
    generator = torch.Generator().manual_seed(2)
    vector = torch.randn(jac.shape[2], generator=generator, dtype=torch.float64)
    cotangent = torch.randn(jac.shape[:2], generator=generator, dtype=torch.float64)
    assert relative_error(found.jvp(network.unflatten(vector)), jac @ vector) < limit(name)
    assert relative_error(found.vjp(cotangent, network.shapes), torch.einsum("nc,ncp->p", cotangent, jac)) < limit(name)
    index = torch.tensor([4, 0, 0, 5])
    part = found.subset(index).dense(network.shapes).transpose(0, 1)
    assert relative_error(part, jac[index]) < limit(name)


@pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if case.func])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_two_reference_jacobians_agree(name):
    """Autograd one output at a time against ``vmap(jacrev)``: a mistake in the yardstick shows here."""
    case, truth = problem(name), jacobians(name)[0]
    assert relative_error(jacobian_by_func(case.network, case.x), truth) < (1e-13 if limit(name) < 1e-9 else 1e-6)


# networks whose every parameter a rule covers: the fallback there would be a loss of speed that no other test sees
COVERED = sorted(
    set(NETWORKS) - {"unused_parameters", "norms", "direct_parameters", "prelu_bilinear", "custom_function"}
    - {"self_attention_sequence_first", "embedding_bag"}
)


@pytest.mark.parametrize("name", COVERED)
def test_rules_cover_the_common_layers(name):
    case = problem(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows(case.network, case.x)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("custom_function", ["Custom 'w'", "4 parameters"]),
        ("prelu_bilinear", ["Bilinear 'bilinear.weight'"]),
        ("embedding_bag", ["EmbeddingBag 'bag.weight'"]),
    ],
)
def test_the_fallback_is_announced_once_by_name(name, named):
    case = problem(name)
    network = Network(case.network)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        factors = JacobianPass(network, torch.float64)
        factors.rows(case.x, batch_size=2)
        factors.rows(case.x_new)
    assert [each.category for each in caught] == [NTKLaplaceWarning], [str(each.message) for each in caught]
    for text in [*named, "fallback", "costs"]:
        assert text in str(caught[0].message)


# --------------------------------------------------------------------------------------- inputs of every form


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(4, 3)


class Apart(Sum):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) * self.right(right)


class Whole(Sum):
    def forward(self, x) -> Tensor:
        left, right = (x["left"], x["right"]) if isinstance(x, dict) else x
        return self.left(left) * self.right(right)


@pytest.mark.parametrize("form", [tuple, list, dict])
@pytest.mark.parametrize("kind", [Apart, Whole])
def test_tuples_lists_and_dicts(kind, form):
    torch.manual_seed(0)
    network = kind().double()
    left, right = torch.randn(5, 2).double(), torch.randn(5, 4).double()
    x = {"left": left, "right": right} if form is dict else form((left, right))
    reference = Whole().double()
    reference.load_state_dict(network.state_dict())
    assert relative_error(rows(network, x), torch.stack([
        jacobian(reference, (left[n : n + 1], right[n : n + 1]))[0] for n in range(5)
    ])) < 1e-12


# ------------------------------------------------------------------- traps: the first examples mislead the search


class SequenceFirst(nn.Module):
    """(T, N, D) throughout, a ReLU, and only the first position is read: most rows have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x.transpose(0, 1))))[0]


def alive(pattern: list[int], length: int = 3) -> Tensor:
    """Inputs whose hidden units are alive where the pattern says so."""
    signs = torch.tensor([1.0 if each else -1.0 for each in pattern]).double()
    base = 1 + torch.rand(len(pattern), length, 2, generator=torch.Generator().manual_seed(3)).double()
    return base * signs[:, None, None]


@pytest.mark.parametrize("pattern", list(itertools.product([0, 1], repeat=4)), ids=str)
@pytest.mark.parametrize("order", ["examples first", "positions first"])
def test_dead_units_among_the_first_examples(order, pattern):
    """Whichever of the first examples are dead, rows of the later ones are right."""
    torch.manual_seed(1)
    network = SequenceFirst().double()
    with torch.no_grad():
        network.one.weight.abs_()
        network.one.bias.zero_()
    module = network if order == "positions first" else nn.Sequential(network.one, nn.ReLU(), network.two, nn.Flatten())
    x = alive([*pattern, 1, 0, 1, 1, 1])
    assert relative_error(rows(module, x), jacobian(module, x)) < 1e-12


class TwoViews(nn.Module):
    """One square matrix used as it is, transposed, and with its entries in a third order; all of the same shape."""

    def __init__(self, views: str) -> None:
        super().__init__()
        self.w, self.views = nn.Parameter(torch.randn(4, 4)), views

    def forward(self, x: Tensor) -> Tensor:
        views = {
            "plain": lambda: self.w,
            "transposed": lambda: self.w.T,
            "mixed": lambda: self.w.reshape(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4),
            "swapped": lambda: self.w.reshape(2, 2, 2, 2).permute(1, 0, 3, 2).reshape(4, 4),
            "rows": lambda: self.w[:, :2],
        }
        for name in self.views.split("+"):
            w = views[name]()
            x = torch.tanh(F.linear(x[:, : w.shape[1]], w)) + x
        return x


@pytest.mark.parametrize("views", ["mixed+transposed", "swapped+mixed+plain", "rows+plain+rows", "transposed+swapped"])
def test_views_of_one_parameter_are_distinguished(views):
    torch.manual_seed(2)
    network, x = TwoViews(views).double(), torch.randn(6, 4).double()
    assert relative_error(rows(network, x), jacobian(network, x)) < 1e-12


class Module(nn.Module):
    """A function of x and one parameter."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "x + w": ((3,), lambda x, w: (x + w).tanh()),
    "w - x": ((3,), lambda x, w: (w - x).tanh()),
    "x - 2 w": ((3,), lambda x, w: torch.sub(x, w, alpha=2).tanh()),
    "w * x": ((3,), lambda x, w: (w * x).tanh()),
    "scalar * x": ((), lambda x, w: (w * x).tanh()),
    "one * x": ((1,), lambda x, w: (w * x).tanh()),
    "column * x": ((1, 1), lambda x, w: (w * x).tanh()),
    "x / w": ((3,), lambda x, w: x / (w + 5)),
    "w / x": ((3,), lambda x, w: w / (x + 9)),
    "x ** w": ((3,), lambda x, w: (x.abs() + 1) ** w),
    "exp(w) x": ((3,), lambda x, w: w.exp() * x),
    "w itself": ((3,), lambda x, w: w.expand(len(x), -1)),
    "w itself + 0 x": ((3,), lambda x, w: w + 0 * x),
    "w as initial state": ((3,), lambda x, w: (w.repeat(len(x), 1) * x).cumsum(1)),
    "x @ w": ((3, 2), lambda x, w: (x @ w).tanh()),
    "x @ vector": ((3,), lambda x, w: (x @ w).tanh()),
    "(w @ xT).T": ((2, 3), lambda x, w: (w @ x.T).T.tanh()),
    "einsum": ((2, 3), lambda x, w: torch.einsum("ni,oi->no", x, w).tanh()),
    "batched einsum": ((2, 3, 3), lambda x, w: torch.einsum("ni,hij,nj->nh", x, w, x)),
    "addmm with beta": ((3, 2), lambda x, w: torch.addmm(torch.ones(2).double(), x, w, beta=0.5, alpha=2.0).tanh()),
    "baddbmm": ((1, 3, 2), lambda x, w: torch.bmm(x[:, None], w.expand(len(x), -1, -1)).tanh()[:, 0]),
    "outer": ((3,), lambda x, w: (x[:, :, None] * w).tanh().sum(2)),
    "where": ((3,), lambda x, w: torch.where(x > 0, w, x) * x),
    "clamp": ((3,), lambda x, w: torch.maximum(x, w)),
    "stack": ((3,), lambda x, w: torch.stack([x, w.expand_as(x)], 1).prod(1)),
    "cat": ((1, 3), lambda x, w: torch.cat([x, w.expand(len(x), -1)], 1).tanh()),
    "softmax(w)": ((3,), lambda x, w: x * w.softmax(0)),
    "normalized w": ((2, 3), lambda x, w: F.linear(x, w / w.norm(dim=1, keepdim=True))),
    "w wT": ((3, 2), lambda x, w: x @ (w @ w.T)),
    "w[i]": ((2, 3), lambda x, w: x * w[0] + w[1].tanh()),
    "w[::2]": ((5, 3), lambda x, w: F.linear(x, w[::2])),
    "w.flip": ((3,), lambda x, w: x * w.flip(0)),
    "gathered": ((5,), lambda x, w: x * w[(x.abs() * 2).long().clamp(max=4)]),
    "lerp": ((3,), lambda x, w: torch.lerp(x, w.expand_as(x), 0.3).tanh()),
    "addcmul": ((3,), lambda x, w: torch.addcmul(x, x, w, value=0.5).tanh()),
    "in place": ((3,), lambda x, w: x.tanh().mul_(w).add_(w)),
    "integers of examples": ((7, 3), lambda x, w: F.embedding((x * 3).long().abs().clamp(max=6), w).sum(1)),
    "conv by w": ((2, 1, 2), lambda x, w: F.conv1d(x[:, None], w, stride=2).flatten(1).tanh()),
    "conv of w": ((1, 1, 4), lambda x, w: F.conv1d(w, x[:, None, :2])[0, :, :2]),
    "checkpoint": (
        (3, 3),
        lambda x, w: torch.utils.checkpoint.checkpoint(lambda y: (y @ w).tanh(), x, use_reentrant=False),
    ),
    "reordered examples": ((3, 2), lambda x, w: (x.flip(0) @ w).tanh().flip(0)),
    "chunks of examples": ((3, 2), lambda x, w: torch.cat([(part @ w).tanh() for part in x.split(2)])),
    "examples one by one": ((3, 2), lambda x, w: torch.stack([(row @ w).tanh() for row in x])),
    "doubled examples": (
        (3, 2),
        lambda x, w: (torch.cat([x, -x]) @ w).tanh().unflatten(0, (2, len(x))).square().sum(0),
    ),
    "detached": ((3, 2), lambda x, w: (x @ w) * (x @ w).detach()),
    "double backward": ((3, 2), lambda x, w: (x @ w).square() * 0.5),
    "second use behind the first": ((3, 3), lambda x, w: ((x @ w).tanh() @ w.T).tanh() @ w),
    "view of view": ((6,), lambda x, w: x @ w.view(2, 3).t().contiguous().view(3, 2)),
    "complex": ((3,), lambda x, w: torch.fft.rfft(x * w).abs()),
    "spectrum * w": ((2,), lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * w, n=3)),
    "spectrum * complex w": ((2, 2), lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(w), n=3)),
    "spectrum + complex w": ((2, 2), lambda x, w: (torch.fft.rfft(x) + torch.view_as_complex(w)).abs()),
    "spectrum @ complex w": ((2, 2, 2), lambda x, w: (torch.fft.rfft(x) @ torch.view_as_complex(w)).abs()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_parameters_used_in_any_way(use):
    """Every differentiable use of a parameter: by a rule or by the fallback, the rows are exact."""
    shape, function = USES[use]
    torch.manual_seed(4)
    network, x = Module(shape, function).double(), torch.randn(6, 3).double()
    truth = jacobian(network, x)
    for batch_size in (None, 1, 4):
        assert relative_error(rows(network, x, batch_size=batch_size), truth) < 1e-10


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("name", ["encoder_sequence_first", "cnn_groups", "direct_parameters", "transformer_tied"])
def test_any_number_of_examples(name, n):
    """Numbers of examples that equal a number of positions, of channels, of classes, or one."""
    case = problem(name)
    x = torch.cat([case.x, case.x_new, case.x])[:n]
    assert relative_error(rows(case.network, x), jacobian(case.network, x)) < 1e-10


def test_sequences_of_other_lengths_in_later_batches():
    """Plans belong to a graph, not to a shape: the same network on longer inputs."""
    torch.manual_seed(5)
    layers = nn.Conv1d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 2)
    network = nn.Sequential(*layers).double()
    factors, shapes = JacobianPass(Network(network), torch.float64), Network(network).shapes
    for length in (5, 9, 3):
        x = torch.randn(4, 2, length).double()
        assert relative_error(factors.rows(x).dense(shapes).transpose(0, 1), jacobian(network, x)) < 1e-12


class Branches(nn.Module):
    """Another graph for batches whose first entry is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        positive = (x[:, :1] > 0).to(x)
        if bool(positive.all()):
            return self.out(self.one(x).tanh())
        return self.out(positive * self.one(x).tanh() + (1 - positive) * self.two(x).sin())


def test_graphs_that_depend_on_the_data():
    torch.manual_seed(6)
    network, x = Branches().double(), torch.randn(9, 3).double()
    x[:3, 0] = x[:3, 0].abs()
    truth = jacobian(network, x)
    for batch_size in (1, 3, 9):
        assert relative_error(rows(network, x, batch_size=batch_size), truth) < 1e-12


class Silent(torch.autograd.Function):
    """The identity, with no gradient at all where it is zero."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor | None:
        return gradient if bool(gradient.any()) else None


class SideBySide(nn.Module):
    """Two networks side by side: no output reaches the nodes of both, and the backward pass says so with None."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([Silent.apply(part(x)) for part in self.parts], 1)


def test_seeds_that_do_not_reach_a_node():
    """Rows are zero there, whether the first seed is the one that does not reach it or the last."""
    torch.manual_seed(9)
    network, x = SideBySide().double(), torch.randn(5, 3).double()
    truth = jacobian(network, x)
    assert relative_error(rows(network, x), truth) < 1e-12
    root = torch.zeros(5, 4, 3).double()
    root[:, 0] = torch.randn(5, 3).double()  # one half is reached by no seed
    assert relative_error(rows(network, x, root=root), torch.einsum("ncr,ncp->nrp", root, truth)) < 1e-12


@pytest.mark.parametrize("layer", ["conv", "tokens", "positions first", "single"])
def test_gradients_lie_as_the_product_reads_them(layer):
    """The seeds lie next to the examples, so that one product per example needs no copy of the gradients.

    Where there is no product of positions, a Kronecker factor is one product over all seeds and examples.
    """
    torch.manual_seed(10)
    networks = {
        "conv": nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)),
        "tokens": nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)),
        "positions first": SequenceFirst(),
        "single": nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 2)),
    }
    network = networks[layer].double()
    x = torch.randn(5, 3, 2).double() if layer == "positions first" else torch.randn(5, 16, 4).double()
    x = x.reshape(5, 2, 4, 8)[..., :4] if layer == "conv" else x
    block = JacobianPass(Network(network), torch.float64, keep_factors=True).rows(x).blocks[0]
    k, n, g, t, o = block.b.shape
    assert (g, n) == (1, 5) and (t > 1) == (layer != "single")
    matrices = block.b.permute(1, 2, 0, 4, 3).reshape(n, g, k * o, t) if t > 1 else block.b.reshape(k * n, o)
    assert matrices.data_ptr() == block.b.data_ptr()


class Convolutions(nn.Module):
    """With a bias, in groups, of a view of a parameter, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1, groups=2)
        self.view = nn.Parameter(torch.randn(3, 4, 4, 3) / 5)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return self.out(torch.tanh(F.conv2d(h, self.view.permute(2, 1, 0, 3))).mean((2, 3)))


@pytest.mark.parametrize("short", [0, 10**9])
def test_short_rows_are_made_at_once(short, monkeypatch):
    """Of a convolution with many positions, one seed at a time; never where factors are wanted."""
    monkeypatch.setattr(tuning, "LONG_GRADIENT", short)
    torch.manual_seed(11)
    network, x = Convolutions().double(), torch.randn(5, 2, 6, 6).double()
    root = torch.randn(5, 3, 2).double()
    truth = torch.einsum("ncr,ncp->nrp", root, jacobian(network, x))
    assert relative_error(rows(network, x, root=root), truth) < 1e-12
    kept = JacobianPass(Network(network), torch.float64, keep_factors=True)
    found = kept.rows(x, root)
    assert relative_error(found.dense(kept.network.shapes).transpose(0, 1), truth) < 1e-12
    assert {block.weight for block in found.blocks if isinstance(block, Outer)} >= {"one.weight", "two.weight", "view"}
    factors = JacobianPass(Network(network), torch.float64)
    factors.rows(x)
    made = {use.name for plan in factors.checked.plans.values() for use in plan.uses if use.at_once}
    assert ({"one.weight", "two.weight"} <= made) == (short == 0) and "view" not in made


def test_the_last_layer_stores_its_gradients_once():
    """They are the seeds, the same for all examples; those of other layers are not."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    blocks = JacobianPass(Network(network), torch.float64).rows(torch.randn(7, 3).double()).blocks
    held = {block.weight: (block.b.shape[1], block.constant) for block in blocks if isinstance(block, Outer)}
    assert held == {"0.weight": (7, False), "2.weight": (1, True)}


@pytest.mark.parametrize("sizes", [(6, 5), (1, 6), (40,)])
def test_a_wrong_rule_is_excluded_from_the_next_plan(sizes, monkeypatch):
    """A plan is believed until a batch disagrees; the one made then leaves that parameter, and no other, out."""

    def doubled(use):
        reader = rules._addmm(use)
        return reader and rules.Extractor(lambda gradient: reader.extract(2.0 * gradient) if use.operand else None)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(x * self.scale)).tanh()

    torch.manual_seed(3)
    network = Scaled().double()
    monkeypatch.setitem(rules.RULES, "AddmmBackward", doubled)
    factors = JacobianPass(Network(network), torch.float64)
    for size in sizes:
        x = torch.randn(size, 4).double()
        found = factors.rows(x).dense(factors.network.shapes).transpose(0, 1)
        assert relative_error(found, jacobian(network, x)) < 1e-12
    (plan,) = factors.checked.plans.values()
    assert set(plan.unmatched) == {"linear.weight", "linear.bias"}
    assert {use.name for use in plan.uses} == {"scale"}


def test_norm_layers_do_not_count_towards_the_working_set():
    """Their rows are made one seed at a time, so that batches stay large."""
    def held(layer: nn.Module) -> list[int]:
        network = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), layer, nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
        factors = JacobianPass(Network(network.double().eval()), torch.float64)
        factors.rows(torch.randn(3, 1, 8, 8).double())
        return sorted(edge.held(5, FusedLayers()) for edge in factors.sizes.edges)

    assert held(nn.Identity()) == [5 * 8 * 2, 5 * 8 * 144]
    assert held(nn.BatchNorm2d(4)) == [5 * 8 * 2, 8 * 144, 5 * 8 * 144]


# ------------------------------------------------------- sums over examples, or over seeds, in place of rows


class Kinds(nn.Module):
    """Layers of one position in both orders of a product, and all that cannot be added up as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3)  # several positions
        self.first, self.bare = nn.Linear(12, 5), nn.Linear(5, 4, bias=False)
        self.turned = nn.Parameter(torch.randn(3, 4) / 2)  # W xᵀ: examples in columns
        self.twice = nn.Linear(3, 3)  # two uses of one weight
        self.sliced = nn.Parameter(torch.randn(9, 3) / 2)  # a part of a parameter
        self.shifted, self.shift = nn.Parameter(torch.randn(4, 6) / 2), nn.Parameter(torch.randn(4))  # added apart
        self.wide, self.out = nn.Linear(4, 40), nn.Linear(40, 3)  # more outputs than examples

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(torch.tanh(self.conv(x)).flatten(1)))
        h = torch.tanh(self.turned @ torch.tanh(self.bare(h)).T).T
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        h = torch.tanh(torch.tanh(F.linear(h, self.sliced[3:])) @ self.shifted.T + self.shift)
        return self.out(torch.tanh(self.wide(h)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("squared", [False, True])
def test_output_gradients_are_added_up_where_sums_are_enough(dtype, squared):
    """Layers of one position and one use, a bias with them; sums are in the algebra's type, inputs as they are."""
    torch.manual_seed(3)
    network, x = Kinds().to(dtype), torch.randn(30, 2, 6).to(dtype)
    root = torch.randn(30, 3, 2).double()
    factors = JacobianPass(Network(network), torch.float64, keep_factors=True)
    (found,) = factors.batches(x, root, None, fused_layers=FusedLayers(dict.fromkeys(factors.network.names), squared))
    folded = {block.weight: block for block in found.blocks if isinstance(block, FusedSums)}
    wide = {"wide.weight": "wide.bias"} if squared else {}  # a product larger than its rows is not made seed by seed
    assert {weight: block.bias for weight, block in folded.items()} == wide | {
        "first.weight": "first.bias", "bare.weight": None, "shifted": "shift", "out.weight": "out.bias"
    }
    whole = {block.weight: block for block in factors.rows(x, root).blocks if isinstance(block, Outer)}
    double = copy.deepcopy(network).double()


    def summed(b: Tensor) -> Tensor:
        return b.square().sum(0) if squared else torch.einsum("kno,knp->op", b, b).tril()

    for weight, block in folded.items():
        assert block.sums.dtype == block.a.dtype == torch.float64 and block.squared == squared
        b, a = whole[weight].full_b()[:, :, 0, 0], whole[weight].a[:, 0, 0]
        sums = block.sums if squared else block.sums.tril()
        assert relative_error(sums, summed(b)) < 1e-12
        assert torch.equal(block.a, a)
        names = list(dict(double.named_parameters()))
        if block.bias is not None:  # rows of a bias are b
            sizes = [p.numel() for p in double.parameters()]
            start = sum(sizes[: names.index(block.bias)])
            own = jacobian(double, x.double())[..., start : start + block.sums.shape[1]]
            truth = summed(torch.einsum("ncr,nco->rno", root, own))
            assert relative_error(sums, truth) < (1e-12 if dtype == torch.float64 else 1e-5)
    assert not any(isinstance(block, FusedSums) for block in factors.rows(x, root).blocks)
    few = next(factors.batches(x[:4], root[:4], None, fused_layers=FusedLayers(dict.fromkeys(factors.network.names),
                                                                               squared)))
    assert not any(isinstance(block, FusedSums) for block in few.blocks)  # all four are held against autograd anyway


def test_only_asked_for_weights_are_added_up():
    torch.manual_seed(3)
    network, x = Kinds().double(), torch.randn(30, 2, 6).double()
    factors = JacobianPass(Network(network), torch.float64, keep_factors=True)
    (found,) = factors.batches(x, None, None, fused_layers=FusedLayers(dict.fromkeys(["bare.weight", "twice.weight"])))
    assert [block.weight for block in found.blocks if isinstance(block, FusedSums)] == ["bare.weight"]
    fold = FusedLayers({"bare.weight": None})
    sizes = {edge.plain: edge.held(7, fold) // edge.size for edge in factors.sizes.edges if edge.plain}
    assert sizes["bare.weight"] == 1 and sizes["first.weight"] == 7


@pytest.mark.parametrize("squared", [False, True])
def test_sums_of_a_wrong_rule_are_never_returned(monkeypatch, squared):
    """The proof looks at some examples' gradients; if they disagree, all rows are made and looked into."""
    def doubled(use):
        reader = rules._addmm(use)
        return reader and rules.Extractor(lambda gradient: reader.extract(2.0 * gradient) if use.operand else None)

    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    factors, x = JacobianPass(Network(network), torch.float64, keep_factors=True), torch.randn(30, 3).double()
    next(factors.batches(x, None, None))  # the plan is made while the rule holds
    monkeypatch.setitem(rules.RULES, "AddmmBackward", doubled)
    monkeypatch.setattr(FusedAccumulation, "add", _halved(FusedAccumulation.add))
    (found,) = factors.batches(x, None, None, fused_layers=FusedLayers(dict.fromkeys(factors.network.names), squared))
    assert relative_error(found.dense(factors.network.shapes).transpose(0, 1), jacobian(network, x)) < 1e-12


def _halved(fold):
    return lambda self, index, gradient, k: fold(self, index, gradient / 2, k)


@pytest.mark.parametrize("squared", [False, True])
def test_an_example_without_finite_rows_is_named_when_sums_are_made(squared):
    class Kink(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.sqrt((self.first(x) * (x[:, :1] != 0)).abs()))  # at zero, its slope is infinite

    network, x = Kink().double(), torch.randn(40, 3).double()
    factors = JacobianPass(Network(network), torch.float64, keep_factors=True)
    x[17] = 0.0
    with pytest.raises(NonFiniteError, match="example 117"):
        list(factors.batches(x, None, None, offset=100, fused_layers=FusedLayers(dict.fromkeys(factors.network.names),
                                                                                 squared)))
    with pytest.raises(NonFiniteError, match="example 117"):
        factors.vjp(x, torch.ones(40, 2), offset=100)


def test_gradients_of_a_network_in_16_bits_are_not_summed_in_16_bits():
    network = nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(12, 1)).half()
    x, large = torch.arange(8000).view(2000, 4) % 2, torch.full((2000, 1), 100.0)
    found = JacobianPass(Network(network), torch.float64).vjp(x, large)
    expected = JacobianPass(Network(network.double()), torch.float64).vjp(x, large)
    assert relative_error(found, expected) < 1e-3


# ------------------------------------------------------------------------------------------------ rows at any theta


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_at_any_theta(name, monkeypatch):
    """They equal those of a new network with these weights; no network is copied, and both keep their weights."""
    case = fresh(name)
    network = Network(case.network)
    factors = JacobianPass(network, torch.float64)
    factors.prepare(case.x)
    theta = network.theta + 0.1 * torch.randn(network.num_parameters, generator=torch.Generator().manual_seed(5)).to(
        network.theta)
    moved = copy.deepcopy(case.network)
    nn.utils.vector_to_parameters(theta, [dict(moved.named_parameters())[key] for key in network.names])
    before = [{key: (value.data_ptr(), value.clone()) for key, value in module.state_dict().items()}
              for module in (case.network, network.module)]
    with monkeypatch.context() as watched:
        watched.setattr(copy, "deepcopy", None)
        found = factors.rows(case.x, theta=theta)
        known = factors.rows(case.x)
    after = JacobianPass(Network(moved), torch.float64).rows(case.x)
    limit = 1e-12 if next(iter(network.parameters.values())).dtype == torch.float64 else 1e-5
    assert relative_error(found.dense(network.shapes), after.dense(network.shapes)) < limit
    assert relative_error(found.f, after.f) < limit
    assert relative_error(known.dense(network.shapes), found.dense(network.shapes)) > 1e-3 or "linear" in name
    for module, saved in zip((case.network, network.module), before, strict=True):
        for key, value in module.state_dict().items():
            assert torch.equal(value, saved[key][1])
    assert all(p.data_ptr() == before[1][key][0] for key, p in network.parameters.items())


def test_plans_are_used_at_another_theta_and_after_a_move(monkeypatch):
    case = problem("cnn_groups")
    network = Network(case.network)
    factors = JacobianPass(network, torch.float64)
    factors.rows(case.x)
    monkeypatch.setattr("ntk_laplace.jacobian.checked_blocks.make_plan", None)
    theta = 1.5 * network.theta
    at_theta = factors.rows(case.x, theta=theta)
    moved = factors.on(network.at(theta), torch.float64).rows(case.x)
    assert relative_error(moved.dense(network.shapes), at_theta.dense(network.shapes)) < 1e-12


def test_theta_of_another_length_is_refused_and_a_failing_pass_restores_the_weights():
    network = Network(problem("deep_mlp").network)
    factors, theta = JacobianPass(network, torch.float64), network.theta
    x = problem("deep_mlp").x
    with pytest.raises(DataError, match=r"expected theta of shape .*; got \(3,\)"):
        factors.rows(x, theta=theta[:3])
    with pytest.raises(NonFiniteError):
        factors.rows(x, theta=torch.full_like(theta, float("nan")))
    assert torch.equal(network.theta, theta)


# ---------------------------------------------------------------------------------------- networks that are refused


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: x + x.roll(1, 0),
        lambda x: x / x.norm(),
        lambda x: x.softmax(0),
        lambda x: x.sort(0).values,
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: x + 1e-4 * x.sum(0),
    ],
    ids=["centered", "neighbor", "norm", "softmax", "sorted", "batch norm", "a little"],
)
def test_mixing_is_refused(mix):
    torch.manual_seed(7)
    network = Module((3, 2), lambda x, w: mix(x) @ w).double()
    with pytest.raises(NetworkError, match="own example"):
        rows(network, torch.randn(6, 3).double())


def test_mixing_of_far_apart_examples_is_refused_or_exact():
    """Only the first examples are probed at the door: mixing that starts later must not pass in silence."""
    network = Module((3, 2), lambda x, w: torch.cat([x[:20] @ w, x[20:] @ w + x[20:].mean(0) @ w])).double()
    with pytest.raises(NetworkError, match="own example"):
        rows(network, torch.randn(24, 3, generator=torch.Generator().manual_seed(8)).double())


@pytest.mark.parametrize("name", ["deep_mlp", "cnn_groups"])
def test_an_untracked_caller_gets_rows_all_the_same(name):
    case = fresh(name)
    truth = jacobian(case.network, case.x)
    with torch.no_grad():
        assert relative_error(rows(case.network, case.x), truth) < 1e-12
    assert num_examples(take(case.x, slice(0, 2))) == 2
    assert call(case.network, case.x).requires_grad


class Flattening(nn.Module):
    """Code that asks for contiguous activations, as much of the world's does, with a parameter of five axes."""

    def __init__(self, by_view: bool) -> None:
        super().__init__()
        self.by_view = by_view
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 3)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4).view(1, 4, 1, 1, 1))

    def forward(self, x):
        x = torch.tanh(self.norm(self.conv(x))) * self.gain.squeeze(-1)
        return self.out(x.view(len(x), -1) if self.by_view else x.flatten(1))


@pytest.mark.parametrize("by_view", [False, True])
def test_channels_last_only_if_the_network_supports_it(by_view):
    module = Flattening(by_view).eval()
    network, x = Network(module), torch.randn(12, 2, 4, 4)
    found = JacobianPass(network, torch.float64).rows(x)
    laid_out = network.module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert laid_out != by_view and module.conv.weight.is_contiguous()
    exact = JacobianPass(Network(module.double()), torch.float64).rows(x.double())
    shapes = network.shapes
    assert relative_error(found.dense(shapes), exact.dense(shapes)) < 1e-5


@pytest.mark.parametrize(("kernel", "stride", "last"), [(1, 2, False), (1, 1, True), (3, 2, True)])
def test_no_channels_last_where_torch_corrupts_memory(kernel: int, stride: int, last: bool) -> None:
    """The weight gradient of a strided 1 x 1 convolution in channels last aborts the process on some CPUs."""
    shortcut = nn.Conv2d(2, 4, kernel, stride, bias=False)
    module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), shortcut, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    network, x = Network(module), torch.randn(6, 3, 18, 18)
    found = JacobianPass(network, torch.float64).rows(x)
    assert (not network.module[0].weight.is_contiguous()) == last
    exact = JacobianPass(Network(module.double()), torch.float64).rows(x.double())
    assert relative_error(found.dense(network.shapes), exact.dense(network.shapes)) < 1e-5


class Gated(nn.Module):
    """Positions first inside, and silent for inputs whose mean is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.mixer(x.transpose(0, 1).reshape(-1, 3)).tanh().view(x.shape[1], len(x), 4)
        gate = F.relu(x.mean((1, 2))).sign() * x.mean((1, 2))
        return self.head(positions.sum(0) * gate[:, None])


def test_a_plan_made_in_silence_does_not_last():
    """What could not be seen on silent examples is found out on the first ones that speak."""
    torch.manual_seed(9)
    network, x = Gated().double(), torch.randn(12, 4, 3).double()
    silent, loud = x - x.mean((1, 2), keepdim=True) - 1.0, x - x.mean((1, 2), keepdim=True) + 1.0
    factors, shapes = JacobianPass(Network(network), torch.float64), Network(network).shapes
    for part in (silent, loud, torch.cat([silent[:6], loud[:6]])):
        found = factors.rows(part).dense(shapes).transpose(0, 1)
        assert relative_error(found, jacobian(network, part)) < 1e-12
    assert jacobian(network, silent)[..., : 4 * 3].abs().max() == 0.0


class Companions(nn.Module):
    """A weight with its bias, a vector of the same length that is none, and a layer whose weight is used once more."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.weight, self.bias = (nn.Parameter(torch.randn(*size)) for size in ((4,), (4, 4), (4,)))
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.weight, self.bias) * self.shift)
        return self.out(torch.tanh(F.linear(torch.tanh(self.layer(x)), self.layer.weight)))


def test_a_bias_joins_its_weight_where_its_rows_are_sums():
    """Found by their values: a vector that merely has the bias's shape stays apart, and nothing takes the fallback."""
    torch.manual_seed(11)
    network, x = Companions().double(), torch.randn(6, 4).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = JacobianPass(Network(network), torch.float64, keep_factors=True).rows(x)
    pairs = {block.weight: block.bias for block in found.blocks if isinstance(block, Outer)}
    assert pairs == {"weight": "bias", "layer.weight": None, "out.weight": "out.bias"}
    assert relative_error(rows(network, x), jacobian(network, x)) < 1e-12


class Weighed(nn.Module):
    """Takes its inputs apart by name; a layer inside may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(x)) * weight[:, None])


@pytest.mark.parametrize("where", ["whole", "layer", "twice"])
def test_a_compiled_network_is_read_as_it_was_written(where):
    """One fused node would hide the layers: every parameter would take the fallback, and KFAC have no factors."""
    torch.manual_seed(12)
    plain, x = Weighed().double(), {"x": torch.randn(6, 4).double(), "weight": torch.randn(6).double()}
    compiled = copy.deepcopy(plain)
    if where != "whole":
        compiled.layer = torch.compile(compiled.layer, backend="aot_eager")
    if where != "layer":
        compiled = torch.compile(compiled, backend="aot_eager")
    kind, names = type(compiled), [name for name, _ in compiled.named_parameters()]
    network = Network(compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = JacobianPass(network, torch.float64, keep_factors=True).rows(x)
    assert all(isinstance(block, Outer) for block in found.blocks) and network.names == names
    assert relative_error(found.dense(network.shapes).transpose(0, 1), jacobian(plain, x)) < 1e-12
    moved = network.at(2.0 * network.theta)
    assert not torch.allclose(moved.without_grad(x), network.without_grad(x))
    assert type(compiled) is kind and "OptimizedModule" in "".join(type(part).__name__ for part in compiled.modules())
