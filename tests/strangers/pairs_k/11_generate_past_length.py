"""A small GPT whose generate() has a key-value cache."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WHAT = "The length of the past is read off the heads' axis of the cached keys, so every generated token gets one same position."
CAUSE = (
    "In cached generation the position of new tokens is wrong: the past's length is taken from the cache's axis of heads, "
    "not of time, so position ids do not go on behind the prompt."
)


def make(axis):
    class Head(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.num_heads, self.size = c.num_heads, c.d_model // c.num_heads
            self.query = nn.Linear(c.d_model, c.d_model, bias=False)
            self.key = nn.Linear(c.d_model, c.d_model, bias=False)
            self.value = nn.Linear(c.d_model, c.d_model, bias=False)
            self.proj = nn.Linear(c.d_model, c.d_model)

        def forward(self, x, past):
            B, T, C = x.shape
            shape = (B, T, self.num_heads, self.size)
            q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            S = k.shape[2]
            wei = q @ k.transpose(-2, -1) * self.size**-0.5
            wei = wei.masked_fill(torch.ones(T, S, device=x.device).tril(S - T) == 0, float("-inf"))
            out = (F.softmax(wei, dim=-1) @ v).transpose(1, 2).reshape(B, T, C)
            return self.proj(out), (k, v)

    class Block(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.sa = Head(c)
            self.ffwd = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))
            self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

        def forward(self, x, past):
            y, present = self.sa(self.ln1(x), past)
            x = x + y
            return x + self.ffwd(self.ln2(x)), present

    class LanguageModel(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.token_embedding_table = nn.Embedding(c.vocab_size, c.d_model)
            self.position_embedding_table = nn.Embedding(c.max_len, c.d_model)
            self.blocks = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
            self.ln_f = nn.LayerNorm(c.d_model)
            self.lm_head = nn.Linear(c.d_model, c.vocab_size)

        def forward(self, idx, past=None):
            B, T = idx.shape
            seen = 0 if past is None else past[0][0].shape[axis]
            pos = self.position_embedding_table(torch.arange(seen, seen + T, device=idx.device))
            x = self.token_embedding_table(idx) + pos
            presents = []
            for i, block in enumerate(self.blocks):
                x, present = block(x, None if past is None else past[i])
                presents.append(present)
            return self.lm_head(self.ln_f(x)), presents

        @torch.no_grad()
        def generate(self, idx, max_new_tokens, use_cache=True):
            past = None
            for _ in range(max_new_tokens):
                logits, present = self(idx[:, -1:] if past is not None else idx, past)
                if use_cache:
                    past = present
                idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
            return idx

    return LanguageModel


def subject(axis):
    return Subject(
        kind="decoder",
        name="language model with generate",
        build=make(axis),
        forward=lambda m, tokens: m(tokens)[0],
        generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    )


right = subject(2)
wrong = subject(1)
