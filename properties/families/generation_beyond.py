"""Generation past the longest sequence that the model takes; part of `decoding.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case
from veriformer.properties.families.generation_logits import generated

BEYOND = 3
"""Tokens that are generated past the end."""


def judge_beyond(case: Case, built: Built) -> None:
    """Generate past the longest sequence that the model takes: each token is chosen behind some of the last ones.

    With the cache too where positions are absolute: what is cached then holds the positions of before, so that a full
    cache must begin anew. Where they are relative, caches that roll are an approximation that people mean.
    """
    longest = longest_of(case, built)
    if longest is None:
        return
    is_plain = False
    for use_cache in (False, True):
        tokens = case.tokens(2, longest - 1)
        try:
            got, rows = generated(case, built, tokens, 1 + BEYOND, use_cache=use_cache)
        except SubjectError:
            continue  # it says that it ends there
        if not use_cache:
            _judge_last(case, built, got, longest)
            is_plain = rows is not None and bool(_fitting(case, built, got, rows, longest))
        elif rows is not None and is_plain:
            _judge_with_cache(case, built, got, rows, longest)


def _judge_with_cache(case: Case, built: Built, got: Tensor, rows: Tensor, longest: int) -> None:
    told = f"past {longest} tokens, the longest it takes, generation with the cache chooses from other logits"
    is_cut = _cut_at_its_end(case, built, got, rows, longest)
    cut = "it is what the model says behind the first tokens: the context is cut at its end"
    case.require(~is_cut, f"{told} than those behind the last", cause=lambda: cut)
    if case.subject.fact("positions") in ("learned", "sinusoidal"):
        case.require(
            _fitting(case, built, got, rows, longest),
            f"{told} than those behind the last",
            cause=lambda: (
                "once the cache is full, what it keeps holds the positions of before, which are absolute, and is not "
                "computed anew from the last tokens; without the cache generation goes on rightly"
            ),
        )


def _fitting(case: Case, built: Built, got: Tensor, rows: Tensor, longest: int) -> Tensor:
    contexts = kept(longest)
    wanted = [case.apply(behind, case.caller(built), got, rows.shape[1], count) for count in contexts]
    errors = [case.apply(errors_of_steps, rows, logits) for logits in wanted]
    return (torch.stack(errors).amin(0)[1:] <= case.tolerance()).all()


def _cut_at_its_end(case: Case, built: Built, got: Tensor, rows: Tensor, longest: int) -> Tensor:
    """Whether the last step's logits are those behind the first tokens, and not those behind the last ones."""
    with torch.no_grad():
        first, last = (
            case.call(built, x)[:, -1:].detach().double() for x in (got[:, :longest], got[:, -longest - 1 : -1])
        )
    limit, given = case.tolerance(), rows[:, -1:]
    is_first, is_last = (case.apply(errors_of_steps, given, wanted).amax() <= limit for wanted in (first, last))
    return is_first & ~is_last


def behind(run: Callable[..., Tensor], tokens: Tensor, steps: int, count: int) -> Tensor:
    """Return the logits `[B, steps, V]` behind at most `count` tokens before each of the last `steps`, float64."""
    ends = range(tokens.shape[1] - steps, tokens.shape[1])
    with torch.no_grad():
        outputs = [run(tokens[:, max(end - count, 0) : end]) for end in ends]
    return torch.stack([output[:, -1].detach().double() for output in outputs], dim=1)


def errors_of_steps(got: Tensor, expected: Tensor) -> Tensor:
    """Return the largest error `[steps]` of logits `[B, steps, V]`, in units of the largest one expected."""
    return (got - expected).abs().amax((0, 2)) / expected.abs().amax((0, 2)).clamp(min=1e-30)


def _judge_last(case: Case, built: Built, got: Tensor, longest: int) -> None:
    """Hold the tokens past the longest sequence to the best ones behind the last."""
    for step in range(longest + 1, longest + BEYOND):
        choices = [_chosen(case, built, got[:, max(step - n, 0) : step]) for n in kept(longest)]
        fits = torch.stack([(best == got[:, step]) | ~clear for best, clear in choices])
        case.require(
            fits.all(-1).any(),
            f"past {longest} tokens, the longest it takes, generation does not choose the best token behind the last",
            got=f"tokens {got[:, step].tolist()}",
            expected=f"tokens {choices[0][0].tolist()}, behind the last {longest}",
            cause=lambda at=step: _stale(case, built, got, at, longest),  # type: ignore[misc]
        )


def longest_of(case: Case, built: Built) -> int | None:
    """Return the longest sequence that a model takes, where it has an end that is near."""
    longest: int = case.subject.fact("max_len", built.config.max_len)
    if not 8 <= longest <= 256:
        return None
    try:
        with off_the_record(case), torch.no_grad():
            case.call(built, case.tokens(2, longest))
    except SubjectError:
        return None
    try:
        with off_the_record(case), torch.no_grad():
            case.call(built, case.tokens(2, longest + 1))
    except SubjectError:
        return longest
    return None


def kept(longest: int) -> Sequence[int]:
    """Return how many of the last tokens may be kept: all that fit, some fewer, or half as rolling caches have it."""
    return (longest, longest - 1, longest - 2, longest // 2, longest // 2 + 1)


def _chosen(case: Case, built: Built, context: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best token behind each context, and whether it is clear."""
    with torch.no_grad():
        row = case.call(built, context)[:, -1].detach().double()
    best = row.topk(2).values
    return row.argmax(-1), best[:, 0] - best[:, 1] > 2 * case.tolerance() * size_of(row)


def _stale(case: Case, built: Built, got: Tensor, step: int, longest: int) -> str | None:
    with off_the_record(case):
        best, clear = _chosen(case, built, got[:, :longest])
    if bool(((best == got[:, step]) | ~clear).all()):
        return f"it is the best token behind the first {longest} tokens: the context is cut at its end"
    return None
