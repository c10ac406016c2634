"""Verbs of the Gaussian process f: the linearized network's outputs at new inputs, and draws of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.curvature.posterior_precision import checked_form, require_finite
from ntk_laplace.errors import is_choice, require_choice, require_flags, require_whole
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import gram
from ntk_laplace.model.data import InputData, RowBuffer, as_tensors, fill_buffer
from ntk_laplace.model.likelihoods.covariances import diagonal_blocks
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.posterior.differentiable import DifferentiableModel, wants_gradients
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_root
from ntk_laplace.runtime.sampling import normal, require_generator


class LatentVerbs(Fitted):
    """Outputs at new inputs, and their distribution.

    Inputs `x` may be a tensor, a tuple or dict of tensors, a DataLoader or a Dataset. Results have the order of the
    inputs, so a shuffling loader is refused. From a loader's batch the inputs in the format of the fit are used: the
    batch, the first element of a pair or a triple, or the fit's keys of a mapping. Inputs are processed in chunks of
    at most `batch_size` examples, by default 512, or fewer if they exceed 16 MiB; results are concatenated. Chunking
    changes only rounding. Gradients in inputs are refused (UnsupportedError), except by `latent` and `latent_moments`
    with ``differentiable=True``.
    """

    def outputs(self, x: InputData, *, batch_size: int | None = None) -> Tensor:
        """f at `x`, (n, C), without uncertainty: the network's, or the linearized network's after a what-if."""
        return self._outputs(self._chunks(x, batch_size))

    def latent(
        self, x: InputData, mean: str = "map", *, differentiable: bool = False
    ) -> MultitaskMultivariateNormal:
        """Joint posterior of f at `x` ([T20] 3.13).

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
            n inputs, evaluated jointly.
        mean : str
            "map": the network's outputs; after `remove`, `relabel`, `reweight` or `add` those of the linearized
            network at its new weights θ, f + J(θ-θ*). "posterior": those of the refitted linearized model,
            f + J(θ̄-θ*), with θ̄ its optimum, argmin of -Σ log p(y_n | f_n + J_n(θ-θ*)) + ½ (θ-μ0)ᵀP0(θ-μ0). With a
            Gaussian likelihood θ̄ = θ - H⁻¹g, with the structure's H. For others, damped Newton steps find the
            optimum, computed once; this requires structure "gp", "full" or "iterative" and curvature "ggn". The
            covariance does not change: V and the evidence use one factorization, with Λ at the outputs before the
            refit.
        differentiable : bool
            Give mean and covariance their gradients in `x`, tensors that require them. Rows of J are then written out,
            (n, C, P). The hyperparameters get no gradient.

        Returns
        -------
        gpytorch MultitaskMultivariateNormal
            Over (n, C), interleaved.

        Raises
        ------
        UnsupportedError
            If the structure or the curvature has no such optimum; if gradients in inputs are wanted without
            `differentiable`, or of a structure that estimates covariances by draws ("iterative").
        NumericalError
            If the optimum is not reached: the prior is too weak, or the likelihood is not log-concave.
        """
        require_flags(differentiable=differentiable)
        if differentiable and wants_gradients(x):
            f, jac, solved = self._with_graph(x, mean)
            joint = jac.flatten(0, 1) @ solved.flatten(0, 1).mT
            return MultitaskMultivariateNormal(f, DenseLinearOperator(0.5 * (joint + joint.mT)), interleaved=True)
        step, rows = self._step(mean), self._jointly(x)
        # a lazy covariance: torch would factorize a dense one immediately, and V may be singular
        covariance = DenseLinearOperator(self._covariance(rows))
        return MultitaskMultivariateNormal(_moved(rows, step), covariance, interleaved=True)

    def latent_moments(
        self, x: InputData, mean: str = "map", *, batch_size: int | None = None, per_position: bool = False,
        differentiable: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Mean (n, C) and covariance blocks (n, C, C) of f at `x`, without the joint covariance ([T20] 3.13).

        With ``per_position=True`` the L C outputs of `Everywhere` have a block at each position, and nothing of size
        (L C)² is computed: mean (n, L, C) and blocks (n, L, C, C). Other parameters are those of `latent`.
        """
        require_flags(per_position=per_position, differentiable=differentiable)
        positions = self.likelihood.num_positions(self.num_outputs)
        if differentiable and wants_gradients(x):
            f, jac, solved = self._with_graph(x, mean)
            if per_position:
                f, jac, solved = (part.unflatten(1, (positions, -1)) for part in (f, jac, solved))
            own = jac @ solved.mT
            return f, 0.5 * (own + own.mT)
        if positions > 1 and not per_position:
            self._fitted.model.require_memory(3 * self.num_outputs**2 * self.dtype.itemsize,
                                              f"the covariance of {self.num_outputs:,} outputs of one example",
                                              "Ask for latent_moments(x, per_position=True).")
        chunks = self._chunks(x, batch_size)
        means, blocks = RowBuffer(chunks.length or 0), RowBuffer(chunks.length or 0)
        for f, covariance in self._moments(chunks, mean, positions if per_position else 0):
            means.append(f.unflatten(1, (positions, -1)) if per_position else f)
            blocks.append(covariance)
        return means.rows, blocks.rows

    def prior_latent(self, x: InputData) -> MultitaskMultivariateNormal:
        """Joint prior of f at `x` under the linearized network: mean f + J(μ0-θ*), covariance K = J P0⁻¹ Jᵀ."""
        rows, model = self.jacobian(x), self._fitted.model
        with torch.no_grad():
            back = -self._fitted.from_prior_mean
        # lazy, as in `latent`: K is singular with more outputs than parameters
        covariance = DenseLinearOperator(gram(rows, model.prior.variances()))
        return MultitaskMultivariateNormal(rows.f + rows.jvp(self.network.unflatten(back)), covariance)

    def sample(self, count: int, x: InputData | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Draws from the posterior.

        Parameters
        ----------
        count : int
        x : optional
            Function samples, joint over these inputs, (count, n, C); without it weight samples, (count, P).
        """
        require_whole("count", count, 0, "Pass how many draws you want.")
        require_generator(generator)
        if x is None:
            self._require_draws(count, self.num_parameters, "weights")
            return self._weights(count, generator)
        rows = self._jointly(x)
        self._require_draws(count, rows.f.numel(), "outputs")
        root = symmetric_root(self._covariance(rows))
        noise = normal((root.shape[0], count), root, generator)
        return rows.f + (root @ noise).T.reshape(count, *rows.f.shape)

    # --- inside

    def _outputs(self, chunks: Chunks, mean: str = "map") -> Tensor:
        """Mean of f, (n, C)."""
        step = self._step(mean)
        if step is None and self._fitted.model.displacement is None:
            found = (self.network.without_grad(x, start).to(self.dtype) for start, x in chunks.inputs())
        else:
            found = (_moved(rows, step) for rows in chunks.rows())
        return fill_buffer(found, chunks.length or 0).rows

    def _with_graph(self, x: InputData, mean: str) -> tuple[Tensor, Tensor, Tensor]:
        """f (n, C), J and H⁻¹J (n, C, P) with their graph in `x`."""
        model = DifferentiableModel(self._fitted)
        f, jac = model.rows(as_tensors(x), None if mean == "map" else self._shift(mean))
        return f, jac, model.solve(jac)

    def _moments(self, chunks: Chunks, mean: str, positions: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Mean (m, C) of f at each chunk, and covariance blocks (m, C, C), or (m, L, C/L, C/L) of L positions."""
        step, own = self._step(mean), max(tuning.POSITION_BLOCK, self.num_outputs // positions) if positions else 0
        for rows in chunks.rows(3 * self.num_outputs * (own or self.num_outputs) * self.dtype.itemsize):
            precision = self.posterior_precision
            blocks = _by_position(precision, rows, positions) if positions else precision.covariance_blocks(rows)
            require_finite(blocks.diagonal(dim1=-2, dim2=-1))
            found = _moved(rows, step), blocks
            del rows  # before the next are computed
            yield found

    def _variances(self, chunks: Chunks, mean: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Mean (m, C) and variances (m, C) of f at each chunk."""
        step, many = self._step(mean), self.posterior_precision.many_variances
        for rows in chunks.rows(3 * self.num_outputs ** (1 if many else 2) * self.dtype.itemsize):
            found = _moved(rows, step), require_finite(self.posterior_precision.variances_of_outputs(rows))
            del rows  # before the next are computed
            yield found

    def _covariance(self, rows: Jacobian) -> Tensor:
        """V, joint over the rows, (nC, nC)."""
        joint = self.posterior_precision.covariance(rows)
        require_finite(joint.diagonal())
        return joint

    def _jointly(self, x: InputData) -> Jacobian:
        """Rows of J at all inputs, if their joint covariance fits in memory."""
        chunks = self._chunks(x)
        if chunks.length is not None:
            self._require_joint(chunks.length)
        rows = Jacobian.concatenate(list(chunks.rows()))
        self._require_joint(rows.num_examples)
        return rows

    def _require_joint(self, count: int) -> None:
        size = count * self.num_outputs
        # K** and the whitened cross-covariance whose square is subtracted from it
        needed = (size + max(self.num_examples * self.num_outputs, 1)) * size * self.dtype.itemsize
        self._fitted.model.require_memory(needed, f"the joint covariance of {size:,} outputs", "Ask for "
                                          "latent_moments(x), which never forms it, or for fewer inputs at a time.")

    def _require_draws(self, count: int, size: int, what: str) -> None:
        """Refuse draws that do not fit in memory with the noise they are made of, the least that a structure needs."""
        self._fitted.model.require_memory(2 * count * size * self.dtype.itemsize, f"{count:,} draws of {size:,} {what}",
                                          "Take fewer draws at a time.")

    def _step(self, mean: str) -> dict[str, Tensor] | None:
        """θ - θ̄ by parameter for ``mean="posterior"``; None for the network's outputs."""
        return None if is_choice(mean, ("map",)) else self.network.unflatten(self._shift(mean))

    def _shift(self, mean: str) -> Tensor:
        """θ - θ̄, (P,)."""
        require_choice(mean, ("posterior",), 'mean "map" or "posterior"')
        return self._refit_step()

    def _weights(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Weight samples, (count, P)."""
        precision, theta = self.posterior_precision, self._fitted.theta
        draws = precision.sample(count, generator)
        return theta + checked_form(precision, "sample", draws, (count, len(theta)), theta)


def _moved(rows: Jacobian, step: dict[str, Tensor] | None) -> Tensor:
    """f + J(θ̄ - θ*), (n, C)."""
    return rows.f if step is None else rows.f - rows.jvp(step)


def _by_position(precision: PosteriorPrecision, rows: Jacobian, positions: int) -> Tensor:
    """Covariance blocks of f at each of L positions, (m, L, C/L, C/L), without the covariances between them."""
    n, outputs = rows.f.shape
    own = outputs // positions
    group = max(1, tuning.POSITION_BLOCK // own)
    every, found = torch.eye(outputs, dtype=rows.f.dtype, device=rows.f.device), []
    for columns in every.split(group * own, 1):
        joint = precision.covariance_blocks(rows.weighted(columns.expand(n, *columns.shape)))
        found.append(diagonal_blocks(joint, own))
    return torch.cat(found, 1)
