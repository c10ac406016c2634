"""Model selection methods of a posterior: scores from predictions of training data, in nats, larger is better."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError, require_choice, require_flags, require_whole
from ntk_laplace.posterior.conditional import rest_given
from ntk_laplace.posterior.estimates import conditional_estimate, warn_of
from ntk_laplace.posterior.evidence import EvidenceVerbs
from ntk_laplace.posterior.explain import leave_one_out_score, leave_some_out
from ntk_laplace.posterior.explanation import ExplanationVerbs
from ntk_laplace.posterior.other_data import OtherDataVerbs
from ntk_laplace.posterior.scores import LearningCurve, PrequentialEvidence, orders, require_beginning
from ntk_laplace.structures.what_if import Indices, drawn

_METHODS = ("auto", "evidence", "average", "samples")
_ORDERS = 10  # random orders of a closed-form conditional evidence


class SelectionVerbs(EvidenceVerbs, ExplanationVerbs, OtherDataVerbs):
    """Selection criteria on the scale of the evidence: sums over the data in nats, larger is better."""

    def conditional_log_marginal_likelihood(
        self, m: int, permutations: int | None = None, seed: int = 0, *, method: str = "auto",
        scale: float | None = None, temperature: str | None = None, samples: int = 1000, draws: int = 1000,
    ) -> Tensor:
        """Conditional evidence log p(other points given m points), averaged over orders ([L22] Eq. 5, 19).

        At fixed weights: the linearized model is conditioned, the network is not retrained. Its Jacobians depend on
        all points that it was trained on. To hide the others, train on the first m, fit to all, and pass
        ``permutations=0``.

        Parameters
        ----------
        m : int
            Points to condition on.
        permutations : int, optional
            Number of random orders. 0: the order of the data, conditioned on its first m points. By default 10, or 1
            for "average" and "samples", where each order needs a fit.
        seed : int
            Random seed of the orders, and of the draws of "samples".
        method : str
            "evidence": the joint density in closed form, log Z(all) - log Z(first m), the evidence with correction of
            all points minus that of m (exact structures). For a Gaussian likelihood this is Gaussian-process
            regression; others are expanded to second order at the network's outputs, as in the evidence. "average":
            [L22] appendix B, for every structure: the refitted linearized model of the m points predicts each other
            point under the likelihood itself, with its covariance scaled on a held-out seventeenth of the m points.
            The result is a sum of marginals, not the joint density. "samples": the joint density of the same model,
            averaged over draws of its weights ([L22] sections 7 and G); see `ntkl.selection.conditional_from_samples`.
            "auto": "evidence" if the structure supports it, else "average".
        scale : float, optional
            For "average" and "samples": factor of the latent covariance; no points are then held out.
        temperature : str, optional
            For these, and classes: "draws" fits a temperature of each draw of f to the held-out points, together with
            the scale (or at the scale that is given), as `calibrate` does; "average" one of the averaged probabilities,
            which the joint density does not have. By default there is none.
        samples : int
            For "average": number of points of f, if the predictive has no closed form.
        draws : int
            For "samples": number of draws of the weights, at least 2.

        Returns
        -------
        Tensor, ()
            In nats, summed over the points that are not conditioned on. It carries no gradient. For structure
            "iterative" and "evidence" it is a difference of two estimates, without a standard error of its own: at most
            about the sum of those of the two evidences.

        Raises
        ------
        DataError
            If m leaves no points to predict, or the data cannot be read again.
        UnsupportedError
            If the structure does not support the method, or the likelihood or the method no such temperature.
        HyperparameterError
            If the scale is negative or not finite, or there are fewer than 2 draws.
        """
        method = self._selection_method(method)
        if method == "samples":
            require_whole("draws", draws, 2, "Leave it out for 1,000.")
            if temperature == "average":
                raise UnsupportedError('temperature "draws" for the joint density', "'average'",
                                       'Use method="average", or a temperature of each draw.')
        require_beginning(m, self.num_examples, 0 if method == "evidence" else 2)
        if permutations is None:
            permutations = _ORDERS if method == "evidence" else 1
        chosen = orders(self.num_examples, permutations, seed)
        with torch.no_grad():
            if method != "evidence":
                scores = []
                for order in chosen:
                    fit, rest, calibration = rest_given(self._fitted, order, m, scale, temperature, samples)
                    scores.append(fit.scores(rest, [calibration], samples)[0] if method == "average" else
                                  _joint(fit.log_likelihood(rest, draws, calibration, int(seed))))
            elif self._fitted.structure.spec.keeps_jacobian:
                sequence = PrequentialEvidence.of(self._fitted)
                whole = sequence.evidence(torch.arange(self.num_examples, device="cpu"))
                scores = [whole - sequence.evidence(order[:m]) for order in chosen]
            else:
                whole = self.log_marginal_likelihood(correction=True)
                scores = [whole - self._evidence_of(order[:m]) for order in chosen]
            return torch.stack(scores).mean()

    @property
    def supports_conditional_evidence(self) -> bool:
        """Whether the conditional evidence has a closed form: of an exact structure whose subsets keep their labels."""
        spec = self._fitted.structure.spec  # without stored rows, subsets sample other labels
        return spec.exact and (spec.keeps_jacobian or self.curvature_type.kind != "mc")

    def learning_curve(self, permutations: int = 10, seed: int = 0) -> LearningCurve:
        """log p(D_n given D_1 ... D_n-1) for n = 1 ... N ([L22] Eq. 4), one factorization for each order.

        Parameters
        ----------
        permutations : int
            Number of random orders; 0 keeps the order of the data.
        seed : int
            Random seed of the orders.

        Returns
        -------
        LearningCurve
            Its terms sum to the evidence with correction; from term m + 1 on they sum to the conditional evidence.

        Raises
        ------
        UnsupportedError
            If the structure is not "gp".
        """
        if not self._fitted.structure.spec.keeps_jacobian:
            raise UnsupportedError('structure="gp" for a learning curve', f"structure={self.structure!r}",
                                   "Ask for conditional_log_marginal_likelihood at a few m, or fit in function space.")
        sequence = PrequentialEvidence.of(self._fitted)
        return LearningCurve(torch.stack([
            sequence.increments(order) for order in orders(self.num_examples, permutations, seed)
        ]))

    def loo_log_density(self, points: Indices | None = None, *, seed: int = 0) -> Tensor:
        """Σ log p(y_n given all other points), from the closed form of `leave_one_out`.

        Parameters
        ----------
        points, seed : optional
            As in `leave_one_out`: the sum over these points, scaled to all. Any structure supports it;
            ``leave_one_out(points).standard_error`` times N is its standard error, N w under `Tempered`, with N the
            sum of the example weights; points without any target are not counted.

        Returns
        -------
        Tensor, ()
            In nats: N-fold cross-validation at fixed weights. A warning is issued if it is not reliable, as in
            `leave_one_out`.

        Raises
        ------
        UnsupportedError
            If the structure is not "gp", "full" or "iterative" and `points` are not given, or the curvature is not the
            GGN: removal from an approximate curvature ranks points (`leave_one_out`) but is not a score.
        """
        if points is None:
            score, found = leave_one_out_score(self._fitted)
        else:
            found = leave_some_out(self._fitted, drawn(points, self.num_examples, seed))
            total = self._fitted.points.total(self.likelihood)
            if not bool((found.counts > 0).any()):
                raise DataError("points that count, for a score", "none with a target and a positive weight",
                                "Leave out others.")
            score = found.counts @ found.log_density * (self.likelihood.weight * total / found.counts.sum())
        self._warn_of(found)
        return score

    def bic(self, effective: bool = False) -> Tensor:
        """Bayesian information criterion as a log score, Σ log p(y_n given f_n) - ½ P log N.

        The textbook BIC is -2 times this. It approximates the evidence under a unit-information prior for N much
        larger than P, which rarely holds for a network. N is the sum of example weights, times w under
        ``Tempered(likelihood, w)``; points without any target are not counted.

        Parameters
        ----------
        effective : bool
            Count the effective parameters γ instead of all P.

        Returns
        -------
        Tensor, ()
            In nats.
        """
        return self._penalized(effective, 0.5 * math.log(self._fitted.total))

    def aic(self, effective: bool = False) -> Tensor:
        """Akaike's information criterion as a log score, Σ log p(y_n given f_n) - P; the textbook AIC is -2 times it.

        Parameters
        ----------
        effective : bool
            Count the effective parameters γ instead of all P.

        Returns
        -------
        Tensor, ()
            In nats: an estimate of the log likelihood of N new points.
        """
        return self._penalized(effective, 1.0)

    # --- inside

    def _penalized(self, effective: bool, price: float) -> Tensor:
        require_flags(effective=effective)
        with torch.no_grad():
            fit = self.log_likelihood()
            count = self.effective_parameters().sum().to(fit) if effective else self.num_parameters
            return fit - price * count

    def _evidence_of(self, index: Tensor) -> Tensor:
        """Evidence with correction of some of the points: 0 of none, and of points without a target or a weight."""
        if not bool(self._fitted.points.observed_counts(self.likelihood)[index].any()):
            return torch.zeros((), dtype=self.dtype, device=self.network.device)
        return self.subset(index).log_marginal_likelihood(correction=True)

    def _selection_method(self, method: str) -> str:
        require_choice(method, _METHODS, f"a method among {', '.join(_METHODS)}")
        exact = self.supports_conditional_evidence
        if method == "evidence" and not exact:
            raise UnsupportedError(
                'structure="gp", or "full" or "iterative" with curvature "ggn" or "ef", for method="evidence"',
                f"structure={self.structure!r}, curvature={self.curvature_type.kind!r}",
                'Use method="average", or fit one of these.',
            )
        return ("evidence" if exact else "average") if method == "auto" else method


def _joint(log_likelihood: Tensor) -> Tensor:
    """The joint density from (draws, n), nats, with a warning at the caller's line of the verb."""
    found = conditional_estimate(log_likelihood.unsqueeze(1), "joint")
    return torch.tensor(float(warn_of(found)), dtype=torch.float64, device="cpu")
