"""linear-attention-transformer: language models with linear attention, local heads and Linformer layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call_with_input_mask
from veriformer.properties.subject.subject import Subject


def build_linear(config: Any, latents: int = 0, **options: Any) -> nn.Module:
    """Return a LinearAttentionTransformerLM that pads itself to whole windows.

    Args:
        config: the drawn sizes.
        latents: keys that a Linformer layer reduces the sequence to; 0: linear attention.
        options: of LinearAttentionTransformerLM.
    """
    from linear_attention_transformer import LinearAttentionTransformerLM, LinformerSettings
    from linear_attention_transformer.autopadder import Autopadder

    model = LinearAttentionTransformerLM(
        config.vocab_size,
        config.d_model,
        config.num_layers,
        config.max_len,
        heads=config.num_heads,
        dim_head=config.d_head,
        attn_dropout=config.dropout,
        ff_dropout=config.dropout,
        use_axial_pos_emb=False,
        linformer_settings=LinformerSettings(k=latents) if latents else None,
        **options,
    )
    return Autopadder(model)


_WINDOW: dict[str, Any] = {"n_local_attn_heads": 1, "local_attn_window_size": 4}


def _linear(label: str, causal: bool = False, **options: Any) -> Subject:
    return Subject(
        kind="decoder" if causal else "encoder", name=f"linear-attention-transformer ({label})",
        build=partial(build_linear, causal=causal, **options), forward=call_with_input_mask, mask_forms=("padding",),
        domain={"max_len": (40,)}, declares={} if causal else {"causal": False},
    )  # fmt: skip


SHIPPED = {
    "causal": _linear("causal", True),
    "causal-rotary": _linear("causal, rotary", True, use_rotary_emb=True),
    "causal-local": _linear("causal, a local head", True, **_WINDOW),
    "causal-shift": _linear("causal, shifted tokens", True, shift_tokens=True),
    "bidirectional": _linear("bidirectional"),
    "local": _linear("a local head", **_WINDOW),
    "shift": _linear("shifted tokens", shift_tokens=True),
    "linformer": _linear("Linformer layers", latents=4),
}
