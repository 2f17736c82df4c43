"""Masks as strangers' models take them: beside their own, in its place, for queries, or not at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.subject.subject import Subject

CONTENT = "padding.content-irrelevant"


def outcome(subject: Subject, prop: str) -> str:
    return Judge(subject, Settings(profile="quick"), is_brief=True).judge(named((prop,))[0]).outcome


class Attention(nn.Module):
    """Attention of one sequence; what its mask does is left to `hidden`."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return self.out((self.hidden(scores, mask).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores if mask is None else scores.masked_fill(mask == 0, -1e9)


class FilledUp(Attention):
    """What is to be hidden gets the largest score of all."""

    def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores if mask is None else scores.masked_fill(mask == 0, 1e9)


class ForQueries(Attention):
    """The mask `[B, T]` hides rows, not columns."""

    def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores if mask is None else scores.masked_fill(mask[:, None, :, None] == 0, -1e9)


class Unread(Attention):
    """The mask goes nowhere."""

    def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores


@pytest.mark.parametrize(("cls", "prop"), [
    (FilledUp, "padding.all-ones-mask"),  # what it does is to show what it is to hide: of all positions the same
    (ForQueries, CONTENT),
    (Unread, CONTENT),
])  # fmt: skip
def test_a_mask_that_hides_no_key_does_not_go_unjudged(cls: type[nn.Module], prop: str) -> None:
    assert outcome(as_subject(cls, kind="self_attention"), prop) == "FAIL"


def test_a_mask_that_hides_keys_is_found_whatever_its_shape() -> None:
    subject = as_subject(Attention, kind="self_attention")
    assert any("mask is [B, 1, 1, T] of bool, True = may attend: found by trying" in note for note in subject.notes)
    assert outcome(subject, CONTENT) == "PASS"


class Decoder(nn.Module):
    """A decoder whose mask, where one is given, is the whole mask: the past and the padding in one, added to scores."""

    def __init__(self, vocab_size: int, d_model: int, num_heads: int, max_len: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.mix, self.out = nn.MultiheadAttention(d_model, num_heads, batch_first=True), nn.Linear(d_model, vocab_size)

    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        if attn_mask is None:
            attn_mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf, device=ids.device).triu(1)[None, None]
        wide = attn_mask.to(x.dtype).expand(len(ids), self.mix.num_heads, ids.shape[1], ids.shape[1]).flatten(0, 1)
        return self.out(x + self.mix(x, x, x, attn_mask=wide, need_weights=False)[0])


class Forgets(Decoder):
    """The padding mask is taken, and the past forgotten, by a code that makes both itself."""

    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None:
            return super().forward(ids, torch.where(attn_mask.bool(), 0.0, -torch.inf)[:, None, None, :])
        return super().forward(ids)


def test_a_mask_in_place_of_the_causal_one_is_given_as_both() -> None:
    subject = as_subject(Decoder)
    assert any("attn_mask takes the place of its own causal mask" in note for note in subject.notes)
    for prop in ("causality.no-future-influence", CONTENT, "padding.all-ones-mask"):
        assert outcome(subject, prop) == "PASS"


def test_a_padding_mask_under_which_the_future_is_seen_is_found_out() -> None:
    subject = as_subject(Forgets)
    assert outcome(subject, "causality.no-future-influence") == "FAIL"


class Insists(Attention):
    """Queries, keys and values of one sequence, and a mask that must be there."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(query, mask.unsqueeze(1).unsqueeze(2))


def test_a_mask_that_must_be_there_is() -> None:
    subject = as_subject(Insists)
    assert subject.kind == "self_attention"
    assert outcome(subject, CONTENT) == "PASS"


class Rows(nn.Module):
    """Positions as one row for all samples, and a list of caches, both needed."""

    def __init__(self, vocab_size: int, d_model: int, max_len: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocab_size, d_model), nn.Parameter(torch.randn(max_len, d_model))
        self.blocks = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(2)])

    def forward(self, ids: Tensor, position_ids: Tensor, kv_caches: list[Tensor | None] | None = None) -> Tensor:
        x = self.table(ids) + self.places[position_ids][:, None, :, :].squeeze(1)
        assert kv_caches is not None
        for block, _ in zip(self.blocks, kv_caches, strict=True):
            x = x + block(x).cumsum(1)
        return x


def test_rows_of_positions_and_a_cache_for_each_layer_are_given_where_it_insists() -> None:
    subject = as_subject(Rows, kind="encoder")
    assert outcome(subject, "batch.independence") == "PASS"
