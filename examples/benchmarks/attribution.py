"""Attribution beside dattri, kronfluence, TRAK and captum, all of them held against retraining.

    python examples/benchmarks/attribution.py --peers-python PEERS/bin/python --problem digits --delta 1

where PEERS is an environment with ``torch==2.13.0 dattri kronfluence captum traker`` and no torchvision. Network, data,
random halves and single points are those of examples/attribution/digits.py, whose retraining is read if it is there
(``--retrained``) and kept if it is not. Each peer gives a score for every pair of a test and a training point; scores
are added up over the points that are left out (linear datamodeling score, LDS, against the loss at the test points, for
diabetes the output, after retraining on a half), and held against the same without single points. A peer is called

* with its defaults;
* with its damping set to the weight decay, in the peer's own units (per example, where its Hessian is of a mean);
* with the damping of the best LDS over a grid (``FACTORS`` times the weight decay): tuned on the very answer, which
  takes the retrainings that one wants to do without. TRAK's damping has no such unit: its grid is ``RIDGES``.

TRAK averages over ten networks, the others explain the first. What raises, passes the limit of time or is not finite
stands in the table as such. Ours has nothing to tune.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import machine, parser, run_python, table, write

sys.path.append(str(Path(__file__).resolve().parents[1] / "attribution"))

from _problems import PROBLEMS, Problem, small
from _truth import halves, singles

import ntk_laplace as ntkl
from ntk_laplace import attribution

FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RIDGES = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4)
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Peer:
    """A method: its words, the unit of its damping, the values tried, whether its scores are effects on the loss."""

    words: str
    unit: str | None = "mean"
    grid: tuple[float, ...] = FACTORS
    effects: bool = True

    def dampings(self, problem: Problem) -> list[float]:
        """The package's default first."""
        each = {"mean": problem.delta / len(problem.x), "sum": problem.delta, "own": 1.0, None: 0.0}[self.unit]
        return [float("nan"), *([each * factor for factor in self.grid] if self.unit else [])]


PEERS = {
    "dattri-explicit": Peer("dattri, exact Hessian"),
    "dattri-cg": Peer("dattri, CG"),
    "dattri-arnoldi": Peer("dattri, Arnoldi"),
    "dattri-datainf": Peer("dattri, DataInf"),
    "dattri-ekfac": Peer("dattri, EK-FAC"),
    "kronfluence": Peer("kronfluence, EK-FAC"),
    "captum-naive": Peer("captum, exact Hessian", "sum"),
    "captum-arnoldi": Peer("captum, Arnoldi", "sum"),
    "dattri-trak": Peer("dattri, TRAK, ten networks", "own", RIDGES, effects=False),
    "traker": Peer("traker, TRAK, ten networks", "own", RIDGES, effects=False),
    "dattri-rps": Peer("dattri, representer points", "own", STRENGTHS, effects=False),
    "dattri-tracin": Peer("dattri, TracIn, last checkpoint", None, effects=False),
    "captum-tracin": Peer("captum, TracInCP, last checkpoint", None, effects=False),
    "dattri-lissa": Peer("dattri, LiSSA", grid=(1.0, 10.0)),
}


@dataclass(frozen=True)
class Truth:
    """What retraining says: of halves and of single points."""

    kept: np.ndarray
    outcomes: np.ndarray
    chosen: np.ndarray
    changes: np.ndarray

    def judge(self, scores: np.ndarray) -> dict[str, Any]:
        """LDS and leave-one-out of a matrix of effects (n, N)."""
        if not np.isfinite(scores).all():
            return {"error": f"{(~np.isfinite(scores)).mean():.0%} of the scores are NaN or infinite"}
        return self.judged(attribution.additive(scores, self.kept), scores[:, self.chosen].T)

    def judged(self, predictions: np.ndarray, changes: np.ndarray) -> dict[str, Any]:
        """The same of predictions for the halves (M, n) and changes without single points (m, n)."""
        score = attribution.datamodeling_score(predictions, self.outcomes[0])
        found = {"score": score.value, "error_of_score": score.error}
        if np.ptp(changes):
            found |= vars(attribution.leave_one_out_agreement(changes, self.changes))
        return found


def truth(problem: Problem, theta: np.ndarray, folder: Path, name: str, many: int) -> Truth:
    """Retrained, or read."""
    kept, outcomes = halves(problem, folder / name)
    chosen, outputs = singles(problem, theta, many, folder / f"{name}-single")
    before = problem.measured(problem.f(theta, problem.x_test))
    changes = np.stack([problem.measured(f) for f in outputs]) - before
    return Truth(kept, outcomes, chosen, changes)


def trained(problem: Problem, folder: Path, name: str, count: int) -> np.ndarray:
    """Weights from several seeds, (S, P), kept."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-weights.npy"
    if file.exists() and len(known := np.load(file, allow_pickle=False)) >= count:
        return known[:count]
    everything = np.arange(len(problem.x))
    found = np.stack([problem.train(everything, seed) for seed in range(count)])
    np.save(file, found, allow_pickle=False)
    return found


def ours(problem: Problem, thetas: np.ndarray, known: Truth) -> dict[str, dict[str, Any]]:
    """Joint removal, single effects of structures, and joint removal averaged over networks as TRAK averages."""
    x = torch.as_tensor(problem.x_test)

    def target(posterior: ntkl.Posterior) -> torch.Tensor:
        return torch.as_tensor(problem.measured(posterior.outputs(x).numpy()))

    def joint(theta: np.ndarray, steps: int | None) -> tuple[np.ndarray, np.ndarray]:
        posterior = problem.posterior(theta)
        alone = attribution.without_each_in_turn(known.chosen, len(problem.x))
        before = target(posterior).numpy()
        return (attribution.predicted(posterior, known.kept, target, steps),
                attribution.predicted(posterior, alone, target, steps) - before)

    def mean(steps: int | None) -> tuple[np.ndarray, np.ndarray]:
        found = [joint(theta, steps) for theta in thetas]
        return tuple(np.mean([pair[i] for pair in found], 0) for i in range(2))

    def single(structure: str) -> tuple[np.ndarray, np.ndarray]:
        effects = problem.effects(problem.posterior(thetas[0], structure))
        return attribution.additive(effects, known.kept), effects[:, known.chosen].T

    tasks = {
        "ours, joint removal, refitted": lambda: joint(thetas[0], None),
        "ours, joint removal, one step": lambda: joint(thetas[0], 1),
        "ours, single effects, exact": lambda: single("gp"),
        "ours, single effects, structure 'ekfac'": lambda: single("ekfac"),
    }
    if len(thetas) > 1:
        tasks[f"ours, joint removal, one step, mean of {len(thetas)} networks"] = lambda: mean(1)
    found = {}
    for words, task in tasks.items():
        start = time.perf_counter()
        predictions, changes = task()
        found[words] = {"seconds": time.perf_counter() - start} | known.judged(predictions, changes)
    return found


def theirs(python: str, problem: Problem, thetas: np.ndarray, known: Truth, name: str, options: argparse.Namespace
           ) -> list[dict[str, Any]]:
    """One peer with each damping, the default first."""
    peer = PEERS[name]
    arrays = {"x": problem.x, "y": problem.y, "x_test": problem.x_test, "y_test": problem.y_test, "thetas": thetas,
              "kind": np.asarray(problem.kind), "noise": np.asarray(problem.noise),
              "target": np.asarray(problem.target),
              "outputs": np.asarray(problem.outputs)}
    dampings = peer.dampings(problem)[: 2 if options.small else None]
    command = ["_peer_attribution.py", "--method", name, "--limit", str(options.limit), "--threads",
               str(options.threads), "--dampings", *map(repr, dampings)]
    raw = run_python(python, command, arrays)
    if "error" in raw:
        return [{"damping": None, "error": raw["error"].splitlines()[-1][:160]}]
    found = []
    for i, damping in enumerate(dampings):
        given = {key.rpartition("_")[0]: value for key, value in raw.items() if key.endswith(f"_{i}")}
        scores = given.pop("scores", None)
        found.append({"damping": None if np.isnan(damping) else damping, **given})
        found[-1] |= {} if scores is None else known.judge(scores)
    return found


def cells(found: dict[str, Any] | None, effects: bool = True) -> list[str]:
    """LDS, and leave-one-out correlation and slope."""
    if found is None or not found or "score" not in found:
        return [found["error"] if found and "error" in found else "", ""]
    slope = f", {found['slope']:.2f}" if effects and "slope" in found else ""
    alone = f"{found['correlation']:.2f}{slope}" if "correlation" in found else ""
    return [f"{found['score']:.3f} ± {found['error_of_score']:.3f}", alone]


def ordered(peers: dict[str, Any]) -> dict[str, Any]:
    """As in the table above, whatever the order they ran in."""
    return {name: peers[name] for name in PEERS if name in peers}


def report(mine: dict[str, Any], peers: dict[str, list[dict[str, Any]]], problem: Problem, ceiling: Any) -> None:
    """Print the table."""
    rows = []
    for words, found in mine.items():
        rows.append([words, *cells(found), "", "", "", "", "", f"{found['seconds']:.1f}"])
    for name, found in peers.items():
        peer, default = PEERS[name], found[0]
        decay = next((one for one in found[1:] if peer.unit in ("mean", "sum")), None)
        scored = [one for one in found if "score" in one]
        best = max(scored, key=lambda one: one["score"], default=None) if peer.unit else None
        where = ""
        if best is not None:
            each = {"mean": problem.delta / len(problem.x), "sum": problem.delta}.get(peer.unit, 1.0)
            unit = " δ" if peer.unit in ("mean", "sum") else ""
            where = "default" if best["damping"] is None else f"{best['damping'] / each:g}{unit}"
        took = f"{min(one['seconds'] for one in found if 'seconds' in one):.1f}" if scored else ""
        rows.append([peer.words, *cells(default, peer.effects), *cells(decay, peer.effects), where,
                     *cells(best, peer.effects), took])
    rows.append(["another seed of retraining (ceiling)", str(ceiling), *[""] * 7])
    print(table(["method", "LDS, default", "one out: r, slope", "LDS, damping δ", "r, slope", "tuned to", "LDS, tuned",
                 "r, slope", "seconds"], rows))


def written(file: Path, name: str) -> dict[str, Any]:
    """What an interrupted run of the same problem has written already."""
    known = json.loads(file.read_text()) if file.exists() else {}
    return known if known.get("problem") == name else {"ours": {}, "peers": {}}


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "attribution.json")
    arguments.add_argument("--peers-python", help="interpreter that has the peers; without it ours alone")
    arguments.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), help="which to run")
    arguments.add_argument("--problem", choices=PROBLEMS, default="digits")
    arguments.add_argument("--delta", type=float, help="weight decay")
    arguments.add_argument("--target", choices=("loss", "output"), help="at the test points (diabetes: output)")
    arguments.add_argument("--single", type=int, default=40, help="points left out one by one (default 40)")
    arguments.add_argument("--networks", type=int, default=10, help="that TRAK averages over (default 10)")
    arguments.add_argument("--retrained", type=Path, default=Path("attribution"), help="folder of kept retraining")
    arguments.add_argument("--limit", type=float, default=300.0, help="seconds given to one call (default 300)")
    arguments.add_argument("--mean", action="store_true", help="ours averaged over those networks, too")
    arguments.add_argument("--without-ours", action="store_true", help="peers alone, ours as written before")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    build = PROBLEMS[options.problem]
    problem = build() if options.delta is None else build(options.delta)
    if options.small:
        problem, options.single, options.networks = small(problem), 3, 2
    problem = replace(problem, target=options.target or problem.target)
    name = problem.name_of_files
    thetas = trained(problem, options.retrained, name, options.networks)
    known = truth(problem, thetas[0], options.retrained, name, options.single)
    ceiling = attribution.seed_ceiling(known.outcomes)
    result = written(options.out, name)
    mine, peers = result["ours"], result["peers"]
    if not options.without_ours:
        mine.update(ours(problem, thetas[: options.networks if options.mean else 1], known))
    result |= {"machine": machine(options.threads), "problem": name}
    result["ceiling"] = {"score": ceiling.value, "error": ceiling.error}
    for one in options.peers if options.peers_python else []:
        if one not in peers:
            peers[one] = theirs(options.peers_python, problem, thetas, known, one, options)
            options.out.write_text(json.dumps(result))
        print(f"{PEERS[one].words}: {[cells(found)[0] for found in peers[one]]}", flush=True)
    if not options.peers_python:
        print("peers left out: give their interpreter with --peers-python")
    print(f"\n{problem.name}, N={len(problem.x)}, δ = {problem.delta:g}, {len(known.kept)} halves, "
          f"{len(known.chosen)} single points\n")
    report(mine, ordered(peers), problem, ceiling)
    write(options.out, result)


if __name__ == "__main__":
    main()
