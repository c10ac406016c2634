"""State of a posterior: a linearized model, a structure fitted to data, and the current factorization."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.curvature import CurvatureType, ParameterBlock, PosteriorPrecision
from ntk_laplace.errors import UnsupportedError, is_choice, require_flags
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.calibration import Calibration
from ntk_laplace.model.data import InputData
from ntk_laplace.model.likelihoods import Gaussian, Likelihood
from ntk_laplace.model.network import Network
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.runtime.serialization import require_writable, write
from ntk_laplace.structures import BlockBasis, FittedModel
from ntk_laplace.structures.checkpoint import posterior_record
from ntk_laplace.structures.points import present_values, unmoved
from ntk_laplace.structures.what_if import refitted


class Fitted:
    """A fitted model with a public interface; base class of the posterior's methods."""

    def __init__(self, fitted: FittedModel, reason: str = "", calibration: Calibration | None = None) -> None:
        self._fitted, self.reason = fitted, reason  # why "auto" chose the structure
        self._refit: tuple[tuple[Tensor, ...], Tensor] | None = None
        self._calibrated: tuple[tuple[Tensor, ...], Calibration] | None = None
        self.predictive = calibration

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy whose hyperparameters can be trained, also if it is made in inference mode."""
        found = memo[id(self)] = object.__new__(type(self))
        with torch.inference_mode(False):
            vars(found).update(copy.deepcopy(vars(self), memo))
        return found

    # --- components

    @property
    def network(self) -> Network:
        """The private copy of the network."""
        return self._fitted.network

    @property
    def likelihood(self) -> Likelihood:
        """The posterior's own likelihood; its hyperparameters may be changed in place."""
        return self._fitted.likelihood

    @property
    def prior(self) -> GaussianPrior:
        """The posterior's own prior; its precisions may be changed in place."""
        return self._fitted.prior

    @property
    def structure(self) -> str:
        """Name of the structure."""
        return self._fitted.structure.name

    @property
    def fitted(self) -> FittedModel:
        """The linearized model and what is stored of its training data."""
        return self._fitted

    @property
    def curvature_type(self) -> CurvatureType:
        """GGN, empirical Fisher or Monte-Carlo Fisher."""
        return self._fitted.model.curvature_type

    @property
    def parameter_blocks(self) -> list[ParameterBlock]:
        """Which parameters share a factorization, and of which kind; exact structures have none."""
        return list(self._fitted.structure.parameter_blocks)

    @property
    def f(self) -> Tensor:
        """Outputs at the training points, (N, C)."""
        return self._fitted.points.f

    @property
    def targets(self) -> Tensor:
        """Training targets in the likelihood's canonical form."""
        return self._fitted.points.targets

    @property
    def weights(self) -> Tensor:
        """How often each training point counts, (N,): its weight in the data or in a what-if, 0 if removed."""
        return self._fitted.points.counts

    @property
    def num_examples(self) -> int:
        """N."""
        return self._fitted.points.num_examples

    @property
    def num_outputs(self) -> int:
        """C."""
        return self._fitted.points.num_outputs

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the algebra."""
        return self._fitted.model.jacobian_pass.dtype

    @property
    def num_parameters(self) -> int:
        """P, the number of linearized parameters."""
        return self.network.num_parameters

    @property
    def predictive(self) -> Calibration | None:
        """The calibration that `predict` uses; None without one, or at other hyperparameters than those of its fit.

        Fitted by `fit_predictive` or `calibrate`; may be assigned.
        """
        if self._calibrated is None or not unmoved(self._calibrated[0], self.prior, self.likelihood):
            return None
        return self._calibrated[1]

    @predictive.setter
    def predictive(self, calibration: Calibration | None) -> None:
        if not isinstance(calibration, (Calibration, type(None))):
            raise UnsupportedError("a Calibration, or None for none", repr(calibration),
                                   "Use ntk_laplace.Calibration(scale=...), or fit_predictive().")
        self._calibrated = None
        if calibration is not None:
            self._calibrated = present_values(self.prior, self.likelihood), calibration

    def __repr__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"Posterior(structure={self.structure!r}{why}, N={self.num_examples}{self._words()}, C={self.num_outputs}, "
            f"P={self.num_parameters:,}, likelihood={type(self.likelihood).__name__}, dtype={self.dtype}"
            f"{'' if self.predictive is None else f', predictive: {self.predictive}'})"
        )

    def _words(self) -> str:
        """The changes by a what-if, for `repr`."""
        model = self._fitted.model
        moved, relinearized = model.displacement is not None, model.training_gradient is not None
        removed = int((self.weights == 0).sum()) if moved or relinearized else 0
        words = ["relinearized"] if relinearized and not moved else []
        words += [f"{removed} removed"] if removed else []
        words += ["refitted"] if model.refitted else []
        if not words and moved:
            words = ["changed" if self._fitted.structure.spec.laplace else "linearized at other weights"]
        return f" ({', '.join(words)})" if words else ""

    @property
    def posterior_precision(self) -> PosteriorPrecision:
        """The factorized posterior precision at the current hyperparameters; recomputed after a change of them."""
        return self._fitted.precision

    def eigenbasis(self) -> BlockBasis:
        """Eigenbases of a Kronecker-factored structure, for another fit: ``EKFAC(basis=posterior.eigenbasis())``.

        Raises
        ------
        UnsupportedError
            If the structure has none.
        """
        return self._fitted.structure.basis(self._fitted.model)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move to another device, or change the dtype of the algebra; in place, as modules do.

        Parameters
        ----------
        device : optional
            New device of the network, the hyperparameters and the stored rows.
        dtype : torch.dtype, optional
            Of the algebra. The network and the hyperparameters keep theirs.

        Returns
        -------
        Posterior
            Itself. Only the factorization is recomputed.

        Raises
        ------
        UnsupportedError
            If the dtype is neither torch.float32 nor torch.float64, or torch cannot use the device.
        """
        if not is_choice(dtype, (None, torch.float32, torch.float64)):
            raise UnsupportedError("torch.float64 or torch.float32 as dtype of the algebra", f"{dtype}",
                                   "Choose one of the two.")
        try:
            device = self.network.device if device is None else torch.device(device)
            torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError) as cause:
            raise UnsupportedError("a device that torch can use here", repr(str(device))[:80],
                                   'Pass "cpu", or install a torch for that device.') from cause
        with torch.inference_mode(False):
            self._fitted, self._refit = self._fitted.to(device, self.dtype if dtype is None else dtype), None
        return self

    def save(self, path: str | os.PathLike[str], include_data: bool = False) -> None:
        """Write a checkpoint that `ntk_laplace.load` reads, and ``torch.load(path, weights_only=True)`` opens.

        Parameters
        ----------
        path : path
            If it ends with ``.safetensors``, the file has that format: the tensors, and the rest as JSON in the
            file's metadata. It needs the package safetensors.
        include_data : bool
            Save outputs and targets of the training points too: the loaded posterior can then do everything that
            needs no further pass over the data. ``structure="gp"`` requires it, because it consists of the training
            points' rows, which contain the inputs of the first layer. So does ``structure="iterative"`` where its low
            rank consists of such rows.

        Raises
        ------
        DataError
            If the path is not writable, or the package is not installed.
        UnsupportedError
            If a what-if changed the posterior, or if the structure needs ``include_data=True``.
        """
        require_flags(include_data=include_data)
        require_writable(path)
        write(posterior_record(self._fitted, self.reason, include_data, self.predictive), path)

    # --- shared by the methods

    def _derived(self, fitted: FittedModel) -> Self:
        """A posterior of other data."""
        return type(self)(fitted, self.reason)

    def _chunks(self, x: InputData, batch_size: int | None = None) -> Chunks:
        return Chunks(self._fitted.model, x, batch_size)

    def _refit_step(self) -> Tensor:
        """θ - θ̄, (P,), with θ̄ the optimum of the linearized model.

        UnsupportedError if the likelihood is not Gaussian and the curvature is not the linearized model's exact
        Hessian; NumericalError if the optimum is not reached.
        """
        self._fitted.require_laplace('mean="posterior"')
        modules = self.prior, self.likelihood
        if self._refit is None or not unmoved(self._refit[0], *modules):
            self._refit = None
            with torch.inference_mode(False):
                if type(self.likelihood.counted_once()) is Gaussian:  # quadratic: one Newton step reaches the optimum
                    step = self._fitted.newton_step()
                else:
                    self._fitted.require_exact(
                        ' for mean="posterior" of a likelihood that is not Gaussian: the linearized model\'s optimum '
                        "takes several Newton steps with its own curvature",
                        'Fit one of them, or leave mean= out for the network\'s own outputs, "map".')
                    step = refitted(self._fitted)
            self._refit = present_values(*modules), step
        return self._refit[1]

    def jacobian(self, x: InputData) -> Jacobian:
        """Rows of J at all inputs, in blocks by layer; ``jacobian(x).dense(posterior.network.shapes)`` is (C, n, P)."""
        return Jacobian.concatenate(list(self._chunks(x).rows()))
