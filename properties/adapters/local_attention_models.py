"""local-attention: language models whose attention looks at its own bucket and the one before."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_mask
from veriformer.properties.subject.subject import Subject


def build_local(config: Any, window: int = 4, **options: Any) -> nn.Module:
    """Return a LocalTransformer: each token sees `window` tokens back, exactly or to the start of the bucket before."""
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


def cached(model: Any, chunks: Any) -> Any:
    """Return the logits `[B, T, V]`: the first chunk at once, then token by token, as its `generate` has it."""
    tokens = chunks[0]
    logits, cache = model(tokens, return_cache=True)
    outputs = [logits]
    for step in torch.cat([chunks[0][:, :0], *chunks[1:]], dim=1).split(1, dim=1):
        tokens = torch.cat([tokens, step], dim=1)
        if step.shape[1]:
            logits, cache = model(tokens, cache=cache, return_cache=True)
            outputs.append(logits)
    return torch.cat(outputs, dim=1)


def _causal(label: str, window: int | None = 5, **options: Any) -> Subject:
    """Name a decoder; `window`: a bucket of four, and itself, where the width is exact."""
    return Subject(
        kind="decoder", name=f"local-attention LocalTransformer ({label})", build=partial(build_local, **options),
        forward=call_with_mask, mask_forms=("padding",), cache=cached,
        declares={"window": window} if window else {"sparse": True},
    )  # fmt: skip


SHIPPED = {
    "causal": _causal("rotary"),
    "xpos": _causal("xPos", use_xpos=True),
    "dynamic-bias": _causal("dynamic bias", use_dynamic_pos_bias=True),
    "query-key-norm": _causal("query-key norm", qk_rmsnorm=True, use_dynamic_pos_bias=True),
    "buckets": _causal("whole buckets", window=None, exact_windowsize=False, use_dynamic_pos_bias=True),
    "gated": _causal("gated values", gate_values_per_head=True),
    "bidirectional": Subject(
        kind="encoder", name="local-attention LocalTransformer (bidirectional)",
        build=partial(build_local, causal=False), forward=call_with_mask, mask_forms=("padding",),
        declares={"causal": False, "sparse": True},
    ),
}  # fmt: skip
