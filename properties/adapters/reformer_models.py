"""reformer-pytorch: language models with shared queries and keys; full attention, so that no bucket is drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_input_mask
from veriformer.properties.subject.subject import Subject


def build_reformer(config: Any, **options: Any) -> nn.Module:
    """Return a ReformerLM with full attention up to its threshold, so that no bucket is drawn at random."""
    from reformer_pytorch import ReformerLM

    return ReformerLM(
        config.vocab_size,
        config.d_model,
        config.num_layers,
        config.max_len,
        heads=config.num_heads,
        dim_head=config.d_head,
        bucket_size=4,
        ff_chunks=1,
        lsh_dropout=config.dropout,
        ff_dropout=config.dropout,
        fixed_position_emb=True,
        use_full_attn=True,
        **options,
    )


SHIPPED = {
    "causal": Subject(kind="decoder", name="reformer-pytorch ReformerLM (causal)",
                      build=partial(build_reformer, causal=True), forward=call_with_input_mask,
                      mask_forms=("padding",)),
    "bidirectional": Subject(kind="encoder", name="reformer-pytorch ReformerLM", build=build_reformer,
                             forward=call_with_input_mask, mask_forms=("padding",), declares={"causal": False}),
}  # fmt: skip
