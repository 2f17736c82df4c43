"""The decoder half of Vaswani et al. as a language model, with a cache that beam search reorders."""

import copy
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        assert d_model % h == 0
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, x, layer_past):
        nb = x.size(0)
        q, k, v = [lin(x).view(nb, -1, self.h, self.d_k).transpose(1, 2) for lin in self.linears[:3]]
        if layer_past is not None:
            k = torch.cat([layer_past[0], k], dim=2)
            v = torch.cat([layer_past[1], v], dim=2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        t, s = scores.shape[-2:]
        rows = torch.arange(s - t, s, device=x.device)[:, None]
        scores = scores.masked_fill(torch.arange(s, device=x.device)[None] > rows, -1e30)
        y = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.linears[-1](y.transpose(1, 2).contiguous().view(nb, -1, self.h * self.d_k)), (k, v)


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model)
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norms = nn.ModuleList([nn.LayerNorm(d_model), nn.LayerNorm(d_model)])

    def forward(self, x, layer_past=None):
        a, present = self.self_attn(x, layer_past)
        x = self.norms[0](x + a)
        return self.norms[1](x + self.w_2(self.w_1(x).relu())), present


class LanguageModel(nn.Module):
    def __init__(self, vocab, d_model, h, n, d_ff, max_len):
        super().__init__()
        self.lut, self.place = nn.Embedding(vocab, d_model), nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList([DecoderLayer(d_model, h, d_ff) for _ in range(n)])
        self.generator = nn.Linear(d_model, vocab)

    def forward(self, ids, past=None):
        offset = past[0][0].size(2) if past is not None else 0
        x = self.lut(ids) + self.place(torch.arange(offset, offset + ids.size(1), device=ids.device))
        presents = []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, past[i] if past is not None else None)
            presents.append(present)
        return self.generator(x), presents


def reorder_rebuilt(past, beam_idx):
    return [tuple(state.index_select(0, beam_idx) for state in layer_past) for layer_past in past]


def reorder_in_loop(past, beam_idx):
    for layer_past in past:
        layer_past = tuple(state.index_select(0, beam_idx) for state in layer_past)
    return past


def beam_cache(reorder_cache):
    def cache(model, chunks, reorder=None):
        past, out = None, []
        for i, chunk in enumerate(chunks):
            if i == 1 and reorder is not None:
                past = reorder_cache(past, torch.as_tensor(reorder, device=chunk.device))
            logits, past = model(chunk, past)
            out.append(logits)
        return torch.cat(out, dim=1)

    return cache


def subject(reorder_cache):
    return Subject(
        kind="decoder",
        name="beam decoder",
        build=lambda c: LanguageModel(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
        forward=lambda m, tokens: m(tokens)[0],
        cache=beam_cache(reorder_cache),
        declares={"causal": True},
    )


right = subject(reorder_rebuilt)
wrong = subject(reorder_in_loop)
WHAT = "reorder_cache rebinds the loop variable and returns the cache as it was: beams go on with other beams' past"
CAUSE = (
    "Reordering the cache has no effect: after beam search picks its samples, keys and values stay in the old order and "
    "each sample continues from another sample's past."
)
