"""A few training examples, from which forecasts estimate the spectrum of SᵀKS and the log joint of all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import gram
from ntk_laplace.model.data import Inputs, num_examples, take
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.forecast import Problem
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints


@dataclass(frozen=True)
class ProblemSample:
    """Examples of a first batch, drawn at random, always the same.

    Attributes
    ----------
    model : LinearizedModel
    count, processes : int
        N, and processes that share the fit.
    x : tensor, tuple or dict of tensors
    root : Tensor, (n, C, R)
        S of these examples.
    log_joint : float
        An estimate of that of all examples, nats.
    """

    model: LinearizedModel
    count: int
    processes: int
    x: Inputs
    root: Tensor
    log_joint: float

    @classmethod
    def of(cls, model: LinearizedModel, x: Inputs, y: Tensor, count: int, processes: int = 1) -> Self:
        """From a batch of `count` examples in all."""
        outputs = model.network.num_outputs
        columns = model.curvature_type.columns(model.likelihood, outputs)
        each = Problem(model, count, model.jacobian_pass.rows(take(x, slice(0, 2)))).row_bytes(1)
        # Λ, S and SᵀJ of one example; what their computation takes beside them
        each += 4 * outputs * columns * model.jacobian_pass.dtype.itemsize
        most = max(2, min(tuning.PROBED_EXAMPLES, tuning.WORKING_SET_BYTES // each, num_examples(x)))
        index = torch.randperm(num_examples(x), generator=torch.Generator().manual_seed(0), device="cpu")[:most]
        x, likelihood = take(x, index), model.likelihood.at(index)
        f = model.network.without_grad(x).to(model.jacobian_pass.dtype)
        targets = likelihood.targets(y[index.to(y.device)], len(index), outputs)
        points = TrainingPoints(f, targets.to(f.device))
        with torch.no_grad():
            root = points.root(model.curvature_type, likelihood).detach()
            joint = count / len(index) * points.log_likelihood(likelihood) - model.prior.energy(model.theta)
        return cls(model, count, processes, x, root, float(joint))

    def weighted(self, rows: Jacobian) -> Jacobian:
        """Rows of SᵀJ of the first examples, from rows of J of all."""
        few = min(len(self.root), max(2, tuning.PROBED_ROWS // self.root.shape[2]))
        return rows.subset(slice(0, few)).weighted(self.root[:few])

    def problem(self, model: LinearizedModel, rows: Jacobian) -> Problem:
        """With the rows of J of the sample, of a model's Jacobian pass, and the spectrum that they show."""
        weighted = self.weighted(rows)
        values = torch.linalg.eigvalsh(gram(weighted, model.prior.variances())).clamp_min(0.0).flip(0)
        spectrum = values * (self.count / weighted.num_examples)
        return Problem(model, self.count, rows, self.processes, spectrum, self.log_joint, self.root)
