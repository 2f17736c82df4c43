"""linformer: attention whose keys and values are reduced to a few latents."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call
from veriformer.properties.subject.subject import Subject


def build_linformer(config: Any, **options: Any) -> nn.Module:
    """Return a LinformerLM with fewer latents than tokens."""
    from linformer import LinformerLM

    sizes = {"num_tokens": config.vocab_size, "dim": config.d_model, "seq_len": config.max_len,
             "depth": config.num_layers, "heads": config.num_heads, "dropout": config.dropout}  # fmt: skip
    return LinformerLM(**sizes, k=4, **options)


def _linformer(label: str, **options: Any) -> Subject:
    return Subject(
        kind="encoder", name=f"linformer LinformerLM ({label})", build=partial(build_linformer, **options),
        forward=call, mask_forms=(), declares={"causal": False},
    )  # fmt: skip


SHIPPED = {
    "encoder": _linformer("keys and values apart"),
    "shared": _linformer("one projection for keys and values", share_kv=True),
    "one-head": _linformer("one head of keys and values", one_kv_head=True),
}
