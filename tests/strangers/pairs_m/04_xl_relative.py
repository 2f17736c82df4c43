"""zoo/PR 152: Transformer-XL without memory. Relative attention with the two global biases u and v; the position term
is computed for all offsets at once and skewed into place."""

import torch
from torch import nn
from torch.nn.functional import pad

from veriformer.properties import Subject

WHAT = "The offsets whose sinusoids are projected run 0 .. T-1 where the skewing expects T-1 .. 0."
CAUSE = (
    "The sequence of relative offsets is ascending instead of descending, so that after the shift a key i-j back gets "
    "the encoding of distance T-1-(i-j): positions depend on the length of the whole sequence and a longer input "
    "changes the outputs of its prefix."
)


def sinusoids(offsets, width, dtype):
    half = (width + 1) // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=offsets.device) / half)
    angle = offsets.double()[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :width].to(dtype)


def rel_shift(x):
    """`[B, H, T, K]` by offset to `[B, H, T, K]` by key (the upper triangle is garbage, and masked)."""
    b, h, t, k = x.shape
    return pad(x, (1, 0)).reshape(b, h, k + 1, t)[:, :, 1:].reshape(b, h, t, k)


class RelMultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, self.d_head) * 0.1)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, self.d_head) * 0.1)

    def forward(self, w, r):
        bsz, qlen, _ = w.shape
        q, k, v = self.qkv_net(w).view(bsz, qlen, 3, self.n_head, self.d_head).unbind(2)
        r = self.r_net(r).view(-1, self.n_head, self.d_head)
        content = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        position = rel_shift(torch.einsum("bind,jnd->bnij", q + self.r_r_bias, r))
        score = (content + position) * self.d_head**-0.5
        ahead = torch.triu(torch.ones(qlen, qlen, device=w.device, dtype=torch.bool), 1)
        prob = score.masked_fill(ahead, -float("inf")).softmax(-1)
        return self.o_net(torch.einsum("bnij,bjnd->bind", prob, v).flatten(2))


class RelLayer(nn.Module):
    """Post-LN, as in the released configuration."""

    def __init__(self, n_head, d_model, d_inner):
        super().__init__()
        self.attn = RelMultiHeadAttn(n_head, d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, w, r):
        w = self.norm1(w + self.attn(w, r))
        return self.norm2(w + self.ff(w))


class MemTransformerLM(nn.Module):
    def __init__(self, n_token, n_layer, n_head, d_model, d_inner):
        super().__init__()
        self.word_emb = nn.Embedding(n_token, d_model)
        self.layers = nn.ModuleList([RelLayer(n_head, d_model, d_inner) for _ in range(n_layer)])
        self.out_layer = nn.Linear(d_model, n_token)

    def offsets(self, klen, device):
        return torch.arange(klen - 1, -1, -1, device=device)

    def forward(self, data):
        w = self.word_emb(data)
        r = sinusoids(self.offsets(data.size(1), data.device), w.size(-1), w.dtype)
        for layer in self.layers:
            w = layer(w, r)
        return self.out_layer(w)


class MemTransformerLMAscending(MemTransformerLM):
    def offsets(self, klen, device):
        return torch.arange(klen, device=device)


def subject(cls):
    return Subject(
        kind="decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff),
        forward=lambda model, tokens: model(tokens),
        declares={"positions": "relative", "norm_placement": "post", "norm": "layer", "structure": "other"},
    )


right, wrong = subject(MemTransformerLM), subject(MemTransformerLMAscending)
