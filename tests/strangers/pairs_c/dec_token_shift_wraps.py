import re

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def visible(x, mask, causal=False):
    """[B or 1, 1, T, T], True where query t may see key s."""
    T = x.shape[1]
    ok = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device)
    ok = ok.tril() if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Attention(nn.Module):
    """Weights as tensors [d, heads, d_head], in the manner of JAX code."""
    def __init__(self, d, h):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(d, h, d // h) * d ** -0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(h, d // h, d) * d ** -0.5)

    def forward(self, x, ok):
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, w) for w in (self.wq, self.wk, self.wv))
        logits = torch.einsum("bhtk,bhsk->bhts", q * q.shape[-1] ** -0.5, k)
        p = logits.masked_fill(~ok, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(~ok, 0)
        return torch.einsum("bhts,bhsk,hkd->btd", p, v, self.wo)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = Attention(c.d_model, c.num_heads)
        self.w1, self.w3 = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, ok):
        x = x + self.attn(self.attn_norm(x), ok)
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Shifted(nn.Module):
    """RWKV's token shift: half of the channels come from the token before."""
    def __init__(self, bug):
        super().__init__()
        self.bug = bug

    def forward(self, x):
        h = x.shape[-1] // 2
        old = x[..., :h].roll(1, 1) if self.bug else F.pad(x[..., :h], (0, 0, 1, -1))
        return torch.cat((old, x[..., h:]), -1)


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.shift = Shifted(bug)
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        ok = visible(x, mask, causal=True)
        for layer in self.layers:
            if mask is not None:
                x = x.masked_fill(~mask[..., None], 0)
            x = layer(self.shift(x), ok)
        return self.head(self.norm(x))


WHAT = 'The token shift is a roll, so the last token wraps round to position 0 and the future leaks into it.'
PLACE = 'token shift of the decoder'


def make(bug):
    return Subject(
        kind="decoder",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={'causal': True, 'positions': 'other', 'norm': 'rms', 'bias': False},
    )


right, wrong = make(False), make(True)
