"""The state of a process: parameters, optimizer and random generators, as plain containers of tensors."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntk_laplace.errors import UnsupportedError


def module_tensors(*modules: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, including non-persistent buffers, by name."""
    found: dict[str, Tensor] = {}
    for number, module in enumerate(modules):
        named = (*module.named_parameters(), *module.named_buffers())
        found |= {f"{number}.{name}": value.detach().clone() for name, value in named}
    return found


@torch.no_grad()
def load_tensors(saved: Mapping[str, Tensor], *modules: nn.Module) -> None:
    """Restore them in place."""
    for number, module in enumerate(modules):
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            value.copy_(saved[f"{number}.{name}"])


def load_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state in its dtypes; torch would cast all of it to the parameters' dtype."""
    optimizer.load_state_dict(dict(saved))
    for number, own in optimizer.state_dict()["state"].items():
        for name, value in saved["state"][number].items():
            if isinstance(value, Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device)


def random_state(device: torch.device, generators: Sequence[torch.Generator]) -> dict[str, Any]:
    """States of all random sources that an epoch may draw from."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 -- what augmentations draw from
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "python": copy.deepcopy(random.getstate()),
        "generators": [generator.get_state() for generator in generators],
    }


def load_random(saved: Mapping[str, Any], device: torch.device, generators: Sequence[torch.Generator]) -> None:
    """Restore them; the data must have as many generators as before (UnsupportedError)."""
    if len(saved["generators"]) != len(generators):
        raise UnsupportedError(f"data with {len(saved['generators'])} random generators, as before",
                               f"{len(generators)}", "Resume with a loader made in the same way.")
    torch.set_rng_state(saved["cpu"].cpu())
    if saved["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"].cpu(), device)
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    for generator, state in zip(generators, saved["generators"], strict=True):
        generator.set_state(state.cpu())
