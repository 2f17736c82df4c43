"""fair-esm: ESM-1b and ESM-2, protein language models; padding is told by its token."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.subject import Subject

_FIRST_RESIDUE = 4
"""Ids 0 to 3 are special: begin, padding, end, unknown; drawn tokens come after them."""


def build(config: Any) -> nn.Module:
    """Return an ESM-2 of the drawn sizes."""
    from esm.model.esm2 import ESM2

    return ESM2(config.num_layers, config.d_model, config.num_heads)


def build_first(config: Any) -> nn.Module:
    """Return an ESM-1b of the drawn sizes."""
    from esm.data import Alphabet
    from esm.model.esm1 import ProteinBertModel

    alphabet = Alphabet.from_architecture("roberta_large")
    settings = argparse.Namespace(
        arch="roberta_large", layers=config.num_layers, embed_dim=config.d_model, ffn_embed_dim=config.d_ff,
        attention_heads=config.num_heads, max_positions=config.max_len, token_dropout=True, emb_layer_norm_before=True,
        logit_bias=True,
    )  # fmt: skip
    return ProteinBertModel(settings, alphabet)


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call the model on tokens `[B, T]`, up to its logits; hidden tokens are given as padding."""
    tokens = tokens + _FIRST_RESIDUE
    if attention_mask is not None:
        tokens = torch.where(attention_mask, tokens, torch.full_like(tokens, model.padding_idx))
    return model(tokens)["logits"]


_DOMAIN = {"vocab_size": (20,), "num_heads": (2, 4), "d_model": (16, 32)}
_make = partial(Subject, kind="encoder", forward=forward, domain=_DOMAIN, declares={"causal": False})
SHIPPED = {
    "esm2": _make(name="fair-esm ESM-2", build=build),
    "esm1b": _make(name="fair-esm ESM-1b", build=build_first),
}
