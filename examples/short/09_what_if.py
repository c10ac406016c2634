"""What if: the prediction without some training examples, or with another label, and nothing is trained again."""

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
supporting = posterior.explain(x[70:71], k=3).supporting()[0]
changes = {"as fitted": posterior, f"without {supporting.tolist()}": posterior.remove(supporting),
           "70 is of class 2": posterior.relabel([70], [2])}
for name, changed in changes.items():
    print(f"{name:24}", changed.predict(x[70:71]).probs)
