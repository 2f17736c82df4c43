"""torchscale: its encoder, decoder and retentive network, with embeddings and output projection around them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.subject.subject import Subject


class _Embedded(nn.Module):
    """Token embeddings, a stack of torchscale, an output projection (its own, for decoders)."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack


def _options(config: Any, side: str, **options: Any) -> dict[str, Any]:
    sizes = {
        f"{side}_embed_dim": config.d_model, f"{side}_attention_heads": config.num_heads,
        f"{side}_ffn_embed_dim": config.d_ff, f"{side}_layers": config.num_layers, "vocab_size": config.vocab_size,
        "dropout": config.dropout, "attention_dropout": config.dropout, "activation_dropout": config.dropout,
    }  # fmt: skip
    return {**sizes, **options}


def build_encoder(config: Any, **options: Any) -> nn.Module:
    """Return an encoder of the drawn sizes."""
    name_operators()
    from torchscale.architecture.config import EncoderConfig
    from torchscale.architecture.encoder import Encoder

    settings = EncoderConfig(**_options(config, "encoder", no_output_layer=True, **options))
    return _Embedded(Encoder(settings, embed_tokens=nn.Embedding(config.vocab_size, config.d_model)))


def build_decoder(config: Any, **options: Any) -> nn.Module:
    """Return a decoder of the drawn sizes."""
    name_operators()
    from torchscale.architecture.config import DecoderConfig
    from torchscale.architecture.decoder import Decoder

    settings = DecoderConfig(**_options(config, "decoder", **options))
    return _Embedded(Decoder(settings, embed_tokens=nn.Embedding(config.vocab_size, config.d_model)))


def build_retnet(config: Any, **options: Any) -> nn.Module:
    """Return a retentive network of the drawn sizes, in its parallel form or by chunks."""
    name_operators()
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    sizes = _options(
        config, "decoder", decoder_retention_heads=config.num_heads, decoder_value_embed_dim=config.d_model, **options
    )
    for name in ("decoder_attention_heads", "attention_dropout"):
        sizes.pop(name)
    return _Embedded(RetNetDecoder(RetNetConfig(**sizes), embed_tokens=nn.Embedding(config.vocab_size, config.d_model)))


def encode(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call the encoder on tokens `[B, T]`, up to its states `[B, T, D]`."""
    padding = None if attention_mask is None else ~attention_mask
    return model.stack(tokens, encoder_padding_mask=padding)["encoder_out"]


def decode(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call the decoder on tokens `[B, T]`."""
    padding = None if attention_mask is None else ~attention_mask
    return model.stack(tokens, self_attn_padding_mask=padding)[0]


def retain(model: Any, tokens: Any) -> Any:
    """Call the retentive network on tokens `[B, T]`."""
    return model.stack(tokens)[0]


def cached(model: Any, chunks: Any) -> Any:
    """Return the logits `[B, T, V]` token by token: its incremental state takes one at a time."""
    tokens = torch.cat(list(chunks), dim=1)
    state: dict[Any, Any] = {}
    steps = range(1, tokens.shape[1] + 1)
    outputs = [model.stack(tokens[:, :end], incremental_state=state)[0] for end in steps]
    return torch.cat(outputs, dim=1)


def _facts(options: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if not options.get("rel_pos_buckets") and not options.get("xpos_rel_pos"):
        facts["positions"] = "none"  # they are the caller's (`embed_positions`), as the sequence's embeddings are
    if options.get("deepnorm"):
        facts["structure"] = "other"  # DeepNorm multiplies the stream by alpha before each sum
    return facts


def _encoder(label: str, **options: Any) -> Subject:
    return Subject(kind="encoder", name=f"torchscale Encoder ({label})", build=partial(build_encoder, **options),
                   forward=encode, declares={"causal": False, **_facts(options)})  # fmt: skip


def _decoder(label: str, **options: Any) -> Subject:
    return Subject(
        kind="decoder", name=f"torchscale Decoder ({label})", build=partial(build_decoder, **options), forward=decode,
        cache=cached,
        declares={"padding_side": "right", **_facts(options)},  # on the left a query is left without a key: NaN
    )  # fmt: skip


SHIPPED = {
    "encoder": _encoder("pre-LN"),
    "encoder-post": _encoder("post-LN", encoder_normalize_before=False),
    "encoder-subln": _encoder("sub-LN", subln=True),
    "encoder-deepnorm": _encoder("DeepNorm", deepnorm=True, subln=False, encoder_normalize_before=False),
    "encoder-t5": _encoder("T5 bias", rel_pos_buckets=8, max_rel_pos=16),
    "encoder-xpos": _encoder("xPos", xpos_rel_pos=True),
    "encoder-multiway": _encoder("multiway", multiway=True),
    "decoder": _decoder("pre-LN"),
    "decoder-post": _decoder("post-LN", decoder_normalize_before=False),
    "decoder-subln": _decoder("sub-LN", subln=True),
    "decoder-deepnorm": _decoder("DeepNorm", deepnorm=True, subln=False, decoder_normalize_before=False),
    "decoder-t5": _decoder("T5 bias", rel_pos_buckets=8, max_rel_pos=16),
    "decoder-xpos": _decoder("xPos", xpos_rel_pos=True),
    "decoder-embedding-norm": _decoder("normalised embeddings", layernorm_embedding=True),
    "retnet": Subject(kind="decoder", name="torchscale RetNet", build=build_retnet, forward=retain, cache=cached),
    "retnet-chunks": Subject(
        kind="decoder",
        name="torchscale RetNet (chunks of three)",
        forward=retain,
        cache=cached,
        build=partial(build_retnet, chunkwise_recurrent=True, recurrent_chunk_size=3),
    ),
}
