"""Verbs of the evidence lower bound: what a Gaussian over the weights says of the evidence, whatever found it."""

from __future__ import annotations

import torch

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.structures import elbo
from ntk_laplace.structures.elbo import Divergence, LowerBound


class LowerBoundVerbs(Fitted):
    """The evidence lower bound of q = N(θ, H⁻¹), for every structure and likelihood."""

    def kl(self, other: Fitted | None = None) -> Divergence:
        """Divergence of this Gaussian from the prior, KL(q ‖ N(μ0, P0⁻¹)), or from another posterior, with its terms.

        Equal to ½ [(θ-μ0)ᵀP0(θ-μ0) + log det B - Σ γ_g], from the factorization that predictions use.

        Parameters
        ----------
        other : Posterior, optional
            Of the same parameters, at other weights or given other data, in any structure: KL(q ‖ N(θ', H'⁻¹)).

        Returns
        -------
        Divergence
            In nats; ``float(posterior.kl())`` is its value. It carries no gradient. Its standard error is 0 but for
            structures whose log determinant is an estimate.

        Raises
        ------
        DataError
            If the other posterior is one of other parameters.
        UnsupportedError
            If it is no posterior.
        """
        if other is None:
            return elbo.divergence(self._fitted)
        if not isinstance(other, Fitted):
            raise UnsupportedError("another posterior", f"a {type(other).__name__}", "Leave it out for the prior.")
        return elbo.divergence_between(self._fitted, other.fitted)

    def elbo(
        self, method: str = "glm", samples: int = 1000, *, x: InputData | None = None,
        generator: torch.Generator | None = None,
    ) -> LowerBound:
        """Evidence lower bound E_q log p(D given f) - KL(q ‖ prior) of this Gaussian ([T20] 2.14).

        Parameters
        ----------
        method : {"glm", "nn"}
            * "glm": f_n ~ N(f(x_n), V_nn), the outputs of the linearized network. A lower bound of the evidence of the
              linearized model, closed for Gaussian and Poisson likelihoods. For a Gaussian likelihood and Laplace's
              exact H it equals `log_marginal_likelihood`; for others that is no bound, and may be smaller.
            * "nn": f = f(x_n; θ) with weights θ drawn from q, in pairs θ* ± e. A lower bound of the evidence of the
              network itself. One forward pass over the training data for each draw.
        samples : int
            Number of draws, at least 4: of each f_n for "glm", where it samples, and of θ for "nn".
        x : optional
            For "nn": the training inputs in the order of the fit, of a checkpoint without data.
        generator : torch.Generator, optional
            Of the draws; by default they are always the same. For "nn" on the device of the network.

        Returns
        -------
        LowerBound
            In nats, summed over the data with their weights; ``float(posterior.elbo())`` is its value. Calibrations
            do not enter. After a what-if the data are the changed ones.

        Raises
        ------
        DataError
            For "nn", if the training inputs are needed and missing, or are not those of the fit.
        UnsupportedError
            If the method is unknown.
        HyperparameterError
            If `samples` is less than 4.
        MemoryBudgetError
            If the covariances of the outputs at the training points do not fit in memory.
        """
        return elbo.lower_bound(self._fitted, method, samples, x, generator)
