"""Scores of dattri, kronfluence, TRAK and captum: called by attribution.py with the peers' Python.

usage: _peer_attribution.py input.npz output.npz --method METHOD --dampings 0 0.1 1 [--limit 300] [--threads 1]

Every method is called the way its documentation does it, and what its authors left at a default stays there;
``--dampings`` are values for the one argument that regularizes (NaN: the package's default). Input: ``x``, ``y``,
``x_test``, ``y_test``, the weights ``thetas`` of trained networks (the first one is explained; TRAK averages over all),
the ``kind`` of likelihood, ``noise``, and ``target``, the "loss" or the "output" at a test point. Output, for the i-th
damping: ``scores_i`` (n, N), by how much the target rises without a training point, ``seconds_i``, ``dtype_i``; or
``error_i`` if it raised. Packages get the network in float64, as it was trained, and in float32 if they raise then.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Scores = Callable[["Problem", float | None], Tensor]
"""From a problem and a damping (None: the default) to effects, (n, N)."""


@dataclass(frozen=True)
class Problem:
    """Data, networks and their loss, in one floating point type."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    networks: list[nn.Sequential]
    kind: str
    noise: float
    target: str

    @property
    def network(self) -> nn.Sequential:
        return self.networks[0]

    def each_loss(self, f: Tensor, y: Tensor) -> Tensor:
        """-log p of each example, (n,), as written in torch."""
        if self.kind == "categorical":
            return functional.cross_entropy(f, y, reduction="none")
        if self.kind == "bernoulli":
            return functional.binary_cross_entropy_with_logits(f, y, reduction="none").sum(-1)
        return 0.5 * (f - y).square().sum(-1) / self.noise

    def each_target(self, f: Tensor, y: Tensor) -> Tensor:
        """What is asked about at a test point, (n,): the loss, or the one output."""
        return f.squeeze(-1) if self.target == "output" else self.each_loss(f, y)

    def margin(self, f: Tensor, y: Tensor) -> Tensor:
        """TRAK's model output, (n,): log odds of the right class; for a regression the output."""
        if self.kind == "categorical":
            others = f.scatter(-1, y.unsqueeze(-1), -torch.inf)
            return f.gather(-1, y.unsqueeze(-1)).squeeze(-1) - others.logsumexp(-1)
        return ((2 * y - 1) * f if self.kind == "bernoulli" else f).squeeze(-1)

    def pull(self, f: Tensor, y: Tensor) -> Tensor:
        """Minus the derivative of the loss in the margin, (n,): TRAK's Q, 1 - p of the right class."""
        if self.kind == "gaussian":
            return ((y - f) / self.noise).squeeze(-1)
        return torch.sigmoid(-self.margin(f, y))

    def test_pull(self) -> Tensor:
        """From TRAK's scores, what a point adds to a margin, to what its removal does to the target."""
        if self.target == "output":
            return -torch.ones_like(self.y_test).squeeze(-1)
        with torch.no_grad():
            return torch.stack([self.pull(n(self.x_test), self.y_test) for n in self.networks]).mean(0)

    def loaders(self) -> tuple[DataLoader, DataLoader]:
        """All at once, which dattri asks for where a Hessian is inverted."""
        train, test = TensorDataset(self.x, self.y), TensorDataset(self.x_test, self.y_test)
        return DataLoader(train, batch_size=len(train)), DataLoader(test, batch_size=len(test))


def problem(arrays: dict[str, np.ndarray], dtype: torch.dtype) -> Problem:
    def tensor(name: str) -> Tensor:
        found = torch.as_tensor(arrays[name])
        return found.to(dtype) if found.is_floating_point() else found

    kind, d = str(arrays["kind"]), arrays["x"].shape[1]
    outputs = int(arrays["outputs"])
    networks = []
    for theta in arrays["thetas"]:
        hidden = (len(theta) - outputs) // (d + 1 + outputs)
        network = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).to(dtype)
        nn.utils.vector_to_parameters(torch.as_tensor(theta).to(dtype), network.parameters())
        networks.append(network.eval())
    data = (tensor(name) for name in ("x", "y", "x_test", "y_test"))
    return Problem(*data, networks, kind, float(arrays["noise"]), str(arrays["target"]))


def given(argument: str | None, value: float | None) -> dict[str, float]:
    """The argument, or nothing at its default."""
    return {} if argument is None or value is None else {argument: value}


# --- dattri


def dattri_task(case: Problem) -> Any:
    from dattri.task import AttributionTask

    def loss(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        return case.each_loss(torch.func.functional_call(case.network, params, x), y).mean()

    def target(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        return case.each_target(torch.func.functional_call(case.network, params, x), y).mean()

    return AttributionTask(loss_func=loss, model=case.network, checkpoints=case.network.state_dict(),
                           target_func=None if case.target == "loss" else target)


def dattri_inner(name: str, argument: str) -> Scores:
    """An influence function of dattri, in units of the mean loss: effects are scores over N."""

    def scores(case: Problem, damping: float | None) -> Tensor:
        import dattri.algorithm.influence_function as module

        chosen = given(argument, damping)
        attributor = getattr(module, name)(task=dattri_task(case), **chosen)
        train, test = case.loaders()
        attributor.cache(train)
        found = attributor.attribute(train, test) if name == "IFAttributorLiSSA" else None
        with torch.no_grad():
            found = attributor.attribute(train, test) if found is None else found
        return found.T / len(case.x)

    return scores


def dattri_tracin(case: Problem, damping: float | None) -> Tensor:
    from dattri.algorithm.tracin import TracInAttributor

    attributor = TracInAttributor(task=dattri_task(case), weight_list=torch.ones(1), normalized_grad=False)
    return attributor.attribute(*case.loaders()).T


def dattri_rps(case: Problem, damping: float | None) -> Tensor:
    from dattri.algorithm.rps import RPSAttributor
    from dattri.task import AttributionTask

    if case.kind == "gaussian":
        raise NotImplementedError("representer points are for classification")
    loss = functional.cross_entropy if case.kind == "categorical" else functional.binary_cross_entropy_with_logits
    task = AttributionTask(loss_func=lambda f, y: loss(f, y), model=case.network,
                           checkpoints=case.network.state_dict())
    chosen = given("l2_strength", damping)
    attributor = RPSAttributor(task=task, final_linear_layer_name="2", **chosen)
    train, test = case.loaders()
    attributor.cache(train)
    found = attributor.attribute(train, test)
    if case.kind == "bernoulli":  # of the logit: towards the loss by the sign of the label
        found = found * (2 * case.y_test - 1).T
    return found.detach().T


def dattri_trak(case: Problem, damping: float | None) -> Tensor:
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    def margin(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        f = torch.func.functional_call(case.network, params, x.unsqueeze(0))
        return case.margin(f, y.unsqueeze(0)).squeeze(0)

    def probability(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        return 1 - case.pull(torch.func.functional_call(case.network, params, x.unsqueeze(0)), y.unsqueeze(0)).squeeze()

    task = AttributionTask(loss_func=margin, model=case.network, checkpoints=[n.state_dict() for n in case.networks])
    chosen = given("regularization", damping)
    attributor = TRAKAttributor(task=task, correct_probability_func=probability, **chosen)
    train, test = case.loaders()
    attributor.cache(train)
    with torch.no_grad():
        found = attributor.attribute(test)
    return found.detach().T * case.test_pull().unsqueeze(1)


# --- kronfluence


def kronfluence(case: Problem, damping: float | None) -> Tensor:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import ScoreArguments
    from kronfluence.task import Task

    class Ours(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, y = batch
            f = model(x)
            if sample:
                with torch.no_grad():
                    y = self.drawn(f)
            return case.each_loss(f, y).sum()

        def drawn(self, f: Tensor) -> Tensor:
            if case.kind == "categorical":
                return torch.multinomial(f.softmax(-1), 1).flatten()
            if case.kind == "bernoulli":
                return torch.bernoulli(f.sigmoid())
            return f + case.noise**0.5 * torch.randn_like(f)

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            x, y = batch
            return case.each_target(model(x), y).sum()

    torch.manual_seed(0)
    task = Ours()
    model = prepare_model(case.network, task)
    train, test = (loader.dataset for loader in case.loaders())
    chosen = ScoreArguments(**given("damping_factor", damping))
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("benchmark", model, task, cpu=True, output_dir=folder, disable_tqdm=True,
                            log_level=logging.ERROR)
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=len(train))
        analyzer.compute_pairwise_scores("scores", "ekfac", test, train, per_device_query_batch_size=len(test),
                                         per_device_train_batch_size=len(train), score_args=chosen)
        return analyzer.load_pairwise_scores("scores")["all_modules"] / len(case.x)


# --- TRAK


def traker(case: Problem, damping: float | None) -> Tensor:
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput

    class Ours(AbstractModelOutput):
        def __init__(self) -> None:
            super().__init__()

        def get_output(self, model: nn.Module, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            f = torch.func.functional_call(model, (weights, buffers), x.unsqueeze(0))
            return case.margin(f, y.unsqueeze(0)).sum()

        def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
            x, y = batch
            return case.pull(torch.func.functional_call(model, (weights, buffers), x), y).detach().unsqueeze(-1)

    # half precision is TRAK's default, and goes with its default of no damping; tuned, it computes in float32
    chosen = given("lambda_reg", damping)
    chosen |= {"use_half_precision": False} if chosen else {}
    task = "image_classification" if case.kind == "categorical" else Ours()
    (train, test), states = case.loaders(), [n.state_dict() for n in case.networks]
    states = [{k: v.clone() for k, v in state.items()} for state in states]
    with tempfile.TemporaryDirectory() as folder:
        judge = TRAKer(model=case.network, task=task, train_set_size=len(case.x), save_dir=folder, device="cpu",
                       logging_level=logging.ERROR, **chosen)
        for i, state in enumerate(states):
            judge.load_checkpoint(state, model_id=i)
            for batch in train:
                judge.featurize(batch=batch, num_samples=len(case.x))
        judge.finalize_features()
        for i, state in enumerate(states):
            judge.start_scoring_checkpoint("test", state, model_id=i, num_targets=len(case.x_test))
            for batch in test:
                judge.score(batch=batch, num_samples=len(case.x_test))
        found = torch.as_tensor(np.array(judge.finalize_scores(exp_name="test"), dtype=np.float64))
    case.network.load_state_dict(states[0])
    return found.T * case.test_pull().double().unsqueeze(1)


# --- captum


def captum(name: str, argument: str | None) -> Scores:
    """One of captum's, with a Hessian of the summed loss: effects are its scores."""

    def scores(case: Problem, damping: float | None) -> Tensor:
        import captum.influence as module
        from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction
        from captum.influence._core.influence_function import NaiveInfluenceFunction

        known = {"TracInCP": module.TracInCP, "Naive": NaiveInfluenceFunction, "Arnoldi": ArnoldiInfluenceFunction}
        train, test = case.loaders()
        # tuned: no truncation, which is the other way to damp
        chosen = given(argument, damping)
        if chosen:
            chosen["projection_dim"] = sum(p.numel() for p in case.network.parameters())
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "network.pt"))
            torch.save(case.network.state_dict(), path)
            where = [path] if name == "TracInCP" else path
            judge = known[name](case.network, train, where, loss_fn=case.each_loss, test_loss_fn=case.each_target,
                                batch_size=None, **chosen)
            return judge.influence(next(iter(test))).detach()

    return scores


METHODS: dict[str, Scores] = {
    "dattri-explicit": dattri_inner("IFAttributorExplicit", "regularization"),
    "dattri-cg": dattri_inner("IFAttributorCG", "regularization"),
    "dattri-lissa": dattri_inner("IFAttributorLiSSA", "damping"),
    "dattri-arnoldi": dattri_inner("IFAttributorArnoldi", "regularization"),
    "dattri-datainf": dattri_inner("IFAttributorDataInf", "regularization"),
    "dattri-ekfac": dattri_inner("IFAttributorEKFAC", "damping"),
    "dattri-tracin": dattri_tracin,
    "dattri-rps": dattri_rps,
    "dattri-trak": dattri_trak,
    "kronfluence": kronfluence,
    "traker": traker,
    "captum-naive": captum("Naive", "hessian_reg"),
    "captum-arnoldi": captum("Arnoldi", "hessian_reg"),
    "captum-tracin": captum("TracInCP", None),
}

IMPORTS = {
    "dattri": ["dattri.algorithm", "dattri.algorithm.influence_function", "dattri.task", "dattri.func.projection"],
    "kronfluence": ["kronfluence.analyzer"],
    "traker": ["trak"],
    "captum": ["captum.influence"],
}


def one(method: str, arrays: dict[str, np.ndarray], damping: float, limit: float) -> dict[str, Any]:
    """Scores, seconds and type; or why there are none."""
    chosen = None if np.isnan(damping) else damping
    errors, begun = [], time.perf_counter()
    for dtype in (torch.float64, torch.float32):
        case = problem(arrays, dtype)
        start = time.perf_counter()
        try:
            scores = METHODS[method](case, chosen).detach().cpu().double().numpy()
        except Exception as error:  # a peer that raises is a result
            if time.perf_counter() - begun >= limit:
                return {"error": f"over {limit:.0f} s"}
            words = str(error).strip().splitlines() or [""]
            errors.append(f"{type(error).__name__}: {words[0][:160]}")
            continue
        return {"scores": scores, "seconds": time.perf_counter() - start, "dtype": str(dtype).removeprefix("torch.")}
    return {"error": errors[-1]}


def stop(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--method", required=True, choices=METHODS)
    arguments.add_argument("--dampings", type=float, nargs="+", default=[float("nan")])
    arguments.add_argument("--limit", type=float, default=300.0, help="seconds given to one call (default 300)")
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    with np.load(options.source) as found:
        arrays = dict(found)
    for name in IMPORTS[options.method.partition("-")[0]]:  # seconds are those of the work
        importlib.import_module(name)
    signal.signal(signal.SIGALRM, stop)
    results = {}
    for i, damping in enumerate(options.dampings):
        signal.setitimer(signal.ITIMER_REAL, options.limit)
        found = one(options.method, arrays, damping, options.limit)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        results |= {f"{name}_{i}": value for name, value in found.items()}
        if found.get("error", "").startswith("over "):
            break
    np.savez(options.target, **results)


if __name__ == "__main__":
    main()
