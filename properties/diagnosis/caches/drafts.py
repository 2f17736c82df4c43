"""Drafted tokens that a model turns down: how many tokens its cache goes on with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.diagnosis.attentions import AttentionWatch
from veriformer.properties.diagnosis.caches.runs import CachedRuns

_STEPS = 12
_PROMPTS = 6
_LENGTH = 4  # of a prompt
ECHO = (0, 1, 2, 0, 1, 3, 0, 1)
"""Words of a text, by number: the last one, and the last two, stood before, twice, with another word behind them."""


@dataclass(frozen=True)
class _Call:
    """One call of the whole model while it generates.

    Attributes:
        tokens: that it is fed, `[T]`.
        best: the best next token behind each, `[T]`.
        cached: how many keys are there that no token of the call has made.
        attentions: how many it goes through; a draft may take the first layers alone.
    """

    tokens: list[int]
    best: list[int]
    cached: int
    attentions: int

    def accepted(self, begin: int) -> int:
        """Return how many of the tokens from one on are the best ones."""
        agree = [a == b for a, b in zip(self.tokens[begin:], self.best[begin - 1 :], strict=False)]
        return agree.index(False) if False in agree else len(agree)


def drafts_cause(runs: CachedRuns) -> str | None:
    """Say with how many tokens a cache goes on behind a draft that was turned down in part, where others are right.

    Args:
        runs: a subject that generates with a cache.
    """
    off: set[int] = set()
    told = None
    for number in range(_PROMPTS):
        text = None  # tokens of the text that the cache must hold when the next call begins
        prompt = runs.tokens(1, _LENGTH)
        if number % 2:  # drafts may be looked up in the text
            prompt = prompt[:, list(ECHO)]
        length = prompt.shape[1]
        calls = _calls(runs, prompt)
        cached = [
            c for c in calls[1:] if c.cached and c.attentions == calls[0].attentions
        ]  # drafts may be made without a cache
        for before, after in pairwise([*calls[:1], *cached]):
            is_prompt = before.cached < length - 1
            # a draft may stand behind the prompt in its call, where later calls have drafts; else it is filled up
            most = length - before.cached if any(len(c.tokens) > 1 for c in cached) else len(before.tokens)
            begin = min(len(before.tokens), most) if is_prompt else 1
            accepted = before.accepted(begin)
            text = (before.cached if is_prompt else text or before.cached) + begin + accepted
            if after.cached == text:
                continue
            if len(before.tokens) <= begin:
                return None  # it is not behind drafts that tokens are counted otherwise
            off.add(after.cached - text)
            told = told or (
                f"behind {text - accepted - (not is_prompt)} tokens and a draft of {len(before.tokens) - begin}, of "
                f"which {accepted} are accepted, the cache goes on with {after.cached} tokens where {text} belong to "
                "the text"
            )
            break
    if told is None or len(off) != 1:
        return None
    many = off.pop()
    what = "keys and values of what was turned down stay" if many > 0 else "keys and values of the text are lost"
    return f"{told}: it is cut {abs(many)} too {'late' if many > 0 else 'early'}, so that {what}"


def _calls(runs: CachedRuns, prompt: Tensor) -> list[_Call]:
    """Return the calls of the whole model of one generation, in order."""
    built = runs.clean()
    module = built.module
    if not isinstance(module, nn.Module):
        return []
    calls: list[_Call] = []
    with AttentionWatch() as watch:
        starts: list[int] = []

        def before(_: nn.Module, args: Any) -> None:
            starts.append(len(watch.seen))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            logits = next((x for x in (output if isinstance(output, tuple) else (output,)) if _is_rows(x)), None)
            tokens = next((x for x in args if isinstance(x, Tensor) and not x.is_floating_point()), None)
            seen = watch.seen[starts[-1] :]
            if logits is None or tokens is None or not seen or tokens.shape != logits.shape[:2]:
                return
            shape = seen[0].weights.shape
            if shape[-2] == tokens.shape[1]:
                best = logits[0].argmax(-1).tolist()
                calls.append(_Call(tokens[0].tolist(), best, shape[-1] - shape[-2], len(seen)))

        hooks = (module.register_forward_pre_hook(before), module.register_forward_hook(after))
        with hooked(hooks), torch.no_grad():
            runs.case.ask("generate", prompt, _STEPS, True, built=built)
    return calls


def _is_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3
