"""Mistral: every layer sees the last WINDOW tokens; a cache hands on no more than that."""

from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


@dataclass
class ModelArgs:
    dim: int
    n_layers: int
    head_dim: int
    hidden_dim: int
    n_heads: int
    vocab_size: int
    norm_eps: float = 1e-5
    sliding_window: int = WINDOW


def apply_rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Channels 2i and 2i + 1 turn together."""
    dim = x.shape[-1]
    freqs = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angles = positions.to(torch.float64)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class WindowCache:
    def __init__(self, args: ModelArgs):
        self.window = args.sliding_window
        self.keys = [None] * args.n_layers
        self.values = [None] * args.n_layers
        self.seen = 0

    def update(self, layer_id, k, v):
        if self.keys[layer_id] is not None:
            past = self.window - 1
            k = torch.cat((self.keys[layer_id][:, :, -past:], k), dim=2)
            v = torch.cat((self.values[layer_id][:, :, -past:], v), dim=2)
        self.keys[layer_id], self.values[layer_id] = k, v
        return k, v

    def reorder(self, beams):
        self.keys = [k[beams] for k in self.keys]
        self.values = [v[beams] for v in self.values]


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, layer_id: int):
        super().__init__()
        self.args, self.layer_id = args, layer_id
        self.scale = args.head_dim**-0.5
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x, positions, padding, cache):
        bsz, seqlen, _ = x.shape
        shape = (bsz, seqlen, self.args.n_heads, self.args.head_dim)
        xq, xk, xv = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary(xq, positions), apply_rotary(xk, positions)
        if cache is not None:
            xk, xv = cache.update(self.layer_id, xk, xv)
        end = int(positions[-1]) + 1
        key_positions = torch.arange(end - xk.shape[2], end, device=x.device)
        distance = positions[:, None] - key_positions[None, :]
        visible = (distance >= 0) & (distance < self.args.sliding_window)
        if padding is not None:
            visible = visible & padding[:, None, None, key_positions]
        scores = (xq @ xk.transpose(2, 3)) * self.scale
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        out = scores.softmax(-1) @ xv
        return self.wo(out.transpose(1, 2).reshape(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, args: ModelArgs, layer_id: int):
        super().__init__()
        self.attention = Attention(args, layer_id)
        self.feed_forward = FeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x, positions, padding, cache):
        h = x + self.attention(self.attention_norm(x), positions, padding, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Mistral(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList([Block(args, i) for i in range(args.n_layers)])
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens, padding=None, cache=None):
        start = 0 if cache is None else cache.seen
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, positions, padding, cache)
        if cache is not None:
            cache.seen += tokens.shape[1]
        return self.output(self.norm(h))


def by_chunks(model, chunks, attention_mask=None, reorder=None):
    cache, logits = WindowCache(model.args), []
    for n, chunk in enumerate(chunks):
        logits.append(model(chunk, attention_mask, cache))
        if n == 0 and reorder is not None:
            cache.reorder(reorder)
            if attention_mask is not None:
                done = chunk.shape[1]
                attention_mask = torch.cat((attention_mask[reorder, :done], attention_mask[:, done:]), dim=1)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def greedy(model, tokens, steps, use_cache):
    cache = WindowCache(model.args) if use_cache else None
    feed = tokens
    for _ in range(steps):
        best = model(feed, None, cache)[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, best), dim=1)
        feed = best if use_cache else tokens
    return tokens


subject = Subject(
    kind="decoder",
    name="mistral",
    build=lambda c: Mistral(ModelArgs(c.d_model, c.num_layers, c.d_model // c.num_heads, c.d_ff, c.num_heads, c.vocab_size)),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=by_chunks,
    generate=greedy,
    domain={"d_model": (8, 16), "num_heads": (1, 2, 4)},
    declares={
        "causal": True,
        "window": WINDOW,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "embedding_scale": False,
        "memory": "quadratic",
        "padding_side": "both",
        "cached_chunks": True,
        "structure": "textbook",
    },
)
