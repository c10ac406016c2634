"""Check of a prior: whether its precisions are near the evidence maximum, or too vague for ranking by evidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.posterior import Posterior
from ntk_laplace.structures.evidence import Evidence

_RATIO, _NATS, _SHARE = 2.0, 3.0, 0.1  # variance ratio; gap in nats beyond chance; gap over |evidence|


@dataclass(frozen=True)
class PriorCheck:
    """The possible increase of the evidence by better precisions, estimated at fixed weights."""

    gap: float  # the increase, in nats
    vague: bool  # whether the prior is much wider than the weights
    narrow: bool  # whether it is much tighter
    words: str  # a description of the finding; empty if it is neither


def check_prior(posterior: Posterior, used: Tensor, evidence: Evidence) -> PriorCheck:
    """Compare a prior with the trained weights; `used` is γ (G,), the effective parameters of each group.

    At fixed weights ∂ log q/∂ log δ_g = ½ (γ_g - δ_g‖θ_g - μ0‖²) ([I21] Eq. 8), zero at MacKay's fixed point, where the
    prior variance 1/δ_g is the mean square of the weights per effective parameter, ‖θ_g - μ0‖²/γ_g. With ρ_g the ratio
    of the two and γ_g fixed, the evidence at this point would be higher by the gap ½ γ_g (log ρ_g - 1 + 1/ρ_g). No
    precisions add more at these weights than ½ (Σ_g δ_g‖θ_g - μ0‖² + log det B), which bounds the sum of the gaps.

    Weights that are drawn from the prior have gaps too: δ_g‖θ_g - μ0‖² is then χ² with γ_g degrees of freedom. A prior
    is "vague" if the gaps of groups with ρ_g > 2 sum to a tenth of the evidence's absolute value, and exceed the mean
    and two standard deviations of such gaps by at least 3 nats; "narrow" is the same for ρ_g < 1/2.
    """
    prior, theta = posterior.prior, posterior.fitted.theta  # updated weights after a what-if
    precision = prior.precision.detach().double().flatten().cpu()
    used = used.detach().double().cpu().clamp_min(1e-12)
    energy = (precision * prior.group_distances(theta).detach().double().cpu()).clamp_min(1e-12 * used)
    ratio = used / energy  # ρ
    gaps = 0.5 * used * (ratio.log() - 1.0 + 1.0 / ratio)
    most = 0.5 * float(energy.sum() + evidence.log_det.detach())
    chance = _by_chance(used)
    found, words = {}, []
    for kind, far in (("vague", ratio > _RATIO), ("narrow", ratio < 1.0 / _RATIO)):
        gap = float(gaps[far].sum())
        gap = min(gap, most) if kind == "vague" else gap
        found[kind] = gap >= _NATS + chance and gap >= _SHARE * abs(float(evidence))
        if found[kind]:
            worst = int((gaps * far).argmax())
            many = "" if len(ratio) == 1 else f" in {int(far.sum())} of {len(ratio)} groups, most in "
            many += "" if len(ratio) == 1 else repr(prior.group_names[worst])
            times = ratio[worst] if kind == "vague" else 1.0 / ratio[worst]
            side = "wider" if kind == "vague" else "tighter"
            words.append(f"{kind}{many}: precision {precision[worst]:.3g}, a variance {times:.3g} times {side} than "
                         f"the weights'; better precisions would add about {gap:.3g} nats")
    return PriorCheck(float(gaps.sum()), found["vague"], found["narrow"], "; ".join(words))


def _by_chance(used: Tensor) -> float:
    """Mean and two standard deviations of Σ_g ½ (x_g - γ_g log(x_g/γ_g) - γ_g) for x_g ~ χ² with γ_g degrees."""
    half = 0.5 * used
    mean = half * (half.log() - torch.digamma(half))
    variance = half.square() * torch.polygamma(1, half) - half
    return float(mean.sum() + 2.0 * variance.sum().clamp_min(0.0).sqrt())
