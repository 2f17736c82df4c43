"""memory-efficient-attention-pytorch: attention in buckets, and its flash attention written in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call, call_with_mask
from veriformer.properties.subject.subject import Subject


def build_efficient(config: Any, **options: Any) -> nn.Module:
    """Return memory-efficient attention with small buckets."""
    from memory_efficient_attention_pytorch import Attention

    return Attention(
        dim=config.d_model,
        heads=config.num_heads,
        dim_head=config.d_head,
        dropout=config.dropout,
        memory_efficient=True,
        q_bucket_size=4,
        k_bucket_size=3,
        **options,
    )


def build_flash(config: Any, **options: Any) -> nn.Module:
    """Return a language model of memory-efficient-attention-pytorch over its flash attention written in torch."""
    from memory_efficient_attention_pytorch.transformer import Transformer

    return Transformer(
        num_tokens=config.vocab_size,
        max_seq_len=config.max_len,
        dim=config.d_model,
        depth=config.num_layers,
        dim_head=config.d_head,
        heads=config.num_heads,
        causal=True,
        q_bucket_size=4,
        k_bucket_size=4,
        **options,
    )


_EMBEDDED = {"causal": False, "positions": "none"}
SHIPPED = {
    "attention": Subject(kind="self_attention", name="memory-efficient attention", build=build_efficient,
                         forward=call_with_mask, mask_forms=("padding",), declares=_EMBEDDED),
    "attention-causal": Subject(kind="self_attention", name="memory-efficient attention (causal)",
                                build=partial(build_efficient, causal=True), forward=call_with_mask,
                                mask_forms=("padding",), declares={"causal": True}),
    "transformer-flash": Subject(kind="decoder", name="memory-efficient Transformer (flash)", build=build_flash,
                                 forward=call),
    "transformer": Subject(kind="decoder", name="memory-efficient Transformer",
                           build=partial(build_flash, use_flash_attn=False), forward=call),
}  # fmt: skip
