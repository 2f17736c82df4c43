import math

import torch
from torch import nn

from veriformer.properties import Subject

def rope(x, pos):
    n = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(n, device=x.device, dtype=x.dtype) / n)
    a, b, rest = x[..., :n], x[..., n:2 * n], x[..., 2 * n:]
    ang = pos[..., None].to(x.dtype) * rate
    cos, sin = ang.cos(), ang.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def visible(x, mask, causal=False):
    """[B or 1, 1, T, T], True where query t may see key s."""
    T = x.shape[1]
    ok = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device)
    ok = ok.tril() if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(4))

    def forward(self, x, ok):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        pos = torch.arange(x.shape[1], device=x.device)
        s = rope(q, pos) @ rope(k, pos).transpose(-1, -2) / math.sqrt(q.shape[-1])
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return self.o((p @ v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """A decoder with a head on the last real token; padding on either side."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.attns = nn.ModuleList(Attention(c) for _ in range(c.num_layers))
        self.mlps = nn.ModuleList(nn.Sequential(nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.d_ff), nn.SiLU(), nn.Linear(c.d_ff, c.d_model))
                                  for _ in range(c.num_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(c.d_model, eps=1e-6) for _ in range(c.num_layers + 1))
        self.score = nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        ok = visible(x, mask, causal=True)
        for attn, norm, mlp in zip(self.attns, self.norms, self.mlps):
            x = x + attn(norm(x), ok)
            x = x + mlp(x)
        if mask is None:
            last = torch.full_like(tokens[:, 0], x.shape[1] - 1)
        elif self.bug:
            last = mask.sum(1) - 1
        else:
            last = (mask * torch.arange(x.shape[1], device=x.device)).argmax(1)
        return self.score(self.norms[-1](x[torch.arange(len(x), device=x.device), last]))


WHAT = 'The last token is looked for at (number of real tokens - 1), which with left padding is not the last one and may be padding.'
PLACE = 'last-token pooling of the classifier'


def make(bug):
    return Subject(
        kind="classifier",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={'pooling': 'last', 'causal': True, 'positions': 'rotary', 'padding_side': 'both', 'norm': 'rms'},
    )


right, wrong = make(False), make(True)
