"""Flat vectors and tensors by name: one order, views, and a clear error for another length."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ntk_laplace as ntkl
from ntk_laplace.model.network import Network
from ntk_laplace.runtime.parameter_layout import ParameterLayout


class Scaled(nn.Module):
    """Parameters of 0, 1, 2 and 3 axes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.filter = nn.Conv1d(2, 3, 2).double()
        self.head = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scale * self.filter(x).mean(-1))


@pytest.fixture
def layout() -> ParameterLayout:
    return Network(Scaled().eval()).shapes


def test_it_is_a_mapping_in_the_order_of_theta(layout: ParameterLayout) -> None:
    expected = {name: parameter.shape for name, parameter in Scaled().named_parameters()}
    assert list(layout.items()) == list(expected.items())
    assert layout == expected and ParameterLayout.of(layout) is layout and ParameterLayout.of(expected) == layout
    assert layout.num_parameters == sum(shape.numel() for shape in expected.values())
    assert "head.bias" in repr(layout)


def test_named_is_what_torch_writes_into_the_parameters(layout: ParameterLayout) -> None:
    theta, network = torch.randn(layout.num_parameters, dtype=torch.float64), Scaled()
    vector_to_parameters(theta, network.parameters())
    for name, value in layout.named(theta).items():
        assert torch.equal(value, network.get_parameter(name))
    assert torch.equal(layout.flat(dict(network.named_parameters())), parameters_to_vector(network.parameters()))


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_leading_axes(layout: ParameterLayout, lead: tuple[int, ...]) -> None:
    flat = torch.randn(*lead, layout.num_parameters)
    named, parts = layout.named(flat), layout.parts(flat)
    for name, where in layout.slices().items():
        assert named[name].shape == (*lead, *layout[name])
        assert torch.equal(parts[name], flat[..., where]) and torch.equal(named[name].reshape(*lead, -1), parts[name])
    assert torch.equal(layout.flat(named), flat)


def test_parts_share_memory_with_the_vector(layout: ParameterLayout) -> None:
    flat = torch.zeros(2, layout.num_parameters)
    for part in layout.parts(flat).values():
        part += 1.0
    for value in layout.named(flat).values():
        value += 1.0
    assert torch.equal(flat, torch.full_like(flat, 2.0))


def test_names_may_come_in_any_order(layout: ParameterLayout) -> None:
    flat = torch.randn(layout.num_parameters)
    assert torch.equal(layout.flat(dict(reversed(layout.named(flat).items()))), flat)


@pytest.mark.parametrize("shape", [(), (3,), (40, 2)])
def test_another_length_is_an_error(layout: ParameterLayout, shape: tuple[int, ...]) -> None:
    with pytest.raises(ntkl.DataError, match=rf"\.\.\., {layout.num_parameters}"):
        layout.named(torch.zeros(shape))
