"""Computations in 16 bits: the numbers of the float64 network up to the rounding of the type, and no fallback."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.errors import MixedExamplesError
from ntk_laplace.jacobian import JacobianPass, Lookup, Outer, rules
from ntk_laplace.model.network import Network, probe
from ntk_laplace.model.network.precision import Products, whole_convolutions
from pairwise import pairwise
from reference import jacobian, relative_error
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:INF's low-rank part")

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
STRUCTURES = ["gp", "full", "kfac", "ekfac", "diag", "inf"]
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Adapter(nn.Module):
    """A frozen layer with a low-rank addition of its own floating type, as peft writes it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.base(x)
        return found + self.up(self.down(x.to(self.down.weight.dtype))).to(found.dtype)


class Adapters(nn.Module):
    """Embedding, attention-free block and head in the base's type; adapters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6).requires_grad_(False)
        self.one, self.two = Adapter(nn.Linear(6, 8), 6, 8), Adapter(nn.Linear(8, 6), 8, 6)
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.head = Adapter(nn.Linear(6, 3), 6, 3)

    def to_half(self, dtype: torch.dtype) -> Adapters:
        for part in self.modules():
            if isinstance(part, Adapter):
                part.base.to(dtype)
        self.table.to(dtype)
        self.norm.to(dtype)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.norm(x + self.two(torch.tanh(self.one(x))))
        return self.head(x[:, -1]).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


class Layers(nn.Module):
    """Convolution, batch norm, embedding, attention, layer norm and linear layers, all trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(7, 5), nn.Conv1d(5, 4, 2)
        self.batch_norm, self.norm = nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.linear, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.batch_norm(self.first(self.table(tokens).transpose(1, 2))))
        x = x.transpose(1, 2)
        x = self.attention(self.norm(x), x, x, need_weights=False)[0] + x  # reads slices of one weight
        x = torch.tanh(self.linear(self.norm(x)))
        return self.head(x.mean(1))


class Autocast(nn.Module):
    """Opens `torch.autocast` in its own forward."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.inner(tokens).float()


def _generic(network: nn.Module) -> nn.Module:
    """Off the zeros and ones of initial norms, and numbers that all 16-bit types hold."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)).copy_(parameter.bfloat16().half().float())
    return network.eval()


# name of the case -> network in float32, the one in 16 bits, and what the fit runs in
CASES: dict[str, Callable[[torch.dtype], tuple[nn.Module, nn.Module, Callable]]] = {
    "adapters": lambda half: _case(Adapters(), lambda net: net.to_half(half)),
    "autocast inside": lambda half: _case(Layers(), lambda net: Autocast(net, half).eval()),
    "autocast outside": lambda half: _case(
        Layers(), lambda net: net, functools.partial(torch.autocast, "cpu", half)
    ),
    "all": lambda half: _case(Layers(), lambda net: net.to(half)),
}


def _case(network: nn.Module, change: Callable, context: Callable = nullcontext) -> tuple:
    plain = _generic(network)
    return plain, change(copy.deepcopy(plain)), context


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 7, (24, 4)), torch.randint(0, 3, (24,))


@pytest.mark.parametrize(("case", "half", "structure"), pairwise(CASES, HALVES, STRUCTURES))
def test_a_network_in_16_bits_is_the_exact_one_up_to_rounding(case, half, structure, data):
    """No false alarm, no fallback (a warning is an error here), no number of another structure."""
    plain, rounded, context = CASES[case](HALVES[half])
    exact = ntkl.laplace(plain.double(), data, ntkl.Categorical(), structure=structure)
    with context():
        found = ntkl.laplace(rounded, data, ntkl.Categorical(), structure=structure)
    limit = ROUNDING[HALVES[half]]
    assert relative_error(found.log_det(), exact.log_det()) < limit
    assert relative_error(found.log_marginal_likelihood(), exact.log_marginal_likelihood()) < limit
    assert relative_error(found.latent_moments(data[0])[1], exact.latent_moments(data[0])[1]) < 2 * limit


@pytest.mark.parametrize(("keep_factors", "case", "half"), pairwise([False, True], CASES, HALVES))
def test_rows_in_16_bits(case, half, keep_factors, data):
    """Layers keep their factors, in the floating type of the algebra."""
    plain, rounded, context = CASES[case](HALVES[half])
    with context():
        network = Network(rounded)
    found = JacobianPass(network, torch.float64, keep_factors).rows(data[0])
    truth = jacobian(plain.double(), data[0])
    assert relative_error(found.dense(network.shapes).transpose(0, 1), truth) < 2 * ROUNDING[HALVES[half]]
    kinds = {type(block) for block in found.blocks}
    assert all(values.dtype == torch.float64 for block in found.blocks for values in block.dense().values())
    if keep_factors:
        shapes = {name: parameter for name, parameter in network.parameters.items() if parameter.ndim > 1}
        kept = {name for block in found.blocks if isinstance(block, (Outer, Lookup)) for name in block.names}
        assert kinds >= {Outer} and shapes.keys() <= kept


def test_the_precision_is_that_of_the_computation():
    def precision(network: nn.Module, x: Tensor) -> torch.dtype:
        door = Network(network.eval())
        probe(door, x)
        return door.precision

    class FrozenBelow(nn.Module):
        """The graph begins behind the layers that round."""

        def __init__(self, autocast: bool) -> None:
            super().__init__()
            self.below, self.head, self.autocast = nn.Linear(3, 4), nn.Linear(4, 2), autocast
            if not autocast:
                self.below.bfloat16()
            self.below.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                x = self.below(x.to(self.below.weight.dtype))
            return self.head(x.float())

    class Constant(nn.Module):
        """A constant in float32 rounds nothing in float64."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + torch.linspace(0.0, 1.0, 3).sin())

    class Through32(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.head(x).float()).double()

    x = torch.randn(6, 3)
    assert precision(FrozenBelow(True), x) == precision(FrozenBelow(False), x) == torch.bfloat16
    assert precision(nn.Linear(3, 2), x) == torch.float32
    assert precision(Constant().double(), x.double()) == torch.float64
    assert precision(Through32().double(), x.double()) == torch.float32
    ntkl.laplace(Through32().double(), (x.double(), torch.randn(6, 2)), ntkl.Gaussian())


# ----------------------------------------------------------------------------- what the check finds all the same


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_batch_statistics_are_found(case, half, data):
    """Whichever way a network comes to compute in 16 bits, examples that mix are refused."""

    class Mixing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.norm = inner, nn.BatchNorm1d(3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.norm(self.inner(tokens).float())

    _, rounded, context = CASES[case](HALVES[half])
    network = Mixing(rounded)
    network.norm.train()
    with context(), pytest.raises(MixedExamplesError, match="own example"):
        ntkl.laplace(network, data, ntkl.Categorical(), parameters="inner")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no factor rule covers")
def test_mixing_behind_the_first_examples_is_found(data):
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layers()

        def forward(self, tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                f = self.inner(tokens).float()
            return f if len(f) < 20 else f + f[10:].mean(0)

    network = Late().eval()
    with pytest.raises(MixedExamplesError, match="own example"):
        ntkl.laplace(network, data, ntkl.Categorical())


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_a_wrong_rule_is_found(half, data, monkeypatch):
    """The check is coarse, and still tells a gradient from its double; those parameters take the fallback."""

    def doubled(use):
        reader = rules._addmm(use)
        return reader and rules.Reader(lambda gradient: reader.read(2.0 * gradient) if use.operand else None)

    monkeypatch.setitem(rules.RULES, "AddmmBackward", doubled)
    plain, rounded, _ = CASES["autocast inside"](HALVES[half])
    network = Network(rounded)
    factors = JacobianPass(network, torch.float64)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="no factor rule covers Linear"):
        found = factors.rows(data[0]).dense(network.shapes).transpose(0, 1)
    assert relative_error(found, jacobian(plain.double(), data[0])) < 2 * ROUNDING[HALVES[half]]


# ------------------------------------------------------------------------------------------- the caller's autocast


@pytest.mark.slow
def test_a_posterior_keeps_the_precision_of_its_fit(data):
    """Fitted under autocast, it predicts in the same precision outside of it, and the other way round."""
    plain, network, context = CASES["autocast outside"](torch.bfloat16)
    with context():
        inside, reference = ntkl.laplace(network, data, ntkl.Categorical()), network(data[0])
        f, covariance = inside.latent_moments(data[0])
        assert torch.is_autocast_cache_enabled() and torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert relative_error(f, reference) < 1e-2 and relative_error(f, plain.double()(data[0])) > 1e-5
    again = inside.latent_moments(data[0])
    assert torch.equal(again[0], f) and torch.equal(again[1], covariance)
    outside = ntkl.laplace(network, data, ntkl.Categorical())
    exact = outside.predict(data[0]).probs
    with context():
        assert torch.equal(outside.predict(data[0]).probs, exact)
    assert relative_error(outside.outputs(data[0]), network(data[0])) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_algebra_is_not_autocast(structure, data):
    """In float32 it would be: autocast leaves float64 alone."""
    network = CASES["autocast inside"](torch.bfloat16)[1]
    options = {"structure": structure, "dtype": torch.float32}

    def answers() -> list[Tensor]:
        posterior = ntkl.laplace(network, data, ntkl.Categorical(), **options)
        evidence = posterior.log_marginal_likelihood()
        posterior.prior.log_precision.data += 0.3
        f, covariance = posterior.latent_moments(data[0])
        return [evidence, posterior.log_det(), f, covariance, posterior.predict(data[0], method="probit").probs]

    expected = answers()
    with torch.autocast("cpu", torch.bfloat16):
        found = answers()
    for own, truth in zip(found, expected, strict=True):
        assert own.dtype == truth.dtype and torch.equal(own, truth)


def test_casts_of_weights_are_not_kept():
    """Autocast's cache would hand the cast of an earlier pass, with its graph, to a later one."""
    with torch.autocast("cpu", torch.bfloat16):
        network, x = Network(nn.Linear(3, 2)), torch.randn(5, 3)
        before = network.evaluate(x)
        for parameter in network.parameters.values():
            parameter.data.mul_(2.0)
        assert torch.equal(network.evaluate(x), 2.0 * before)


def test_the_kernel_is_not_autocast(data):
    network, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 4)
    kernel = ntkl.gp.NTKKernel(network)
    expected = ntkl.empirical_ntk(network, x)
    other = x + 0.0  # not from the cache
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel(other).to_dense(), expected)


# ----------------------------------------------------------------------------------- products on any processor


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
def test_products_are_rounded_once(half):
    """In float32 and then to the type, forwards and backwards, in every layer that has one."""
    a, w = torch.randn(5, 4, dtype=half), torch.randn(3, 4, dtype=half).requires_grad_()
    images, kernel = torch.randn(2, 2, 6, 6, dtype=half), torch.randn(3, 2, 3, 3, dtype=half).requires_grad_()
    bias = torch.randn(3, dtype=half)

    def every(cast: Callable[[Tensor], Tensor]) -> list[Tensor]:
        own, own_kernel = cast(w), cast(kernel)
        products = [
            F.linear(cast(a), own), F.linear(cast(a), own, cast(bias)), cast(a)[None] @ own.mT,
            F.conv2d(cast(images), own_kernel), F.conv2d(cast(images), own_kernel, cast(bias), padding=1, stride=2),
            F.conv_transpose2d(cast(images), own_kernel.transpose(0, 1)),
        ]
        back = [g for y in products for g in torch.autograd.grad(y, [own, own_kernel], y.sign(), allow_unused=True)]
        return [found for found in products + back if found is not None]

    with Products():
        found = every(lambda value: value)
    expected = every(lambda value: value.float())
    assert len(found) == 12
    for own, truth in zip(found, expected, strict=True):
        assert own.dtype == half
        assert torch.equal(own, truth.to(half))


@pytest.mark.parametrize("helps", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_products_of_either_kind_give_the_same(case, helps, data, monkeypatch):
    monkeypatch.setattr(Products, "helps", staticmethod(lambda device, dtype: helps and dtype.itemsize == 2))
    plain, rounded, context = CASES[case](torch.bfloat16)
    with context():
        found = ntkl.laplace(rounded, data, ntkl.Categorical(), structure="kfac").log_det()
    exact = ntkl.laplace(plain.double(), data, ntkl.Categorical(), structure="kfac").log_det()
    assert relative_error(found, exact) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_inputs_keep_the_types_of_the_network_s_own_weights(structure, given):
    """A bfloat16 layer takes bfloat16 inputs although the linearized head is in float32; float64 becomes float32."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 6).bfloat16(), Cast(torch.float32)).requires_grad_(False)
    if given == torch.float32:
        base = nn.Sequential(Cast(torch.bfloat16), base)
    network, x = nn.Sequential(base, nn.Tanh(), nn.Linear(6, 2)), torch.randn(9, 4)
    y = torch.arange(9) % 2
    own = x.to(given) if given == torch.bfloat16 else x.double()
    features = torch.tanh(base(own.to(given))).detach()
    want = ntkl.laplace(network[2], (features, y), ntkl.Categorical(), structure=structure)
    found = ntkl.laplace(network, (own, y), ntkl.Categorical(), structure=structure)
    assert relative_error(found.log_marginal_likelihood(), want.log_marginal_likelihood()) < 1e-6
    assert relative_error(found.predict(own).probs, want.predict(features).probs) < 1e-6


class Cast(nn.Module):
    """Another floating type, without weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@pytest.mark.parametrize("conv", ["tf32", "ieee"])
@pytest.mark.parametrize("legacy", [True, False])
def test_convolutions_on_cuda_keep_all_digits_and_the_setting_comes_back(legacy: bool, conv: str) -> None:
    """With torch's older setting, its newer ones, and both mixed, which torch refuses to read."""
    cudnn = torch.backends.cudnn
    parts = cudnn.conv, cudnn.rnn
    try:
        cudnn.allow_tf32 = legacy
        if parts[0].fp32_precision != conv:
            parts[0].fp32_precision = conv
        before = [part.fp32_precision for part in parts]
        for raised in (False, True):
            with contextlib.suppress(ZeroDivisionError), whole_convolutions():
                assert "tf32" not in [part.fp32_precision for part in parts] and not (legacy and cudnn.allow_tf32)
                assert not raised or 1 / 0
            assert [part.fp32_precision for part in parts] == before
            assert before != ["tf32", "tf32"] or cudnn.allow_tf32  # torch raises an error where the two disagree
    finally:
        cudnn.allow_tf32 = True


def test_a_setting_for_all_operations_is_no_exception() -> None:
    cudnn, everywhere = torch.backends.cudnn, torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        with whole_convolutions():
            assert cudnn.conv.fp32_precision == "ieee" and torch.backends.fp32_precision == "tf32"
        assert cudnn.conv.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = everywhere
        cudnn.allow_tf32 = True


@pytest.mark.parametrize("structure", [*STRUCTURES, "nystrom", "iterative"])
def test_variances_that_overflow_are_refused(structure: str) -> None:
    """At inputs of 1e200, where outputs are finite."""
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double()
    posterior = ntkl.laplace(nn.Linear(3, 1).double(), (x, x[:, :1]), ntkl.Gaussian(0.01), structure=structure)
    assert posterior.outputs(1e200 * x).isfinite().all()
    asked = [posterior.latent_moments, posterior.latent, posterior.predict, lambda x: posterior.sample(2, x)]
    asked += [posterior.predict_interval] if structure in ("gp", "full") else []
    for ask in asked:
        with refused(ntkl.NonFiniteError, "finite variances", "overflow in torch.float64", "scaled to unit variance"):
            ask(1e200 * x)


@pytest.mark.parametrize("structure, count", [("gp", 200), ("full", 20)])
def test_an_evidence_that_rounding_moves_says_by_how_much(structure: str, count: int) -> None:
    """Each exact structure where its matrix has eigenvalues that the data do not move, beside the other one."""
    torch.manual_seed(0)
    x = 30 * torch.randn(count, 5).double()
    network = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    data, found = (x, x[:, :1].sin()), {}
    for precision in (1.0, 1e-11):
        told = pytest.warns(ntkl.NTKLaplaceWarning, match=r"rounding moves the evidence by about [\d.]+ nats")
        for name in ("gp", "full"):
            with told if name == structure and precision < 1 else nullcontext():
                found[name] = ntkl.laplace(network, data, ntkl.Gaussian(0.01), ntkl.GaussianPrior(precision), name)
        rounded, exact = found[structure], found["full" if structure == "gp" else "gp"]
        expected = 0.5 * rounded.posterior_precision.log_det_rounding
        with pytest.warns(ntkl.NTKLaplaceWarning, match=f"{expected:.2g} nats") if precision < 1 else nullcontext():
            value = float(rounded.evidence())
        assert float(rounded.log_marginal_likelihood()) == value  # silent, for searches
        error = abs(value - float(exact.evidence()))
        assert 0.05 < error / expected < 20 if precision < 1 else error < 1e-8


def test_function_space_tells_of_digits_that_it_has_lost() -> None:
    """Columns of 1e4 and a vague prior: K** is 1e11 beside variances of 1e-3, and weight space keeps its digits."""
    torch.manual_seed(0)
    x = torch.randn(40, 3).double() * torch.tensor([2e4, 50.0, 1.0]) + torch.tensor([5e4, 2000.0, 0.0])
    data, new = (x, x[:, :1] / 1e4 + 0.1 * torch.randn(40, 1)), x[:4]
    network = torch.nn.Linear(3, 1).double()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="rounding moves the evidence"):
        posterior = ntkl.laplace(network, data, ntkl.Gaussian(0.01), ntkl.GaussianPrior(0.01), "gp")
    iterative, exact = (ntkl.laplace(network, data, ntkl.Gaussian(0.01), ntkl.GaussianPrior(0.01), structure)
                        for structure in ("iterative", "full"))
    for ask in (lambda p: p.latent_moments(new)[1].flatten(), lambda p: p.latent(new).covariance_matrix.diagonal()):
        with pytest.warns(ntkl.NTKLaplaceWarning, match="few correct digits: .* scaled to unit"):
            found = ask(posterior)
        assert 1e-3 < relative_error(found, ask(exact)) < 0.2
        with pytest.warns(ntkl.NTKLaplaceWarning, match="few correct digits"):
            ask(iterative)
    scaled = (x - x.mean(0)) / x.std(0)
    alike = [ntkl.laplace(network, (scaled, data[1]), ntkl.Gaussian(0.01), ntkl.GaussianPrior(0.01), structure)
             for structure in ("gp", "full")]
    assert relative_error(*(one.latent_moments(scaled[:4])[1] for one in alike)) < 1e-8
