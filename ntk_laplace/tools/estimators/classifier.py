"""Classification with a network as a Gaussian process, as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.likelihoods import Categorical
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.estimators.base import LaplaceEstimator
from ntk_laplace.tools.estimators.tables import Array


class LaplaceClassifier(ClassifierMixin, LaplaceEstimator):
    """A network trained with its evidence, and the Gaussian process that it is, as a scikit-learn classifier.

    Prior precisions are learned with the weights ([I21] Algorithm 1); no validation data are needed. Class
    probabilities are averaged over the linearized network's posterior, whose predictive is fitted to closed-form
    leave-one-out densities.

    Parameters
    ----------
    network, hidden_layer_sizes, linear_part, piecewise_features, smooth_clipping, activation
        As in `LaplaceRegressor`. The network returns one logit for each class; of two classes also one, that of the
        second.
    precision, groups, structure, curvature, predictive, fourier_features, epochs, learning_rate, batch_size
        As in `LaplaceRegressor`.
    prefit, verbose, random_state
        As in `LaplaceRegressor`.
    standardize : bool or "auto"
        Whether inputs are standardized by the training data. "auto": if the estimator makes the network.

    Attributes
    ----------
    classes_ : ndarray
        Labels, of any type, in the order of the columns of `predict_proba`.
    training_index_, y_train_
        As in `LaplaceRegressor`; the targets are labels.
    posterior_, network_, history_, relevance_, linear_part_, piecewise_features_, clipped_features_,
    fourier_features_, log_marginal_likelihood_value_, theta_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceRegressor`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> import ntk_laplace as ntkl
    >>> X, y = load_iris(return_X_y=True)
    >>> model = ntkl.LaplaceClassifier(epochs=20, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceClassifier:
        """Train the network and its prior precisions.

        Parameters
        ----------
        X : array_like, (n, features)
        y : array_like, (n,)
            Labels, such as integers or strings.
        sample_weight : array_like, (n,), optional
            A point of weight w counts as w points do.

        Returns
        -------
        LaplaceClassifier
            Itself.
        """
        _require_labels(y)
        x, y, weight = self._read(X, y, sample_weight)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError("labels of at least two classes", f"1 class, {self.classes_.tolist()[0]!r}",
                            "Add examples of another class.")
        self._keep(self._train(x, to_tensor(labels), len(self.classes_), Categorical(), weight))
        return self

    def network_targets(self, y: Any) -> Tensor:
        """Numbers of labels in `classes_`, as `posterior_` takes them, (n,)."""
        check_is_fitted(self)
        labels = np.asarray(y)
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise DataError(f"labels among {self.classes_.tolist()}", repr(unknown.tolist()[0]),
                            "Pass labels of the training.")
        return to_tensor(np.searchsorted(self.classes_, labels))

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities, averaged over the posterior, (n, classes)."""
        return self._probabilities(X).numpy()

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of `predict_proba`."""
        return self._probabilities(X).log().numpy()

    def decision_function(self, X: Any) -> Array:
        """Log odds of the second of two classes, (n,); log probabilities of more, (n, classes)."""
        logs = self._probabilities(X).log()
        return (logs[:, 1] - logs[:, 0] if len(self.classes_) == 2 else logs).numpy()

    def predict(self, X: Any) -> Any:
        """The most probable label of each input, (n,)."""
        best = self._probabilities(X).argmax(1).numpy()
        return self.classes_[best]

    def _probabilities(self, X: Any) -> Tensor:
        x = self.network_inputs(X)
        generator = torch.Generator(x.device).manual_seed(0)  # the same points of f in every call
        response = self.posterior_.predict(x, generator=generator)
        probabilities = response.mean.detach().cpu().double()  # of one-hot labels
        return probabilities / probabilities.sum(1, keepdim=True)


def _require_labels(y: Any) -> None:
    """Refuse missing labels, and labels of types that have no order, which sorting would name without a remedy."""
    import pandas

    labels = np.asarray(y, dtype=object)
    if labels.ndim == 0:
        return  # sklearn's own message
    gaps = pandas.isna(labels)
    if gaps.any():
        row = int(np.argwhere(gaps)[0, 0])
        raise DataError("a label for each example", f"{labels[gaps][0]!r} in row {row}",
                        "Drop the rows without a label, or name their class.")
    kinds = sorted({"str" if isinstance(label, str) else type(label).__name__ for label in labels.flat})
    try:
        ordered = len(kinds) < 2 or ("str" not in kinds and sorted(set(labels.flat)) is not None)
    except TypeError:
        ordered = False
    if not ordered:
        raise DataError("labels of one type, such as strings or integers", " and ".join(kinds),
                        "Make all of them strings, or all of them integers.")
