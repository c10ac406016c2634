"""Which of two is better: rewards from comparisons of pairs, how sure they are, and which pair to ask about next."""

import torch

import ntk_laplace as ntkl


class Rewards(torch.nn.Module):
    """The rewards (n, K) of K candidates (n, K, 2), each by the same network."""

    def __init__(self):
        super().__init__()
        self.reward = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def forward(self, candidates):
        return self.reward(candidates).squeeze(-1)


torch.manual_seed(0)
pairs = torch.randn(200, 2, 2)
truth = 3 * torch.sin(pairs).sum(-1)  # Bradley and Terry: log odds are differences of rewards
preferred = torch.distributions.Categorical(logits=truth).sample()
posterior = ntkl.train_with_evidence(Rewards(), (pairs, preferred), ntkl.Categorical(), epochs=200).posterior
items, reference = torch.tensor([[1.5, 1.5], [0.5, 0.5], [8.0, 8.0]]), torch.zeros(3, 2)
f, covariance = posterior.latent_moments(torch.stack([items, reference], 1))  # rewards have no zero: differences do
difference = torch.tensor([1.0, -1.0], dtype=f.dtype)
print("reward over that of (0, 0):", f @ difference, "+-", (difference @ covariance @ difference).sqrt())
print("probability to be preferred to (0, 0):", posterior.predict(torch.stack([items, reference], 1)).probs[:, 0])
pool = torch.randn(500, 2, 2)
print("the pair to ask about next:", pool[ntkl.active.select(posterior, pool, k=1).indices].squeeze(0))
