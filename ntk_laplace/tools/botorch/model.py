"""The Laplace posterior as a BoTorch model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DenseLinearOperator
from torch import Size, Tensor, nn

from ntk_laplace.errors import DataError, UnsupportedError, require_whole
from ntk_laplace.gp.input_format import InputFormat
from ntk_laplace.gp.likelihood import ResponseLikelihood
from ntk_laplace.model.likelihoods import Gaussian
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.differentiable import DifferentiableModel
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_root
from ntk_laplace.tools.botorch.observations import ROUNDING, Observations
from ntk_laplace.tools.botorch.surrogate import Surrogate

__all__ = ["LaplaceModel"]


class LaplaceModel(Model, FantasizeMixin):
    """A Laplace posterior as a BoTorch model: batches of joint points, with gradients in them.

    It is a view of the posterior, not a second fit. New observations condition the linearized network, exactly and at
    fixed weights; `fit` trains a network to data.

    Parameters
    ----------
    posterior : Posterior
        With a Gaussian likelihood, of transformed inputs and outcomes.
    input_transform, outcome_transform : optional
        BoTorch's transforms. They must have been fitted to the training data already.
    input_shape : tuple of int, optional
        Shape of one input of the network, if it is not a vector: BoTorch's inputs are (..., q, d), and d is the product
        of this shape.
    input_dtype : torch.dtype, optional
        Dtype of the network's inputs, such as torch.long for token ids.
    train_X : Tensor, (n, d), optional
        Training inputs before the input transform; `train_inputs` are these.

    Attributes
    ----------
    laplace : Posterior
        The posterior given the training data, without later observations.
    prior : GaussianPrior
    likelihood : ResponseLikelihood
    train_inputs : tuple of one Tensor, (n, d)
        If `train_X` was given. Transformed in eval mode, as BoTorch has it.
    train_targets : Tensor, (n,) or (m, n)
        Transformed targets.

    Raises
    ------
    UnsupportedError
        If it is no posterior with a Gaussian likelihood, or its structure has no gradients in inputs.

    Notes
    -----
    Covariances are those of `Posterior.latent` with 256 units of rounding of the largest prior variance on the
    diagonal: acquisition functions factorize them. All results have the dtype of X.
    """

    _original_train_inputs: Tensor | None  # BoTorch's, in eval mode

    def __init__(
        self, posterior: Posterior, *, input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None, input_shape: Sequence[int] | None = None,
        input_dtype: torch.dtype | None = None, train_X: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(posterior, Posterior) or not isinstance(posterior.likelihood, Gaussian):
            got = f"a {type(posterior).__name__}"
            got = f"a {type(posterior.likelihood).__name__} likelihood" if isinstance(posterior, Posterior) else got
            raise UnsupportedError("a posterior with a Gaussian likelihood", got,
                                   "Fit with ntk_laplace.laplace(network, data, ntk_laplace.Gaussian(noise)).")
        self.laplace = posterior  # a plain object: the network's weights are not in the state_dict
        self._linearized = DifferentiableModel(posterior.fitted)
        self._form = InputFormat.of(None if input_shape is None else tuple(input_shape), input_dtype)
        self.prior, self.likelihood = posterior.prior, ResponseLikelihood(posterior.likelihood)
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self._outputs = tuple(range(posterior.num_outputs))
        self._given: Observations | None = None
        self.train_targets = self._as_targets(posterior.targets)
        if train_X is not None:
            if train_X.shape[:-1] != posterior.f.shape[:1]:
                raise DataError(f"train_X of the {posterior.num_examples} training points, (n, d)",
                                f"shape {tuple(train_X.shape)}", "Pass the inputs of the fit.")
            self.train_inputs = (train_X,)
        self.eval()

    @classmethod
    def fit(
        cls, network: nn.Module | Callable[[int, int], nn.Module] | str, train_X: Tensor, train_Y: Tensor,
        train_Yvar: Tensor | None = None, *, hidden_layer_sizes: Sequence[int] = (64, 64), activation: str = "silu",
        noise: float | None = None, groups: Any = "all", prior_mean: str = "initial",
        rounds: int = 2, steps: int = 100, trainer: Callable[..., Any] | None = None,
        warm_start: LaplaceModel | None = None, input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None, input_shape: Sequence[int] | None = None,
        input_dtype: torch.dtype | None = None, **laplace: Any,
    ) -> LaplaceModel:  # fmt: skip
        """Train a network with its evidence, and return its posterior as a model.

        A round trains to an optimum of the log joint by L-BFGS over all examples, and maximizes the evidence over the
        prior precision, and over the noise if it is not given.

        Parameters
        ----------
        network : nn.Module, callable or str
            A module, which is copied; a callable ``(d, m) -> nn.Module``; "fourier", random Fourier features and a
            linear layer, for inputs in [0, 1] (`FourierNetwork`: the evidence chooses a length scale for each input,
            the precision and the noise, and no other argument of the training counts); or "mlp", a multilayer
            perceptron of (sin π(x - ½), cos π(x - ½)) for inputs in [0, 1]: its prior variance is about the same in
            the whole cube.
        train_X : Tensor, (n, d)
        train_Y : Tensor, (n, m)
        train_Yvar : Tensor, (n, m), optional
            Known variances of the observation noise.
        hidden_layer_sizes, activation
            Of "mlp", as in `LaplaceRegressor`. Under "relu" the covariance jumps where a unit is turned on, because
            the rows of J do, and acquisition functions are hard to maximize.
        noise : float, optional
            The noise variance of transformed outcomes, fixed. By default it is learned with the precisions, which
            needs some tens of points: from few, the evidence may explain a function as noise.
        groups : str or mapping
            Which weights share a prior precision, as in `GaussianPrior`: "all", "layer", "tensor" or a mapping.
        prior_mean : {"initial", "zero"}
            Of the weights. "initial": those that the network comes with; the function is then a draw from the random
            network's tangent kernel, and moves no further from it than the data ask. "zero" is weight decay.
        rounds, steps : int
            Number of rounds, and iterations of L-BFGS in each, at most.
        trainer : callable, optional
            ``trainer(network, inputs, targets)`` trains the network in place, in units of the transforms, instead of
            L-BFGS.
        warm_start : LaplaceModel, optional
            A model of the same network fitted to fewer points: training begins at its weights and hyperparameters.
        input_transform, outcome_transform, input_shape, input_dtype
            As in `LaplaceModel`. The transforms are fitted to the data.
        **laplace
            For `ntk_laplace.laplace`: `structure`, `curvature`, `parameters`, `settings`.

        Returns
        -------
        LaplaceModel

        Raises
        ------
        DataError
            If the shapes do not fit each other.
        HyperparameterError
            If the noise is not a positive number.
        """
        for name, values in (("train_X", train_X), ("train_Y", train_Y), ("train_Yvar", train_Yvar)):
            fits = isinstance(values, Tensor) and values.ndim == 2 and len(values) == len(train_X) > 0
            if not (fits or (name == "train_Yvar" and values is None)):
                got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
                raise DataError(f"{name} as a tensor (n, {'d' if name == 'train_X' else 'm'}), n as in train_X", got,
                                "Pass tensors with one row per observation.")
        form = InputFormat.of(None if input_shape is None else tuple(input_shape), input_dtype)
        inputs, targets, variances = train_X, train_Y, train_Yvar
        if input_transform is not None:
            input_transform.train()
            inputs = input_transform(train_X)
            input_transform.eval()
        if outcome_transform is not None:
            outcome_transform.train()
            targets, variances = outcome_transform(train_Y, train_Yvar, X=inputs)
            outcome_transform.eval()
        surrogate = Surrogate(inputs.detach(), targets.detach(), form, groups, noise, variances, prior_mean)
        posterior = surrogate.posterior(network, hidden_layer_sizes, activation, rounds, steps, trainer,
                                        None if warm_start is None else warm_start.laplace, laplace)
        return cls(posterior, input_transform=input_transform, outcome_transform=outcome_transform,
                   input_shape=input_shape, input_dtype=input_dtype, train_X=train_X)

    # --- the model's form

    @property
    def num_outputs(self) -> int:
        """m."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> Size:
        """Batch dimensions, those of the observations that were added."""
        return Size() if self._given is None else self._given.batch_shape

    def subset_output(self, idcs: list[int]) -> LaplaceModel:
        """The model of some of the outputs; what was observed of the others still counts.

        Raises
        ------
        UnsupportedError
            If one is not an output.
        """
        found, new = self._chosen(idcs), self._copied()
        new._outputs = tuple(self._outputs[index] for index in found)
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
        self, X: Tensor, output_indices: list[int] | None = None, observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> GPyTorchPosterior:  # fmt: skip
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
        self.eval()
        inputs = self._transformed(X)
        mean, covariance = self._moments(inputs)
        if observation_noise is not False:
            covariance = covariance + self._noise(inputs.shape[-2], observation_noise)
        covariance = covariance.to(X.dtype).expand(*mean.shape[:-1], -1, -1)
        operator, mean, m = DenseLinearOperator(covariance), mean.to(X.dtype), self.num_outputs
        if m == 1:
            found = GPyTorchPosterior(MultivariateNormal(mean, operator))
        else:
            shaped = mean.unflatten(-1, (-1, m))
            found = GPyTorchPosterior(MultitaskMultivariateNormal(shaped, operator, interleaved=True))
        if hasattr(self, "outcome_transform"):
            found = self.outcome_transform.untransform_posterior(found, X=inputs)
        return found if posterior_transform is None else posterior_transform(posterior=found, X=X)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceModel:  # fmt: skip
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
        LaplaceModel
            With `batch_shape` that of the observations.

        Raises
        ------
        DataError
            If X and Y do not fit each other.
        """
        if X.ndim < 2 or Y.ndim < 2 or Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise DataError(f"X of shape (..., n, d) and Y of shape (..., n, {self.num_outputs})",
                            f"shapes {tuple(X.shape)} and {tuple(Y.shape)}", "Pass one row of Y for each row of X.")
        self.eval()
        inputs, targets = self._transformed(X), Y
        if hasattr(self, "outcome_transform"):
            targets, _ = self.outcome_transform(Y, X=inputs)
        f, jac = self._rows(inputs)
        own = Observations(self._linearized, f, jac, targets.to(f).flatten(-2),
                           self._noise(X.shape[-2], True if noise is None else noise).expand(*f.shape, -1))  # fmt: skip
        new = self._copied()
        new._given = own if self._given is None else self._given.joined(own)
        new._remember(X, targets)
        return new

    def thompson_path(
        self, count: int | None = None, generator: torch.Generator | None = None
    ) -> GenericDeterministicModel:  # fmt: skip
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
        draws = self._directions(shape, generator)

        def path(X: Tensor) -> Tensor:
            inputs = self._transformed(X)
            f, jac = self._rows(inputs)
            values = (f + (jac @ draws.unsqueeze(-1)).squeeze(-1)).unflatten(-1, (-1, self.num_outputs)).to(X.dtype)
            return self.outcome_transform.untransform(values, X=inputs)[0] if hasattr(self, "outcome_transform") else (
                values)

        return path

    # --- inside

    def _set_transformed_inputs(self) -> None:
        """BoTorch warns of missing training inputs in `eval`; here nothing is computed from them."""
        if hasattr(self, "train_inputs"):
            super()._set_transformed_inputs()

    def _transformed(self, X: Tensor) -> Tensor:
        if not isinstance(X, Tensor) or X.ndim < 2:
            got = f"shape {tuple(X.shape)}" if isinstance(X, Tensor) else f"a {type(X).__name__}"
            raise DataError("X as a tensor (..., q, d)", got, "Pass X.unsqueeze(-2) for separate points.")
        inputs: Tensor = self.transform_inputs(X)
        return inputs

    def _rows(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """f (..., q m) and J (..., q m, P) at transformed inputs (..., q, d)."""
        flat, network = inputs.reshape(-1, inputs.shape[-1]), self.laplace.network
        if len(flat):
            f, jac = self._linearized.rows(self._form.restore(flat, network))
        else:
            f = self.laplace.f.new_zeros(0, self.laplace.num_outputs)
            jac = f.new_zeros(*f.shape, network.num_parameters)
        chosen = list(self._outputs)
        if chosen != list(range(self.laplace.num_outputs)):
            f, jac = f[:, chosen], jac[:, chosen]
        shape = inputs.shape[:-1]
        return f.reshape(*shape, -1).flatten(-2), jac.reshape(*shape, *jac.shape[1:]).flatten(-3, -2)

    def _moments(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., q m) and covariance (..., q m, q m) of transformed outcomes."""
        if inputs.ndim == 2 or (torch.is_grad_enabled() and (inputs.requires_grad or self._has_graph)):
            return self._joint(inputs)
        # many batches without a graph: some at a time
        each = inputs.shape[-2] * self.num_outputs * self.laplace.num_parameters * self.laplace.dtype.itemsize
        most = max(1, tuning.COVARIANCE_BYTES // (4 * max(1, each)))
        batch = torch.broadcast_shapes(inputs.shape[:-2], self.batch_shape)
        if self._given is not None or batch.numel() <= most:
            return self._joint(inputs)
        parts = [self._joint(part) for part in inputs.reshape(-1, *inputs.shape[-2:]).split(most)]
        mean, covariance = (torch.cat(same) for same in zip(*parts, strict=True))
        return mean.view(*batch, -1), covariance.view(*batch, *covariance.shape[1:])

    @property
    def _has_graph(self) -> bool:
        return self._given is not None and (self._given.jac.requires_grad or self._given.y.requires_grad)

    def _joint(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, jac = self._rows(inputs)
        covariance = jac @ self._linearized.solve(jac).mT
        if self._given is not None:
            mean, less = self._given.moments(mean, jac)
            covariance = covariance - less
        with torch.no_grad():  # V is a difference from the prior's: this is its rounding, in the dtype of X
            prior = (jac.square() / self._linearized.precision.prior_precision).sum(-1).amax(-1)
            size = ROUNDING * torch.finfo(inputs.dtype if inputs.is_floating_point() else jac.dtype).eps * prior
        eye = torch.eye(covariance.shape[-1], dtype=jac.dtype, device=jac.device)
        return mean, 0.5 * (covariance + covariance.mT) + size[..., None, None] * eye

    def _noise(self, q: int, given: bool | Tensor) -> Tensor:
        """Covariance of the noise of q points, (..., q m, q m)."""
        f, chosen = self.laplace.f, list(self._outputs)
        if isinstance(given, Tensor):
            variances = given.to(f).expand(*given.shape[:-2], q, self.num_outputs)
            return torch.diag_embed(variances.flatten(-2))
        with torch.no_grad():
            own = self.laplace.likelihood
            one = own.response_covariance(f).mean(0) if own.kind == "point" else own.response_covariance(f[:1])[0]
            one = one[chosen][:, chosen]
            return torch.block_diag(*[one] * q) if q else one.new_zeros(0, 0)

    def _directions(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        """Draws of θ - θ*, (..., P), with the shape before the batch dimensions of the model."""
        with torch.no_grad():
            precision, every = self._linearized.precision, shape + self.batch_shape
            draws = precision.sample(every.numel(), generator).view(*every, -1)
            if self._given is None:
                return draws
            root = symmetric_root(self._given.noise.reshape(-1, *self._given.noise.shape[-2:])[0]) if (
                self._given.noise.ndim == 2) else torch.linalg.cholesky(self._given.noise)
            white = torch.randn(*every, root.shape[-1], dtype=root.dtype, device=root.device, generator=generator)
            return self._given.directions(draws, (root @ white.unsqueeze(-1)).squeeze(-1))

    def _chosen(self, indices: Sequence[int]) -> list[int]:
        m = self.num_outputs
        if not len(indices) or not all(-m <= index < m for index in indices):
            raise UnsupportedError(f"outputs among 0 to {m - 1}", repr(list(indices)), "Choose among them.")
        return [int(index) % m for index in indices]

    def _as_targets(self, targets: Tensor) -> Tensor:
        """(n,) or (m, n) from (n, m), as BoTorch has them."""
        return targets.squeeze(-1) if targets.shape[-1] == 1 else targets.mT

    def _remember(self, X: Tensor, targets: Tensor) -> None:
        """Append to `train_inputs` and `train_targets`."""
        own = self._as_targets(targets.to(self.train_targets))
        columns = 1 if self.num_outputs == 1 else 2
        batch = torch.broadcast_shapes(own.shape[:-columns], self.train_targets.shape[:-columns])
        self.train_targets = torch.cat([part.expand(*batch, *part.shape[len(part.shape) - columns :])
                                        for part in (self.train_targets, own)], -1)
        if not hasattr(self, "train_inputs"):
            return

        def longer(known: Tensor, new: Tensor) -> Tensor:
            batch = torch.broadcast_shapes(known.shape[:-2], new.shape[:-2])
            return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (known, new.to(known))], -2)

        if self._has_transformed_inputs and self._original_train_inputs is not None:
            self._original_train_inputs = longer(self._original_train_inputs, X)
            self.train_inputs = (longer(self.train_inputs[0], self.transform_inputs(X)),)
        else:
            self.train_inputs = (longer(self.train_inputs[0], X),)

    def _copied(self) -> LaplaceModel:
        """A shallow copy: it shares the posterior and the modules, and has tables of its own."""
        new = copy.copy(self)
        tables = {name: dict(vars(self)[name]) for name in ("_modules", "_parameters", "_buffers")}
        new.__dict__.update(tables)
        return new

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> LaplaceModel:
        super()._apply(fn, *args, **kwargs)
        f = self.laplace.f
        there = fn(torch.empty(0, dtype=f.dtype, device=f.device))
        if (there.dtype, there.device) != (f.dtype, f.device):
            self.laplace.to(there.device, there.dtype)
            self._linearized = DifferentiableModel(self.laplace.fitted)
        return self
