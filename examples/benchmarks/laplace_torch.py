"""The calls of the page "Coming from laplace-torch", ours and theirs, on the same trained networks.

    python examples/benchmarks/laplace_torch.py --peers-python PEERS/bin/python

where PEERS is an environment with laplace-torch. The table has the largest relative difference of evidences, and of
means and variances at new inputs (the probit probabilities of classes), for a regression and for three classes in
float64. Without ``--peers-python`` it prints our evidences alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from _common import machine, parser, run_python, table, write
from _networks import mlp, to_arrays
from torch import Tensor, nn

import ntk_laplace as ntkl

PRECISION, NOISE = 2.0, 0.1
# laplace-torch's subset and structure, and ours; it makes each tensor a Kronecker factor of its own
SAME: dict[str, dict[str, Any]] = {
    "all/full": {"structure": "full"},
    "all/kron": {"structure": "kfac", "prior": ntkl.GaussianPrior(PRECISION, groups="tensor")},
    "all/diag": {"structure": "diag"},
    "last_layer/full": {"structure": "full", "parameters": "last_layer"},
}


def trained(network: nn.Module, x: Tensor, y: Tensor, likelihood: ntkl.Likelihood) -> nn.Module:
    """At the optimum of the log joint."""
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        decay = PRECISION / 2 * sum(p.square().sum() for p in network.parameters())
        loss = decay - likelihood.log_prob(network(x), y).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return network.eval()


def problems(count: int) -> dict[str, tuple[nn.Module, Tensor, Tensor, ntkl.Likelihood]]:
    """A network, inputs, targets and likelihood of each task."""
    torch.manual_seed(0)
    x = torch.randn(count, 2).double()
    value = (torch.sin(2 * x[:, :1]) + x[:, 1:]).double()
    regression = value + NOISE**0.5 * torch.randn(count, 1).double()
    classes = (value[:, 0] > 0.5).long() + (value[:, 0] > -0.5).long()
    found = {}
    for name, y, widths, likelihood in (
        ("regression", regression, (2, 16, 1), ntkl.Gaussian(noise=NOISE)),
        ("classification", classes, (2, 16, 3), ntkl.Categorical()),
    ):
        found[name] = trained(mlp(widths).double(), x, y, likelihood), x, y, likelihood
    return found


def main() -> None:
    arguments = parser(__doc__, "laplace_torch.json")
    arguments.add_argument("--peers-python", help="interpreter of an environment with laplace-torch")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    found = problems(20 if options.small else 150)
    x_new = torch.randn(50, 2, generator=torch.Generator().manual_seed(1)).double()
    result = {f"{task}/{name}": ours(*problem, how, x_new) for task, problem in found.items()
              for name, how in SAME.items()}
    peer: dict[str, Any] = {}
    if options.peers_python:
        peer = run_python(options.peers_python, ["_peer_calls.py"], sent(found, x_new))
        if "error" in peer:
            raise SystemExit(peer["error"])
    rows = []
    for name, values in result.items():
        far = [difference(values.get(what), peer.get(f"{name}/{what}")) for what in ("evidence", "mean", "variance")]
        rows.append([name, f"{float(values['evidence']):.6f}", *far])
    print(table(["task, subset, structure", "our evidence", "evidence", "mean", "variance"], rows))
    figures = {name: values["evidence"].item() for name, values in result.items()}
    write(options.out, {"machine": machine(options.threads), "evidence": figures,
                        "differences": {row[0]: row[2:] for row in rows}})


def ours(
    network: nn.Module, x: Tensor, y: Tensor, likelihood: ntkl.Likelihood, how: dict[str, Any], x_new: Tensor
) -> dict[str, np.ndarray]:
    """Evidence, and the mean and variance of f, or the probit probabilities."""
    posterior = ntkl.laplace(network, (x, y), likelihood, **({"prior": ntkl.GaussianPrior(PRECISION)} | how))
    evidence = posterior.log_marginal_likelihood().detach().numpy()
    if likelihood.classifies:
        return {"evidence": evidence, "mean": posterior.predict(x_new, "probit").probs.numpy()}
    found = posterior.predict(x_new)
    return {"evidence": evidence, "mean": found.mean.numpy(), "variance": found.epistemic.numpy()}


def sent(found: dict[str, Any], x_new: Tensor) -> dict[str, np.ndarray]:
    """What the peer gets."""
    arrays = {"x_new": x_new.numpy(), "precision": np.array(PRECISION), "noise": np.array(NOISE)}
    for task, (network, x, y, _) in found.items():
        widths = [layer.in_features for layer in network if isinstance(layer, nn.Linear)] + [network[-1].out_features]
        arrays |= {f"{task}/{name}": value for name, value in to_arrays(network).items()}
        arrays |= {"x": x.numpy(), f"{task}/y": y.numpy(), f"{task}/widths": np.array(widths)}
    return arrays


def difference(value: np.ndarray | None, peer: Any) -> str:
    """Largest difference, relative to the largest value; a dash where one of them is missing."""
    if peer is None or value is None:
        return "-"
    return f"{np.abs(value.ravel() - np.ravel(peer)).max() / np.abs(value).max():.1e}"


if __name__ == "__main__":
    main()
