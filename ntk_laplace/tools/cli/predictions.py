"""Predictions of the user's inputs as numbers: three versions of each, intervals or sets, a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace import metrics
from ntk_laplace.errors import untold
from ntk_laplace.model.calibration import CalibratedPredictive
from ntk_laplace.model.likelihoods import Response
from ntk_laplace.model.predictive import joined
from ntk_laplace.posterior.conformal.labels import has_one_label
from ntk_laplace.posterior.conformal.quantiles import fewest_points
from ntk_laplace.tools.cli.scores import NETWORK, as_set, scores_of

POSTERIOR, CALIBRATED = "posterior as it is", "calibrated posterior"
_CHUNK = 512

Versions = Mapping[str, Response]
"""Responses of the same points by name: the network alone, the posterior as it is, the calibrated posterior."""


@dataclass(frozen=True)
class Judged:
    """Versions of predictions at points whose targets are known."""

    versions: Versions
    targets: Tensor  # as the responses take them; missing ones are left out of everything
    labels: bool  # whether a target is one label
    left_out: bool = False  # whether they are training points, each left out

    @classmethod
    def of(cls, posterior: ntkl.Posterior, x: Any, y: Tensor) -> Judged:
        """At inputs that were not trained on."""
        targets = _targets(posterior, y)
        return cls(_versions(posterior, x), targets, has_one_label(posterior.likelihood, posterior.num_outputs))

    @classmethod
    def without_themselves(cls, posterior: ntkl.Posterior, calibration: ntkl.Calibration) -> Judged:
        """At the training points, each predicted from all others by closed-form leave-one-out."""
        with untold():  # the fit's reasons, which are told once
            found = posterior.leave_one_out()
        settings = {NETWORK: ntkl.Calibration(scale=0.0), POSTERIOR: ntkl.Calibration(), CALIBRATED: calibration}
        versions = {}
        for name, setting in settings.items():
            respond = CalibratedPredictive(setting, posterior.likelihood, scalar=posterior.network.scalar)
            pairs = zip(found.mean.split(_CHUNK), found.covariance.split(_CHUNK), strict=True)
            versions[name] = joined([respond(*pair) for pair in pairs])
        labels = has_one_label(posterior.likelihood, posterior.num_outputs)
        return cls(versions, posterior.targets, labels, True)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether a point has each target, (n, targets); one target where none is missing."""
        observed = next(iter(self.versions.values())).likelihood.observed(self.targets)
        if observed is None:
            return np.ones((len(self.targets), 1), bool)
        return _array(observed).reshape(len(observed), -1)

    @property
    def count(self) -> int:
        """Number of points with a target."""
        return int(self.known.any(1).sum())

    def scores(self, level: float) -> dict[str, dict[str, float]]:
        """`scores_of` each version, and the coverage of its own regions of this level."""
        found = {name: scores_of(one, self.targets) for name, one in self.versions.items()}
        for name, (share,) in (self.coverage([level]) or {}).items():
            found[name][f"coverage of {100 * level:g}%"] = share
        return found

    def reliability(self) -> dict[str, metrics.Reliability] | None:
        """Reliability of each version's predicted class; None unless a target is one hard label."""
        if self.hard is None:
            return None
        there, labels = self.hard
        return {name: metrics.reliability(_class_table(one)[there], labels) for name, one in self.versions.items()}

    def coverage(self, levels: Sequence[float]) -> dict[str, NDArray[np.float64]] | None:
        """Coverage of each version's own regions: central intervals, or sets of most probable classes.

        Where a response has no quantiles the interval is the mean ± z standard deviations, as `central` says.

        None for several labels of an example, and for soft ones.
        """
        if self.hard is not None:
            there, labels = self.hard
            return {name: metrics.set_coverage(_class_table(one)[there], labels, levels)
                    for name, one in self.versions.items()}
        if any(hasattr(one, "probs") for one in self.versions.values()):
            return None
        present, shape = ~self.targets.isnan(), self.targets.shape
        targets = self.targets[present]
        if self.central:
            return {name: metrics.central_coverage(one.univariate().reshaped(*shape)[present], targets, levels)
                    for name, one in self.versions.items()}
        return {
            name: metrics.interval_coverage(one.mean.reshape(shape)[present], one.variance.reshape(shape)[present],
                                            targets, levels)
            for name, one in self.versions.items()
        }

    @cached_property
    def central(self) -> bool:
        """Whether responses are numbers with quantiles."""
        try:
            for one in self.versions.values():
                one.univariate()
        except ntkl.UnsupportedError:
            return False
        return True

    @cached_property
    def hard(self) -> tuple[NDArray[np.bool_], NDArray[np.int64]] | None:
        """Which points have a label, and the labels; None if targets are something else."""
        if not self.labels:
            return None
        first, y = next(iter(self.versions.values())), _array(self.targets)
        if y.ndim == 2 and y.shape[1] > 1:
            return None
        present = first.present(self.targets)
        there = np.ones(len(y), bool) if present is None else _array(present).astype(bool)
        y = y.reshape(-1)[there]
        return (there, y.astype(np.int64)) if (y == np.floor(y)).all() else None


@dataclass(frozen=True)
class Predictions:
    """Everything that is told of the inputs."""

    versions: Versions
    regions: ntkl.PredictionIntervals | ntkl.PredictionSets | None  # None for several labels of an input
    names: list[str]  # of the classes, or of the responses
    labels: bool  # whether a target is one label
    level: float  # nominal coverage of the regions
    judged: Judged | None  # the versions beside the inputs' targets, if these are known

    @classmethod
    def of(
        cls, posterior: ntkl.Posterior, x: Any, y: Tensor | None, level: float, held_out: Any,
        names: Sequence[str] | None,
    ) -> Predictions:
        """Predict inputs by a posterior with its `predictive`, and score those with targets.

        Regions are by split conformal with held-out data, by leave-one-out without. DataError if there is not one name
        for each class or response.
        """
        likelihood, outputs = posterior.likelihood, posterior.num_outputs
        labels = has_one_label(likelihood, outputs)
        targets = None if y is None else _targets(posterior, y)
        versions = _versions(posterior, x)
        response = versions[CALIBRATED]
        named = _names(names, (_class_table(response) if labels else _two(response.mean)).shape[1])
        judged = None if targets is None else Judged(versions, targets, labels)
        with untold():  # the fit's reasons, and too few points: both are told below
            regions: Any = None
            if labels:
                regions = posterior.predict_set(x, level, data=held_out, never_empty=True)
            elif not likelihood.classifies:
                regions = posterior.predict_interval(x, level, data=held_out)
        return cls(versions, regions, named, labels, level, judged)

    @property
    def enough(self) -> bool:
        """Whether there are enough points for regions of this level."""
        regions = self.regions
        if regions is None:
            return True
        scored = regions.count if isinstance(regions, ntkl.PredictionSets) else int(regions.counts.min())
        return scored >= fewest_points(self.level)

    @property
    def covered(self) -> NDArray[np.float64]:
        """Whether each known target is in its set or interval, 1 or 0; empty if none is known."""
        columns = [name for name in self.frame if name.startswith("covered")]
        return np.array([one for name in columns for one in self.frame[name].dropna()], dtype=np.float64)

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """One row per input, in the order of the inputs."""
        count = len(_array(self.versions[CALIBRATED].epistemic))
        frame = pandas.DataFrame({"input": range(count)})
        return pandas.concat([frame, self._of_labels() if self.labels else self._of_responses()], axis=1)

    @cached_property
    def uncertainty(self) -> NDArray[np.float64]:
        """One number per input, larger for less certain ones.

        One minus the probability of the predicted class; of several outputs, the mean of their standard deviations,
        each relative to its median.
        """
        if self.labels:
            return 1.0 - self.frame["probability"].to_numpy()
        return _spread(self.versions[CALIBRATED].variance)

    @cached_property
    def unfamiliarity(self) -> NDArray[np.float64]:
        """By the posterior as it is, whose uncertainty grows away from the training data.

        The entropy of its probabilities in nats, for labels; otherwise the mean over the responses of its epistemic
        standard deviation, each relative to its median.
        """
        plain = self.versions[POSTERIOR]
        if self.labels:
            p = _class_table(plain)
            return -(p * np.log(np.maximum(p, np.finfo(float).tiny))).sum(1)
        return _spread(plain.epistemic)

    def _of_labels(self) -> pandas.DataFrame:
        response = self.versions[CALIBRATED]
        p = _class_table(response)
        best, rows = p.argmax(1), np.arange(len(p))
        sd = {name: np.sqrt(_two(getattr(response, name))) for name in ("epistemic", "aleatoric")}
        columns: dict[str, Any] = {"predicted": self._named(best), "probability": p[rows, best]}
        for name, values in sd.items():
            columns[f"{name}_sd"] = values[rows, best if values.shape[1] > 1 else 0]
        columns["unfamiliarity"] = self.unfamiliarity
        assert isinstance(self.regions, ntkl.PredictionSets)
        columns["set"] = [as_set(one) for one in self.regions.labels(self.names)]
        columns["set_size"] = _array(self.regions.size)
        columns |= {f"probability_{name}": p[:, index] for index, name in enumerate(self.names)}
        hard = None if self.judged is None else self.judged.hard
        if hard is not None:
            there, labels = hard
            inside = _array(self.regions.mask)[rows[there], labels]
            for name, known in (("target", self._named(labels)), ("covered", inside)):
                columns[name] = np.full(len(p), None)
                columns[name][there] = known
        return pandas.DataFrame(columns)

    def _of_responses(self) -> pandas.DataFrame:
        response = self.versions[CALIBRATED]
        parts = {
            "mean": _two(response.mean), "sd": np.sqrt(_two(response.variance)),
            "epistemic_sd": np.sqrt(_two(response.epistemic)), "aleatoric_sd": np.sqrt(_two(response.aleatoric)),
        }
        if hasattr(response, "probs"):
            parts = {"probability": parts.pop("mean"), **parts}
        if isinstance(self.regions, ntkl.PredictionIntervals):
            parts |= {"lower": _two(self.regions.lower), "upper": _two(self.regions.upper)}
        if self.judged is not None:
            y = _two(self.judged.targets)
            parts["target"] = y
            if isinstance(self.regions, ntkl.PredictionIntervals):
                inside: NDArray[Any] = (parts["lower"] <= y) & (y <= parts["upper"])
                parts["covered"] = inside.astype(object) if np.isnan(y).any() else inside
                parts["covered"][np.isnan(y)] = None
        single = len(self.names) == 1
        columns = {
            part if single else f"{part}_{name}": values[:, index]
            for index, name in enumerate(self.names) for part, values in parts.items()
        }
        return pandas.DataFrame(columns | {"unfamiliarity": self.unfamiliarity})

    def _named(self, labels: NDArray[np.int64]) -> list[Any]:
        """Labels by name; numbers if they have none."""
        numbers = self.names == [str(number) for number in range(len(self.names))]
        return labels.tolist() if numbers else [self.names[label] for label in labels]


def _versions(posterior: ntkl.Posterior, x: Any) -> Versions:
    return {
        NETWORK: posterior.predict(x, "map"), POSTERIOR: posterior.predict(x, calibrated=False),
        CALIBRATED: posterior.predict(x),
    }


def _targets(posterior: ntkl.Posterior, y: Tensor) -> Tensor:
    """Targets of new points, checked, in the likelihood's form."""
    found = posterior.likelihood.for_new_points().targets(y, len(y), posterior.num_outputs)
    return found.to(posterior.network.device)


def _names(names: Sequence[str] | None, count: int) -> list[str]:
    """Names of classes or responses, by default their numbers."""
    if names is None:
        return [str(number) for number in range(count)]
    if len(names) != count:
        raise ntkl.DataError(f"{count} names of classes or outputs", f"{len(names)}", "Name each once.")
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise ntkl.DataError("different names", f"{twice[0]!r} twice", "Columns of the table are named after them.")
    return list(names)


def _class_table(response: Any) -> NDArray[np.float64]:
    return metrics.class_probabilities(response.probs)


def _two(values: Tensor) -> NDArray[np.float64]:
    """One row per input."""
    array = _array(values).astype(np.float64)
    return array.reshape(len(array), -1)


def _spread(variance: Tensor) -> NDArray[np.float64]:
    """Standard deviations over their medians, averaged over the responses of each input, (n,)."""
    spread = np.sqrt(_two(variance))
    return (spread / np.maximum(np.median(spread, 0), np.finfo(float).tiny)).mean(1)


def _array(values: Tensor) -> NDArray[Any]:
    return values.detach().cpu().numpy()
