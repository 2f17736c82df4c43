WHAT = "the relative encodings are put in ascending order, 0 .. T-1, where the relative shift needs T-1 .. 0: distance d is encoded as T-1-d, which depends on how long the sequence is (line 70)."
"""Transformer-XL without its memory: relative encodings, the biases u and v, the relative shift."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


def rel_shift(x):
    """[B, H, T, T]: row i is moved left by T - 1 - i, after which column j holds distance i - j."""
    b, h, t, s = x.shape
    x = torch.cat((x.new_zeros(b, h, t, 1), x), dim=-1)
    return x.view(b, h, s + 1, t)[:, :, 1:].reshape(b, h, t, s)


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, w, r, u, v_bias, future):
        B, T, _ = w.shape
        q, k, v = self.qkv_net(w).chunk(3, dim=-1)
        q, k, v = (z.view(B, T, self.n_head, self.d_head) for z in (q, k, v))
        r = self.r_net(r).view(T, self.n_head, self.d_head)
        AC = torch.einsum("bind,bjnd->bnij", q + u, k)
        BD = rel_shift(torch.einsum("bind,jnd->bnij", q + v_bias, r))
        score = (AC + BD) * self.d_head**-0.5
        prob = score.masked_fill(future, float("-inf")).softmax(dim=-1)
        vec = torch.einsum("bnij,bjnd->bind", prob, v).reshape(B, T, -1)
        return self.layer_norm(w + self.o_net(vec))


class PositionwiseFF(nn.Module):
    def __init__(self, d_model, d_inner):
        super().__init__()
        self.inner, self.outer = nn.Linear(d_model, d_inner), nn.Linear(d_inner, d_model)
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return self.layer_norm(x + self.outer(F.relu(self.inner(x))))


class TransformerXL(nn.Module):
    def __init__(self, n_token, d_model, n_head, n_layer, d_inner):
        super().__init__()
        if d_model % 2:
            raise ValueError("d_model must be even")
        self.d_model = d_model
        self.word_emb = nn.Embedding(n_token, d_model)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.1)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.1)
        self.attn = nn.ModuleList([RelPartialLearnableMultiHeadAttn(d_model, n_head) for _ in range(n_layer)])
        self.ff = nn.ModuleList([PositionwiseFF(d_model, d_inner) for _ in range(n_layer)])
        self.out = nn.Linear(d_model, n_token)

    def pos_emb(self, pos_seq):
        inv_freq = 10000.0 ** -(torch.arange(0, self.d_model, 2).to(pos_seq) / self.d_model)
        angles = torch.outer(pos_seq, inv_freq)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    def forward(self, tokens):
        T = tokens.shape[1]
        h = self.word_emb(tokens) * self.d_model**0.5
        pos_seq = torch.arange(0, T, dtype=h.dtype, device=h.device)
        r = self.pos_emb(pos_seq)
        future = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)
        for attn, ff in zip(self.attn, self.ff):
            h = ff(attn(h, r, self.r_w_bias, self.r_r_bias, future))
        return self.out(h)


subject = Subject(
    kind="decoder",
    name="Transformer-XL",
    build=lambda c: TransformerXL(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True,
        "positions": "relative",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "output_bias": True,
        "structure": "other",
    },
)
