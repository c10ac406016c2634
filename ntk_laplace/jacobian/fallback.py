"""Fallback: exact per-example rows for parameters that no rule covers, vectorized where torch supports it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ntk_laplace.jacobian.blocks import Dense
from ntk_laplace.jacobian.graph import rows_dtype
from ntk_laplace.model.data import Inputs, map_tensors, num_examples, take
from ntk_laplace.model.network import Network
from ntk_laplace.runtime.torch_warnings import WITHOUT_TORCH_WARNINGS

# of vmap: no batching rule, data-dependent control flow, or a custom function without `setup_context`
NOT_VECTORIZED = (RuntimeError, NotImplementedError, ValueError, TypeError)


class Fallback:
    """Per-example rows by `vmap` over vector-Jacobian products, or by a loop where a layer has no batching rule.

    Parameters
    ----------
    network : Network
    names : tuple of str
        The parameters to differentiate.
    """

    def __init__(self, network: Network, names: tuple[str, ...]) -> None:
        self.network, self.names = network, names
        self.vectorized = True

    def rows(self, x: Inputs, cotangents: Tensor, careful: bool = False) -> list[Dense]:
        """Rows (K, N, p) of every named parameter for cotangents (K, N, C); `careful` forces the loop."""
        if self.vectorized and not careful:
            try:
                return self._dense(vectorized_rows(self.network, self.names, x, cotangents))
            except NOT_VECTORIZED:
                self.vectorized = False
        return self._dense(self._by_loop(x, cotangents))

    def _by_loop(self, x: Inputs, cotangents: Tensor) -> list[Tensor]:
        parameters = [self.network.parameters[name] for name in self.names]
        found = [parameter.new_zeros(*cotangents.shape[:2], parameter.numel()) for parameter in parameters]
        for example in range(num_examples(x)):
            out = self.network.evaluate(take(x, slice(example, example + 1)))
            if not out.requires_grad:  # routed past all of these parameters, and no other is chosen
                continue
            for k, cotangent in enumerate(cotangents[:, example : example + 1]):
                gradients = torch.autograd.grad(out, parameters, cotangent, retain_graph=True, allow_unused=True)
                for rows, gradient in zip(found, gradients, strict=True):
                    if gradient is not None:
                        rows[k, example] = gradient.to_dense().flatten()  # of functional.embedding(..., sparse=True)
        return found

    def _dense(self, rows: list[Tensor]) -> list[Dense]:
        dtype = rows_dtype(self.network.parameters)
        return [Dense.of(name, values.detach().to(dtype)) for name, values in zip(self.names, rows, strict=True)]


def vectorized_rows(network: Network, names: Sequence[str], x: Inputs, cotangents: Tensor) -> list[Tensor]:
    """Rows (K, N, p) of every named parameter by `vmap`, with their graph in `x`, for cotangents (K, N, C).

    Raises
    ------
    NOT_VECTORIZED
        If a layer cannot be evaluated under `vmap`.
    """
    chosen = {name: network.parameters[name].detach() for name in names}

    def outputs(values: dict[str, Tensor], example: Inputs) -> Tensor:
        single = map_tensors(lambda tensor: tensor.unsqueeze(0), example)
        return network.called_with(values, single).reshape(-1)

    def one(example: Inputs, cotangents: Tensor) -> dict[str, Tensor]:
        pull = vjp(lambda values: outputs(values, example), chosen)[1]
        # a loop over cotangents: nested vmap is slower, and torch computes some layers wrongly in it
        found = [pull(cotangent)[0] for cotangent in cotangents]
        return {name: torch.stack([rows[name] for rows in found]) for name in names}

    with WITHOUT_TORCH_WARNINGS.entered():
        found = vmap(one, in_dims=(map_tensors(lambda tensor: 0, x), 1))(x, cotangents)
    return [found[name].transpose(0, 1).reshape(*cotangents.shape[:2], -1) for name in names]
