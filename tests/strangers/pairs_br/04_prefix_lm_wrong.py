WHAT = "operator precedence: `prefix | causal & pad` hides padding in the causal part alone, so padding inside the prefix is seen by all (line 20)"
"""The language side of a PaliGemma-like model: the first PREFIX tokens (image, prompt) see one another, then it is causal."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

PREFIX = 3


def prefix_lm_mask(T, pad, device):
    rows = torch.arange(T, device=device)[:, None]
    cols = torch.arange(T, device=device)[None, :]
    causal = cols <= rows
    prefix = cols < PREFIX
    if pad is None:
        return (prefix | causal)[None, None]
    pad = pad[:, None, None, :]
    return prefix | causal & pad


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x, mask):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / (k.size(-1) ** 0.5))
        att = att.masked_fill(~mask, torch.finfo(att.dtype).min)
        att = F.softmax(att, dim=-1).masked_fill(~mask, 0.0)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(approximate="tanh"), nn.Linear(n_inner, n_embd))

    def forward(self, x, mask):
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class PrefixLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx, attention_mask=None):
        T = idx.size(1)
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        mask = prefix_lm_mask(T, attention_mask, idx.device)
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="prefix LM",
    build=PrefixLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "prefix": PREFIX,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
    },
)
