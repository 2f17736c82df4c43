"""Why cached generation chooses other tokens: what it was fed, what was left of a former call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.diagnosis.attentions import Attended, attentions, rows_of
from veriformer.properties.diagnosis.caches.cached import cache_cause
from veriformer.properties.diagnosis.caches.drafts import drafts_cause
from veriformer.properties.diagnosis.caches.kept import steps_of
from veriformer.properties.diagnosis.caches.runs import CachedRuns
from veriformer.properties.diagnosis.places.lookups import lookups
from veriformer.properties.engine.case import Case

_LEAST = 1e-9  # a weight below is that of a hidden key
_STEPS = 5
_SAMPLES = 4


def generate_cause(case: Case, built: Built, *, use_cache: bool) -> str | None:
    """Explain why generation does not choose the best tokens.

    Args:
        case: of the failure.
        built: its model.
        use_cache: how it generates.
    """
    runs = CachedRuns(case, built)
    if use_cache and (drafted := drafts_cause(runs)):
        return drafted
    prompts = [runs.tokens(2, 3) for _ in range(_SAMPLES)]
    first = [_generated(runs, prompt, use_cache) for prompt in prompts]
    pairs = list(zip(prompts, first, strict=True))
    if all(_is_greedy(runs, prompt, got, _as_it_is) for prompt, got in pairs):
        return _left_behind(runs, prompts, use_cache) or _too_many(runs, use_cache)  # right at this length of a prompt
    for transform, told in _contexts():
        if all(_is_greedy(runs, prompt, got, transform) for prompt, got in pairs):
            return told + (_fed(runs, prompts[0]) if use_cache else "")
    if many := _too_many(runs, use_cache):
        return many
    if use_cache and (stands := _rows_read(runs, prompts[0]) or _attended_otherwise(runs, prompts[0])):
        return stands
    if use_cache and case.subject.cache is not None:
        x, sizes = first[0][:, :-1], [3, *[1] * (_STEPS - 1)]
        chosen = runs.cached(x, sizes)[:, 2:].argmax(-1)
        if torch.equal(chosen, first[0][:, 3:]):
            return cache_cause(case, built, x, sizes)
    return None


def _generated(runs: CachedRuns, prompt: Tensor, use_cache: bool, on: Built | None = None) -> Tensor:
    built = on or runs.clean()
    with torch.no_grad():
        got: Tensor = runs.case.ask("generate", prompt, _STEPS, use_cache, built=built)
    return got


Transform = Callable[[Tensor, int], Tensor]


def _as_it_is(context: Tensor, _: int) -> Tensor:
    return context


def _behind(past: Tensor) -> Transform:
    return lambda context, _: torch.cat([past, context], dim=1)


def _is_greedy(runs: CachedRuns, prompt: Tensor, got: Tensor, transform: Transform) -> bool:
    """Return whether each token is the best one behind a context that is made of what stands before it."""
    length = prompt.shape[1]
    for end in range(length, got.shape[1]):
        logits = runs.whole(transform(got[:, :end], length))[:, -1]
        best = logits.topk(2, dim=-1).values
        clear = (best[:, 0] - best[:, 1]) > runs.limit(logits)
        if bool((clear & (logits.argmax(-1) != got[:, end])).any()):
            return False
    return True


def _contexts() -> list[tuple[Transform, str]]:
    """Return what a context may be by mistake, the prompt's length given, and how to say so."""
    return [
        (
            lambda x, n: torch.cat([x[:, :n], x[:, n - 1 :]], dim=1),
            "each token is the best one behind a context in which the prompt's last token stands twice: it is fed once "
            "with the prompt and once more as the first step",
        ),
        (
            lambda x, n: torch.cat([x[:, : n - 1], x[:, n:]], dim=1),
            "each token is the best one behind a context without the prompt's last token",
        ),
        (lambda x, n: x[:, 1:], "each token is the best one behind a context without its first token"),
        (
            lambda x, n: x[:, -1:],
            "each token is the best one behind the last token alone: the past and its positions are not used",
        ),
        (lambda x, n: x[:, -2:], "each token is the best one behind the last 2 tokens alone: the past is not used"),
        (
            lambda x, n: x[:, n:] if x.shape[1] > n else x,
            "each token is the best one behind the generated tokens alone: the prompt is lost after the first step",
        ),
        (
            lambda x, n: x[:, :-1] if x.shape[1] > n else x,
            "each token is the best one behind a context that lacks the newest token: each step is fed one too late",
        ),
    ]


def _fed(runs: CachedRuns, prompt: Tensor) -> str:
    """Say how many tokens were fed, where the attentions show it."""
    model = runs.clean()
    depth = len(attentions(lambda: runs.case.call(model, prompt)))
    steps = steps_of(attentions(lambda: _generated(runs, prompt, True)), depth)
    if steps is None:
        return ""
    fed, needed = sum(step.size for step in steps), prompt.shape[1] + _STEPS - 1
    return f" ({fed} tokens are fed where {needed} are needed)" if fed != needed else ""


def _rows_read(runs: CachedRuns, prompt: Tensor) -> str | None:
    """Say at which rows of a table of positions the new tokens of a cached generation stand, where it looks them up.

    Without the cache every step looks up one row more, the last of them that of the newest token.
    """
    model, length = runs.clean(), prompt.shape[1]
    if not isinstance(model.module, nn.Module):
        return None
    whole = lookups(model.module, lambda: runs.case.call(model, prompt))
    tables = [look for look in whole if look.rows.numel() % length == 0 and _rises_by_one(look.rows)]
    if not tables:
        return None
    name, first = tables[0].name, int(tables[0].rows.flatten()[0])
    cached = runs.clean()
    read = [x.rows for x in lookups(cached.module, lambda: _generated(runs, prompt, True, cached)) if x.name == name]
    if len(read) != _STEPS or any(rows.shape[-1] != 1 for rows in read[1:]):
        return None
    new = [int(rows.flatten()[0]) - first for rows in read[1:]]
    right = list(range(length, length + len(new)))
    if new == right:
        return None
    off = {a - b for a, b in zip(new, right, strict=True)}
    told = f"behind a prompt of {length} tokens the next ones stand at positions {new} of {name} instead of {right}"
    if len(off) == 1:
        return f"{told}: {abs(off.pop())} too {'far' if new > right else 'small'}"
    return f"{told}: their position is not the number of tokens before them"


def _attended_otherwise(runs: CachedRuns, prompt: Tensor) -> str | None:
    """Say what the first attention of a cached step is given that the same tokens without a cache do not give it."""
    got = _generated(runs, prompt, True)[:, :-1]
    whole = attentions(lambda: runs.whole(got))
    steps = steps_of(attentions(lambda: _generated(runs, prompt, True)), len(whole))
    if not whole or steps is None or len(steps) != _STEPS:
        return None
    for number, step in enumerate(steps[1:], 2):
        one, all_of_it, end = step.layers[0], whole[0], step.start + step.size
        if one.query.shape[:-2] != all_of_it.query.shape[:-2]:
            return None
        wanted = list(range(step.start, end))
        rows = [rows_of(a, b) for a, b in _parts(one, all_of_it)]
        new = [own[-step.size :] for own in rows]
        turned = [name for name, own in zip(("queries", "keys"), new, strict=False) if own != wanted]
        if turned and new[2] == wanted:
            return (
                f"the token that step {number} is fed has the right value and other {' and '.join(turned)} than "
                "without the cache: it stands at another position than the number of tokens before it"
            )
        if turned or new[2] != wanted:
            return None
        past = [own[: -step.size] for own in rows[1:]]
        before = list(range(step.start - len(past[0]), step.start))
        if past[0] != before or past[1] != before:
            odd = " and ".join(name for name, own in zip(("keys", "values"), past, strict=True) if own != before)
            return f"the cached {odd} of step {number} are not those of the tokens before it"
    return None


def _parts(one: Attended, other: Attended) -> list[tuple[Tensor, Tensor]]:
    return [(one.query, other.query), (one.key, other.key), (one.value, other.value)]


def _rises_by_one(rows: Tensor) -> bool:
    last = rows.reshape(-1, rows.shape[-1])
    return rows.shape[-1] > 1 and bool((last.diff(dim=-1) == 1).all()) and bool((last == last[:1]).all())


def _too_many(runs: CachedRuns, use_cache: bool) -> str | None:
    """Tell whether a step attends to more keys than there are tokens: to what a prompt was filled up with, say."""
    fed: dict[int, int] = {}
    told = None
    for length in range(2, 10):
        prompt = runs.tokens(2, length)
        depth = len(attentions(partial(runs.whole, prompt)))
        steps = steps_of(attentions(partial(_generated, runs, prompt, use_cache)), depth)
        if steps is None or len(steps) != _STEPS:
            return None
        fed[length] = steps[0].size
        for number, step in enumerate(steps):
            weights, tokens = step.layers[0].weights, length + number
            row = tokens - 1 if step.size >= tokens else step.size - 1
            places = (weights[..., row, :] > _LEAST).flatten(0, -2).any(0).nonzero().flatten().tolist()
            if len(places) > tokens and told is None:
                filled = steps[0].size
                told = f"step {number + 1} attends to {len(places)} keys where there are {tokens} tokens"
                if filled > length and all(place in places for place in range(length, filled)):
                    where = f"place {length}" if filled == length + 1 else f"places {length} to {filled - 1}"
                    told = (
                        f"behind a prompt of {length} tokens, which is filled up to {filled}, {told}: the keys and "
                        f"values of the filling ({where}) are left in the cache and seen"
                    )
                else:
                    told = f"behind a prompt of {length} tokens {told}"
    if told is None:
        return None
    for size in range(2, 9):
        if all(many == -(-length // size) * size for length, many in fed.items()):
            return f"{told} (prompts are filled up to multiples of {size})"
    return told


def _left_behind(runs: CachedRuns, prompts: list[Tensor], use_cache: bool) -> str | None:
    """Tell whether a former call changes the next; each first call, on a new model, was right."""
    manner = "generation with the cache" if use_cache else "generation"
    for before, prompt in pairwise(prompts):
        model = runs.clean()
        _generated(runs, before, use_cache, model)
        second = _generated(runs, prompt, use_cache, model)
        if _is_greedy(runs, prompt, second, _as_it_is):
            continue
        stale = torch.cat([_generated(runs, before, use_cache), prompt], dim=1)
        is_context = False
        for drop in (0, 1):
            past = stale[:, : stale.shape[1] - prompt.shape[1] - drop]
            is_context |= _is_greedy(runs, prompt, second, _behind(past))
        more = ": the second call goes on behind the tokens of the first, whose cache is not cleared"
        return f"{manner} is right on a new model and wrong after another call" + (
            more if is_context else ": the cache of the first is not cleared"
        )
    return None
