"""Large data: Kronecker factors (KFAC) read a loader once, and need no matrix over all weights or all examples."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
loader = DataLoader(train, batch_size=100, shuffle=True)

network = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=1 / 1500)  # the mean loss: precision / N
for _ in range(15):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()

prior = ntkl.GaussianPrior(precision=1.0, groups="layer")
posterior = ntkl.laplace(network.eval(), loader, ntkl.Categorical(), prior, structure="kfac")
posterior.fit_hyperparameters()
print("evidence", float(posterior.log_marginal_likelihood()), "nats of", len(train), "examples")
prediction = posterior.predict(DataLoader(test, batch_size=100))  # in chunks, in the order of the loader
print("correct", float((prediction.probs.argmax(1) == labels[1500:]).float().mean()))
print("log probability of the label", float(prediction.log_prob(labels[1500:]).mean()))
