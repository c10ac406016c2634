"""scikit-learn estimators: a network trained with evidence, and its posterior, behind `fit` and `predict`."""

from ntk_laplace.tools.estimators.classifier import LaplaceClassifier
from ntk_laplace.tools.estimators.regressor import LaplaceRegressor

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]
