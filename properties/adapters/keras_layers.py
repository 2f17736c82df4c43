"""keras with the torch backend: their layers are torch modules once that backend is chosen."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call
from veriformer.properties.subject.subject import Subject


def keras_on_torch() -> Any:
    """Import keras with the torch backend, or say that it runs on another one."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    if keras.backend.backend() != "torch":
        raise RuntimeError(
            f"keras runs on {keras.backend.backend()!r}; set KERAS_BACKEND=torch before it is imported, so that its "
            "layers are torch modules"
        )
    return keras


def with_weights(layer: Any, *shapes: tuple[Any, ...]) -> nn.Module:
    """Make the weights of a layer by a call on the CPU."""
    layer(*[torch.zeros(shape) for shape in shapes])
    for parameter in layer.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # a dropout keeps the state of its seeds as integers
    return layer


def build_attention(config: Any, layer: str = "MultiHeadAttention", **options: Any) -> nn.Module:
    """Return an attention layer of the drawn sizes."""
    keras = keras_on_torch()
    options = {name: value(config) if callable(value) else value for name, value in options.items()}
    if layer == "MultiHeadAttention":
        made = keras.layers.MultiHeadAttention(config.num_heads, config.d_head, dropout=config.dropout, **options)
    else:
        made = keras.layers.GroupQueryAttention(config.d_head, config.num_heads, dropout=config.dropout, **options)
    start = (1, *[1] * len(options.get("attention_axes", ())), 2, config.d_model)
    return with_weights(made, start, start)


def build_norm(config: Any, name: str) -> nn.Module:
    """Return a norm of the drawn width."""
    return with_weights(getattr(keras_on_torch().layers, name)(), (1, 2, config.d_model))


def build_softmax(config: Any) -> nn.Module:
    """Return the softmax layer."""
    return keras_on_torch().layers.Softmax()


def attend(model: Any, x: Any, attention_mask: Any = None, causal: bool = False) -> Any:
    """Attend from x `[B, T, D]` to itself; attention_mask True = may attend, `[B, T]` or pairwise."""
    mask = None
    if attention_mask is not None:
        wide = attention_mask[:, None, :] if attention_mask.shape == x.shape[:2] else attention_mask
        mask = wide.expand(len(x), x.shape[1], x.shape[1])
    return model(x, x, attention_mask=mask, use_causal_mask=causal, training=model.training)


def attend_across(model: Any, x: Any, memory: Any, memory_mask: Any = None) -> Any:
    """Attend from x `[B, T, D]` to memory `[B, S, D]`."""
    mask = None if memory_mask is None else memory_mask[:, None, :].expand(-1, x.shape[1], -1)
    return model(x, memory, attention_mask=mask, training=model.training)


def attend_within(model: Any, x: Any) -> Any:
    """Attend causally along the third axis of `[B, 1, T, D]`: each of several sequences a sample attends to itself."""
    return model(x[:, None], x[:, None], use_causal_mask=True, training=model.training)[:, 0]


def softmax(model: Any, scores: Any) -> Any:
    """Call the softmax layer over the last axis."""
    return model(scores)


def _attention(label: str, causal: bool = False, facts: Any = None, **options: Any) -> Subject:
    return Subject(
        kind="self_attention",
        name=f"keras {label}",
        build=partial(build_attention, **options),
        forward=partial(attend, causal=causal),
        mask_forms=("padding", "pairwise"),
        declares={"causal": causal, "positions": "none", **(facts or {})},
    )


_WINDOW = 3
_GROUPED = {"d_model": (8, 16), "num_heads": (2, 4), "num_key_value_heads": (2,)}
SHIPPED = {
    "attention": _attention("MultiHeadAttention"),
    "attention-no-bias": _attention("MultiHeadAttention (no bias)", use_bias=False),
    "attention-causal": _attention("MultiHeadAttention (causal)", causal=True),
    "attention-grouped": replace(
        _attention(
            "GroupedQueryAttention", layer="GroupQueryAttention", num_key_value_heads=lambda c: c.num_key_value_heads
        ),
        domain=_GROUPED,
    ),
    "attention-window": _attention(
        "MultiHeadAttention (causal, sliding window)", causal=True, facts={"window": _WINDOW}, sliding_window=_WINDOW
    ),
    "attention-grouped-gated": replace(
        _attention(
            "GroupedQueryAttention (gate, causal, sliding window)",
            causal=True,
            facts={"window": _WINDOW},
            layer="GroupQueryAttention",
            num_key_value_heads=lambda c: c.num_key_value_heads,
            sliding_window=_WINDOW,
            use_gate=True,
        ),
        domain=_GROUPED,
    ),
    "attention-axes": replace(
        _attention("MultiHeadAttention (attention_axes, causal)", causal=True, attention_axes=(2,)),
        forward=attend_within,
        mask_forms=(),
    ),
    "attention-cross": Subject(
        kind="cross_attention", name="keras MultiHeadAttention (cross)", build=build_attention, forward=attend_across
    ),
    "softmax": Subject(kind="softmax", name="keras Softmax", build=build_softmax, forward=softmax),
    "layer-norm": Subject(
        kind="norm",
        name="keras LayerNormalization",
        build=partial(build_norm, name="LayerNormalization"),
        forward=call,
        declares={"norm": "layer"},
    ),
    "rms-norm": Subject(
        kind="norm",
        name="keras RMSNormalization",
        build=partial(build_norm, name="RMSNormalization"),
        forward=call,
        declares={"norm": "rms"},
    ),
}
