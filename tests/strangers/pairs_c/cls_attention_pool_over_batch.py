
import torch
from torch import nn

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
        self.attn = Attention(c.d_model, c.num_heads)
        self.ffn = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(2))
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, ok):
        x = self.norms[0](x + self.drop(self.attn(x, ok)))
        return self.norms[1](x + self.drop(self.ffn(x)))


class Net(nn.Module):
    """Attention pooling with a learned query."""
    def __init__(self, c, bug):
        super().__init__()
        self.dim = 0 if bug else 1
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.score, self.out = nn.Linear(c.d_model, 1), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        ok = visible(x, mask)
        for layer in self.layers:
            x = layer(x, ok)
        a = self.score(x).masked_fill(~mask[..., None], torch.finfo(x.dtype).min)
        a = a.softmax(self.dim) * mask[..., None]
        return self.out((a * x).sum(1))


WHAT = 'The softmax of the attention pooling runs over the batch instead of over time, so samples share their weights.'
PLACE = 'attention pooling of the classifier'


def make(bug):
    return Subject(
        kind="classifier",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    )


right, wrong = make(False), make(True)
