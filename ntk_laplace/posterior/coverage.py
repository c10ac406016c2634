"""Interval and set methods of a posterior: what is covered at a level, from left-out or held-out points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, require_choice, require_flags, warn
from ntk_laplace.model.data import InputData
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior.calibration import CalibrationVerbs
from ntk_laplace.posterior.conformal import (
    INTERVAL_SCORES,
    SET_SCORES,
    PredictionIntervals,
    PredictionSets,
    WithoutEach,
    checked_level,
    class_probabilities,
    ends,
    hard_labels,
    label_scores,
    members,
    require_classes,
    response_scale,
    too_few,
    words_of,
)
from ntk_laplace.posterior.explain import LeaveOneOut, Reliability, leave_one_out


class CoverageVerbs(CalibrationVerbs):
    """Prediction intervals and sets whose coverage comes from points that the model does not know.

    By default these are the training points, each without itself, by closed-form leave-one-out (jackknife+); with
    ``data=`` they are held-out points (split conformal). Example weights enter the fit alone: every point of positive
    weight has one score; those of weight 0, removed ones too, and missing targets have none.
    """

    def predict_interval(
        self, x: InputData, level: float = 0.9, *, score: str = "normalized", data: Any = None,
        batch_size: int | None = None,
    ) -> PredictionIntervals:
        r"""Prediction interval of each response at `x`.

        With m(x, i) and s(x, i) the mean response at x and its standard deviation, both without training point i, and
        the scores ``R_i = |y_i - m(x_i, i)| / s(x_i, i)``, the interval of level 1 - a is the jackknife+ of
        [Barber et al. 2021]: from the ⌊a(N+1)⌋-th smallest of ``m(x, i) - R_i s(x, i)`` to the ⌈(1-a)(N+1)⌉-th smallest
        of ``m(x, i) + R_i s(x, i)``.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
        level : float
            Nominal coverage 1 - a, between 0 and 1. ``level/(1-level)`` points are needed; with fewer the ends are
            infinite, and a warning is issued.
        score : str
            "normalized": s is the standard deviation of the response (posterior and noise), so that widths follow the
            uncertainty at x. "absolute": s = 1.
        data : DataLoader, Dataset, (X, y), or a mapping, optional
            Held-out data, used for nothing else: split conformal. m ± s q, with q the ⌈(1-a)(M+1)⌉-th smallest score
            of the M held-out points. Available for every structure and likelihood of real responses.
        batch_size : int, optional
            Maximum inputs at a time; by default chosen by memory (an n x N x C tile).

        Returns
        -------
        PredictionIntervals
            `guarantees` repeats the notes below.

        Raises
        ------
        HyperparameterError
            If the level is not between 0 and 1.
        DataError
            If no point has a target, or the training data cannot be read again (structure "full").
        UnsupportedError
            If responses are classes; the score is unknown; noise belongs to single training points and the score is
            "normalized"; or, without `data`, the structure is not "gp", "full" or "iterative", or the curvature is not
            the GGN.

        Notes
        -----
        Theorem (jackknife+): if training and new points are exchangeable, and m(·, i) and s(·, i) come from a fit
        without point i that is symmetric in the others, the coverage is at least 1 - 2a; near 1 - a in practice. Here
        they are one Newton step of the linearized model. The step is the fit without i if the network is linear in its
        weights, the likelihood Gaussian, and the weights are at the optimum (ridge regression); the theorem then holds,
        if prior and noise were chosen without these data. Otherwise no theorem applies: the features that the network
        learned, and the hyperparameters, have seen point i. A warning is issued where leave-one-out is known to be
        unreliable; scores of "normalized" may then cover too little. Split conformal covers at least 1 - a without such
        conditions. Neither uses the calibration of `fit_predictive`.
        """
        level = checked_level(level)
        require_choice(score, INTERVAL_SCORES, f"a score among {', '.join(INTERVAL_SCORES)}")
        if self.likelihood.classifies:
            raise UnsupportedError("a likelihood of real responses for intervals", type(self.likelihood).__name__,
                                   "Use predict_set for one label an example, and predict(x).probs for several.")
        if self.likelihood.positions is not None:
            raise UnsupportedError("a likelihood of one point an example for intervals", type(self.likelihood).__name__,
                                   "Use predict(x), whose mean and variance are those of each position.")
        normalized = score == "normalized"
        noise = self._noise() if normalized else None

        def mean(f: Tensor) -> Tensor:
            return self.likelihood.mean(f.reshape(-1, f.shape[-1])).view(*f.shape[:-1], -1)

        def scale(f: Tensor, variance: Tensor | None) -> Tensor:
            if noise is None or variance is None:
                return torch.ones_like(mean(f))
            flat = f.reshape(-1, f.shape[-1])
            return response_scale(noise, flat, variance.reshape(flat.shape)).view(*f.shape[:-1], -1)

        with torch.no_grad():
            f, variance, targets, counts, found = self._points_without_themselves(data)
            center, there = mean(f), self.likelihood.observed(targets)
            if targets.shape != center.shape:
                raise UnsupportedError(f"one target for each response, {tuple(center.shape)}",
                                       f"targets of shape {tuple(targets.shape)}",
                                       "Let `targets` of the likelihood return one column for each column of `mean`. "
                                       "Targets with a censoring or an exposure beside the response have no such "
                                       "intervals: predict(x) has their distribution.")
            error = (targets.to(f) - center).abs() / scale(f, variance)
            there = torch.ones_like(error, dtype=torch.bool) if there is None else there.view(error.shape)
            kept = there & (counts > 0).unsqueeze(1)
            _require_some(kept)
            parts = []
            for at, left_f, left_variance in self._tiles(x, data, batch_size, len(f), normalized):
                own = scale(left_f, left_variance)
                parts.append((mean(at), *ends(mean(left_f), own, error, kept, level)))
                del at, left_f, left_variance, own
        method, guarantees, trust = _promised(found, level, int(kept.sum(0).min()), "its intervals are the whole line")
        middle, lower, upper = (self._shaped(torch.cat(same)) for same in zip(*parts, strict=True))
        return PredictionIntervals(middle, lower, upper, level, method, score, kept.sum(0), guarantees, trust)

    def predict_set(
        self, x: InputData, level: float = 0.9, *, score: str = "probability", data: Any = None,
        never_empty: bool = False, generator: torch.Generator | None = None, batch_size: int | None = None,
    ) -> PredictionSets:
        r"""Set of labels at each input of `x`.

        With s(x, y, i) the score of label y at x without training point i, the set of level 1 - a has the labels y with
        ``#{i: s(x_i, y_i, i) < s(x, y, i)} < (1-a)(N+1)``: jackknife+ for classes [Romano et al. 2020].

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
        level : float
            Nominal coverage 1 - a, between 0 and 1. ``level/(1-level)`` points are needed; with fewer every set has
            all labels, and a warning is issued.
        score : str
            From the probabilities p at the network's outputs. "probability": 1 - p(y), which gives the smallest sets.
            "cumulative": the sum of the probabilities from the largest to p(y), whose sets are larger, and more so at
            ambiguous inputs. "randomized": the same with p(y) times a uniform random number for each point and each
            input.
        data : DataLoader, Dataset, (X, y), or a mapping, optional
            Held-out data, used for nothing else: split conformal, for every structure.
        never_empty : bool
            Add the most probable label to each set without any; this can only raise the coverage.
        generator : torch.Generator, optional
            For "randomized"; by default the global state.
        batch_size : int, optional
            Maximum inputs at a time; by default chosen by memory (an n x N x C tile).

        Returns
        -------
        PredictionSets
            `mask` (n, C); (n, 2) for a Bernoulli likelihood.

        Raises
        ------
        HyperparameterError
            If the level is not between 0 and 1.
        DataError
            If no point has a label, or the training data cannot be read again (structure "full").
        UnsupportedError
            If responses are not single labels; labels are soft; the score is unknown; or, without `data`, the
            structure is not "gp", "full" or "iterative" or the curvature not the GGN.

        Notes
        -----
        The guarantees are those of `predict_interval`. For classes one Newton step without a point is never exactly a
        fit without it, so the theorem applies to no trained classifier.
        """
        require_flags(never_empty=never_empty)
        level = checked_level(level)
        require_choice(score, SET_SCORES, f"a score among {', '.join(SET_SCORES)}")
        require_classes(self.likelihood, self.num_outputs)
        likelihood = self.likelihood.for_new_points()

        def scores(f: Tensor, u: Tensor) -> Tensor:
            return label_scores(class_probabilities(likelihood, f), score, u)

        def uniform(count: int) -> Tensor:
            """Uniform numbers (count, 1) where the score is randomized."""
            if score != "randomized":
                return self.f.new_empty(count, 1)
            device = self.network.device if generator is None else generator.device
            return torch.rand(count, 1, dtype=self.dtype, device=device, generator=generator).to(self.network.device)

        with torch.no_grad():
            f, _, targets, counts, found = self._points_without_themselves(data)
            labels = hard_labels(likelihood, targets)
            kept = (labels >= 0) & (counts > 0)
            _require_some(kept)
            own = scores(f, uniform(len(f))).gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1)
            parts = []
            for at, left_f, _ in self._tiles(x, data, batch_size, len(f), False):
                left_f = left_f if left_f.shape[1] == 1 else left_f[:, kept]
                u = uniform(len(at)).unsqueeze(1)
                parts.append((members(scores(left_f, u), own[kept], level), class_probabilities(likelihood, at)))
                del at, left_f
        mask, p = (torch.cat(same) for same in zip(*parts, strict=True))
        if never_empty:
            empty = ~mask.any(1)
            mask[empty, p[empty].argmax(1)] = True
        count = int(kept.sum())
        method, guarantees, trust = _promised(found, level, count, "its sets have all labels")
        return PredictionSets(mask, p, level, method, score, count, guarantees, trust)

    # --- inside

    def _points_without_themselves(
        self, data: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, LeaveOneOut | None]:
        """f (M, C), its variances, targets and weights: training points, each without itself, or held-out points."""
        if data is not None:
            held = self._held_out(data, self.likelihood.for_new_points())
            targets = held.targets.unsqueeze(1) if held.scalar else held.targets
            return held.mean, held.covariance.diagonal(dim1=1, dim2=2), targets, held.weights, None
        self._fitted.require_exact(", whose leave-one-out is that of the linearized model",
                                   "Pass data that were used for nothing else, or fit one of the exact structures.",
                                   "held-out data, data=(X, y), or ")
        found = leave_one_out(self._fitted, samples=1)  # its log densities are not used
        variance = found.covariance.diagonal(dim1=1, dim2=2)
        return found.mean, variance, self.targets, self.weights, found

    def _tiles(
        self, x: InputData, data: Any, batch_size: int | None, count: int, variances: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """f (n, C), f (n, m, C) without each of the m points and its variances, chunk by chunk; m = 1 if held out."""
        chunks = self._chunks(x, batch_size)
        if data is None:
            without = WithoutEach(self._fitted, variances)
            yield from without.tiles(chunks.rows(without.bytes_of_each))
            return
        each = (3 * self.num_outputs**2 + 4 * count * self.num_outputs) * self.dtype.itemsize
        for rows in chunks.rows(each):
            found = self.posterior_precision.covariance_blocks(rows) if variances else None
            own = None if found is None else found.diagonal(dim1=1, dim2=2).unsqueeze(1)
            yield rows.f, rows.f.unsqueeze(1), own
            del rows, found, own  # before the next are computed

    def _noise(self) -> Likelihood:
        """The likelihood of new points, which normalized scores need."""
        try:
            return self.likelihood.for_new_points()
        except UnsupportedError as error:
            raise UnsupportedError('score="absolute"', 'score="normalized" under a noise per training point, which a '
                                   "new point does not have", 'Pass score="absolute".') from error

    def _shaped(self, values: Tensor) -> Tensor:
        """(n, D), or (n,) for a network with outputs of shape (N,)."""
        return values.squeeze(1) if self.network.scalar else values


def _promised(
    found: LeaveOneOut | None, level: float, fewest: int, everything: str
) -> tuple[str, tuple[str, ...], Reliability | None]:
    """Method, guarantees and reliability, by leave-one-out or by held-out points; a warning tells what is wrong."""
    if found is not None and not found.trusted:
        warn(f"{found.reliability}; data=(X, y) takes held-out points")
    for words in too_few(level, fewest, everything):
        warn(words)
    method = "split" if found is None else "jackknife+"
    return method, words_of(method, level, fewest, everything), None if found is None else found.reliability


def _require_some(kept: Tensor) -> None:
    if not bool(kept.any(0).all()):
        raise DataError("at least one point with a target and a positive weight, for each response", "none",
                        "Look at how missing targets are marked, and at the example weights.")
