"""Keys and values of earlier tokens, so that decoding costs one token a step."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys, values and positions seen by one attention layer."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.positions: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append new tokens and return everything so far.

        Args:
            key: `[B, G, T, K]`, already rotated.
            value: `[B, G, T, E]`.
            positions: `[B, T]`.
        """
        self.key = key if self.key is None else torch.cat([self.key, key], dim=2)
        self.value = value if self.value is None else torch.cat([self.value, value], dim=2)
        self.positions = positions if self.positions is None else torch.cat([self.positions, positions], dim=1)
        return self.key, self.value, self.positions

    def reorder(self, samples: Tensor) -> None:
        """Let sample b continue what sample `samples[b]` has seen (beam search)."""
        if self.key is not None and self.value is not None and self.positions is not None:
            self.key, self.value = self.key[samples], self.value[samples]
            self.positions = self.positions[samples]


class KVCache:
    """One `LayerCache` a layer, and the padding mask of what was seen.

    >>> KVCache(num_layers=2).length
    0
    """

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]
        self.mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return 0 if self.mask is None else self.mask.shape[1]

    def extend_mask(self, mask: Tensor) -> Tensor:
        """Append the mask `[B, T]` of new tokens and return that of all tokens `[B, S]`."""
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        return self.mask

    def reorder(self, samples: Tensor) -> None:
        """Let sample b continue what sample `samples[b]` has seen, in every layer and in the mask."""
        for layer in self.layers:
            layer.reorder(samples)
        if self.mask is not None:
            self.mask = self.mask[samples]
