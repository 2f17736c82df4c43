"""labml-nn: its annotated multi-head attention, layers and stacks, which put time first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import causal_mask
from veriformer.properties.subject.subject import Subject


def build_attention(config: Any, **options: Any) -> nn.Module:
    """Return multi-head attention of the drawn sizes."""
    from labml_nn.transformers import MultiHeadAttention

    return MultiHeadAttention(config.num_heads, config.d_model, config.dropout, **options)


def build_rotary(config: Any, share: float = 1.0) -> nn.Module:
    """Return multi-head attention with rotary positions."""
    from labml_nn.transformers.rope import RotaryPEMultiHeadAttention

    return RotaryPEMultiHeadAttention(config.num_heads, config.d_model, share, config.dropout)


def build_alibi(config: Any) -> nn.Module:
    """Return multi-head attention with linear biases."""
    from labml_nn.transformers.alibi import AlibiMultiHeadAttention

    return AlibiMultiHeadAttention(config.num_heads, config.d_model, config.dropout)


def build_relative(config: Any) -> nn.Module:
    """Return multi-head attention with the relative positions of Transformer-XL."""
    from labml_nn.transformers import RelativeMultiHeadAttention

    return RelativeMultiHeadAttention(config.num_heads, config.d_model, config.dropout)


def _layer(config: Any) -> Any:
    from labml_nn.transformers import MultiHeadAttention, TransformerLayer
    from labml_nn.transformers.feed_forward import FeedForward

    return TransformerLayer(
        d_model=config.d_model,
        self_attn=MultiHeadAttention(config.num_heads, config.d_model, config.dropout),
        feed_forward=FeedForward(config.d_model, config.d_ff, config.dropout),
        dropout_prob=config.dropout,
    )


def build_layer(config: Any) -> nn.Module:
    """Return one pre-LN layer of the drawn sizes."""
    return _layer(config)


def build_encoder(config: Any) -> nn.Module:
    """Return a stack of layers, closed by a norm."""
    from labml_nn.transformers.models import Encoder

    return Encoder(_layer(config), config.num_layers)


def _mask(x: Any, attention_mask: Any, causal: bool) -> Any:
    """Return its form of mask, `[T, T, B]`, True = may attend, or None."""
    length = x.shape[1]
    mask = causal_mask(length, x.device)[:, :, None] if causal else None
    if attention_mask is not None:
        wide = attention_mask if attention_mask.ndim == 3 else attention_mask.expand(length, -1, -1).transpose(0, 1)
        pairs = (wide if wide.shape[0] == x.shape[0] else wide.expand(x.shape[0], -1, -1)).permute(1, 2, 0)
        mask = pairs if mask is None else mask & pairs
    return mask


def attend(model: Any, x: Any, attention_mask: Any = None, causal: bool = False) -> Any:
    """Attend from x `[B, T, D]` to itself."""
    turned = x.transpose(0, 1)
    return model(query=turned, key=turned, value=turned, mask=_mask(x, attention_mask, causal)).transpose(0, 1)


def encode(model: Any, x: Any, attention_mask: Any = None, causal: bool = False) -> Any:
    """Call a layer or a stack on x `[B, T, D]`."""
    return model(x=x.transpose(0, 1), mask=_mask(x, attention_mask, causal)).transpose(0, 1)


def _attention(label: str, build: Any, causal: bool = False, **facts: Any) -> Subject:
    return Subject(
        kind="self_attention",
        name=f"labml-nn {label}",
        build=build,
        forward=partial(attend, causal=causal),
        mask_forms=("padding",),
        declares={"causal": causal, **facts},
    )


SHIPPED = {
    "attention": _attention("MultiHeadAttention", build_attention, positions="none"),
    "attention-no-bias": _attention(
        "MultiHeadAttention (no bias)", partial(build_attention, bias=False), positions="none"
    ),
    "attention-causal": _attention("MultiHeadAttention (causal)", build_attention, causal=True),
    "attention-rotary": _attention("RotaryPEMultiHeadAttention", build_rotary),
    "attention-rotary-half": replace(
        _attention("RotaryPEMultiHeadAttention (half)", partial(build_rotary, share=0.5)),
        domain={"d_model": (8, 16), "num_heads": (2, 1)},  # half of a head must be a whole number of pairs
    ),
    # it insists on the causal mask of a whole batch, so that padding cannot be given
    "attention-alibi": replace(_attention("AlibiMultiHeadAttention", build_alibi, causal=True), mask_forms=()),
    "attention-relative": _attention("RelativeMultiHeadAttention", build_relative),
    "layer": Subject(
        kind="layer",
        name="labml-nn TransformerLayer",
        build=build_layer,
        forward=encode,
        mask_forms=("padding",),
        declares={"causal": False, "positions": "none"},
    ),
    "encoder": Subject(
        kind="encoder",
        name="labml-nn Encoder",
        inputs="embeddings",
        build=build_encoder,
        forward=encode,
        mask_forms=("padding",),
        declares={"causal": False, "positions": "none"},
    ),
    "encoder-causal": Subject(
        kind="encoder",
        name="labml-nn Encoder (causal)",
        inputs="embeddings",
        build=build_encoder,
        forward=partial(encode, causal=True),
        mask_forms=("padding",),
        declares={"causal": True},
    ),
}
