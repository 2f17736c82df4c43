"""Transformer-XL (the parent of XLNet): relative positions by u, v and the shift trick; each layer keeps a memory."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def positional_embedding(pos_seq, demb, like):
    inv_freq = 1 / (10000 ** (torch.arange(0.0, demb, 2.0, dtype=torch.float64, device=like.device) / demb))
    sinusoid = torch.outer(pos_seq, inv_freq)
    return torch.cat([sinusoid.sin(), sinusoid.cos()], dim=-1).to(like.dtype)


def rel_shift(x):
    B, H, T, S = x.shape
    x = torch.cat([x.new_zeros(B, H, T, 1), x], dim=-1)
    return x.view(B, H, S + 1, T)[:, :, 1:].reshape(B, H, T, S)


class RelPartialLearnableDecLayer(nn.Module):
    def __init__(self, d_model, n_head, d_inner):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.q_net = nn.Linear(d_model, d_model, bias=False)
        self.kv_net = nn.Linear(d_model, 2 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.CoreNet = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))
        self.ff_norm = nn.LayerNorm(d_model)

    def forward(self, w, cat, r, r_w_bias, r_r_bias, mask):
        B, T, D = w.shape
        split = lambda t: t.view(*t.shape[:-1], self.n_head, self.d_head)
        q = split(self.q_net(w))
        k, v = (split(t) for t in self.kv_net(cat).chunk(2, dim=-1))
        r_k = split(self.r_net(r))
        AC = torch.einsum("bihd,bjhd->bhij", q + r_w_bias, k)
        BD = rel_shift(torch.einsum("bihd,jhd->bhij", q + r_r_bias, r_k))
        score = (AC + BD) * self.d_head**-0.5
        score = score.masked_fill(mask, float("-inf"))
        vec = torch.einsum("bhij,bjhd->bihd", score.softmax(dim=-1), v).reshape(B, T, D)
        w = self.layer_norm(w + self.o_net(vec))
        return self.ff_norm(w + self.CoreNet(w))


class MemTransformerLM(nn.Module):
    def __init__(self, n_token, n_layer, n_head, d_model, d_inner):
        super().__init__()
        self.d_model = d_model
        self.word_emb = nn.Embedding(n_token, d_model)
        self.layers = nn.ModuleList([RelPartialLearnableDecLayer(d_model, n_head, d_inner) for _ in range(n_layer)])
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.02)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.02)
        self.out = nn.Linear(d_model, n_token)

    def forward(self, tokens, mems=None):
        hids = self.word_emb(tokens) * self.d_model**0.5
        qlen = tokens.shape[1]
        mlen = 0 if mems is None else mems[0].shape[1]
        klen = mlen + qlen
        mask = torch.ones(qlen, klen, dtype=torch.bool, device=tokens.device).triu(1 + mlen)
        pos_seq = torch.arange(klen - 1, -1, -1.0, dtype=torch.float64, device=tokens.device)
        r = positional_embedding(pos_seq, self.d_model, hids)
        new_mems = []
        for i, layer in enumerate(self.layers):
            mem = hids.new_zeros(len(hids), 0, self.d_model) if mems is None else mems[i]
            cat = torch.cat([mem, hids], dim=1)
            new_mems.append(cat)
            hids = layer(hids, cat, r, self.r_w_bias, self.r_r_bias, mask)
        return self.out(hids), new_mems


def by_segments(model, chunks):
    mems, outputs = None, []
    for chunk in chunks:
        logits, mems = model(chunk, mems)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="Transformer-XL",
    build=lambda c: MemTransformerLM(c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=by_segments,
    domain={"d_model": (8, 16), "num_heads": (2, 4)},
    declares={
        "positions": "relative",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "tied": False,
        "output_bias": True,
        "structure": "other",
    },
)
