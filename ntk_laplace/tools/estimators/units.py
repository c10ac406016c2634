"""Explanations of outputs in other units: targets are standardized, people read them in their own units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from numpy.typing import ArrayLike

from ntk_laplace.posterior.explain import SPREADS, Explanation, Ranking, SourceEffects
from ntk_laplace.runtime.conversion import to_tensor

Explained = TypeVar("Explained", bound=Explanation | Ranking | SourceEffects)

_SHIFTED = ("f", "offset", "outputs")  # the others are differences
_SCALED = ("contributions", "total", "gap", "removal")
_SQUARED = ("widening", "variance")
_DENSITIES = ("own_log_prob", "own_log_prob_without")


def in_units(found: Explained, scale: ArrayLike, mean: ArrayLike) -> Explained:
    """Explanations of ``scale * f + mean``, (C,), with targets ``scale * y + mean`` and the noise that belongs to them.

    They are found of f with additive noise, or of outputs that are log variances too, after those of the targets. Their
    `quantity` stays that of f.
    """
    unit, shift = (to_tensor(part).to(found.f) for part in (scale, mean))
    own = unit[found.quantity.output].unsqueeze(1)  # of the explained output, (n, 1)
    quantity = own**2 if found.by in SPREADS else torch.ones_like(own) if found.by == "log_likelihood" else own
    factors: dict[str, Any] = {
        **dict.fromkeys((*_SHIFTED, *_SCALED), unit), **dict.fromkeys(_SQUARED, unit**2), "importance": 1 / unit,
        "kernel": own.unsqueeze(1) * unit, "similarity": own**2, **dict.fromkeys(("effect", "single"), quantity),
    }
    fields = vars(found)
    changed = {name: fields[name] * factor for name, factor in factors.items() if name in fields}
    changed |= {name: changed[name] + shift for name in _SHIFTED if name in changed}
    if "targets" in fields:
        responses = fields["targets"].shape[1] if fields["targets"].ndim > 1 else 1
        changed["targets"] = fields["targets"] * unit[:responses] + shift[:responses]
    changed |= {name: fields[name] - unit.log().sum() for name in _DENSITIES if name in fields}
    if isinstance(found, Ranking):
        changed["effects"] = {side: effects * quantity for side, effects in found.effects.items()}
    return replace(found, **changed)
