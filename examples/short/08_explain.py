"""Explain: which training examples made this prediction, and how much each of them moved it."""

import torch
from sklearn.datasets import load_iris
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
iris = load_iris()
x, y = torch.tensor((iris.data - iris.data.mean(0)) / iris.data.std(0)), torch.tensor(iris.target)
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = torch.optim.LBFGS(network.parameters(), max_iter=300, line_search_fn="strong_wolfe")


def objective():
    optimizer.zero_grad()
    penalty = 0.5 * sum(weights.square().sum() for weights in network.parameters())
    loss = nn.functional.cross_entropy(network(x), y, reduction="sum") + penalty
    loss.backward()
    return loss


optimizer.step(objective)
posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(precision=1.0))
explanation = posterior.explain(x[70:71], k=3)
print(explanation.to_dataframe()[["speaks", "training_index", "target", "meaning"]].to_string(index=False))
parts = explanation.offset + explanation.contributions.sum(1) + explanation.gap
print("the parts add up to the output:", torch.allclose(parts, explanation.f))
