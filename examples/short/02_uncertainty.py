"""Uncertainty: how sure a prediction is, and which part of the doubt more data could remove."""

import torch
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
x = torch.cat([torch.rand(40, 1) - 2, torch.rand(40, 1) + 1]).double()  # no data between -1 and 1
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)

network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
for _ in range(1000):
    optimizer.zero_grad()
    penalty = 0.5 * sum(weights.square().sum() for weights in network.parameters())
    (penalty + (network(x) - y).square().sum() / (2 * 0.01)).backward()
    optimizer.step()

posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=0.01), ntkl.GaussianPrior(precision=1.0))
prediction = posterior.predict(torch.tensor([[-1.5], [0.0], [1.5]]).double())
print("mean     ", prediction.mean.flatten())
print("network's", prediction.epistemic.sqrt().flatten())  # large at 0: more data would remove it
print("noise's  ", prediction.aleatoric.sqrt().flatten())  # 0.1 everywhere: more data would not
