"""nanoGPT with a preallocated key-value cache, for sampling and beam search."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 8


class StaticCache:
    """Keys and values of all layers in two buffers [L, B, H, block_size, K], allocated once."""

    def __init__(self, config, batch_size, like):
        head = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, config.block_size, head)
        self.k = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.v = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    def write(self, layer, k, v):
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def reorder(self, beams):
        """Beam b goes on as beam beams[b]; the buffers stay where they are."""
        used = slice(0, self.length)
        for buffer in (self.k, self.v):
            chosen = buffer[:, :, :, used].index_select(1, beams)
            for b in range(len(beams)):
                buffer[:, b, :, used] = chosen[:, b]


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.layer = config.n_head, layer

    def forward(self, x, cache=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.write(self.layer, k, v)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        att = F.softmax(att.masked_fill(~mask, float("-inf")), dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, cache=None):
        past = cache.length if cache is not None else 0
        pos = torch.arange(past, past + idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x, cache)
        if cache is not None:
            cache.length += idx.size(1)
        return self.lm_head(self.ln_f(x))


def build(c):
    return GPT(GPTConfig(c.max_len, c.vocab_size, c.num_layers, c.num_heads, c.d_model))


@torch.no_grad()
def run_cached(model, chunks, reorder=None):
    cache = StaticCache(model.config, chunks[0].size(0), model.wte.weight)
    outputs = []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            cache.reorder(torch.as_tensor(reorder, device=chunk.device))
        outputs.append(model(chunk, cache))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="nanoGPT with a static cache",
    build=build,
    forward=lambda model, tokens: model(tokens),
    cache=run_cached,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "max_len": 32},
)
