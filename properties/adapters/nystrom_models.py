"""nystrom-attention: attention approximated by landmarks."""

from __future__ import annotations

from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_mask
from veriformer.properties.subject.subject import Subject


def build_nystrom(config: Any) -> nn.Module:
    """Return Nystrom attention with more landmarks than tokens, where the approximation is none."""
    from nystrom_attention import NystromAttention

    return NystromAttention(config.d_model, dim_head=config.d_head, heads=config.num_heads, num_landmarks=4)


SHIPPED = {
    "attention": Subject(
        kind="self_attention",
        name="nystrom-attention NystromAttention",
        build=build_nystrom,
        forward=call_with_mask,
        mask_forms=("padding",),
        declares={"causal": False, "batch_coupled": True},
    ),
}
