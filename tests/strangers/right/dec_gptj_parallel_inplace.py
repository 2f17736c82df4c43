"""GPT-J style decoder: attention and MLP in parallel behind one LayerNorm, interleaved partial rotary, biased head.

Unusual: the sums are in place (`out += mlp`), on tensors that the block made itself and that no backward pass needs;
attention runs in float32 or wider; queries and keys have no biases while the MLP and the head have.
"""

import torch
import torch.nn as nn

from veriformer.properties import Subject

ROTARY_DIM = 4


def fixed_pos_embedding(length, dtype, device):
    inv_freq = 1.0 / (10000 ** (torch.arange(0, ROTARY_DIM, 2, dtype=torch.float64, device=device) / ROTARY_DIM))
    sinusoid = torch.einsum("i,j->ij", torch.arange(length, dtype=torch.float64, device=device), inv_freq)
    return sinusoid.sin().to(dtype), sinusoid.cos().to(dtype)


def rotate_every_two(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def apply_rotary_pos_emb(x, sin, cos):  # x [b, t, h, d]
    sin = sin.repeat_interleave(2, dim=-1)[None, :, None, :]
    cos = cos.repeat_interleave(2, dim=-1)[None, :, None, :]
    return x * cos + rotate_every_two(x) * sin


class GPTJAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, pdrop):
        super().__init__()
        self.num_attention_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.attn_dropout = nn.Dropout(pdrop)
        self.resid_dropout = nn.Dropout(pdrop)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, hidden, allowed):
        b, t, _ = hidden.shape
        split = (b, t, self.num_attention_heads, self.head_dim)
        query = self.q_proj(hidden).view(split)
        key = self.k_proj(hidden).view(split)
        value = self.v_proj(hidden).view(split).permute(0, 2, 1, 3)
        sin, cos = fixed_pos_embedding(t, query.dtype, query.device)
        query = torch.cat([apply_rotary_pos_emb(query[..., :ROTARY_DIM], sin, cos), query[..., ROTARY_DIM:]], dim=-1)
        key = torch.cat([apply_rotary_pos_emb(key[..., :ROTARY_DIM], sin, cos), key[..., ROTARY_DIM:]], dim=-1)
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = query.permute(0, 2, 1, 3).to(wide), key.permute(0, 2, 1, 3).to(wide)
        weights = torch.matmul(query, key.transpose(-1, -2)) / (self.head_dim**0.5)
        weights = torch.where(allowed, weights, torch.finfo(weights.dtype).min)
        weights = torch.softmax(weights, dim=-1) * allowed
        weights = self.attn_dropout(weights.to(value.dtype))
        out = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous().view(b, t, -1)
        return self.resid_dropout(self.out_proj(out))


class GPTJBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.d_model)
        self.attn = GPTJAttention(c.d_model, c.num_heads, c.dropout)
        self.fc_in = nn.Linear(c.d_model, c.d_ff)
        self.fc_out = nn.Linear(c.d_ff, c.d_model)
        self.act = nn.GELU(approximate="tanh")
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, hidden, allowed):
        normed = self.ln_1(hidden)
        out = self.dropout(self.fc_out(self.act(self.fc_in(normed))))
        out = out + self.attn(normed, allowed)
        out += hidden
        return out


class GPTJ(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.drop = nn.Dropout(c.dropout)
        self.h = nn.ModuleList([GPTJBlock(c) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, ids, attention_mask=None):
        t = ids.shape[1]
        allowed = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril_()[None, None]
        if attention_mask is not None:
            allowed = allowed.logical_and(attention_mask[:, None, None])
        hidden = self.drop(self.wte(ids))
        for block in self.h:
            hidden = block(hidden, allowed)
        return self.lm_head(self.ln_f(hidden))


COMMON = dict(
    kind="decoder",
    build=GPTJ,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": [16, 32], "num_heads": [2, 4]},  # a head is at least as wide as ROTARY_DIM
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "rotary_dim": ROTARY_DIM,
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "output_bias": True,
        "tied": False,
        "structure": "other",
    },
)
