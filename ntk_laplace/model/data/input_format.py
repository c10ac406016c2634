"""Input formats: keys, shapes and types of inputs, and error texts for inputs that a network does not accept."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ntk_laplace.model.data.inputs import Inputs, leaves, map_tensors


def format_of(x: Inputs) -> Inputs:
    """The same inputs with zero examples, which keeps keys, shapes and types."""
    return map_tensors(lambda tensor: tensor.detach().new_empty(0, *tensor.shape[1:]), x)


def describe_inputs(x: Inputs, examples: str = "") -> str:
    """A short description of inputs, such as ``float32 (4, 5)`` or ``{'tokens': int64 (4, 7)}``.

    `examples` is shown instead of their number: "n" for a format.
    """
    if isinstance(x, Tensor):
        sizes = [str(size) for size in x.shape]
        sizes[:1] = [examples or size for size in sizes[:1]]
        return f"{str(x.dtype).removeprefix('torch.')} ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe_inputs(value, examples)}' for key, value in x.items())}}}"
    if isinstance(x, (tuple, list)):
        inner = ", ".join(describe_inputs(value, examples) for value in x[:4]) + (", ..." if len(x) > 4 else "")
        return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
    return type(x).__name__


def same_input_format(x: Inputs, form: Inputs) -> bool:
    """Whether inputs have the given format, up to the number of examples."""
    return describe_inputs(x, "n") == describe_inputs(form, "n")


def input_remedy(x: Inputs, form: Inputs | None) -> str:
    """Advice for inputs on which a network fails, a full sentence; `form` is the format of inputs that worked."""
    if form is None:
        whole = [tensor for tensor in leaves(x) if not tensor.is_floating_point()]
        return ("Convert them, x.to(torch.float32), if they are values and no indices." if whole
                else "Pass inputs on which network(x) runs, one row per example.")
    if isinstance(x, Mapping) and isinstance(form, Mapping) and x.keys() != form.keys():
        return f"Give it the keys {', '.join(repr(key) for key in form)}."
    if same_input_format(x, form):
        return "Look at their values: others of that form it took."
    own, theirs = leaves(x), leaves(form)
    if isinstance(form, Tensor) and isinstance(x, Tensor) and x.shape == form.shape[1:]:
        return "Add the axis of examples, x.unsqueeze(0)."
    if isinstance(form, Tensor) and isinstance(x, (tuple, list)) and own and {t.shape for t in own} == {form.shape[1:]}:
        return "Join them along an axis of examples, torch.stack(x)."
    kinds = [[_kind(tensor) for tensor in tensors] for tensors in (own, theirs)]
    if kinds[0] != kinds[1] and len(own) == len(theirs):
        alone = isinstance(form, Tensor) and isinstance(x, Tensor)
        return f"Convert them, x.to({theirs[0].dtype})." if alone else "Give them those types."
    return "Give them that form, or another on which network(x) runs."


def _kind(tensor: Tensor) -> str:
    """Kind of dtype; conversion between floating types is automatic, other conversions are not."""
    return "floating" if tensor.is_floating_point() else str(tensor.dtype)
