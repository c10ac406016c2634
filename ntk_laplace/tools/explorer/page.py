"""The explorer page: data, style and script in one HTML file without external resources."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, require_whole
from ntk_laplace.model.data import Inputs, as_tensors, num_examples
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain import SourceEffects
from ntk_laplace.structures.what_if import HIGH_LEVERAGE
from ntk_laplace.tools.explorer.gather import gather
from ntk_laplace.tools.explorer.naming import Naming
from ntk_laplace.tools.explorer.sources import HTML, with_sources
from ntk_laplace.tools.report import document

_BODY = """
<header><h1>{title}</h1><p class="lead">{summary}</p></header>
<main>
<div class="columns">
<section class="panel" id="list" aria-labelledby="list-title"><h2 id="list-title">Inputs</h2>
<label for="find">Find by number or name, prediction or “wrong”</label>
<input type="search" id="find" autocomplete="off">
<p class="soft" id="found" role="status"></p>
<ul id="points" role="listbox" tabindex="0" aria-label="Inputs, arrow keys choose"></ul></section>
<div>
<section class="panel" aria-labelledby="which"><h2 id="which" aria-live="polite">Input</h2><div id="prediction"></div>
</section>
<section class="panel" id="decomposition"></section>
<section class="panel" aria-labelledby="who"><h2 id="who">Training points behind it</h2>
<p class="soft">Ranked by what leaving one out would do to the output, in one step of the linearized network{whose}.</p>
<details><summary>What holds of these numbers</summary><ul class="soft">{guarantees}</ul></details>
<div class="sides"><div class="side-for" id="side-for"></div><div class="side-against" id="side-against"></div></div>
</section>{reranked}
<section class="panel" aria-labelledby="if"><h2 id="if">What if they had not been there?</h2>
<fieldset><legend>Leave out together</legend>
<label><input type="radio" name="leave" value="none" checked> nothing</label>
<label><input type="radio" name="leave" value="for"> those that speak for it</label>
<label><input type="radio" name="leave" value="against"> those that speak against it</label>
<label><input type="radio" name="leave" value="both"> both</label></fieldset>
<div id="answer" aria-live="polite"></div></section>{sources}
</div></div>
<section class="panel" style="margin-top: 1.5rem" aria-labelledby="all"><h2 id="all">Training set</h2>
<p class="soft">“By the others”: what the posterior without a point says of it. A low log density is a point that the
others do not understand: a rare one, or a wrong label. A leverage near 1 is a point that the fit rests on.
Self-influence: nats of its own log likelihood that a point owes to itself; information: nats that it adds to how sure
the posterior is.</p>{caution}
<label for="search">Search by number, name or value</label><input type="search" id="search" autocomplete="off">
<p class="soft" id="shown" role="status"></p>
<div class="scroll" role="region" aria-label="Training set" tabindex="0"><table>
<caption>Press a heading to sort.</caption><thead><tr id="columns"></tr></thead><tbody id="rows"></tbody></table></div>
<button type="button" class="more" id="more">Show more</button></section>
</main>
<noscript><p>This page needs JavaScript; it loads nothing from elsewhere.</p></noscript>
"""


_RERANKED = """
<section class="panel" aria-labelledby="again"><h2 id="again">Ranked again by the network itself</h2>
<p class="soft">Linear: one step of the linearized network without the point. Moving: the network at its own optimum
without it. They disagree where they differ in sign or by more than a factor of two. A point does not come back if the
network ends elsewhere once it is put back: its minimum has left with the point.</p>
<div class="scroll" role="region" aria-label="Training points ranked again" tabindex="0"><table>
<caption id="again-unit"></caption><thead><tr><th scope="col">Training point</th><th scope="col">{target}</th>
<th scope="col">Linear</th><th scope="col">Place</th><th scope="col">Moving</th><th scope="col">Place</th>
<th scope="col">Note</th></tr></thead><tbody id="again-rows"></tbody></table></div></section>"""


@dataclass(frozen=True)
class ExplorerPage:
    """Explanations as one self-contained HTML page.

    Attributes
    ----------
    title : str
    content : dict
        JSON-serializable data: `points` (one record per input), `training` (columns), `pictures`, `rows`, `sources`
        if they were given.
    """

    title: str
    content: dict[str, Any]

    def __repr__(self) -> str:
        return f"ExplorerPage({len(self.content['points'])} inputs, {self.content['examples']:,} training points)"

    def html(self) -> str:
        """The page as one HTML document."""
        style, *scripts = (resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
                           for name in ("explorer.css", "explorer.js", "sources.js"))
        script = "".join(scripts)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        # "</" would end the script element, even inside a string, and "<!--<script>" hide its end
        numbers = json.dumps(self.content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        promises = "".join(f"<li>{escape(words)}</li>" for words in self.content["guarantees"])
        whose = " with this posterior’s own approximate curvature" if self.content["approximate"] else ""
        caution = self.content["leaveOneOut"]
        caution = f'\n<p class="flag" role="note">Mind: {escape(caution)}.</p>' if caution else ""
        target = "Target" if self.content["kind"] == "values" else "Class"
        reranked = _RERANKED.format(target=target) if "reranked" in self.content["points"][0] else ""
        sources = HTML if "sources" in self.content else ""
        evidence = f"{self.content['evidence']:,.1f}".replace("-", "\N{MINUS SIGN}")
        summary = f"{escape(self.content['summary'])}, log evidence {evidence} nats"
        body = _BODY.format(title=escape(self.title), summary=summary, guarantees=promises, whose=whose,
                            caution=caution, reranked=reranked, sources=sources)
        body += f'<script type="application/json" id="data">{numbers}</script>\n<script>{script}</script>\n'
        return document(self.title, style, body, f"sha256-{digest}")

    def write(self, path: str | Path) -> Path:
        """Write the page to `path`, in UTF-8."""
        path = Path(path)
        path.write_text(self.html(), encoding="utf-8")
        return path


def explore(
    posterior: Posterior, x: Inputs, training: Inputs | None = None, targets: Tensor | None = None, k: int = 6,
    naming: Naming | None = None, title: str = "Which training points made these predictions?",
    progress: bool | None = None, candidates: int = 0, sources: SourceEffects | None = None, output: int | None = None,
) -> ExplorerPage:
    """Make a page that explains predictions by uncertainty, training points, and effects of their removal.

    Parameters
    ----------
    posterior : Posterior
        A posterior of any structure; the page states whether its numbers are exact.
    x : tensor, tuple or dict of tensors
        Inputs to explain. All of them are in the page, so use hundreds rather than thousands.
    training : like x, optional
        The training inputs in the order of the fit, shown as images or rows if they are one tensor.
    targets : Tensor, optional
        True targets at `x`, to see which predictions are wrong. NaN, or the class -100, is a missing one.
    k : int
        Number of training points shown for and against each prediction, and removed together.
    naming : Naming, optional
        Names of classes and features, the shape of images.
    title : str
    progress : bool, optional
        Show a progress bar; by default if the error stream is a terminal.
    candidates : int
        If positive, `Posterior.rerank` this many training points of each input: a table of linear and moving effects,
        and the network's own answers without the groups. It moves a network for each point and group of all inputs.
    sources : SourceEffects, optional
        ``posterior.source_effects(x, labels, output=output)``: the page then has a section on the sources of the
        training data.
    output : int, optional
        The output to explain, as in `Posterior.explain`.

    Returns
    -------
    ExplorerPage

    Raises
    ------
    DataError
        If sizes or names do not match, `training` are not the inputs of the fit in its order, or as
        `Posterior.rerank`.
    """
    if posterior.likelihood.positions is not None:
        raise UnsupportedError("one row of outputs per example, for the page", "outputs at many positions",
                               "Use posterior.explain(x, output=...), for an output at one position.")
    x, naming = as_tensors(x), Naming() if naming is None else naming
    if num_examples(x) == 0:
        raise DataError("at least one input", "none", "Pass one or more inputs.")
    if not isinstance(naming, Naming):
        raise DataError("words as ntk_laplace.Naming(...)", f"{naming!r}"[:80], "Pass Naming(classes=[...]).")
    require_whole("candidates", candidates, 0, "Pass 0 for no second ranking, or for example 20.")
    content = gather(posterior, x, training, targets, k, naming, progress, candidates, output)
    content = content if sources is None else with_sources(posterior, sources, content)
    return ExplorerPage(str(title), content | {"flag": HIGH_LEVERAGE})
