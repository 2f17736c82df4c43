"""torch: nn.MultiheadAttention and F.scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veriformer.properties.adapters.shared.torch_kernels import KERNELS, MATH
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


def build_multi_head(config: Any) -> nn.Module:
    """Return multi-head attention of the drawn sizes."""
    return nn.MultiheadAttention(config.d_model, config.num_heads, dropout=config.dropout, batch_first=True)


def self_attention(model: Any, x: Any, attention_mask: Any = None, need_weights: bool = False) -> Any:
    """Attend from x `[B, T, D]` to itself; attention_mask True = may attend, `[B, T]` or pairwise."""
    blocked = None if attention_mask is None else ~attention_mask
    is_padding = blocked is not None and blocked.shape == x.shape[:2]
    if blocked is not None and blocked.ndim == 3:
        blocked = blocked.repeat_interleave(model.num_heads, 0)  # torch wants one mask a head of each sample
    x = x if model.batch_first else x.transpose(0, 1)
    output = model(
        x, x, x,
        key_padding_mask=blocked if is_padding else None,
        attn_mask=None if is_padding else blocked,
        need_weights=need_weights,
    )[0]  # fmt: skip
    return output if model.batch_first else output.transpose(0, 1)


def self_attention_weights(model: Any, x: Any) -> Any:
    """Return the attention weights `[B, H, T, T]`."""
    x = x if model.batch_first else x.transpose(0, 1)
    return model(x, x, x, need_weights=True, average_attn_weights=False)[1]


_HINTED = True
"""Whether `self_attention_causally` says that its mask is the causal one; the backend `unhinted` says nothing."""


@contextmanager
def unhinted() -> Iterator[None]:
    """Give the causal mask without the hint `is_causal`, which must change nothing."""
    global _HINTED
    _HINTED = False
    try:
        yield
    finally:
        _HINTED = True


def build_with_extra_key(config: Any, **options: Any) -> nn.Module:
    """Return multi-head attention with a key and a value beside those of the sequence."""
    return nn.MultiheadAttention(
        config.d_model, config.num_heads, dropout=config.dropout, batch_first=True, **options
    )  # fmt: skip


def self_attention_causally(model: Any, x: Any) -> Any:
    """Attend from x `[B, T, D]` to itself under the causal mask, with the hint that it is that."""
    blocked = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    return model(x, x, x, attn_mask=blocked, is_causal=_HINTED, need_weights=False)[0]


def cross_attention(model: Any, x: Any, memory: Any, memory_mask: Any = None, need_weights: bool = False) -> Any:
    """Attend from x `[B, T, D]` to memory `[B, S, D]`; memory_mask `[B, S]` True = may attend."""
    blocked = None if memory_mask is None else ~memory_mask
    return model(x, memory, memory, key_padding_mask=blocked, need_weights=need_weights)[0]


def cross_attention_weights(model: Any, x: Any, memory: Any) -> Any:
    """Return the attention weights `[B, H, T, S]`."""
    return model(x, memory, memory, need_weights=True, average_attn_weights=False)[1]


def projections(model: Any) -> Any:
    """Return writable views of the projections and their biases."""
    width = model.embed_dim
    parts = {"o": model.out_proj.weight}
    for number, name in enumerate("qkv"):
        rows = slice(number * width, (number + 1) * width)
        joint = model.in_proj_weight is not None
        parts[name] = model.in_proj_weight[rows] if joint else getattr(model, f"{name}_proj_weight")
        if model.in_proj_bias is not None:
            parts[f"{name}_bias"] = model.in_proj_bias[rows]
    if model.out_proj.bias is not None:
        parts["o_bias"] = model.out_proj.bias
    return parts


def lower_right(model: Any, q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Call F.scaled_dot_product_attention with the causal bias of queries that are the last positions of the keys."""
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q.shape[2], k.shape[2]) if causal else None
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def scaled_dot_product(model: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, causal: bool = False) -> Any:
    """Call F.scaled_dot_product_attention; masks are boolean (True = may attend) or additive."""
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attention_mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


_FACTS = {"causal": False, "positions": "none", "bias": True, "padding_side": "both"}

SELF = Subject(
    kind="self_attention",
    name="nn.MultiheadAttention",
    build=build_multi_head,
    forward=self_attention,
    weights=self_attention_weights,
    projections=projections,
    mask_forms=("padding", "pairwise"),
    backends=MATH,
    declares=_FACTS,
)
SELF_WITH_WEIGHTS = Subject(
    kind="self_attention",
    name="nn.MultiheadAttention(need_weights=True)",
    build=build_multi_head,
    forward=partial(self_attention, need_weights=True),
    weights=self_attention_weights,
    projections=projections,
    mask_forms=("padding", "pairwise"),
    declares=_FACTS,
)
CROSS = Subject(
    kind="cross_attention",
    name="nn.MultiheadAttention (cross)",
    build=build_multi_head,
    forward=cross_attention,
    weights=cross_attention_weights,
    projections=projections,
    backends=MATH,
    declares={"bias": True},
)
SDPA = Subject(
    kind="attention",
    name="F.scaled_dot_product_attention",
    forward=scaled_dot_product,
    mask_forms=("pairwise", "additive"),
    backends=KERNELS,
    # documented: is_causal aligns to the top left; rows without a visible key give zeros
    declares={
        "grouped_queries": True,
        "causal_alignment": "top-left",
        "empty_row": "zeros",
        "memory": "linear",
    },
)

LOWER_RIGHT = Subject(
    kind="attention",
    name="F.scaled_dot_product_attention(causal_lower_right)",
    forward=lower_right,
    mask_forms=(),
    declares={"causal_alignment": "bottom-right"},
)


def _hinted(label: str, **options: Any) -> Subject:
    return Subject(
        kind="self_attention",
        name=f"nn.MultiheadAttention({label}is_causal=True)",
        build=partial(build_with_extra_key, **options),
        forward=self_attention_causally,
        mask_forms=(),
        backends={**MATH, "unhinted": unhinted},
        # a key beside those of the sequence has parameters and a product that the textbook's attention has not
        declares={"causal": True, "positions": "none", "bias": True, **({"structure": "other"} if options else {})},
    )


SHIPPED = {
    "MultiheadAttention-causal": _hinted(""),
    "MultiheadAttention-causal-bias-key": _hinted("add_bias_kv=True, ", add_bias_kv=True),
    "MultiheadAttention-causal-zero-key": _hinted("add_zero_attn=True, ", add_zero_attn=True),
    "scaled_dot_product_attention-lower-right": LOWER_RIGHT,
    "MultiheadAttention": SELF,
    "MultiheadAttention-weights": SELF_WITH_WEIGHTS,
    "MultiheadAttention-cross": CROSS,
    "scaled_dot_product_attention": SDPA,
}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise nn.MultiheadAttention (class or instance) and F.scaled_dot_product_attention."""
    if thing is functional.scaled_dot_product_attention:
        return SDPA
    if thing is nn.MultiheadAttention:
        return CROSS if kind == "cross_attention" else SELF
    if isinstance(thing, nn.MultiheadAttention):
        like = CROSS if kind == "cross_attention" else SELF
        sizes = DrawnConfig(
            d_model=thing.embed_dim,
            num_heads=thing.num_heads,
            num_key_value_heads=thing.num_heads,
            dropout=thing.dropout,
        )
        given = {name: getattr(like, name) for name in ("forward", "weights", "projections", "mask_forms")}
        facts = {**like.declares, "bias": thing.in_proj_bias is not None}
        return Subject(kind=like.kind, name=like.name, module=thing, config=sizes, declares=facts, **given)
    return None
