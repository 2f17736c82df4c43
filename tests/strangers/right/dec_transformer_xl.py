"""Transformer-XL style decoder: sequence first inside, relative positions with the shift trick and the biases u and v.

Unusual: scores are (q + u) k + (q + v) W r, where r is a sinusoid of the distance; the second term is computed for all
distances and shifted into place by a reshape. What the shift leaves above the diagonal is rubbish that the causal mask
hides. Norms stand behind the residual sums and there is none at the end. No memory is carried between segments.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class PositionalEmbedding(nn.Module):
    def __init__(self, demb):
        super().__init__()
        self.demb = demb

    def forward(self, pos_seq, dtype):
        inv_freq = 1 / (10000 ** (torch.arange(0.0, self.demb, 2.0, device=pos_seq.device, dtype=torch.float64) / self.demb))
        sinusoid_inp = torch.outer(pos_seq.double(), inv_freq)
        pos_emb = torch.cat([sinusoid_inp.sin(), sinusoid_inp.cos()], dim=-1)[:, : self.demb]
        return pos_emb.to(dtype)


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model, d_head, dropout):
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_head) * 0.1)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_head) * 0.1)
        self.drop = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model)
        self.scale = 1 / (d_head**0.5)

    @staticmethod
    def _rel_shift(x):  # [q, k, b, n]; column k of row i moves to column k - (q - 1 - i)
        zero_pad = x.new_zeros((x.size(0), 1, *x.size()[2:]))
        x_padded = torch.cat([zero_pad, x], dim=1)
        x_padded = x_padded.reshape(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].reshape(x.shape)

    def forward(self, w, r, blocked):
        qlen, bsz = w.size(0), w.size(1)
        heads = torch.chunk(self.qkv_net(w), 3, dim=-1)
        q, k, v = (x.view(qlen, bsz, self.n_head, self.d_head) for x in heads)
        r_head_k = self.r_net(r).view(qlen, self.n_head, self.d_head)
        AC = torch.einsum("ibnd,jbnd->ijbn", (q + self.r_w_bias, k))
        BD = self._rel_shift(torch.einsum("ibnd,jnd->ijbn", (q + self.r_r_bias, r_head_k)))
        attn_score = (AC + BD).mul_(self.scale)
        attn_score = attn_score.float() if attn_score.dtype in (torch.float16, torch.bfloat16) else attn_score
        attn_score = attn_score.masked_fill(blocked, -1e30)
        attn_prob = self.drop(F.softmax(attn_score, dim=1).masked_fill(blocked, 0))
        attn_vec = torch.einsum("ijbn,jbnd->ibnd", (attn_prob.to(v.dtype), v))
        attn_out = self.drop(self.o_net(attn_vec.reshape(qlen, bsz, -1)))
        return self.layer_norm(w + attn_out)


class PositionwiseFF(nn.Module):
    def __init__(self, d_model, d_inner, dropout):
        super().__init__()
        self.CoreNet = nn.Sequential(
            nn.Linear(d_model, d_inner), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(d_inner, d_model), nn.Dropout(dropout),
        )  # fmt: skip
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, inp):
        return self.layer_norm(inp + self.CoreNet(inp))


class MemTransformerLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_emb = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_emb = PositionalEmbedding(c.d_model)
        self.drop = nn.Dropout(c.dropout)
        self.attn = nn.ModuleList(
            RelPartialLearnableMultiHeadAttn(c.num_heads, c.d_model, c.d_model // c.num_heads, c.dropout)
            for _ in range(c.num_layers)
        )
        self.ff = nn.ModuleList(PositionwiseFF(c.d_model, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.out_layer = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, data, keep=None):  # data [qlen, bsz], keep [klen, bsz]
        qlen = data.size(0)
        core_out = self.drop(self.word_emb(data))
        pos_seq = torch.arange(qlen - 1, -1, -1, device=data.device)
        pos_emb = self.drop(self.pos_emb(pos_seq, core_out.dtype))
        blocked = torch.triu(data.new_ones(qlen, qlen), diagonal=1).bool()[:, :, None, None]
        if keep is not None:
            blocked = blocked | ~keep[None, :, :, None]
        for attn, ff in zip(self.attn, self.ff):
            core_out = ff(attn(core_out, pos_emb, blocked))
        return self.out_layer(core_out)


def forward(m, tokens, attention_mask=None):
    keep = None if attention_mask is None else attention_mask.t()
    return m(tokens.t(), keep).transpose(0, 1)


COMMON = dict(kind="decoder", build=MemTransformerLM, forward=forward, mask_forms=("padding",))
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "relative",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "output_bias": True,
        "tied": False,
        "structure": "other",
    },
)
