WHAT = 'Distances are listed ascending (`torch.arange(0, qlen, 1)`) where _rel_shift needs them descending (qlen - 1 .. 0), so that key j gets the embedding of qlen - 1 - (i - j) and outputs of a prefix depend on how long the sequence is.'
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RelPartialLearnableMultiHeadAttn(nn.Module):
    """(a) content, (b) content-position, (c) and (d) the global biases; no memory of earlier segments here."""

    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)

    @staticmethod
    def _rel_shift(x):
        B, H, T, K = x.shape
        x = torch.cat((x.new_zeros(B, H, T, 1), x), dim=-1)
        return x.view(B, H, K + 1, T)[:, :, 1:].reshape(B, H, T, K)

    def forward(self, w, r, r_w_bias, r_r_bias, allowed):
        B, T, _ = w.shape
        q, k, v = (x.view(B, T, self.n_head, self.d_head) for x in self.qkv_net(w).chunk(3, dim=-1))
        rk = self.r_net(r).view(-1, self.n_head, self.d_head)
        AC = torch.einsum("bind,bjnd->bnij", q + r_w_bias, k)
        BD = self._rel_shift(torch.einsum("bind,jnd->bnij", q + r_r_bias, rk))
        scores = (AC + BD) * self.d_head**-0.5
        prob = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        vec = torch.einsum("bnij,bjnd->bind", prob, v).reshape(B, T, -1)
        return self.layer_norm(w + self.o_net(vec))


class PositionwiseFF(nn.Module):
    def __init__(self, d_model, d_inner):
        super().__init__()
        self.CoreNet = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, inp):
        return self.layer_norm(inp + self.CoreNet(inp))


class TransfoXL(nn.Module):
    def __init__(self, n_token, n_layer, n_head, d_model, d_inner):
        super().__init__()
        self.d_model = d_model
        self.word_emb = nn.Embedding(n_token, d_model)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.1)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.1)
        self.attn = nn.ModuleList([RelPartialLearnableMultiHeadAttn(n_head, d_model) for _ in range(n_layer)])
        self.ff = nn.ModuleList([PositionwiseFF(d_model, d_inner) for _ in range(n_layer)])
        self.out_layer = nn.Linear(d_model, n_token)

    def pos_emb(self, pos_seq):
        inv_freq = 10000.0 ** (-torch.arange(0, self.d_model, 2, device=pos_seq.device, dtype=pos_seq.dtype) / self.d_model)
        sinusoid = torch.outer(pos_seq, inv_freq)
        return torch.cat((sinusoid.sin(), sinusoid.cos()), dim=-1)[:, : self.d_model]

    def forward(self, data, mask=None):
        qlen = data.shape[1]
        hids = self.word_emb(data)
        # distances from the query itself to the farthest key
        pos_seq = torch.arange(0, qlen, 1, device=data.device, dtype=hids.dtype)
        r = self.pos_emb(pos_seq)
        allowed = torch.ones(qlen, qlen, dtype=torch.bool, device=data.device).tril()[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        for attn, ff in zip(self.attn, self.ff):
            hids = ff(attn(hids, r, self.r_w_bias, self.r_r_bias, allowed))
        return self.out_layer(hids)


subject = Subject(
    kind="decoder",
    name="Transformer-XL",
    build=lambda c: TransfoXL(c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "positions": "relative",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "tied": False,
        "output_bias": True,
    },
)
