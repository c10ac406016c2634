"""Gaussian priors: every way to group, to give precisions and means, and every way to get them wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Size, Tensor

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.model.priors import GaussianPrior

SHAPES = {
    "scale": Size(()),
    "body.0.weight": Size((3, 2)),
    "body.0.bias": Size((3,)),
    "body.1.weight": Size((2, 3)),
    "head.weight": Size((1, 2)),
    "head.bias": Size((1,)),
}
SIZES = {name: shape.numel() for name, shape in SHAPES.items()}
P = sum(SIZES.values())
MAPPING = {"trunk": ["body", "scale"], "top": ["head.weight", "head.bias"]}


def draw(seed: int, size: int = P) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(values: dict[str, float]) -> Tensor:
    """One number per parameter tensor, as a flat vector."""
    return torch.cat([torch.full((SIZES[name],), values[name], dtype=torch.float64) for name in SHAPES])


EACH = draw(0).exp()
# of groups="input": the inputs of body.0.weight, then by layer
BY_INPUT = torch.cat([spread(dict.fromkeys(SHAPES, 0.1))[:1], torch.tensor([0.6, 5.0], dtype=torch.float64).repeat(3),
                      spread(dict(zip(SHAPES, [0.1, 0.0, 0.2, 0.3, 0.4, 0.4], strict=True)))[7:]])
TENTHS = [0.1, 0.2, 0.3, 0.4]
INPUTS = ["body.0.weight[:, 0]", "body.0.weight[:, 1]", "", "body.0", "body.1", "head"]
# name -> groups, precision, the flat P0 it stands for, and the groups' names
CASES: dict[str, tuple[Any, Any, Tensor, list[str] | None]] = {
    "all": ("all", 0.7, spread(dict.fromkeys(SHAPES, 0.7)), ["all"]),
    "all, by name": ("all", {"all": 0.7}, spread(dict.fromkeys(SHAPES, 0.7)), ["all"]),
    "all, a tensor": ("all", torch.tensor([0.7], dtype=torch.float64), spread(dict.fromkeys(SHAPES, 0.7)), ["all"]),
    "layer": (
        "layer",
        torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        spread(dict(zip(SHAPES, [0.1, 0.2, 0.2, 0.3, 0.4, 0.4], strict=True))),
        ["", "body.0", "body.1", "head"],
    ),
    "layer, by name": (
        "layer",
        # a parameter that is a group of its own stands for it; the order is free
        {"head": 0.4, "": 0.1, "body.1.weight": 0.3, "body.0": 0.2},
        spread(dict(zip(SHAPES, [0.1, 0.2, 0.2, 0.3, 0.4, 0.4], strict=True))),
        ["", "body.0", "body.1", "head"],
    ),
    "layer, one for all": ("layer", 2.0, spread(dict.fromkeys(SHAPES, 2.0)), ["", "body.0", "body.1", "head"]),
    "tensor": ("tensor", torch.arange(1.0, 7.0), spread(dict(zip(SHAPES, range(1, 7), strict=True))), list(SHAPES)),
    "tensor, by name": (
        "tensor",
        {name: 1.0 + i for i, name in enumerate(SHAPES)},
        spread(dict(zip(SHAPES, range(1, 7), strict=True))),
        list(SHAPES),
    ),
    "parameter": ("parameter", EACH, EACH, None),
    "parameter, one for all": ("parameter", 3.0, torch.full((P,), 3.0, dtype=torch.float64), None),
    "parameter, by name": (
        "parameter",
        {
            n: 5.0 if n == "scale" else part.reshape(SHAPES[n])
            for n, part in zip(SHAPES, EACH.split(list(SIZES.values())), strict=True)
        },
        torch.cat([torch.tensor([5.0], dtype=torch.float64), EACH[1:]]),
        None,
    ),
    "input": ("input", torch.tensor([0.6, 5.0, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64), BY_INPUT, INPUTS),
    "input, by name": (
        "input",
        {"body.0.weight": torch.tensor([0.6, 5.0], dtype=torch.float64), **dict(zip(INPUTS[2:], TENTHS, strict=True))},
        BY_INPUT,
        INPUTS,
    ),
    "input, one for all": ("input", 3.0, torch.full((P,), 3.0, dtype=torch.float64), INPUTS),
    "mapping": (
        MAPPING,
        {"trunk": 0.5, "top": 8.0},
        spread(dict(zip(SHAPES, [0.5, 0.5, 0.5, 0.5, 8.0, 8.0], strict=True))),
        ["trunk", "top"],
    ),
    "mapping, interleaved": (
        {"weights": [n for n in SHAPES if "weight" in n], "rest": [n for n in SHAPES if "weight" not in n]},
        torch.tensor([0.5, 8.0], dtype=torch.float64),
        spread(dict(zip(SHAPES, [8.0, 0.5, 8.0, 0.5, 0.5, 8.0], strict=True))),
        ["weights", "rest"],
    ),
}
each_case = pytest.mark.parametrize("name", CASES)


def bound(name: str, mean: Any = 0.0) -> GaussianPrior:
    groups, precision, _, _ = CASES[name]
    return GaussianPrior(precision, mean, groups).bind(SHAPES)


@each_case
def test_precision_of_every_parameter(name: str) -> None:
    prior, dense, names = bound(name), CASES[name][2], CASES[name][3]
    close = {"rtol": 1e-14, "atol": 0.0}
    torch.testing.assert_close(prior.flat_precision().detach(), dense, **close)
    by_tensor = [prior.tensor_precision(parameter).expand(size) for parameter, size in SIZES.items()]
    torch.testing.assert_close(torch.cat(by_tensor).detach(), dense, **close)
    torch.testing.assert_close(prior.precision, prior.log_precision.exp(), **close)
    torch.testing.assert_close(prior.log_det().detach(), dense.log().sum(), rtol=1e-13, atol=1e-13)
    assert prior.num_parameters == P
    assert prior.log_precision.dtype == torch.float64
    if names is not None:
        assert prior.group_names == names
    else:
        assert prior.group_names[:2] + prior.group_names[-1:] == ["scale[0]", "body.0.weight[0]", "head.bias[0]"]
    assert len(prior.group_names) == len(prior.log_precision) == len(prior.group_counts())


@each_case
def test_groups_point_into_the_precisions(name: str) -> None:
    prior = bound(name)
    counts = torch.zeros_like(prior.group_counts())
    for parameter, size in SIZES.items():
        place = prior.group_of(parameter)
        several = name.startswith("parameter") or (name.startswith("input") and parameter == "body.0.weight")
        assert isinstance(place, Tensor if several else int)
        counts.index_add_(0, torch.as_tensor(place).expand(size), torch.ones(size, dtype=torch.int64))
        expected = prior.precision[place]
        torch.testing.assert_close(prior.tensor_precision(parameter), expected, rtol=1e-14, atol=0.0)
        assert expected.shape == ((size,) if several else ())
    assert torch.equal(counts, prior.group_counts())


@pytest.mark.parametrize(
    ("mean", "dense"),
    [
        (0.0, torch.zeros(P)),
        (0.25, torch.full((P,), 0.25)),
        (torch.tensor(0.25), torch.full((P,), 0.25)),
        (draw(1), draw(1)),
        (dict.fromkeys(SHAPES, 0.5), torch.full((P,), 0.5)),
        (
            {n: part.reshape(SHAPES[n]) for n, part in zip(SHAPES, draw(2).split(list(SIZES.values())), strict=True)},
            draw(2),
        ),
        ({"buffer.running_mean": torch.ones(9), **dict.fromkeys(reversed(SHAPES), -1)}, torch.full((P,), -1.0)),
    ],
)
@each_case
def test_energy_is_half_the_quadratic_form(name: str, mean: Any, dense: Tensor) -> None:
    prior, precision, theta = bound(name, mean), CASES[name][2], draw(3)
    dense = dense.double()
    assert torch.equal(prior.flat_mean(), dense)
    expected = 0.5 * (theta - dense) @ torch.diag(precision) @ (theta - dense)
    torch.testing.assert_close(prior.energy(theta).detach(), expected, rtol=1e-13, atol=0.0)
    # float32 weights are read exactly
    single = theta.float()
    expected = 0.5 * (precision * (single.double() - dense) ** 2).sum()
    torch.testing.assert_close(prior.energy(single).detach(), expected, rtol=1e-13, atol=0.0)


@each_case
def test_distances_of_the_groups(name: str) -> None:
    prior, theta = bound(name, 0.1), draw(4)
    place = torch.arange(len(prior.log_precision))
    member = torch.cat([place[prior.group_of(n)].expand(size) for n, size in SIZES.items()])
    expected = torch.stack([((theta - 0.1)[member == g] ** 2).sum() for g in place])
    torch.testing.assert_close(prior.group_distances(theta), expected, rtol=1e-13, atol=0.0)


@each_case
def test_gradients_are_finite_differences(name: str) -> None:
    prior = bound(name, 0.1)

    def function(log_precision: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        return torch.func.functional_call(_Verbs(prior), {"prior.log_precision": log_precision}, (theta,))

    log_precision = prior.log_precision.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (log_precision, draw(5).requires_grad_()), rtol=1e-6)


class _Verbs(torch.nn.Module):
    def __init__(self, prior: GaussianPrior) -> None:
        super().__init__()
        self.prior = prior

    def forward(self, theta: Tensor) -> tuple[Tensor, ...]:
        prior = self.prior
        values = prior.energy(theta), prior.log_det(), prior.flat_precision(), prior.tensor_precision("body.0.bias")
        return *values, prior.log_hyperprior()


def test_the_hyperprior_is_that_of_the_inputs_alone() -> None:
    """A Gaussian of log precisions around their mean; records keep the width, and older ones have the default."""
    precision = {"body.0.weight": torch.tensor([1.0, 3.0]).exp(), "": 9.0, "body.0": 9.0, "body.1": 9.0, "head": 9.0}
    for width, expected in ((0.5, -4.0), (2.0, -0.25), (float("inf"), 0.0)):
        prior = GaussianPrior(precision, groups="input", spread=width).bind(SHAPES)
        density = prior.log_hyperprior()
        assert density.item() == pytest.approx(expected, rel=1e-6)
        slope = torch.autograd.grad(density, prior.log_precision)[0] if prior.has_hyperprior else torch.zeros(6)
        torch.testing.assert_close(prior.hyperprior_slope(), slope.double(), rtol=1e-12, atol=1e-12)
        assert prior.has_hyperprior == (width < float("inf")) and prior.inputs == slice(0, 2)
        again = GaussianPrior.from_record(prior.record(), SHAPES)
        assert again.spread == width and torch.equal(again.log_precision, prior.log_precision)
        older = {name: value for name, value in prior.record().items() if name != "spread"}
        assert GaussianPrior.from_record(older, SHAPES).spread == 1.0
    for name in ("layer", "parameter", "mapping"):
        assert bound(name).log_hyperprior().item() == 0.0 and not bound(name).has_hyperprior


def test_energy_of_training_is_weight_decay() -> None:
    theta = draw(6).requires_grad_()
    bound("all").energy(theta).backward()
    torch.testing.assert_close(theta.grad, 0.7 * theta.detach(), rtol=1e-14, atol=0.0)


@each_case
def test_precisions_are_set_in_place(name: str) -> None:
    prior, (_, precision, dense, _) = bound(name), CASES[name]
    parameter = prior.log_precision
    prior.precision = 4.0
    torch.testing.assert_close(prior.flat_precision().detach(), torch.full_like(dense, 4.0))
    prior.precision = precision
    torch.testing.assert_close(prior.flat_precision().detach(), dense)
    prior.precision = prior.precision * 2  # a tensor, one per group, with a graph
    torch.testing.assert_close(prior.flat_precision().detach(), 2 * dense)
    assert prior.log_precision is parameter


def test_precisions_set_before_the_network_is_known() -> None:
    prior = GaussianPrior(groups="layer")
    assert prior.log_precision is None and prior.group_names == []
    prior.precision = {"": 1.0, "body.0": 2.0, "body.1": 3.0, "head": 4.0}
    assert prior.bind(SHAPES) is prior
    torch.testing.assert_close(prior.precision.detach(), torch.arange(1.0, 5.0, dtype=torch.float64))
    early = GaussianPrior(2.0)
    parameter = early.log_precision  # an optimizer may hold it before the fit
    assert parameter.shape == (1,)
    early.precision = 3.0
    assert early.bind(SHAPES).log_precision is parameter
    torch.testing.assert_close(early.flat_precision().detach(), torch.full((P,), 3.0, dtype=torch.float64))


@each_case
def test_binding_twice_changes_nothing(name: str) -> None:
    prior = bound(name)
    prior.precision = 9.0
    parameter = prior.log_precision
    prior.bind(dict(SHAPES))
    assert prior.log_precision is parameter
    assert float(prior.precision.detach()[0]) == pytest.approx(9.0)


def test_means_are_copied() -> None:
    mean = draw(7)
    prior = GaussianPrior(mean=mean).bind(SHAPES)
    mean.zero_()
    assert torch.equal(prior.flat_mean(), draw(7))


@each_case
def test_copies_and_state_dicts(name: str) -> None:
    prior = bound(name, 0.3)
    twin = copy.deepcopy(prior)
    twin.precision = 1.0
    torch.testing.assert_close(prior.flat_precision().detach(), CASES[name][2])
    twin.load_state_dict(prior.state_dict())
    torch.testing.assert_close(twin.flat_precision(), prior.flat_precision())
    assert list(prior.state_dict()) == ["log_precision"]


def test_the_repr_describes_the_object() -> None:
    assert repr(GaussianPrior(groups="layer")) == "GaussianPrior(groups='layer', not bound)"
    assert repr(bound("mapping")) == "GaussianPrior(groups=['trunk', 'top'], 2 precision(s))"


def make(precision: Any = 1.0, mean: Any = 0.0, groups: Any = "all") -> Callable[[], GaussianPrior]:
    return lambda: GaussianPrior(precision, mean, groups).bind(SHAPES)


OTHER = {**SHAPES, "head.bias": Size((4,))}
LAYERS = {"": 1.0, "body.0": 1.0, "body.1": 1.0, "head": 1.0}
ERRORS = [
    (make(0.0), "expected precisions that are positive and finite; got 0. Pass such numbers; weight decay 1e-4 is"),
    (make(-1.0), "expected precisions that are positive and finite; got -1. Pass"),
    (make(float("inf")), "positive and finite; got inf. Pass"),
    (make(torch.tensor([1.0, float("nan"), 2.0, 3.0]), groups="layer"), "positive and finite; got nan. Pass"),
    (make({**LAYERS, "head": -2.0}, groups="layer"), "positive and finite, for 'head' too; got -2. Pass"),
    (make("strong"), "positive and finite; got 'strong'. Pass a number, a tensor, or a mapping from names to them."),
    (make(mean=[None]), "expected prior means that are finite; got [None]. Pass a number, a tensor"),
    (make(torch.tensor([])), "got an empty tensor. Pass"),
    (make(torch.ones(3), groups="layer"), "expected one precision, or one per group, (4,); got shape (3,). The groups"),
    (make(torch.ones(3), groups="parameter"), "or one per group, (19,); got shape (3,). The groups are 'scale[0]', "),
    (make({"body": 1.0}, groups="layer"), "expected the name of a group; got 'body'. The network has '', 'body.0',"),
    (make({"head": 1.0}, groups="layer"), "every group, '', 'body.0', 'body.1', 'head'; got none for '', 'body.0', 'b"),
    (
        make({**LAYERS, "head.bias": 1.0}, groups="layer"),
        "a group, such as 'head'; got 'head.bias', one of several par",
    ),
    (make({**LAYERS, "scale": 1.0}, groups="layer"), "expected one precision for group ''; got two. Tensors of"),
    (
        make({**LAYERS, "head": torch.ones(3)}, groups="layer"),
        "for group 'head'; got shape (3,). Tensors of precisions",
    ),
    (
        make({"scale": 1.0}, groups="parameter"),
        "a precision for every parameter; got none for 'body.0.weight', 'body.0",
    ),
    (make({"frozen": 1.0}, groups="parameter"), "expected the name of a parameter; got 'frozen'. The network has 'sc"),
    (
        make({**dict.fromkeys(SHAPES, 1.0), "head.weight": torch.ones(2)}, groups="parameter"),
        "expected a precision of shape (1, 2) for 'head.weight', or one number; got shape (2,). Pass a tensor of the",
    ),
    (make(mean=float("nan")), "expected prior means that are finite; got nan. Pass"),
    (make(mean=torch.zeros(7)), "expected one mean, or a flat one of shape (19,); got shape (7,). Concatenate"),
    (make(mean={"scale": 0.0}), "expected a mean for every parameter; got none for 'body.0.weight', 'body.0.bias', '"),
    (
        make(mean={**dict.fromkeys(SHAPES, 0.0), "head.bias": torch.zeros(2)}),
        "expected a mean of shape (1,) for 'head.bias', or one number; got shape (2,). Pass",
    ),
    (make(groups="block"), "expected groups among ('all', 'layer', 'tensor', 'input', 'parameter') or a mapping from "),
    (make({"body.0.weight": torch.ones(3)}, groups="input"), "each input, (2,); got shape (3,). Pass a number, or a"),
    (make({"body.0.weight": 1.0}, groups="input"), "for every group, 'body.0.weight[:, 0]', 'body.0.weight[:, 1]', ''"),
    (lambda: GaussianPrior(groups="input").bind({"a": Size((3,))}), "inputs, ...), for groups=\"input\"; got"),
    (lambda: GaussianPrior(groups="layer", spread=2.0), "which is that of its precisions; got 'layer'. Leave the"),
    (lambda: GaussianPrior(groups="input", spread=0.0), "expected a positive spread; got 0.0. Leave it out for 1, or"),
    (make(groups={"a": "body"}), "expected a list of names for group 'a'; got 'body'. Write {'a': [name, ...]}."),
    (make(groups={"a": ["body", "scale"]}), "expected every parameter in one group; 'head.weight' once; got 'head.wei"),
    (
        make(groups={"a": ["body", "scale", "head"], "b": ["head.bias"]}),
        "'head.bias' once; got it in groups ['a', 'b']",
    ),
    (make(groups={"a": ["bod"], "b": ["head"]}), "expected the name of a parameter or module; got 'bod'. The network"),
    (lambda: GaussianPrior().bind({}), "expected a network with at least one trainable parameter; got none. Set requi"),
    (lambda: make()().bind(OTHER), "bound to, 6 tensors with 19 parameters; got 6 tensors with 22 parameters. Make a"),
    (
        lambda: make()().bind(dict(reversed(SHAPES.items()))),
        "expected the network this prior was bound to, 6 tensors with 19 parameters; got one with 'head.bias' (1,) in "
        "place of 'scale' (). Make a new GaussianPrior for each network.",
    ),
    (
        lambda: make()().bind({f"net.{name}" if "." in name else name: shape for name, shape in SHAPES.items()}),
        "got one with 'net.body.0.weight' (3, 2) in place of 'body.0.weight' (3, 2). Make a new",
    ),
    (lambda: GaussianPrior(groups="layer").flat_precision(), "expected a prior that knows the network's parameters;"),
    (lambda: GaussianPrior().energy(draw(0)), "got one that was not bound. Call prior.bind(shapes)"),
    (lambda: make()().energy(draw(0, 5)), "expected flat weights of shape (19,); got shape (5,). Concatenate"),
    (
        lambda: make()().tensor_precision("head"),
        "expected the name of a parameter; got 'head'. The network has 'scale'",
    ),
    (lambda: setattr(make()(), "precision", 0.0), "expected precisions that are positive and finite; got 0. Pass"),
    (
        lambda: setattr(make(groups="layer")(), "precision", torch.ones(2)),
        "or one per group, (4,); got shape (2,). The",
    ),
]


@pytest.mark.parametrize(("build", "text"), ERRORS)
def test_errors_contain_a_remedy(build: Callable[[], object], text: str) -> None:
    with pytest.raises(HyperparameterError) as caught:
        build()
    assert text in str(caught.value)


def test_a_failed_binding_can_be_mended() -> None:
    prior = GaussianPrior({"head": 1.0}, groups="layer")
    with pytest.raises(HyperparameterError, match="a precision for every group"):
        prior.bind(SHAPES)
    prior.precision = LAYERS
    torch.testing.assert_close(prior.bind(SHAPES).precision.detach(), torch.ones(4, dtype=torch.float64))
