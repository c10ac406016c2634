"""A network at many values of its parameters at once: one forward pass for all of them, by `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ntk_laplace.errors import NTKLaplaceError, first_line, warn
from ntk_laplace.model.data import Inputs, leaves, map_tensors, num_examples, take
from ntk_laplace.model.network.copying import dense_parts
from ntk_laplace.model.network.frozen import Network
from ntk_laplace.model.network.precision import Watched
from ntk_laplace.model.network.recurrent import unrolled
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.threads import ProcessWide
from ntk_laplace.runtime.torch_warnings import WITHOUT_TORCH_WARNINGS


@contextmanager
def twice_differentiable(module: nn.Module) -> Iterator[None]:
    """Run a block with kernels that have second derivatives: fused attention and recurrent layers do not."""
    with _UNFUSED_ATTENTION.entered(), unrolled(module):
        yield


_UNFUSED_ATTENTION = ProcessWide(lambda: sdpa_kernel(SDPBackend.MATH))


class ManyWeights:
    """Outputs of a network at many values of its chosen parameters, differentiable in these.

    A network that `torch.func.vmap` does not take, or whose outputs it changes, is evaluated at one value after the
    other, with a warning.

    Parameters
    ----------
    network : Network
    x : Inputs
        Inputs of the network, of n examples.
    several : bool
        Whether there will be more than one value at a time.

    Attributes
    ----------
    batched : bool
        Whether all values share a forward pass.
    """

    def __init__(self, network: Network, x: Inputs, several: bool = True) -> None:
        self.network = network
        network.require_values_followed()
        self.batched = several and self._is_batched(take(x, slice(0, 2)))

    def __call__(self, thetas: Tensor, x: Inputs, apart: bool = False) -> Tensor:
        """Outputs (S, n, C) at values (S, P) and inputs of n examples; they may be infinite or NaN.

        If `apart`, each value has examples of its own: tensors of `x` are (S, n, ...).
        """
        if torch.is_grad_enabled() and thetas.requires_grad:
            self.network.require_gradients_followed(map_tensors(lambda tensor: tensor[0], x) if apart else x)
        thetas, tensors = thetas.to(self.network.dtype), leaves(x) if apart else []

        def one(theta: Tensor, *own: Tensor) -> Tensor:
            each = iter(own)
            return self._one(theta, map_tensors(lambda _: next(each), x) if own else x)

        with self.network.arithmetic():
            if self.batched and len(thetas) > 1:
                with WITHOUT_TORCH_WARNINGS.entered(), self._kernels():
                    return torch.func.vmap(one)(thetas, *tensors)
            return torch.stack([one(*each) for each in zip(thetas, *tensors, strict=True)])

    def passes(self, thetas: Tensor, x: Inputs, room: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Some of the weights, some of the examples, and the outputs (S, n, C) of a pass, whose graph fits in bytes."""
        (many, few), n = self.at_once(x, room), num_examples(x)
        for part in panels(n, 1, few):
            inputs = x if few >= n else take(x, part)
            for some in panels(len(thetas), 1, many):
                yield some, part, self(thetas[some], inputs).to(thetas.dtype)

    def _kernels(self) -> AbstractContextManager[None]:
        # vmap has no rule for fused attention and fused recurrent cells, and would take one value at a time
        return twice_differentiable(self.network.module) if self.batched else nullcontext()

    def _one(self, theta: Tensor, x: Inputs) -> Tensor:
        found = self.network.call_at(self.network.values(theta), x)
        return found.unsqueeze(1) if found.ndim == 1 else found

    def _is_batched(self, x: Inputs) -> bool:
        theta = self.network.theta
        thetas = torch.stack([theta, theta * 1.001]).requires_grad_()
        numbers = torch.arange(num_examples(x), device=theta.device).expand(2, -1)
        self.batched = True
        try:
            with WITHOUT_TORCH_WARNINGS.entered(), torch.set_grad_enabled(self.network.follows_gradients(x)):
                found = torch.cat([self(thetas, x), self(thetas, take(x, numbers), apart=True)])
                if found.requires_grad:
                    torch.autograd.grad(found.sum(), thetas)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, NTKLaplaceError) as error:
            return self._alone(f"an error, {type(error).__name__}: {first_line(error)}")
        self.batched = False
        with torch.no_grad():
            alone = self(thetas, x).repeat(2, 1, 1)
        scale = float(alone.abs().max()) or 1.0
        gap = float((found.detach() - alone).abs().max())
        good = gap <= 1e3 * torch.finfo(self.network.precision).eps * scale
        return good or self._alone(f"outputs that differ by {gap:.2g}")

    @staticmethod
    def _alone(got: str) -> bool:
        warn(f"torch.func.vmap does not evaluate this network at several weights at once ({got}): each is "
             "evaluated alone, which is slower")
        return False

    def saved_bytes(self, x: Inputs) -> int:
        """Predicted bytes that autograd keeps at `x` for one value of the parameters, from two small batches."""
        few = [take(x, slice(0, count)) for count in (1, 2)]
        sizes = [self._kept(part) for part in few]
        n = num_examples(x)
        return sizes[0] if n == 1 else max(sizes[0], sizes[0] + (n - 1) * (sizes[1] - sizes[0]))

    def _kept(self, x: Inputs) -> int:
        seen: dict[tuple[int, int], int] = {}

        def keep(tensor: Tensor) -> Tensor:
            seen.update({(part.data_ptr(), part.numel()): part.nbytes for part in dense_parts(tensor)})
            return tensor

        theta = self.network.theta.requires_grad_()
        with torch.set_grad_enabled(self.network.follows_gradients(x)), self._kernels():
            try:
                with torch.autograd.graph.saved_tensors_hooks(keep, _same):
                    found = self._one(theta, x)
                if found.requires_grad:
                    return sum(seen.values()) + found.nbytes
            except RuntimeError:  # torch.func in forward() refuses hooks
                pass
            sizes: list[int] = []  # of all results, which are at least those that autograd keeps of them
            with Watched(lambda result: sizes.append(result.nbytes)):
                self._one(theta, x)
            return sum(sizes)

    def at_once(self, x: Inputs, budget: int) -> tuple[int, int]:
        """How many values of the parameters, and how many examples, one pass with its graph may take."""
        n = num_examples(x)
        whole = max(1, self.saved_bytes(x) * tuning.GRAPH_FACTOR)
        if whole <= budget:
            most = budget if self.network.device.type != "cpu" else min(budget, tuning.CACHED_BYTES)
            return max(1, most // whole), n
        return 1, max(1, n * budget // whole)


def _same(tensor: Any) -> Any:
    return tensor
