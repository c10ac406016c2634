"""Regression with a network as a Gaussian process, as a scikit-learn estimator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, overload

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from ntk_laplace.errors import (
    DataError,
    UnsupportedError,
    is_whole,
    require_choice,
    require_whole,
)
from ntk_laplace.model.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture, checked_levels
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.panels import panels
from ntk_laplace.tools.estimators.base import LaplaceEstimator, training_data
from ntk_laplace.tools.estimators.networks import Shifted, is_module
from ntk_laplace.tools.estimators.noise import HETEROSCEDASTIC, LOG_NORMAL, NEGATIVE_BINOMIAL, Candidate, chosen_noise
from ntk_laplace.tools.estimators.predictions import ROWS, Predictions
from ntk_laplace.tools.estimators.tables import (
    Array,
    Standardized,
    StandardizedLogs,
    require_exposures,
    require_number_targets,
)
from ntk_laplace.tools.estimators.training import Design
from ntk_laplace.tools.estimators.units import Explained, in_units
from ntk_laplace.training import EvidenceSchedule

COUNTS: dict[str, type[NegativeBinomial | Poisson]] = {NEGATIVE_BINOMIAL: NegativeBinomial, "poisson": Poisson}
LIKELIHOODS = ("auto", "gaussian", "student-t", HETEROSCEDASTIC, LOG_NORMAL, *COUNTS)
_LEAST_RATE = 1e-3  # of the counts of a target, at the start
_EVALUATIONS = 15  # evaluations of the evidence in a training
_STEPS = 20, 0.1  # steps of the hyperparameters at each evaluation, and their size
# where each target has its noise, and of a dispersion, a step takes two passes over the data; on six tables as good, in
# 0.4 of the time
_STEPS_OF_SEVERAL = 5, 0.4


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRegressor(MultiOutputMixin, RegressorMixin, LaplaceEstimator):
    """A network trained with its evidence, and the Gaussian process that it is, as a scikit-learn regressor.

    Prior precisions and noise are learned with the weights ([I21] Algorithm 1); no validation data are needed. The
    predictive distribution is fitted to closed-form leave-one-out densities.

    Parameters
    ----------
    network : "mlp", callable, nn.Module or skorch net
        "mlp": a multilayer perceptron. A callable gets (features, outputs) and returns a module. A module is copied, as
        is the module of a skorch net; the caller's stays as it is.
    hidden_layer_sizes : sequence of int or "auto"
        Units of the hidden layers of "mlp". "auto": two of 32; in a classification with at most 5,000 examples one.
    linear_part : bool or "auto"
        Whether the first layer of "mlp" has a unit more for each output, which skips the other layers. "auto": where
        each of more than 64 features has a precision of its own. In a regression on 16 features or more, of fewer than
        ten examples for each, both are trained, and the evidence chooses, with these precisions integrated out.
    piecewise_features : bool or "auto"
        Whether "mlp" gets eight features too for each feature of more than two values, linear between its quantiles
        (`PiecewiseLinearFeatures`), for functions with jumps and corners, and for skewed features. With
        ``groups="input"`` those of a feature share a precision. "auto": where each of at most 40 features has a
        precision of its own, and there are at most 3,000 examples, a perceptron with them is trained too, and
        leave-one-out chooses; with ``predictive=None`` or ``structure="full"`` it is not.
    smooth_clipping : bool or "auto"
        Whether "mlp" gets features bounded (`SmoothClipping`) where one has extreme values, so that it is no linear
        function of them far from the others. "auto": under the conditions of `piecewise_features` a perceptron with the
        clipping is trained too, and taken if leave-one-out loses at most 0.01 nats a point. All features of more than
        two values have it where predictions are exponentials, of counts, "log-normal", and noise that depends on the
        inputs: a linear function of a value far from the data would be any number.
    activation : {"tanh", "relu", "gelu", "silu", "identity"}
        Of "mlp".
    precision : float, sequence of float, or "auto"
        Prior precision at the start. Of several, each after the first is tried where residuals of similar inputs are
        alike, and leave-one-out chooses (`train_from_starts`). "auto": 1 and 0.01, of classes 1. Where residuals are
        still alike then, clearly so and among at most 10,000 examples, the network is trained for three times as many
        epochs from 1e-4, and then from 1e-6.
    groups : {"auto", "input", "layer", "all", "tensor"} or mapping
        Which weights share a prior precision, as in `GaussianPrior`. "auto": those of each input ("input"), if the
        network is "mlp" with at most 1,024 features and the structure supports it, else those of each layer. The
        spread of those of each input is 3; in a classification, and with a linear part, 1.
    likelihood : {"auto", "gaussian", "student-t", "heteroscedastic-gaussian", "log-normal", "negative-binomial",
        "poisson"}
        "student-t": noise with heavy tails, for targets with outliers (`StudentT`), whose degrees of freedom are
        learned too. "heteroscedastic-gaussian": noise that depends on the inputs; the network has two outputs for each
        target, the mean and the log variance of its noise. The predictive is no normal distribution with either: see
        `predict_quantiles`. "log-normal": the logarithms of positive targets, such as prices, are standardized, and
        have normal noise. "negative-binomial": targets are counts, with the mean ``μ = exp(f)``, and the variance
        ``μ + α μ²`` whose α is learned too (`NegativeBinomial`); "poisson": with the variance μ. Targets are not
        standardized then, and "mlp" starts at the logarithm of their mean. "auto": "gaussian", and others in a
        training of their own, among which the evidence chooses (`likelihood_`): "negative-binomial" where targets are
        whole numbers from 0 with a mean of at most 50, and vary as much as counts of one mean do, and where residuals
        have heavy tails "log-normal", if targets are positive, and rounded to multiples of at most a tenth of the
        smallest; if neither is better, or residuals still have heavy tails, the other two. A network of yours is not
        trained with two outputs for a target, nor with a logarithm.
    exposure : int, str or None
        Column of X, by its number or name, that counts are expected in proportion to, such as a time of observation:
        its logarithm is added to each output of the network, which does not get it as a feature. `predict` is for the
        exposures of its X. The likelihood is one of counts, of "auto" "negative-binomial".
    noise : float or array_like, (targets,)
        Noise variance at the start, in squared units of the targets (standardized ones by default); of "student-t" σ².
        Each of several targets has its own noise. "heteroscedastic-gaussian" and counts have none.
    structure, curvature
        Of the evidence during the training, as in `train_with_evidence`; with `prefit` or without a predictive also of
        the posterior: "kfac" is an approximation.
    predictive : "loo", "folds" or None
        "loo": train to an optimum, and fit the predictive to leave-one-out densities; the fit is used if it is
        trusted (`predictive_fit_`). "folds": fit it to five folds, each left out of a whole training of its own, with
        its own precisions and noise (`Posterior.cross_calibrate`). None: the posterior at the best evidence. Where
        there is no exact posterior, because data and network are too large, or it is not trusted, "loo" keeps a tenth
        of more than 1,000 examples, at most 5,000, from a training, and fits the predictive of `structure` to them
        (`held_out_index_`): at the weights of the best evidence, or at the optimum, whichever is better. So it does
        with 300 examples where there is no exact posterior, or where the network has learned its targets by heart
        (`Reliability.learned_targets`). Before that, if the evidence is below that of one prediction for all inputs,
        "loo" and "folds" train once more with the evidence computed three times as often, and leave-one-out chooses.
    fourier_features : int
        Pairs of a sine and a cosine of a feature, at most, that become inputs of the network too (`FourierFeatures`),
        where left-out residuals have a wave along this feature that is beyond chance, as long as leave-one-out gains by
        it. 0: none. A module keeps its inputs, and so does the network of a callable that makes none of other numbers
        of features.
    epochs : int or "auto"
        Of each training. "auto": 300, of classes 100, or so many that there are 20,000 steps, but not fewer than 10.
    learning_rate, batch_size
        Of the training with Adam, whose learning rate falls to 0 as a cosine; in a classification with at most 5,000
        examples it is constant.
    standardize : bool or "auto"
        Whether inputs and targets are standardized by the training data. "auto": if the estimator makes the network.
    prefit : bool
        The network is trained already: fit hyperparameters and posterior at its weights.
    verbose : bool
        Show progress.
    random_state : int, RandomState or None
        Of the initial weights and the minibatches. torch's global generator is not changed.

    Attributes
    ----------
    posterior_ : Posterior
        Of the network of standardized inputs and targets.
    network_ : nn.Module
        The trained network.
    history_ : EvidenceHistory or None
        Of the training.
    predictive_fit_ : PredictiveFit or None
        Of the predictive, with reasons if it is not trusted; its log densities are of targets in their own units.
    training_index_ : ndarray
        Row in the data of `fit` of each training point of the posterior. Equal examples are one training point, whose
        weight is the sum of theirs: leave-one-out predicts none from its copy.
    training_point_ : ndarray
        Training point of each row in the data of `fit`, -1 where its weight is 0 or it was kept from the training.
    held_out_index_ : ndarray
        Rows that were kept from the training; empty where the predictive is fitted to the training's own.
    y_train_ : ndarray
        Targets of these training points, in their own units.
    relevance_ : ndarray, (features,)
        Prior standard deviation of the first layer's weights of each feature, for ``groups="input"``.
    piecewise_features_ : list of int
        Features that the network gets in pieces too.
    clipped_features_ : list of int
        Features that the network gets clipped.
    linear_part_ : bool
        Whether the network is an "mlp" with a linear part.
    fourier_features_ : list of (int, float)
        Feature and period, in its units, of each sine and cosine that the network has in addition.
    likelihood_ : {"gaussian", "student-t", "heteroscedastic-gaussian", "log-normal", "negative-binomial", "poisson"}
        The noise that was chosen.
    noise_ : float or ndarray, (targets,)
        Noise variance in squared units of the targets; where it depends on the inputs, the mean over the training data.
    log_marginal_likelihood_value_ : float
        Evidence of the training data in their own units, in nats.
    theta_ : ndarray
        Logarithms of prior precisions and noise; of "student-t" also of ν - 2.1, of "negative-binomial" of α.
    n_features_in_, feature_names_in_, n_iter_

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> import ntk_laplace as ntkl
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = ntkl.LaplaceRegressor(epochs=20, random_state=0).fit(X[:300], y[:300])
    >>> mean, std = model.predict(X[300:], return_std=True)
    >>> mean.shape, std.shape
    ((142,), (142,))
    """

    activation: str = "silu"
    likelihood: str = "auto"
    exposure: Any = None
    noise: Any = 1.0
    learning_rate: float = 0.03
    batch_size: int | None = 512

    _most_epochs: ClassVar[int] = 300
    _spread = 3.0  # with 1, irrelevant inputs stay in the function
    _precisions: ClassVar[tuple[float, ...]] = (1.0, 0.01)
    _either = True

    def _training_options(self, examples: int, times: int) -> dict[str, Any]:
        """More evaluations of the evidence: precisions and noise must arrive before the epochs end."""
        one = len(self._targets.scale) == 1 and self._likelihood not in COUNTS
        steps, rate = _STEPS if one else _STEPS_OF_SEVERAL
        options = super()._training_options(examples, times)
        frequency = max(1, options["epochs"] // _EVALUATIONS)
        return options | {"schedule": EvidenceSchedule(frequency, steps=steps, learning_rate=rate)}

    def _learns_much(self, examples: int) -> bool:
        return True  # numbers tell more than classes

    @property
    def _exponential(self) -> bool:
        return self._likelihood in (LOG_NORMAL, HETEROSCEDASTIC, *COUNTS)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceRegressor:
        """Train the network, its prior precisions and its noise.

        Parameters
        ----------
        X : array_like, (n, features)
        y : array_like, (n,) or (n, targets)
        sample_weight : array_like, (n,), optional
            A point of weight w counts as w points do.

        Returns
        -------
        LaplaceRegressor
            Itself.
        """
        require_number_targets(y)
        x, y, weight = self._read(X, y, sample_weight, multi_output=True, y_numeric=True)
        self._single = y.ndim == 1
        y = y.reshape(len(y), -1).astype(np.float64)
        exposure = self._exposure_column
        if exposure is not None:
            require_exposures(x[:, exposure], f"column {self.exposure!r} of X")
        self._mean_exposure = 1.0 if exposure is None else float(np.average(x[:, exposure], weights=weight))
        run = partial(self._candidate, x, y, weight)
        if self.likelihood != "auto":
            found = run(self.likelihood)
        elif exposure is not None:
            found = run(NEGATIVE_BINOMIAL)
        else:
            found = chosen_noise(run, y, weight, is_module(self.network))
        self._set_likelihood(found.likelihood, y, weight)
        self._keep(found.trained)
        return self

    def _candidate(
        self, x: Array, y: Array, weight: Array | None, name: str, like: Design | None = None
    ) -> Candidate:
        """A training under a likelihood."""
        self._set_likelihood(name, y, weight)
        likelihood, targets = self._named_likelihood(name, y.shape[1]), to_tensor(self._targets(y))
        return Candidate(name, self._train(x, targets, y.shape[1], likelihood, weight, like), self._targets)

    def _set_likelihood(self, name: str, y: Array, weight: Array | None) -> None:
        """The likelihood that the targets are standardized for, and networks are made for."""
        self._likelihood = name
        names = ["y"] if self._single else [f"column {index} of y" for index in range(y.shape[1])]
        kind = StandardizedLogs if name == LOG_NORMAL else Standardized
        self._targets = kind.of(y, weight, self._standardized and name not in COUNTS, names)
        if name in COUNTS:
            self._log_rate = np.log(np.maximum(np.average(y, 0, weight), _LEAST_RATE) / self._mean_exposure)

    def _made(self, network: nn.Module) -> nn.Module:
        """With the mean count at the start, so that the prior is about what differs from it."""
        if self._likelihood not in COUNTS or is_module(self.network):
            return network
        return nn.Sequential(network, Shifted(to_tensor(self._log_rate).to(next(network.parameters()))))

    def _named_likelihood(self, name: str, targets: int) -> Likelihood:
        """The likelihood of a name, with a noise for each of several targets."""
        given = Gaussian(self.noise)  # which checks it
        if name in COUNTS:
            return COUNTS[name]()
        if name == HETEROSCEDASTIC:
            return HeteroscedasticGaussian()
        if name == "student-t":
            noise = StudentT(self.noise).noise.detach()
            return StudentT(noise.expand(targets) if targets > 1 and noise.dim() == 0 else noise)
        several = targets > 1 and given.kind == "scalar"
        return Gaussian(given.noise.detach().expand(targets), "output") if several else given

    def network_targets(self, y: Any) -> Tensor:
        """Targets as `posterior_` takes them, (n, targets): standardized if the estimator does that."""
        check_is_fitted(self)
        values, count = np.asarray(y, dtype=np.float64), len(self._targets.scale)
        if values.ndim == 0 or not len(values) or values.size != len(values) * count:
            raise DataError("y of shape (n,)" if self._single else f"y of shape (n, {count})", f"shape {values.shape}",
                            "Pass the targets that the estimator was fitted to, one row for each input.")
        return to_tensor(self._targets(values.reshape(len(values), -1)))

    @property
    def likelihood_(self) -> str:
        """The likelihood that was given or chosen: one of those that `likelihood` may name."""
        check_is_fitted(self, "posterior_")
        return self._likelihood

    @property
    def noise_(self) -> float | Array:
        """Noise variance in squared units of the targets; where it depends on the inputs, the mean over the data."""
        check_is_fitted(self, "posterior_")
        found = self._predictions.noise(training_data(self.posterior_)[0], self.posterior_.fitted.points.counts)
        return float(found[0]) if self._single else found

    @property
    def _predictions(self) -> Predictions:
        return Predictions.of(self.posterior_, self._targets)

    @overload
    def predict(
        self, X: Any, return_std: Literal[False] = ..., return_cov: Literal[False] = ...
    ) -> Array: ...

    @overload
    def predict(
        self, X: Any, return_std: Literal[True], return_cov: bool = ...
    ) -> tuple[Array, Array]: ...

    @overload
    def predict(
        self, X: Any, return_std: bool = ..., *, return_cov: Literal[True]
    ) -> tuple[Array, Array]: ...

    @overload
    def predict(
        self, X: Any, return_std: bool = ..., return_cov: bool = ...
    ) -> Array | tuple[Array, Array]: ...

    def predict(
        self, X: Any, return_std: bool = False, return_cov: bool = False
    ) -> Array | tuple[Array, Array]:
        """Predictive mean of the targets, with their standard deviation or covariance, noise included.

        Of counts and of "log-normal" they are of first order: the mean μ given the network's outputs f, and the
        variance ``(dμ/df)² var f`` with that of the noise. The mean of `predict_distribution` is averaged over the
        posterior, and grows with the exponential of var f, so that it may be huge far from the training data. So does
        the deviation of noise that depends on the inputs; its quantiles do not.

        Parameters
        ----------
        X : array_like, (n, features)
        return_std : bool
            Also return standard deviations, of the shape of the mean.
        return_cov : bool
            Also return covariances between the inputs, (n, n), or (n, n, targets).

        Returns
        -------
        ndarray, (n,) or (n, targets), or a pair
        """
        if return_std and return_cov:
            raise UnsupportedError("return_std or return_cov", "both", "Take the diagonal of the covariance.")
        x, found = self.network_inputs(X), self._predictions
        if return_cov:
            mean, covariance = found.covariance(x)
            return self._shaped(mean), covariance[..., 0] if self._single else covariance
        if not return_std:
            return self._shaped(found.mean(x))
        mean, deviation = found.moments(x)
        return self._shaped(mean), self._shaped(deviation)

    def predict_distribution(self, X: Any, method: str = "glm") -> NumberMixture:
        """Distribution of the target of each input by itself, noise included, in the units of the targets.

        A distribution of torch with batch shape (n,) or (n, targets), in float64 on the CPU: it has `log_prob`, `cdf`,
        `icdf`, `mean`, `stddev` and `sample`. It is normal, or a mixture of some hundred normals, which it keeps
        (`NormalMixture`); of counts such a mixture of Poisson or negative binomial distributions (`CountMixture`).

        Parameters
        ----------
        X : array_like, (n, features)
        method : {"glm", "map"}
            "map" is the network alone, with the noise of the calibration.

        Returns
        -------
        Distribution
        """
        require_choice(method, ("glm", "map"), 'method "glm" or "map"')
        return self._distribution(self.network_inputs(X), method)

    def predict_quantiles(self, X: Any, quantiles: Any = (0.025, 0.5, 0.975)) -> Array:
        """Quantiles of the predictive distribution of the targets, noise included.

        Parameters
        ----------
        X : array_like, (n, features)
        quantiles : float or sequence of float
            Probabilities strictly between 0 and 1. By default the median, and the ends of an interval of 95 %.

        Returns
        -------
        ndarray, (n, quantiles) or (n, targets, quantiles)
        """
        levels, x = checked_levels(quantiles), self.network_inputs(X)
        parts = []
        for rows in panels(len(x), 1, ROWS):
            each = self._distribution(x[rows])
            parts.append(torch.stack([each.icdf(level) for level in levels], -1))
        return torch.cat(parts).numpy()

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Draws of targets from the joint predictive distribution over the inputs.

        Parameters
        ----------
        X : array_like, (n, features)
        n_samples : int
        random_state : int, RandomState or None

        Returns
        -------
        ndarray, (n, n_samples) or (n, targets, n_samples)
        """
        count = require_whole("n_samples", n_samples, 1, "Leave it out for 1.")
        draws = self._predictions.draws(self.network_inputs(X), count, check_random_state(random_state))
        return draws[:, 0] if self._single else draws

    def _distribution(self, x: Tensor, method: str = "glm") -> NumberMixture:
        """`predict_distribution` at the network's inputs."""
        found = self._predictions.distribution(x, method)
        return found[:, 0] if self._single else found

    def _require_parameters(self) -> None:
        super()._require_parameters()
        require_choice(self.likelihood, LIKELIHOODS, f"likelihood among {', '.join(LIKELIHOODS)}")
        if self.exposure is not None and self.likelihood not in ("auto", *COUNTS):
            raise UnsupportedError(f'likelihood "auto" or one of counts ({", ".join(COUNTS)}), for an exposure',
                                   repr(self.likelihood), "Divide the targets by it, or leave it out.")

    @property
    def _exposure_column(self) -> int | None:
        """Number of the column of X that is an exposure."""
        given = self.exposure
        if given is None:
            return None
        if isinstance(given, str):
            names = list(getattr(self, "feature_names_in_", ()))
            if given in names:
                return names.index(given)
            raise DataError(f"a column {given!r} of X, for exposure={given!r}",
                            ", ".join(names)[:80] or "an array, without names", "Pass the name or number of one.")
        if is_whole(given, 0) and given < self.n_features_in_:
            return int(given)
        raise DataError(f"exposure from 0 to {self.n_features_in_ - 1}, or the name of a column of X",
                        repr(given)[:80], "Pass the name or number of one.")

    def _in_units(self, found: Explained) -> Explained:
        return in_units(found, *self.output_units)

    @property
    def output_units(self) -> tuple[Array, Array]:
        """Scale and mean of the network's outputs in units of the targets, (C,) each."""
        scale, mean = self._targets.scale, self._targets.mean
        if self.likelihood_ != HETEROSCEDASTIC:
            return scale, mean
        return np.r_[scale, np.ones(len(scale))], np.r_[mean, 2.0 * np.log(scale)]  # log variances are shifted

    def _shaped(self, values: Array) -> Array:
        return values[:, 0] if self._single else values

    @property
    def _log_jacobian(self) -> float:
        counts = self.posterior_.fitted.points.counts.double().cpu().numpy()
        return self._targets.log_jacobian(self.y_train_.reshape(len(counts), -1), counts)

