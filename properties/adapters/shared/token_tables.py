"""A table of tokens before a part that takes embeddings, so that it is judged as a decoder, cache and all."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class OnTokens(nn.Module):
    """A part on the embeddings of tokens; `part` and `table` are called apart where a cache is kept."""

    def __init__(self, config: Any, part: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.d_model)
        self.part = part

    def forward(self, tokens: Tensor) -> Tensor:
        """Call the part on the embeddings `[B, T, D]` of tokens `[B, T]`."""
        found: Tensor = self.part(self.table(tokens))
        return found
