"""memory-efficient-attention-pytorch: attention in buckets, and its flash attention written in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.own_backwards import ByGrad
from veriformer.properties.adapters.shared.plain_calls import call, call_with_mask
from veriformer.properties.subject.subject import Subject


def _sizes(config: Any, **options: Any) -> dict[str, Any]:
    sizes = {"dim": config.d_model, "heads": config.num_heads, "dim_head": config.d_head}
    return {**sizes, "q_bucket_size": 4, "k_bucket_size": 3, **options}


def build_efficient(config: Any, **options: Any) -> nn.Module:
    """Return memory-efficient attention with small buckets."""
    from memory_efficient_attention_pytorch import Attention

    return ByGrad(Attention(**_sizes(config, dropout=config.dropout, memory_efficient=True, **options)))


def build_flash(config: Any, **options: Any) -> nn.Module:
    """Return flash attention written in torch, with small buckets."""
    from memory_efficient_attention_pytorch import FlashAttention

    return FlashAttention(**_sizes(config, **options))


def build_cosine(config: Any, **options: Any) -> nn.Module:
    """Return flash attention of normalised queries and keys; buckets of unequal size raise with a mask."""
    from memory_efficient_attention_pytorch.cosine_sim_flash_attention import FlashAttention

    return FlashAttention(**_sizes(config, k_bucket_size=4, **options))


def build_transformer(config: Any, trained: bool = False, **options: Any) -> nn.Module:
    """Return a reversible language model.

    Args:
        config: the drawn sizes.
        trained: it has seen a batch in train mode, without which its backward in eval mode raises.
        options: of its attention.
    """
    from memory_efficient_attention_pytorch.transformer import Transformer

    sizes = {"num_tokens": config.vocab_size, "max_seq_len": config.max_len, "depth": config.num_layers}
    model = Transformer(**sizes, **_sizes(config, causal=True, **options))
    if trained:
        model.train()(torch.zeros(1, 1, dtype=torch.long))
    return ByGrad(model)


def embed(model: Any, embeddings: Any) -> Any:
    """Call a language model from its token embeddings `[B, T, D]` on."""
    return model.from_embeddings(embeddings, model.net.token_emb)


_SHORT = {"max_len": (40,)}  # buckets of four and three: a loop in Python over all pairs of them


def _attention(label: str, build: Any, **facts: Any) -> Subject:
    causal = bool(facts.get("causal"))
    declares = {"causal": causal, **({} if causal else {"positions": "none"}), **facts}
    return Subject(kind="self_attention", name=label, build=build, forward=call_with_mask, mask_forms=("padding",),
                   declares=declares, domain=_SHORT)  # fmt: skip


def _transformer(label: str, **options: Any) -> Subject:
    return Subject(kind="decoder", name=f"memory-efficient Transformer ({label})",
                   build=partial(build_transformer, **options), forward=call, embed=embed, mask_forms=(),
                   domain=_SHORT)  # fmt: skip


SHIPPED = {
    "attention": _attention("memory-efficient attention", build_efficient),
    "attention-causal": _attention("memory-efficient attention (causal)", partial(build_efficient, causal=True),
                                   causal=True),
    "flash": _attention("memory-efficient FlashAttention", build_flash),
    "flash-causal": _attention("memory-efficient FlashAttention (causal)", partial(build_flash, causal=True),
                               causal=True),
    "flash-cosine": _attention("memory-efficient FlashAttention (cosine)", build_cosine, query_key_norm=True),
    "transformer-flash": _transformer("flash, as built"),
    "transformer": _transformer("as built", use_flash_attn=False),
    "transformer-flash-trained": _transformer("flash, after a batch in train mode", trained=True),
    "transformer-trained": _transformer("after a batch in train mode", trained=True, use_flash_attn=False),
}  # fmt: skip
