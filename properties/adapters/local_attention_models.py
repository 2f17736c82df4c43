"""local-attention: language models whose attention looks at its own bucket and the one before."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_mask
from veriformer.properties.subject.subject import Subject


def build_local(config: Any, window: int = 4, **options: Any) -> nn.Module:
    """Return a LocalTransformer: each bucket of `window` tokens sees itself and the one before."""
    from local_attention import LocalTransformer

    return LocalTransformer(
        num_tokens=config.vocab_size,
        max_seq_len=config.max_len,
        dim=config.d_model,
        depth=config.num_layers,
        heads=config.num_heads,
        dim_head=config.d_head,
        local_attn_window_size=window,
        attn_dropout=config.dropout,
        ff_dropout=config.dropout,
        **options,
    )


_LOCAL = {"window": 5}  # a token sees its own bucket of four and the one before: four tokens back at least
SHIPPED = {
    "causal": Subject(
        kind="decoder",
        name="local-attention LocalTransformer",
        build=build_local,
        forward=call_with_mask,
        mask_forms=("padding",),
        declares=_LOCAL,
    ),
    "xpos": Subject(
        kind="decoder",
        name="local-attention LocalTransformer (xPos)",
        build=partial(build_local, use_xpos=True),
        forward=call_with_mask,
        mask_forms=("padding",),
        declares=_LOCAL,
    ),
    "dynamic-bias": Subject(
        kind="decoder",
        name="local-attention LocalTransformer (dynamic bias)",
        build=partial(build_local, use_dynamic_pos_bias=True),
        forward=call_with_mask,
        mask_forms=("padding",),
        declares=_LOCAL,
    ),
}
