"""reformer-pytorch: language models with shared queries and keys, hashed into buckets or with full attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.own_backwards import ByGrad
from veriformer.properties.subject.subject import Subject


def build_reformer(config: Any, trained: bool = False, **options: Any) -> nn.Module:
    """Return a ReformerLM that pads itself to whole buckets.

    Args:
        config: the drawn sizes.
        trained: it has seen a batch in train mode, without which its backward in eval mode raises.
        options: of ReformerLM.
    """
    from reformer_pytorch import ReformerLM
    from reformer_pytorch.autopadder import Autopadder

    model = Autopadder(
        ReformerLM(
            config.vocab_size,
            config.d_model,
            config.num_layers,
            config.max_len,
            heads=config.num_heads,
            dim_head=config.d_head,
            bucket_size=2,
            n_hashes=2,
            ff_chunks=1,
            lsh_dropout=config.dropout,
            ff_dropout=config.dropout,
            fixed_position_emb=True,
            **options,
        )
    )
    if trained:
        model.train()(torch.zeros(1, 4, dtype=torch.long))
    return ByGrad(model)


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call on tokens `[B, T]` with mask `[B, T]`; the rotations of its hashes are drawn alike in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return model(tokens, input_mask=attention_mask)


def embed(model: Any, embeddings: Any, attention_mask: Any = None) -> Any:
    """Call from token embeddings `[B, T, D]` on, as `forward` does."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return model.from_embeddings(embeddings, model.net.net.token_emb, input_mask=attention_mask)


def _reformer(label: str, causal: bool, **options: Any) -> Subject:
    full = bool(options.get("use_full_attn"))
    return Subject(
        kind="decoder" if causal else "encoder", name=f"reformer-pytorch ReformerLM ({label})",
        build=partial(build_reformer, causal=causal, **options), forward=forward, embed=embed, mask_forms=("padding",),
        domain={"max_len": (40,)}, declares={} if causal and full else {"causal": causal, "sparse": not full},
    )  # fmt: skip


SHIPPED = {
    "causal": _reformer("causal, hashed", True, trained=True),
    "bidirectional": _reformer("hashed", False, trained=True),
    "causal-full": _reformer("causal, full attention", True, trained=True, use_full_attn=True),
    "bidirectional-full": _reformer("full attention", False, trained=True, use_full_attn=True),
    "causal-as-built": _reformer("causal, full attention, as built", True, use_full_attn=True),
}
