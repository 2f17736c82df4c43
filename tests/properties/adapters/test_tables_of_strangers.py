"""Sinusoidal tables inside strangers' models: the paper's passes, others are asked about by what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge


class Encoder(nn.Module):
    """Tokens, a table of sines and cosines, and a layer."""

    own_cosines, base = False, 0.0

    def __init__(self, vocab_size: int, d_model: int, num_heads: int, max_len: int) -> None:
        super().__init__()
        at, channel = torch.arange(max_len)[:, None], torch.arange(d_model)
        exponent = channel if self.own_cosines else channel // 2 * 2
        angles = at / (self.base or 10000.0) ** (exponent / d_model)
        self.register_buffer("table", torch.where(channel % 2 == 0, angles.sin(), angles.cos()))
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.body = nn.TransformerEncoderLayer(d_model, num_heads, 2 * d_model, 0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.tokens(ids) + self.table[: ids.shape[1]])


class OwnCosines(Encoder):
    own_cosines = True


class OtherBase(Encoder):
    base = 32.0


class Pair(nn.Module):
    """Two sequences that share a table."""

    kind: type[Encoder] = Encoder

    def __init__(self, vocab_size: int, d_model: int, num_heads: int, max_len: int) -> None:
        super().__init__()
        self.side = self.kind(vocab_size, d_model, num_heads, max_len)
        self.other = nn.TransformerDecoderLayer(d_model, num_heads, 2 * d_model, 0.0, batch_first=True)
        self.out = nn.Linear(d_model, vocab_size)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        hidden = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        below = self.side.tokens(tgt) + self.side.table[: tgt.shape[1]]
        return self.out(self.other(below, self.side(src), tgt_mask=hidden))


class WrongPair(Pair):
    kind = OwnCosines


@pytest.mark.parametrize(
    ("cls", "expected", "declare"),
    [
        (Encoder, "PASS", ""),
        (OwnCosines, "OPEN", "positions='other'"),
        (OtherBase, "OPEN", "base=32.0"),
        (Pair, "PASS", ""),
        (WrongPair, "OPEN", "positions='other'"),
    ],
)
def test_a_table_is_the_papers_or_asked_about(cls: type[nn.Module], expected: str, declare: str) -> None:
    result = Judge(as_subject(cls), Settings(profile="quick")).judge(named(("anatomy.positions",))[0])
    assert (result.outcome, result.declare) == (expected, declare)
