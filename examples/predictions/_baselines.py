"""What people have already: the network, calibrated on held-out data, an ensemble, dropout, laplace-torch."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
from _scores import Method, Predictor, of_moments, of_probabilities, softened, temperature
from _tables import Problem, trained
from torch import Tensor, nn

__all__ = ["Baselines"]

DECAYS = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
MEMBERS = 5
LEAST_NOISE = 1e-6  # of standardized responses


class Network:
    """Networks as one: the mean of their probabilities, or the moments of the mixture of their outputs."""

    def __init__(self, members: Sequence[nn.Module], classes: int | None) -> None:
        self.members, self.classes = list(members), classes

    @torch.no_grad()
    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities and zeros, or mean and variance of the members' outputs."""
        f = torch.stack([member(x).double() for member in self.members])
        if self.classes:
            log_p = f.log_softmax(-1).logsumexp(0) - torch.tensor(float(len(f))).log()
            return log_p, torch.zeros_like(log_p)
        return f.mean(0), f.var(0, correction=0)

    def tuned(self, x: Tensor, y: Tensor) -> float:
        """Temperature, or variance of the noise, of the largest likelihood of these data."""
        mean, variance = self.outputs(x)
        if self.classes:
            return temperature(mean, y)
        return max(float(((y - mean).square() - variance).mean()), LEAST_NOISE)

    def predictor(self, number: float) -> Predictor:
        """With this temperature or noise."""

        def predict(x: Tensor) -> torch.distributions.Distribution:
            mean, variance = self.outputs(x)
            return softened(mean, number) if self.classes else of_moments(mean, variance + number)

        return predict

    def plain(self, problem: Problem) -> Predictor:
        """Temperature 1, or the noise of the training data."""
        return self.predictor(1.0 if self.classes else self.tuned(problem.x, problem.y))


class Baselines:
    """Methods of one problem, weight decay and seed. Networks are trained once; CPU times are of one thread."""

    def __init__(self, problem: Problem, decay: float, seed: int) -> None:
        self.problem, self.decay, self.seed = problem, decay, seed
        order = torch.randperm(len(problem.y), generator=torch.Generator().manual_seed(1000 + seed))
        part = max(len(order) // 10, 2)
        self.held, self.kept = order[:part], order[part:]

    def train(
        self, decay: float, seed: int, rows: Tensor | None = None, dropout: float = 0.0
    ) -> tuple[nn.Module, float]:
        """A network, and the seconds it took."""
        start = time.process_time()
        network = trained(self.problem, decay, seed, rows, dropout)
        return network, time.process_time() - start

    @cached_property
    def whole(self) -> tuple[nn.Module, float]:
        """The network of all data: one plain training."""
        return self.train(self.decay, self.seed)

    @cached_property
    def part(self) -> tuple[nn.Module, float]:
        """The network of 90 %."""
        return self.train(self.decay, self.seed, self.kept)

    def _calibrated(self, whole: Sequence[tuple[nn.Module, float]], part: Sequence[tuple[nn.Module, float]]) -> Method:
        classes = self.problem.classes
        number = Network([n for n, _ in part], classes).tuned(self.problem.x[self.held], self.problem.y[self.held])
        own = Network([n for n, _ in whole], classes)
        seconds = sum(s for _, s in (*whole, *part))
        return Method(own.predictor(number), seconds, own.plain(self.problem), {"number": number})

    def network(self) -> Method:
        own, seconds = self.whole
        return Method(Network([own], self.problem.classes).plain(self.problem), seconds)

    def calibrated(self) -> Method:
        """The temperature, or noise, that the network of 90 % got on the other 10 %."""
        return self._calibrated([self.whole], [self.part])

    def tuned_decay(self) -> Method:
        """The weight decay whose network of 90 % predicts the other 10 % best, after its temperature or noise."""
        x, y = self.problem.x[self.held], self.problem.y[self.held]
        best, total, chosen = -float("inf"), 0.0, (0.0, None)
        for decay in DECAYS:
            found = self.train(decay, self.seed, self.kept)
            own = Network([found[0]], self.problem.classes)
            value = float(own.predictor(own.tuned(x, y))(x).log_prob(y if self.problem.classes else y[:, 0]).mean())
            total += found[1]
            if value > best:
                best, chosen = value, (decay, found)
        method = self._calibrated([self.train(chosen[0], self.seed)], [chosen[1]])
        notes = method.notes | {"decay": chosen[0]}
        return Method(method.predict, method.seconds + total - chosen[1][1], method.uncalibrated, notes)

    @cached_property
    def _members(self) -> list[tuple[nn.Module, float]]:
        return [self.whole, *(self.train(self.decay, self.seed + 100 * k) for k in range(1, MEMBERS))]

    def ensemble(self) -> Method:
        own = Network([n for n, _ in self._members], self.problem.classes)
        return Method(own.plain(self.problem), sum(s for _, s in self._members))

    def calibrated_ensemble(self) -> Method:
        """The temperature, or noise, that an ensemble of 90 % got on the other 10 %."""
        rest = [self.train(self.decay, self.seed + 100 * k, self.kept) for k in range(1, MEMBERS)]
        return self._calibrated(self._members, [self.part, *rest])

    def dropout(self, rate: float = 0.1, samples: int = 100) -> Method:
        """Monte Carlo dropout after each activation."""
        own, seconds = self.train(self.decay, self.seed, dropout=rate)
        own.train()
        drawn = Network([own] * samples, self.problem.classes)
        return Method(drawn.plain(self.problem), seconds)

    def laplace_kron(self) -> Method:
        return self._laplace("all", "kron")

    def laplace_last_layer(self) -> Method:
        return self._laplace("last_layer", "kron")

    def _laplace(self, weights: str, structure: str) -> Method:
        """laplace-torch as its examples have it: evidence after training, and its closed-form predictive."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from laplace import Laplace

            problem, (own, seconds) = self.problem, self.whole
            start = time.process_time()
            data = torch.utils.data.TensorDataset(problem.x, problem.y)
            loader = torch.utils.data.DataLoader(data, problem.recipe.batch or len(data))
            kind = "classification" if problem.classes else "regression"
            found = Laplace(own, kind, subset_of_weights=weights, hessian_structure=structure)
            found.fit(loader)
            if problem.classes:
                found.optimize_prior_precision(method="marglik")
            else:  # precision and noise together, as in its regression example
                logs = torch.zeros(2, dtype=problem.x.dtype, requires_grad=True)
                optimizer = torch.optim.Adam([logs], lr=1e-1)
                for _ in range(100):
                    optimizer.zero_grad()
                    (-found.log_marginal_likelihood(logs[0].exp(), logs[1].exp())).backward()
                    optimizer.step()
                found.prior_precision, found.sigma_noise = (value.detach() for value in logs.exp())
        seconds += time.process_time() - start
        noise = 0.0 if problem.classes else float(found.sigma_noise) ** 2

        def predict(x: Tensor) -> torch.distributions.Distribution:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if problem.classes:
                    return of_probabilities(torch.cat([found(part).detach() for part in x.split(500)]))
                mean, variance = found(x)
            return of_moments(mean.detach(), variance.detach().flatten() + noise)

        return Method(predict, seconds, notes={"precision": found.prior_precision.detach().flatten().tolist()})

    @staticmethod
    def have_laplace_torch() -> bool:
        """Whether the peer is installed: the extra `benchmarks`."""
        return importlib.util.find_spec("laplace") is not None
