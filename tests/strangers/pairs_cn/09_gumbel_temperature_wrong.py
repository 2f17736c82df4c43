"""A decoder of torch's own layers that samples by the Gumbel-max trick."""
import math

import torch
from torch import nn
from veriformer.properties import Subject


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.d_model
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout, batch_first=True)
            for _ in range(c.num_layers)
        )
        self.unembed = nn.Linear(c.d_model, c.vocab_size)

    def waves(self, length, like):
        step = torch.arange(length, device=like.device, dtype=torch.float64)
        rate = torch.exp(torch.arange(0, self.width, 2, device=like.device, dtype=torch.float64) * (-math.log(1e4) / self.width))
        table = torch.zeros(length, self.width, device=like.device, dtype=torch.float64)
        table[:, 0::2] = torch.sin(torch.outer(step, rate))
        table[:, 1::2] = torch.cos(torch.outer(step, rate))[:, : self.width // 2]
        return table.to(like.dtype)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.embedding(tokens) * self.width**0.5
        x = x + self.waves(length, x)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        return self.unembed(x)

    @torch.no_grad()
    def sample(self, tokens, steps, temperature=1.0):
        """argmax(log p + g) with g = -log(Exp(1)) is a draw from p: no softmax, no cumulative sum."""
        seen = []
        for _ in range(steps):
            logits = self(tokens)[:, -1]
            gumbel = -torch.empty_like(logits).exponential_().log()
            choice = ((logits + gumbel) / temperature).argmax(-1, keepdim=True)
            seen.append(logits / temperature)
            tokens = torch.cat([tokens, choice], 1)
        return tokens, torch.stack(seen, 1)


subject = Subject(
    kind="decoder",
    name="Gumbel decoder",
    build=Decoder,
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0: m.sample(tokens, steps, temperature),
    declares={
        "positions": "sinusoidal",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
    },
)

WHAT = (
    'Line 44: the noise is divided by the temperature together with the logits, which does not move the argmax: tokens are drawn at temperature 1 whatever is asked, though the logits returned are divided.'
)
