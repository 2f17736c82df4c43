"""Subjects that take no short sequences, or only short ones: both can be said, and what raises is told how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject, check
from veriformer.properties.results.records import ERROR, PASS


class Decoder(nn.Module):
    """A causal model with a table of positions, which refuses sequences outside its lengths."""

    def __init__(self, c: DrawnConfig, shortest: int, longest: int) -> None:
        super().__init__()
        self.shortest, self.longest = shortest, longest
        layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Embedding(max(longest, c.max_len) if longest > 64 else longest, c.d_model)
        self.layers = nn.TransformerEncoder(layer, c.num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length < self.shortest:
            raise ValueError(f"{length} tokens are given, {self.shortest} are required")
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        return self.head(self.layers(x, mask=mask))


def decoder(shortest: int = 1, longest: int = 2000, **facts: Any) -> Subject:
    return Subject(
        kind="decoder", build=lambda c: Decoder(c, shortest, longest), forward=lambda m, tokens: m(tokens),
        declares={"causal": True, **facts},
    )  # fmt: skip


@pytest.mark.parametrize("shortest", [3, 6, 20])
def test_a_subject_that_says_its_shortest_sequence_is_judged_from_there_on(shortest: int) -> None:
    (part,) = check(decoder(shortest, min_length=shortest), profile="quick").subjects
    judged = {r.id: r.outcome for r in part.results if r.outcome != "NOT_APPLICABLE"}
    assert set(judged.values()) == {PASS}
    assert {"causality.no-future-influence", "causality.prefix-consistency", "batch.independence", "anatomy.mask"} <= {
        *judged
    }
    assert part.reach["T"][0] == shortest


def test_what_raises_on_ordinary_sequences_is_told_what_to_declare() -> None:
    (part,) = check(decoder(9), profile="quick", only=["causality.no-future-influence"]).subjects
    (result,) = part.results
    assert result.outcome == ERROR
    assert "declare min_length=9 if it takes no shorter ones by design" in result.reason


def test_what_raises_on_short_sequences_alone_fails_and_is_told_where_they_begin() -> None:
    (part,) = check(decoder(3), profile="quick", only=["batch.independence", "causality.prefix-consistency"]).subjects
    assert {r.outcome for r in part.results} == {ERROR}
    assert any("declare min_length=3 if it takes none by design" in note for note in part.probed)


def test_a_subject_of_three_positions_is_judged_on_three() -> None:
    (part,) = check(decoder(longest=3, max_len=3), profile="quick").subjects
    judged = {r.id: r.outcome for r in part.results if r.outcome != "NOT_APPLICABLE"}
    assert set(judged.values()) == {PASS}
    assert {"attention.attends", "causality.random-tokens", "decoding.probability"} <= {*judged}
    assert part.reach["T"][1] == 3
