"""Transformer-XL without its memory: relative positions by sinusoids and the shift of the scores."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class PositionalEmbedding(nn.Module):
    def __init__(self, demb):
        super().__init__()
        self.demb = demb

    def forward(self, pos_seq):
        half = (self.demb + 1) // 2
        inv_freq = 1 / (10000 ** (torch.arange(half, dtype=torch.float64, device=pos_seq.device) / half))
        sinusoid_inp = torch.outer(pos_seq.double(), inv_freq)
        return torch.cat([sinusoid_inp.sin(), sinusoid_inp.cos()], dim=-1)[:, : self.demb]


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.scale = 1 / (self.d_head**0.5)

    @staticmethod
    def _rel_shift(x):
        b, n, t, s = x.shape
        x_padded = torch.cat([x.new_zeros(b, n, t, 1), x], dim=-1)
        return x_padded.view(b, n, s + 1, t)[:, :, 1:].reshape(b, n, t, s)

    def forward(self, w, r, r_w_bias, r_r_bias, attn_mask):
        bsz, qlen, d_model = w.shape
        heads = self.qkv_net(w).view(bsz, qlen, 3, self.n_head, self.d_head)
        w_head_q, w_head_k, w_head_v = heads.unbind(2)
        r_head_k = self.r_net(r).view(qlen, self.n_head, self.d_head)
        AC = torch.einsum("bind,bjnd->bnij", w_head_q + r_w_bias, w_head_k)
        BD = torch.einsum("bind,jnd->bnij", w_head_q + r_r_bias, r_head_k)
        attn_score = (AC + self._rel_shift(BD)) * self.scale
        attn_score = attn_score.masked_fill(attn_mask, torch.finfo(attn_score.dtype).min)
        attn_vec = torch.einsum("bnij,bjnd->bind", F.softmax(attn_score, dim=-1), w_head_v)
        return self.layer_norm(w + self.o_net(attn_vec.reshape(bsz, qlen, d_model)))


class PositionwiseFF(nn.Module):
    def __init__(self, d_model, d_inner):
        super().__init__()
        self.CoreNet = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(inplace=True), nn.Linear(d_inner, d_model))
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, inp):
        return self.layer_norm(inp + self.CoreNet(inp))


class MemTransformerLM(nn.Module):
    def __init__(self, n_token, n_layer, n_head, d_model, d_inner):
        super().__init__()
        self.word_emb, self.pos_emb = nn.Embedding(n_token, d_model), PositionalEmbedding(d_model)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.2)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_model // n_head) * 0.2)
        self.attns = nn.ModuleList([RelPartialLearnableMultiHeadAttn(n_head, d_model) for _ in range(n_layer)])
        self.ffs = nn.ModuleList([PositionwiseFF(d_model, d_inner) for _ in range(n_layer)])
        self.crit = nn.Linear(d_model, n_token)

    def forward(self, data, keep=None):
        qlen = data.size(1)
        core_out = self.word_emb(data)
        pos_seq = torch.arange(qlen - 1, -1, -1, device=data.device)
        r = self.pos_emb(pos_seq).to(core_out.dtype)
        mask = torch.ones(qlen, qlen, dtype=torch.bool, device=data.device).triu(1)[None, None]
        if keep is not None:
            mask = mask | ~keep[:, None, None, :]
        for attn, ff in zip(self.attns, self.ffs):
            core_out = ff(attn(core_out, r, self.r_w_bias, self.r_r_bias, mask))
        return self.crit(core_out)


subject = Subject(
    kind="decoder",
    name="Transformer-XL",
    build=lambda c: MemTransformerLM(c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "relative",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "padding_side": "both",
    },
)
