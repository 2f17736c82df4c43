"""GPT-2 in one file with a generate() that goes on when its context of 16 tokens is full."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "When the context is full, cached generation drops the oldest key and gives the new token the last position again."
CAUSE = (
    "Past the longest sequence the cache is trimmed as if positions were relative: the keys that stay hold the learned "
    "positions (and the contexts) of before, and new tokens all stand at the last one, while generation without a cache "
    "runs the last tokens anew from position 0."
)

CONTEXT = 16


class Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, cache):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        if cache is not None:
            k, v = cache.extend(self, k, v)
        new, all_ = q.shape[2], k.shape[2]
        mask = torch.ones(new, all_, dtype=torch.bool, device=x.device).tril(all_ - new)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Cache(dict):
    """Layer to keys and values."""

    length = 0

    def extend(self, layer, k, v):
        if layer in self:
            k, v = (torch.cat(both, dim=2) for both in zip(self[layer], (k, v)))
        self[layer] = k, v
        return k, v

    def forget_oldest(self):
        for layer, (k, v) in self.items():
            self[layer] = k[:, :, 1:], v[:, :, 1:]
        self.length -= 1


class GPT2(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(Layer(width, heads, inner) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for layer in self.h:
            x = layer(x, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        return F.linear(self.ln_f(x), self.wte.weight)

    def make_room(self, tokens, cache):
        """The cache is full: begin a new one with the last tokens. Return it and what it has to be given."""
        return Cache(), tokens[:, -CONTEXT:]

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache=True):
        cache, fed = Cache(), tokens[:, -CONTEXT:]
        for _ in range(steps):
            if not use_cache:
                logits = self(tokens[:, -CONTEXT:])
            else:
                if cache.length + fed.shape[1] > CONTEXT:
                    cache, fed = self.make_room(tokens, cache)
                logits = self(fed, cache)
            fed = logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, fed), dim=1)
        return tokens


class StreamingGPT2(GPT2):
    def make_room(self, tokens, cache):
        cache.forget_oldest()
        return cache, tokens[:, -1:]


def subject(cls):
    return Subject(
        kind="decoder",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=lambda m, tokens: m(tokens),
        generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
        declares={"positions": "learned", "max_len": CONTEXT, "beyond_max_len": "error", "tied": True,
                  "norm_placement": "pre", "activation": "gelu_tanh"},
    )  # fmt: skip


right, wrong = subject(GPT2), subject(StreamingGPT2)
