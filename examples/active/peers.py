"""Active learning beside its peers: scikit-activeml's margin sampling and BatchBALD, baal's BALD of dropout.

    python examples/active/peers.py [--problems digits,mnist --data DIR] --threads 1 --out labels

As labels.py, whose results of random choice and of the greedy information it takes from the same folder.
scikit-activeml: the ten smallest differences between the two largest class probabilities, and BatchBALD of ten
retrained networks. baal: the ten largest BALD scores from 20 passes of a network trained with dropout .2. All ways
train and test the same perceptron. It needs scikit-activeml and baal. It writes peers.json and peers.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parent))

from labels import BATCH, WAYS, Choice, main, train


def margin(posterior: ntkl.Posterior, x: Tensor, y: Tensor, rest: Tensor, generator: torch.Generator) -> Tensor:
    """scikit-activeml's margin sampling at the network's probabilities."""
    from skactiveml.pool import uncertainty_scores

    probabilities = posterior.predict(rest, "map").probs.numpy()
    return torch.as_tensor(uncertainty_scores(probabilities, method="margin_sampling").copy()).topk(BATCH).indices


def batch_bald(posterior: ntkl.Posterior, x: Tensor, y: Tensor, rest: Tensor, generator: torch.Generator) -> Tensor:
    """scikit-activeml's BatchBALD of ten networks, each from weights of its own."""
    from skactiveml.pool import batch_bald

    width = next(p.shape[0] for p in posterior.network.module.parameters())
    members = np.stack([train(x, y, width)(rest).softmax(-1).detach().numpy() for _ in range(10)])
    utilities = batch_bald(members, BATCH, random_state=0)
    return torch.as_tensor(utilities.copy()).nan_to_num(-torch.inf).argmax(1)


def dropout_bald(posterior: ntkl.Posterior, x: Tensor, y: Tensor, rest: Tensor, generator: torch.Generator) -> Tensor:
    """baal's BALD of a network with dropout, trained by Adam."""
    from baal.active.heuristics import BALD

    width = next(p.shape[0] for p in posterior.network.module.parameters())
    network = nn.Sequential(nn.Linear(x.shape[1], width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 10)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y, reduction="sum")
        (loss + 0.5 * sum(p.square().sum() for p in network.parameters())).backward()
        optimizer.step()
    with torch.no_grad():
        passes = torch.stack([network(rest).softmax(-1) for _ in range(20)], -1)
    return torch.as_tensor(BALD()(passes.numpy())[:BATCH].copy())


PEERS: dict[str, Choice] = {
    "random": WAYS["random"],
    "information": WAYS["information"],
    "margin (scikit-activeml)": margin,
    "BatchBALD (scikit-activeml)": batch_bald,
    "dropout BALD (baal)": dropout_bald,
}

if __name__ == "__main__":
    main(PEERS, __doc__, "peers")
