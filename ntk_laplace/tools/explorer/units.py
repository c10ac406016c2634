"""The page in other units: targets were standardized, people read them in their own units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ntk_laplace.tools.explorer.display import rounded, rounded_each


def content_in_units(
    content: dict[str, Any], scale: Sequence[float], mean: Sequence[float], targets: Sequence[Any],
    truths: Sequence[Any] | None,
) -> dict[str, Any]:
    """The content of a page on outputs ``scale * f + mean``, (C,), from that of a page on f with a Gaussian likelihood.

    The content is as `gather` and `with_sources` make it, with an output for each target. Targets of the training
    points, (N,) or (N, C), and of the inputs to explain are in the other units, with more digits than on the page.
    """
    found = _Units(list(scale), list(mean), content["spreads"]).content(content)
    spreads = found["spreads"]["responses"]
    found["training"]["target"] = [rounded_each(target, spreads) for target in targets]
    for point, truth in zip(found["points"], () if truths is None else truths, strict=truths is not None):
        point |= {"target": rounded_each(truth, spreads)} if "target" in point else {}
    return found


class _Units:
    """Numbers in the other units; those that are not finite are None. The spreads are in those of the page as it is."""

    def __init__(self, scale: list[float], mean: list[float], spreads: dict[str, list[float]]) -> None:
        self.scale, self.mean = scale, mean
        self.spreads = {name: [size * unit for size, unit in zip(sizes, scale, strict=True)]
                        for name, sizes in spreads.items()}
        self.shift = -sum(map(math.log, scale))  # of log densities

    def content(self, content: dict[str, Any]) -> dict[str, Any]:
        training = content["training"]
        changed = {
            "points": [self._point(point) for point in content["points"]], "spreads": self.spreads,
            "origins": rounded_each(self.mean, self.spreads["outputs"]),
            "training": training | {"without": [self._values(value) for value in training["without"]],
                                    "logDensity": self._densities(training["logDensity"])},
        }
        if "sources" in content:
            own = content["sources"]
            changed["sources"] = own | {name: self._densities(own[name]) for name in ("own", "without")}
        return content | changed

    def _point(self, point: dict[str, Any]) -> dict[str, Any]:
        output = point["output"]
        unit, spread = self.scale[output], self.spreads["outputs"][output]

        def size(value: Any) -> Any:
            return None if value is None else rounded(unit * value)

        changed = self._said(point) | {name: self._said(point[name]) for name in ("prediction", "network")}
        changed |= {"offset": rounded(unit * point["offset"] + self.mean[output], spread), "gap": size(point["gap"])}
        changed |= {name: rounded(unit * point[name], spread) for name in ("plus", "minus", "total") if name in point}
        changed |= {name: [[j, size(effect), size(share)] for j, effect, share in point[name]]
                    for name in ("for", "against")}
        changed["without"] = {name: self._said(said) for name, said in point["without"].items()}
        if "reranked" in point:
            changed["reranked"] = [[j, size(linear), size(moving), *rest] for j, linear, moving, *rest
                                   in point["reranked"]]
        if "sources" in point:
            found = point["sources"]
            changed["sources"] = found | {name: [size(value) for value in found[name]] for name in ("effect", "single")}
            changed["sources"]["mean"] = [self._values(value) for value in found["mean"]]
        return point | changed

    def _said(self, said: dict[str, Any]) -> dict[str, Any]:
        """A prediction with or without training points."""
        changed: dict[str, Any] = {name: self._values(said[name]) for name in ("f", "mean") if name in said}
        changed |= {name: [rounded(unit * value) for unit, value in zip(self.scale, said[name], strict=True)]
                    for name in ("deviation", "epistemic", "aleatoric") if name in said}
        changed |= {name: self._said(said[name]) for name in ("moving",) if name in said}
        return said | changed

    def _values(self, values: Any) -> Any:
        """A number for each output, or of the only one."""
        listed = values if isinstance(values, list) else [values]
        found = rounded_each([None if value is None else unit * value + mean for value, unit, mean
                              in zip(listed, self.scale, self.mean, strict=True)], self.spreads["responses"])
        return found if isinstance(values, list) else found[0]

    def _densities(self, values: list[Any]) -> list[Any]:
        return [None if value is None else rounded(value + self.shift) for value in values]
