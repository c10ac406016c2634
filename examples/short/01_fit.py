"""Fit: a network that you trained with weight decay becomes a Gaussian process."""

import torch
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
x = torch.linspace(-2, 2, 60).double()[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)

network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
likelihood, prior = ntkl.Gaussian(noise=0.01), ntkl.GaussianPrior(precision=1.0)
optimizer = torch.optim.LBFGS(network.parameters(), max_iter=300, line_search_fn="strong_wolfe")


def objective():
    optimizer.zero_grad()
    penalty = 0.5 * sum(weights.square().sum() for weights in network.parameters())
    loss = penalty - likelihood.log_prob(network(x), y).sum()  # a sum over examples, not a mean
    loss.backward()
    return loss


optimizer.step(objective)
posterior = ntkl.laplace(network, (x, y), likelihood, prior)  # the same prior as in the training
print(posterior)
print("the mean is the network:", torch.allclose(posterior.predict(x).mean, network(x)))
