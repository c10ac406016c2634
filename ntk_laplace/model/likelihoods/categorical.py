"""Categorical: one of C classes; f are the logits, divided by a temperature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor, nn

from ntk_laplace.errors import HyperparameterError, NetworkError
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.labels import as_probabilities, is_observed, label_log_prob, label_mass, read_classes
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import CategoricalResponse, Response
from ntk_laplace.model.likelihoods.targets import MISSING_LABEL
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.scalars import scalar

_SHORT = 32  # classes: of fewer, vector instructions run along the examples, in a fifth of the time for 10


@register_likelihood
class Categorical(Likelihood):
    """Categorical likelihood of C classes, ``p = softmax(f / T)`` ([T20] Table 2.1).

    Targets are labels 0..C-1 of shape (N,). A label of -100 is missing, as in ``torch.nn.CrossEntropyLoss``, and
    contributes nothing to log p, its gradient and its curvature. Soft labels are floating rows of probabilities y,
    (N, C): ``log p = Σ_c y_c log p_c``. Their residual is ``(y - p) / T``; their curvature is the same as for hard
    labels. A row of -100 is a missing label.

    Parameters
    ----------
    temperature : float
        T; above 1 the class probabilities are more even. Stored as the hyperparameter `log_temperature`.

    Raises
    ------
    HyperparameterError
        If the temperature is not positive and finite.
    """

    classifies = True
    is_density = False

    def __init__(self, temperature: float | Tensor = 1.0) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(_checked(temperature).log())

    @property
    def temperature(self) -> Tensor:
        """T, a 0-d tensor; assign a number to change it in place."""
        return scalar(self.log_temperature.exp())

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        with torch.no_grad():
            self.log_temperature.copy_(_checked(value).log())

    def bind(self, num_examples: int, num_outputs: int) -> None:
        """Check that there are at least two classes."""
        if num_outputs < 2:
            raise NetworkError("a network with one output per class for Categorical(), at least 2",
                               f"{num_outputs} output", "Use Bernoulli() for two classes with one output.")

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check class labels 0..C-1, (N,), or soft labels, (N, C); -100 marks a missing label."""
        self.bind(num_examples, num_outputs)
        return read_classes(y, num_examples, num_outputs)

    def event_shape(self, num_outputs: int) -> Size:
        """Return (): a label is one number."""
        return Size()

    def rank(self, num_outputs: int) -> int:
        """C - 1, because adding a constant to all logits changes nothing."""
        return num_outputs - 1

    def identified(self, num_outputs: int) -> Tensor | None:
        """All directions but the constant one: columns 2 to C of the reflection that maps the first axis to it."""
        if type(self) is not Categorical:
            return None  # a subclass may override the density
        c = num_outputs
        v = torch.full((c,), c**-0.5, dtype=torch.float64, device="cpu")
        v[0] -= 1.0
        return (torch.eye(c, dtype=torch.float64, device="cpu") - 2.0 * torch.outer(v, v) / v.square().sum())[:, 1:]

    def observed(self, y: Tensor) -> Tensor | None:
        """Mask of observed labels, (N,); None if all are observed."""
        there = is_observed(y)
        return None if bool(there.all()) else there

    def hidden(self, y: Tensor, observed: Tensor) -> Tensor:
        """Labels with -100 where `observed` is false."""
        return y.masked_fill(~observed.view(-1, *[1] * (y.dim() - 1)), MISSING_LABEL)

    def in_form_of(self, y: Tensor, other: Tensor) -> Tensor:
        """Convert labels (N,) to rows of probabilities (N, C) if `other` has that format."""
        return as_probabilities(y, other.shape[1], other) if y.dim() < other.dim() else y

    def record(self) -> dict[str, Any]:
        """The temperature."""
        return {"temperature": self.temperature.detach()}

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log probability of each label, ``Σ_c y_c log p_c`` for soft labels, 0 for missing ones, (N,), nats."""
        return label_log_prob(self._log_probabilities(f), y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``(y - p) / T`` ([T20] 2.5), y one-hot for hard labels, (N, C), without cancellation where p is near 1."""
        if y.dim() == 2:
            p, y = self.mean(f), y.to(f).clamp_min(0)
            residual = y * complement(p) - (y.sum(-1, keepdim=True) - y) * p
            return residual / self._temperature(f)
        p = self._log_probabilities(f).exp() if type(self) is Categorical else self.mean(f)
        return self._label_residual(p, y, f)

    def log_prob_and_residual(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`log_prob` and `residual`, from one softmax."""
        if type(self) is not Categorical or y.dim() == 2:
            return super().log_prob_and_residual(f, y)  # a subclass may override either
        log_p = self._log_probabilities(f)
        return label_log_prob(log_p, y), self._label_residual(log_p.exp(), y, f)

    def _label_residual(self, p: Tensor, y: Tensor, f: Tensor) -> Tensor:
        label = y.long().clamp_min(0).expand(f.shape[:-1]).unsqueeze(0)
        others = (-p.movedim(-1, 0)).scatter(0, label, 0.0)  # classes first: p lies in memory like this
        residual = others.scatter(0, label, -others.sum(0, keepdim=True))
        return (residual * (is_observed(y).to(f) / self._temperature(f))).movedim(0, -1)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``(diag(p) - p pᵀ) / T²`` ([T20] Table 2.1), 0 where the label is missing, (N, C, C)."""
        hessian = self.response_covariance(f) / self._temperature(f) ** 2
        return hessian if y is None else hessian * label_mass(y, f).view(-1, 1, 1)

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """d = p/T² and u = p/T, zero for missing labels."""
        if type(self) is not Categorical:
            return None  # a subclass may override the curvature
        u = self.mean(f) / self._temperature(f)
        form = DiagonalForm.of(u / self._temperature(f), u)
        return form if y is None else form.times(label_mass(y, f))

    def averaged_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """``(diag(E p) - E p pᵀ) / T²`` over samples of f (S, n, C), without a matrix for each of them, (n, C, C)."""
        if type(self) is not Categorical:
            return super().averaged_curvature(f, y)  # a subclass may override the curvature
        p = torch.softmax(f / self._temperature(f), -1).transpose(0, 1)  # (n, S, C)
        hessian = torch.diag_embed(p.mean(1)) - p.mT @ p / len(f)
        return hessian / self._temperature(f) ** 2 * label_mass(y, f[0]).view(-1, 1, 1)

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """S (N, C, C-1) with ``S Sᵀ`` equal to `curvature`, by a Householder reflection of A = diag(√p) - p √pᵀ.

        Q = I - v vᵀ/(1 + √p_m) with v = √p + e_m maps A's null vector √p to -e_m, m being the most probable
        class. The other columns of A Q are, with s = √p,
        ``-s_m s_j`` in row m and ``δ_ij s_i - p_i s_j / (1 + s_m)`` in the others. It is 0 where the label is missing.
        """
        # examples are the last axis: C is small, and vector instructions run along the examples
        f = f.T.contiguous()
        # exp of half the logarithm, not √p: its gradient is finite where p underflows
        s = (0.5 * torch.log_softmax(f / self._temperature(f), 0)).exp()
        top = f.max(0, keepdim=True).indices
        s_top = s.gather(0, top)
        after = torch.arange(len(f) - 1, device=f.device).unsqueeze(1) >= top
        own = torch.where(after, s[1:], s[:-1]) / self._temperature(f)  # s_j of all classes except m
        own = own if y is None else own * label_mass(y, f).sqrt()
        # every entry of column j is a multiple of s_j; columns are contiguous, as backward passes read them
        shared = (s.square() / (1 + s_top)).scatter(0, top, s_top)
        columns = own.unsqueeze(1) * shared.neg()
        before = own.masked_fill(after, 0.0)
        columns.diagonal(0, 0, 1).add_(before.T)
        columns.diagonal(1, 0, 1).add_((own - before).T)
        return columns.permute(2, 1, 0)

    def left_inverse(self, f: Tensor) -> Tensor | None:
        """L (N, C-1, C), ``L S = I``: T (I + u uᵀ/(s_m (1 + s_m))) diag(1/u) on all classes except m, zero on m.

        u has the entries s_j = √p_j of these classes; their rows in `root` are diag(u) (I - u uᵀ/(1 + s_m)) / T. A
        class whose probability underflows carries no information: its row and column are zero.
        """
        if type(self) is not Categorical:
            return None  # a subclass may override the curvature
        s = (0.5 * self._log_probabilities(f)).exp()
        top = f.argmax(-1, keepdim=True)
        others = torch.arange(f.shape[-1] - 1, device=f.device)
        others = others + (others >= top)
        s_top, u = s.gather(-1, top), s.gather(-1, others)
        # squares of the reciprocals must stay finite
        over = torch.where(u > torch.finfo(u.dtype).tiny ** 0.45, u.reciprocal(), 0.0)
        inner = u.unsqueeze(-1) * u.unsqueeze(-2) / (s_top * (1 + s_top)).unsqueeze(-1)
        inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
        values = self._temperature(f) * inner * over.unsqueeze(-2) * (over > 0).unsqueeze(-1)
        columns = others.unsqueeze(-2).expand_as(values)
        return f.new_zeros(*values.shape[:-1], f.shape[-1]).scatter(-1, columns, values)

    def mean(self, f: Tensor) -> Tensor:
        """Class probabilities, ``softmax(f / T)``, (N, C)."""
        return torch.softmax(f / self._temperature(f), -1)

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """``(diag(p) - p pᵀ) / T``, (N, C, C)."""
        return self.response_covariance(f) / self._temperature(f)

    def response_covariance(self, f: Tensor) -> Tensor:
        """Covariance of the class indicators, ``diag(p) - p pᵀ``, (N, C, C)."""
        p = self.mean(f)
        outer = -p.unsqueeze(-1) * p.unsqueeze(-2)
        return outer.diagonal_scatter(p * complement(p), dim1=-2, dim2=-1)

    def response_variance(self, f: Tensor) -> Tensor:
        """Variance of the class indicators, ``p (1 - p)``, (N, C)."""
        p = self.mean(f)
        return p * complement(p)

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Return the class given f."""
        return CategoricalResponse(self, f / self._temperature(f), torch.zeros_like(f), self.response_variance(f))

    def average(self, f: Tensor, scalar: bool = False) -> Response:
        """Average the probabilities over samples of f (S, n, C)."""
        if type(self) is not Categorical:  # a subclass may override the probabilities
            return CategoricalResponse(self, self._average_logits(f), self.mean(f).var(0, correction=0),
                                       self.response_variance(f).mean(0))
        p, others = _with_complement(f / self._temperature(f))
        mean, aleatoric = p.mean(1), (p * others).mean(1)
        del others  # samples are large
        vanishes = bool((mean < torch.finfo(p.dtype).tiny ** 0.9).any())  # its logarithm does not
        logits = self._average_logits(f) if vanishes else mean.log().T
        p = p - p[:, :1]  # zero where all samples are equal, and so is their variance then
        epistemic = (p - p.mean(1, keepdim=True)).square().mean(1)
        return CategoricalResponse(self, logits, epistemic.T, aleatoric.T)

    def _average_logits(self, f: Tensor) -> Tensor:
        return self._log_probabilities(f).logsumexp(0) - math.log(f.shape[0])

    def probit(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """``softmax(κ f/T)`` with ``κ_c = (1 + π v_c/(8 T²))^-½``, v the variances of f.

        This is the usual multiclass extension. It ignores covariances between logits; ``glm`` includes them.
        """
        return self._probit(mean, covariance.diagonal(dim1=-2, dim2=-1))

    def probit_by_variance(self, mean: Tensor, variance: Tensor, scalar: bool = False) -> Response | None:
        """`probit`, which depends on the variances alone."""
        return self._probit(mean, variance) if type(self) is Categorical else None  # a subclass may override it

    def _probit(self, mean: Tensor, variance: Tensor) -> Response:
        temperature = self._temperature(mean)
        variance = variance / temperature**2
        kappa = (1 + math.pi / 8 * variance).rsqrt()
        logits = kappa * mean / temperature
        p = torch.softmax(logits, -1)
        # E[p_c (1 - p_c)] = T d E[p_c]/d mean_c = κ_c p_c (1 - p_c), which is the aleatoric part
        total = p * complement(p)
        return CategoricalResponse(self, logits, (1 - kappa) * total, kappa * total)

    def _temperature(self, f: Tensor) -> Tensor:
        return self.log_temperature.to(f).exp()

    def _log_probabilities(self, f: Tensor) -> Tensor:
        f = f / self._temperature(f)
        if f.dim() == 2 and f.shape[1] <= _SHORT:
            return torch.log_softmax(f.T.contiguous(), 0).T
        return torch.log_softmax(f, -1)


def complement(p: Tensor) -> Tensor:
    """``1 - p`` for probabilities that sum to one over the last dimension, exact where one is near 1."""
    top = p.argmax(-1, keepdim=True)
    others = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return (1 - p).scatter(-1, top, others)


def _with_complement(f: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(f) for f (S, n, C), and ``1 - p``, exact where p is near 1, (C, S, n).

    Classes come first, since vector instructions run along the examples.
    """
    f = f.movedim(-1, 0).contiguous()
    largest, top = f.max(0, keepdim=True)
    f = (f - largest).exp_()
    rest = f.scatter(0, top, 0.0).sum(0, keepdim=True)
    share = (1 + rest).reciprocal()
    p = f * share
    del f
    return p, (1 - p).scatter_(0, top, rest * share)


def _checked(temperature: Any) -> Tensor:
    expected, remedy = "one temperature that is positive and finite", "Pass a positive number, such as 1."
    try:
        value = to_tensor(temperature, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise HyperparameterError(expected, repr(temperature)[:80], remedy) from error
    if value.numel() != 1 or not (value.isfinite().all() and (value > 0).all()):
        raise HyperparameterError(expected, f"{temperature}", remedy)
    return value.reshape(())
