"""Post-LN decoder with sinusoids, and sampling with temperature and top-k."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(length, dim, like):
    rate = 10000 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
    angle = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :dim].to(like.dtype)


class PostLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.linear1, self.linear2 = nn.Linear(d, f), nn.Linear(f, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.h, -1)).transpose(1, 2) for z in self.in_proj(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm1(x + self.out_proj(y.transpose(1, 2).flatten(-2)))
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d = c.d_model
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(PostLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.lm_head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + sinusoids(tokens.shape[1], self.d, x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(tokens)[:, -1] / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, logits.shape[-1])).values.amin(-1, keepdim=True)
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(-1)
        drawn_from.append(probabilities)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    build=Decoder,
    forward=lambda m, tokens: m(tokens),
    sampling=sample,
    declares={"positions": "sinusoidal", "norm_placement": "post", "activation": "relu"},
)
