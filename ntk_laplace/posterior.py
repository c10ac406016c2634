"""The posterior people hold: one set of verbs, whichever space its algebra lives in."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator.operators import DenseLinearOperator
from torch import Tensor
from torch.distributions import Distribution

from ntk_laplace import evidence
from ntk_laplace.curvature import Part, prior_variances
from ntk_laplace.data import Batches, Inputs, as_tensors, num_examples, to_device
from ntk_laplace.errors import DataError, HyperparameterError, UnsupportedError
from ntk_laplace.evidence import Curvature
from ntk_laplace.explain import Explanation, LeaveOneOut, explain, leave_one_out
from ntk_laplace.factors import Rows
from ntk_laplace.gram import gram
from ntk_laplace.hyperparameters import HyperparameterHistory, maximize
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.linalg import symmetric_root
from ntk_laplace.network import Network
from ntk_laplace.predictive import predictive, predictive_from_samples
from ntk_laplace.priors import GaussianPrior
from ntk_laplace.resources import require_memory
from ntk_laplace.structures import Structure, Trained, posterior_record, write

__all__ = ["Posterior"]

_DRAWS = 256 * 2**20  # bytes of weight samples held at a time


class Posterior:
    """Laplace-GGN posterior of a trained network.

    Made by `ntk_laplace.laplace`. The network's Jacobians at the training points are computed once; the prior's and
    likelihood's hyperparameters may change at any time and every later answer sees it.

    Attributes
    ----------
    network : Network
        Private copy of the network at its trained weights θ*.
    likelihood : Likelihood
    prior : GaussianPrior
    structure : str
        "gp", "full", "kfac", "ekfac", "inf" or "diag".
    """

    def __init__(self, trained: Trained, structure: Structure, reason: str = "") -> None:
        self._trained, self._structure = trained, structure
        self.reason = reason
        self._curvature: Curvature | None = None
        self._seen: tuple[Tensor, ...] = ()

    # --- what it is made of

    @property
    def network(self) -> Network:
        """The private copy of the network."""
        return self._trained.network

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; its hyperparameters may be changed in place."""
        return self._trained.likelihood

    @property
    def prior(self) -> GaussianPrior:
        """The prior; its precisions may be changed in place."""
        return self._trained.prior

    @property
    def structure(self) -> str:
        """Name of the structure."""
        return self._structure.name

    @property
    def fitted(self) -> Structure:
        """What was kept of the training data."""
        return self._structure

    @property
    def parts(self) -> list[Part]:
        """Which parameters share a factorization, and in which form; exact structures have none."""
        return list(getattr(self._structure, "parts", []))

    @property
    def f(self) -> Tensor:
        """Outputs at the training points, (N, C)."""
        return self._structure.points.f

    @property
    def targets(self) -> Tensor:
        """Training targets in the likelihood's canonical form."""
        return self._structure.points.targets

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
        """Floating type of the algebra."""
        return self._trained.factors.dtype

    @property
    def num_parameters(self) -> int:
        """P, the linearized parameters."""
        return self.network.num_parameters

    def __repr__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"Posterior(structure={self.structure!r}{why}, N={self.num_examples}, C={self.num_outputs}, "
            f"P={self.num_parameters:,}, likelihood={type(self.likelihood).__name__}, dtype={self.dtype})"
        )

    @property
    def curvature(self) -> Curvature:
        """The algebra at the present hyperparameters; made anew when one of them has moved."""
        now = self._trained.hyperparameters()
        same = len(now) == len(self._seen) and all(torch.equal(a, b) for a, b in zip(now, self._seen, strict=True))
        if self._curvature is None or not same:
            self._curvature = None  # the old factorization goes before the new one comes
            self._curvature = self._structure.curvature(self._trained)
            self._seen = now
        return self._curvature

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Posterior:
        """Move to another device, or do the algebra in another floating type; in place, as modules do.

        Parameters
        ----------
        device : optional
            The network's, the hyperparameters' and the stored rows' new place.
        dtype : torch.dtype, optional
            Of the algebra. The network itself, and the hyperparameters, keep theirs.

        Returns
        -------
        Posterior
            Itself. Nothing is computed again but the factorization.
        """
        trained = self._trained
        device = trained.network.device if device is None else torch.device(device)
        dtype = trained.factors.dtype if dtype is None else dtype
        network = trained.network.to(device)
        self._trained = replace(trained, network=network, factors=trained.factors.on(network, dtype))
        for module in (trained.prior, trained.likelihood):
            module.to(device)
        self._structure.to(device, dtype)
        self._curvature, self._seen = None, ()
        return self

    def save(self, path: str | os.PathLike[str], include_data: bool = False) -> None:
        """Write a checkpoint that `ntk_laplace.load` reads, and ``torch.load(path, weights_only=True)`` opens.

        Parameters
        ----------
        path : path
        include_data : bool
            Keep outputs and targets of the training points, so that the loaded posterior can do everything that needs
            no further pass over the data. ``structure="gp"`` is made of its training points' rows, inputs of the
            first layer among them, and can be saved in no other way.
        """
        write(posterior_record(self._trained, self._structure, self.reason, include_data), path)

    # --- more data

    def merge(self, other: Posterior) -> Posterior:
        """Posterior given this one's data and another's, of the same network and hyperparameters.

        Structured posteriors add up their sums, so that several processes can share the data; "ekfac" and "inf"
        need one eigenbasis, ``EKFAC(basis=...)``. Exact ones join their rows, or their JᵀΛJ.

        Raises
        ------
        UnsupportedError
            If the two do not belong together.
        """
        same = self.network.shapes == other.network.shapes and torch.equal(self.network.theta, other.network.theta)
        if not same or self.structure != other.structure or self._trained.root != other._trained.root:
            raise UnsupportedError("two posteriors of one trained network, structure and curvature",
                                   f"{self!r} and {other!r}", "Fit both with the same arguments but the data.")
        return Posterior(self._trained, self._structure.merged(self._trained, other._structure), self.reason)

    def condition(self, data: Any) -> Posterior:
        """Posterior given new data as well, at the same weights; what was computed for the old is kept.

        Parameters
        ----------
        data : DataLoader, Dataset, or (X, y)
        """
        network, settings = self.network, self._trained.settings
        batches = Batches(data, settings.batch_size, network.device, network.dtype)
        with torch.inference_mode(False):
            new = self._structure.another(self._trained, batches)
            return Posterior(self._trained, self._structure.merged(self._trained, new), self.reason)

    # --- evidence

    def log_joint(self) -> Tensor:
        """Σ log p(y_n given f_n) - ½ (θ*-μ0)ᵀP0(θ*-μ0), the evidence's first part; differentiable like it."""
        trained = self._trained
        return evidence.log_joint(self._structure.points, trained.likelihood, trained.prior, trained.theta)

    def log_det(self) -> Tensor:
        """log det B, from the factorization that stands; the evidence is `log_joint` less half of it."""
        trained, curvature = self._trained, self.curvature
        return evidence.log_det(
            self._structure.points, trained.likelihood, trained.prior, trained.root, curvature,
            lambda: self._structure.sensitivity(trained, curvature),
        )  # fmt: skip

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
            hyperparameters.
        """
        joint = self.log_joint()
        value = joint - 0.5 * self.log_det().to(joint)  # [I21] Eq. 8
        if not correction:
            return value
        trained, points = self._trained, self._structure.points
        step = self._structure.newton_step(trained, self.curvature, self._joint_gradient())
        added = evidence.correction(points, trained.likelihood, trained.prior, trained.theta, trained.root, step)
        return value + added.to(value)

    def _joint_gradient(self) -> Tensor:
        """g, the gradient of the negative log joint, (P,)."""
        trained, points = self._trained, self._structure.points
        with torch.no_grad():
            residual = trained.likelihood.residual(points.f, points.targets)
        return evidence.joint_gradient(self._structure.backproject(trained, residual), trained.prior, trained.theta)

    def _newton_step(self) -> Tensor:
        """z = H⁻¹g, (P,); the refitted linear model's weights are θ* - z."""
        return self.curvature.newton(self._joint_gradient())

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
            there are eigenvalues. The prior keeps its precisions.

        Raises
        ------
        HyperparameterError
            If a factor is not positive and finite.
        """
        factors = torch.as_tensor(factors, dtype=self.dtype, device=self.network.device).reshape(-1)
        if not bool(((factors > 0) & torch.isfinite(factors)).all()):
            raise HyperparameterError("positive finite factors", f"{factors.tolist()}",
                                      "Pass the factors themselves, not their logarithms.")
        trained, points = self._trained, self._structure.points
        with torch.no_grad():
            log_likelihood = points.log_likelihood(trained.likelihood)
            energy = trained.prior.energy(trained.theta).to(log_likelihood)
            log_det = self.curvature.log_dets(factors)
            return log_likelihood - factors * energy - 0.5 * log_det  # [I21] Eq. 8

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of P0^-½ JᵀΛJ P0^-½, zeros left out or not; None where a structure has no list of them."""
        spectrum = getattr(self.curvature, "spectrum", None)
        return None if spectrum is None else spectrum()

    def fit_hyperparameters(
        self, method: str = "lbfgs", parameters: Sequence[str] | None = None, steps: int = 200,
        tolerance: float = 1e-6, bounds: tuple[float, float] = (1e-10, 1e10), **options: Any,
    ) -> HyperparameterHistory:  # fmt: skip
        """Maximize the evidence over hyperparameters at fixed weights; the posterior is left at the best found.

        Parameters
        ----------
        method : str
            "lbfgs" (bounded, on the logarithms), "adam", or "mackay", the fixed point δ_g = γ_g/‖θ_g - μ0‖² and, for
            a Gaussian with one noise variance, σ² = Σ‖y - f‖²/(NC - γ).
        parameters : sequence of str, optional
            Of "precision", "noise", "temperature", those that move; all there are by default.
        steps : int
            At most.
        tolerance : float
            Converged once no gradient in a logarithm exceeds this share of 1 + abs(evidence).
        bounds : tuple of float
            Of every precision, variance and temperature; what ends on one is named in a warning.
        options
            `correction` (bool), `learning_rate` ("adam", default 0.1), `progress`.

        Returns
        -------
        HyperparameterHistory
            Evidence and hyperparameters of each step.
        """
        options.setdefault("progress", self._trained.settings.progress)
        return maximize(self, self._trained.theta, method, parameters, steps, tolerance, bounds, **options)

    def effective_parameters(self) -> Tensor:
        """γ_g, the number of parameters of each prior group that the data determine, (G,)."""
        return self.curvature.effective_parameters()

    # --- the posterior of f

    def latent(self, x: Inputs, mean: str = "map") -> MultitaskMultivariateNormal:
        """Joint posterior of f at `x` ([T20] 3.13).

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
            n inputs.
        mean : str
            "map": the network's own outputs. "posterior": those of the refitted linear model, f + J(θ̄-θ*) with
            θ̄ = θ* - H⁻¹g.

        Returns
        -------
        gpytorch MultitaskMultivariateNormal
            Over (n, C), interleaved.
        """
        rows = self._rows(x)
        # a lazy covariance: torch would factor a dense one at once, and V may be singular
        covariance = DenseLinearOperator(self._joint(rows))
        return MultitaskMultivariateNormal(self._mean(rows, mean), covariance, interleaved=True)

    def latent_moments(self, x: Inputs, mean: str = "map") -> tuple[Tensor, Tensor]:
        """Mean (n, C) and covariance blocks (n, C, C) of f at `x`, never the joint ([T20] 3.13)."""
        rows = self._rows(x)
        return self._mean(rows, mean), self.curvature.moments(rows)

    def prior_latent(self, x: Inputs) -> MultitaskMultivariateNormal:
        """Joint prior of f at `x` under the linearized network: mean f + J(μ0-θ*), covariance K = J P0⁻¹ Jᵀ."""
        rows, trained = self._rows(x), self._trained
        with torch.no_grad():
            back = trained.prior.flat_mean().to(trained.theta) - trained.theta
        covariance = gram(rows, None, prior_variances(trained.prior, self.network.shapes))
        return MultitaskMultivariateNormal(rows.f + rows.jvp(self.network.unflatten(back)), covariance)

    def predict(
        self, x: Inputs, method: str = "glm", samples: int = 1000, *, mean: str = "map",
        likelihood: Likelihood | None = None, generator: torch.Generator | None = None,
    ) -> Distribution:  # fmt: skip
        """Predictive distribution of responses at `x` ([T20] 3.14 to 3.16).

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        method : str
            "glm": average the response over the linearized model's outputs; closed form for a Gaussian likelihood.
            "blr": moments of the response in closed form. "nn": sample weights (weight space only). "probit": closed
            form approximation for classes. "map": plug in the network's outputs.
        samples : int
            Draws, where the method draws.
        mean : str
            As in `latent`.
        likelihood : Likelihood, optional
            Of the responses, if it is not the training one (other noise, say).
        generator : torch.Generator, optional
            Source of randomness; the global state otherwise.

        Returns
        -------
        torch Distribution
            One per input, with ``log_prob(y)`` of shape (n,), `mean`, `variance`, and `probs` for classes.
        """
        likelihood = self.likelihood.for_new_points() if likelihood is None else likelihood
        if method == "nn":
            draws = self._weight_outputs(samples, x, generator)
            return predictive_from_samples(likelihood, draws, self.network.scalar)
        if method == "map":
            f = self.network.without_grad(self._on_device(x)).to(self.dtype)
            covariance = f.new_zeros(*f.shape, f.shape[1])
        else:
            f, covariance = self.latent_moments(x, mean)
        with torch.no_grad():
            return predictive(likelihood, f, covariance, method, samples, generator, self.network.scalar)

    def sample(self, count: int, x: Inputs | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Draws from the posterior.

        Parameters
        ----------
        count : int
        x : optional
            Function samples at these inputs, (count, n, C); without it weight samples, (count, P), where the
            structure has them.
        """
        if x is None:
            return self._sample_weights(count, generator)
        rows = self._rows(x)
        root = symmetric_root(self._joint(rows))
        noise = torch.randn(root.shape[0], count, dtype=root.dtype, device=root.device, generator=generator)
        return rows.f + (root @ noise).T.reshape(count, *rows.f.shape)

    # --- explanation

    def explain(self, x: Inputs, k: int = 8, output: int | None = None) -> Explanation:
        """Which training points make the predictions at `x`.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        k : int
            Training points to show for and against.
        output : int, optional
            The output to explain; by default the predicted class (or the only output).

        Returns
        -------
        Explanation
        """
        self._require_function_space("explain")
        return explain(self._trained, self._structure, self.curvature, self._rows(x), k, output)

    def leave_one_out(self) -> LeaveOneOut:
        """What each training point's prediction would be without it, in closed form."""
        self._require_function_space("leave_one_out")
        return leave_one_out(self._trained, self._structure, self.curvature)

    # --- inside

    def _require_function_space(self, verb: str) -> None:
        if self.structure != "gp" or self._trained.root.curvature != "ggn":
            raise UnsupportedError(f'structure="gp" and curvature="ggn" for {verb}',
                                   f"structure={self.structure!r}, curvature={self._trained.root.curvature!r}",
                                   'Fit with ntk_laplace.laplace(..., structure="gp").')

    def _on_device(self, x: Inputs) -> Inputs:
        if num_examples(x) == 0:
            raise DataError("at least one input", "none", "Pass one or more inputs.")
        return to_device(x, self.network.device, self.network.dtype)

    def _rows(self, x: Inputs) -> Rows:
        x = as_tensors(x)
        return self._trained.factors.rows(self._on_device(x))

    def _joint(self, rows: Rows) -> Tensor:
        size = rows.num_examples * rows.num_seeds
        # K**, and the whitened cross-covariance whose square is subtracted from it
        needed = (size + max(self.num_examples * self.num_outputs, 1)) * size * rows.f.element_size()
        require_memory(needed, rows.f.device, f"the joint covariance of {size:,} outputs",
                       "Ask for latent_moments(x), which never forms it, or for fewer inputs at a time.",
                       self._trained.settings.memory_budget)
        return self.curvature.covariance(rows)

    def _mean(self, rows: Rows, mean: str) -> Tensor:
        if mean == "map":
            return rows.f
        if mean != "posterior":
            raise UnsupportedError('mean "map" or "posterior"', repr(mean), "Choose one of the two.")
        return rows.f - rows.jvp(self.network.unflatten(self._newton_step()))  # f + J(θ̄ - θ*)

    def _sample_weights(self, count: int, generator: torch.Generator | None) -> Tensor:
        draw: Callable[..., Tensor] | None = getattr(self.curvature, "sample_weights", None)
        if draw is None:
            raise UnsupportedError("a structure that has weight samples", f"structure={self.structure!r}",
                                   'Pass x for function samples, or fit in weight space ("full", "kfac", ...).')
        return draw(count, generator)

    def _weight_outputs(self, count: int, x: Inputs, generator: torch.Generator | None) -> Tensor:
        x, step = self._on_device(x), max(1, _DRAWS // (self.num_parameters * self.dtype.itemsize))
        outputs = []
        for start in range(0, count, step):
            weights = self._sample_weights(min(step, count - start), generator)
            outputs += [self.network.with_parameters(theta, x) for theta in weights]
        return torch.stack(outputs).to(self.dtype)

