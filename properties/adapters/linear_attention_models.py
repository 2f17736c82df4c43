"""linear-attention-transformer: language models with linear attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_input_mask
from veriformer.properties.subject.subject import Subject


def build_linear(config: Any, **options: Any) -> nn.Module:
    """Return a LinearAttentionTransformerLM."""
    from linear_attention_transformer import LinearAttentionTransformerLM

    return LinearAttentionTransformerLM(
        config.vocab_size,
        config.d_model,
        config.num_layers,
        config.max_len,
        heads=config.num_heads,
        dim_head=config.d_head,
        attn_dropout=config.dropout,
        ff_dropout=config.dropout,
        use_axial_pos_emb=False,
        **options,
    )


SHIPPED = {
    "causal": Subject(kind="decoder", name="linear-attention-transformer (causal)",
                      build=partial(build_linear, causal=True), forward=call_with_input_mask, mask_forms=("padding",)),
    "bidirectional": Subject(kind="encoder", name="linear-attention-transformer", build=build_linear,
                             forward=call_with_input_mask, mask_forms=("padding",), declares={"causal": False}),
}  # fmt: skip
