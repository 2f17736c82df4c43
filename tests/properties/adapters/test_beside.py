"""What somebody's model has beside its forward: a loss, a generate, a cache, padding by its id; right and broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import check
from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.adapters.unknown.written import source_of
from veriformer.properties.results.records import FAIL, OPEN, PASS, Result
from veriformer.tests.mutants import all_faults


class GPT(nn.Module):
    """One attention with rows of keys kept, a loss where there are labels, and what draws the next token."""

    def __init__(self, vocab_size: int, dim: int, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.tokens, self.places = nn.Embedding(vocab_size, dim), nn.Embedding(block_size, dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, idx: Tensor, targets: Tensor | None = None, start_pos: int = 0) -> tuple[Tensor, Any]:
        end = start_pos + idx.shape[1]
        assert end <= self.block_size
        x = self.tokens(idx) + self.places(self.at(start_pos, end).to(idx.device))
        k, v = self.k(x), self.v(x)
        if start_pos:
            k, v = torch.cat([self.kept[0], k], 1), torch.cat([self.kept[1], v], 1)
        self.kept = (k.detach(), v.detach())
        scores = self.q(x) @ k.mT / x.shape[-1] ** 0.5
        hidden = torch.ones(idx.shape[1], end, dtype=torch.bool, device=idx.device).triu(1 + start_pos)
        logits = self.head(x + scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)
        return logits, None if targets is None else self.loss(logits, targets)

    def at(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def context(self, idx: Tensor) -> Tensor:
        return idx[:, -self.block_size :]

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self.scaled(self(self.context(idx))[0][:, -1], temperature)
            idx = torch.cat([idx, logits.softmax(-1).multinomial(1)], 1)
        return idx

    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        return logits / temperature


class Backwards(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 1:].flatten(0, 1), targets[:, :-1].flatten())


class MovedInside(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


class OtherOrder(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), targets.flatten())


class OverAll(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
        return each.mean()


class Smoothed(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


class Penalised(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, targets) + 0.01 * logits.square().mean()


class WithoutZero(GPT):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


class FirstOnes(GPT):
    def context(self, idx: Tensor) -> Tensor:
        return idx[:, : self.block_size]


class Hotter(GPT):
    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        return logits * temperature


class FromZero(GPT):
    def at(self, start: int, end: int) -> Tensor:
        return torch.arange(end - start)


def judged(thing: Any, prop: str, **facts: Any) -> Result:
    report = check(as_subject(thing, **facts), only=[prop], profile="quick")
    return next(result for result in report.results if result.id == prop)


def test_a_loss_a_generation_and_a_cache_are_found() -> None:
    subject = as_subject(GPT)
    assert subject.kind == "decoder"
    assert all(part is not None for part in (subject.loss, subject.generate, subject.sampling, subject.cache))
    assert "targets=labels" in str(source_of(subject.loss))
    assert "start_pos=start" in str(source_of(subject.cache))
    assert "temperature=temperature" in str(source_of(subject.sampling))
    assert sum("loss is judged" in n or "is judged: " in n or "chunk by chunk" in n for n in subject.notes) == 3


@pytest.mark.parametrize(
    ("thing", "outcome", "declare"),
    [
        (GPT, PASS, ""),
        (MovedInside, OPEN, "shifts_labels=True"),
        (Smoothed, OPEN, "label_smoothing=0.1"),
        (Penalised, OPEN, "plain_loss=False"),
        (WithoutZero, OPEN, "ignore_index=0"),
        (Backwards, FAIL, ""),
        (OtherOrder, FAIL, ""),
        (OverAll, FAIL, ""),
    ],
)
def test_a_models_loss_is_held_to_its_logits(thing: Any, outcome: str, declare: str) -> None:
    result = judged(thing, "loss.of-model")
    assert (result.outcome, result.declare or "") == (outcome, declare), result.reason


def test_what_was_asked_can_be_declared() -> None:
    assert judged(Smoothed, "loss.of-model", label_smoothing=0.1).outcome == PASS
    assert judged(Penalised, "loss.of-model", plain_loss=False).outcome == PASS
    assert judged(MovedInside, "loss.of-model", shifts_labels=True).outcome == PASS
    assert judged(GPT, "loss.of-model", shifts_labels=True).outcome == FAIL


@pytest.mark.parametrize(("thing", "outcome"), [(GPT, PASS), (FirstOnes, FAIL), (Hotter, FAIL)])
def test_what_is_drawn_from_is_what_the_model_says(thing: Any, outcome: str) -> None:
    assert judged(thing, "decoding.sampling").outcome == outcome


def test_a_cut_at_the_wrong_end_is_named() -> None:
    found = judged(FirstOnes, "decoding.sampling").counterexample
    assert found is not None
    assert "cut at its end" in found.cause


@pytest.mark.parametrize(("thing", "outcome"), [(GPT, PASS), (FromZero, FAIL)])
def test_a_cache_that_is_found_is_judged(thing: Any, outcome: str) -> None:
    assert judged(thing, "decoding.cache").outcome == outcome


@pytest.mark.parametrize("name", ["LS01-model", "LS04-model", "sampling-temperature", "patches-mixed"])
def test_faults_beside_a_forward_are_noticed_and_their_right_twins_pass(name: str) -> None:
    fault = all_faults()[name]
    (prop,) = fault.killed_by
    found = []
    for subject in (fault.subject(), fault.right):
        assert subject is not None
        found += [r for r in check(subject, only=[prop], profile="quick").results if r.id == prop]
    wrong, right = found
    assert (wrong.outcome, right.outcome) == (FAIL, PASS)
    assert wrong.counterexample is not None
    assert fault.names(wrong.counterexample.cause)


class Pair(nn.Module):
    """Two sequences of tokens, in which 0 pads."""

    forgets = False

    def __init__(self, src_vocab_size: int, tgt_vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(src_vocab_size, d_model), nn.Embedding(tgt_vocab_size, d_model)
        self.head = nn.Linear(d_model, tgt_vocab_size)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        x, y = self.source(src), self.target(tgt)
        size = tgt.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=tgt.device).tril()
        y = y + self.attend(y, y, (tgt != 0)[:, None] & causal)
        shown = torch.ones_like(src[:, None], dtype=torch.bool) if self.forgets else (src != 0)[:, None]
        return self.head(y + self.attend(y, x, shown))

    def attend(self, q: Tensor, k: Tensor, shown: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~shown, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ k


class Forgets(Pair):
    forgets = True


def test_padding_by_its_id_is_understood_of_two_sequences() -> None:
    assert judged(Pair, "causality.no-future-influence").outcome == PASS
    assert judged(Pair, "padding.amount-irrelevant").outcome == PASS
    assert judged(Forgets, "padding.amount-irrelevant").outcome == FAIL


class Cross(nn.Module):
    """Attention to a memory; heads lie beside samples, and so must what hides."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.folded(f(t)) for f, t in ((self.q, x), (self.k, context), (self.v, context)))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~self.repeated(mask)[:, None], torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ v).unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)

    def folded(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def repeated(self, mask: Tensor) -> Tensor:
        return mask.repeat_interleave(self.heads, 0)


class OfOthers(Cross):
    def repeated(self, mask: Tensor) -> Tensor:
        return mask.repeat(self.heads, 1)


def test_a_mask_of_a_memory_is_found_and_judged_with_several_samples() -> None:
    assert as_subject(Cross).mask_forms == ("padding",)
    assert judged(Cross, "padding.content-irrelevant").outcome == PASS
    assert judged(OfOthers, "padding.content-irrelevant").outcome == FAIL
