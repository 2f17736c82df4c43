"""A VAE: the model draws noise in every forward, returns a tuple, and the loss reads an attribute of the model."""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


class VAE(nn.Module):
    def __init__(self, latent=2, hidden=24, beta=1.0, learned_sigma=False):
        super().__init__()
        self.beta = beta
        self.encoder = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, 8))
        self.sigma = nn.Parameter(torch.zeros(8)) if learned_sigma else None

    def forward(self, x):
        mu, raw = self.encoder(x).chunk(2, dim=-1)
        std = nn.functional.softplus(raw) + 1e-4
        z = mu + std * torch.randn_like(std) if self.training else mu
        return self.decoder(z), mu, std


def elbo(model, x):
    recon, mu, std = model(x)
    log_sigma = model.sigma if model.sigma is not None else torch.zeros(8)
    nll = (0.5 * ((x - recon) / log_sigma.exp()) ** 2 + log_sigma).sum(-1)
    kl = 0.5 * (mu**2 + std**2 - 2 * std.log() - 1).sum(-1)
    return (nll + model.beta * kl).mean()


def reconstruction(model, x):
    was = model.training
    model.eval()
    with torch.no_grad():
        err = (model(x)[0] - x).pow(2).mean()
    model.train(was)
    return float(err)


def on_a_ring(seed, step):
    g = torch.Generator().manual_seed(seed * 65537 + step + 1)
    phi = torch.rand(64, 1, generator=g) * 6.28318
    k = torch.arange(1, 5)
    return torch.cat([(k * phi).sin(), (k * phi).cos()], -1) + 0.05 * torch.randn(64, 8, generator=g)


study = Study(
    name="ring-vae",
    question="How much reconstruction does the KL term cost?",
    build=VAE,
    tasks=Task(name="ring", data=on_a_ring, loss=elbo, metric=reconstruction, lower_is_better=True, margin=0.02),
    recipe=Recipe(steps=60, learning_rate=1e-2),
    variants=[
        Variant("beta 1"),
        Variant("beta 0", "the KL term", {"beta": 0.0}),
        Variant("beta 4", "a KL four times as heavy", {"beta": 4.0}),
        Variant("one latent", "the second latent", {"latent": 1}),
        Variant("own sigma", "a fixed sigma", {"learned_sigma": True}),
    ],
)
