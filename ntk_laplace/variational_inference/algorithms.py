"""What the algorithms evaluate in a step: where the network is linearized, and over what it is averaged.

All three maximize an evidence lower bound (ELBO) by natural gradients, whose expectations over q = N(μ, H⁻¹) are

    ĝ = E Σ_n J_nᵀ r_n,    Ĝ = E Σ_n J_nᵀ Λ_n J_n    ([T20] 4.6 to 4.12 with Table 4.2).

VOGGN evaluates J, r and Λ at weight samples: the ELBO of the network. LGVA linearizes the network at μ and averages r
and Λ over its outputs: the ELBO of the linearized model. OGGN evaluates all at μ: Newton steps of the log joint, whose
fixed point is the Laplace-GGN posterior. For a Gaussian likelihood LGVA and OGGN are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.expectations import Expectation
from ntk_laplace.model.likelihoods.differentiation import root_of_hessian
from ntk_laplace.structures import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.variational_inference.examples import Part
from ntk_laplace.variational_inference.states import DataTerms, VariationalState


class Algorithm(ABC):
    """Evaluates the shares of a step's examples in ĝ and Ĝ."""

    @property
    def rows_per_example(self) -> int:
        """Rows of Ĝ per example, over the rank R of its Λ."""
        return 1

    @property
    def weight_samples(self) -> int:
        """Samples of all weights in a step."""
        return 0

    @abstractmethod
    def terms(
        self, model: LinearizedModel, state: VariationalState, parts: Iterable[Part], generator: torch.Generator
    ) -> Iterator[DataTerms]:
        """The shares, batch by batch. They are computed from q at the beginning of the step."""


@dataclass(frozen=True)
class VOGGN(Algorithm):
    """Variational online GGN: one pass over the examples for each weight sample θ_s."""

    samples: int = 2  # S, in pairs μ ± e; of an odd number the last has no partner

    @property
    def rows_per_example(self) -> int:
        return self.samples

    @property
    def weight_samples(self) -> int:
        return self.samples

    def terms(
        self, model: LinearizedModel, state: VariationalState, parts: Iterable[Part], generator: torch.Generator
    ) -> Iterator[DataTerms]:
        """J, r and Λ at every sample."""
        parts = list(parts)
        for theta in state.mean + samples_of(state, self.samples, generator):
            yield from _at(model, parts, theta, self.samples)


@dataclass(frozen=True)
class OGGN(Algorithm):
    """Online GGN: everything at μ, without samples."""

    def terms(
        self, model: LinearizedModel, state: VariationalState, parts: Iterable[Part], generator: torch.Generator
    ) -> Iterator[DataTerms]:
        """J, r and Λ at μ."""
        yield from _at(model, parts, state.mean, 1)


@dataclass(frozen=True)
class LGVA(Algorithm):
    """Linearized Gaussian variational approximation, with expectations over f_n ~ N(f(x_n; μ), J_n H⁻¹ J_nᵀ)."""

    points: int = 256  # of f for each example, where the expectation is neither closed nor a sum over single outputs

    def terms(
        self, model: LinearizedModel, state: VariationalState, parts: Iterable[Part], generator: torch.Generator
    ) -> Iterator[DataTerms]:
        """J at μ, and expectations of r and Λ."""
        for part in parts:
            for rows, points, likelihood in part.linearized(model, state.mean):
                covariance = state.covariance_blocks(rows)
                found = Expectation(likelihood, self.points, generator).derivatives(rows.f, covariance, points.targets)
                yield _averaged(model, rows, points, *found, part.scale)


@dataclass(frozen=True)
class SampledLGVA(Algorithm):
    """LGVA with weight samples in the linearized network, as in [T20]: f_ns = f(x_n; μ) + J_n (θ_s - μ)."""

    samples: int = 2  # as for `VOGGN`, all of one pass

    @property
    def weight_samples(self) -> int:
        return self.samples

    def terms(
        self, model: LinearizedModel, state: VariationalState, parts: Iterable[Part], generator: torch.Generator
    ) -> Iterator[DataTerms]:
        """J at μ, and averages of r and Λ over the samples."""
        moves = model.network.shapes.parts(samples_of(state, self.samples, generator))
        for part in parts:
            for rows, points, likelihood in part.linearized(model, state.mean):
                outputs = rows.f + rows.products(moves).permute(2, 1, 0)  # (S, n, C)
                residual, curvature = (
                    torch.stack([function(f, points.targets).detach() for f in outputs]).mean(0)
                    for function in (likelihood.residual, likelihood.curvature)
                )
                yield _averaged(model, rows, points, residual, curvature, part.scale)


def samples_of(state: VariationalState, count: int, generator: torch.Generator) -> Tensor:
    """θ_s - μ of S weight samples, (S, P): pairs ±e, and one more for an odd S."""
    drawn = state.draw((count + 1) // 2, generator)
    return torch.stack([drawn, -drawn], 1).flatten(0, 1)[:count]


def _at(model: LinearizedModel, parts: Iterable[Part], theta: Tensor, samples: int) -> Iterator[DataTerms]:
    """Terms with J, r and Λ at θ, divided by the number of samples."""
    for part in parts:
        share = part.scale / samples
        for rows, points, likelihood in part.linearized(model, theta):
            residual = points.residual(likelihood).detach()
            root = points.root(model.curvature_type, likelihood).detach()
            gradient = rows.vjp(share * residual, model.network.shapes)
            yield DataTerms(gradient, rows.weighted(share**0.5 * root), share * points.observed_counts(likelihood))


def _averaged(
    model: LinearizedModel, rows: Jacobian, points: TrainingPoints, residual: Tensor, curvature: Tensor, share: float
) -> DataTerms:
    """Terms with averages of r (n, C) and Λ (n, C, C), which weights and `share` multiply."""
    counts = share * points.observed_counts(model.likelihood).to(rows.f)
    basis = model.likelihood.identified(curvature.shape[1])
    if basis is None:
        root = root_of_hessian(curvature)
    else:  # as many columns as the likelihood's own root
        basis = basis.to(curvature)
        root = basis @ root_of_hessian(basis.mT @ curvature @ basis)
    root = root * counts.sqrt().view(-1, 1, 1)
    return DataTerms(rows.vjp(counts.unsqueeze(1) * residual, model.network.shapes), rows.weighted(root), counts)
