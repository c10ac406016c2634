"""The explorer's section on sources: the joint effects of each source on each input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain import SourceEffects
from ntk_laplace.tools.explorer.display import rounded, rounded_each

HTML = """
<section class="panel" aria-labelledby="by-source"><h2 id="by-source">Sources of the training data</h2>
<p class="soft">All points of a source leave together. The sum of single effects leaves out one point at a time, with
the others of its source still there. A source whose own points have a low log p without it is one that the others do
not confirm.</p>
<details><summary>What holds of these numbers</summary><ul class="soft" id="source-promises"></ul></details>
<div class="scroll" role="region" aria-label="Sources" tabindex="0"><table><caption id="source-caption"></caption>
<thead><tr id="source-columns"></tr></thead><tbody id="source-rows"></tbody></table></div></section>
"""


def with_sources(posterior: Posterior, found: SourceEffects, content: dict[str, Any]) -> dict[str, Any]:
    """The content of the page with its section on sources (DataError if they have effects on other outputs)."""
    _check(posterior, found, content)
    classes, binary = content["kind"] != "values", content["kind"] == "binary"
    n, count, c = found.outputs.shape
    with torch.no_grad():
        means = posterior.likelihood.for_new_points().mean(found.outputs.reshape(n * count, c)).view(n, count, -1)
    if binary:
        means = torch.cat([1 - means, means], 2)
    points = []
    for i, point in enumerate(content["points"]):
        sign = -1.0 if binary and point["output"] == 0 else 1.0
        own: dict[str, Any] = {"effect": rounded(sign * found.effect[i]), "single": rounded(sign * found.single[i])}
        if classes:
            own |= {"p": rounded(means[i, :, point["output"]]), "best": means[i].argmax(1).tolist()}
        else:
            spreads = content["spreads"]["responses"]
            own["mean"] = [rounded_each(mean, spreads) for mean in means[i]]
        if found.log_prob_change is not None:
            own["truth"] = rounded(found.log_prob_change[i])
        points.append(point | {"sources": own})
    sources = {
        "names": list(found.names), "points": found.num_points.tolist(), "converged": found.converged.tolist(),
        "own": rounded(found.own_log_prob), "without": rounded(found.own_log_prob_without),
        "guarantees": list(found.guarantees),
    }
    return content | {"points": points, "sources": sources}


def _check(posterior: Posterior, found: SourceEffects, content: dict[str, Any]) -> None:
    remedy = "Pass sources=posterior.source_effects(x, labels) of the inputs of the page."
    if not isinstance(found, SourceEffects):
        raise DataError("the sources as posterior.source_effects(x, labels)", f"a {type(found).__name__}", remedy)
    n, outputs = len(content["points"]), torch.tensor([point["output"] for point in content["points"]], device="cpu")
    if len(found.f) != n or found.by not in ("output", "logit"):
        raise DataError(f"effects of sources on outputs of the {n:,} inputs of the page",
                        f"effects on {found.by!r} of {len(found.f):,}", remedy)
    if content["kind"] != "binary" and not torch.equal(found.quantity.output.cpu(), outputs):
        raise DataError("effects of sources on the outputs that the page explains", "those of other outputs",
                        "Pass one output= to both, explore and source_effects, or none.")
    if posterior.fitted.model.displacement is None and not _same(found.f, content):
        raise DataError("effects of sources on the inputs of the page", "those of other inputs", remedy)


def _same(f: Tensor, content: dict[str, Any]) -> bool:
    """Whether outputs are those of the page, up to its digits and the sign of binary ones."""
    shown = torch.tensor([point["f"] for point in content["points"]], dtype=torch.float64, device="cpu").abs()
    return torch.allclose(f.detach().cpu().double().abs(), shown, rtol=2e-3, atol=1e-6)
