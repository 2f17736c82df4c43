"""Bare models whose mask must be given: understood with one that hides nothing, judged with one that does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import FAIL, PASS


class Pooled(nn.Module):
    """Embeds sentences; the mean is over what the mask leaves."""

    def __init__(self, n_words: int = 17, d_model: int = 16, n_head: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(n_words, d_model), nn.Embedding(40, d_model)
        layer = nn.TransformerEncoderLayer(d_model, n_head, 2 * d_model, 0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def many(self, mask: Tensor) -> Tensor:
        return mask.sum(1, keepdim=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        x = self.stack(x, src_key_padding_mask=attention_mask == 0)
        pooled: Tensor = (x * attention_mask.unsqueeze(-1)).sum(1) / self.many(attention_mask).clamp(min=1)
        return pooled


class OverAll(Pooled):
    def many(self, mask: Tensor) -> Tensor:
        return torch.full_like(mask[:, :1], mask.shape[1], dtype=torch.long)


class ShownWhereOne(Pooled):
    """Takes whole numbers alone, 1 = may attend."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if attention_mask.dtype != torch.long or attention_mask.ndim != 2:
            raise TypeError("attention_mask must be [B, T] of whole numbers")
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(("model", "outcome"), [(Pooled, PASS), (OverAll, FAIL), (ShownWhereOne, PASS)])
def test_a_mask_that_must_be_given_is_given(model: type[nn.Module], outcome: str) -> None:
    subject = as_subject(model)
    assert subject.kind == "classifier"
    assert subject.mask_forms == ("padding",)
    prop = "padding.amount-irrelevant"
    (told,) = (Judge(subject, Settings(profile="quick", named=(prop,))).judge(p) for p in named((prop,)))
    assert told.outcome == outcome, told.reason
