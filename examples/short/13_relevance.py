"""Which inputs matter: a prior precision for each, which the evidence chooses while the network trains."""

import torch
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
x = torch.randn(100, 5).double()
y = torch.sin(2 * x[:, :1]) + x[:, 3:4] + 0.1 * torch.randn(100, 1).double()  # of inputs 0 and 3

network = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)).double()
prior = ntkl.GaussianPrior(groups="input")
training = ntkl.train_with_evidence(
    network, (x, y), ntkl.Gaussian(noise=1.0), prior, epochs=150, batch_size=None, predictive="loo"
)
found = training.posterior.prior
for name, deviation in zip(found.group_names, found.precision.rsqrt().tolist(), strict=True):
    print(f"{name:14} weights of standard deviation {deviation:.3f}")
print(training.predictive)
