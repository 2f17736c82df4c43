"""What was declared is not said to be found out, nor asked to be declared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge


class GPT(nn.Module):
    """Scores of attention that are not scaled, and a table of positions that is told by its name."""

    def __init__(self, vocab_size: int, d_model: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.tok_emb, self.pos_emb = nn.Embedding(vocab_size, d_model), nn.Embedding(block_size, d_model)
        self.qkv, self.head = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, vocab_size)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tok_emb(idx) + self.pos_emb(torch.arange(idx.shape[1]))
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return self.head(x + attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fact", [("attention_scale", "1"), ("positions", "learned")])
def test_a_declared_fact_is_asked_for_no_more(fact: tuple[str, object]) -> None:
    name, value = fact
    told = []
    for facts in ({}, {name: value}):
        judge = Judge(as_subject(GPT, **facts), Settings(profile="quick"))
        judge.judge(catalogue()["causality.first-token"])
        told.append([note for note in judge.probed if note.startswith(f"{name} = ")])
    asked, declared = told
    assert asked
    assert all("declare it" in note for note in asked)
    assert not declared
