"""Numbers for the explorer page: predictions, decompositions, training points, and effects of their removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data import Inputs, as_tensor, as_tensors, num_examples, take
from ntk_laplace.model.data.pictures import require_picture
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain import Explanation, GroupRemoval, LeaveOneOut, Ranking, Removals, leave_one_out
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.progress import track
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.tools.explorer.display import rounded, rounded_each, spread_of
from ntk_laplace.tools.explorer.sprites import images_of, sheet

_AT_ONCE = 32 * 2**20  # entries of an (n, N, C) array; bounds the inputs explained at a time
_HELD = 512 * 2**20  # bytes of Jacobian rows of the displayed training points in memory at a time
_ALL_PICTURES = 2000  # with more training points only the displayed ones get a picture
MOST_FEATURES = 40  # maximum number of displayed features of an input
_MISSING = "None", "<NA>", "NaT"  # how None and what pandas has for missing values are written


@dataclass(frozen=True)
class Naming:
    """Names of classes, features, targets, inputs and training points on the page.

    Attributes
    ----------
    classes : sequence of str, optional
        Names of the classes, or of the outputs.
    features : sequence of str, optional
        Names of the inputs' columns.
    shape : sequence of int, optional
        Of inputs that are images: (height, width), (height, width, 3) or (3, height, width).
    target : str
        Name of the predicted quantity, for regression.
    inputs : sequence of str, optional
        Names of the inputs to explain, such as their files; numbers by default.
    training : sequence of str, optional
        Names of the training points.
    values : pair of tables, optional
        What is shown in place of the numbers of the inputs to explain, and of the training inputs, such as names of
        categories: DataFrames, whose columns name the features, or arrays with a number or text for each of `features`.
    """

    classes: Sequence[str] | None = None
    features: Sequence[str] | None = None
    shape: Sequence[int] | None = None
    target: str = "target"
    inputs: Sequence[str] | None = None
    training: Sequence[str] | None = None
    values: tuple[Any, Any] | None = None


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
    _check(posterior, n, training, naming)
    truths, spreads = None if targets is None else _truths(posterior, targets, n), _Spreads.of(posterior)
    kept = posterior.fitted.structure.spec.keeps_jacobian
    find = _from_rows if kept else _from_data
    points, guarantees = find(posterior, x, k, output, progress)
    left_out = leave_one_out(posterior.fitted)
    if candidates:
        guarantees = [*guarantees, *_reranked(posterior, x, points, candidates, output, spreads)]
    if truths is not None:
        for point, truth in zip(points, truths, strict=True):
            point |= {} if truth is None else {"target": rounded_each(truth, spreads.responses)}
    shown = sorted({j for point in points for part in ("for", "against", "reranked") for j, *_ in point.get(part, ())})
    return {
        "kind": _kind(posterior),
        "names": _names(posterior, naming),
        "targetName": naming.target,
        "inputNames": _texts(naming.inputs),
        "trainingNames": _texts(naming.training),
        "examples": posterior.num_examples,
        "summary": _summary(posterior),
        "evidence": posterior.log_marginal_likelihood().item(),
        "guarantees": [*guarantees, *left_out.guarantees],
        "leaveOneOut": str(left_out.reliability),
        "approximate": not posterior.fitted.exact and not kept,
        "points": points,
        "spreads": asdict(spreads),
        "training": _training_set(posterior, left_out, spreads),
        "pictures": _pictures(x, training, shown, naming),
        "rows": _rows(x, training, shown, naming, posterior.num_examples),
    }


def _truths(posterior: Posterior, targets: Any, n: int) -> list[Any]:
    """Targets as shown: a class (for a soft label the most probable one), a number, or one number per output.

    None for an input without a target, NaN for one of several that is missing.
    """
    likelihood, gaps = posterior.likelihood.for_new_points(), torch.zeros(n, 1, dtype=torch.bool)
    if isinstance(targets, np.ndarray) and targets.dtype.kind == "f":
        targets = as_tensor(targets)
    if isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape[:1] == (n,):
        gaps = targets.isnan().reshape(n, -1)
        targets = targets.masked_fill(gaps.view_as(targets), 0)  # any that the likelihood takes, whatever marks it has
    y = likelihood.targets(targets, n, posterior.num_outputs)
    observed, kind = likelihood.observed(y), _kind(posterior)
    there = ~gaps.to(y.device) if observed is None else ~gaps.to(y.device) & observed.reshape(n, -1)
    y = y.argmax(1) if kind == "classes" and y.ndim == 2 else y.flatten() if y.numel() == n else y
    found = y if kind == "values" else (y > 0.5).long() if kind == "binary" else y.long()
    if kind == "values" and y.ndim == 2:
        found = found.masked_fill(~there, torch.nan)
    return [truth if known else None for truth, known in zip(found.tolist(), there.any(1).tolist(), strict=True)]


def _texts(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else [str(name) for name in names]


def _check(posterior: Posterior, n: int, training: Inputs | None, naming: Naming) -> None:
    if training is not None:
        if num_examples(training) != posterior.num_examples:
            raise DataError(f"the {posterior.num_examples:,} training inputs of the fit", f"{num_examples(training):,}",
                            "Pass the inputs that the posterior was fitted to, in their order.")
        with torch.no_grad():
            training_inputs(posterior.fitted.model, posterior.fitted.structure, training)  # refuses others
    if naming.shape is not None:
        require_picture(naming.shape)
    names = naming.classes
    wanted = 2 if _kind(posterior) == "binary" else posterior.num_outputs
    if names is not None and len(names) != wanted:
        raise DataError(f"{wanted} names of classes or outputs", f"{len(names)}", "Name each of them once.")
    for what, given, count in (("inputs", naming.inputs, n),
                               ("training points", naming.training, posterior.num_examples)):
        if given is not None and len(given) != count:
            raise DataError(f"{count:,} names of {what}", f"{len(given):,}", "Name each of them.")


def _kind(posterior: Posterior) -> str:
    likelihood = posterior.likelihood.for_new_points()
    if not likelihood.classifies:
        return "values"
    if likelihood.event_shape(posterior.num_outputs) == ():
        return "classes"
    return "binary" if posterior.num_outputs == 1 else "values"


def _names(posterior: Posterior, naming: Naming) -> list[str]:
    if naming.classes is not None:
        return [str(name) for name in naming.classes]
    c = posterior.num_outputs
    if _kind(posterior) == "values":
        what = naming.target if posterior.likelihood.num_responses(c) == c else "output"
        return [what if c == 1 else f"{what} {i}" for i in range(c)]
    return [str(i) for i in range(2 if _kind(posterior) == "binary" else c)]


def _summary(posterior: Posterior) -> str:
    likelihood = type(posterior.likelihood).__name__
    kept = "" if posterior.fitted.structure.spec.keeps_jacobian else f"structure {posterior.structure}, "
    return (f"{posterior.num_examples:,} training points, {posterior.num_parameters:,} parameters, {kept}{likelihood} "
            "likelihood")


# --- digits


@dataclass(frozen=True)
class _Spreads:
    """Ranges in the training data, which decide the digits of numbers beside each other; empty for classes."""

    outputs: list[float]  # of each output
    responses: list[float]  # of each target

    @classmethod
    def of(cls, posterior: Posterior) -> _Spreads:
        if _kind(posterior) != "values":
            return cls([], [])
        return cls(*([spread_of(column) for column in rows.reshape(len(rows), -1).T.tolist()]
                     for rows in (posterior.f.detach(), posterior.targets)))

    def output(self, number: int) -> float:
        """That of one output."""
        return self.outputs[number] if self.outputs else 0.0


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
    posterior: Posterior, x: Inputs, k: int, output: int | None, progress: bool | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """One record per input, and common information on them, in function space."""
    n, c = num_examples(x), posterior.num_outputs
    removals = Removals(posterior.fitted)
    records: list[dict[str, Any]] = []
    parts = list(panels(n, posterior.num_examples * c, _AT_ONCE))
    for part in track(parts, "ntk_laplace: explanations", len(parts), progress):
        here = take(x, part)
        found, rows = cast(Explanation, posterior.explain(here, k, output)), posterior.jacobian(here)
        asked = _Asked.of(posterior, found)
        share = found.share * asked.sign.to(found.share)[:, None]
        own = asked.records(posterior, here)
        for i, record in enumerate(own):
            spread = asked.spreads.output(int(found.output[i]))
            record |= {"plus": rounded(share[i].clamp_min(0).sum(), spread),
                       "minus": rounded(share[i].clamp_max(0).sum(), spread)}
            for side in _OTHER_SIDE:
                record[side] = [[j, rounded(effect), rounded(share[i, j])] for j, effect in asked.sides[i][side]]
        for name, group in asked.groups().items():
            after = found.f + removals.joint(rows, group)
            for i, record in enumerate(own):
                record["without"][name] = _without(posterior, after[i], asked.sign[i], asked.spreads)
        records += own
    return records, [*found.guarantees, _joint(posterior)]


def _from_data(
    posterior: Posterior, x: Inputs, k: int, output: int | None, progress: bool | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The same in weight space: rank the training points for all inputs, then read the Jacobian of displayed ones."""
    n, rows = num_examples(x), posterior.jacobian(x)
    found = cast(Ranking, posterior.explain(x, k, output))
    asked = _Asked.of(posterior, found)
    records = asked.records(posterior, x)
    groups = asked.groups()
    parts = list(panels(n, 2 * k * rows.nbytes, _HELD * n))
    for here in track(parts, "ntk_laplace: joint removals", len(parts), progress):
        start, members = here.start, torch.cat(groups["both"][here]).unique()
        if len(members) == 0:
            members = torch.zeros(1, dtype=torch.long, device=found.f.device)
        removal = GroupRemoval(posterior.fitted, members)
        few, signs = rows.subset(here), asked.sign[here]
        share = removal.contributions(few, found.output[here]) * signs.to(found.f)[:, None]
        place = {int(j): slot for slot, j in enumerate(members)}
        left = {name: removal.effects(few, group[here]) for name, group in groups.items()}
        for i, record in enumerate(records[here]):
            output = int(found.output[start + i])
            record["total"] = rounded(found.total[start + i, output] * signs[i], asked.spreads.output(output))
            for side, own in asked.sides[start + i].items():
                record[side] = [[j, rounded(effect), rounded(share[i, place[j]])] for j, effect in own]
            for name, (change, leverage, trusted) in left.items():
                record["without"][name] = _without(posterior, found.f[start + i] + change[i], signs[i],
                                                          asked.spreads)
                if not trusted[i]:
                    record["without"][name]["held"] = rounded(float(leverage[i]))
    return records, [*found.guarantees, _joint(posterior)]


def _reranked(
    posterior: Posterior, x: Inputs, points: list[dict[str, Any]], candidates: int, output: int | None,
    spreads: _Spreads,
) -> tuple[str, ...]:
    """Add the effects of the candidates and of the groups on the network itself to each input's record."""
    members = [tuple(j for side in of for j, *_ in point[side]) for point in points for of in _GROUPS.values()]
    groups = [group for group in dict.fromkeys(members) if 0 < len(group) < posterior.num_examples]
    place = {group: slot for slot, group in enumerate(groups)}
    found = posterior.rerank(x, candidates, output, groups=groups)
    turned = (posterior.outputs(x)[:, 0] < 0) & (_kind(posterior) == "binary")  # at the page's weights
    sign = torch.where(turned, -1.0, 1.0).to(found.f)
    linear, moving = found.linear * sign.unsqueeze(1), found.moving * sign.unsqueeze(1)
    flags = torch.stack([found.disagrees, ~found.comes_back, ~found.converged], 2).tolist()
    own = iter(members)
    for i, point in enumerate(points):
        columns = found.indices[i].tolist(), rounded(linear[i]), rounded(moving[i]), found.places[i].tolist()
        point["reranked"] = [[*row, *marks] for *row, marks in zip(*columns, flags[i], strict=True)]
        for name in _GROUPS:
            slot = place.get(next(own))
            if slot is not None:
                said = _without(posterior, found.group_outputs[i, slot], sign[i], spreads)
                point["without"][name]["moving"] = said | {"away": not bool(found.group_comes_back[slot]),
                                                           "unfinished": not bool(found.group_converged[slot])}
    return found.guarantees


@dataclass(frozen=True)
class _Asked:
    """Effects of training points on each prediction, signed for the predicted class: a negative logit means class 0."""

    found: Explanation | Ranking
    sign: Tensor  # (n,), -1 where a binary logit is negative: the effects are then those on the negative logit
    sides: list[dict[str, list[tuple[int, float]]]]  # by input and side, pairs (point, effect), the strongest first
    spreads: _Spreads

    @classmethod
    def of(cls, posterior: Posterior, found: Explanation | Ranking) -> _Asked:
        """From an explanation by "output"."""
        turned = (found.f[:, 0] < 0) & (_kind(posterior) == "binary")
        sign = torch.where(turned, -1.0, 1.0).to(found.f)
        sides = []
        for i, turn in enumerate(sign.tolist()):
            own = {}
            for side in _OTHER_SIDE:
                entries = found.entries(i, side if turn > 0 else _OTHER_SIDE[side])
                effects = [(entry.training_index, turn * entry.removal_effect) for entry in entries]
                own[side] = [(j, e) for j, e in effects if (e < 0 if side == "for" else e > 0)]
            sides.append(own)
        return cls(found, sign, sides, _Spreads.of(posterior))

    def groups(self) -> dict[str, list[Tensor]]:
        """Training points that are removed together, for each input."""
        device = self.found.f.device
        return {name: [torch.tensor([j for side in of for j, _ in own[side]], dtype=torch.long, device=device)
                       for own in self.sides] for name, of in _GROUPS.items()}

    def records(self, posterior: Posterior, x: Inputs) -> list[dict[str, Any]]:
        """The part of each input's record that all structures support."""
        found, kind = self.found, _kind(posterior)
        glm, plain = posterior.predict(x, "glm"), posterior.predict(x, "map")
        records = []
        for i, sign in enumerate(self.sign.tolist()):
            output = int(found.output[i])
            records.append({
                "output": output if kind != "binary" else int(found.f[i, 0] >= 0),
                "f": rounded_each(found.f[i] * sign, self.spreads.outputs),
                "offset": rounded(found.offset[i, output] * sign, self.spreads.output(output)),
                "gap": rounded(found.gap[i, output] * sign), "prediction": _said(posterior, glm, i, self.spreads),
                "network": _said(posterior, plain, i, self.spreads), "without": {},
            })
        return records


def _said(posterior: Posterior, prediction: Any, i: int, spreads: _Spreads) -> dict[str, Any]:
    """Class probabilities, or mean and standard deviations."""
    kind = _kind(posterior)
    if kind != "values":
        return _answer(kind, prediction.probs[i], spreads)
    said = _answer(kind, prediction.mean[i], spreads)
    said["deviation"] = rounded(prediction.variance[i].sqrt().reshape(-1))
    for name in ("epistemic", "aleatoric"):
        part = getattr(prediction, name, None)
        if part is not None:
            said[name] = rounded(part[i].sqrt().reshape(-1))
    return said


def _without(posterior: Posterior, f: Tensor, sign: Tensor, spreads: _Spreads) -> dict[str, Any]:
    """The network's prediction at changed outputs f."""
    with torch.no_grad():
        mean = posterior.likelihood.for_new_points().mean(f[None])[0]
    return {"f": rounded_each(f * sign, spreads.outputs)} | _answer(_kind(posterior), mean, spreads)


def _answer(kind: str, mean: Tensor, spreads: _Spreads) -> dict[str, Any]:
    """Probabilities of all classes, or the mean of each output, from the mean response to one input."""
    mean = mean.reshape(-1)
    if kind == "values":
        return {"mean": rounded_each(mean, spreads.responses)}
    return {"probabilities": rounded(mean if kind == "classes" else torch.cat([1 - mean, mean]))}


# --- training points


def _training_set(posterior: Posterior, left_out: LeaveOneOut, spreads: _Spreads) -> dict[str, list[Any]]:
    """Columns of the table."""
    binary = _kind(posterior) == "binary"
    without = (left_out.mean[:, 0] >= 0).long() if binary else (
        left_out.mean.argmax(1) if _kind(posterior) == "classes" else left_out.mean.squeeze(-1)
    )
    targets, observed = posterior.targets, posterior.likelihood.observed(posterior.targets)
    shown = [rounded_each(target, spreads.responses)
             for target in (targets.squeeze(-1) if targets.ndim == 2 and targets.shape[1] == 1 else targets)]
    if observed is not None and observed.ndim == 1:  # missing labels and missing numbers are null
        shown = [target if known else None for target, known in zip(shown, observed.tolist(), strict=True)]
    return {
        "target": shown,
        "without": [rounded_each(mean, spreads.responses) for mean in without],
        "logDensity": rounded(left_out.log_density),
        "leverage": rounded(left_out.leverage),
        "selfInfluence": rounded(left_out.self_influence),
        "information": rounded(left_out.information),
    }


def _pictures(x: Inputs, training: Inputs | None, shown: list[int], naming: Naming) -> dict[str, Any] | None:
    if not isinstance(x, Tensor):
        return None
    inputs = images_of(x, naming.shape)
    if inputs is None:
        return None
    found: dict[str, Any] = {"points": sheet(inputs), "training": None}
    if isinstance(training, Tensor):
        some = list(range(len(training))) if len(training) <= _ALL_PICTURES else shown
        images = images_of(training[some], naming.shape)
        found["training"] = None if images is None else sheet(images) | {"indices": some}
    return found


def _rows(x: Inputs, training: Inputs | None, shown: list[int], naming: Naming, count: int) -> dict[str, Any] | None:
    """Values of the inputs and of `count` training points, if they are no images: numbers, or what stands for them."""
    if not isinstance(x, Tensor) or x.ndim != 2 or naming.shape is not None:
        return None
    own, known = (x, training) if naming.values is None else _tables(naming.values, len(x), count)
    names = _feature_names(naming, own.shape[1])
    if len(names) > MOST_FEATURES:
        return None
    points, few = own.tolist(), {}
    if isinstance(known, (Tensor, np.ndarray)):
        few = {str(j): known[j].tolist() for j in shown}
    spreads = [spread_of(column) for column in zip(*points, *few.values(), strict=True)]
    return {"features": _texts(names), "spreads": spreads, "points": [rounded_each(row, spreads) for row in points],
            "training": {j: rounded_each(row, spreads) for j, row in few.items()} if few else None}


def _feature_names(naming: Naming, count: int) -> Sequence[str]:
    unnamed = [f"x{i}" for i in range(count)] if naming.values is None else getattr(naming.values[0], "columns", [])
    names = unnamed if naming.features is None else naming.features
    if len(names) != count:
        raise DataError(f"{count} names of features", f"{len(names)}", "Name each column of the inputs once.")
    return names


def _tables(values: Any, *counts: int) -> list[NDArray[Any]]:
    """Both tables as arrays of numbers and texts, (n, features); None where a value is missing."""
    if not isinstance(values, (tuple, list)) or len(values) != len(counts):
        raise DataError("a pair of tables as values", f"a {type(values).__name__}",
                        "Pass Naming(values=(frame, training_frame)).")
    found = [np.asarray(rows, dtype=object) for rows in values]
    width = found[0].shape[1] if found[0].ndim == 2 else 1
    for table, count in zip(found, counts, strict=True):
        if table.shape != (count, width):
            raise DataError(f"values of shape ({count}, {width})", f"{table.shape}",
                            "Pass a row for each input, and a column for each of the features.")
    return [np.vectorize(_word, [object])(table) for table in found]


def _word(value: Any) -> Any:
    """A number or text; None where pandas says so."""
    return value if isinstance(value, (int, float, str)) else None if str(value) in _MISSING else str(value)
