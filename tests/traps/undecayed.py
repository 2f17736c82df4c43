"""Right groups of parameters that look wrong: tables that are not multiplied with anything, and do not decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap


class _TokenEmbedding(nn.Module):
    """A table of its own, no `nn.Embedding`; its only parameter is named as that of a linear map is."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class _Model(nn.Module):
    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.tokens = _TokenEmbedding(c.vocab_size, c.d_model)
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)
        self.qkv_weight = nn.Parameter(torch.randn(3 * c.d_model, c.d_model))

    def groups(self) -> list[dict[str, Any]]:
        decays = [self.head.weight, self.qkv_weight]
        rest = [p for p in self.parameters() if not any(p is other for other in decays)]
        return [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


@trap("groups-own-table", "A table of embeddings that is a module of its own does not decay, nor need it")
def a_table_of_its_own() -> Subject:
    return Subject(kind="parameter_groups", build=_Model, forward=lambda m: m.groups())
