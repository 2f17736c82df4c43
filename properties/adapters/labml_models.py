"""labml-nn: its annotated multi-head attention, layers and stacks, which put time first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call, causal_mask
from veriformer.properties.adapters.shared.token_tables import OnTokens
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


def build_value_rotary(config: Any) -> nn.Module:
    """Return multi-head attention whose values are rotated too."""
    from labml_nn.transformers.rope.value_pe import RotaryValuePEMultiHeadAttention

    return RotaryValuePEMultiHeadAttention(config.num_heads, config.d_model, 1.0, 1.0, config.dropout)


def build_attention_free(config: Any) -> nn.Module:
    """Return the local variant of an attention-free Transformer, for sequences up to the drawn longest."""
    from labml_nn.transformers.aft import AFTLocal

    return AFTLocal(config.d_model, config.max_len, _WINDOW)


def build_primer(config: Any) -> nn.Module:
    """Return Primer's attention: a convolution over the past of each head."""
    from labml_nn.transformers.primer_ez import MultiDConvHeadAttention

    return MultiDConvHeadAttention(config.num_heads, config.d_model, config.dropout)


def build_norm(config: Any) -> nn.Module:
    """Return its LayerNorm."""
    from labml_nn.normalization.layer_norm import LayerNorm

    return LayerNorm(config.d_model)


def build_hourglass(config: Any) -> nn.Module:
    """Return an hourglass that shortens by three, less than most drawn lengths."""
    from labml_nn.transformers.hour_glass import HourGlass

    return HourGlass(config.num_heads, config.d_model, config.dropout, config.d_ff, [3])


def build_recurrent(config: Any) -> nn.Module:
    """Return a Transformer-XL on a table of tokens."""
    from labml_nn.transformers.feed_forward import FeedForward
    from labml_nn.transformers.xl import TransformerXL, TransformerXLLayer
    from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention

    layer = TransformerXLLayer(
        d_model=config.d_model,
        self_attn=RelativeMultiHeadAttention(config.num_heads, config.d_model, config.dropout),
        feed_forward=FeedForward(config.d_model, config.d_ff, config.dropout),
        dropout_prob=config.dropout,
    )
    return OnTokens(config, TransformerXL(layer, config.num_layers))


def run_recurrent(model: Any, tokens: Any) -> Any:
    """Call a Transformer-XL on tokens `[B, T]` without a memory."""
    return cached(model, [tokens])


def cached(model: Any, chunks: Any) -> Any:
    """Return the outputs chunk by chunk; its memory keeps what entered each layer."""
    memory: list[Any] = []
    outputs = []
    for chunk in chunks:
        x = model.table(chunk).transpose(0, 1)
        past = len(memory[0]) if memory else 0
        mask = causal_mask(past + len(x), x.device)[past:, :, None]
        output, new = model.part(x, memory, mask)
        memory = [torch.cat(pair) for pair in zip(memory, new, strict=True)] if memory else new
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs, dim=1)


def run_hourglass(model: Any, x: Any) -> Any:
    """Call an hourglass on x `[B, T, D]`."""
    return model(x.transpose(0, 1)).transpose(0, 1)


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


_WINDOW = 3
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
    "attention-rotary-values": _attention("RotaryValuePEMultiHeadAttention", build_value_rotary, causal=True),
    "attention-free": replace(_attention("AFTLocal", build_attention_free, causal=True), mask_forms=()),
    "attention-primer": replace(_attention("MultiDConvHeadAttention", build_primer, causal=True), mask_forms=()),
    "layer-norm": Subject(
        kind="norm", name="labml-nn LayerNorm", build=build_norm, forward=call, declares={"norm": "layer"}
    ),
    "hourglass": Subject(
        kind="encoder",
        name="labml-nn HourGlass",
        inputs="embeddings",
        build=build_hourglass,
        forward=run_hourglass,
        declares={"causal": True, "structure": "other"},
    ),
    "recurrent": Subject(
        kind="decoder",
        name="labml-nn TransformerXL",
        build=build_recurrent,
        forward=run_recurrent,
        cache=cached,
        declares={"positions": "relative"},
    ),
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
        declares={"causal": True, "padding_side": "right"},  # on the left a query is left without a key: NaN
    ),
}
