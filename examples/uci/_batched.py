"""[I21] algorithm 1 for many networks with one hidden layer at once: one program trains every split and structure.

All networks of a batch have the same shapes: inputs (M, N, d), H ReLU units, C outputs. Their output Hessians have
rank one, Λ_n = s_n s_nᵀ, so that the evidence is algebra on (N, N) or (P, P) matrices, batched over the M networks.
Its gradients are written out: γ_g in each log precision, and what scales with the noise. Nothing of the library takes
part; the script compares the two at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["STRUCTURES", "Networks", "Problem", "Protocol", "evidence", "train_with_evidence"]

HIDDEN = 50
STRUCTURES = ("ggn", "ef", "kfac", "diag-ggn", "diag-ef")


@dataclass(frozen=True)
class Problem:
    """Standardised training data of several splits, (S, N, d) and (S, N); a regression, or two classes."""

    x: Tensor
    y: Tensor
    classes: bool

    @property
    def outputs(self) -> int:
        """C."""
        return 2 if self.classes else 1


@dataclass(frozen=True)
class Protocol:
    """What [I21] section 4.2 says, and what it leaves open.

    Attributes
    ----------
    epochs : int
        With an evidence and a hyperparameter step after each: F = K = 1, B = 0.
    rate : float
        Adam's, for weights.
    minibatch : int or None
        Examples in a step of the weights; None for all.
    squared_error_fisher : float or None
        The empirical Fisher of a squared error, r²JᵀJ, times this over σ², as some implementations have it: 1 for r²/2,
        2 for half of the products of the gradients of r². None: gradients of the log likelihood, r/σ², make it
        r²JᵀJ/σ⁴.
    hyper_rate : float or None
        Adam's for hyperparameters; `rate` if None.
    noise_speed : float
        Times the rate, for log σ². Adam on log σ moves log σ² twice as fast.
    last_rate : float or None
        The weights' rate in the last step, reached from `rate` by equal factors; `rate` throughout if None.
    groups : tuple of int
        The precision that each of the four tensors has; equal numbers share one.
    single : bool
        In float32.
    mean_loss : bool
        In regression the loss of the weights is 2σ²/N times the negative log joint: the mean squared error and what
        that makes of the prior. Adam remembers gradients of some hundred steps, and σ² moves meanwhile.
    """

    epochs: int
    rate: float = 1e-3
    minibatch: int | None = None
    squared_error_fisher: float | None = None
    hyper_rate: float | None = None
    noise_speed: float = 1.0
    last_rate: float | None = None
    groups: tuple[int, ...] = (0, 1, 2, 3)
    single: bool = False
    mean_loss: bool = False


class Networks(nn.Module):
    """M networks d - 50 - C; the tensors of each are a prior group each, in the order of their names."""

    def __init__(self, problem: Problem, seeds: int) -> None:
        super().__init__()
        d, c = problem.x.shape[2], problem.outputs
        made = []
        for seed in range(seeds):  # the same initial weights for every structure of a split
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                made.append([nn.Linear(d, HIDDEN), nn.Linear(HIDDEN, c)])
        copies = len(problem.x) // seeds
        for number, layer in enumerate(("first", "second")):
            for kind in ("weight", "bias"):
                stacked = torch.stack([getattr(pair[number], kind).detach().double() for pair in made])
                stacked = stacked.repeat(copies, *[1] * (stacked.ndim - 1))
                self.register_parameter(f"{layer}_{kind}", nn.Parameter(stacked))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (M, N, C) and hidden units (M, N, H)."""
        hidden = F.relu(x @ self.first_weight.mT + self.first_bias[:, None])
        return hidden @ self.second_weight.mT + self.second_bias[:, None], hidden

    def squares(self) -> Tensor:
        """‖θ_g‖² of each group, (M, 4)."""
        return torch.stack([p.square().flatten(1).sum(1) for p in self.parameters()], 1)

    def sizes(self) -> Tensor:
        """Number of entries of each group, (4,)."""
        return torch.tensor([p[0].numel() for p in self.parameters()], dtype=torch.float64)

    def one(self, index: int) -> nn.Module:
        """One of them by itself."""
        d, c = self.first_weight.shape[2], self.second_bias.shape[1]
        network = nn.Sequential(nn.Linear(d, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, c)).double()
        with torch.no_grad():
            for own, all_of_them in zip(network.parameters(), self.parameters(), strict=True):
                own.copy_(all_of_them[index])
        return network.eval()


def log_likelihood(problem: Problem, f: Tensor, log_noise: Tensor) -> Tensor:
    """Σ_n log p(y_n | f_n), (M,)."""
    if problem.classes:
        return -F.cross_entropy(f.flatten(0, 1), problem.y.flatten(), reduction="none").view(f.shape[:2]).sum(1)
    residual = (problem.y - f[..., 0]).square().sum(1)
    count = problem.y.shape[1]
    return -0.5 * (residual / log_noise.exp() + count * (log_noise + torch.log(torch.tensor(2 * torch.pi))))


def root(
    problem: Problem, f: Tensor, log_noise: Tensor, empirical: bool, squared_error: float | None = None
) -> Tensor:
    """s_n with Λ_n = s_n s_nᵀ, (M, N, C): of the GGN, or the gradients' own outer product, the empirical Fisher."""
    if problem.classes:
        p = f.softmax(-1)
        if empirical:
            return F.one_hot(problem.y, 2).to(f) - p
        return p.prod(-1, keepdim=True).sqrt() * f.new_tensor([1.0, -1.0])
    noise = log_noise.exp()[:, None, None]
    if not empirical:
        return torch.ones_like(f) / noise.sqrt()
    residual = problem.y[..., None] - f
    return residual / noise if squared_error is None else residual * (squared_error / noise).sqrt()


@dataclass(frozen=True)
class Sides:
    """What the rows sᵀJ of the four tensors are made of: (M, N, H), (M, N, d), (M, N, C), (M, N, H)."""

    b: Tensor
    x: Tensor
    s: Tensor
    h: Tensor

    def __getitem__(self, part: slice) -> Sides:
        return Sides(self.b[part], self.x[part], self.s[part], self.h[part])


def log_det_function_space(sides: Sides, precision: Tensor) -> tuple[Tensor, Tensor]:
    """log det(I + Σ_g K_g/δ_g) over (N, N) matrices, and γ_g = tr(B⁻¹K_g)/δ_g ([I21] Eq. 8)."""
    left, inputs = sides.b @ sides.b.mT, sides.x @ sides.x.mT
    right, hidden = sides.s @ sides.s.mT, sides.h @ sides.h.mT
    delta = [precision[:, g, None, None] for g in range(4)]
    # in place wherever it can be: memory, not arithmetic, is what these passes over (M, N, N) cost
    total = (inputs / delta[0]).add_(1 / delta[1]).mul_(left)
    total.addcmul_((hidden / delta[2]).add_(1 / delta[3]), right)
    total.diagonal(dim1=1, dim2=2).add_(1.0)
    factor = torch.linalg.cholesky(total)
    inverse = torch.cholesky_inverse(factor)
    right.mul_(inverse)
    left.mul_(inverse)
    used = torch.stack([_dot(left, inputs), left.sum((1, 2)), _dot(right, hidden), right.sum((1, 2))], 1) / precision
    return 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1), used


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Σ of the products of all entries, (M,), without the products."""
    return (one.flatten(1).unsqueeze(1) @ other.flatten(1).unsqueeze(2)).flatten()


def log_det_weight_space(sides: Sides, precision: Tensor) -> tuple[Tensor, Tensor]:
    """The same over (P, P) matrices: γ_g = P_g - tr_g((I + P0^-½ JᵀΛJ P0^-½)⁻¹)."""
    rows = [
        (sides.b.unsqueeze(-1) * sides.x.unsqueeze(-2)).flatten(2), sides.b,
        (sides.s.unsqueeze(-1) * sides.h.unsqueeze(-2)).flatten(2), sides.s,
    ]
    scaled = torch.cat([row / precision[:, g, None, None].sqrt() for g, row in enumerate(rows)], 2)
    total = scaled.mT @ scaled
    total.diagonal(dim1=1, dim2=2).add_(1.0)
    factor = torch.linalg.cholesky(total)
    left = torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2)
    sizes = [row.shape[2] for row in rows]
    used = torch.stack([size - part.sum(1) for size, part in zip(sizes, left.split(sizes, 1), strict=True)], 1)
    return 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1), used


def log_det_exact(sides: Sides, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Whichever of the two is cheaper."""
    n, p = sides.b.shape[1], sides.b.shape[2] * (sides.x.shape[2] + 1) + sides.s.shape[2] * (sides.h.shape[2] + 1)
    return (log_det_function_space if n**3 <= p**3 + n * p**2 else log_det_weight_space)(sides, precision)


def log_det_kfac(sides: Sides, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Σ log(1 + λ_a λ_b/(N δ)) over the Kronecker factors' eigenvalues; the biases' blocks are exact ([I21] Eq. 9)."""
    n = sides.b.shape[1]
    left, right = (torch.linalg.eigvalsh(v.mT @ v).clamp_min(0.0) for v in (sides.b, sides.s))
    first, second = (torch.linalg.eigvalsh(v.mT @ v).clamp_min(0.0) / n for v in (sides.x, sides.h))
    products = ((one[:, :, None] * other[:, None]).flatten(1) for one, other in ((left, first), (right, second)))
    return _of_eigenvalues((next(products), left, next(products), right), precision)


def log_det_diagonal(sides: Sides, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Σ log(1 + h_p/δ_p), h the diagonal of JᵀΛJ."""
    b, x, s, h = (v.square() for v in (sides.b, sides.x, sides.s, sides.h))
    return _of_eigenvalues(((b.mT @ x).flatten(1), b.sum(1), (s.mT @ h).flatten(1), s.sum(1)), precision)


def _of_eigenvalues(values: tuple[Tensor, ...], precision: Tensor) -> tuple[Tensor, Tensor]:
    log_det, used = 0.0, []
    for g, own in enumerate(values):
        delta = precision[:, g, None]
        log_det = log_det + torch.log1p(own / delta).sum(1)
        used.append((own / (own + delta)).sum(1))
    return log_det, torch.stack(used, 1)


LOG_DETS: dict[str, Callable[[Sides, Tensor], tuple[Tensor, Tensor]]] = {
    "ggn": log_det_exact, "ef": log_det_exact, "kfac": log_det_kfac,
    "diag-ggn": log_det_diagonal, "diag-ef": log_det_diagonal,
}


def evidence(
    problem: Problem, networks: Networks, parts: dict[str, slice], log_precision: Tensor, log_noise: Tensor,
    squared_error: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log q(D), (M,), and its gradients in the log precisions, (M, 4), and in log σ², (M,)."""
    with torch.no_grad():
        f, hidden = networks(problem.x)
        fits, squares, precision = log_likelihood(problem, f, log_noise), networks.squares(), log_precision.exp()
        log_det, used, power = torch.zeros_like(fits), torch.zeros_like(precision), torch.ones_like(fits)
        for structure, part in parts.items():
            empirical = structure.endswith("ef")
            own = Problem(problem.x[part], problem.y[part], problem.classes)
            s = root(own, f[part], log_noise[part], empirical, squared_error)
            b = (s @ networks.second_weight[part]) * (hidden[part] > 0)
            sides = Sides(b, problem.x[part], s, hidden[part])
            log_det[part], used[part] = LOG_DETS[structure](sides, precision[part])
            power[part] = 2.0 if empirical and squared_error is None else 1.0  # Λ goes with σ^-4, or with σ^-2
        value = fits - 0.5 * (precision * squares).sum(1) - 0.5 * log_det  # [I21] Eq. 8
        by_precision = 0.5 * (used - precision * squares)
        if problem.classes:
            return value, by_precision, torch.zeros_like(fits)
        residual = (problem.y - f[..., 0]).square().sum(1)
        by_noise = 0.5 * (residual / log_noise.exp() - problem.y.shape[1] + power * used.sum(1))
        return value, by_precision, by_noise


@dataclass
class Best:
    """The state of highest evidence of each network, and the last one."""

    evidence: Tensor
    epoch: Tensor
    tensors: list[Tensor]
    last: list[Tensor]

    def keep(self, value: Tensor, epoch: int, now: list[Tensor]) -> None:
        """Take over where the evidence is higher."""
        better = value > self.evidence
        self.evidence = torch.where(better, value, self.evidence)
        self.epoch = torch.where(better, torch.full_like(self.epoch, epoch), self.epoch)
        for kept, tensor in zip(self.tensors, now, strict=True):
            kept[better] = tensor.detach()[better]


def train_with_evidence(
    problem: Problem, networks: Networks, parts: dict[str, slice], protocol: Protocol, tell: Callable[[int], None]
) -> Best:
    """[I21] algorithm 1 for all networks at once.

    The last two tensors of each state that it returns are log δ (M, 4) and log σ² (M,). `tell` hears of every
    thousandth epoch.
    """
    count, n = problem.x.shape[:2]
    dtype = torch.float32 if protocol.single else torch.float64
    networks.to(dtype)
    if protocol.single:
        problem = Problem(problem.x.float(), problem.y if problem.classes else problem.y.float(), problem.classes)
    log_precision, log_noise = torch.zeros(count, 4, dtype=dtype), torch.zeros(count, dtype=dtype)
    weights = torch.optim.Adam(networks.parameters(), lr=protocol.rate)
    steps = protocol.epochs * (1 if protocol.minibatch is None else -(-n // protocol.minibatch))
    fall = 1.0 if protocol.last_rate is None else (protocol.last_rate / protocol.rate) ** (1 / steps)
    rates = torch.optim.lr_scheduler.ExponentialLR(weights, fall)
    rate = protocol.rate if protocol.hyper_rate is None else protocol.hyper_rate
    hyper = torch.optim.Adam(
        [{"params": [log_precision]}, {"params": [log_noise], "lr": rate * protocol.noise_speed}], lr=rate
    )
    now = [*networks.parameters(), log_precision, log_noise]
    best = Best(torch.full((count,), -torch.inf, dtype=dtype), torch.zeros(count, dtype=torch.long),
                [tensor.detach().clone() for tensor in now], [tensor.detach() for tensor in now])
    generator = torch.Generator().manual_seed(0)
    for epoch in range(1, protocol.epochs + 1):
        for x, y in _minibatches(problem, protocol.minibatch, generator):
            weights.zero_grad()
            part = Problem(x, y, problem.classes)
            joint = n / y.shape[1] * log_likelihood(part, networks(x)[0], log_noise)
            joint = joint - 0.5 * (log_precision.exp() * networks.squares()).sum(1)
            if protocol.mean_loss and not problem.classes:
                joint = 2.0 / n * log_noise.exp() * joint
            (-joint.sum()).backward()  # the networks know nothing of each other
            weights.step()
            rates.step()
        value, by_precision, by_noise = evidence(
            problem, networks, parts, log_precision, log_noise, protocol.squared_error_fisher
        )
        best.keep(value, epoch, now)
        shared = [[other == own for other in protocol.groups] for own in protocol.groups]
        log_precision.grad = -by_precision @ torch.tensor(shared).to(by_precision)
        log_noise.grad = -by_noise
        hyper.step()
        if epoch % 1000 == 0:
            tell(epoch)
    return best


def _minibatches(problem: Problem, size: int | None, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """The same random parts of the data for all networks, or all of it."""
    if size is None:
        yield problem.x, problem.y
        return
    for part in torch.randperm(problem.y.shape[1], generator=generator).split(size):
        yield problem.x[:, part], problem.y[:, part]
