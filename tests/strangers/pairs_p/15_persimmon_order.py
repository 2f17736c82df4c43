"""Persimmon: LayerNorm on queries and keys, head by head, and rotary positions. fairseq's manner: args, build_* methods."""

from argparse import Namespace

import torch
from torch import nn

from veriformer.properties import Subject


def rotate(x, places):
    """Halves of the head are the two coordinates of the planes."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = places.double()[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class NormedRotaryAttention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads, self.head_dim = args.heads, args.embed_dim // args.heads
        if self.head_dim % 2 or self.head_dim < 4:
            raise ValueError("the width of a head must be even, and 4 or more")
        self.qkv_proj = self.build_projection(args.embed_dim, 3 * args.embed_dim)
        self.out_proj = self.build_projection(args.embed_dim, args.embed_dim)
        self.q_layernorm, self.k_layernorm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.normalize_before_rotary = args.normalize_before_rotary

    def build_projection(self, n_in, n_out):
        return nn.Linear(n_in, n_out)

    def prepare(self, x, layernorm, places):
        if self.normalize_before_rotary:
            return rotate(layernorm(x), places)
        return layernorm(rotate(x, places))

    def forward(self, x, allowed):
        b, t, d = x.shape
        q, k, v = self.qkv_proj(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.arange(t, device=x.device)
        q, k = self.prepare(q, self.q_layernorm, places), self.prepare(k, self.k_layernorm, places)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) * self.head_dim**-0.5
        probs = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out_proj(torch.einsum("bhts,bhsk->bthk", probs, v).reshape(b, t, d))


class DecoderLayer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.self_attn = NormedRotaryAttention(args)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(args.embed_dim), nn.LayerNorm(args.embed_dim)
        self.fc1, self.fc2 = nn.Linear(args.embed_dim, args.ffn_dim), nn.Linear(args.ffn_dim, args.embed_dim)

    def forward(self, x, allowed):
        x = x + self.self_attn(self.self_attn_layer_norm(x), allowed)
        return x + self.fc2(torch.relu(self.fc1(self.final_layer_norm(x))))


class PersimmonDecoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab, args.embed_dim)
        self.layers = nn.ModuleList([self.build_decoder_layer(args) for _ in range(args.layers)])
        self.layer_norm = nn.LayerNorm(args.embed_dim)
        self.output_projection = nn.Linear(args.embed_dim, args.vocab, bias=False)

    def build_decoder_layer(self, args):
        return DecoderLayer(args)

    def forward(self, prev_output_tokens, real=None):
        t = prev_output_tokens.shape[1]
        allowed = torch.ones(t, t, dtype=torch.bool, device=prev_output_tokens.device).tril()[None, None]
        if real is not None:
            allowed = (allowed & real.bool()[:, None, None]) | torch.eye(t, dtype=torch.bool, device=real.device)
        x = self.embed_tokens(prev_output_tokens)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.output_projection(self.layer_norm(x))


def subject(before):
    def build(c):
        return PersimmonDecoder(
            Namespace(vocab=c.vocab_size, embed_dim=c.d_model, ffn_dim=c.d_ff, heads=c.num_heads, layers=c.num_layers,
                      normalize_before_rotary=before)
        )

    return Subject(
        kind="decoder",
        name=f"persimmon, normalised {'before' if before else 'behind'} the rotation",
        build=build,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": True, "positions": "rotary", "layout": "halves", "query_key_norm": True, "norm": "layer",
                  "norm_placement": "pre", "activation": "relu"},
    )


right, wrong = subject(True), subject(False)

WHAT = "Queries and keys are LayerNormed after they were rotated, not before."
CAUSE = (
    "LayerNorm subtracts the mean over the channels of a head, which the rotation changes: behind the rotation the norm depends on "
    "the absolute position, so scores are no function of the distance and shifting all positions changes the outputs."
)
