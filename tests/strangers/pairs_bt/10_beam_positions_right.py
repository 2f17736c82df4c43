"""GPT-2 like decoder for batches padded on either side, with beam search's reordering of the cache."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, allowed, past):
        B, T, D = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).split(D, dim=2))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        scores = q @ k.transpose(-1, -2) / (D // self.heads) ** 0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, D)), (k, v)


class Block(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(approximate="tanh"), nn.Linear(d_ff, d))

    def forward(self, x, allowed, past=None):
        y, present = self.attn(self.ln_1(x), allowed, past)
        x = x + y
        return x + self.mlp(self.ln_2(x)), present


class GPT2(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff, max_len):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.h = nn.ModuleList([Block(d, heads, d_ff) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, mask, position_ids, past=None):
        """mask [B, S] of all tokens up to the last of these, position_ids [B, T] of these alone."""
        T, S = tokens.shape[1], mask.shape[1]
        causal = torch.ones(T, S, dtype=torch.bool, device=tokens.device).tril(S - T)
        allowed = causal & mask[:, None, None, :]
        x = self.wte(tokens) + self.wpe(position_ids)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, allowed, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def positions_of(mask):
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def whole(model, tokens, attention_mask=None):
    mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
    return model(tokens, mask, positions_of(mask))[0]


def cached(model, chunks, attention_mask=None, reorder=None):
    if attention_mask is None:
        attention_mask = chunks[0].new_ones(len(chunks[0]), sum(c.shape[1] for c in chunks), dtype=torch.bool)
    position_ids = positions_of(attention_mask)
    outputs, past, done = [], None, 0
    for chunk in chunks:
        upto = done + chunk.shape[1]
        y, past = model(chunk, attention_mask[:, :upto], position_ids[:, done:upto], past)
        outputs.append(y)
        if done == 0 and reorder is not None:
            past = [(k.index_select(0, reorder), v.index_select(0, reorder)) for k, v in past]
            attention_mask = attention_mask.index_select(0, reorder)
            position_ids = position_ids.index_select(0, reorder)
        done = upto
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-2 with beams",
    build=lambda c: GPT2(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=whole,
    cache=cached,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
        "padding_side": "both",
        "reorders_mask": True,
    },
)
