"""Scores of unlabeled inputs: how much their labels would tell."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError, UnsupportedError, require_choice, require_whole
from ntk_laplace.model.data import InputData, Inputs, concatenate, num_examples, take
from ntk_laplace.model.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from ntk_laplace.model.likelihoods.covariances import covariance_root
from ntk_laplace.model.predictive import normal_points
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.posterior.prediction import likelihood_elsewhere
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures.what_if import drawn
from ntk_laplace.tools.active.pool import Pool, log_det_half, root_of

METHODS = ("information", "bald", "epig", "variance")
_MOST_VECTORS = 2**10  # of labels of one example


def score(
    posterior: Posterior, pool: InputData, method: str = "epig", *, targets: InputData | None = None,
    samples: int = 256, batch_size: int = 512, likelihood: Likelihood | None = None,
) -> Tensor:
    """How much a label at each input of a pool would tell, in nats; larger is better.

    Parameters
    ----------
    posterior : Posterior
        Any structure.
    pool : tensor, tuple or dict of tensors
        n unlabeled inputs.
    method : str
        * "epig": what a label tells about the labels at `targets`, on average over these, to second order in f
          (Bickford Smith et al. 2023).
        * "information": ½ log det(I + SᵀVS), what a label tells about the weights: exact for a Gaussian likelihood, to
          second order in f otherwise.
        * "bald": I(y; f) = H[E p(y given f)] - E H[p(y given f)], with the likelihood itself (Houlsby et al. 2011).
        * "variance": tr V, no nats. It prefers inputs far away, whose labels may tell nothing: where a class is
          certain, f varies without changing it.
    targets : tensor, tuple or dict of tensors, optional
        Inputs at which you want to predict, for "epig"; by default inputs of the pool, always the same: 100, or more if
        the covariances take at most 32 MiB.
    samples : int
        Points of f, for "bald" of classes. They are always the same.
    batch_size : int
        Inputs at a time.
    likelihood : Likelihood, optional
        Of the labels, if it differs from the training likelihood, as noise does that belongs to the training points.
        One noise for all inputs.

    Returns
    -------
    Tensor, (n,)

    Raises
    ------
    UnsupportedError
        If the method is unknown; the noise is one per point; or, for "bald", the likelihood is no Gaussian, Categorical
        or Bernoulli, alone or at every position (`Everywhere`), or an example's labels have more than 1,024 vectors.
    NumericalError
        If the rounding of the covariances is larger than the noise of the labels.
    MemoryBudgetError
        If the covariances with `targets` do not fit in memory.
    """
    require_options(posterior, method, targets, samples)
    with torch.inference_mode(False), torch.no_grad():
        own = of_labels(posterior, likelihood)
        there = target_pool(posterior, pool, targets, own) if method == "epig" else None
        parts = (Pool(posterior, rows, own) for rows in Chunks(posterior.fitted.model, pool, batch_size).rows())
        found = [part_score(part, method, samples) if there is None else about(part, there, part.crossed(there))
                 for part in parts]
        return torch.cat(found)


def of_labels(posterior: Posterior, given: Likelihood | None) -> Likelihood:
    """The likelihood of new labels, with one noise for all of them (UnsupportedError)."""
    own = likelihood_elsewhere(posterior.likelihood, given)
    if given is None:
        return own
    own = copy.deepcopy(own)
    try:
        own.bind(1, posterior.num_outputs)  # determines what the noise means
        return own.for_new_points()
    except (HyperparameterError, UnsupportedError) as cause:
        raise UnsupportedError("likelihood= with one noise for all inputs", f"a {type(own).__name__} with another",
                               "Pass one variance, or one for each output; score inputs of another noise on their own."
                               ) from cause


def target_pool(posterior: Posterior, pool: InputData, targets: InputData | None, likelihood: Likelihood) -> Pool:
    """Where "epig" predicts: the targets, or inputs of the pool where none are given."""
    found: InputData = _of_pool(posterior, pool, likelihood) if targets is None else targets
    return Pool(posterior, posterior.jacobian(found), likelihood)


def _of_pool(posterior: Posterior, pool: InputData, likelihood: Likelihood) -> Inputs:
    chunks, each = Chunks(posterior.fitted.model, pool), likelihood.rank(posterior.num_outputs) ** 2
    count = chunks.length or sum(num_examples(x) for _, x in chunks.inputs())
    most = min(count, max(tuning.TARGETS_OF_POOL, tuning.TARGET_COVARIANCES // (count * each)))
    index = drawn(most, count, 0).sort().values
    found = []
    for start, x in chunks.inputs():
        here = index[(index >= start) & (index < start + num_examples(x))]
        if len(here):
            found.append(take(x, here - start))
    return concatenate(found)


def part_score(pool: Pool, method: str, samples: int) -> Tensor:
    """Scores of a pool given the labels it has observed, (n,); of every method but "epig"."""
    if method == "variance":
        return pool.covariance.diagonal(dim1=1, dim2=2).sum(1)
    return log_det_half(pool.blocks()) if method == "information" else _of_label(pool, samples)


def about(pool: Pool, targets: Pool, both: Tensor) -> Tensor:
    """Mean over targets of I(y; y*) = -½ log det(I - (I + A)⁻¹ A_x* (I + A_**)⁻¹ A_*x), (n,), of A_x* `both`."""
    left, right = root_of(pool.blocks()), root_of(targets.blocks())
    found = []
    for part in panels(len(pool), both[0].numel(), tuning.AVERAGED_OUTPUTS):
        half = torch.linalg.solve_triangular(left[part].unsqueeze(1), both[part].transpose(1, 2), upper=False)
        half = torch.linalg.solve_triangular(right.unsqueeze(0), half.mT, upper=False)  # (n, m, R*, R)
        found.append(-log_det_half(-half.mT @ half).mean(1))  # canonical correlations are below 1
    return torch.cat(found)


def _of_label(pool: Pool, samples: int) -> Tensor:
    """H[E p] - E H[p], (n,), of labels; of Gaussian noise it is the information about the weights."""
    plain = pool.likelihood.counted_once()
    one = plain.at_position()
    if isinstance(one, Gaussian):
        return log_det_half(pool.blocks())
    if not isinstance(one, (Bernoulli, Categorical)):
        raise UnsupportedError('a Categorical, Bernoulli or Gaussian likelihood for "bald"', type(one).__name__,
                               'Use method="information".')
    points = normal_points(samples, pool.mean.shape[1]).to(pool.mean)
    parts = panels(len(pool), points.numel(), tuning.AVERAGED_OUTPUTS)
    return torch.cat([_of_points(plain, pool.mean[part], pool.covariance[part], points) for part in parts])


def _of_points(plain: Likelihood, mean: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
    """H[E p] - E H[p] of classes, (n,), from f at standard normal points (S, C)."""
    f = mean + torch.einsum("sk,nck->snc", points, covariance_root(covariance))
    p = plain.mean(f.flatten(0, 1)).unflatten(0, f.shape[:2])
    if isinstance(plain.at_position(), Categorical):
        p = p.unflatten(-1, (math.prod(plain.positions or (1,)), -1))
    else:
        p = torch.stack([1.0 - p, p], -1)
    given = _entropy(p).sum((-1, -2)).mean(0)  # labels are independent given f
    return _entropy(_of_label_vectors(p)).sum(-1) - given


def _of_label_vectors(probabilities: Tensor) -> Tensor:
    """E p(y given f) of every vector y of L labels of K classes, (n, K^L), from their probabilities (S, n, L, K)."""
    labels, classes = probabilities.shape[-2:]
    if classes**labels > max(_MOST_VECTORS, classes):
        most = int(math.log(_MOST_VECTORS) / math.log(classes))
        raise UnsupportedError(f'at most {most} labels of an example with {classes} classes, whose vectors "bald" '
                               "enumerates", f"{labels}", 'Use method="information".')
    total = probabilities.new_zeros(probabilities.shape[1], classes**labels)
    for p in probabilities:
        of_vectors = p.new_ones(len(p), 1)
        for label in p.unbind(1):
            of_vectors = (of_vectors.unsqueeze(2) * label.unsqueeze(1)).flatten(1)
        total += of_vectors
    return total / len(probabilities)


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p)


def require_options(posterior: Any, method: Any, targets: InputData | None, samples: Any) -> None:
    """Refuse what is no posterior, an unknown method, targets that it has no use for, and fewer than two samples."""
    if not isinstance(posterior, Posterior):
        remedy = "Fit one with ntk_laplace.laplace."
        if hasattr(posterior, "posterior_"):
            remedy = "Pass its .posterior_, and .network_inputs(X) as the pool."
        raise UnsupportedError("a Posterior", f"a {type(posterior).__name__}", remedy)
    require_whole("samples", samples, 2, "Leave it out for 256.")
    require_choice(method, METHODS, f"a method among {', '.join(METHODS)}", 'Use "information".')
    if method != "epig" and targets is not None:
        raise UnsupportedError('targets= for method="epig", and for no other', f"method={method!r}",
                               "Leave targets out.")
