"""Compression: a posterior whose precision is a low rank, (P, r) numbers, with the error it costs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.errors import UnsupportedError, require_whole
from ntk_laplace.jacobian import Jacobian, placed
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import CurvatureProducts, Nystrom, compressed


class CompressionVerbs(Fitted):
    """A smaller posterior with the same predictions, nearly."""

    def compress(self, rank: int, rounds: int = 2, seed: int = 0) -> Self:
        """Posterior with the precision P0 + FᵀF, F (rank, P), structure "nystrom".

        It needs no rows of the training points, and ``save(path, include_data=False)`` writes (P, rank) numbers. As FᵀF
        is at most JᵀΛJ, no variance is below the exact one, and neither is the evidence. Three times the
        effective parameters as rank give variances and evidence within about half a percent. `predictive` is kept.

        Parameters
        ----------
        rank : int
            Above the smaller of P and N R there is nothing more to keep.
        rounds : int
            Rounds of subspace iteration, each 1.25 products with JᵀΛJ per vector of the rank.
        seed : int
            Of the random test vectors.

        Returns
        -------
        Posterior
            Its `reason` says what it costs: the evidence in nats, and the variances at up to 100 training points.

        Raises
        ------
        UnsupportedError
            If the structure is an approximation.
        HyperparameterError
            If `rank` is not a positive whole number.
        """
        require_whole("rank", rank, 1, "Pass for instance three times effective_parameters().sum().")
        fitted, spec = self._fitted, Nystrom(rank=rank, rounds=rounds, seed=seed)
        if not fitted.structure.spec.exact:
            raise UnsupportedError("an exact structure to compress", f"structure={self.structure!r}",
                                   'Fit with structure="iterative", "gp" or "full".')
        with torch.no_grad():
            root, reducer = fitted.root(), fitted.settings.reducer
            first, last = (fitted.num_examples * edge // reducer.world_size
                           for edge in (reducer.rank, reducer.rank + 1))

            def rows(_: str) -> Iterator[tuple[Jacobian, Tensor]]:
                for here, part in placed(fitted.rows_at(torch.arange(first, last, device="cpu"))):
                    yield part, root[first:last][here]

            curvature = CurvatureProducts(fitted.model, rows, lambda values: values[first:last], fitted.num_examples,
                                          root.shape[2], reducer.concat)
            found = fitted.derived(compressed(spec, fitted.structure, curvature))
            cost = 0.5 * float(self.posterior_precision.log_det() - found.precision.log_det())
            measured = min(tuning.MEASURED_POINTS, fitted.num_examples)
            some = torch.linspace(0, fitted.num_examples - 1, measured, device="cpu").long()
            before, after = (
                torch.cat([one.covariance_blocks(part) for part in fitted.rows_at(some)]).diagonal(dim1=1, dim2=2)
                for one in (self.posterior_precision, found.precision)
            )
            excess = 100.0 * (after / before - 1.0)
        reason = (f"rank {min(rank, curvature.rank):,} of structure {self.structure!r}: the evidence is {cost:.3g} "
                  f"nats too large, variances at {len(some)} training points by {float(excess.median()):.2g} % "
                  f"(median) to {float(excess.max()):.2g} %")
        return type(self)(found, reason, self.predictive)
