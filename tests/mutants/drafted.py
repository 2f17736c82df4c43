"""Faults of tokens that are drafted, or drawn among the best, and of experts whose rows are sorted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.cache import KVCache
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import sized

_DRAFT, _EXPERTS, _CHOSEN = 3, 4, 2
Cut = Callable[[KVCache, int], None]


def cut(cache: KVCache, length: int) -> None:
    """Forget all that a cache holds behind so many tokens."""
    for layer in cache.layers:
        layer.key, layer.value = layer.key[:, :, :length], layer.value[:, :, :length]  # type: ignore[index]
        layer.positions = layer.positions[:, :length]  # type: ignore[index]
    cache.mask = None if cache.mask is None else cache.mask[:, :length]


def _drafted(tokens: list[int], vocabulary: int) -> list[int]:
    """Guess what follows: what followed the last token before, or else the tokens behind it."""
    at = len(tokens) - 2 - tokens[-2::-1].index(tokens[-1]) if tokens[-1] in tokens[:-1] else -1
    known = tokens[at + 1 : at + 1 + _DRAFT] if at >= 0 else []
    return known + [(tokens[-1] + n) % vocabulary for n in range(_DRAFT - len(known))]


def _looked_up(tokens: list[int], vocabulary: int) -> list[int]:
    """Return what followed the last token where it stood before; nothing where it is new."""
    at = len(tokens) - 2 - tokens[-2::-1].index(tokens[-1]) if tokens[-1] in tokens[:-1] else len(tokens)
    return tokens[at + 1 : at + 1 + _DRAFT]


def _speculative(cut: Cut, *, at_once: bool, drafted: Callable[[list[int], int], list[int]] = _drafted) -> Subject:
    """A decoder that feeds drafts behind what is certain; `at_once`: behind the prompt in its own call too."""

    def one(model: Any, prompt: list[int], steps: int) -> list[int]:
        tokens, cache = list(prompt), model.new_cache()
        fed = tokens if at_once or len(tokens) == 1 else tokens[-1:]
        if len(fed) < len(tokens):
            model(torch.tensor([tokens[:-1]]), cache=cache)
        while len(tokens) < len(prompt) + steps:
            draft = drafted(tokens, model.vocab_size)
            best = model(torch.tensor([fed + draft]), cache=cache)[0, len(fed) - 1 :].argmax(-1).tolist()
            accepted = next((n for n, (a, b) in enumerate(zip(draft, best, strict=False)) if a != b), len(draft))
            cut(cache, len(tokens) + accepted)
            tokens += best[: accepted + 1]
            fed = tokens[-1:]
        return tokens[: len(prompt) + steps]

    @torch.no_grad()
    def generate(model: Any, tokens: Tensor, steps: int, use_cache: bool) -> Tensor:
        if use_cache:
            return torch.tensor([one(model, row, steps) for row in tokens.tolist()])
        for _ in range(steps):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    def made(c: DrawnConfig) -> nn.Module:
        model = build(sized(c, architecture="decoder", positions="rotary"))
        model.vocab_size = c.vocab_size  # type: ignore[assignment]
        return model

    return Subject(
        kind="decoder", build=made, forward=lambda m, tokens: m(tokens), generate=generate,
        declares={"positions": "rotary"},
    )  # fmt: skip


def _late(cache: KVCache, length: int) -> None:
    cut(cache, length + 1)


@fault(
    "KV-draft-kept",
    "A cache is cut one token late behind a draft: what was turned down first stays in it",
    killed_by=("decoding.generate",),
    cause="it is cut 1 too late",
)
def draft_kept() -> Subject:
    return _speculative(put(_late, instead_of=cut), at_once=False)


@fault(
    "KV-draft-behind-prompt",
    "A draft stands behind the prompt in its call, and the cache is cut one token late there and afterwards",
    killed_by=("decoding.generate",),
    cause="it is cut 1 too late",
)
def draft_behind_the_prompt_kept() -> Subject:
    return _speculative(put(_late, instead_of=cut), at_once=True)


@fault(
    "KV-draft-looked-up",
    "Drafts are looked up in the text, and the cache is cut one token late where one of them is refused",
    killed_by=("decoding.generate",),
    cause="it is cut 1 too late",
)
def looked_up_draft_kept() -> Subject:
    return _speculative(put(_late, instead_of=cut), at_once=False, drafted=_looked_up)


class _Averages(nn.Module):
    """A decoder whose token sees the mean of those before it."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        many = torch.arange(1, tokens.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return self.head(x + x.cumsum(1) / many)


@fault(
    "SP-places-for-tokens",
    "What is drawn among the sorted logits is its place among the best, and is given for the token",
    killed_by=("decoding.sampling",),
    cause="is given for its number",
)
def places_are_no_tokens() -> Subject:
    token_of: Callable[[Tensor, Tensor], Tensor] = put(
        lambda order, place: place, instead_of=lambda order, place: order.gather(-1, place)
    )

    @torch.no_grad()
    def sample(m: _Averages, tokens: Tensor, steps: int, temperature: float = 1.0, top_k: int | None = None) -> Any:
        said = []
        for _ in range(steps):
            values, order = (m(tokens)[:, -1] / temperature).sort(descending=True)
            if top_k is not None:
                values[:, top_k:] = -torch.inf
            said.append(torch.zeros_like(values).scatter(-1, order, values.softmax(-1)))
            place = torch.multinomial(values.softmax(-1), 1)
            tokens = torch.cat([tokens, token_of(order, place)], 1)
        return tokens, torch.stack(said, 1)

    return Subject(kind="decoder", build=_Averages, forward=lambda m, tokens: m(tokens), sampling=sample,
                   declares={"structure": "other", "positions": "none"})  # fmt: skip


class _Stacked(nn.Module):
    """Two of four experts a token, whose weights are stacked: rows are sorted by their expert, and put back."""

    def __init__(self, c: DrawnConfig, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.back = nn.Linear(c.d_model, _EXPERTS, bias=False), back
        self.up = nn.Parameter(torch.randn(_EXPERTS, c.d_model, c.d_ff) / c.d_model**0.5)
        self.down = nn.Parameter(torch.randn(_EXPERTS, c.d_ff, c.d_model) / c.d_ff**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = self.weights(rows).topk(_CHOSEN, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=_EXPERTS).tolist()
        parts = rows[order // _CHOSEN].split(counts)
        made = [(part @ self.up[n]).relu() @ self.down[n] for n, part in enumerate(parts)]
        mixed = torch.cat(made)[self.back(order)].unflatten(0, (-1, _CHOSEN))
        return (mixed * shares[..., None]).sum(1).reshape(x.shape)

    def weights(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(_CHOSEN, dim=-1)
        none = x.new_zeros(*x.shape[:-1], _EXPERTS)
        return none.scatter(-1, chosen, shares / shares.sum(-1, keepdim=True))


@fault(
    "experts-order-for-inverse",
    "Rows that are sorted by their expert are taken back by that order, not by its inverse",
    killed_by=("router.weights",),
    cause="by the order that they were sorted in, in place of its inverse|by that order itself, not by its inverse",
)
def taken_back_by_the_order() -> Subject:
    back: Callable[[Tensor], Tensor] = put(lambda order: order, instead_of=lambda order: order.argsort())
    return Subject(
        kind="feed_forward", build=lambda c: _Stacked(c, back), forward=lambda m, x: m(x),
        router=lambda m, x: m.weights(x), declares={"structure": "other"},
    )  # fmt: skip
