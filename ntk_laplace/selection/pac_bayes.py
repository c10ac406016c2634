"""PAC-Bayes bounds on numbers: the expected loss of a random model, from its mean on n points and a divergence.

For any q, chosen after the data were seen, and a prior fixed before, each holds with probability 1 - δ over n
independent points. The loss is in [0, 1], but for `germain`.
"""

from __future__ import annotations

import math

_HALVINGS = 100  # of an interval in [0, 1]: down to neighboring numbers


def binary_divergence(q: float, p: float) -> float:
    """kl(q ‖ p) of two Bernoulli distributions, nats: q log q/p + (1 - q) log (1 - q)/(1 - p)."""
    ones = 0.0 if q == 0.0 else math.inf if p == 0.0 else q * math.log(q / p)
    zeros = 0.0 if q == 1.0 else math.inf if p == 1.0 else (1.0 - q) * (math.log1p(-q) - math.log1p(-p))
    return max(0.0, ones + zeros)


def inverse_divergence(q: float, most: float) -> float:
    """The largest p with kl(q ‖ p) at most `most`; rounded up, so that a bound stays one."""
    low, high = q, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if binary_divergence(q, middle) <= most else (low, middle)
    return high


def mcallester(risk: float, kl: float, n: int, delta: float) -> float:
    """R + √((KL + log(n/δ) + 2)/(2n - 1)) (McAllester 1999; [L22] Eq. 15)."""
    return risk + math.sqrt((kl + math.log(n / delta) + 2.0) / (2 * n - 1))


def seeger(risk: float, kl: float, n: int, delta: float) -> float:
    """kl⁻¹(R, (KL + log(2√n/δ))/n) (Seeger 2002, Maurer 2004)."""
    return inverse_divergence(risk, (kl + math.log(2.0 * math.sqrt(n) / delta)) / n)


def catoni(risk: float, kl: float, n: int, delta: float, beta: float) -> float:
    """(1 - exp(-βR - (KL + log(1/δ))/n))/(1 - exp(-β)) (Catoni 2007), with a β > 0 that was fixed before the data."""
    return math.expm1(-beta * risk - (kl - math.log(delta)) / n) / math.expm1(-beta)


def germain(log_evidence: float, n: int, delta: float, low: float, high: float) -> float:
    """a + (b - a)/(1 - e^(a-b)) [1 - e^a (Z δ)^(1/n)], nats per point (Germain et al. 2016; [L22] Eq. 17).

    For q the Bayes posterior of a likelihood with -log p(y given θ) in [a, b], Z its evidence: Catoni's bound at
    β = b - a. For any other q, log Z is replaced by its lower bound -nR - KL. With the n points that follow m others,
    and Z the evidence of these given the m, it is [L22] Eq. 18. The evidence is log Z, `low` and `high` are a and b.
    """
    seen = low + (log_evidence + math.log(delta)) / n
    return low + (high - low) * math.expm1(seen) / math.expm1(low - high)
