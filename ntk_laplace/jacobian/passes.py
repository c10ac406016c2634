"""The Jacobian pass: from inputs to rows, batch by batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.jacobian.batch import Batch
from ntk_laplace.jacobian.batch_size import BatchSizes, edges_of
from ntk_laplace.jacobian.blocks import Block
from ntk_laplace.jacobian.checked_blocks import CheckedBlocks
from ntk_laplace.jacobian.fast import NO_FUSED_LAYERS, FusedLayers, FusedSums, side_by_side
from ntk_laplace.jacobian.graph import Graph
from ntk_laplace.jacobian.jacobian import Jacobian
from ntk_laplace.jacobian.storage import apart_from
from ntk_laplace.model.data import Inputs, differentiable, num_examples, take
from ntk_laplace.model.likelihoods import DiagonalForm
from ntk_laplace.model.network import Network, outside_autocast, probe
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.random_state import preserved_rng


class RootFunction(Protocol):
    """A root that is computed from the outputs, as in one pass over streaming data."""

    @property
    def columns(self) -> int:
        """Number of columns R."""

    @property
    def has_form(self) -> bool:
        """Whether there is a `form`."""

    def __call__(self, f: Tensor, part: slice) -> Tensor:
        """S (n, C, R) for outputs (n, C) of the examples `part` of the batch."""

    def form(self, f: Tensor, part: slice) -> DiagonalForm:
        """S Sᵀ in O(C) numbers, if `has_form`."""


class JacobianPass:
    """Computes rows of the Jacobian J, or of SᵀJ, of one network.

    Parameters
    ----------
    network : Network
    dtype : torch.dtype
        Floating type of the rows; the network runs in its own type.
    keep_factors : bool
        Keep every layer's inputs and output gradients, for Kronecker factors. By default rows are written out where
        this makes a Gram matrix cheaper.
    budget : int, optional
        Bytes, of which a batch takes at most half.

    Attributes
    ----------
    sizes : BatchSizes
        Of its batches, known once a plan is made.
    """

    def __init__(
        self, network: Network, dtype: torch.dtype, keep_factors: bool = False, budget: int | None = None
    ) -> None:
        self.network, self.dtype, self.keep_factors = network, dtype, keep_factors
        self.checked = CheckedBlocks(network, dtype, keep_factors)
        self.sizes = BatchSizes(network, dtype, budget)

    def on(self, network: Network, dtype: torch.dtype) -> JacobianPass:
        """The same pass, with its plans, for a copy of the network, or for rows in another floating type."""
        other = JacobianPass(network, dtype, self.keep_factors, self.sizes.budget)
        other.checked.plans = self.checked.plans
        if network.device == self.network.device and network.dtype == self.network.dtype:
            other.sizes = replace(self.sizes, network=network, dtype=dtype)
        return other

    def rows(
        self, x: Inputs, root: Tensor | None = None, batch_size: int | None = None, offset: int = 0,
        theta: Tensor | None = None,
    ) -> Jacobian:
        """Rows of all examples of `x`.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        root : Tensor, (N, C, R), optional
            Its columns are the cotangents of the backward passes, which gives rows of SᵀJ; default: the identity.
        batch_size : int, optional
            Examples per pass; by default as many as fit in a working set of 128 MiB.
        offset : int
            Index of the first example, for messages.
        theta : Tensor, (P,), optional
            Values of the chosen parameters at which the network is linearized; default: its own. The network is not
            copied, keeps its own values, and plans are used again.

        Raises
        ------
        DataError
            If `theta` has another shape.
        NonFiniteError
            If an output or a row is NaN or infinite, with the index of the example.
        """
        return Jacobian.concatenate(list(self.parts(x, root, batch_size, offset, theta)))

    def parts(
        self, x: Inputs, root: Tensor | None = None, batch_size: int | None = None, offset: int = 0,
        theta: Tensor | None = None,
    ) -> Iterator[Jacobian]:
        """As `rows`, one batch at a time."""
        for rows in self.batches(x, root, batch_size, offset, theta=theta):
            yield apart_from(rows, x)

    def batches(
        self, x: Inputs, root: Tensor | RootFunction | None, batch_size: int | None, offset: int = 0,
        fused_layers: FusedLayers = NO_FUSED_LAYERS, theta: Tensor | None = None,
    ) -> Iterator[Jacobian]:
        """Rows one batch at a time, as `rows`; a `root` that depends on the outputs is a `RootFunction`.

        Use the rows at once: the inputs of a first layer may share memory with `x`. Layers in `fused_layers` may
        yield `FusedSums` instead of blocks.
        """
        size = self.network.num_parameters
        if theta is not None and theta.shape != (size,):
            raise DataError(f"theta of shape ({size},), one value per chosen parameter", f"{tuple(theta.shape)}",
                            "Pass a vector such as network.theta.")
        closed = None if root is None or isinstance(root, Tensor) else root
        sizes = self.prepare(x)
        closed = closed if closed and sizes.sums_suffice(fused_layers) and closed.has_form else None
        most, _ = sizes.batch(None if closed else _columns(root), fused_layers)
        for part in panels(num_examples(x), 1, min(most, batch_size or most)):
            if closed:
                yield self._summed(x, part, closed, offset, fused_layers, theta)
            else:
                yield self._batch(x, part, root, offset, fused_layers, theta)

    def vjp(self, x: Inputs, vectors: Tensor, batch_size: int | None = None, offset: int = 0) -> Tensor:
        """Jᵀv, (P,), for v (N, C): autograd's gradient of the outputs, without rows.

        Rows are summed where the network computes in 16 bits, whose sums round and overflow, and where the gradient is
        not finite. `batch_size` and `offset` are those of `rows`.

        Raises
        ------
        NonFiniteError
            As `rows`.
        """
        network, (most, _) = self.network, self.prepare(x).batch(1)
        narrow = torch.finfo(network.precision).bits < 32
        total = torch.zeros(network.num_parameters, dtype=self.dtype, device=network.device)
        for part in panels(num_examples(x), 1, min(most, batch_size or most)):
            found = None if narrow else self._gradient(x, part, vectors[part], offset)
            if found is None or not bool(found.isfinite().all()):
                rows = self._batch(x, part, vectors.unsqueeze(-1), offset, NO_FUSED_LAYERS, None)
                found = rows.vjp(rows.f.new_ones(rows.num_examples, 1), network.shapes)
            total += found
        return total

    def _gradient(self, x: Inputs, part: slice, vectors: Tensor, offset: int) -> Tensor:
        """Jᵀv of some examples of `x`, in the network's floating type."""
        parameters = list(self.checked.parameters.values())
        with passing(self.network):
            out = self.network.evaluate(differentiable(take(x, part)), offset + part.start)
            if not out.requires_grad:
                return out.new_zeros(self.network.num_parameters)
            vectors = vectors.to(out, copy=True)  # an inference tensor is not saved for a backward pass
            found = torch.autograd.grad(out, parameters, vectors, allow_unused=True)
        # sparse: of functional.embedding(..., sparse=True)
        own = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, found, strict=True)]
        return torch.cat([gradient.flatten() for gradient in own])

    def prepare(self, x: Inputs) -> BatchSizes:
        """Probe the network and plan its rows on a few examples: the sizes of its batches; later calls return at once.

        Raises
        ------
        NonDeterministicError, MixedExamplesError
            As `probe`.
        """
        if self.sizes.edges is not None:
            return self.sizes
        with self.network.threads.writing():
            return self._prepared(x)

    def _prepared(self, x: Inputs) -> BatchSizes:
        if self.sizes.edges is not None:  # by another thread
            return self.sizes
        with passing(self.network):
            out = probe(self.network, differentiable(x))
        with passing(self.network):  # the probe has set the network's precision
            graph = Graph(out, self.checked.parameters)
            plan = self.checked.plan(graph, out, x)
            own = [*self.network.module.parameters(), *self.network.module.buffers()]
            # converted weights, for instance, do not grow with the examples
            other, m = self.checked.another(x, len(out))
            grown = other.saved_bytes(own) - graph.saved_bytes(own)
            self.sizes = replace(self.sizes, edges=edges_of(plan, graph, out),
                                 graph_bytes=max(0, grown // (m - len(out))))
        return self.sizes

    def _batch(
        self, x: Inputs, part: slice, root: Tensor | RootFunction | None, offset: int, fused_layers: FusedLayers,
        theta: Tensor | None,
    ) -> Jacobian:
        """Rows of some examples of `x`."""
        network, offset = self.network, offset + part.start
        with passing(network), network.with_theta(theta):
            x = differentiable(take(x, part))
            out = network.evaluate(x, offset)
            n, c = out.shape
            if root is None:
                cotangents = torch.eye(c, dtype=out.dtype, device=out.device)[:, None].expand(c, n, c)
            else:
                own = root[part] if isinstance(root, Tensor) else root(out.detach(), part)
                cotangents = own.movedim(-1, 0).to(out)
                # each cotangent starts one pass and must be a contiguous matrix, transposed or not
                cotangents = cotangents if cotangents.mT.is_contiguous() else cotangents.contiguous()
            f = out.detach().to(self.dtype, copy=True)
            if not out.requires_grad:
                return Jacobian((), len(cotangents), n, f)
            blocks = self.checked.of(Batch(network, self.checked.parameters, x, out, cotangents, offset), fused_layers)
        del out  # and the graph
        of_dtype = _converted(blocks, self.dtype) if self.keep_factors else side_by_side(blocks, self.dtype)
        return Jacobian(tuple(of_dtype), len(cotangents), n, f)

    def _summed(
        self, x: Inputs, part: slice, root: RootFunction, offset: int, fused_layers: FusedLayers, theta: Tensor | None
    ) -> Jacobian:
        """The sums of a last layer, from its rows of J and the output curvature in closed form."""
        rows = self._batch(x, part, None, offset, NO_FUSED_LAYERS, theta)
        block = rows.last_layer
        if block is None:
            # in this batch an example's outputs are not those of the layer, unlike in the examples of the plan
            return self._batch(x, part, root, offset, fused_layers, theta)
        sums = FusedSums.of_last_layer(block, root.form(rows.f, part), fused_layers.squared)
        return replace(rows, blocks=(cast(Block, sums),))


def _converted(blocks: list[Block], dtype: torch.dtype) -> Iterator[Block]:
    """Blocks in another floating type; the list is emptied, so that no block is there twice for long."""
    while blocks:
        yield blocks.pop(0).to(dtype)


def _columns(root: Tensor | RootFunction | None) -> int | None:
    if root is None:
        return None
    return root.shape[2] if isinstance(root, Tensor) else root.columns


@contextlib.contextmanager
def passing(network: Network) -> Iterator[None]:
    """Context of the forward and backward passes."""
    with (torch.inference_mode(False), preserved_rng(network.device), outside_autocast(), network.arithmetic(),
          network.threads.reading()):
        yield
