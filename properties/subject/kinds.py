"""The kinds of subject: how each is called and what it returns. To add a kind, add one row to `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind of subject: how it is called and what it returns.

    Attributes:
        name: the word used in `Subject.kind`.
        signature: how `forward` is called after the model, for messages and documentation.
        returns: shape of what it returns.
        implied: facts that the kind itself implies unless declared otherwise.
        inputs: what its sequences are made of: `tokens`, `embeddings`, or `other`.
    """

    name: str
    signature: str
    returns: str
    implied: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "other"


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("softmax", "(scores [..., S], dim=-1)", "[..., S]"),
        Kind("attention", "(q [B,H,T,K], k [B,G,S,K], v [B,G,S,E], attention_mask=None, causal=False)", "[B,H,T,E]"),
        Kind("self_attention", "(x [B,T,D], attention_mask=None)", "[B,T,D]", inputs="embeddings"),
        Kind("cross_attention", "(x [B,T,D], memory [B,S,D], memory_mask=None)", "[B,T,D]", inputs="embeddings"),
        Kind("positions", "(length)", "[T,D]"),
        Kind("rotary", "(x [B,H,T,K], positions [T])", "[B,H,T,K]"),
        Kind("position_bias", "(query_len, key_len)", "[H,T,S]"),
        Kind("norm", "(x [B,T,D])", "[B,T,D]", inputs="embeddings"),
        Kind("feed_forward", "(x [B,T,D])", "[B,T,D]", inputs="embeddings"),
        Kind("layer", "(x [B,T,D], attention_mask=None)", "[B,T,D]", inputs="embeddings"),
        Kind("encoder", "(tokens [B,T], attention_mask=None)", "[B,T,*]", inputs="tokens"),
        Kind("decoder", "(tokens [B,T], attention_mask=None)", "[B,T,*]", {"causal": True}, "tokens"),
        Kind(
            "encoder_decoder",
            "(source [B,S], target [B,T], source_mask=None, target_mask=None)",
            "[B,T,*]",
            {"causal": True},
            "tokens",
        ),
        Kind("classifier", "(tokens [B,T], attention_mask=None)", "[B,C]", inputs="tokens"),
        Kind("loss", "(logits [B,T,V], labels [B,T])", "[]"),
        Kind("masking", "(tokens [B,T], seed)", "([B,T], [B,T])"),
        Kind("schedule", "(step)", "a float"),
        Kind("parameter_groups", "()", "a list of {'params': [...], 'weight_decay': number}"),
        Kind("tokenizer", "(text)", "a list of integers"),
    )
}
"""Every kind of subject. Masks are boolean, True = may attend: `[B, T]` for padding, `[T, S]` or `[B, T, S]`
pairwise where the subject declares that it takes them. A subject of kind attention is given `[B, 1, T, S]` or
`[1, 1, T, S]`; one that takes `[B, T, S]` or `[T, S]` alone is found out by trying and given these; with
mask_forms=("padding",) it is given `[B, S]`."""

SEQUENCE_KINDS = ("encoder_decoder", "classifier", "decoder", "encoder", "layer", "self_attention", "cross_attention")
"""Kinds that take sequences `[B, T]` of tokens or `[B, T, D]` of embeddings."""
