"""The content of the explorer page: predictions, decompositions, training points, and effects of their removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data import Inputs, as_tensors, num_examples, take
from ntk_laplace.model.data.pictures import require_picture
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain import Explanation, GroupRemoval, Ranking, Removals, leave_one_out
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.progress import track
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.tools.explorer.answers import Answers
from ntk_laplace.tools.explorer.display import rounded, rounded_each
from ntk_laplace.tools.explorer.naming import Naming, pictures, rows, texts

_AT_ONCE = 32 * 2**20  # entries of an (n, N, C) array; bounds the inputs explained at a time
_HELD = 512 * 2**20  # bytes of Jacobian rows of the displayed training points in memory at a time


def gather(
    posterior: Posterior, x: Inputs, training: Inputs | None, targets: Tensor | None, k: int, naming: Naming,
    progress: bool | None = None, candidates: int = 0, output: int | None = None,
) -> dict[str, Any]:
    """Collect all content of the page; the arguments are those of `explore`.

    DataError if sizes or names do not match, `training` are not the inputs of the fit in its order, the targets do not
    fit the likelihood, or the structure keeps no Jacobian and the training data cannot be read again.
    """
    posterior.fitted.warn_of_order()
    n = num_examples(x)
    training = None if training is None else as_tensors(training)
    _require_training(posterior, training)
    answers = Answers(posterior, naming.units)
    names = _names(answers, n, naming)
    truths = None if targets is None else answers.truths(targets, n)
    kept = posterior.fitted.structure.spec.keeps_jacobian
    find = _from_rows if kept else _from_data
    points, guarantees, at_optimum = find(answers, x, k, output, progress)
    left_out = leave_one_out(posterior.fitted)
    if candidates:
        guarantees = [*guarantees, *_reranked(answers, x, points, candidates, output)]
    if truths is not None:
        for point, truth in zip(points, truths, strict=True):
            point |= {} if truth is None else {"target": truth}
    shown = sorted({j for point in points for part in ("for", "against", "reranked") for j, *_ in point.get(part, ())})
    return {
        "kind": answers.kind,
        "names": names,
        "targetName": naming.target,
        "inputNames": texts(naming.inputs),
        "trainingNames": texts(naming.training),
        "examples": posterior.num_examples,
        "summary": answers.summary(),
        "evidence": posterior.log_marginal_likelihood().item(),
        "guarantees": [*guarantees, *left_out.guarantees],
        "leaveOneOut": str(left_out.reliability),
        "approximate": not posterior.fitted.exact and not kept,
        "atOptimum": at_optimum,
        "points": points,
        "spreads": {"outputs": answers.outputs, "responses": answers.responses},
        "training": answers.training_set(left_out),
        "pictures": pictures(x, training, shown, naming),
        "rows": rows(x, training, shown, naming, posterior.num_examples),
    } | ({} if answers.origins is None else {"origins": answers.origins})


def _require_training(posterior: Posterior, training: Inputs | None) -> None:
    """Refuse training inputs that are not those of the fit (DataError)."""
    if training is None:
        return
    if num_examples(training) != posterior.num_examples:
        raise DataError(f"the {posterior.num_examples:,} training inputs of the fit", f"{num_examples(training):,}",
                        "Pass the inputs that the posterior was fitted to, in their order.")
    with torch.no_grad():
        training_inputs(posterior.fitted.model, posterior.fitted.structure, training)  # refuses others


def _names(answers: Answers, n: int, naming: Naming) -> list[str]:
    """Names of the classes or outputs; refuse a wrong number of names, and a shape of no picture (DataError)."""
    if naming.shape is not None:
        require_picture(naming.shape)
    default = answers.names(naming.target)
    names = texts(naming.classes) or default
    if naming.classes is not None and len(naming.classes) != len(default):
        raise DataError(f"{len(default)} names of classes or outputs", f"{len(naming.classes)}",
                        "Name each of them once.")
    for what, given, count in (("inputs", naming.inputs, n),
                               ("training points", naming.training, answers.posterior.num_examples)):
        if given is not None and len(given) != count:
            raise DataError(f"{count:,} names of {what}", f"{len(given):,}", "Name each of them.")
    return names


# --- predictions


_JOINT = {
    "exact": "groups leave together, exactly for one Newton step of the linearized model",
    "other": "groups leave together, exactly for one step with this precision, which is not the linearized model's",
    "approximate": "groups leave together, out of this posterior's own curvature, which is not the linearized model's; "
    "where it holds too little of a group, the change is of first order alone, and the page says so",
}
_GROUPS = {"for": ("for",), "against": ("against",), "both": ("for", "against")}
_OTHER_SIDE = {"for": "against", "against": "for"}


def _joint(posterior: Posterior) -> str:
    """What holds of a group's removal."""
    fitted = posterior.fitted
    return _JOINT["exact" if fitted.exact else "other" if fitted.structure.spec.exact else "approximate"]


def _from_rows(
    answers: Answers, x: Inputs, k: int, output: int | None, progress: bool | None
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """One record per input, what holds of them, and whether contributions are those of an optimum; in function space.

    Those at the weights miss the gradient that training has left, often more than the prediction itself.
    """
    posterior, n = answers.posterior, num_examples(x)
    removals = Removals(posterior.fitted)
    records: list[dict[str, Any]] = []
    parts = list(panels(n, posterior.num_examples * posterior.num_outputs, _AT_ONCE))
    for part in track(parts, "ntk_laplace: explanations", len(parts), progress):
        here = take(x, part)
        found = cast(Explanation, posterior.explain(here, k, output, decomposition="auto"))
        jacobian = posterior.jacobian(here)
        asked = _Asked.of(answers, found)
        share = found.share * asked.signs.to(found.share)[:, None]
        own = asked.records(here)
        for i, record in enumerate(own):
            own_share, spread = answers.units[found.output[i]] * share[i], answers.output_spread(int(found.output[i]))
            record |= {"plus": rounded(own_share.clamp_min(0).sum(), spread),
                       "minus": rounded(own_share.clamp_max(0).sum(), spread)}
            record |= asked.listed(i, own_share, range(posterior.num_examples))
        for name, group in asked.groups().items():
            after = found.f + removals.joint(jacobian, group)
            for i, record in enumerate(own):
                record["without"][name] = answers.at(after[i], asked.signs[i])
        records += own
    return records, [*found.guarantees, _joint(posterior)], found.at_optimum


def _from_data(
    answers: Answers, x: Inputs, k: int, output: int | None, progress: bool | None
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """The same in weight space: rank the training points for all inputs, then read the Jacobian of displayed ones."""
    posterior, n = answers.posterior, num_examples(x)
    jacobian = posterior.jacobian(x)
    found = cast(Ranking, posterior.explain(x, k, output, decomposition="auto"))
    asked = _Asked.of(answers, found)
    records, groups = asked.records(x), asked.groups()
    parts = list(panels(n, 2 * k * jacobian.nbytes, _HELD * n))
    for part in track(parts, "ntk_laplace: joint removals", len(parts), progress):
        members = torch.cat(groups["both"][part]).unique()
        if len(members) == 0:
            members = torch.zeros(1, dtype=torch.long, device=found.f.device)
        removal = GroupRemoval(posterior.fitted, members)
        few, signs = jacobian.subset(part), asked.signs[part]
        share = removal.contributions(few, found.output[part], found.importance) * signs.to(found.f)[:, None]
        place = {int(j): slot for slot, j in enumerate(members)}
        left = {name: removal.effects(few, group[part]) for name, group in groups.items()}
        for i, record in enumerate(records[part]):
            number = part.start + i
            explained = int(found.output[number])
            total = answers.units[explained] * found.total[number, explained] * signs[i]
            record["total"] = rounded(total, answers.output_spread(explained))
            record |= asked.listed(number, answers.units[explained] * share[i], place)
            for name, (change, leverage, trusted) in left.items():
                record["without"][name] = answers.at(found.f[number] + change[i], signs[i])
                if not trusted[i]:
                    record["without"][name]["held"] = rounded(float(leverage[i]))
    return records, [*found.guarantees, _joint(posterior)], found.at_optimum


def _reranked(
    answers: Answers, x: Inputs, points: list[dict[str, Any]], candidates: int, output: int | None
) -> tuple[str, ...]:
    """Add the effects of the candidates and of the groups on the network itself to each input's record."""
    posterior = answers.posterior
    members = [tuple(j for side in of for j, *_ in point[side]) for point in points for of in _GROUPS.values()]
    groups = [group for group in dict.fromkeys(members) if 0 < len(group) < posterior.num_examples]
    place = {group: slot for slot, group in enumerate(groups)}
    found = posterior.rerank(x, candidates, output, groups=groups)
    signs = answers.signs(posterior.outputs(x)).to(found.f)  # at the page's weights
    units = (signs * answers.units[found.quantity.output].to(signs)).unsqueeze(1)
    linear, moving = found.linear * units, found.moving * units
    flags = torch.stack([found.disagrees, ~found.comes_back, ~found.converged], 2).tolist()
    own = iter(members)
    for i, point in enumerate(points):
        columns = found.indices[i].tolist(), rounded(linear[i]), rounded(moving[i]), found.places[i].tolist()
        point["reranked"] = [[*row, *marks] for *row, marks in zip(*columns, flags[i], strict=True)]
        for name in _GROUPS:
            slot = place.get(next(own))
            if slot is not None:
                said = answers.at(found.group_outputs[i, slot], signs[i])
                point["without"][name]["moving"] = said | {"away": not bool(found.group_comes_back[slot]),
                                                           "unfinished": not bool(found.group_converged[slot])}
    return found.guarantees


@dataclass(frozen=True)
class _Asked:
    """Effects of training points on each prediction, with the sign of `Answers.signs`."""

    answers: Answers
    found: Explanation | Ranking
    signs: Tensor  # (n,)
    sides: list[dict[str, list[tuple[int, float]]]]  # by input and side, pairs (point, effect), the strongest first

    @classmethod
    def of(cls, answers: Answers, found: Explanation | Ranking) -> _Asked:
        """From an explanation by "output"."""
        signs, sides = answers.signs(found.f), []
        for i, sign in enumerate(signs.tolist()):
            own = {}
            for side in _OTHER_SIDE:
                entries = found.entries(i, side if sign > 0 else _OTHER_SIDE[side])
                unit = sign * float(answers.units[found.output[i]])
                effects = [(entry.training_index, unit * entry.removal_effect) for entry in entries]
                own[side] = [(j, e) for j, e in effects if (e < 0 if side == "for" else e > 0)]
            sides.append(own)
        return cls(answers, found, signs, sides)

    def groups(self) -> dict[str, list[Tensor]]:
        """Training points that are removed together, for each input."""
        device = self.found.f.device
        return {name: [torch.tensor([j for side in of for j, _ in own[side]], dtype=torch.long, device=device)
                       for own in self.sides] for name, of in _GROUPS.items()}

    def listed(
        self, i: int, share: Tensor, place: Mapping[int, int] | Sequence[int]
    ) -> dict[str, list[list[Any]]]:
        """Each point j on each side of input i, with its effect and its part of the sum, ``share[place[j]]``."""
        return {side: [[j, rounded(effect), rounded(share[place[j]])] for j, effect in own]
                for side, own in self.sides[i].items()}

    def records(self, x: Inputs) -> list[dict[str, Any]]:
        """The part of each input's record that all structures support."""
        answers, found = self.answers, self.found
        glm, plain = answers.posterior.predict(x, "glm"), answers.posterior.predict(x, "map")
        records, intervals = [], answers.intervals(glm)
        for i, sign in enumerate(self.signs.tolist()):
            output = int(found.output[i])
            records.append({
                "output": output if answers.kind != "binary" else int(found.f[i, 0] >= 0),
                "f": rounded_each(answers.shown(found.f[i]) * sign, answers.outputs),
                "offset": rounded(answers.shown(found.offset[i])[output] * sign, answers.output_spread(output)),
                "gap": rounded(answers.units[output] * found.gap[i, output] * sign),
                "prediction": answers.said(glm, i, intervals),
                "network": answers.said(plain, i), "without": {},
            })
        return records
