"""Generation behind a source, row by row as if each were alone; part of `decoding.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case

_TRIED = 4
"""Pairs of sources that are tried: tokens may be the same by chance."""
_TURNS = 3.0
"""Radians by which a sine goes on where a logit changes by one standard deviation."""
_SHARPENED = 512
"""By so much a sine may multiply rounding: turns, over the least spread, and as much again."""
_ROWS = 8
"""Sources of a batch: of as many some end before others."""


def judge_translation(case: Case, manners: Sequence[str]) -> None:
    """Hold what an encoder-decoder generates for a source to its own forward, and to what the source gets alone.

    A row ends where it ends alone; behind that stands one token, the padding, whatever other rows still get. Up to
    there each token is the best one behind those before. Where that is no more so, and one token follows to the end,
    the row has ended, if other rows that do end behind the same token.
    """
    built = case.copy_of(case.built(dtype=judged_dtypes(case.bench)[-1]))
    if isinstance(built.module, nn.Module):
        favoured = [1, 2, 3, case.integer("favoured", 0, built.config.vocab_size - 1)]
        some = case.tokens(2 * _ROWS, 6)
        begun = torch.full_like(some[:, :1], _first_token(case, built, some))
        case.apply(favour, built.module, built.config.vocab_size, favoured, case.caller(built, some, begun))
    source, steps = case.tokens(_ROWS, case.integer("S", 3, 6)), case.integer("steps", 4, 9)
    for manner in manners[:2]:
        is_cached = manner != manners[0]
        got = _generated(case, built, source, steps, is_cached)
        alone = [_generated(case, built, source[b : b + 1], steps, is_cached)[0] for b in range(_ROWS)]
        for row, own in zip(got, alone, strict=True):
            _judge_end(case, row, own, manner, partial(_kept_of_others, case, built, source, steps, is_cached))
        _judge_choices(case, built, source, alone, manner)
    case.witness()


def maps_to_words(module: nn.Module, size: int) -> list[nn.Linear]:
    """Return the linear maps to a vocabulary, or to one token more."""
    return [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features in (size, size + 1)]


def _first_token(case: Case, built: Built, source: Tensor) -> int:
    """Return the token that a translation begins with, as our own tokens are counted."""
    with off_the_record(case):
        got = _generated(case, built, source[:1], 2, False)
    return min(int(got[0, 0]), built.config.vocab_size - 1)


def favour(module: nn.Module, size: int, tokens: list[int], run: Callable[[], Tensor]) -> None:
    """Have a model give some tokens alone, a row's end among them: it is one of the first ids, and seldom the best one.

    Which of them is the best is made to go with all that stands before, by a sine of its logit, as fast as sources part
    the logits of the first word: else a text may be one word over and over, whatever the source.

    Args:
        module: whose last map to the vocabulary is hooked.
        size: of the vocabulary.
        tokens: ids.
        run: calls it on some sources, with the first token alone.
    """
    maps, seen = maps_to_words(module, size), list[Tensor]()

    def lowered(part: nn.Module, given: tuple[Tensor], logits: Tensor) -> Tensor:
        kept = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        kept[torch.tensor(tokens)] = True
        spread = seen[0].std(0).clamp(min=1e-2 * size_of(seen[0]))
        even = (_TURNS * (logits - seen[0].mean(0)) / spread).sin()
        return torch.where(kept, even, even - 1e3)

    for last in maps[-1:]:
        noting = last.register_forward_hook(lambda _, given, logits: seen.append(logits.detach().flatten(0, -2)))
        with torch.no_grad():
            run()
        noting.remove()
        if seen:
            last.register_forward_hook(lowered)


def _generated(case: Case, built: Built, source: Tensor, steps: int, use_cache: bool) -> Tensor:
    got = case.ask("generate", source, steps, use_cache, built=built)
    if not isinstance(got, Tensor) or got.ndim != 2 or len(got) != len(source) or got.shape[1] < 2:
        raise SubjectError("generate did not return tokens [B, T], with at least one behind the first")
    return got


def _kept_of_others(case: Case, built: Built, source: Tensor, steps: int, is_cached: bool) -> str:
    """Say whether it is rows of the batch that reach one another, or what an earlier call made of its source."""
    left = "what an earlier call made of its source is used again for another one of the same shape"
    with off_the_record(case):
        for _ in range(_TRIED):
            new, used, other = (case.bench.pool.fresh(built.config, built.dtype) for _ in range(3))
            alone = _generated(case, new, source[1:2], steps, is_cached)
            together = _generated(case, other, source[:2], steps, is_cached)[1:2]  # on a model that nothing ran on
            end = min(together.shape[1], alone.shape[1])
            if not torch.equal(together[:, :end], alone[:, :end]):
                break
            _generated(case, used, source[:1], steps, is_cached)
            if not torch.equal(_generated(case, used, source[1:2], steps, is_cached), alone):
                return left
            source = case.tokens(2, source.shape[1])
    return "what other rows of a batch are given reaches this one"


def _judge_end(case: Case, row: Tensor, own: Tensor, manner: str, cause: Callable[[], str]) -> None:
    """Require that a row is in a batch what it is alone, and one token behind that."""
    length = min(len(own), len(row))
    case.require(
        (row[:length] == own[:length]).all(), f"{manner} a source gets other tokens in a batch than alone",
        got=f"tokens {row[:length].tolist()}", expected=f"tokens {own[:length].tolist()}",
        cause=cause,
    )  # fmt: skip
    case.equal(
        case.apply(lost_behind, row, own), [], f"{manner} a row ends earlier in a batch than alone",
        got=f"tokens {row.tolist()}", expected=f"tokens {own.tolist()}",
        cause=lambda: "the rows of a batch end together, as soon as one of them has ended: the others are cut off "
        "there (any() for all(), say)",
    )  # fmt: skip
    behind = row[length:]
    case.require(
        (behind == behind[:1]).all(), f"{manner} a row goes on behind its end while others are not done",
        got=f"tokens {behind.tolist()} behind {own.tolist()}", expected="one token, the padding",
        cause=lambda: f"a row that has ended, behind {len(own) - 1} tokens, goes on getting words: nothing keeps what "
        "it is given to padding",
    )  # fmt: skip


def lost_behind(row: Tensor, own: Tensor) -> list[int]:
    """Return the tokens of a row alone that are cut off in a batch, without a tail of one token."""
    lost: list[int] = own[len(row) :].tolist()
    return [] if all(token == int(row[-1]) for token in lost) else lost


def _judge_choices(case: Case, built: Built, source: Tensor, alone: list[Tensor], manner: str) -> None:
    """Require that each token is the best one behind those before it, up to the row's end."""
    ends: set[int] = set()
    sharpened = isinstance(built.module, nn.Module) and maps_to_words(built.module, built.config.vocab_size)
    for b, own in enumerate(alone):
        with torch.no_grad():
            moved = _moved(built, case.call(built, source[b : b + 1], torch.zeros_like(own)[None]))
            ids = (own - moved).clamp(min=0)
            logits = case.call(built, source[b : b + 1], ids[None])[0].detach().double()
        at = _first_other(logits, own, case.tolerance(built) * (_SHARPENED if sharpened else 2 * size_of(logits)))
        if at is None:
            continue
        stop, is_tail = int(own[at - 1]), bool((own[at:] == own[at]).all()) and at > 1
        ends.add(stop)
        if is_tail and len(ends) == 1:
            continue
        case.require(
            logits[at - 1].argmax() == own[at], f"{manner}, step {at} does not choose the best token behind the source",
            got=f"token {int(own[at])} of logit {float(logits[at - 1, own[at]]):.4g}",
            expected=f"token {int(logits[at - 1].argmax())} of logit {float(logits[at - 1].max()):.4g}",
            cause=lambda o=own, i=at, b=b: _other(case, built, source[b : b + 1], o, i),  # type: ignore[misc]
        )  # fmt: skip


def _moved(built: Built, logits: Tensor) -> int:
    """Return by how many its tokens are more than ours: one, where token 0 is padding and ours are counted from 1."""
    return int(logits.shape[-1] == built.config.vocab_size + 1)


def _first_other(logits: Tensor, own: Tensor, limit: float) -> int | None:
    """Return where a row first has another token than the best, before a tie; None where it has not."""
    for at in range(1, len(own)):
        best = logits[at - 1].topk(2).values
        if float(best[0] - best[1]) <= limit:
            return None
        if int(logits[at - 1].argmax()) != int(own[at]):
            return at
    return None


def _other(case: Case, built: Built, source: Tensor, own: Tensor, at: int) -> str | None:
    """Say behind which other tokens it would be the best one."""
    with torch.no_grad():
        moved = _moved(built, case.call(built, source, torch.zeros_like(own)[None]))
        ids = (own - moved).clamp(min=0)[None]
        others: tuple[tuple[str, Callable[[int], Tensor]], ...] = (
            ("the newest token is left out", lambda step: ids[:, : max(step - 1, 1)]),
            ("the newest token alone is given to the decoder", lambda step: ids[:, step - 1 : step]),
            ("the first token is left out", lambda step: ids[:, min(1, step - 1) : step]),
        )
        end = next((step for step in range(at + 1, len(own)) if bool((own[step:] == own[step]).all())), len(own))
        best = {
            told: [int(case.call(built, source, given(step))[0, -1].argmax()) for step in range(1, len(own))]
            for told, given in others
        }
        for last in (len(own), end):  # at every step, or up to the tail: at one alone it may be the best by chance
            for told, tokens in best.items():
                if tokens[: last - 1] == own[1:last].tolist():
                    return f"it is the best token where {told}"
        return _of_empty_places(case, built, source, ids, own)


def _of_empty_places(case: Case, built: Built, source: Tensor, ids: Tensor, own: Tensor) -> str | None:
    """Say that every token is the best one behind a buffer's last place, which is empty as long as there is room."""
    for whole, fill in product((len(own), len(own) - 1), range(built.config.vocab_size)):
        buffer = torch.full_like(ids[:, :1], fill).expand(-1, whole)
        steps = range(1, whole)
        best = [
            int(case.call(built, source, torch.cat([ids[:, :step], buffer[:, step:]], 1))[0, -1].argmax())
            for step in steps
        ]
        if len(best) > 2 and best == own[1:whole].tolist():
            return (
                "each is the best token behind the last place of a buffer of fixed length, which is still empty, not "
                "behind the last token that was written"
            )
    return None
