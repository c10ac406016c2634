"""Errors held to the three parts of their text, and the small network and data that get them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ntk_laplace import errors
from ntk_laplace.model.data import Missing

N = 9


def without_data(posterior):
    """A posterior of structure "gp" as a checkpoint that is loaded without data gives it."""
    fitted = posterior.fitted
    return type(posterior)(fitted.derived(replace(fitted.structure, data=Missing())))


@contextmanager
def refused(error: type[Exception], expected: str, got: str, remedy: str) -> Iterator[None]:
    """Hold an error to its class and to the three parts of its text (regular expressions)."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert isinstance(caught.value, errors.NTKLaplaceError)
    parts = re.fullmatch(r"expected (?P<expected>.*?); got (?P<got>.*?)\. (?P<remedy>[A-Z].*\.)", message, re.DOTALL)
    assert parts, f"not of the form 'expected ...; got .... Remedy.': {message}"
    for name, pattern in (("expected", expected), ("got", got), ("remedy", remedy)):
        assert re.search(pattern, parts[name]), f"{name}: {pattern!r} not in {message!r}"


def network(outputs: int = 3, inputs: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def inputs(n: int = N) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(2)).double()


def labels(n: int = N, classes: int = 3) -> Tensor:
    return torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(3))
