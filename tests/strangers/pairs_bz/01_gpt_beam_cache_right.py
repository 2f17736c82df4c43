"""A small GPT with a key-value cache that beam search can reorder."""
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        S = k.size(2)
        visible = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(~visible, float("-inf")), dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y), (k, v)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.c_out = nn.Linear(n_inner, n_embd)

    def forward(self, x, past=None):
        a, present = self.attn(self.ln_1(x), past)
        x = x + a
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)))), present


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_head, n_layer, n_inner):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head, n_inner) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, past=None):
        start = 0 if past is None else past[0][0].size(2)
        pos = torch.arange(start, start + idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents

    @staticmethod
    def reorder_cache(past, beam_idx):
        return [(k.index_select(0, beam_idx), v.index_select(0, beam_idx)) for k, v in past]


def cached(model, chunks, reorder=None):
    outputs, past = [], None
    for i, chunk in enumerate(chunks):
        logits, past = model(chunk, past)
        outputs.append(logits)
        if i == 0 and reorder is not None:
            past = model.reorder_cache(past, torch.as_tensor(reorder, device=chunk.device))
    return outputs


subject = Subject(
    kind="decoder",
    name="gpt",
    build=lambda c: GPT(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "tied": True},
)
