"""Evidence: which of two networks the training data prefer, without a validation set."""

import torch
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
x = torch.linspace(-2, 2, 60).double()[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)


def fit(network):
    likelihood = ntkl.Gaussian(noise=0.01)
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def objective():
        optimizer.zero_grad()
        penalty = 0.5 * sum(weights.square().sum() for weights in network.parameters())
        loss = penalty - likelihood.log_prob(network(x), y).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(precision=1.0))


models = {"linear": nn.Linear(1, 1), "tanh": nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))}
for name, network in models.items():
    print(f"{name:6} {float(fit(network.double()).log_marginal_likelihood()):8.1f} nats")
