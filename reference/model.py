"""Whole models: encoder, decoder, encoder-decoder, classifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from veriformer.reference.blocks import DecoderLayer, EncoderLayer, ParallelLayer
from veriformer.reference.cache import KVCache
from veriformer.reference.config import Config
from veriformer.reference.initialization import INITS, Generators
from veriformer.reference.normalization import NORMS
from veriformer.reference.pooling import POOLINGS
from veriformer.reference.position_bias import AlibiBias, NoBias, T5Bias
from veriformer.reference.positions import LearnedPositions, NoPositions, SinusoidalPositions
from veriformer.reference.rotary import NoRotation, Rotary

_ABSOLUTE: Mapping[str, Callable[[Config], nn.Module]] = {
    "sinusoidal": lambda c: SinusoidalPositions(c.d_model, c.base),
    "learned": lambda c: LearnedPositions(c.d_model, c.max_len),
}
_BIASES: Mapping[str, Callable[[Config, bool], nn.Module]] = {
    "alibi": lambda c, causal: AlibiBias(c.num_heads),
    "t5": lambda c, causal: T5Bias(
        c.num_heads, bidirectional=not causal, num_buckets=c.num_buckets, max_distance=c.max_distance
    ),
}


def positions_from(mask: Tensor) -> Tensor:
    """Return the index of each real token among the real ones, `[B, T]`; padding on either side shifts nothing.

    >>> positions_from(torch.tensor([[False, True, True]])).tolist()
    [[0, 0, 1]]
    """
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


class Embedding(nn.Module):
    """Token embeddings times sqrt(D), plus positions, then dropout (Vaswani et al. 2017, sections 3.4 and 3.5).

    With `embedding_norm` a norm stands before the dropout (Devlin et al. 2019).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.scale = math.sqrt(config.d_model) if config.embedding_scale else 1.0
        self.positions = _ABSOLUTE.get(config.positions, lambda c: NoPositions())(config)
        self.norm = NORMS[config.norm if config.embedding_norm else "none"](config.d_model, config.norm_eps)
        rate = config.dropout if config.embedding_dropout is None else config.embedding_dropout
        self.dropout = nn.Dropout(rate)

    def forward(self, tokens: Tensor | None, embeddings: Tensor | None, positions: Tensor) -> Tensor:
        """Return `[B, T, D]` from token ids `[B, T]`, or from `embeddings` that stand in for the table's rows."""
        x = self.tokens(tokens) if embeddings is None else embeddings
        return self.dropout(self.norm(self.positions(x * self.scale, positions)))


class Stack(nn.Module):
    """Layers in order, and the norm that closes the stack unless it is post-LN."""

    def __init__(self, config: Config, *, causal: bool, cross_attention: bool = False) -> None:
        super().__init__()
        rotary = Rotary(config.rotary_width, config.base) if config.positions == "rotary" else NoRotation()
        # one bias serves all layers, as in T5: it enters at every layer with the same numbers
        bias = _BIASES.get(config.positions, lambda c, causal: NoBias())(config, causal)
        own = ParallelLayer if config.parallel else EncoderLayer
        layers: list[nn.Module] = []
        for _ in range(config.num_layers):
            if cross_attention:
                layers.append(DecoderLayer(config, rotary=rotary, position_bias=bias))
            else:
                layers.append(own(config, causal=causal, rotary=rotary, position_bias=bias))
        self.layers = nn.ModuleList(layers)
        self.final_norm = NORMS[config.norm if config.is_closed else "none"](config.d_model, config.norm_eps)


class Encoder(nn.Module):
    """Tokens `[B, T]` to hidden states `[B, T, D]`, every position seeing all others."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.stack = Stack(config, causal=False)

    def forward(
        self, tokens: Tensor | None = None, attention_mask: Tensor | None = None, *, embeddings: Tensor | None = None
    ) -> Tensor:
        """Encode.

        Args:
            tokens: int64 `[B, T]`.
            attention_mask: bool `[B, T]`, True = real; None: all are.
            embeddings: `[B, T, D]`, in place of `tokens`.
        """
        return self.with_weights(tokens, attention_mask, embeddings=embeddings)[0]

    def with_weights(
        self, tokens: Tensor | None = None, attention_mask: Tensor | None = None, *, embeddings: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states and the attention weights `[B, H, T, T]` of each layer."""
        mask = _mask_for(tokens, embeddings, attention_mask)
        positions = positions_from(mask)
        return run_layers(self.stack, self.embedding(tokens, embeddings, positions), attention_mask, positions)


def _mask_for(tokens: Tensor | None, embeddings: Tensor | None, mask: Tensor | None) -> Tensor:
    given = tokens if embeddings is None else embeddings
    if given is None:
        raise ValueError("neither tokens nor embeddings were given; give one of them")
    if mask is None:
        return torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
    if mask.shape != given.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask was {mask.dtype} {list(mask.shape)}; it must be bool {list(given.shape[:2])}, True = real"
        )
    return mask


def run_layers(
    stack: Stack,
    x: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    cache: KVCache | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Send `x` `[B, T, D]` through the layers; return the closing norm's output and each layer's weights."""
    weights = []
    for index, layer in enumerate(stack.layers):
        x, seen = layer(x, mask, positions, cache.layers[index] if cache is not None else None)
        weights.append(seen)
    return stack.final_norm(x), weights


class Decoder(nn.Module):
    """Tokens `[B, T]` to logits `[B, T, V]`, position t seeing 0..t (decoder-only, as GPT)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.stack = Stack(config, causal=True)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.embedding.tokens.weight

    def forward(
        self,
        tokens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return logits.

        Args:
            tokens: int64 `[B, T]`; with a cache, the new ones alone.
            attention_mask: bool `[B, T]`, True = real; None: all are.
            embeddings: `[B, T, D]`, in place of `tokens`.
            cache: of earlier tokens; extended by these.
        """
        return self.with_weights(tokens, attention_mask, embeddings=embeddings, cache=cache)[0]

    def with_weights(
        self,
        tokens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits and the attention weights `[B, H, T, S]` of each layer."""
        mask = _mask_for(tokens, embeddings, attention_mask)
        everything = mask if cache is None else cache.extend_mask(mask)
        positions = positions_from(everything)[:, -mask.shape[1] :]
        x = self.embedding(tokens, embeddings, positions)
        hidden, weights = run_layers(self.stack, x, everything, positions, cache)
        return self.output(hidden), weights

    def new_cache(self) -> KVCache:
        """Return an empty cache for this model."""
        return KVCache(self.config.num_layers)


class EncoderDecoder(nn.Module):
    """Source `[B, S]` and target `[B, T]` to logits `[B, T, V]`; with `tied`, one matrix serves all three places."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.source_embedding, self.target_embedding = Embedding(config), Embedding(config)
        self.encoder = Stack(config, causal=False)
        self.decoder = Stack(config, causal=True, cross_attention=True)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.source_embedding.tokens.weight = self.target_embedding.tokens.weight
            self.output.weight = self.target_embedding.tokens.weight

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Return the memory `[B, S, D]` of source tokens `[B, S]`."""
        positions = positions_from(_mask_for(source, None, source_mask))
        return run_layers(self.encoder, self.source_embedding(source, None, positions), source_mask, positions)[0]

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        """Return logits `[B, T, V]`.

        Args:
            source: int64 `[B, S]`.
            target: int64 `[B, T]`.
            source_mask: bool `[B, S]`, True = real; None: all are.
            target_mask: bool `[B, T]`, likewise.
        """
        memory = self.encode(source, source_mask)
        positions = positions_from(_mask_for(target, None, target_mask))
        x = self.target_embedding(target, None, positions)
        for layer in self.decoder.layers:
            x, _ = layer(x, memory, target_mask, source_mask, positions)
        return self.output(self.decoder.final_norm(x))


class Classifier(nn.Module):
    """Tokens `[B, T]` to class logits `[B, C]`: an encoder, a pooling, a linear map.

    A class token (pooling "cls") and register tokens stand before the sequence, without a position of their own.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.stack = Stack(config, causal=False)
        self.num_extras = config.num_registers + (config.pooling == "cls")
        self.extras = nn.Parameter(torch.randn(self.num_extras, config.d_model))
        self.pooling = POOLINGS[config.pooling](config.d_model)
        self.classify = nn.Linear(config.d_model, config.num_classes, bias=config.bias)

    def forward(
        self, tokens: Tensor | None = None, attention_mask: Tensor | None = None, *, embeddings: Tensor | None = None
    ) -> Tensor:
        """Return class logits; arguments as `Encoder.forward`."""
        mask = _mask_for(tokens, embeddings, attention_mask)
        positions = positions_from(mask)
        x = self.embedding(tokens, embeddings, positions)
        extras = self.extras.expand(len(x), -1, -1)
        everything = torch.cat([mask.new_ones(len(x), self.num_extras), mask], dim=1)
        all_positions = torch.cat([positions.new_zeros(len(x), self.num_extras), positions], dim=1)
        allowed = None if attention_mask is None else everything
        hidden, _ = run_layers(self.stack, torch.cat([extras, x], dim=1), allowed, all_positions)
        pooled = self.pooling(hidden[:, : self.num_extras], hidden[:, self.num_extras :], mask)
        return self.classify(pooled)


MODELS: Mapping[str, Callable[[Config], nn.Module]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder_decoder": EncoderDecoder,
    "classifier": Classifier,
}
"""Makers of a model, by architecture."""


def build(config: Config, generator: torch.Generator | Generators | None = None) -> nn.Module:
    """Return the model that `config` describes, initialised by its scheme.

    Args:
        config: sizes and choices.
        generator: of the initial weights; or a function from a parameter's name to its generator; None: torch's own.

    >>> build(Config(architecture="decoder", vocab_size=5))(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 5])
    """
    model = MODELS[config.architecture](config)
    INITS[config.init](model, config, generator if callable(generator) else lambda name: generator)
    return model
