"""Training with evidence: weights, noise and precisions in one run, and the weights with the best evidence are kept."""

import torch
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
x = torch.cat([torch.rand(60, 1) - 2, torch.rand(60, 1) + 1]).double()
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)

network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
training = ntkl.train_with_evidence(
    network, (x, y), ntkl.Gaussian(noise=1.0), ntkl.GaussianPrior(precision=1.0, groups="layer"),
    optimizer=lambda weights: torch.optim.Adam(weights, lr=0.03), epochs=150, batch_size=40,
    schedule=ntkl.EvidenceSchedule(frequency=15, steps=15),
)
print(training)
prediction = training.posterior.predict(torch.tensor([[0.0], [1.5]]).double())
print("network's", prediction.epistemic.sqrt().flatten())
print("noise's  ", prediction.aleatoric.sqrt().flatten())
