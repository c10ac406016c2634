"""What BoTorch calls of a model whose transformed outcomes are Gaussian: transforms, batches, conditioning, draws."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DenseLinearOperator
from torch import Size, Tensor

from ntk_laplace.errors import DataError, UnsupportedError, is_flag, require_whole
from ntk_laplace.tools.botorch.observations import concatenated


def require_transforms(input_transform: object, outcome_transform: object) -> None:
    """Refuse what is no transform of BoTorch (UnsupportedError)."""
    for name, given, kind in (("input_transform", input_transform, InputTransform),
                              ("outcome_transform", outcome_transform, OutcomeTransform)):
        if not (given is None or isinstance(given, kind)):
            raise UnsupportedError(f"{name} as a botorch {kind.__name__}, or None", f"a {type(given).__name__}",
                                   "Pass for instance Normalize(d) for inputs, Standardize(m) for outcomes.")


class GaussianModel(Model, FantasizeMixin):
    """A model in units of the outcomes, from a Gaussian in those of the transforms, which are fitted already.

    A subclass has the moments of that Gaussian, its draws and what observations make of it. Numbers of q points and m
    outputs are (..., q m), interleaved. Training targets are transformed, (n,) or (m, n); training inputs are not, (n,
    d).
    """

    _original_train_inputs: Tensor | None  # BoTorch's, in eval mode

    def __init__(
        self, train_targets: Tensor, train_X: Tensor | None, input_transform: InputTransform | None,
        outcome_transform: OutcomeTransform | None,
    ) -> None:
        super().__init__()
        require_transforms(input_transform, outcome_transform)
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.train_targets = train_targets
        if train_X is not None:
            if train_X.shape[:-1] != train_targets.shape[-1:]:
                raise DataError(f"train_X of the {train_targets.shape[-1]} training points, (n, d)",
                                f"shape {tuple(train_X.shape)}", "Pass the inputs of the fit.")
            self.train_inputs = (train_X,)

    # --- what a subclass has

    @abstractmethod
    def moments(self, inputs: Tensor, noise: bool | Tensor = False) -> tuple[Tensor, Tensor]:
        """Mean (..., q m) and covariance (..., q m, q m) of transformed outcomes at transformed inputs (..., q, d).

        The noise that is added is that of the likelihood, or given variances (..., q, m).
        """

    @abstractmethod
    def path(self, shape: Size, generator: torch.Generator | None) -> Callable[[Tensor], Tensor]:
        """Draws as a function of transformed inputs (..., q, d), whose batch dimensions end with those of the draws."""

    @abstractmethod
    def _observe(self, inputs: Tensor, targets: Tensor, noise: Tensor | None) -> None:
        """Condition this copy on transformed observations."""

    @abstractmethod
    def _keep(self, outputs: list[int]) -> None:
        """Make this copy the marginal of some of its outputs."""

    # --- the model's form

    def subset_output(self, idcs: list[int]) -> GaussianModel:
        """The model of some of the outputs; what was observed of the others still counts.

        Raises
        ------
        UnsupportedError
            If one is not an output.
        """
        found, new = self._chosen(idcs), self._copied()
        new._keep(found)
        if hasattr(self, "outcome_transform"):
            new.outcome_transform = self.outcome_transform.subset_output(found)
        targets = self.train_targets if self.num_outputs > 1 else self.train_targets.unsqueeze(-2)
        targets = targets[..., found, :]
        new.train_targets = targets if len(found) > 1 else targets.squeeze(-2)
        return new

    def set_train_data(self, inputs: Any = None, targets: Any = None, strict: bool = True) -> None:
        """Replace `train_inputs` and `train_targets`, as BoTorch does in `train` and `eval`; nothing is fitted."""
        if inputs is not None:
            self.train_inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        if targets is not None:
            self.train_targets = targets

    # --- the posterior

    def posterior(
        self, X: Tensor, output_indices: list[int] | None = None, observation_noise: bool | Tensor | None = False,
        posterior_transform: Any = None,
    ) -> GPyTorchPosterior:
        """Joint posterior over q points and m outputs, for each batch.

        Parameters
        ----------
        X : Tensor, (..., q, d)
            Its batch dimensions are broadcast with `batch_shape`. May require gradients.
        output_indices : list of int, optional
        observation_noise : bool or Tensor
            Add the noise: that of the likelihood (of noise per point its mean), or given variances (..., q, m) of
            transformed outcomes.
        posterior_transform : PosteriorTransform, optional

        Returns
        -------
        GPyTorchPosterior
            Or what the transforms make of it.
        """
        if output_indices is not None:
            chosen = self._chosen(output_indices)
            if chosen != list(range(self.num_outputs)):
                return self.subset_output(chosen).posterior(X, None, observation_noise, posterior_transform)
        if observation_noise is None or is_flag(observation_noise):
            observation_noise = bool(observation_noise)
        else:
            _require_variances("observation_noise", observation_noise, X.shape[-2], self.num_outputs)
        self.eval()
        inputs = self._transformed(X)
        self._require_batches(X=inputs)
        mean, covariance = self.moments(inputs, observation_noise)
        batch, m = torch.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2]), self.num_outputs
        operator = DenseLinearOperator(covariance.to(X.dtype).expand(*batch, -1, -1))
        mean = mean.to(X.dtype).expand(*batch, -1)
        if m == 1:
            found = GPyTorchPosterior(MultivariateNormal(mean, operator))
        else:
            shaped = mean.unflatten(-1, (-1, m))
            found = GPyTorchPosterior(MultitaskMultivariateNormal(shaped, operator, interleaved=True))
        if hasattr(self, "outcome_transform"):
            found = self.outcome_transform.untransform_posterior(found, X=inputs)
        return found if posterior_transform is None else posterior_transform(posterior=found, X=X)

    def __call__(self, X: Tensor) -> MultivariateNormal:
        """The Gaussian of `posterior(X)`, which qLowerBoundMaxValueEntropy takes of the model itself."""
        return self.posterior(X).distribution

    def forward(self, X: Tensor) -> MultivariateNormal:
        """Refused: in BoTorch it is the prior, of which `efficient_loo_cv` leaves out one point after the other."""
        raise UnsupportedError("the posterior of a trained network", "forward, the prior",
                               "Use model.posterior(X); model.laplace.leave_one_out() of a LaplaceModel leaves out "
                               "each point.")

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> GaussianModel:
        """The model given more observations, at the same weights and hyperparameters: `Posterior.add`, in batches.

        Parameters
        ----------
        X : Tensor, (..., n, d)
        Y : Tensor, (..., n, m)
            May have more batch dimensions than X, as fantasies have.
        noise : Tensor, (..., n, m), optional
            Variances of the observations, of transformed outcomes; by default those of the likelihood, and of noise per
            point its mean.

        Returns
        -------
        GaussianModel
            With `batch_shape` that of the observations.

        Raises
        ------
        DataError
            If X and Y do not fit each other.
        UnsupportedError
            If there are other arguments, such as the `evaluation_mask` of `fantasize`.
        """
        if kwargs:
            raise UnsupportedError("observations of all outputs, X and Y, and noise", ", ".join(kwargs),
                                   "Leave it out; a ModelList of one model for each output takes an evaluation_mask.")
        fits = X.ndim >= 2 and Y.ndim >= 2 and Y.shape[-2:] == (X.shape[-2], self.num_outputs)
        if not fits:
            raise DataError(f"X of shape (..., n, d) and Y of shape (..., n, {self.num_outputs})",
                            f"shapes {tuple(X.shape)} and {tuple(Y.shape)}", "Pass one row of Y for each row of X.")
        for name, values in (("X", X), ("Y", Y)):
            if not values.isfinite().all():
                raise DataError(f"finite {name}", "NaN or infinity", "Leave that observation out.")
        if noise is not None:
            _require_variances("noise", noise, X.shape[-2], self.num_outputs)
        self._require_batches(X=X, Y=Y, **({} if noise is None else {"noise": noise}))
        self.eval()
        inputs, targets = self._transformed(X), Y
        if hasattr(self, "outcome_transform"):
            targets, _ = self.outcome_transform(Y, X=inputs)
        new = self._copied()
        new._observe(inputs, targets, noise)
        new._remember(X, targets)
        return new

    def thompson_path(
        self, count: int | None = None, generator: torch.Generator | None = None
    ) -> GenericDeterministicModel:
        """Draws of functions from the posterior: f + J(x)δ with δ ~ N(0, H⁻¹), as a deterministic model.

        Parameters
        ----------
        count : int, optional
            Number of draws S, a batch dimension: X (..., S, q, d), or (..., 1, q, d), has values (..., S, q, m). By
            default one draw without it: X (..., q, d) has values (..., q, m).
        generator : Generator, optional
            By default the global state.

        Returns
        -------
        GenericDeterministicModel
            In units of the outcomes, differentiable in X.
        """
        shape = Size() if count is None else Size([require_whole("count", count, 1, "Leave it out for one draw.")])
        return GenericDeterministicModel(self.drawn(shape, generator), self.num_outputs, shape + self.batch_shape)

    def drawn(self, shape: Size, generator: torch.Generator | None = None) -> Callable[[Tensor], Tensor]:
        """Draws from the posterior as one function, of X whose batch dimensions end with `shape` and `batch_shape`."""
        draws = self.path(shape, generator)

        def path(X: Tensor) -> Tensor:
            inputs = self._transformed(X)
            values = draws(inputs).unflatten(-1, (-1, self.num_outputs)).to(X.dtype)
            return self.outcome_transform.untransform(values, X=inputs)[0] if hasattr(self, "outcome_transform") else (
                values)

        return path

    # --- inside

    def _set_transformed_inputs(self) -> None:
        """BoTorch warns of missing training inputs in `eval`; here nothing is computed from them."""
        if hasattr(self, "train_inputs"):
            super()._set_transformed_inputs()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> GaussianModel:
        """Move the training data too, as models of GPyTorch do."""
        super()._apply(fn, *args, **kwargs)
        self.train_targets = fn(self.train_targets)
        if hasattr(self, "train_inputs"):
            self.train_inputs = (fn(self.train_inputs[0]),)
            if self._original_train_inputs is not None:
                self._original_train_inputs = fn(self._original_train_inputs)
        return self

    def _transformed(self, X: Tensor) -> Tensor:
        if not isinstance(X, Tensor):
            raise DataError("X as a tensor (..., q, d)", f"a {type(X).__name__}", "Convert it with torch.as_tensor.")
        if X.ndim < 2:
            raise DataError("X as a tensor (..., q, d)", f"shape {tuple(X.shape)}",
                            "Pass X.unsqueeze(-2) for separate points.")
        return self.transform_inputs(X)

    def _require_batches(self, **given: Tensor) -> None:
        """Refuse batches that do not broadcast with each other and with those of the model (DataError)."""
        shapes = {name: tuple(values.shape[:-2]) for name, values in given.items()}
        try:
            torch.broadcast_shapes(self.batch_shape, *shapes.values())
        except RuntimeError as cause:
            got = ", ".join(f"{shape} of {name}" for name, shape in shapes.items())
            raise DataError(f"batch dimensions that broadcast with those of the model, {tuple(self.batch_shape)}", got,
                            "Add dimensions of size 1, with unsqueeze.") from cause

    def _chosen(self, indices: Sequence[int]) -> list[int]:
        m = self.num_outputs
        known = isinstance(indices, Sequence) and len(indices) and all(
            isinstance(index, Integral) and -m <= index < m for index in indices)
        if not known:
            raise UnsupportedError(f"outputs among 0 to {m - 1}", repr(indices), "Choose among them.")
        return [int(index) % m for index in indices]

    def _remember(self, X: Tensor, targets: Tensor) -> None:
        """Append to `train_inputs` and `train_targets`."""
        targets = targets.to(self.train_targets)
        own, axes = (targets.squeeze(-1), 1) if self.num_outputs == 1 else (targets.mT, 2)
        self.train_targets = concatenated(self.train_targets, own, axes)
        if not hasattr(self, "train_inputs"):
            return
        if self._has_transformed_inputs and self._original_train_inputs is not None:
            given = self._original_train_inputs
            self._original_train_inputs = concatenated(given, X.to(given), 2, -2)
            X = self.transform_inputs(X)
        known = self.train_inputs[0]
        self.train_inputs = (concatenated(known, X.to(known), 2, -2),)

    def _copied(self) -> GaussianModel:
        """A shallow copy: it shares the posterior and the modules, and has tables of its own."""
        new = copy.copy(self)
        tables = {name: dict(vars(self)[name]) for name in ("_modules", "_parameters", "_buffers")}
        new.__dict__.update(tables)
        return new


def _require_variances(name: str, given: object, q: int, m: int) -> None:
    """Refuse what is no variance of each of q points and m outputs (DataError)."""
    if not isinstance(given, Tensor):
        raise DataError(f"{name} as a tensor of variances (..., {q}, {m})", repr(given)[:80],
                        "Pass a variance for each value.")
    if given.ndim < 2 or given.shape[-2] not in (1, q) or given.shape[-1] not in (1, m):
        raise DataError(f"{name} of shape (..., {q}, {m})", f"{tuple(given.shape)}", "Pass a variance for each value.")
    if not bool((given >= 0).all()) or not given.isfinite().all():
        raise DataError(f"{name} of variances, at least 0", f"{float(given.min()):g}", "Pass variances.")
