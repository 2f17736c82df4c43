"""A decoder as pure functions over a flat dictionary of parameters, with an explicit cache, in the manner of JAX code."""

import functools

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Behind the prompt, cached steps attend to everything in the cache, the padding of the prompt included."
CAUSE = (
    "The padding mask is applied in the prefill alone; later steps build their mask from positions only, so a batch "
    "whose prompts are padded on the left attends to the cached keys of padding."
)


def init(vocab, dim, heads, layers, inner):
    if dim // heads % 2:
        raise ValueError("rotary positions: the width of a head must be even")
    shapes = {"embed": (vocab, dim), "head": (dim, vocab), "norm": (dim,)}
    for i in range(layers):
        shapes |= {f"norm1_{i}": (dim,), f"norm2_{i}": (dim,), f"out_{i}": (dim, dim)}
        shapes |= {f"q_{i}": (dim, dim), f"k_{i}": (dim, dim), f"v_{i}": (dim, dim)}
        shapes |= {f"up_{i}": (dim, inner), f"down_{i}": (inner, dim)}
    return {n: torch.randn(s) * s[0] ** -0.5 if len(s) == 2 else torch.ones(s) for n, s in shapes.items()}


def rms_norm(gain, x):
    kept = x.to(torch.promote_types(x.dtype, torch.float32))
    return (kept * torch.rsqrt(kept.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gain


def rotary(x, start):
    half = x.shape[-1] // 2
    kept = torch.promote_types(x.dtype, torch.float32)
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=kept) / half)
    angles = torch.arange(start, start + x.shape[-2], device=x.device, dtype=kept)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(params, i, x, heads, mask, start, kv):
    q, k, v = ((x @ params[f"{n}_{i}"]).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
    q, k = rotary(q, start), rotary(k, start)
    if kv is not None:
        k, v = torch.cat((kv[0], k), dim=2), torch.cat((kv[1], v), dim=2)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    y = scores.softmax(dim=-1) @ v
    return y.transpose(1, 2).flatten(2) @ params[f"out_{i}"], (k, v)


def apply(params, tokens, mask, heads, layers, start=0, cache=None):
    """Logits and the new cache. mask `[B, 1, T, start + T]`."""
    x, new = params["embed"][tokens], []
    for i in range(layers):
        y, kv = attention(params, i, rms_norm(params[f"norm1_{i}"], x), heads, mask, start, cache and cache[i])
        x, new = x + y, [*new, kv]
        y = rms_norm(params[f"norm2_{i}"], x) @ params[f"up_{i}"]
        x = x + torch.relu(y) @ params[f"down_{i}"]
    return rms_norm(params["norm"], x) @ params["head"], new


def causal(tokens, start):
    ones = torch.ones(tokens.shape[1], start + tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return ones.tril(start)


def prefill_mask(tokens, attention_mask):
    return causal(tokens, 0) & attention_mask[:, None, None, : tokens.shape[1]].bool()


def step_mask(tokens, start, attention_mask):
    return causal(tokens, start) & attention_mask[:, None, None, : start + tokens.shape[1]].bool()


def step_mask_of_positions(tokens, start, attention_mask):
    return causal(tokens, start)[None, None]


class Model(nn.Module):
    """Where the parameters live; everything else is a function."""

    def __init__(self, vocab, dim, heads, layers, inner):
        super().__init__()
        self.params = nn.ParameterDict(init(vocab, dim, heads, layers, inner))
        self.run = functools.partial(apply, heads=heads, layers=layers)


def forward(model, tokens, attention_mask=None):
    attention_mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
    return model.run(model.params, tokens, prefill_mask(tokens, attention_mask))[0]


@torch.no_grad()
def decode(step, model, chunks, attention_mask=None):
    if attention_mask is None:
        attention_mask = torch.ones_like(torch.cat(list(chunks), dim=1))
    logits, cache = model.run(model.params, chunks[0], prefill_mask(chunks[0], attention_mask))
    outputs, start = [logits], chunks[0].shape[1]
    for chunk in chunks[1:]:
        mask = step(chunk, start, attention_mask)
        logits, cache = model.run(model.params, chunk, mask, start=start, cache=cache)
        outputs.append(logits)
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


def subject(step):
    return Subject(
        kind="decoder",
        name="functional decoder",
        build=lambda c: Model(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=forward,
        cache=functools.partial(decode, step),
        mask_forms=("padding",),
        declares={"positions": "rotary", "layout": "halves", "padding_side": "both", "norm": "rms"},
    )


right, wrong = subject(step_mask), subject(step_mask_of_positions)
