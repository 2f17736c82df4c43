"""The parts of the reference Transformer: softmax, attention, positions, norms, feed-forward networks, layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.attention import MultiHeadAttention, attention
from veriformer.reference.attention import softmax as reference_softmax
from veriformer.reference.blocks import EncoderLayer
from veriformer.reference.config import Config
from veriformer.reference.feedforward import FEED_FORWARDS
from veriformer.reference.normalization import NORMS
from veriformer.reference.position_bias import AlibiBias, T5Bias
from veriformer.reference.positions import LearnedPositions, SinusoidalPositions
from veriformer.reference.rotary import Rotary


def softmax(model: Any, scores: Any, dim: int = -1) -> Any:
    """Call the reference softmax."""
    return reference_softmax(scores, dim)


def attend(model: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, causal: bool = False) -> Any:
    """Call the reference attention."""
    return attention(q, k, v, attention_mask=attention_mask, causal=causal)[0]


def build_attention(config: Any, grouped: bool = False, causal: bool = False) -> nn.Module:
    """Return multi-head attention, with grouped heads if asked for."""
    groups = config.num_key_value_heads if grouped else config.num_heads
    return MultiHeadAttention(
        config.d_model, config.num_heads, num_key_value_heads=groups, dropout=config.dropout, causal=causal
    )


def self_attention(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Attend from x `[B, T, D]` to itself."""
    return model(x, attention_mask=attention_mask)[0]


def self_attention_weights(model: Any, x: Any) -> Any:
    """Return the attention weights `[B, H, T, T]`."""
    return model(x)[1]


def cross_attention(model: Any, x: Any, memory: Any, memory_mask: Any = None) -> Any:
    """Attend from x `[B, T, D]` to memory `[B, S, D]`."""
    return model(x, memory, attention_mask=memory_mask)[0]


def cross_attention_weights(model: Any, x: Any, memory: Any) -> Any:
    """Return the attention weights `[B, H, T, S]`."""
    return model(x, memory)[1]


def projections(model: Any) -> Any:
    """Return the projections and their biases."""
    parts = {name: getattr(model, f"{name}_proj").weight for name in "qkvo"}
    biases = {f"{name}_bias": getattr(model, f"{name}_proj").bias for name in "qkvo"}
    return parts | {name: bias for name, bias in biases.items() if bias is not None}


def build_sinusoidal(config: Any) -> nn.Module:
    """Return sinusoidal positions."""
    return SinusoidalPositions(config.d_model)


def sinusoids(model: Any, length: int) -> Any:
    """Return what is added at positions 0..length-1, `[T, D]` float64."""
    return model(torch.zeros(1, length, model.d_model, dtype=torch.float64), torch.arange(length)[None])[0]


def build_learned(config: Any) -> nn.Module:
    """Return learned positions."""
    return LearnedPositions(config.d_model, config.max_len)


def learned(model: Any, length: int) -> Any:
    """Return the rows that are added at positions 0..length-1, `[T, D]`."""
    positions = torch.arange(length, device=model.table.weight.device)[None]
    zeros = torch.zeros(1, length, model.table.embedding_dim, dtype=model.table.weight.dtype, device=positions.device)
    return model(zeros, positions)[0]


def build_rotary(config: Any) -> nn.Module:
    """Return rotary positions for the drawn head width."""
    return Rotary(config.d_head)


def rotate(model: Any, x: Any, positions: Any) -> Any:
    """Rotate x `[B, H, T, K]` to positions `[T]`."""
    return model(x, positions)


def build_alibi(config: Any) -> nn.Module:
    """Return ALiBi for the drawn number of heads."""
    return AlibiBias(config.num_heads)


def build_t5(config: Any, bidirectional: bool = True) -> nn.Module:
    """Return the T5 bias for the drawn number of heads."""
    return T5Bias(config.num_heads, bidirectional=bidirectional)


def bias(model: Any, query_len: int, key_len: int) -> Any:
    """Return the bias `[H, T, S]` of positions 0..T-1 and 0..S-1."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    return model(torch.arange(query_len, device=device)[None], torch.arange(key_len, device=device)[None])[0]


def build_norm(config: Any, norm: str = "layer") -> nn.Module:
    """Return a normalization of the drawn width."""
    return NORMS[norm](config.d_model, 1e-5)


def build_feed_forward(config: Any, activation: str = "relu") -> nn.Module:
    """Return a feed-forward network of the drawn sizes."""
    return FEED_FORWARDS[activation](config.d_model, config.d_ff, dropout=config.dropout)


def apply(model: Any, x: Any) -> Any:
    """Call the model on x `[B, T, D]`."""
    return model(x)


def build_layer(config: Any, norm_placement: str = "pre", causal: bool = False, drop_path: float = 0.0) -> nn.Module:
    """Return one layer of the drawn sizes."""
    chosen = Config(
        d_model=config.d_model, num_heads=config.num_heads, d_ff=config.d_ff, dropout=config.dropout,
        norm_placement=norm_placement, drop_path=drop_path,
    )  # fmt: skip
    return EncoderLayer(chosen, causal=causal)


def layer(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Send x `[B, T, D]` through the layer."""
    return model(x, attention_mask)[0]


def _multi_head(name: str, grouped: bool = False, causal: bool = False) -> Subject:
    return Subject(
        kind="self_attention",
        name=f"reference {name}",
        build=partial(build_attention, grouped=grouped, causal=causal),
        forward=self_attention,
        weights=self_attention_weights,
        projections=projections,
        mask_forms=("padding", "pairwise"),
        declares={
            "causal": causal,
            "positions": "none",
            "bias": True,
            "empty_row": "zeros",
            "grouped_queries": grouped,
        },
    )


def _layer(placement: str, causal: bool = False, drop_path: float = 0.0) -> Subject:
    facts = {"causal": causal, "positions": "none", "norm": "layer", "norm_placement": placement, "residual": True}
    words = [f"{placement}-LN", *["causal"] * causal, *["stochastic depth"] * bool(drop_path)]
    return Subject(
        kind="layer",
        name=f"reference layer ({', '.join(words)})",
        build=partial(build_layer, norm_placement=placement, causal=causal, drop_path=drop_path),
        forward=layer,
        mask_forms=("padding", "pairwise"),
        declares={**facts, "activation": "relu", "bias": True, "empty_row": "zeros"},
    )


def _t5(bidirectional: bool) -> Subject:
    return Subject(
        kind="position_bias",
        name=f"reference T5 bias ({'bidirectional' if bidirectional else 'causal'})",
        build=partial(build_t5, bidirectional=bidirectional),
        forward=bias,
        declares={"positions": "t5", "bidirectional": bidirectional, "num_buckets": 32, "max_distance": 128},
    )


SHIPPED = {
    "softmax": Subject(kind="softmax", name="reference softmax", forward=softmax),
    "attention": Subject(
        kind="attention",
        name="reference attention",
        forward=attend,
        mask_forms=("pairwise", "additive"),
        declares={"grouped_queries": True, "empty_row": "zeros", "memory": "quadratic"},
    ),
    "multi-head": _multi_head("multi-head attention"),
    "grouped-heads": _multi_head("grouped-query attention", grouped=True),
    "causal-heads": _multi_head("causal multi-head attention", causal=True),
    "cross-attention": Subject(
        kind="cross_attention",
        name="reference cross-attention",
        build=build_attention,
        forward=cross_attention,
        weights=cross_attention_weights,
        projections=projections,
        declares={"bias": True, "empty_row": "zeros"},
    ),
    "sinusoidal": Subject(
        kind="positions",
        name="reference sinusoidal positions",
        build=build_sinusoidal,
        forward=sinusoids,
        declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "works"},
    ),
    "learned": Subject(
        kind="positions",
        name="reference learned positions",
        build=build_learned,
        forward=learned,
        declares={"positions": "learned", "beyond_max_len": "error"},
    ),
    "rotary": Subject(
        kind="rotary",
        name="reference rotary positions",
        build=build_rotary,
        forward=rotate,
        declares={"layout": "interleaved"},
    ),
    "alibi": Subject(
        kind="position_bias",
        name="reference ALiBi",
        build=build_alibi,
        forward=bias,
        declares={"positions": "alibi", "bidirectional": False},
    ),
    "t5": _t5(True),
    "t5-causal": _t5(False),
    "layer-norm": Subject(
        kind="norm", name="reference LayerNorm", build=build_norm, forward=apply, declares={"norm": "layer"}
    ),
    "rms-norm": Subject(
        kind="norm", name="reference RMSNorm", build=partial(build_norm, norm="rms"), forward=apply,
        declares={"norm": "rms"},
    ),
    "feed-forward": Subject(
        kind="feed_forward", name="reference feed-forward", build=build_feed_forward, forward=apply,
        declares={"activation": "relu", "bias": True},
    ),
    "swiglu": Subject(
        kind="feed_forward", name="reference SwiGLU", build=partial(build_feed_forward, activation="swiglu"),
        forward=apply, declares={"activation": "swiglu", "bias": True},
    ),
    "layer-pre": _layer("pre"),
    "layer-post": _layer("post"),
    "layer-causal": _layer("pre", causal=True),
    "layer-depth": _layer("pre", drop_path=0.2),
}  # fmt: skip
