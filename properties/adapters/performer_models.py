"""performer-pytorch: language models with attention by random features."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_mask
from veriformer.properties.subject.subject import Subject


def build_performer(config: Any, **options: Any) -> nn.Module:
    """Return a PerformerLM; its random features are drawn once."""
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=config.vocab_size,
        max_seq_len=config.max_len,
        dim=config.d_model,
        depth=config.num_layers,
        heads=config.num_heads,
        dim_head=config.d_head,
        feature_redraw_interval=None,
        attn_dropout=config.dropout,
        ff_dropout=config.dropout,
        emb_dropout=config.dropout,
        **options,
    )


SHIPPED = {
    "encoder": Subject(kind="encoder", name="performer-pytorch PerformerLM", build=build_performer,
                       forward=call_with_mask, mask_forms=("padding",), declares={"causal": False}),
    "encoder-relu": Subject(kind="encoder", name="performer-pytorch PerformerLM (ReLU kernel)",
                            build=partial(build_performer, generalized_attention=True), forward=call_with_mask,
                            mask_forms=("padding",), declares={"causal": False}),
    "encoder-no-projection": Subject(kind="encoder", name="performer-pytorch PerformerLM (softmax of keys)",
                                     build=partial(build_performer, no_projection=True), forward=call_with_mask,
                                     mask_forms=("padding",), declares={"causal": False}),
}  # fmt: skip
