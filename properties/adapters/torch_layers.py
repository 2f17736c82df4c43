"""torch: nn.TransformerEncoderLayer, DecoderLayer, Encoder, Decoder and Transformer, on embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.torch_kernels import MATH
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


def build_encoder_layer(config: Any, norm_first: bool = False, activation: str = "relu") -> Any:
    """Return an encoder layer of the drawn sizes."""
    return nn.TransformerEncoderLayer(
        config.d_model, config.num_heads, config.d_ff, config.dropout,
        activation=activation, batch_first=True, norm_first=norm_first,
    )  # fmt: skip


def build_encoder(config: Any, norm_first: bool = False) -> nn.Module:
    """Return an encoder of the drawn sizes; a final norm closes a pre-LN stack."""
    layer = build_encoder_layer(config, norm_first)
    norm = nn.LayerNorm(config.d_model) if norm_first else None
    return nn.TransformerEncoder(layer, config.num_layers, norm=norm, enable_nested_tensor=not norm_first)


def build_decoder_layer(config: Any, norm_first: bool = False) -> Any:
    """Return a decoder layer of the drawn sizes."""
    return nn.TransformerDecoderLayer(
        config.d_model, config.num_heads, config.d_ff, config.dropout, batch_first=True, norm_first=norm_first
    )


def build_decoder(config: Any, norm_first: bool = False) -> nn.Module:
    """Return a decoder of the drawn sizes; a final norm closes a pre-LN stack."""
    norm = nn.LayerNorm(config.d_model) if norm_first else None
    return nn.TransformerDecoder(build_decoder_layer(config, norm_first), config.num_layers, norm=norm)


def build_transformer(config: Any, norm_first: bool = False) -> nn.Module:
    """Return encoder and decoder of the drawn sizes, each closed by a norm."""
    return nn.Transformer(
        config.d_model, config.num_heads, config.num_layers, config.num_layers, config.d_ff, config.dropout,
        batch_first=True, norm_first=norm_first,
    )  # fmt: skip


def encode(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Encode x `[B, T, D]`; attention_mask `[B, T]` True = may attend."""
    return model(x, src_key_padding_mask=None if attention_mask is None else ~attention_mask)


def encode_causally(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Encode x `[B, T, D]` under a causal mask, as decoder-only models are built from encoders."""
    blocked = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    padding = None if attention_mask is None else ~attention_mask
    if isinstance(model, nn.TransformerEncoder):
        return model(x, mask=blocked, src_key_padding_mask=padding)
    return model(x, src_mask=blocked, src_key_padding_mask=padding)


def decode(model: Any, source: Any, target: Any, source_mask: Any = None, target_mask: Any = None) -> Any:
    """Decode target `[B, T, D]` on memory source `[B, S, D]`; masks `[B, S]`, `[B, T]` True = may attend."""
    blocked = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
    return model(
        target, source,
        tgt_mask=blocked,
        tgt_key_padding_mask=None if target_mask is None else ~target_mask,
        memory_key_padding_mask=None if source_mask is None else ~source_mask,
    )  # fmt: skip


def transform(model: Any, source: Any, target: Any, source_mask: Any = None, target_mask: Any = None) -> Any:
    """Encode source `[B, S, D]` and decode target `[B, T, D]`; masks `[B, S]`, `[B, T]` True = may attend."""
    blocked = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
    padding = None if source_mask is None else ~source_mask
    return model(
        source, target,
        tgt_mask=blocked,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
        tgt_key_padding_mask=None if target_mask is None else ~target_mask,
    )  # fmt: skip


_CAUSAL_PADDING = "right"  # on the left it leaves queries without a key: NaN on the fast path, else other outputs
_COMMON = {"positions": "none", "norm": "layer", "residual": True, "bias": True}


def _facts(norm_first: bool, **more: Any) -> dict[str, Any]:
    return {**_COMMON, "norm_placement": "pre" if norm_first else "post", **more}


def _encoder_layer(norm_first: bool, activation: str = "relu") -> Subject:
    return Subject(
        kind="layer",
        name=f"nn.TransformerEncoderLayer({'pre' if norm_first else 'post'}-LN, {activation})",
        backends=MATH,
        build=partial(build_encoder_layer, norm_first=norm_first, activation=activation),
        forward=encode,
        declares=_facts(norm_first, causal=False, activation=activation, padding_side="both"),
    )


def _encoder(norm_first: bool, causal: bool = False) -> Subject:
    words = "causal, " if causal else ""
    return Subject(
        kind="encoder",
        inputs="embeddings",
        backends=MATH,
        name=f"nn.TransformerEncoder({words}{'pre' if norm_first else 'post'}-LN)",
        build=partial(build_encoder, norm_first=norm_first),
        forward=encode_causally if causal else encode,
        declares=_facts(
            norm_first,
            causal=causal,
            activation="relu",
            final_norm=norm_first,
            padding_side=_CAUSAL_PADDING if causal else "both",
        ),
    )


def _decoder(norm_first: bool, layers: bool) -> Subject:
    return Subject(
        kind="encoder_decoder",
        inputs="embeddings",
        backends=MATH,
        name=f"nn.TransformerDecoder{'' if layers else 'Layer'}({'pre' if norm_first else 'post'}-LN)",
        build=partial(build_decoder if layers else build_decoder_layer, norm_first=norm_first),
        forward=decode,
        declares=_facts(norm_first, causal=True, activation="relu", final_norm=norm_first and layers,
                        encodes_source=False, stacked=layers, padding_side=_CAUSAL_PADDING),
    )  # fmt: skip


def _transformer(norm_first: bool) -> Subject:
    return Subject(
        kind="encoder_decoder",
        inputs="embeddings",
        backends=MATH,
        name=f"nn.Transformer({'pre' if norm_first else 'post'}-LN)",
        build=partial(build_transformer, norm_first=norm_first),
        forward=transform,
        declares=_facts(norm_first, causal=True, activation="relu", final_norm=True, padding_side=_CAUSAL_PADDING),
    )


SHIPPED = {
    "TransformerEncoderLayer": _encoder_layer(False),
    "TransformerEncoderLayer-pre": _encoder_layer(True, "gelu"),
    "TransformerEncoder": _encoder(False),
    "TransformerEncoder-pre": _encoder(True),
    "TransformerEncoder-causal": _encoder(False, causal=True),
    "TransformerDecoderLayer": _decoder(False, layers=False),
    "TransformerDecoder-pre": _decoder(True, layers=True),
    "Transformer": _transformer(False),
}

_CLASSES = {
    nn.TransformerEncoderLayer: SHIPPED["TransformerEncoderLayer"],
    nn.TransformerEncoder: SHIPPED["TransformerEncoder"],
    nn.TransformerDecoderLayer: SHIPPED["TransformerDecoderLayer"],
    nn.TransformerDecoder: _decoder(False, layers=True),
    nn.Transformer: SHIPPED["Transformer"],
}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise the Transformer classes of torch.nn and their instances."""
    if isinstance(thing, type):
        return _CLASSES.get(thing)
    like = _CLASSES.get(type(thing))
    if like is None:
        return None
    layer = thing
    while not hasattr(layer, "self_attn"):
        layer = layer.decoder if hasattr(layer, "decoder") else layer.layers[0]
    attention = layer.self_attn
    if not attention.batch_first:
        raise TypeError(
            f"the {type(thing).__name__} was built with batch_first=False, whose inputs are [T, B, D]; wrap it in a "
            "Subject whose forward transposes, or build it with batch_first=True"
        )
    sizes = DrawnConfig(
        d_model=attention.embed_dim, num_heads=attention.num_heads, num_key_value_heads=attention.num_heads,
        d_ff=layer.linear1.out_features, dropout=layer.dropout.p, num_layers=len(getattr(thing, "layers", [layer])),
    )  # fmt: skip
    norm_first = layer.norm_first
    facts = {**like.declares, "norm_placement": "pre" if norm_first else "post"}
    facts.pop("activation"), facts.pop("final_norm", None)
    return Subject(
        kind=like.kind, name=f"nn.{type(thing).__name__}", module=thing, config=sizes, declares=facts,
        forward=like.forward, inputs="embeddings" if like.kind != "layer" else None,
    )  # fmt: skip
