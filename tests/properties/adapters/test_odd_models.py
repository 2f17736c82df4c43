"""Right models of unusual making: scripted, at sizes of their own, with names and arguments that mean nothing here."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from veriformer.properties import check
from veriformer.properties.adapters.beside.generating import _ways
from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.pool import duplicate


class Decoder(nn.Module):
    """Every output is the running sum of what was embedded so far, mixed by one map."""

    def __init__(self, taille: int = 23, d_model: int = 8, rotary_dim: int = 4) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(taille, d_model), nn.Linear(d_model, taille)
        self.places = nn.Embedding(64, d_model)
        self.rotary_dim, self.width = rotary_dim, d_model

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(x.cumsum(1).tanh())
        return logits


class NeedsWidth(Decoder):
    """Its second size goes with its own width alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.width == 2 * self.rotary_dim
        return super().forward(tokens)


class Wide(NeedsWidth):
    def __init__(self, vocab_size: int = 23, d_model: int = 16, rotary_dim: int = 8) -> None:
        super().__init__(vocab_size, d_model, rotary_dim)


class Regressor(nn.Module):
    def __init__(self, d_model: int = 8) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(d_model, 2, 16, batch_first=True), nn.Linear(d_model, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.layer(x).mean(1)).squeeze(-1)
        return output


def test_a_vocabulary_that_no_known_argument_sets_stays_its_own() -> None:
    subject = as_subject(Decoder)
    assert subject.domain["vocab_size"] == (23,)
    assert check(subject, only=["causality.prefix-consistency"], profile="quick").ok


def test_a_class_that_drawn_sizes_break_is_judged_at_its_own() -> None:
    subject = as_subject(Wide)
    assert any("judged at its own" in note for note in subject.notes)
    assert subject.domain["d_model"] == (16,)
    assert check(subject, only=["causality.prefix-consistency"], profile="quick").ok


def test_one_number_a_sample_is_the_output_of_a_classifier() -> None:
    assert as_subject(Regressor).kind == "classifier"


def test_a_name_that_is_no_identifier_is_no_source() -> None:
    odd = type("B\x1b[31m\nad", (Decoder,), {})
    odd.__module__ = __name__
    assert as_subject(odd).kind == "decoder"


def test_a_copy_of_a_scripted_module_can_be_trained() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        copied = duplicate(torch.jit.script(nn.Linear(2, 2)))
    torch.optim.SGD(copied.parameters(), lr=0.1)


def test_a_module_with_a_length_of_nothing_is_still_a_module() -> None:
    class Empty(nn.LayerNorm):
        def __len__(self) -> int:
            return 0

    assert check(Empty(8), kind="norm", only=["norm.shift-invariance"], profile="quick").results[0].outcome != "ERROR"


def test_what_says_that_it_is_greedy_is_tried_before_a_temperature_of_nothing() -> None:
    def generate(self: object, idx: Tensor, n: int, temperature: float = 1.0, do_sample: bool = True) -> Tensor:
        raise NotImplementedError

    ways = _ways(generate, 1)
    assert not isinstance(ways, str)
    assert [set(way) - {"n"} for way in ways[1]] == [{"do_sample"}, set(), {"temperature"}]


class FirstToken(nn.Module):
    """A classifier of the first token, as BERT is, whose sizes no argument sets."""

    def __init__(self, num_labels: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(120, 24), nn.Embedding(64, 24)
        self.layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(24, num_labels)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layer(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        output: Tensor = self.out(hidden[:, 0])
        return output


def test_a_classifier_of_its_first_token_with_sizes_of_its_own_is_asked_nothing() -> None:
    subject = as_subject(FirstToken)
    assert (subject.domain["d_model"], subject.domain["vocab_size"]) == ((24,), (120,))
    report = check(subject, only=["twin.equal", "batch.independence", "parameters.all-used"], profile="quick")
    assert report.ok, [r.reason for r in report.results]


class Masked(nn.Module):
    """An encoder whose mask of ones and zeros adds too little to hide a token."""

    strength = -3.0

    def __init__(self, vocab_size: int = 31, d_model: int = 16) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, d_model)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        scores = x @ x.transpose(1, 2)
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, :].to(x.dtype)) * self.strength
        hidden: Tensor = x + self.out(scores.softmax(-1) @ x)
        return hidden


class WellMasked(Masked):
    strength = -1e5


def test_a_mask_that_hides_too_little_is_no_mask_of_infinities() -> None:
    outcomes = [
        check(thing, only=["padding.content-irrelevant"], profile="quick").results[0].outcome
        for thing in (Masked, WellMasked)
    ]
    assert outcomes == ["FAIL", "PASS"]


def test_a_model_that_keeps_its_weights_of_attention_is_copied() -> None:
    class Keeps(nn.Linear):
        kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept

    model = Keeps(2, 2)
    model(torch.ones(1, 2))
    copied = duplicate(model)
    assert torch.equal(copied(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert copied.weight is not model.weight
