"""The sizes of one model."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class DrawnConfig:
    """The sizes drawn for one model; `Subject.build` receives it and uses the fields it needs.

    >>> DrawnConfig(d_model=12, num_heads=3).d_head
    4
    """

    d_model: int = 8
    num_heads: int = 2
    num_key_value_heads: int = 2
    num_layers: int = 2
    d_ff: int = 20
    vocab_size: int = 11
    max_len: int = 32
    num_classes: int = 3
    dropout: float = 0.0

    @property
    def d_head(self) -> int:
        """Channels of one head, `d_model // num_heads`."""
        return self.d_model // self.num_heads

    @property
    def has_groups(self) -> bool:
        """Whether there are several groups of several heads that share their keys."""
        return 1 < self.num_key_value_heads < self.num_heads

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
