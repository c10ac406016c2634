"""GPyTorch: the posterior is a GPyTorch model, and the tangent kernel combines with other kernels."""

import gpytorch
import torch
from torch import nn

import ntk_laplace as ntkl

torch.manual_seed(0)
x = torch.linspace(-2, 2, 40).double()[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
network = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
optimizer = torch.optim.Adam(network.parameters(), lr=0.03, weight_decay=0.01)
for _ in range(300):
    optimizer.zero_grad()
    (0.5 * (network(x) - y).square().sum()).backward()
    optimizer.step()

prior = ntkl.GaussianPrior(precision=0.01)
posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=1.0), prior)
model = ntkl.gp.LaplaceGP(posterior).eval()
latent = model(torch.tensor([[0.0], [1.5]]).double())
print("mean", latent.mean.flatten(), "deviation", latent.stddev.flatten())
kernel = ntkl.gp.NTKKernel(network, prior) + gpytorch.kernels.RBFKernel().double()
print("tangent kernel + RBF, first rows", kernel(x[:2]).to_dense().detach().tolist())
