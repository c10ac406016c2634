"""Save and load: a posterior in one file, beside the weights of the network in another."""

import tempfile

import torch
from torch import nn

import ntk_laplace as ntkl


def build():
    return nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()


torch.manual_seed(0)
x = torch.linspace(-2, 2, 60).double()[:, None]
y, network = torch.sin(2 * x) + 0.1 * torch.randn_like(x), build()
optimizer = torch.optim.Adam(network.parameters(), lr=0.03, weight_decay=0.01)
for _ in range(300):
    optimizer.zero_grad()
    (0.5 * (network(x) - y).square().sum()).backward()
    optimizer.step()
posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=1.0), ntkl.GaussianPrior(precision=0.01))
with tempfile.TemporaryDirectory() as folder:
    torch.save(network.state_dict(), f"{folder}/weights.pt")
    posterior.save(f"{folder}/posterior.pt", include_data=True)  # function space needs its data
    rebuilt = build()
    rebuilt.load_state_dict(torch.load(f"{folder}/weights.pt"))
    loaded = ntkl.load(f"{folder}/posterior.pt", rebuilt)
print("the same variance:", torch.equal(loaded.predict(x).variance, posterior.predict(x).variance))
