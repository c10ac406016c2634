"""Verbs of the evidence: its value, its parts, and the hyperparameters that maximize it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import LogDetTerm, PosteriorPrecision
from ntk_laplace.errors import HyperparameterError, UnsupportedError, require_flags, warn
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.posterior.hyperparameters import HyperparameterHistory, maximize
from ntk_laplace.runtime.lower_triangle import more_digits
from ntk_laplace.structures import bounds, evidence
from ntk_laplace.structures.bounds import EvidenceBound
from ntk_laplace.structures.evidence import Evidence

_ROUNDING = 0.05  # nats, above which a warning is issued


class EvidenceVerbs(Fitted):
    """How well the model explains its training data."""

    def log_likelihood(self) -> Tensor:
        """Σ log p(y_n given f_n) of the training points, nats; differentiable in the likelihood's hyperparameters."""
        return evidence.log_likelihood(self._fitted)

    def log_joint(self) -> Tensor:
        """Σ log p(y_n given f_n) - ½ (θ*-μ0)ᵀP0(θ*-μ0), the evidence's first part; differentiable like it."""
        fit = evidence.log_likelihood(self._fitted)
        return fit + evidence.log_prior(self._fitted).to(fit)

    def log_det(self) -> Tensor:
        """log det B, from the present factorization; the evidence is `log_joint` less half of it."""
        return evidence.log_det(self._fitted)

    def log_marginal_likelihood(self, correction: bool = False) -> Tensor:
        """Laplace-GGN evidence log q(D) ([I21] Eq. 3, 8).

        Parameters
        ----------
        correction : bool
            Add ½ gᵀH⁻¹g ([I21] A.1), g the gradient of the negative log joint: exact for the linearized model away
            from the MAP, zero at it.

        Returns
        -------
        Tensor, ()
            In nats, summed over the data; differentiable (once) in ``prior.log_precision`` and in the likelihood's
            hyperparameters. ``float(value)`` is its value.
        """
        return self._evidence(correction).value  # without warnings: searches call it at every step

    def evidence(self, correction: bool = False) -> Evidence:
        """Laplace-GGN evidence with its terms ([I21] Eq. 3, 8).

        Parameters
        ----------
        correction : bool
            As in `log_marginal_likelihood`, which is the `value` of this.

        Returns
        -------
        Evidence
            Its terms are tensors (), differentiable like the value. A warning says where rounding of the posterior
            precision moves it by more than 0.05 nats.
        """
        found = self._evidence(correction)
        tell_rounding(self.posterior_precision)
        return found

    def _evidence(self, correction: bool) -> Evidence:
        require_flags(correction=correction)
        return evidence.evidence(self._fitted, correction)

    def evidence_bound(
        self, examples: int | None = None, parameters: str | None = None, outputs: str = "all", *,
        blocks: int | None = None, seed: int = 0, gradient: bool = False,
    ) -> EvidenceBound:
        """A lower bound of the exact evidence, from blocks of examples and of parameters ([I23] theorems 1 to 3).

        log det B is at most the sum of the log determinants of its diagonal blocks (Fischer's inequality), and so is
        log det H - log det P0. The bound is one of the exact evidence of the linearized model, without correction,
        whatever the structure of this posterior: it reads rows of the Jacobian. Without arguments it is that evidence.

        Parameters
        ----------
        examples : int, optional
            M: the examples are split at random into blocks of nearly equal size, at most M each (theorem 2). By
            default all are one block. Time grows as N M² R³, memory as (M R)².
        parameters : str, optional
            "layers": the parameters of each module are a block; "diagonal": each parameter is one (theorem 1, and
            theorem 3 together with `examples`). By default all are one block.
        outputs : str
            "one": each column of the curvature's root is a block of its own too. The root is the one of the
            eigenvectors of Λ_n, whose bound is the tightest of those tried. A block needs one backward pass.
        blocks : int, optional
            Use this many blocks, drawn at random without replacement, and scale their sum to all. The value is then
            an unbiased estimate of the bound, with a standard error. By default all blocks are used.
        seed : int
            Random seed of the partition and of the drawn blocks.
        gradient : bool
            Compute the derivative of the value in the log precisions as well.

        Returns
        -------
        EvidenceBound
            Its value in nats; a bound for certain where all blocks were used.

        Raises
        ------
        UnsupportedError
            If an option is unknown.
        MemoryBudgetError
            If the matrices of one block do not fit in memory.
        """
        require_flags(gradient=gradient)
        return bounds.evidence_bound(self._fitted, examples, parameters, outputs, blocks, seed, gradient)

    def evidence_curve(self, factors: Tensor) -> Tensor:
        """Evidence with all prior precisions multiplied by each of many factors, from one eigendecomposition.

        Parameters
        ----------
        factors : Tensor, (m,)
            Positive. With one precision of 1, these are the precisions themselves.

        Returns
        -------
        Tensor, (m,)
            In nats, without correction, at the trained weights; each further factor costs as many operations as
            there are eigenvalues. The prior keeps its precisions. For structure "iterative" the values are estimates
            from the probes of its evidence, without a standard error of their own.

        Raises
        ------
        HyperparameterError
            If a factor is not positive and finite.
        """
        remedy = "Pass the factors themselves, not their logarithms, as a tensor or a list."
        try:
            factors = torch.as_tensor(factors, dtype=self.dtype, device=self.network.device).reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise HyperparameterError("positive finite factors", repr(factors), remedy) from error
        if factors.numel() == 0 or not bool(((factors > 0) & torch.isfinite(factors)).all()):
            raise HyperparameterError("positive finite factors", f"{factors.tolist()}", remedy)
        with torch.no_grad():
            fit, log_prior = evidence.log_likelihood(self._fitted), evidence.log_prior(self._fitted)
            log_det = self.posterior_precision.log_det_curve(factors)
            return fit + factors * log_prior.to(fit) - 0.5 * log_det  # [I21] Eq. 8

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of P0^-½ JᵀΛJ P0^-½, zeros included or not; None if the structure does not list them."""
        return self.posterior_precision.spectrum()

    def log_det_terms(self) -> Sequence[LogDetTerm] | None:
        """Terms whose sum is log det B at any prior precisions, and with Λ multiplied by any number.

        None where a structure has no eigenvalues that belong to one prior group each.
        """
        return self.posterior_precision.log_det_terms()

    def local_log_det(self) -> Sequence[LogDetTerm] | None:
        """Terms of a smooth model of log det B near the present hyperparameters, if `log_det` is an estimate."""
        return self.posterior_precision.local_log_det()

    def log_scale(self) -> Tensor | None:
        """Return log c, if all that the likelihood's hyperparameters do to the curvature is to multiply it by c."""
        return self._fitted.log_scale()

    def fit_hyperparameters(
        self, method: str = "lbfgs", parameters: Sequence[str] | None = None, steps: int = 200,
        tolerance: float = 1e-6, bounds: tuple[float, float] = (1e-10, 1e10), **options: Any,
    ) -> HyperparameterHistory:
        """Maximize the evidence over hyperparameters at fixed weights; the posterior is left at the best found.

        Parameters
        ----------
        method : str
            "lbfgs" (bounded, on the logarithms), "adam", or "mackay", the fixed point δ_g = γ_g/‖θ_g - μ0‖² and, for
            a Gaussian with one noise variance, σ² = Σ‖y - f‖²/(NC - γ).
        parameters : sequence of str, optional
            Of "precision", "noise", "temperature", those that move. By default all there are but the temperature,
            which moves only if it is named. Where the network tells all training labels apart, the evidence has no
            maximum over temperatures, and a warning says so.
        steps : int
            At most.
        tolerance : float
            Converged where no gradient in a logarithm exceeds this share of 1 + abs(evidence), however the optimizer
            stopped; with "lbfgs" also where none exceeds the root of the floating type's precision.
        bounds : tuple of float
            Of every precision, variance and temperature; what ends on one is named in a warning.
        options
            `correction` (bool), `learning_rate` ("adam", default 0.1), `progress`.

        Returns
        -------
        HyperparameterHistory
            Evidence and hyperparameters of each step.

        Raises
        ------
        UnsupportedError
            If an option is unknown. Where the evidence is an estimate (structure "iterative"): with `correction`, and
            with "lbfgs" where log det B has no local model, for likelihood parameters that do more than scale the
            curvature, or for very many prior groups.
        """
        options.setdefault("progress", self._fitted.settings.progress)
        estimated = self.posterior_precision.log_det_bounds is not None
        if options.get("correction") and estimated:
            # the local models of an estimate have no correction, and a search would follow the noise of its gradient
            raise UnsupportedError("an evidence without a standard error, to maximize it with its correction",
                                   f"that of structure={self.structure!r}, which is an estimate",
                                   'Leave correction= out, or fit with structure="gp" or "full".')
        with torch.inference_mode(False):  # it needs gradients
            return maximize(self, method, parameters, steps, tolerance, bounds,
                            estimated=estimated, **options)

    def effective_parameters(self) -> Tensor:
        """γ_g, the number of parameters of each prior group that the data determine, (G,).

        For structure "iterative" an estimate without a standard error: that of a low rank, and of draws for the rest.
        """
        return self.posterior_precision.effective_parameters()


def tell_rounding(precision: PosteriorPrecision) -> None:
    """Warn where rounding moves the evidence."""
    rounding = 0.5 * precision.log_det_rounding
    if rounding > _ROUNDING:
        warn(f"rounding moves the evidence by about {rounding:.2g} nats: the prior variances of f are too large beside "
             f"the noise. {more_digits(precision.prior_precision.dtype)}")
