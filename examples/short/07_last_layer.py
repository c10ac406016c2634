"""The last layer alone: the cheapest posterior of a network whose body you keep as it is."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16), torch.tensor(digits.target)

network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=1 / 500)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(x[:500]), y[:500]).backward()
    optimizer.step()

prior = ntkl.GaussianPrior(precision=1.0)
posterior = ntkl.laplace(
    network, (x[:500], y[:500]), ntkl.Categorical(), prior, structure="full", parameters="last_layer"
)
prediction, noise = posterior.predict(x[500:]), posterior.predict(torch.rand(500, 64).double())
print(posterior)
print("on digits", float(prediction.probs.amax(1).mean()), "sure,", end=" ")
print(float((prediction.probs.argmax(1) == y[500:]).double().mean()), "correct")
print("on noise ", float(noise.probs.amax(1).mean()), "sure")
