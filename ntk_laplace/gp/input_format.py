"""Conversion of GPyTorch's inputs (N, features) to the network's inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, is_whole
from ntk_laplace.model.network import Network


@dataclass(frozen=True)
class InputFormat:
    """How a row of features becomes one input of the network.

    Attributes
    ----------
    shape : tuple of int, optional
        Shape of one input, without the example axis, such as (1, 28, 28); by default the row of features.
    dtype : torch.dtype, optional
        Dtype of the network's inputs, such as torch.long for token ids, which GPyTorch passes as floats. By default
        floating inputs take the network's dtype and integers keep theirs.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...] | torch.Size | None, dtype: torch.dtype | None) -> InputFormat:
        """Check the arguments ``input_shape`` and ``input_dtype``.

        UnsupportedError if they are not a shape and a dtype.
        """
        if shape is not None and not (isinstance(shape, (tuple, list)) and all(is_whole(size, 1) for size in shape)):
            raise UnsupportedError("input_shape as a tuple of whole numbers", repr(shape),
                                   "Pass the shape of one input without the axis of examples, such as (1, 28, 28).")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise UnsupportedError("input_dtype as a torch.dtype", repr(dtype), "Pass torch.long for token ids.")
        return cls(None if shape is None else tuple(int(size) for size in shape), dtype)

    @property
    def num_features(self) -> int | None:
        """Number of features of a row, if the shape is given."""
        return None if self.shape is None else torch.Size(self.shape).numel()

    def restore(self, x: Tensor, network: Network) -> Tensor:
        """Inputs of the network from rows of features (n, d).

        DataError if there are none, they do not have this shape, or `dtype` is an integer type and they are not
        integers.
        """
        if not len(x):
            raise DataError("at least one input", "none", "Pass one or more inputs.")
        if self.shape is not None:
            if x.shape[-1] != self.num_features:
                raise DataError(f"rows of {self.num_features} features, input_shape {self.shape} flattened",
                                f"shape {tuple(x.shape)}", "Pass x.flatten(1); GPyTorch reads further axes as batches.")
            x = x.reshape(len(x), *self.shape)
        return self.cast(x, network)

    def cast(self, x: Tensor, network: Network) -> Tensor:
        """The same values on the network's device, in its input dtype."""
        if self.dtype is None:
            return x.to(network.device, network.input_dtype.of(x))
        cast = x.to(self.dtype)
        if x.is_floating_point() and not self.dtype.is_floating_point:
            wrong = (cast.to(x.dtype) != x).flatten(1).any(1)
            if bool(wrong.any()):
                raise DataError(f"whole numbers, to be read as {self.dtype}",
                                f"others at example {int(wrong.nonzero()[0])}", "Pass ids, or leave input_dtype out.")
        return cast.to(network.device)
