"""Wrong labels: each training example predicted from all others (leave-one-out), without training again."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
digits = load_digits()
x, truth = torch.tensor(digits.data[:120] / 16), torch.tensor(digits.target[:120])
wrong = torch.randperm(120)[:8]
y = truth.index_put((wrong,), (truth[wrong] + 1) % 10)
network = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
optimizer = torch.optim.LBFGS(network.parameters(), max_iter=300, line_search_fn="strong_wolfe")


def objective():
    optimizer.zero_grad()
    penalty = 0.5 * sum(weights.square().sum() for weights in network.parameters())
    loss = nn.functional.cross_entropy(network(x), y, reduction="sum") + penalty
    loss.backward()
    return loss


optimizer.step(objective)
posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(precision=1.0))
first = posterior.leave_one_out().ranked(k=16)  # the most suspicious labels
print(f"{len(set(first.tolist()) & set(wrong.tolist()))} of 8 wrong labels are among the first 16 of 120")
