"""Bare models that take more than a sequence, or give less: understood, judged, told from their wrong twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import FAIL, OPEN, PASS, Result


def judged(thing: Any, prop: str, **facts: Any) -> Result:
    return Judge(as_subject(thing, **facts), Settings(profile="quick", named=(prop,))).judge(named((prop,))[0])


def blocks(width: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Listener(nn.Module):
    """Frames of a spectrogram, one of three of which is kept; what comes out of padding is left for the caller."""

    def __init__(self, n_mels: int = 6, d_model: int = 16, nhead: int = 2) -> None:
        super().__init__()
        self.thin = nn.Conv1d(n_mels, d_model, 5, stride=3)
        self.stack = blocks(d_model, nhead)

    def kept(self, count: Tensor) -> Tensor:
        return (count - 5).div(3, rounding_mode="floor") + 1

    def forward(self, mel: Tensor, mel_lens: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.thin(mel.mT)).mT
        count = self.kept(mel_lens).clamp(1, x.shape[1])
        hidden = torch.arange(x.shape[1], device=x.device) >= count[:, None]
        return self.stack(x, src_key_padding_mask=hidden), count


class ListensOn(Listener):
    def kept(self, count: Tensor) -> Tensor:
        return (count + 2).div(3, rounding_mode="floor")


class Describer(nn.Module):
    """An image's cells stand before the words; the outputs of the words are given, each with its own word seen."""

    def __init__(self, n_words: int = 17, d_model: int = 16, nhead: int = 2, max_words: int = 32) -> None:
        super().__init__()
        self.cells, self.words = nn.Conv2d(3, d_model, 4, 4), nn.Embedding(n_words, d_model)
        self.place = nn.Embedding(max_words, d_model)
        self.stack, self.out = blocks(d_model, nhead), nn.Linear(d_model, n_words)

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        cells = self.cells(pixel_values).flatten(2).mT
        x = self.words(input_ids) + self.place(torch.arange(input_ids.shape[1], device=input_ids.device))
        x, n = torch.cat([cells, x], 1), cells.shape[1]
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        hidden[:n, :n] = False
        return self.out(self.stack(x, mask=hidden)[:, self.first(n) :])

    def first(self, cells: int) -> int:
        return cells

    def loss(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        logits = self(pixel_values, input_ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


class SeesWhatItForetells(Describer):
    def loss(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        return F.cross_entropy(self(pixel_values, input_ids).flatten(0, 1), input_ids.flatten())


class BeginsBehindTheImage(Describer):
    """Output t is of the words before t: the last cell foretells the first word."""

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        return super().forward(pixel_values, input_ids)[:, :-1]

    def first(self, cells: int) -> int:
        return cells - 1


class Summariser(nn.Module):
    """A target that may be left out where labels are given, which are moved to the right then."""

    def __init__(self, vocab_size: int = 19, d_model: int = 16, nhead: int = 2) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)
        self.both = nn.Transformer(d_model, nhead, 1, 1, 2 * d_model, 0.0, batch_first=True, norm_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, decoder_input_ids: Tensor | None = None) -> Any:
        if decoder_input_ids is None:
            decoder_input_ids = F.pad(labels[:, :-1], (1, 0))  # type: ignore[index]
        later = torch.ones(decoder_input_ids.shape[1], decoder_input_ids.shape[1], dtype=torch.bool).triu(1)
        logits = self.out(self.both(self.table(input_ids), self.table(decoder_input_ids), tgt_mask=later))
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Tile(nn.Module):
    """Attention within a window of six positions, each pair with a bias of its own."""

    def __init__(self, dim: int = 12, window: int = 6) -> None:
        super().__init__()
        self.bias, self.qkv = nn.Parameter(torch.zeros(window, window)), nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT * q.shape[-1] ** -0.5 + self.bias).softmax(-1) @ v


class Turned(nn.Module):
    """A decoder of which half of each head is rotated, as it says itself; the half must be a number of pairs."""

    def __init__(self, vocab_size: int = 19, d_model: int = 16, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.rotary_ndims = num_heads, d_model // num_heads // 2
        self.table, self.out = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)
        self.qkv, self.o, self.norm = (
            nn.Linear(d_model, 3 * d_model),
            nn.Linear(d_model, d_model),
            nn.LayerNorm(d_model),
        )

    def rope(self, x: Tensor) -> Tensor:
        n = self.rotary_ndims
        at = torch.arange(x.shape[-2], device=x.device)[:, None] * 10000 ** (
            -torch.arange(0, n, 2, device=x.device) / n
        )
        cos, sin = at.cos().to(x.dtype), at.sin().to(x.dtype)
        a, b = x[..., :n].unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2), x[..., n:]], -1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        return self.out(x + self.o(y.transpose(1, 2).flatten(2)))


class Masked(nn.Module):
    """An encoder whose output projection is a parameter of its own, begun with the numbers of the table."""

    def __init__(self, vocab_size: int = 19, d_model: int = 16, nhead: int = 2) -> None:
        super().__init__()
        self.table, self.stack = nn.Embedding(vocab_size, d_model), blocks(d_model, nhead)
        self.project = self.projection()

    def projection(self) -> nn.Parameter:
        return nn.Parameter(self.table.weight.detach().clone())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.stack(self.table(input_ids)) @ self.project.T


class Shared(Masked):
    def projection(self) -> nn.Parameter:
        return self.table.weight


@pytest.mark.parametrize(("thing", "outcome"), [(Listener, PASS), (ListensOn, FAIL)])
def test_frames_that_become_fewer_are_judged_by_what_they_sum_up_to(thing: Any, outcome: str) -> None:
    subject = as_subject(thing)
    assert subject.kind == "classifier"
    assert any("one for about 3" in note for note in subject.notes)
    assert judged(thing, "padding.amount-irrelevant").outcome == outcome


def test_a_text_behind_an_image_is_judged_with_one_image() -> None:
    assert any("always the same" in note for note in as_subject(Describer).notes)
    for thing in (Describer, BeginsBehindTheImage):
        assert judged(thing, "causality.no-future-influence").outcome == PASS
        assert judged(thing, "causality.first-token").outcome == PASS


@pytest.mark.parametrize(("thing", "outcome"), [(Describer, PASS), (SeesWhatItForetells, OPEN)])
def test_a_loss_of_tokens_alone_does_not_see_what_it_foretells(thing: Any, outcome: str) -> None:
    result = judged(thing, "loss.of-model")
    assert result.outcome == outcome, result.reason


def test_a_target_with_a_default_is_given() -> None:
    assert as_subject(Summariser).kind == "encoder_decoder"
    assert judged(Summariser, "loss.of-model").outcome == PASS


def test_a_window_of_one_length_is_judged_with_shorter_ones_at_its_end() -> None:
    subject = as_subject(Tile)
    assert subject.declares["max_len"] == 6
    assert any("takes 6 positions alone" in note for note in subject.notes)
    assert judged(Tile, "batch.independence").outcome == PASS


def test_heads_that_a_class_does_not_take_are_not_drawn() -> None:
    subject = as_subject(Turned)
    assert subject.domain["num_heads"] == (1, 2, 4)
    assert judged(Turned, "numerics.finite").outcome == PASS
    assert judged(Turned, "anatomy.positions").outcome == PASS


@pytest.mark.parametrize(("thing", "outcome"), [(Masked, OPEN), (Shared, PASS)])
def test_a_copy_of_the_table_is_asked_about_in_an_encoder(thing: Any, outcome: str) -> None:
    result = judged(thing, "parameters.tied")
    assert result.outcome == outcome, result.reason


class MaskedTokens(nn.Module):
    """Sees the whole text and gives logits; only its code says that hidden tokens are what it foretells."""

    def __init__(self, vocab_size: int = 20, d_model: int = 16, nhead: int = 2) -> None:
        super().__init__()
        self.tokens, self.stack = nn.Embedding(vocab_size, d_model), blocks(d_model, nhead)
        self.mask_token, self.head = 3, nn.Linear(d_model, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).masked_fill((ids == self.mask_token)[..., None], 0.0)
        made: Tensor = self.head(self.stack(x))
        return made


class NextTokens(MaskedTokens):
    """The same, of a model whose causal mask was lost: a defect, whatever else it speaks of."""

    def forward(self, ids: Tensor) -> Tensor:  # causal
        return super().forward(ids)


def test_a_model_of_masked_tokens_is_an_encoder_by_its_code() -> None:
    assert as_subject(MaskedTokens).kind == "encoder"
    assert as_subject(NextTokens).kind == "decoder"
    assert judged(NextTokens, "causality.no-future-influence").outcome == FAIL
