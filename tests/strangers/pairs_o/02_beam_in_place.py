"""nanoGPT with a list of (key, value) per layer as cache, and a beam search that moves the cache along."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The beams of the cache are moved one after another in place, so a beam may be copied that was overwritten before."
CAUSE = (
    "The reordering of the key-value cache writes row b from row reorder[b] of the same tensor in a loop: a later row "
    "that comes from an earlier, already replaced one gets the wrong sample's keys and values."
)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        S = k.size(2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        visible = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        att = F.softmax(att.masked_fill(~visible, float("-inf")), dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y), (k, v)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(), nn.Linear(n_inner, n_embd))

    def forward(self, x, past=None):
        a, present = self.attn(self.ln_1(x), past)
        x = x + a
        return x + self.mlp(self.ln_2(x)), present


def gather_beams(presents, beam_idx):
    """Every layer's keys and values, row b taken from row beam_idx[b]."""
    return [tuple(t.index_select(0, beam_idx) for t in layer) for layer in presents]


def move_beams(presents, beam_idx):
    """The same without allocating the cache a second time."""
    for layer in presents:
        for t in layer:
            for row, origin in enumerate(beam_idx.tolist()):
                if row != origin:
                    t[row].copy_(t[origin])
    return presents


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, n_inner, reorder):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.reorder = reorder

    def forward(self, idx, past=None):
        before = 0 if past is None else past[0][0].size(2)
        pos = torch.arange(before, before + idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


@torch.no_grad()
def decode(model, chunks, reorder=None):
    outputs, past = [], None
    for step, chunk in enumerate(chunks):
        logits, past = model(chunk, past)
        outputs.append(logits)
        if step == 0 and reorder is not None:
            past = model.reorder(past, torch.as_tensor(reorder, device=chunk.device))
    return torch.cat(outputs, dim=1)


def gpt(reorder):
    return Subject(
        kind="decoder",
        build=lambda c: GPT(c.vocab_size, c.max_len, c.num_layers, c.num_heads, c.d_model, c.d_ff, reorder),
        forward=lambda m, tokens: m(tokens)[0],
        cache=decode,
    )


right = gpt(gather_beams)
wrong = gpt(move_beams)
