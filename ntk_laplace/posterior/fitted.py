"""State of a posterior: a linearized model, a structure fitted to data, and the current factorization."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import CurvatureType, ParameterBlock
from ntk_laplace.data import Batches
from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.evidence import PosteriorPrecision, joint_gradient
from ntk_laplace.explain import Indices, positions, refitted
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.likelihoods import Gaussian, Likelihood, Tempered
from ntk_laplace.network import Network
from ntk_laplace.points import present_values, unmoved
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.priors import GaussianPrior
from ntk_laplace.structures import LinearizedModel, Structure, posterior_record, require_place, write

__all__ = ["Fitted"]


class Fitted:
    """A linearized model and a structure fitted to its data; base class of the posterior's methods.

    Parameters
    ----------
    model : LinearizedModel
    structure : Structure
    reason : str
        Why "auto" chose it.
    """

    def __init__(self, model: LinearizedModel, structure: Structure, reason: str = "") -> None:
        self._model, self._structure = model, structure
        self.reason = reason
        self._precision: PosteriorPrecision | None = None
        self._seen: tuple[Tensor, ...] = ()
        self._refit: tuple[tuple[Tensor, ...], Tensor] | None = None

    # --- components

    @property
    def network(self) -> Network:
        """The private copy of the network."""
        return self._model.network

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; its hyperparameters may be changed in place."""
        return self._model.likelihood

    @property
    def prior(self) -> GaussianPrior:
        """The prior; its precisions may be changed in place."""
        return self._model.prior

    @property
    def structure(self) -> str:
        """Name of the structure."""
        return self._structure.name

    @property
    def fitted(self) -> Structure:
        """The structure object: what is stored of the training data."""
        return self._structure

    @property
    def curvature_type(self) -> CurvatureType:
        """GGN, empirical Fisher or Monte-Carlo Fisher."""
        return self._model.curvature_type

    @property
    def parameter_blocks(self) -> list[ParameterBlock]:
        """Which parameters share a factorization, and of which kind; exact structures have none."""
        return list(getattr(self._structure, "parameter_blocks", []))

    @property
    def f(self) -> Tensor:
        """Outputs at the training points, (N, C)."""
        return self._structure.points.f

    @property
    def targets(self) -> Tensor:
        """Training targets in the likelihood's canonical form."""
        return self._structure.points.targets

    @property
    def weights(self) -> Tensor:
        """How often each training point counts, (N,): its weight in the data or in a what-if, 0 if removed."""
        return self._structure.points.counts

    @property
    def num_examples(self) -> int:
        """N."""
        return self._structure.points.num_examples

    @property
    def num_outputs(self) -> int:
        """C."""
        return self._structure.points.num_outputs

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the algebra."""
        return self._model.jacobian_pass.dtype

    @property
    def num_parameters(self) -> int:
        """P, the number of linearized parameters."""
        return self.network.num_parameters

    def __repr__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"Posterior(structure={self.structure!r}{why}, N={self.num_examples}{self._words()}, C={self.num_outputs}, "
            f"P={self.num_parameters:,}, likelihood={type(self.likelihood).__name__}, dtype={self.dtype})"
        )

    def _words(self) -> str:
        """The changes by a what-if, for `repr`."""
        changed = self._model.displacement is not None or self._model.training_gradient is not None
        removed = int((self.weights == 0).sum()) if changed else 0
        model = self._model
        words = ["relinearized"] if model.training_gradient is not None and model.displacement is None else []
        words += [f"{removed} removed"] if removed else []
        if not words and self._model.displacement is not None:
            words = ["changed"]
        return f" ({', '.join(words)})" if words else ""

    @property
    def posterior_precision(self) -> PosteriorPrecision:
        """The factorized posterior precision at the current hyperparameters; recomputed after a change of them."""
        modules = self.prior, self.likelihood
        if self._precision is None or not unmoved(self._seen, *modules):
            self._precision = None  # free the old factorization before computing the new one
            with torch.inference_mode(False):  # gradients may be needed later
                self._precision = self._structure.posterior_precision(self._model)
            self._seen = present_values(*modules)
        return self._precision

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Fitted:
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
        """
        model = self._model
        device = model.network.device if device is None else torch.device(device)
        dtype = model.jacobian_pass.dtype if dtype is None else dtype
        self._model = model.to(device, dtype)
        self._structure.to(device, dtype)
        self._precision, self._seen, self._refit = None, (), None
        return self

    def save(self, path: str | os.PathLike[str], include_data: bool = False) -> None:
        """Write a checkpoint that `ntk_laplace.load` reads, and ``torch.load(path, weights_only=True)`` opens.

        Parameters
        ----------
        path : path
        include_data : bool
            Save outputs and targets of the training points too: the loaded posterior can then do everything that
            needs no further pass over the data. ``structure="gp"`` requires it, because it consists of the training
            points' rows, which contain the inputs of the first layer.

        Raises
        ------
        DataError
            If the path is not writable.
        """
        require_place(path)
        write(posterior_record(self._model, self._structure, self.reason, include_data), path)

    # --- more data

    def merge(self, other: Fitted) -> Fitted:
        """Posterior given the data of both posteriors, of the same network and hyperparameters.

        Structured posteriors add their sums, so several processes can share the data; "ekfac" and "inf" need a common
        eigenbasis, ``EKFAC(basis=...)``. Exact ones concatenate their rows, or add their JᵀΛJ.

        Raises
        ------
        UnsupportedError
            If the two posteriors are incompatible.
        """
        if not isinstance(other, Fitted):
            raise UnsupportedError("another posterior", f"a {type(other).__name__}",
                                   "Fit the other data with the same arguments; condition(data) takes data themselves.")
        moved = [one for one in (self, other) if one._model.displacement is not None]
        if moved:
            raise UnsupportedError("two posteriors of training data as they are", f"{moved[0]!r}",
                                   "Merge first, and ask what if afterwards.")
        same = self.network.shapes == other.network.shapes and torch.equal(self.network.theta, other.network.theta)
        same = same and self.network.output == other.network.output
        if not same or self.structure != other.structure or self._model.curvature_type != other._model.curvature_type:
            raise UnsupportedError("two posteriors of one trained network, structure and curvature",
                                   f"{self!r} and {other!r}", "Fit both with the same arguments but the data.")
        return type(self)(self._model, self._structure.merged(self._model, other._structure), self.reason)

    def condition(self, data: Any) -> Fitted:
        """Posterior given new data as well, at the same weights; the results for the old data are reused.

        Parameters
        ----------
        data : DataLoader, Dataset, (X, y), or a mapping
            As for `laplace`.
        """
        network, settings = self.network, self._model.settings
        batches = Batches(data, settings.batch_size, network.device, network.input_dtype, network.targets)
        with torch.inference_mode(False):
            new = self._structure.refit_on(self._model, batches)
            return type(self)(self._model, self._structure.merged(self._model, new), self.reason)

    def subset(self, index: Indices) -> Fitted:
        """Posterior given only some of the training points, at the same weights and hyperparameters.

        Parameters
        ----------
        index : sequence of int, or Tensor
            Indices of the points to keep, each once, or a mask of all; the order of the data is kept. "gp" selects
            stored rows, the others read the data again, "ekfac" and "inf" in the eigenbasis of all points.

        Raises
        ------
        DataError
            If they are not training points, or the data cannot be read again.
        """
        kept = positions(index, self.num_examples).sort().values.to(self.network.device)
        if len(kept) == 0:
            raise DataError(f"training points to keep, 0 to {self.num_examples - 1}, each once", "0 of them",
                            "Pass for example torch.arange(10).")
        with torch.inference_mode(False):
            model = self._model.at(kept)
            return type(self)(model, self._structure.subset(model, kept), self.reason)

    # --- shared by the methods

    def _joint_gradient(self) -> Tensor:
        """g, the gradient of the negative log joint, (P,)."""
        model, points = self._model, self._structure.points
        with torch.no_grad():
            residual = points.residual(model.likelihood)
        return joint_gradient(self._structure.vjp(model, residual), model.prior, model.theta)

    def _newton_step(self) -> Tensor:
        """z = H⁻¹g, (P,): one Newton step, which reaches the optimum of a quadratic log likelihood."""
        return self.posterior_precision.solve(self._joint_gradient())

    def _chunks(self, x: Any, batch_size: int | None = None) -> Chunks:
        return Chunks(self._model, x, batch_size)

    def _refit_step(self) -> Tensor:
        """θ - θ̄, (P,), with θ̄ the optimum of the linearized model.

        Raises
        ------
        UnsupportedError
            If the likelihood is not Gaussian and the curvature is not the linearized model's exact Hessian.
        NumericalError
            If the optimum is not reached.
        """
        modules = self.prior, self.likelihood
        if self._refit is None or not unmoved(self._refit[0], *modules):
            self._refit = None
            plain = self.likelihood.likelihood if isinstance(self.likelihood, Tempered) else self.likelihood
            with torch.inference_mode(False):
                if type(plain) is Gaussian:
                    step = self._newton_step()
                else:
                    self._require_own_curvature()
                    step = refitted(self._model, self._structure)
            self._refit = present_values(*modules), step
        return self._refit[1]

    def _require_own_curvature(self) -> None:
        if self.structure not in ("gp", "full") or self._model.curvature_type.kind != "ggn":
            raise UnsupportedError(
                'structure="gp" or "full" and curvature="ggn" for mean="posterior" of a likelihood that is not '
                "Gaussian: the linearized model's optimum takes several Newton steps with its own curvature",
                f"structure={self.structure!r}, curvature={self._model.curvature_type.kind!r}",
                'Fit one of them, or leave mean= out for the network\'s own outputs, "map".',
            )  # fmt: skip

    def _rows(self, x: Any) -> Jacobian:
        """Rows of J at all inputs together."""
        return Jacobian.concatenate(list(self._chunks(x).rows()))
