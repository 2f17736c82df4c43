"""The reference Transformer as whole models: encoders, decoders, encoder-decoders, classifiers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.facts import FACTS
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.config import Config
from veriformer.reference.generation import greedy
from veriformer.reference.model import Classifier, Decoder, Encoder, EncoderDecoder
from veriformer.reference.model import build as build_reference


def build(config: Any, **choices: Any) -> nn.Module:
    """Return the reference model of the drawn sizes, with choices of `Config`."""
    return build_reference(
        Config(
            vocab_size=config.vocab_size, d_model=config.d_model, num_heads=config.num_heads, d_ff=config.d_ff,
            num_layers=config.num_layers, max_len=config.max_len, num_classes=config.num_classes,
            dropout=config.dropout, **choices,
        )
    )  # fmt: skip


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call the model on tokens `[B, T]`."""
    return model(tokens, attention_mask)


def forward_pair(model: Any, source: Any, target: Any, source_mask: Any = None, target_mask: Any = None) -> Any:
    """Call the model on source `[B, S]` and target `[B, T]`."""
    return model(source, target, source_mask, target_mask)


def embed(model: Any, embeddings: Any, attention_mask: Any = None) -> Any:
    """Call the model on embeddings `[B, T, D]`."""
    return model(None, attention_mask, embeddings=embeddings)


def cached(model: Any, chunks: Any, attention_mask: Any = None, reorder: Any = None) -> Any:
    """Return the logits `[B, T, V]` of chunks of tokens, one after another, through the cache."""
    cache, start, outputs = model.new_cache(), 0, []
    for number, chunk in enumerate(chunks):
        if number == 1 and reorder is not None:
            cache.reorder(reorder)
        mask = None if attention_mask is None else attention_mask[:, start : start + chunk.shape[1]]
        outputs.append(model(chunk, mask, cache=cache))
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


def generate(model: Any, tokens: Any, steps: int, use_cache: bool) -> Any:
    """Return tokens `[B, T + steps]`, greedily chosen."""
    return greedy(model, tokens, steps, use_cache=use_cache)


def facts_of(config: Config) -> dict[str, Any]:
    """Return what a configuration lets a reference model declare."""
    facts: dict[str, Any] = {
        "positions": config.positions, "norm": config.norm, "residual": config.residual, "bias": config.bias,
        "norm_placement": _named("norm_placement", config.norm_placement),
        "activation": _named("activation", config.activation),
        "embedding_scale": config.embedding_scale, "padding_side": "both", "empty_row": "zeros",
        "final_norm": config.is_closed, "tied": config.tied, "init": config.init,
    }  # fmt: skip
    if config.architecture in ("encoder", "decoder", "encoder_decoder"):
        facts["causal"] = config.architecture != "encoder"
    if config.architecture == "classifier":
        facts |= {"pooling": config.pooling, "extra_tokens": config.num_registers + (config.pooling == "cls")}
        del facts["tied"]
    if config.architecture == "encoder":
        del facts["tied"]
    if config.positions == "t5":
        facts["num_buckets"] = config.num_buckets
    if config.positions == "rotary" and config.rotary_dim is not None:
        facts["rotary_dim"] = config.rotary_dim
    if config.window is not None:
        facts["window"] = config.window
    if config.query_key_norm:
        facts["query_key_norm"] = True
    if config.base != Config.base:
        facts["base"] = config.base
    return facts


def _named(fact: str, value: str) -> str:
    """Return a choice of the reference as subjects declare it."""
    return value if FACTS[fact].accepts(value) else "other"


def _subject(label: str, **choices: Any) -> Subject:
    config = Config(**choices)
    pair = config.architecture == "encoder_decoder"
    return Subject(
        kind=config.architecture,
        name=f"reference {label}",
        build=partial(build, **choices),
        forward=forward_pair if pair else forward,
        embed=None if pair else embed,
        cache=cached if config.architecture == "decoder" else None,
        generate=generate if config.architecture == "decoder" else None,
        declares=facts_of(config),
    )


SHIPPED = {
    **{
        f"decoder-{positions}": _subject(f"decoder ({positions})", architecture="decoder", positions=positions)
        for positions in ("sinusoidal", "learned", "rotary", "alibi", "t5", "none")
    },
    "decoder-tied": _subject("decoder (tied, SwiGLU, RMSNorm, no bias)", architecture="decoder", positions="rotary",
                             tied=True, activation="swiglu", norm="rms", bias=False),
    "decoder-gpt2": _subject("decoder (as GPT-2)", architecture="decoder", positions="learned", tied=True,
                             activation="gelu", init="gpt2", embedding_scale=False),
    "decoder-parallel": _subject("decoder (parallel, as GPT-NeoX)", architecture="decoder", positions="rotary",
                                 rotary_dim=2, parallel=True, activation="gelu", embedding_scale=False),
    "decoder-sandwich": _subject("decoder (sandwich norms, as Gemma 3)", architecture="decoder", positions="rotary",
                                 norm_placement="sandwich", norm="rms", query_key_norm=True, window=4, base=1e5,
                                 activation="geglu_tanh", bias=False, tied=True),
    "encoder": _subject("encoder (post-LN)", architecture="encoder", norm_placement="post"),
    "encoder-none": _subject("encoder (no positions)", architecture="encoder", positions="none"),
    "encoder-alibi": _subject("encoder (ALiBi)", architecture="encoder", positions="alibi"),
    "encoder-decoder": _subject("encoder-decoder", architecture="encoder_decoder"),
    "encoder-decoder-tied": _subject("encoder-decoder (tied, T5 bias)", architecture="encoder_decoder", tied=True,
                                     positions="t5"),
    **{
        f"classifier-{pooling}": _subject(
            f"classifier ({pooling})", architecture="classifier", positions="none", pooling=pooling, num_registers=1
        )
        for pooling in ("cls", "mean", "max", "weighted")
    },
    "classifier-positions": _subject("classifier (sinusoidal)", architecture="classifier", pooling="cls"),
}  # fmt: skip

_MODELS = {Encoder: "encoder", Decoder: "decoder", EncoderDecoder: "encoder_decoder", Classifier: "classifier"}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise instances of the reference models."""
    if type(thing) not in _MODELS:
        return None
    config = thing.config
    sizes = DrawnConfig(
        d_model=config.d_model, num_heads=config.num_heads, num_key_value_heads=config.key_value_heads,
        num_layers=config.num_layers, d_ff=config.inner_width, vocab_size=config.vocab_size, max_len=config.max_len,
        num_classes=config.num_classes, dropout=config.dropout,
    )  # fmt: skip
    pair = config.architecture == "encoder_decoder"
    return Subject(
        kind=config.architecture, name=f"reference {config.architecture}", module=thing, config=sizes,
        forward=forward_pair if pair else forward, embed=None if pair else embed,
        cache=cached if config.architecture == "decoder" else None,
        generate=generate if config.architecture == "decoder" else None, declares=facts_of(config),
    )  # fmt: skip
