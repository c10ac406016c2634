"""Networks that read something other than their registered parameters and inputs, or read them in another way."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ntk_laplace as ntkl
from ntk_laplace.model.network import Caller, ManyWeights, Network, probe
from reference import jacobian, relative_error
from refusals import refused


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.hidden(x))


def made(kind: Callable[[], nn.Module] = Plain) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().eval()


def data(n: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 3).double(), torch.arange(n) % 2


# --- functions on a module that a copy does not copy


def with_lambda(network: Any) -> None:
    network.hidden = lambda x: network.a(x).tanh()


def with_wrapped_forward(network: Any) -> None:
    plain = network.forward

    @functools.wraps(plain)
    def forward(x: Tensor) -> Tensor:
        return plain(x)

    network.forward = forward


def with_hook(network: Any) -> None:
    network.b.register_forward_hook(lambda module, x, out: out + network.a.bias[:2])


def with_vmap(network: Any) -> None:
    network.hidden = torch.vmap(network.hidden)


@pytest.mark.parametrize("structure", ["gp", "diag"])
@pytest.mark.parametrize("change", [with_lambda, with_wrapped_forward, with_hook, with_vmap])
def test_a_copy_that_reads_the_caller_s_parameters_is_refused(change: Callable[[Any], None], structure: str) -> None:
    network = made()
    change(network)
    with refused(ntkl.NetworkError, "reads its own parameters", "of the network that was passed", "a method"):
        ntkl.laplace(network, data(), ntkl.Categorical(), structure=structure)


def test_functions_that_copies_do_copy() -> None:
    """Bound methods, partial ones too, and the network of another process."""
    plain, bound = made(), made()
    bound.hidden = functools.partial(bound.hidden)
    values = [ntkl.laplace(one, data(), ntkl.Categorical()) for one in (plain, bound)]
    assert relative_error(values[1].log_det(), values[0].log_det()) < 1e-12
    again = pickle.loads(pickle.dumps(values[0]))
    assert torch.equal(again.latent_moments(data()[0])[1], values[0].latent_moments(data()[0])[1])
    assert copy.deepcopy(values[0]).network.read_from_caller(plain.parameters()) == "a.weight"
    assert again.network.read_from_caller(plain.parameters()) is None
    old = copy.copy(again.network)  # as an earlier version has pickled it
    state = {name: value for name, value in vars(old).items() if name not in ("constant_rows", "follows_values")}
    restored = Network.__new__(Network)
    restored.__setstate__(state)
    assert torch.equal(restored.with_parameters(old.theta, data()[0]), old.without_grad(data()[0]))


# --- parameters that replaced values do not reach


class Listed(nn.Module):
    """Parameters that are registered, of layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 4).double(), nn.Linear(4, 2).double()]
        self.weights = nn.ParameterList(p for layer in self.layers for p in layer.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).tanh())


def test_weights_that_outputs_do_not_follow() -> None:
    """The linearized model is right; the network at other weights is refused."""
    network, (x, y) = made(Listed), data()
    plain = made()
    with torch.no_grad():
        for own, other in zip(plain.parameters(), network.parameters(), strict=True):
            own.copy_(other)
    found, expected = (ntkl.laplace(one, (x, y), ntkl.Categorical()) for one in (network, plain))
    assert relative_error(found.log_det(), expected.log_det()) < 1e-12
    for ask in (lambda: found.predict(x, method="nn"), lambda: found.elbo("nn", x=x),
                lambda: found.importance_evidence(50), lambda: found.what_ifs([[0]], linearization="moving")):
        with refused(ntkl.NetworkError, "where they are registered", "do not follow values", "nn.ModuleList"):
            ask()
    expected.predict(x, method="nn")


class Recomputing(Plain):
    """Its backward pass runs `hidden` again, with the weights that it finds then."""

    def hidden(self, x: Tensor) -> Tensor:
        return checkpoint(super().hidden, x, use_reentrant=False)


class Late(torch.autograd.Function):
    """tanh(Wx), whose backward pass reads W where it is registered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: nn.Linear) -> Tensor:
        found = nn.functional.linear(x, weight, bias).tanh()
        ctx.save_for_backward(x, found)
        ctx.layer = layer
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, found = ctx.saved_tensors
        back = grad * (1.0 - found.square())
        return back @ ctx.layer.weight, back.T @ x, back.sum(0), None


class Reading(Plain):
    """Two layers of `Late`, so that one of them has an input with a gradient."""

    def hidden(self, x: Tensor) -> Tensor:
        return Late.apply(super().hidden(x), self.c.weight, self.c.bias, self.c)


class Stacked(Plain):
    """`Reading` by autograd."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.c(super().hidden(x)).tanh()


class Normalized(torch.autograd.Function):
    """Wx/|W|, whose backward pass reads W where it is registered: W/|W| is the same at half of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        return x @ (weight / weight.norm()).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ (ctx.layer.weight / ctx.layer.weight.norm()), None, None


class ReadingNormalized(Plain):
    def hidden(self, x: Tensor) -> Tensor:
        return Normalized.apply(super().hidden(x), self.c.weight, self.c)


class Bounded(Plain):
    """It is not defined at half of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Parameter(torch.tensor(0.9))

    def hidden(self, x: Tensor) -> Tensor:
        if self.d < 0.6:
            raise ValueError("d is too small")
        return super().hidden(x) * self.d


class Around(Recomputing):
    """Examples of zeros take a way around all parameters."""

    def forward(self, x: Tensor) -> Tensor:
        others = x.any(1).nonzero().squeeze(1)
        out = x[:, :2].clone()
        return out.index_add(0, others, super().forward(x[others])) if len(others) else out


class Full(torch.autograd.Function):
    """A backward pass without enough memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")


class Offloaded(Plain):
    """Hooks of saved tensors alone change no gradient."""

    def hidden(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().hidden(x)


def deepened(kind: type[Plain]) -> Any:
    """Of one of these kinds, with a layer `c` more."""
    network = made(kind)
    torch.manual_seed(1)
    network.c = nn.Linear(network.a.out_features, network.a.out_features).double()
    return network


@pytest.mark.filterwarnings("ignore:the evidence of", "ignore:torch.func.vmap does not", "ignore:no factor rule")
@pytest.mark.parametrize(("kind", "plain"), [(Recomputing, Plain), (Reading, Stacked)])
def test_gradients_at_other_weights_that_a_backward_pass_does_not_follow(
    kind: type[Plain], plain: type[Plain]
) -> None:
    """They would mix those at the network's own; what needs no such gradient is that of the plain network."""
    x, y = data()
    found, expected = (ntkl.laplace(deepened(kind), (x, y), ntkl.Categorical()) for kind in (kind, plain))
    for ask in (
        lambda p: p.latent_moments(x)[1], lambda p: p.predict(x, "nn", generator=torch.Generator().manual_seed(0)).mean,
        lambda p: p.importance_evidence(50, generator=torch.Generator().manual_seed(0)).log_weights,
    ):
        assert relative_error(ask(found), ask(expected)) < 1e-9
    for refuse in (
        lambda: found.what_ifs([[0]], linearization="moving"), lambda: found.annealed_evidence(20, 8),
        lambda: found.latent_moments(x.clone().requires_grad_(), differentiable=True),
    ):
        with refused(ntkl.NetworkError, "for gradients at other weights", "torch.utils.checkpoint", "save_for"):
            refuse()


@pytest.mark.filterwarnings("ignore:torch.func.vmap does not", "ignore:the network is not at a minimum")
def test_hooks_of_saved_tensors_that_change_no_gradient() -> None:
    x, y = data()
    one, other = (ntkl.laplace(made(kind), (x, y), ntkl.Categorical()).what_ifs([[0], [1, 2]], linearization="moving")
                  for kind in (Offloaded, Plain))
    assert relative_error(one.outputs(x[:3]), other.outputs(x[:3])) < 1e-9


@pytest.mark.parametrize(("kind", "dtype", "followed"), [
    (Bounded, torch.float64, True), (Recomputing, torch.bfloat16, False), (ReadingNormalized, torch.float64, False),
])
def test_whether_gradients_follow_values_beside_the_weights(
    kind: type[Plain], dtype: torch.dtype, followed: bool
) -> None:
    network, x = Network(deepened(kind).to(dtype)), data()[0].to(dtype)
    probe(network, x)
    own = network.theta
    assert network.follows_gradients(x) == followed and torch.equal(network.theta, own)


def test_examples_without_a_gradient_do_not_show_whether_it_follows_values() -> None:
    network, (x, _) = Network(made(Around)), data()
    probe(network, x)
    assert network.follows_gradients(torch.zeros_like(x)) and not network.follows_gradients(x)


def test_a_backward_pass_without_enough_memory_is_no_answer() -> None:
    module, (x, _) = made(), data()
    network = Network(module)
    probe(network, x)
    hook = network.module.a.register_forward_hook(lambda layer, x, out: Full.apply(out))
    with pytest.raises(torch.OutOfMemoryError):
        network.follows_gradients(x)
    hook.remove()
    assert network.follows_gradients(x)


# --- constants


def test_rows_of_padding_are_constants() -> None:
    """torch gives them no gradient: weight samples leave them alone."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(6, 3, padding_idx=-6), nn.Flatten(), nn.Linear(12, 1)).double()
    tokens, y = torch.randint(1, 6, (20, 4)), torch.randn(20, 1).double()
    tokens[:, 2:] = 0
    frozen = Network(network)
    probe(frozen, tokens)
    own = network[0].weight.detach()
    moved = frozen.at(frozen.theta + 1.0).parameters["0.weight"]
    assert torch.equal(moved[0], own[0]) and torch.equal(moved[1:], own[1:] + 1.0)
    posterior = ntkl.laplace(network, (tokens, y), ntkl.Gaussian(0.1), structure="full")
    same = posterior.network.with_parameters(posterior.fitted.theta + torch.eye(len(posterior.fitted.theta))[0], tokens)
    assert torch.equal(same, posterior.network.without_grad(tokens))
    tied = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 3), nn.Linear(3, 6, bias=False))
    tied[3].weight = tied[0].weight
    other = Network(tied.double())
    probe(other, tokens)
    found = other.at(other.theta + 1.0).parameters["0.weight"]
    assert torch.equal(found, tied[0].weight + 1.0)  # the last layer reads that row


class Encoders(nn.Module):
    """Two embeddings with one weight, of which one has padding."""

    def __init__(self, other: int | None) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(6, 3, padding_idx=0), nn.Embedding(6, 3, padding_idx=other)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.first(tokens).sum(1).tanh() + self.second(tokens).sum(1).cos())


@pytest.mark.parametrize("other, rows", [(0, 1), (1, 0), (None, 0)])
def test_padding_of_every_reader(other: int | None, rows: int) -> None:
    network = Network(made(lambda: Encoders(other)))
    probe(network, torch.randint(0, 6, (8, 4)))
    assert sum(int(one.sum()) for one in network.constant_rows.values()) == rows


def test_gradients_by_frequency_are_no_derivatives() -> None:
    torch.manual_seed(0)
    tokens, y, values = torch.randint(0, 6, (12, 4)), torch.arange(12) % 2, []
    for scaled in (False, True):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Embedding(6, 3, scale_grad_by_freq=scaled), nn.Flatten(), nn.Linear(12, 2)).double()
        values += [float(ntkl.laplace(network, (tokens, y), ntkl.Categorical(), structure="gp",
                                      settings=ntkl.Settings(batch_size=size)).log_det()) for size in (1, 12)]
        assert network[0].scale_grad_by_freq == scaled
    assert values == pytest.approx([values[0]] * 4, rel=1e-12)


# --- attention, checkpoints, state, inputs


class Attending(nn.Module):
    """An encoder whose padding is marked by the first entry."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=x[..., 0] > 9).mean(1))


@pytest.mark.parametrize("padded", [slice(4, None), slice(None)])
def test_attention_is_the_same_with_and_without_a_graph(padded: slice) -> None:
    """torch's fast path gives padded positions zeros, which a mean over positions reads."""
    network, x, y = made(Attending), torch.randn(12, 3, 4).double(), torch.arange(12) % 2
    x[padded, 2, 0] = 10.0
    posteriors = [ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=own) for own in ("gp", "full")]
    outputs = network(x).detach()
    for posterior in posteriors:
        assert relative_error(posterior.f, outputs) < 1e-12
        assert relative_error(posterior.predict(x, "map").probs, outputs.softmax(1)) < 1e-12
    assert relative_error(posteriors[0].log_det(), posteriors[1].log_det()) < 1e-9
    assert torch.backends.mha.get_fastpath_enabled()


class Waiting(nn.Module):
    """Attends not at all, and waits for others."""

    def __init__(self, before: threading.Event, after: threading.Event) -> None:
        super().__init__()
        self.attention, self.before, self.after = nn.MultiheadAttention(2, 1), before, after
        self.seen = True

    def forward(self, x: Tensor) -> Tensor:
        self.before.set()
        self.after.wait(10)
        self.seen = torch.backends.mha.get_fastpath_enabled()
        return x


def test_threads_share_the_switch_of_attention() -> None:
    """It is on again when all are done, and off for each of them."""
    one, two, done = threading.Event(), threading.Event(), threading.Event()
    first, second = Waiting(one, two), Waiting(two, done)
    threads = [threading.Thread(target=Caller(module), args=(torch.zeros(1),)) for module in (first, second)]
    threads[0].start()
    one.wait(10)
    threads[1].start()
    threads[0].join()
    done.set()
    threads[1].join()
    assert not first.seen and not second.seen and torch.backends.mha.get_fastpath_enabled()


class Checkpointed(Plain):
    def hidden(self, x: Tensor) -> Tensor:
        return checkpoint(super().hidden, x.clone().requires_grad_(), use_reentrant=True)


def test_reentrant_checkpoints_are_refused() -> None:
    with refused(ntkl.NetworkError, "that autograd can follow", "a reentrant checkpoint", "use_reentrant=False"):
        ntkl.laplace(made(Checkpointed), data(), ntkl.Categorical())


class Stateful(Plain):
    """Adds what an earlier call left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def hidden(self, x: Tensor) -> Tensor:
        found = super().hidden(x)
        found = found if self.state is None else found + 0.1 * self.state[:1]
        self.state = found
        return found


def test_a_state_of_an_earlier_call_is_named() -> None:
    network = made(Stateful)
    network(data()[0])
    with refused(ntkl.NetworkError, "from inputs, parameters and buffers", "reads state", "register it as a buffer"):
        ntkl.laplace(network, data(), ntkl.Categorical())


class Writing(Plain):
    """Sets negative inputs to zero, in the caller's tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x[x < 0] = 0
        return super().forward(x)


@pytest.mark.parametrize("structure", ["gp", "full", "diag"])
def test_inputs_that_a_network_writes_into_stay(structure: str) -> None:
    network, (x, y) = made(Writing), data()
    before = x.clone()
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=structure)
    posterior.latent_moments(x)
    posterior.predict(x, method="map")
    assert torch.equal(x, before)
    rows = posterior.jacobian(x).dense(posterior.network.shapes).transpose(0, 1)
    assert relative_error(rows, jacobian(made(Plain), before.clamp_min(0))) < 1e-12


class Spectral(nn.Module):
    """A filter whose complex weights begin at an odd place of the flat parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weights = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weights), n=3) * self.first


@pytest.mark.filterwarnings("ignore:no factor rule covers")
def test_complex_views_of_real_weights_are_sampled() -> None:
    network, (x, _) = made(Spectral), data()
    posterior = ntkl.laplace(network, (x, x), ntkl.Gaussian(0.1), structure="full")
    draws = posterior.sample(3, generator=torch.Generator().manual_seed(0))
    want = []
    for theta in draws:
        network.load_state_dict({"first": theta[:1], "weights": theta[1:].view(2, 2)})
        want.append(network(x).detach())
    assert relative_error(torch.stack([posterior.network.with_parameters(t, x) for t in draws]), torch.stack(want)) == 0
    assert relative_error(ManyWeights(posterior.network, x)(draws, x), torch.stack(want)) < 1e-14
