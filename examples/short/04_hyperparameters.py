"""Hyperparameters: the evidence finds the noise and one prior precision for each layer, at fixed weights."""

import torch
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
x = torch.linspace(-2, 2, 60).double()[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)

network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
optimizer = torch.optim.Adam(network.parameters(), lr=0.03, weight_decay=1e-2)
for _ in range(500):
    optimizer.zero_grad()
    (0.5 * (network(x) - y).square().sum()).backward()  # noise 1, prior precision 0.01
    optimizer.step()

prior = ntkl.GaussianPrior(precision=0.01, groups="layer")
posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=1.0), prior)
print("evidence before", float(posterior.log_marginal_likelihood()))
history = posterior.fit_hyperparameters()
print("evidence after ", float(posterior.log_marginal_likelihood()))
print("noise's deviation", float(posterior.likelihood.noise) ** 0.5, "(the data have 0.1)")
print("precisions", dict(zip(posterior.prior.group_names, posterior.prior.precision.tolist(), strict=True)))
print(history)
