"""diffusers: its attention, feed-forward and transformer block, on embeddings `[B, T, D]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call
from veriformer.properties.subject.subject import Subject


def build_attention(config: Any, processor: str = "", **options: Any) -> nn.Module:
    """Return its attention of the drawn sizes; a processor by the name of its class."""
    from diffusers.models import attention_processor

    options = {name: value(config) if callable(value) else value for name, value in options.items()}
    slices = (1,) if processor.startswith("Sliced") else ()  # one head of one sample at a time
    if processor:
        options["processor"] = getattr(attention_processor, processor)(*slices)
    attention = attention_processor.Attention(
        config.d_model, heads=config.num_heads, dim_head=config.d_head, dropout=config.dropout, **options
    )
    if processor and type(attention.processor).__name__ != processor:
        raise RuntimeError(f"diffusers attends by {type(attention.processor).__name__}; {processor} was asked for")
    return attention


def build_block(config: Any, chunk: int = 0, **options: Any) -> nn.Module:
    """Return a BasicTransformerBlock of the drawn sizes; chunk > 0: so many positions a feed-forward."""
    from diffusers.models.attention import BasicTransformerBlock

    block = BasicTransformerBlock(
        config.d_model, config.num_heads, config.d_head, dropout=config.dropout, ff_inner_dim=config.d_ff, **options
    )
    if chunk:
        block.set_chunk_feed_forward(chunk, dim=1)
    return block


def build_feed_forward(config: Any, activation: str) -> nn.Module:
    """Return a feed-forward of the drawn sizes."""
    from diffusers.models.attention import FeedForward

    return FeedForward(config.d_model, inner_dim=config.d_ff, dropout=config.dropout, activation_fn=activation)


def attend(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Attend from x `[B, T, D]` to itself; attention_mask `[B, T]` True = may attend, given as an additive bias."""
    return model(x, attention_mask=_bias(x, attention_mask))


def attend_across(model: Any, x: Any, memory: Any, memory_mask: Any = None) -> Any:
    """Attend from x `[B, T, D]` to memory `[B, S, D]`."""
    return model(x, encoder_hidden_states=memory, attention_mask=_bias(x, memory_mask))


def run_block(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Call the block; it takes a bias `[B, 1, T]`."""
    return model(x, attention_mask=_bias(x, attention_mask))


def _bias(x: Any, mask: Any) -> Any:
    """Return the bias `[B, 1, S]` of a mask, as attention takes no mask.

    It hides by the lowest number that bfloat16 holds too: under autocast the scores are in it, and a lower one is -inf
    there, so that a row without a key would be 0/0. The library's own models hide with -10000, which large scores pass.
    """
    if mask is None:
        return None
    lowest = max(torch.finfo(x.dtype).min, torch.finfo(torch.bfloat16).min)
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, lowest)[:, None, :]


def _attention(
    label: str, kind: str = "self_attention", forward: Callable[..., Any] = attend, **options: Any
) -> Subject:
    facts = {"causal": False, "positions": "none"} if kind == "self_attention" else {}
    return Subject(
        kind=kind,
        name=f"diffusers Attention ({label})",
        build=partial(build_attention, **options),
        forward=forward,
        mask_forms=("padding",) if kind == "self_attention" else None,
        declares=facts,
    )


SHIPPED = {
    "attention": _attention("default"),
    "attention-eager": _attention("AttnProcessor", processor="AttnProcessor"),
    "attention-bias": _attention("biases", bias=True),
    "attention-upcast": _attention("upcast", processor="AttnProcessor", upcast_attention=True, upcast_softmax=True),
    "attention-sliced": _attention("SlicedAttnProcessor", processor="SlicedAttnProcessor"),
    "attention-qk-norm": _attention("query-key norm", qk_norm="layer_norm"),
    "attention-qk-norm-eager": _attention(
        "query-key norm, AttnProcessor", processor="AttnProcessor", qk_norm="layer_norm"
    ),
    "attention-residual": _attention("residual", residual_connection=True, bias=True),
    "attention-cross": _attention(
        "cross", kind="cross_attention", forward=attend_across, cross_attention_dim=lambda c: c.d_model
    ),
    "block": Subject(
        kind="layer",
        name="diffusers BasicTransformerBlock",
        build=build_block,
        forward=run_block,
        mask_forms=("padding",),
        declares={"causal": False, "positions": "none"},
    ),
    "block-chunked": Subject(
        kind="layer",
        name="diffusers BasicTransformerBlock (chunked feed-forward)",
        build=partial(build_block, chunk=1),
        forward=run_block,
        mask_forms=("padding",),
        declares={"causal": False, "positions": "none"},
    ),
    "block-sinusoidal": Subject(
        kind="layer",
        name="diffusers BasicTransformerBlock (sinusoidal)",
        forward=run_block,
        mask_forms=("padding",),
        build=partial(build_block, positional_embeddings="sinusoidal", num_positional_embeddings=64),
        declares={"causal": False},
    ),
    **{
        f"feed-forward-{name}": Subject(
            kind="feed_forward",
            name=f"diffusers FeedForward ({name})",
            build=partial(build_feed_forward, activation=name),
            forward=call,
        )
        for name in ("gelu", "gelu-approximate", "geglu", "swiglu")
    },
}
