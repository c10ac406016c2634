"""What both estimators share: the network, its training, and standardized data."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from ntk_laplace.errors import (
    DataError,
    HyperparameterError,
    UnsupportedError,
    is_choice,
    is_flag,
    is_number,
    is_whole,
    require_choice,
    require_flags,
    require_number,
    require_whole,
    warn,
)
from ntk_laplace.model.likelihoods import HeteroscedasticGaussian, Likelihood
from ntk_laplace.model.network import FourierFeatures, PiecewiseLinearFeatures, SmoothClipping
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.posterior.explain import Explanation, Ranking, SourceEffects, source_labels
from ntk_laplace.posterior.fit import laplace, spec_of
from ntk_laplace.posterior.lack_of_fit import LackOfFit
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.structures import Auto, Settings, StructureSpec
from ntk_laplace.tools.estimators.hyperparameters import evidence_at, theta_of
from ntk_laplace.tools.estimators.networks import Exposed, is_module, layer_sizes, network_of, with_outputs
from ntk_laplace.tools.estimators.tables import Array, Standardized, WithExposure, merged_rows, require_numbers
from ntk_laplace.tools.estimators.training import Design, Designs, Form, Starts, Trained, Waves, taken, trained
from ntk_laplace.tools.estimators.units import Explained
from ntk_laplace.training import EvidenceHistory
from ntk_laplace.training.train import adam

_PIECES_SCALE = 3.0  # of piecewise linear features
_NORMALIZED = 2.0, 10  # weights that add up to less, of so many examples or more, are rather shares of one whole
_LONGER = 1e-4, 1e-6  # prior precisions of trainings for more epochs, under precision="auto"


class _Fitted(BaseEstimator):
    """What a fit leaves: no fields of the dataclass, whose tools read each field, also before a fit."""

    posterior_: Posterior
    network_: nn.Module
    history_: EvidenceHistory | None
    predictive_fit_: PredictiveFit | None
    training_index_: NDArray[np.intp]
    training_point_: NDArray[np.intp]
    held_out_index_: NDArray[np.intp]
    y_train_: NDArray[Any]
    n_iter_: int
    linear_part_: bool
    n_features_in_: int
    _constant: NDArray[np.bool_] | bool = False  # which features are; False in fits of earlier versions
    _waves: Waves = ()  # of the network's Fourier features
    _in_pieces: Sequence[int] = ()  # features that the network has piecewise linear features of
    _clipped: Sequence[int] = ()  # features that it has clipped


@dataclass(eq=False, repr=False)
class LaplaceEstimator(_Fitted):
    """Base class: parameters are those of `LaplaceRegressor` and `LaplaceClassifier`."""

    network: Any = "mlp"
    _: KW_ONLY
    hidden_layer_sizes: Any = "auto"
    linear_part: bool | str = "auto"
    piecewise_features: bool | str = "auto"
    smooth_clipping: bool | str = "auto"
    activation: str = "tanh"
    precision: Any = "auto"
    groups: Any = "auto"
    structure: Any = "kfac"
    curvature: Any = "ggn"
    predictive: str | None = "loo"
    fourier_features: int = 4
    epochs: int | str = "auto"
    learning_rate: float = 0.02
    batch_size: int | None = 128
    standardize: bool | str = "auto"
    prefit: bool = False
    verbose: bool = False
    random_state: Any = None

    _most_epochs: ClassVar[int] = 100  # of "auto"
    _spread = 1.0  # of the prior, for groups="input"
    _precisions: ClassVar[tuple[float, ...]] = (1.0,)  # at the start, of "auto"
    _either = False  # whether perceptrons with and without a linear part are tried

    # --- training

    def _train(
        self, x: Array, y: Tensor, responses: int, likelihood: Likelihood, weight: Array | None,
        like: Design | None = None,
    ) -> Trained:
        """Train a network, or take the given one; one of this design, or without its pieces if that would be tried."""
        self._inputs = self._inputs_of(x, weight)
        table = x[:, self._inputs.columns]
        self._constant = np.ptp(table, axis=0) <= 4 * np.finfo(x.dtype).eps * np.abs(table).max(0)  # up to rounding
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        features, groups, starts = table.shape[1], self._prior_groups(table.shape[1]), self._starts
        by_input = isinstance(groups, str) and groups == "input"
        designs = self._designs(len(x), features, by_input)
        given = 1.0 if starts.first is not None or self._automatic else self.precision

        def prior(design: Design, waves: Waves = ()) -> GaussianPrior:
            spread = self._spread if by_input and not design.linear else 1.0
            shared = None
            if design.pieces and by_input:
                shared = pieces.input_groups(features)
                shared += range(1 + max(shared), 1 + max(shared) + 2 * len(waves))
            return GaussianPrior(given, groups=groups, spread=spread, input_groups=shared)

        with _own_generators():
            units = to_tensor(self._inputs.mean), to_tensor(self._inputs.scale)  # to standardize before would round
            pieces, clipping = PiecewiseLinearFeatures([]), SmoothClipping([])
            if designs.first.pieces or "pieces" in designs.tried:  # of many columns they take memory
                pieces = PiecewiseLinearFeatures.of(to_tensor(table), tuning.PIECES, _PIECES_SCALE).standardized(*units)
            if designs.first.clipping or "clipping" in designs.tried:
                clipping = SmoothClipping.of(to_tensor(table), always=self._exponential).standardized(*units)
            if like is not None:
                like = replace(like, clipping=like.clipping or designs.first.clipping)
                designs = Designs.like(like, designs.tried)
            none = {name for name, part in (("pieces", pieces), ("clipping", clipping)) if not len(part.inputs)}
            designs = Designs(replace(designs.first, **dict.fromkeys(none, False)),
                              [part for part in designs.tried if part not in none])

            def new(design: Design, waves: Waves = ()) -> nn.Module:
                torch.manual_seed(seed)
                inputs = features + 2 * len(waves) + design.pieces * len(pieces.inputs)
                outputs = responses * _outputs_of_each(likelihood)
                made = network_of(self.network, inputs, outputs, self._layers(len(x)), self.activation,
                                  design.linear)
                before: list[nn.Module] = [copy.deepcopy(pieces)] if design.pieces else []
                if waves:
                    with torch.device("cpu"):
                        before.append(FourierFeatures(waves))
                if design.clipping:  # of the inputs themselves, which come first
                    before.append(copy.deepcopy(clipping))
                if before:
                    place = next(made.parameters()).device  # which need not be torch's default one
                    made = nn.Sequential(*(one.to(place) for one in before), made)
                exposed, seen = isinstance(self._inputs, WithExposure), self._tensor(x, made)
                if exposed:
                    seen = seen[:, :-1]
                made = with_outputs(made, seen, outputs, responses, likelihood.classifies)
                return self._made(Exposed(made) if exposed else made)

            data: tuple[Tensor, ...] = self._tensor(x, new(designs.first)), y
            if weight is not None:
                data = *data, to_tensor(weight, dtype=torch.float64)
            return self._run(Form(features, self._described, new, prior), designs, data, likelihood, starts, seed)

    def _inputs_of(self, x: Array, weight: Array | None) -> Standardized:
        """How the network gets the inputs."""
        names = [f"column {name!r} of X" for name in getattr(self, "feature_names_in_", range(x.shape[1]))]
        exposure = self._exposure_column
        if exposure is None:
            return Standardized.of(x, weight, self._standardized, names)
        others = [column for column in range(x.shape[1]) if column != exposure]
        if not others:
            raise DataError("columns of inputs in X beside the exposure", names[exposure], "Pass one more at least.")
        found = Standardized.of(x[:, others], weight, self._standardized, [names[column] for column in others])
        return WithExposure(found.mean, found.scale, exposure, names[exposure])

    @property
    def _exposure_column(self) -> int | None:
        """Number of the column of X that is an exposure."""
        return None

    def _keep(self, found: Trained) -> None:
        """The result of the fit."""
        if found.by_folds is not None:
            with _own_generators():
                found = replace(found, predictive=found.by_folds())
        self.history_ = found.history
        if found.history is not None:
            self.n_iter_ = len(found.history.loss)
        self._keep_apart(found.held_out)
        if found.predictive is not None and not found.predictive.trusted:
            found.posterior.predictive = None
        self.posterior_, self.network_, self._waves = found.posterior, found.module, found.waves
        self.linear_part_ = found.design.linear
        self._in_pieces = _taken_by(PiecewiseLinearFeatures, found.module) if found.design.pieces else []
        self._clipped = _taken_by(SmoothClipping, found.module) if found.design.clipping else []
        total = self.posterior_.fitted.total
        self.predictive_fit_ = found.predictive and found.predictive.shifted(self._log_jacobian / total)
        evidence = self.posterior_.log_marginal_likelihood()
        self.log_marginal_likelihood_value_ = float(evidence.detach()) + self._log_jacobian
        self._theta = self.theta_  # of that value

    def _described(self, lack: LackOfFit) -> str:
        """What a network misses, with the name of a column, and the period in its units."""
        names = getattr(self, "feature_names_in_", range(self.n_features_in_))
        if lack.input is None:
            return f"{lack}"
        if isinstance(self._inputs, WithExposure) and lack.input == len(self._inputs.scale):  # after the features
            return lack.described(f"the logarithm of column {names[self._inputs.exposure]!r}")
        period = lack.period and lack.period * float(self._inputs.scale[lack.input])
        return replace(lack, period=period).described(f"column {names[self._columns([lack.input])[0]]!r}")

    def _made(self, network: nn.Module) -> nn.Module:
        """A new network, as it is trained."""
        return network

    def _run(
        self, form: Form, designs: Designs, data: tuple[Tensor, ...], likelihood: Likelihood, starts: Starts, seed: int
    ) -> Trained:
        """Take the network, or train one."""
        options_of, first = partial(self._training_options, len(data[1])), (designs.first, ())
        if self.prefit:
            return taken(form.new(*first), data, likelihood, form.prior(*first), self.predictive, options_of(1))
        most = 0 if is_module(self.network) else self.fourier_features
        return trained(form, designs, data, likelihood, starts, self.predictive, seed, most, options_of)

    def _designs(self, examples: int, features: int, by_input: bool) -> Designs:
        """What the network has beside its layers."""
        perceptron = isinstance(self.network, str)
        deep = perceptron and bool(layer_sizes(self._layers(examples)))
        linear, pieces, clipping = (None if is_choice(part, ("auto",)) else bool(part) for part in
                                    (self.linear_part, self.piecewise_features, self.smooth_clipping))
        if clipping is None and self._exponential:
            clipping = True
        usual = Design(deep and (by_input and features > tuning.INPUTS_WITHOUT_LINEAR if linear is None else linear),
                       perceptron and bool(pieces), perceptron and bool(clipping))
        given = self.precision
        of_groups = isinstance(given, Mapping) or (isinstance(given, Tensor) and given.numel() > 1)  # of one design
        if of_groups or not (deep and by_input):
            return Designs(usual)
        few = examples < tuning.EXAMPLES_OF_EACH_INPUT * features and features >= tuning.INPUTS_EITHER_WAY
        tried = ["linear"] if self._either and few and linear is None else []
        small = features <= tuning.INPUTS_IN_PIECES and examples <= tuning.EXAMPLES_IN_PIECES
        small = small and not _of_all_weights(spec_of(self.structure))  # which pieces make nine times as many
        if small and self.predictive is not None:  # which chooses
            tried += [part for part, given in (("clipping", clipping), ("pieces", pieces)) if given is None]
        return Designs(usual, tried)

    @property
    def _exponential(self) -> bool:
        """Whether targets, or their noise, are exponentials of outputs, which must not be linear far from the data."""
        return False

    def _training_options(self, examples: int, times: int) -> dict[str, Any]:
        """Of `train_with_evidence`, for `times` as many epochs."""
        epochs = self.epochs
        if isinstance(epochs, str):
            size = self.batch_size if is_whole(self.batch_size, 1) else examples
            batches = math.ceil(examples / size)
            epochs = min(self._most_epochs, max(tuning.FEWEST_EPOCHS, math.ceil(tuning.TRAINING_STEPS / batches)))
        epochs *= times
        options = {"structure": self.structure, "curvature": self.curvature, "epochs": epochs,
                   "optimizer": partial(adam, rate=self.learning_rate), "batch_size": self.batch_size,
                   "settings": Settings(progress=bool(self.verbose))}
        if self._learns_much(examples):
            options["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        return options

    def _layers(self, examples: int) -> Any:
        """`hidden_layer_sizes`; of "auto" what so many examples can teach."""
        if is_choice(self.hidden_layer_sizes, ("auto",)):
            return (32, 32) if self._learns_much(examples) else (32,)
        return self.hidden_layer_sizes

    def _learns_much(self, examples: int) -> bool:
        """Whether the perceptron has two layers, and the learning rate falls to 0."""
        return examples > tuning.EXAMPLES_OF_ONE_LAYER

    def _keep_apart(self, held: NDArray[np.intp]) -> None:
        """Take these training points out of the attributes that number them."""
        kept = np.setdiff1d(np.arange(len(self.training_index_)), held)
        place = np.full(len(self.training_index_) + 1, -1)
        place[kept] = np.arange(len(kept))
        self.training_point_ = place[self.training_point_]  # -1 is last
        self.held_out_index_ = self.training_index_[held]
        self.training_index_, self.y_train_ = self.training_index_[kept], self.y_train_[kept]

    @property
    def _automatic(self) -> bool:
        """Whether `precision` is "auto"."""
        return isinstance(self.precision, str) and self.precision == "auto"

    @property
    def _starts(self) -> Starts:
        """Those of `precision`."""
        if self._automatic:
            return Starts(None) if self.prefit else Starts(self._precisions, _LONGER)
        return Starts(_several(self.precision))

    def _prior_groups(self, features: int) -> Any:
        """`groups`; of "auto" those of a perceptron's inputs, if there are not too many, else those of the layers."""
        if not (isinstance(self.groups, str) and self.groups == "auto"):
            return self.groups
        few = isinstance(self.network, str) and features <= tuning.INPUTS_WITH_PRECISIONS
        return "input" if few and _takes_inputs(spec_of(self.structure)) else "layer"

    @property
    def relevance_(self) -> Array:
        """Prior standard deviation of the first layer's weights of each feature, (features,), for ``groups="input"``.

        It is learned: the smaller, the less the network depends on the feature. 0 for a feature that is constant in
        the training data, of which the evidence says nothing. The largest, if the network has other features of it
        too; those of its pieces count three times, as a function of them is as much larger. Of a clipped feature, in
        its clipped units. 0 for an exposure.
        """
        check_is_fitted(self, "posterior_")
        prior = self.posterior_.prior
        if prior.groups != "input":
            raise AttributeError(f"relevance_ needs groups='input'; the prior's groups are {prior.groups!r}")
        found: Array = prior.precision[prior.inputs].detach().rsqrt().cpu().numpy()
        features = [*self._in_pieces, *[feature for feature, _ in self._waves] * 2]
        own, added = np.split(found, [len(found) - len(features)])
        added[: len(self._in_pieces)] *= _PIECES_SCALE
        np.maximum.at(own, features, added)
        relevance = np.zeros(self.n_features_in_)
        relevance[self._inputs.columns] = np.where(self._constant, 0.0, own)
        return relevance

    @property
    def piecewise_features_(self) -> list[int]:
        """Features that the network gets in pieces too."""
        check_is_fitted(self, "posterior_")
        return self._columns(self._in_pieces)

    @property
    def clipped_features_(self) -> list[int]:
        """Features that the network gets clipped."""
        check_is_fitted(self, "posterior_")
        return self._columns(self._clipped)

    @property
    def fourier_features_(self) -> list[tuple[int, float]]:
        """Feature and period, in its units, of each sine and cosine that the network has in addition."""
        check_is_fitted(self, "posterior_")
        return [(column, period * float(self._inputs.scale[feature])) for (feature, period), column
                in zip(self._waves, self._columns([feature for feature, _ in self._waves]), strict=True)]

    def _columns(self, features: Sequence[int]) -> list[int]:
        """Columns of X of the network's features."""
        found: list[int] = self._inputs.columns[list(features)].tolist()
        return found

    @property
    def _standardized(self) -> bool:
        """Whether inputs and targets are standardized."""
        if is_choice(self.standardize, ("auto",)):
            return not is_module(self.network)
        _require_flag_or_auto("standardize", self.standardize)
        return bool(self.standardize)

    def _require_parameters(self) -> None:
        """Refuse what no later check names by the parameter of the estimator."""
        if not is_choice(self.epochs, ("auto",)):
            require_whole("epochs", self.epochs, 1, 'Pass "auto", or epochs=100, for instance.')
        require_whole("fourier_features", self.fourier_features, 0, "Pass 0 for none.")
        require_number("a positive learning_rate", self.learning_rate, "Pass learning_rate=0.02.", above=0)
        several = _several(self.precision)
        each = [self.precision] if several is None else several
        named = self._automatic or isinstance(self.precision, (Mapping, Tensor))  # the prior checks these
        if not each or not (named or all(is_number(one, above=0) for one in each)):
            raise HyperparameterError('a positive precision, several of them, or "auto"', repr(self.precision)[:80],
                                      "Pass precision=1.0 or (1.0, 0.01).")
        added = {"linear_part": "Add it to the network", "piecewise_features": "Add them to the network",
                 "smooth_clipping": "Add it to the network"}
        for name, remedy in added.items():
            value = getattr(self, name)
            _require_flag_or_auto(name, value)
            if not (isinstance(self.network, str) or isinstance(value, str)) and value:
                raise UnsupportedError(f'network="mlp", for {name}=True', repr(self.network)[:80],
                                       f"{remedy}, or leave {name} out.")
        require_flags(prefit=self.prefit)
        require_choice(self.predictive, (None, "loo", "folds"), 'predictive "loo", "folds" or None')
        if self.prefit and self.predictive == "folds":
            raise UnsupportedError('predictive "loo" or None, for prefit=True', "'folds', which trains networks again",
                                   "Leave it out.")
        if not (is_flag(self.verbose) or is_whole(self.verbose, 0)):
            raise UnsupportedError("verbose True or False", repr(self.verbose)[:80], "Choose one of the two.")
        if self.prefit and not is_module(self.network):
            raise UnsupportedError("a trained network, for prefit=True", repr(self.network)[:80],
                                   "Pass the nn.Module, or leave prefit out to train one.")
        if self.prefit and several is not None:
            raise UnsupportedError("one precision, for prefit=True", repr(self.precision),
                                   "Pass the precision that the network was trained with.")

    def _read(self, x: Any, y: Any, sample_weight: Any, **checks: Any) -> tuple[Array, Any, Array | None]:
        """Inputs, targets and weights. Equal examples become one, whose weight is the sum of theirs."""
        self._require_parameters()
        require_numbers(x)
        for name in ("posterior_", "n_iter_"):  # of another fit, whose labels and units are not kept
            self.__dict__.pop(name, None)
        x, y = validate_data(self, x, y, dtype=(np.float64, np.float32), **checks)
        weight: Array = np.ones(len(x))
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        first, total, point = merged_rows(x, y, weight)
        if not len(first):  # scikit-learn says so itself from 1.8 on
            raise DataError("sample weights of which one at least is non-zero", "zeros alone", "Leave them out.")
        if len(first) >= _NORMALIZED[1] and total.sum() < _NORMALIZED[0]:
            warn(f"the sample weights of {np.count_nonzero(weight)} rows add up to {total.sum():.3g}, and a row of "
                 "weight w counts as w rows, so that the data say next to nothing; if they are shares of one whole, "
                 "divide them by their mean")
        self.training_index_, self.training_point_, self._row_weight = first, point, weight
        self.held_out_index_ = np.zeros(0, dtype=np.intp)
        self.y_train_ = y[self.training_index_]
        return x[self.training_index_], self.y_train_, None if (total == 1.0).all() else total

    def __sklearn_is_fitted__(self) -> bool:
        """Whether a fit was done: one that failed leaves no posterior."""
        return hasattr(self, "posterior_")

    # --- prediction

    def network_inputs(self, X: Any) -> Tensor:
        """Inputs as `network_` and `posterior_` take them, checked, and standardized if the estimator does that.

        Parameters
        ----------
        X : array_like, (n, features)

        Returns
        -------
        Tensor, (n, features)
            In the network's dtype and on its device.
        """
        check_is_fitted(self)
        require_numbers(X)
        x = validate_data(self, X, reset=False, dtype=(np.float64, np.float32))
        return self._tensor(x, self.network_)

    def _tensor(self, x: Array, module: nn.Module) -> Tensor:
        like = next(module.parameters(), torch.zeros((), dtype=torch.float64, device="cpu"))
        return to_tensor(self._inputs(x)).to(like)

    def original_inputs(self, inputs: Tensor) -> Array:
        """The inverse of `network_inputs`: X (N, d) in the units of the data."""
        check_is_fitted(self)
        return self._inputs.undone(inputs.detach().cpu().double().numpy())

    def explain(self, X: Any, k: int = 8, y: Any = None, **options: Any) -> Explanation | Ranking:
        """Which training points determine the predictions at X: `Posterior.explain`, in units of the targets.

        Contributions are those at the optimum of the linearized network, if the posterior is exact
        (``decomposition="auto"``).

        Parameters
        ----------
        X : array_like, (n, features)
        k : int
            Training points to show for and against.
        y : array_like, optional
            Targets at X, for ``by="log_likelihood"``.
        **options
            Of `Posterior.explain`.

        Returns
        -------
        Explanation or Ranking
            Training point i is row ``training_index_[i]`` of the data of `fit`. Its `quantity` has the likelihood and
            the targets as `posterior_` takes them.
        """
        x, targets = self.network_inputs(X), None if y is None else self.network_targets(y)
        return self._in_units(self.posterior_.explain(x, k, y=targets, **{"decomposition": "auto"} | options))

    def _in_units(self, found: Explained) -> Explained:
        """An explanation in units of the targets."""
        return found

    def source_effects(self, X: Any, sources: Any, y: Any = None, **options: Any) -> SourceEffects:
        """What changes at X without each source of the data of `fit`: `Posterior.source_effects`, in their units.

        Equal rows are one training point, and may have several sources. Here they are one for each source, which does
        not change the posterior.

        Parameters
        ----------
        X : array_like, (n, features)
        sources : sequence or array
            One label for each row of the data of `fit`.
        y : array_like, optional
            Targets at X.
        **options
            Of `Posterior.source_effects`.

        Returns
        -------
        SourceEffects

        Raises
        ------
        DataError
            As `Posterior.source_effects`, if the labels are not one for each row.
        """
        x, targets = self.network_inputs(X), None if y is None else self.network_targets(y)
        points, weight = self.training_point_, self._row_weight
        labels = source_labels(sources, len(points), "rows of the data of fit")
        pairs: dict[tuple[int, Any], float] = {}  # of a training point and a source, with their weight, by point
        for row in np.argsort(points, kind="stable"):
            if points[row] >= 0:
                pair = int(points[row]), labels[row]
                pairs[pair] = pairs.get(pair, 0.0) + weight[row]
        if len(pairs) == self.posterior_.num_examples:
            posterior = self.posterior_
        else:
            chosen, counts = [point for point, _ in pairs], list(pairs.values())
            posterior = self._of_points(to_tensor(chosen), to_tensor(counts))
        found = posterior.source_effects(x, [label for _, label in pairs], y=targets, **options)
        return self._in_units(found)

    def _of_points(self, points: Tensor, weight: Tensor) -> Posterior:
        """The posterior whose training points are these, some of them several times, with other weights."""
        own = self.posterior_
        x, y, *_ = training_data(own)
        data = x[points], y[points], weight
        spec = own.fitted.structure.spec  # more points may make the other exact structure the smaller one
        return laplace(own.network.module, data, own.likelihood, own.prior, "auto" if spec.exact else spec,
                       own.curvature_type, dtype=own.dtype, settings=own.fitted.settings)

    # --- evidence

    @property
    def theta_(self) -> Array:
        """Logarithms of the hyperparameters: prior precisions of each group, then those of the likelihood."""
        check_is_fitted(self)
        return theta_of(self.posterior_)

    @overload
    def log_marginal_likelihood(self, theta: Any = ..., eval_gradient: Literal[False] = ...) -> float: ...

    @overload
    def log_marginal_likelihood(self, theta: Any = ..., *, eval_gradient: Literal[True]) -> tuple[float, Array]: ...

    @overload
    def log_marginal_likelihood(self, theta: Any, eval_gradient: Literal[True]) -> tuple[float, Array]: ...

    @overload
    def log_marginal_likelihood(
        self, theta: Any = ..., eval_gradient: bool = ...
    ) -> float | tuple[float, Array]: ...

    def log_marginal_likelihood(
        self, theta: Any = None, eval_gradient: bool = False
    ) -> float | tuple[float, Array]:
        """Laplace-GGN evidence of the training data, in nats, of targets in their own units.

        Parameters
        ----------
        theta : array_like, optional
            Hyperparameters as in `theta_`; by default those of the fit. The network's weights stay as they are.
        eval_gradient : bool
            Return the gradient in theta too.

        Returns
        -------
        float, or (float, ndarray)
        """
        check_is_fitted(self, "posterior_")
        if theta is None and not eval_gradient and np.array_equal(self.theta_, self._theta):
            return self.log_marginal_likelihood_value_
        value, gradient = evidence_at(self.posterior_, theta, eval_gradient)
        total = value + self._log_jacobian
        return total if gradient is None else (total, gradient)

    @property
    def _log_jacobian(self) -> float:
        """log density of targets in their own units less that of standardized ones, summed over the data."""
        return 0.0


@contextmanager
def _own_generators() -> Iterator[None]:
    """Outside of inference mode; torch's generators are as they were afterwards."""
    with torch.inference_mode(False), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


def training_data(posterior: Posterior) -> tuple[Tensor, ...]:
    """Inputs and targets of the points that a posterior keeps, and weights if they have some (DataError if none)."""
    source = posterior.fitted.structure.source
    if source is None:
        raise DataError("an estimator with its training data", "none", "Fit it again.")
    x, y = (torch.cat([to_tensor(part) for part in parts]) for parts in zip(*source, strict=True))
    return x, y, *(() if source.weights is None else (source.weights,))


def _taken_by(kind: type[PiecewiseLinearFeatures | SmoothClipping], module: nn.Module) -> list[int]:
    """Features that the first part of this kind of a module takes, each once."""
    part = next(part for part in module.modules() if isinstance(part, kind))
    return list(dict.fromkeys(part.inputs.tolist()))


def _outputs_of_each(likelihood: Likelihood) -> int:
    """Outputs of a network for each class or target."""
    return 2 if isinstance(likelihood, HeteroscedasticGaussian) else 1


def _require_flag_or_auto(name: str, value: object) -> None:
    if not (is_choice(value, ("auto",)) or is_flag(value)):
        raise UnsupportedError(f'{name} True, False or "auto"', repr(value)[:80], "Choose one of them.")


def _several(precision: Any) -> list[Any] | None:
    """The precisions to start from; None if it is one."""
    found = precision.tolist() if isinstance(precision, np.ndarray) else precision
    return list(found) if isinstance(found, Sequence) and not isinstance(found, str) else None


def _of_all_weights(spec: StructureSpec | Auto) -> bool:
    """Whether each evaluation of the evidence takes a matrix of all weights."""
    return isinstance(spec, StructureSpec) and spec.exact and not spec.keeps_jacobian


def _takes_inputs(spec: StructureSpec | Auto) -> bool:
    """Whether a structure supports one precision for each input."""
    try:
        if isinstance(spec, StructureSpec):
            spec.check(GaussianPrior(groups="input"))
    except HyperparameterError:
        return False
    return True
