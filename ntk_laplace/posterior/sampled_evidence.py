"""Verbs of evidences by sampling: what the network's evidence is, and what each approximation of it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Generator, Tensor

from ntk_laplace.errors import (
    DataError,
    UnsupportedError,
    require_choice,
    require_flags,
    require_number,
    require_whole,
    warn,
)
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.estimates import (
    AnnealedEvidence,
    ApproximationErrors,
    Chains,
    EvidenceEstimate,
    annealed_evidence,
    importance_evidence,
)
from ntk_laplace.posterior.evidence import EvidenceVerbs
from ntk_laplace.runtime.sampling import require_generator

_MODELS = ("nn", "glm")
_LONGER = "with more temperatures or chains"
_Estimate = TypeVar("_Estimate", bound=EvidenceEstimate)


class SampledEvidenceVerbs(EvidenceVerbs):
    """Evidences of the network and of the linearized model from weighted samples, whatever the structure."""

    def importance_evidence(
        self, samples: int = 2000, inflation: float = 1.2, model: str = "nn", *, x: InputData | None = None,
        generator: Generator | None = None,
    ) -> EvidenceEstimate:
        """Evidence by importance sampling from the posterior's Gaussian ([L22] Eq. 12, 13).

        The mean of p(D, θ)/q(θ) over θ ~ q = N(m, c H⁻¹), with the structure's H. It is right for any q, but its
        variance may be infinite: `khat` and `trusted` of the result say so, and a warning is issued.

        Parameters
        ----------
        samples : int
            S.
        inflation : float
            c. Narrow tails of q cost more than wide ones, so it is above 1 by default. With c alone wrong, the share
            (√(2c-1)/c)^P of the samples is effective: for many parameters it has to be closer to 1.
        model : str
            "nn": the network, and m the weights. "glm": the linearized model f + J(θ - θ*), and m one Newton step
            further. For a Gaussian likelihood, an exact structure and ``inflation=1`` all weights are then equal.
        x : optional
            The training inputs in the order of the fit, for "nn" of a checkpoint without data.
        generator : torch.Generator, optional
            By default it is seeded by torch's global state.

        Returns
        -------
        EvidenceEstimate
            Its value in nats: of the mode of the posterior that q knows.

        Raises
        ------
        HyperparameterError
            If `samples` is not positive, or `inflation` at most 1/2.
        UnsupportedError
            If the model is unknown, or several processes share the fit.
        DataError
            If the training inputs are needed and missing.
        MemoryBudgetError
            If the weights and outputs of one sample do not fit in memory.
        """
        require_whole("samples", samples, 1, "Leave it out for 2,000.")
        inflation = require_number(
            "a positive, finite inflation of the covariance, above 1/2: below that the weights of a Gaussian "
            "posterior have no variance", inflation, "Leave it out for 1.2.", above=0.5)
        self._require_sampling(model, generator)
        with torch.inference_mode(False), torch.no_grad():
            found = importance_evidence(self._fitted, samples, inflation, model, x, self._seeded(generator))
        return _told(found, f'by annealed_evidence(model="{model}")')

    def annealed_evidence(
        self, temperatures: int = 1000, chains: int = 64, start: str = "posterior", model: str = "nn",
        bounds: bool = False, *, leapfrog: int = 8, exact_draws: Tensor | None = None, x: InputData | None = None,
        generator: Generator | None = None,
    ) -> AnnealedEvidence:
        """Evidence by annealed importance sampling (Neal 2001), of all chains at once.

        Each chain goes from an exact draw of a Gaussian q0 to the model, through temperatures β of
        q0^(1-β) p(D, ·)^β on a sigmoid schedule, with one transition at each. Its weight is unbiased for p(D).

        Parameters
        ----------
        temperatures : int
            T, one more than transitions. With one, it is importance sampling from q0.
        chains : int
            S weights.
        start : str
            "posterior": q0 is the posterior's Gaussian, N(θ*, H⁻¹). Few temperatures are enough where it is close to
            the posterior, and the chains stay near its mode. "prior": the chains see all modes that they find.
        model : str
            "nn": the network, by Hamiltonian Monte Carlo of the weights; all chains share each pass, where
            `torch.func.vmap` takes the network. "glm": the linearized model, by elliptical slices of f at the training
            points (N C numbers, nothing to tune), from its own exact Gaussian; by Hamiltonian Monte Carlo of the
            weights if the matrix of f does not fit.
        bounds : bool
            Find an upper bound too, -E log w of chains back from exact draws of the posterior (Grosse, Ghahramani and
            Adams 2015): those of a Gaussian likelihood with "glm" and an exact structure, or `exact_draws`.
        leapfrog : int
            Steps of a Hamiltonian trajectory. Their size is adapted on a pilot run, and fixed in the run.
        exact_draws : Tensor, (m, P) or (P,), optional
            Weights drawn from the posterior, or the weights that made synthetic data, which are such a draw.
        x, generator : optional
            As in `importance_evidence`.

        Returns
        -------
        AnnealedEvidence
            In nats. `lower`, and `upper` with ``bounds=True``, bound the evidence in expectation.

        Raises
        ------
        HyperparameterError
            If `temperatures`, `chains` or `leapfrog` is not positive.
        UnsupportedError
            If an option is unknown, bounds are asked for without exact draws, or several processes share the fit.
        DataError
            If the training inputs are needed and missing, or `exact_draws` are not weights of this network.
        MemoryBudgetError
            If the chains do not fit in memory.
        """
        self._require_sampling(model, generator)
        plan = Chains(temperatures, chains, start, leapfrog)
        require_flags(bounds=bounds)
        if exact_draws is not None and not bounds:
            raise UnsupportedError("exact_draws with bounds=True, which starts chains from them", "bounds=False",
                                   "Pass bounds=True, or leave exact_draws out.")
        draws = None if exact_draws is None else self._draws_of(exact_draws)
        with torch.inference_mode(False), torch.no_grad():
            found = annealed_evidence(self._fitted, plan, model, x, self._seeded(generator), bool(bounds), draws)
        return _told(found, _LONGER)

    def approximation_errors(
        self, temperatures: int = 1000, chains: int = 64, start: str = "posterior", *, correction: bool = True,
        leapfrog: int = 8, x: InputData | None = None, generator: Generator | None = None,
    ) -> ApproximationErrors:
        """What Laplace's Gaussian and the linearization of the network cost the evidence, in nats.

        Three numbers: the evidence (Laplace), the evidence of the linearized model (annealed in f), and that of the
        network (annealed in θ). The first step is the error of the Gaussian, which includes that of an approximate
        structure; the second one is the error of the linearization.

        Parameters
        ----------
        temperatures, chains, leapfrog, x, generator : optional
            As in `annealed_evidence`.
        start : str
            Of the network's chains, as in `annealed_evidence`; those of the linearized model start at its Gaussian.
        correction : bool
            Of the evidence, as in `evidence`. With it a Gaussian likelihood and an exact structure have no first error.

        Returns
        -------
        ApproximationErrors
            With `plot` and `to_dataframe`.

        Raises
        ------
        HyperparameterError, UnsupportedError, DataError, MemoryBudgetError
            As `annealed_evidence`.
        """
        self._require_sampling("nn", generator)
        plan = Chains(temperatures, chains, start, leapfrog)
        generator = self._seeded(generator)
        with torch.inference_mode(False), torch.no_grad():
            first = self.evidence(correction)
            linearized = annealed_evidence(self._fitted, replace(plan, start="posterior"), "glm", x, generator)
            network = annealed_evidence(self._fitted, plan, "nn", x, generator)
        return ApproximationErrors(float(first), first.standard_error, _told(linearized, _LONGER),
                                   _told(network, _LONGER))

    # --- inside

    def _require_sampling(self, model: object, generator: object) -> None:
        require_choice(model, _MODELS, f"model among {', '.join(map(repr, _MODELS))}")
        require_generator(generator)
        self._fitted.settings.reducer.require_one("evidences by sampling", "Save the fit, and load it on one process.")

    def _seeded(self, generator: Generator | None) -> Generator:
        """The generator, or one that is seeded by the global state: a structure may repeat its draws without one."""
        if generator is not None:
            return generator
        return Generator(device=self.network.device).manual_seed(int(torch.randint(2**62, (), device="cpu")))

    def _draws_of(self, given: object) -> Tensor:
        theta, remedy = self._fitted.theta, "Pass weights in the order of posterior.network.shapes."
        expected = f"exact draws of the weights, (m, {len(theta)})"
        if not isinstance(given, Tensor):
            raise DataError(expected, f"{given!r}"[:80], remedy)
        draws = given.detach().to(theta)
        draws = draws.unsqueeze(0) if draws.ndim == 1 else draws
        if draws.ndim != 2 or draws.shape[1] != len(theta) or len(draws) == 0:
            raise DataError(expected, f"shape {tuple(given.shape)}", remedy)
        if not bool(torch.isfinite(draws).all()):
            raise DataError(expected, "some that are NaN or infinite", remedy)
        return draws


def _told(found: _Estimate, remedy: str) -> _Estimate:
    """The estimate, with a warning if it is not to be trusted."""
    if not found.trusted:
        warn(f"the {found}. Estimate it {remedy}")
    return found
