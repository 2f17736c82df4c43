"""keras-hub with the torch backend: its encoder and decoder layers and its positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.keras_layers import keras_on_torch, with_weights
from veriformer.properties.adapters.shared.token_tables import OnTokens
from veriformer.properties.subject.subject import Subject


def _hub() -> Any:
    keras_on_torch()
    import keras_hub

    return keras_hub


def build_encoder(config: Any, **options: Any) -> nn.Module:
    """Return keras-hub's encoder layer."""
    made = _hub().layers.TransformerEncoder(config.d_ff, config.num_heads, dropout=config.dropout, **options)
    return with_weights(made, (1, 2, config.d_model))


def build_decoder(config: Any, **options: Any) -> nn.Module:
    """Return keras-hub's decoder layer, without a memory."""
    made = _hub().layers.TransformerDecoder(config.d_ff, config.num_heads, dropout=config.dropout, **options)
    return with_weights(made, (1, 2, config.d_model))


def build_on_tokens(config: Any) -> nn.Module:
    """Return keras-hub's decoder layer on a table of tokens."""
    return OnTokens(config, build_decoder(config))


def build_sinusoids(config: Any) -> nn.Module:
    """Return keras-hub's sinusoidal positions."""
    return _hub().layers.SinePositionEncoding()


def build_rotary(config: Any) -> nn.Module:
    """Return keras-hub's rotary positions."""
    return _hub().layers.RotaryEmbedding(sequence_axis=2, feature_axis=3)


def run_encoder(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Call an encoder layer; padding_mask `[B, T]` True = may attend."""
    return model(x, padding_mask=attention_mask, training=model.training)


def run_decoder(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Call a decoder layer; padding_mask `[B, T]` True = may attend."""
    return model(x, decoder_padding_mask=attention_mask, training=model.training)


def run_on_tokens(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call a decoder layer on the embeddings of tokens `[B, T]`."""
    return run_decoder(model.part, model.table(tokens), attention_mask)


def cached(model: Any, chunks: Any) -> Any:
    """Return the outputs of a decoder layer chunk by chunk; its cache has room for more than there are."""
    total, heads, table = sum(chunk.shape[1] for chunk in chunks) + 3, model.part.num_heads, model.table.weight
    cache, start, outputs = table.new_zeros(len(chunks[0]), 2, total, heads, table.shape[1] // heads), 0, []
    for chunk in chunks:
        x = model.table(chunk)
        output, cache = model.part(x, self_attention_cache=cache, self_attention_cache_update_index=start)
        outputs.append(output)
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


def sinusoids(model: Any, length: int) -> Any:
    """Return the table `[T, D]`; the width is that of the configurations drawn."""
    return model(torch.zeros(1, length, 8))[0]


def rotate(model: Any, x: Any, positions: Any) -> Any:
    """Rotate x `[B, H, T, K]` at the given positions."""
    return model(x, positions=positions)


_PLAIN = {"causal": False, "positions": "none"}
SHIPPED = {
    "encoder": Subject(kind="layer", name="keras-hub TransformerEncoder", build=build_encoder, forward=run_encoder,
                       mask_forms=("padding",), declares={**_PLAIN, "norm_placement": "post"}),
    "encoder-pre": Subject(kind="layer", name="keras-hub TransformerEncoder (pre-LN)",
                           build=partial(build_encoder, normalize_first=True), forward=run_encoder,
                           mask_forms=("padding",), declares={**_PLAIN, "norm_placement": "pre"}),
    "decoder": Subject(kind="layer", name="keras-hub TransformerDecoder", build=build_decoder, forward=run_decoder,
                       mask_forms=("padding",), declares={"causal": True, "positions": "none"}),
    "decoder-pre": Subject(kind="layer", name="keras-hub TransformerDecoder (pre-LN)",
                           build=partial(build_decoder, normalize_first=True), forward=run_decoder,
                           mask_forms=("padding",), declares={"causal": True, "positions": "none"}),
    "decoder-cached": Subject(kind="decoder", name="keras-hub TransformerDecoder (cached)",
                              build=build_on_tokens, forward=run_on_tokens, mask_forms=("padding",), cache=cached,
                              declares={"causal": True, "positions": "none", "stacked": False}),
    "sinusoidal": Subject(kind="positions", name="keras-hub SinePositionEncoding", build=build_sinusoids,
                          forward=sinusoids, domain={"d_model": (8,)}),
    "rotary": Subject(kind="rotary", name="keras-hub RotaryEmbedding", build=build_rotary, forward=rotate),
}  # fmt: skip
