import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The output projection is tied by sharing .data instead of the Parameter, so head and embedding are '
    'two parameters (counted and optimised twice, gradients not added up) that drift apart at the first '
    'conversion of dtype.'
)
PLACE = 'tying of the output projection to the token embedding'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, allowed):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, attention_mask=None):
        T = tokens.size(1)
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.lm_head(self.ln_f(x))


class Block2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, allowed):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedGPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block2(c) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight.data = self.wte.weight.data

    def forward(self, tokens, attention_mask=None):
        T = tokens.size(1)
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.lm_head(self.ln_f(x))


right = Subject(
    kind="decoder",
    build=lambda c: TiedGPT(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "learned", "beyond_max_len": "error", "padding_side": "right", "tied": True, "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: TiedGPT2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "learned", "beyond_max_len": "error", "padding_side": "right", "tied": True, "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    mask_forms=("padding",),
)
