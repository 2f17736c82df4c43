"""Transformer-XL (Dai et al. 2019): relative positions by the shift trick, without a memory of segments before."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class PositionalEmbedding(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        if d_model % 2:
            raise ValueError("d_model is even")
        self.d_model = d_model

    def forward(self, pos_seq):
        steps = torch.arange(0, self.d_model, 2, device=pos_seq.device, dtype=torch.float64)
        angle = torch.outer(pos_seq, 1.0 / 10000 ** (steps / self.d_model))
        return torch.cat((angle.sin(), angle.cos()), dim=-1)


def rel_shift(x):
    """Row i of x [B, H, T, T] moves so that its last entries come first: column j then belongs to distance i - j."""
    B, H, T, R = x.shape
    x = torch.cat((x.new_zeros(B, H, T, 1), x), dim=-1)
    return x.view(B, H, R + 1, T)[:, :, 1:].reshape(B, H, T, R)


class RelMultiHeadAttn(nn.Module):
    def __init__(self, d_model, n_head, dropout):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)
        self.scale = 1 / self.d_head**0.5

    def forward(self, w, r, r_w_bias, r_r_bias):
        B, T, D = w.shape
        q, k, v = (t.view(B, T, self.n_head, self.d_head) for t in self.qkv_net(w).chunk(3, dim=-1))
        r = self.r_net(r).view(-1, self.n_head, self.d_head)
        content = torch.einsum("bihd,bjhd->bhij", q + r_w_bias, k)
        position = rel_shift(torch.einsum("bihd,jhd->bhij", q + r_r_bias, r))
        score = (content + position) * self.scale
        future = torch.ones(T, T, dtype=torch.bool, device=w.device).triu(1)
        prob = self.drop(score.masked_fill(future, float("-inf")).softmax(-1))
        out = torch.einsum("bhij,bjhd->bihd", prob, v).reshape(B, T, D)
        return self.layer_norm(w + self.drop(self.o_net(out)))


class PositionwiseFF(nn.Module):
    def __init__(self, d_model, d_inner, dropout):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, d_inner), nn.Linear(d_inner, d_model)
        self.layer_norm = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = self.drop(self.fc2(self.drop(F.relu(self.fc1(x)))))
        return self.layer_norm(x + h)


class TransformerXL(nn.Module):
    def __init__(self, vocab_size, d_model, n_head, n_layer, d_inner, dropout):
        super().__init__()
        self.d_model = d_model
        self.word_emb = nn.Embedding(vocab_size, d_model)
        self.pos_emb = PositionalEmbedding(d_model)
        self.attn = nn.ModuleList([RelMultiHeadAttn(d_model, n_head, dropout) for _ in range(n_layer)])
        self.ff = nn.ModuleList([PositionwiseFF(d_model, d_inner, dropout) for _ in range(n_layer)])
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.02)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.02)
        self.out_bias = nn.Parameter(torch.zeros(vocab_size))
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens):
        klen = tokens.shape[1]
        w = self.drop(self.word_emb(tokens) * self.d_model**0.5)
        pos_seq = torch.arange(klen - 1, -1, -1.0, device=tokens.device, dtype=torch.float64)
        r = self.drop(self.pos_emb(pos_seq).to(w.dtype))
        for attn, ff in zip(self.attn, self.ff):
            w = ff(attn(w, r, self.r_w_bias, self.r_r_bias))
        return F.linear(w, self.word_emb.weight, self.out_bias)


subject = Subject(
    kind="decoder",
    name="Transformer-XL",
    build=lambda c: TransformerXL(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, tokens: m(tokens),
    declares={
        "positions": "relative",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "tied": True,
        "output_bias": True,
        "embedding_scale": True,
    },
)
