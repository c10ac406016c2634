"""Prediction methods of a posterior: distributions of responses at new inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from ntk_laplace.errors import UnsupportedError, is_choice, require_flags, require_whole
from ntk_laplace.model.calibration import CalibratedPredictive
from ntk_laplace.model.data import InputData, Inputs
from ntk_laplace.model.likelihoods import Likelihood, Response
from ntk_laplace.model.network import linearized, varying
from ntk_laplace.model.predictive import SAMPLES, Predictive, joined, predictive_from_samples
from ntk_laplace.posterior.chunks import Chunks
from ntk_laplace.posterior.draws import WeightDraws
from ntk_laplace.posterior.latent import LatentVerbs
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.sampling import require_generator

_OutputsAt = Callable[[Inputs, int], Callable[[Tensor], Tensor]]  # outputs of inputs as a function of θ


class PredictionVerbs(LatentVerbs):
    """Responses at new inputs."""

    def predict(
        self, x: InputData, method: str = "glm", samples: int = SAMPLES, *, mean: str = "map",
        likelihood: Likelihood | None = None, generator: torch.Generator | None = None, batch_size: int | None = None,
        calibrated: bool = True,
    ) -> Response:
        """Predictive distribution of responses at `x` ([T20] 3.14 to 3.16).

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, DataLoader or Dataset
        method : str
            "glm": average the response over the linearized model's outputs; closed form for a Gaussian likelihood.
            "blr": moments of the response in closed form. "nn": sample weights, the same samples
            for all inputs; if all linearized weights are in the last module, the layers before it are evaluated once.
            "probit": closed-form approximation for classes. "map": plug in the mean of f.
        samples : int
            Number of samples, if the method samples.
        mean : str
            As in `latent`.
        likelihood : Likelihood, optional
            Of the responses, if it differs from the training likelihood (other noise, for example). It may have a
            noise per input: moments of f are then computed for all n inputs before the responses.
        generator : torch.Generator, optional
            Random generator; by default the global state.
        batch_size : int, optional
            Maximum inputs at a time; by default 512, or fewer if they exceed 16 MiB.
        calibrated : bool
            Use `predictive`, the calibration that `fit_predictive` or `calibrate` found, in "glm", "blr" and "probit"
            under the training likelihood. It makes the best densities. False is the posterior as it is, whose
            uncertainty tells unfamiliar inputs apart better, because the scale is fitted to familiar ones.

        Returns
        -------
        torch Distribution
            One per input, with ``log_prob(y)`` of shape (n,), `mean`, `variance`, and `probs` for classes.
        """
        require_flags(calibrated=calibrated)
        own = likelihood_elsewhere(self.likelihood, likelihood)
        require_generator(generator)
        scalar = self.network.scalar

        def averaged(at: _OutputsAt) -> Response:
            draws = WeightDraws(self._weights, samples, self.num_parameters, self._fitted.theta, generator)
            parts = ((f,) for f in self._sampled(self._chunks(x, batch_size), draws, at))
            return _responses(parts, likelihood is None, lambda f: predictive_from_samples(own, f, scalar), axis=1)

        if is_choice(method, ("nn",)):
            if not is_choice(mean, ("map",)):
                raise UnsupportedError('mean="map" for method="nn", which samples the weights around θ*',
                                       f"mean={mean!r}"[:80], 'Use method="glm" for the linearized model.')
            require_whole("samples", samples, 1, "Pass a positive number, such as 1000.")
            return averaged(partial(varying, self.network))
        if is_choice(method, ("map",)):
            f = self._outputs(self._chunks(x, batch_size), mean)
            certain = f.new_zeros(()).expand(*f.shape, f.shape[1])
            return _responses([(f, certain)], True, Predictive(own, method, samples, generator, scalar))
        positions, one = own.num_positions(self.num_outputs), own.at_position()
        respond: Callable[..., Response] = Predictive(one, method, samples, generator, scalar)
        if calibrated and likelihood is None and self.predictive is not None:
            respond = CalibratedPredictive(self.predictive, one, method, samples, generator, scalar)
        elif method == "glm" and positions > 1 and self.num_outputs > tuning.POSITION_OUTPUTS and mean == "map":
            return averaged(partial(linearized, self.network))
        chunks = self._chunks(x, batch_size)
        if own.positions is not None:
            return _responses(self._moments(chunks, mean, positions), True, lambda f, blocks: own.together(
                respond(f.reshape(len(f) * positions, -1), blocks.flatten(0, 1))))
        zeros = torch.zeros(1, self.num_outputs, device="cpu")
        if method == "probit" and own.probit_by_variance(zeros, zeros) is not None:
            return _responses(self._variances(chunks, mean), likelihood is None, respond)
        return _responses(self._moments(chunks, mean), likelihood is None, respond)

    # --- inside

    def _sampled(self, chunks: Chunks, draws: WeightDraws, at: _OutputsAt) -> Iterator[Tensor]:
        """Outputs at all weight samples, (S, m, C), for each chunk, of the function of θ that `at` gives for inputs."""
        for start, x in chunks.inputs(max(1, tuning.SAMPLED_OUTPUTS // (draws.count * self.num_outputs))):
            outputs = at(x, start)
            yield torch.stack([outputs(theta) for theta in draws]).to(self.dtype)


def likelihood_elsewhere(fitted: Likelihood, given: Likelihood | None) -> Likelihood:
    """The likelihood at new inputs: that of the fit, or a given one of the same positions (UnsupportedError if not)."""
    own = fitted.for_new_points() if given is None else given
    if not isinstance(own, Likelihood):
        raise UnsupportedError("a likelihood object, or None for the training one", f"{given!r}",
                               "Use for instance ntk_laplace.Gaussian(noise).")
    if own.positions != fitted.positions:
        raise UnsupportedError(f"a likelihood of {_responses_of(fitted)}, as in the fit",
                               f"{type(own).__name__}, of {_responses_of(own)}",
                               "Use Everywhere(likelihood, positions) where the fit does, with its positions.")
    return own


def _responses_of(likelihood: Likelihood) -> str:
    """Where an input has responses, for an error."""
    if likelihood.positions is None:
        return "one response per input"
    return f"responses at positions {tuple(likelihood.positions)}" if likelihood.positions else "positions not given"


def _responses(
    parts: Iterable[tuple[Tensor, ...]], apart: bool, respond: Callable[..., Response], axis: int = 0
) -> Response:
    """Responses from the moments or samples of f, chunk by chunk or all at once; `axis` is the axis of examples."""
    if not apart:
        parts = [tuple(torch.cat(same, axis) for same in zip(*parts, strict=True))]
    without_grad = torch.no_grad()(respond)  # a temperature requires grad
    return joined(without_grad(*part) for part in parts)
