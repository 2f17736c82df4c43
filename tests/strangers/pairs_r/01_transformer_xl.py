"""Transformer-XL language model without the recurrence memory: relative scores by the rel_shift trick of the paper's appendix."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class PositionalEmbedding(nn.Module):
    def __init__(self, demb):
        super().__init__()
        self.demb = demb

    def forward(self, pos_seq):
        inv_freq = 1 / (10000 ** (torch.arange(0.0, self.demb, 2.0, device=pos_seq.device) / self.demb))
        sinusoid_inp = pos_seq[:, None] * inv_freq
        return torch.cat([sinusoid_inp.sin(), sinusoid_inp.cos()], dim=-1)[:, : self.demb]


class RelMultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(0.3 * torch.randn(n_head, self.d_head))
        self.r_r_bias = nn.Parameter(0.3 * torch.randn(n_head, self.d_head))

    @staticmethod
    def _rel_shift(x):
        b, h, q, k = x.shape
        x = F.pad(x, (1, 0)).reshape(b, h, k + 1, q)
        return x[:, :, 1:].reshape(b, h, q, k)

    def forward(self, w, r):
        bsz, qlen, _ = w.shape
        q, k, v = (t.view(bsz, qlen, self.n_head, self.d_head) for t in self.qkv_net(w).chunk(3, -1))
        r = self.r_net(r).view(qlen, self.n_head, self.d_head)
        AC = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        BD = self._rel_shift(torch.einsum("bind,jnd->bnij", q + self.r_r_bias, r))
        score = (AC + BD) / self.d_head**0.5
        future = torch.ones(qlen, qlen, dtype=torch.bool, device=w.device).triu(1)
        prob = score.masked_fill(future, float("-inf")).softmax(-1)
        return self.o_net(torch.einsum("bnij,bjnd->bind", prob, v).reshape(bsz, qlen, -1))


class DecoderLayer(nn.Module):
    def __init__(self, n_head, d_model, d_inner):
        super().__init__()
        self.dec_attn = RelMultiHeadAttn(n_head, d_model)
        self.attn_norm, self.ff_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.core = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))

    def forward(self, w, r):
        w = self.attn_norm(w + self.dec_attn(w, r))
        return self.ff_norm(w + self.core(w))


class TransformerXL(nn.Module):
    def __init__(self, n_token, n_layer, n_head, d_model, d_inner):
        super().__init__()
        self.word_emb, self.pos_emb = nn.Embedding(n_token, d_model), PositionalEmbedding(d_model)
        self.layers = nn.ModuleList(DecoderLayer(n_head, d_model, d_inner) for _ in range(n_layer))
        self.out_layer = nn.Linear(d_model, n_token)

    def distances(self, klen, like):
        """What the columns of r stand for, before the shift: the farthest first."""
        return torch.arange(klen - 1, -1, -1.0, device=like.device)

    def forward(self, data):
        core_out = self.word_emb(data)
        r = self.pos_emb(self.distances(data.shape[1], data)).to(core_out.dtype)
        for layer in self.layers:
            core_out = layer(core_out, r)
        return self.out_layer(core_out)


class TransformerXLForwards(TransformerXL):
    def distances(self, klen, like):
        return torch.arange(0.0, klen, device=like.device)


def _subject(cls):
    return Subject(
        kind="decoder",
        name="Transformer-XL",
        build=lambda c: cls(c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff),
        forward=lambda m, tokens: m(tokens),
    )


right, wrong = _subject(TransformerXL), _subject(TransformerXLForwards)
WHAT = "The sinusoids that go into the relative term are made for positions 0, 1, .. T-1 instead of T-1, .. 1, 0."
CAUSE = (
    "The relative shift expects the table of distances in descending order; ascending, a key at distance d is scored with the "
    "encoding of T - 1 - d, so what is meant by a distance depends on how long the sequence is, and appending tokens changes earlier outputs."
)
