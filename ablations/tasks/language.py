"""Tasks of a decoder: the prompt is given, the loss is on the answer alone.

Samples are whole sequences x_0..x_L; the model sees x_0..x_{L-1} and is judged where the next token is determined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from veriformer.ablations.tasks.task import IGNORED, SORTED_BLIND, Sampler, Samples, Task, register

SYMBOLS = 8
"""Tokens that carry content in copy, reverse and sort; one more separates prompt and answer."""


def _next_token(sequence: Tensor, answer_from: int) -> Samples:
    """Ask for every token from index `answer_from` on."""
    labels = sequence[:, 1:].clone()
    labels[:, : answer_from - 1] = IGNORED
    return Samples((sequence[:, :-1],), labels)


def _transduction(change: Callable[[Tensor], Tensor]) -> Sampler:
    def sample(generator: torch.Generator, number: int, length: int) -> Samples:
        prompt = torch.randint(SYMBOLS, (number, length), generator=generator)
        separator = torch.full((number, 1), SYMBOLS)
        return _next_token(torch.cat([prompt, separator, change(prompt)], dim=1), length + 1)

    return sample


def _ascending(prompt: Tensor) -> Tensor:
    return prompt.sort(dim=1).values


def _induction(generator: torch.Generator, number: int, length: int) -> Samples:
    """Draw a random word of period 3 to length / 2, repeated: from the second time on the next token is determined."""
    period = torch.randint(3, length // 2 + 1, (number, 1), generator=generator)
    # tokens of a word differ, so that one token back tells the next
    word = torch.rand(number, 16, generator=generator).argsort(dim=1)
    index = torch.arange(length + 1)[None].expand(number, -1)
    sequence = word.gather(1, index % period)
    labels = torch.where(index[:, 1:] >= period + 1, sequence[:, 1:], IGNORED)
    return Samples((sequence[:, :-1],), labels)


def _selective_copy(generator: torch.Generator, number: int, length: int) -> Samples:
    """Four symbols among blanks are repeated in order (Gu & Dao 2023, section 4.1)."""
    blank, separator, kept = SYMBOLS, SYMBOLS + 1, 4
    places = torch.rand(number, length, generator=generator).argsort(dim=1)[:, :kept].sort(dim=1).values
    symbols = torch.randint(SYMBOLS, (number, kept), generator=generator)
    prompt = torch.full((number, length), blank).scatter_(1, places, symbols)
    return _next_token(torch.cat([prompt, torch.full((number, 1), separator), symbols], dim=1), length + 1)


def _addition(generator: torch.Generator, number: int, length: int) -> Samples:
    """Two numbers of `length` decimal digits and their sum, least significant digit first."""
    digits = torch.randint(10, (number, 2, length), generator=generator)
    answer, carry = [], torch.zeros(number, dtype=torch.long)
    for place in range(length):
        total = digits[:, 0, place] + digits[:, 1, place] + carry
        answer.append(total % 10)
        carry = total // 10
    plus, equals = torch.full((number, 1), 10), torch.full((number, 1), 11)
    sequence = [digits[:, 0], plus, digits[:, 1], equals, torch.stack([*answer, carry], dim=1)]
    return _next_token(torch.cat(sequence, dim=1), 2 * length + 2)


def _hops(generator: torch.Generator, number: int, length: int) -> Samples:
    """Draw a random cycle f on `length` names, listed as pairs; then x, and f(f(x)) is asked.

    Of a cycle of n >= 3, f(f(x)) is neither x nor f(x) and any of the others alike: 1 / (n - 2) without the second hop.
    """
    cycle = torch.rand(number, length, generator=generator).argsort(dim=1)
    image = torch.empty_like(cycle).scatter_(1, cycle, cycle.roll(1, dims=1))
    order = torch.rand(number, length, generator=generator).argsort(dim=1)
    pairs = torch.stack([order, image.gather(1, order) + length], dim=2).flatten(1)
    start = torch.randint(length, (number, 1), generator=generator)
    end = image.gather(1, image.gather(1, start)) + length
    query = torch.full((number, 1), 2 * length)
    return _next_token(torch.cat([pairs, query, start, end], dim=1), 2 * length + 2)


MEMORY = 256
"""Pairs to be memorised; the table is a function of nothing, so that all seeds learn the same."""


def _memorise(generator: torch.Generator, number: int, length: int) -> Samples:
    """Ask a fixed random table from two tokens to one: nothing but storage helps."""
    table = torch.randint(16, (MEMORY,), generator=torch.Generator().manual_seed(0))
    key = torch.randint(MEMORY, (number,), generator=generator)
    labels = torch.stack([torch.full_like(key, IGNORED), table[key]], dim=1)
    return Samples((torch.stack([key // 16, key % 16], dim=1),), labels)


def source_transition(states: int = 16) -> Tensor:
    """Return the fixed transition matrix `[V, V]` (float64) of the synthetic source."""
    scores = torch.randn(states, states, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (1.5 * scores).softmax(dim=-1)


def source_entropy(states: int = 16) -> float:
    """Return the entropy rate of the source, nats a token: the loss that no model can pass."""
    matrix = source_transition(states)
    stationary = torch.linalg.matrix_power(matrix, 512)[0]
    return float(-(stationary[:, None] * matrix * matrix.log()).sum())


def source_sequence(generator: torch.Generator, number: int, length: int) -> Tensor:
    """Draw `[B, T]` from a Markov chain of known entropy; two take turns: the last but one token tells the next.

    Both chains begin evenly; `length` must be 2 or more.
    """
    cumulative = source_transition().cumsum(dim=1)
    tokens = torch.randint(16, (number, 2), generator=generator)
    draws = torch.rand(number, length - 1, generator=generator, dtype=torch.float64)
    columns = [tokens[:, 0], tokens[:, 1]]
    for step in range(length - 2):
        row = cumulative[columns[-2]]
        columns.append((row < draws[:, step : step + 1]).sum(dim=1).clamp(max=15))
    return torch.stack(columns, dim=1)


def _source(generator: torch.Generator, number: int, length: int) -> Samples:
    return _next_token(source_sequence(generator, number, length + 1), 2)


def source_best(states: int = 16) -> tuple[float, float]:
    """Return the accuracy of the best guess of the next token, and of the best that ignores what came before."""
    matrix = source_transition(states)
    stationary = torch.linalg.matrix_power(matrix, 512)[0]
    return float((stationary * matrix.max(dim=1).values).sum()), float(stationary.max())


def _chance_of_induction(length: int) -> float:
    """Return the accuracy of guessing any token of the word that is being repeated."""
    periods = range(3, length // 2 + 1)
    return sum((length - p) / p for p in periods) / sum(length - p for p in periods)


@dataclass(frozen=True)
class _Sizes:
    vocab_size: int
    length: int
    chance: float


def _language(
    name: str,
    statement: str,
    sample: Sampler,
    sizes: _Sizes,
    *,
    needs: tuple[str, ...] = ("positions",),
    best: float = 1.0,
    loss_floor: float = 0.0,
) -> Task:
    return Task(
        name=name,
        statement=statement,
        architecture="decoder",
        vocab_size=sizes.vocab_size,
        length=sizes.length,
        chance=sizes.chance,
        sample=sample,
        needs=needs,
        best=best,
        loss_floor=loss_floor,
    )


_REPEATED = _Sizes(vocab_size=SYMBOLS + 1, length=6, chance=1 / SYMBOLS)
_SORTED = _Sizes(vocab_size=SYMBOLS + 1, length=6, chance=SORTED_BLIND)
_INDUCTION = _Sizes(vocab_size=16, length=16, chance=_chance_of_induction(16))
_BEST, _MODE = source_best()
register(
    _language("copy", "repeat the prompt", _transduction(lambda x: x), _REPEATED),
    _language("reverse", "repeat the prompt backwards", _transduction(lambda x: x.flip(1)), _REPEATED),
    _language("sort", "repeat the prompt in ascending order", _transduction(_ascending), _SORTED, needs=()),
    _language(
        "induction", "continue a repeated random word", _induction, _INDUCTION, needs=("positions", "two layers")
    ),
    _language(
        "selective-copy", "repeat the four symbols that stand among blanks", _selective_copy, _Sizes(10, 12, 1 / 8)
    ),
    _language("addition", "add two numbers, least significant digit first", _addition, _Sizes(12, 2, 1 / 10)),
    _language(
        "hops",
        "apply a function that the prompt lists, twice",
        _hops,
        _Sizes(11, 5, 1 / 3),
        needs=("positions", "depth"),
    ),
    _language(
        "memorise", "know a fixed random table of 256 pairs", _memorise, _Sizes(16, 2, 1 / 16), needs=("parameters",)
    ),
    _language(
        "source",
        "predict a Markov source of known entropy",
        _source,
        _Sizes(16, 32, _MODE),
        best=_BEST,
        loss_floor=source_entropy(),
    ),
)
