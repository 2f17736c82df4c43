WHAT = "the position sequence of Transformer-XL runs upwards, though _rel_shift needs it from the largest distance down: key j is read at distance T-1-(i-j) instead of i-j, which depends on the length (line 77)"
"""Transformer-XL (Dai et al. 2019) for one segment, in the style of kimiyoung's pytorch code."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class PositionalEmbedding(nn.Module):
    def __init__(self, demb):
        super().__init__()
        self.demb = demb

    def forward(self, pos_seq):
        inv_freq = 1 / (10000 ** (torch.arange(0.0, self.demb, 2.0, dtype=torch.float64, device=pos_seq.device) / self.demb))
        sinusoid_inp = torch.outer(pos_seq.double(), inv_freq)
        return torch.cat([sinusoid_inp.sin(), sinusoid_inp.cos()], dim=-1)[:, : self.demb]


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(0.1 * torch.randn(n_head, self.d_head))
        self.r_r_bias = nn.Parameter(0.1 * torch.randn(n_head, self.d_head))
        self.scale = self.d_head**-0.5

    @staticmethod
    def _rel_shift(x):
        bsz, n_head, qlen, klen = x.shape
        x = F.pad(x, (1, 0)).view(bsz, n_head, klen + 1, qlen)
        return x[:, :, 1:].reshape(bsz, n_head, qlen, klen)

    def forward(self, w, r, allowed):
        bsz, qlen, d_model = w.shape
        q, k, v = self.qkv_net(w).view(bsz, qlen, 3, self.n_head, self.d_head).unbind(2)
        r_head_k = self.r_net(r).view(-1, self.n_head, self.d_head)

        AC = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        BD = torch.einsum("bind,jnd->bnij", q + self.r_r_bias, r_head_k)
        score = (AC + self._rel_shift(BD)) * self.scale

        score = score.masked_fill(~allowed, torch.finfo(score.dtype).min)
        prob = F.softmax(score, dim=-1).masked_fill(~allowed, 0.0)
        vec = torch.einsum("bnij,bjnd->bind", prob, v)
        return self.o_net(vec.reshape(bsz, qlen, d_model))


class DecoderLayer(nn.Module):
    def __init__(self, n_head, d_model, d_inner):
        super().__init__()
        self.attn = RelPartialLearnableMultiHeadAttn(n_head, d_model)
        self.attn_norm = nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))
        self.ff_norm = nn.LayerNorm(d_model)

    def forward(self, h, r, allowed):
        h = self.attn_norm(h + self.attn(h, r, allowed))
        return self.ff_norm(h + self.ff(h))


class MemTransformerLM(nn.Module):
    def __init__(self, n_token, n_layer, n_head, d_model, d_inner):
        super().__init__()
        self.word_emb = nn.Embedding(n_token, d_model)
        self.pos_emb = PositionalEmbedding(d_model)
        self.layers = nn.ModuleList([DecoderLayer(n_head, d_model, d_inner) for _ in range(n_layer)])
        self.crit = nn.Linear(d_model, n_token, bias=False)

    def forward(self, data, attention_mask=None):
        bsz, klen = data.shape
        core_out = self.word_emb(data)
        pos_seq = torch.arange(klen, device=data.device)
        r = self.pos_emb(pos_seq).to(core_out.dtype)
        allowed = torch.ones(klen, klen, dtype=torch.bool, device=data.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        for layer in self.layers:
            core_out = layer(core_out, r, allowed)
        return self.crit(core_out)


subject = Subject(
    kind="decoder",
    name="Transformer-XL",
    build=lambda c: MemTransformerLM(c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "relative", "norm": "layer", "norm_placement": "post", "activation": "relu", "structure": "other"},
)
