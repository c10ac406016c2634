"""The Laplace posterior as a BoTorch model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.datasets import SupervisedDataset
from torch import Size, Tensor, nn

from ntk_laplace.errors import DataError, UnsupportedError, require_whole
from ntk_laplace.gp.input_format import InputFormat
from ntk_laplace.gp.likelihood import ResponseLikelihood
from ntk_laplace.model.likelihoods import Gaussian
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.differentiable import DifferentiableModel
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_root
from ntk_laplace.runtime.sampling import normal
from ntk_laplace.tools.botorch.gaussian_model import GaussianModel
from ntk_laplace.tools.botorch.observations import ROUNDING, Observations
from ntk_laplace.tools.botorch.surrogate import Surrogate, transformed


class LaplaceModel(GaussianModel):
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
    diagonal: acquisition functions factorize them. All results have the dtype of X, or a finer one of the
    outcome transform.
    """

    def __init__(
        self, posterior: Posterior, *, input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None, input_shape: Sequence[int] | None = None,
        input_dtype: torch.dtype | None = None, train_X: Tensor | None = None,
    ) -> None:
        if not isinstance(posterior, Posterior) or not isinstance(posterior.likelihood, Gaussian):
            got = f"a {type(posterior).__name__}"
            got = f"a {type(posterior.likelihood).__name__} likelihood" if isinstance(posterior, Posterior) else got
            raise UnsupportedError("a posterior with a Gaussian likelihood", got,
                                   "Fit with ntk_laplace.laplace(network, data, ntk_laplace.Gaussian(noise)).")
        targets = posterior.targets.squeeze(-1) if posterior.num_outputs == 1 else posterior.targets.mT
        super().__init__(targets, train_X, input_transform, outcome_transform)
        self.laplace = posterior  # a plain object: the network's weights are not in the state_dict
        self._model = DifferentiableModel(posterior.fitted)
        self._form = InputFormat.of(None if input_shape is None else tuple(input_shape), input_dtype)
        self.prior, self.likelihood = posterior.prior, ResponseLikelihood(posterior.likelihood)
        self._outputs = tuple(range(posterior.num_outputs))
        self._added: Observations | None = None
        self.eval()

    @classmethod
    def fit(
        cls, network: nn.Module | Callable[[int, int], nn.Module] | str, train_X: Tensor, train_Y: Tensor,
        train_Yvar: Tensor | None = None, *, hidden_layer_sizes: Sequence[int] = (64, 64), activation: str = "silu",
        noise: float | None = None, groups: Any = None, prior_mean: str | None = None, rounds: int = 2,
        steps: int = 100, trainer: Callable[..., Any] | str | None = None, warm_start: LaplaceModel | None = None,
        input_transform: InputTransform | None = None, outcome_transform: OutcomeTransform | None = None,
        input_shape: Sequence[int] | None = None, input_dtype: torch.dtype | None = None, seed: int = 0, **laplace: Any,
    ) -> LaplaceModel:
        """Train a network with its evidence, and return its posterior as a model.

        A round trains to an optimum of the log joint by L-BFGS over all examples, and maximizes the evidence over the
        prior precision, and over the noise if it is not given.

        Parameters
        ----------
        network : nn.Module, callable or str
            A module, which is copied; a callable ``(d, m) -> nn.Module``; "fourier", random Fourier features and a
            linear layer, for inputs in [0, 1] (`FourierNetwork`: the evidence chooses a length scale for each input,
            and a precision and a noise for each output; no other argument of the training counts); or "mlp", a
            multilayer perceptron of (sin π(x - ½), cos π(x - ½)) for inputs in [0, 1]: its prior variance is about the
            same in the whole cube.
        train_X : Tensor, (n, d)
        train_Y : Tensor, (n, m)
        train_Yvar : Tensor, (n, m), optional
            Known variances of the observation noise.
        hidden_layer_sizes, activation
            Of "mlp", as in `LaplaceRegressor`. Under "relu" the covariance jumps where a unit is turned on, because
            the rows of J do, and acquisition functions are hard to maximize.
        noise : float, optional
            The noise variance of transformed outcomes, fixed. By default one for each output is learned with the
            precisions, which needs some tens of points: from few, the evidence may explain a function as noise.
        groups : str or mapping, optional
            Which weights share a prior precision, as in `GaussianPrior`: "all" (the default), "layer", "tensor" or a
            mapping.
        prior_mean : {"initial", "zero"}, optional
            Of the weights. "initial" (the default): those that the network comes with; the function is then a draw
            from the random network's tangent kernel, and moves no further from it than the data ask. "zero" is weight
            decay.
        rounds, steps : int
            Number of rounds, and iterations of L-BFGS in each, at most.
        trainer : callable or "gauss-newton", optional
            ``trainer(network, inputs, targets)`` trains the network in place, in units of the transforms, instead of
            L-BFGS. "gauss-newton": damped Gauss-Newton steps, of which each writes out J of all points, (n m, P), and
            solves n m equations; `steps=15` are enough for some tens of points, and end nearer to an optimum.
        warm_start : LaplaceModel, optional
            A model of the same network fitted to fewer points. Training begins at its weights, its prior (groups,
            mean and precisions) and, where the noise is learned, its noise. "fourier" searches from its length
            scales, precisions and noises, and from those of a new network. All other arguments are those of this call.
        input_transform, outcome_transform, input_shape, input_dtype
            As in `LaplaceModel`. The transforms are fitted to the data.
        seed : int
            Of the initial weights where the network is made here.
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
        UnsupportedError
            If `warm_start` is no such model, its network has other layers or sizes, or `groups` or `prior_mean` are
            given and are not those of its prior.
        """
        if not (warm_start is None or isinstance(warm_start, LaplaceModel)):
            raise UnsupportedError("warm_start as a LaplaceModel", f"a {type(warm_start).__name__}",
                                   "LaplaceEnsemble.fit continues an ensemble.")
        require_whole("seed", seed, 0, "Leave it out for 0.")
        inputs, targets, variances = transformed(train_X, train_Y, train_Yvar, input_transform, outcome_transform)
        form = InputFormat.of(None if input_shape is None else tuple(input_shape), input_dtype)
        surrogate = Surrogate(inputs, targets, form, groups, noise, variances, prior_mean, rounds, steps, trainer)
        module = surrogate.network(network, hidden_layer_sizes, activation, seed)
        found = surrogate.posterior(module, None if warm_start is None else warm_start.laplace, laplace)
        return cls(found, input_transform=input_transform, outcome_transform=outcome_transform,
                   input_shape=input_shape, input_dtype=input_dtype, train_X=train_X)

    @classmethod
    def construct_inputs(
        cls, training_data: SupervisedDataset, network: nn.Module | Callable[[int, int], nn.Module] | str,
        **options: Any,
    ) -> dict[str, Any]:
        """Train a network on a dataset of BoTorch, and return the arguments with which its model is made.

        ``LaplaceModel(**LaplaceModel.construct_inputs(dataset, network))`` is `fit` of the dataset's X, Y and Yvar.

        Parameters
        ----------
        training_data : SupervisedDataset
        network, **options
            As in `fit`.

        Returns
        -------
        dict

        Raises
        ------
        DataError
            If it is no such dataset.
        NTKLaplaceError
            As `fit`.
        """
        if not isinstance(training_data, SupervisedDataset):
            raise DataError("training_data as a SupervisedDataset of BoTorch", f"a {type(training_data).__name__}",
                            "Pass tensors to LaplaceModel.fit(network, train_X, train_Y).")
        x, y, variances = training_data.X, training_data.Y, training_data.Yvar
        names = "input_transform", "outcome_transform", "input_shape", "input_dtype"
        found = cls.fit(network, x, y, variances, **options)
        given = {name: options[name] for name in names if options.get(name) is not None}
        return {"posterior": found.laplace, "train_X": x} | given

    # --- the model's form

    @property
    def num_outputs(self) -> int:
        """m."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> Size:
        """Batch dimensions, those of the observations that were added."""
        return Size() if self._added is None else self._added.batch_shape

    @property
    def log_density(self) -> Tensor:
        """Of the observations that were added, given the training data: nats, in units of the transform."""
        return self.laplace.f.new_zeros(()) if self._given is None else self._given.log_density

    def moments(self, inputs: Tensor, noise: bool | Tensor = False) -> tuple[Tensor, Tensor]:
        """As in `GaussianModel`."""
        mean, covariance = self._latent(inputs)
        return mean, covariance if noise is False else covariance + self._noise(inputs.shape[-2], noise)

    def path(self, shape: Size, generator: torch.Generator | None) -> Callable[[Tensor], Tensor]:
        """f + J δ with draws of δ."""
        with torch.no_grad():  # of θ - θ*, (..., P), with the shape before the batch dimensions of the model
            every = shape + self.batch_shape
            draws = self._linearized.precision.sample(every.numel(), generator).view(*every, -1)
            if self._given is not None:
                root = symmetric_root(self._given.noise)
                white = normal((*every, root.shape[-1]), root, generator)
                draws = self._given.directions(draws, (root @ white.unsqueeze(-1)).squeeze(-1))

        def values(inputs: Tensor) -> Tensor:
            f, jac = self._rows(inputs)
            return f + (jac @ draws.unsqueeze(-1)).squeeze(-1)

        return values

    # --- inside

    @property
    def _linearized(self) -> DifferentiableModel:
        """Of the posterior as it is, which a model that shares it may have moved to another dtype or device."""
        if self._model.fitted is not self.laplace.fitted:
            self._model = DifferentiableModel(self.laplace.fitted)
        return self._model

    @property
    def _given(self) -> Observations | None:
        """The observations that were added, at the present hyperparameters."""
        if self._added is not None:
            self._added = self._added.at(self._linearized.precision, self.laplace.f)
        return self._added

    def _observe(self, inputs: Tensor, targets: Tensor, noise: Tensor | None) -> None:
        f, jac = self._rows(inputs)
        covariance = self._noise(inputs.shape[-2], True if noise is None else noise)
        batch = torch.broadcast_shapes(f.shape[:-1], covariance.shape[:-2])
        covariance = covariance.expand(*batch, -1, -1)
        own = Observations(self._linearized.precision, f, jac, targets.to(f).flatten(-2), covariance)
        self._added = own if self._given is None else self._given.joined(own)

    def _keep(self, outputs: list[int]) -> None:
        self._outputs = tuple(self._outputs[index] for index in outputs)

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
        return f.reshape(*shape, *f.shape[1:]).flatten(-2), jac.reshape(*shape, *jac.shape[1:]).flatten(-3, -2)

    def _latent(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., q m) and covariance (..., q m, q m) of f; of many batches of one model, some at a time."""
        if self.batch_shape or inputs.ndim == 2 or (torch.is_grad_enabled() and inputs.requires_grad):
            return self._joint(inputs)
        each = inputs.shape[-2] * self.num_outputs * self.laplace.num_parameters * self.laplace.dtype.itemsize
        most = max(1, tuning.COVARIANCE_BYTES // (4 * max(1, each)))
        batch = inputs.shape[:-2]
        if batch.numel() <= most:
            return self._joint(inputs)
        parts = [self._joint(part) for part in inputs.reshape(-1, *inputs.shape[-2:]).split(most)]
        mean, covariance = (torch.cat(same) for same in zip(*parts, strict=True))
        return mean.view(*batch, -1), covariance.view(*batch, *covariance.shape[1:])

    def _joint(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, jac = self._rows(inputs)
        covariance = jac @ (self._linearized.solve(jac) if jac.numel() else jac).mT
        if self._given is not None:
            mean, less = self._given.moments(mean, jac)
            covariance = covariance - less
        with torch.no_grad():  # V is a difference from the prior's: this is its rounding, in the dtype of X
            prior = (jac.square() / self._linearized.precision.prior_precision).sum(-1)
            prior = prior.amax(-1) if prior.shape[-1] else prior.sum(-1)
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

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> LaplaceModel:
        super()._apply(fn, *args, **kwargs)
        f = self.laplace.f
        there = fn(torch.empty(0, dtype=f.dtype, device=f.device))
        if (there.dtype, there.device) != (f.dtype, f.device):
            self.laplace.to(there.device, there.dtype)
        return self
