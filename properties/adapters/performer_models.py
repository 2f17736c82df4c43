"""performer-pytorch: language models with attention by random features."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_mask
from veriformer.properties.subject.subject import Subject


def build_performer(config: Any, **options: Any) -> nn.Module:
    """Return a PerformerLM; its random features are drawn once."""
    from performer_pytorch import PerformerLM

    with contextlib.redirect_stdout(io.StringIO()):  # each causal layer prints that a CUDA kernel is missing
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


_WINDOW: dict[str, Any] = {"local_attn_heads": 1, "local_window_size": 4}


def _performer(label: str, causal: bool = False, **options: Any) -> Subject:
    return Subject(
        kind="decoder" if causal else "encoder", name=f"performer-pytorch PerformerLM ({label})",
        build=partial(build_performer, causal=causal, **options), forward=call_with_mask, mask_forms=("padding",),
        declares={} if causal else {"causal": False},
        domain={"max_len": (40,)} if causal else {},  # sums of keys by values at every position: long ones take minutes
    )  # fmt: skip


SHIPPED = {
    "encoder": _performer("softmax kernel"),
    "encoder-relu": _performer("ReLU kernel", generalized_attention=True),
    "encoder-no-projection": _performer("softmax of keys", no_projection=True),
    "encoder-shift": _performer("ReLU kernel, shifted tokens", generalized_attention=True, shift_tokens=True),
    "causal": _performer("causal, softmax kernel", True),
    "causal-relu": _performer("causal, ReLU kernel", True, generalized_attention=True),
    "causal-local": _performer("causal, ReLU kernel, a local head", True, generalized_attention=True, **_WINDOW),
    "causal-learned": _performer("causal, ReLU kernel, learned positions", True, generalized_attention=True,
                                 rotary_position_emb=False),
}  # fmt: skip
