"""nystrom-attention: attention approximated by landmarks, fewer than tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_mask
from veriformer.properties.subject.subject import Subject


def build_nystrom(config: Any, **options: Any) -> nn.Module:
    """Return Nystrom attention with two landmarks."""
    from nystrom_attention import NystromAttention

    sizes = {"dim_head": config.d_head, "heads": config.num_heads, "num_landmarks": 2, "dropout": config.dropout}
    return NystromAttention(config.d_model, **sizes, **options)


def _nystrom(label: str, **options: Any) -> Subject:
    return Subject(
        kind="self_attention", name=f"nystrom-attention NystromAttention ({label})",
        build=partial(build_nystrom, **options), forward=call_with_mask, mask_forms=("padding",),
        declares={"causal": False, "structure": "other"},  # three products of fewer keys, and a pseudo-inverse
    )  # fmt: skip


SHIPPED = {
    "attention": _nystrom("with a convolution of the values"),
    "attention-plain": _nystrom("without a convolution", residual=False),
}
