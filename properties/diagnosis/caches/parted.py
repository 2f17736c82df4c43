"""The part of a model behind which a cached run parts from the whole one: what it is given agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.attentions import attentions
from veriformer.properties.diagnosis.caches.runs import BATCH, CachedRuns

Calls = list[tuple[str, Tensor, Tensor]]
"""Of every call of a part: its name, its first input and its output, `[B, T, D]` each."""


def parted_cause(runs: CachedRuns, sizes: Sequence[int]) -> str | None:
    """Name the innermost part that gives the new tokens of a chunk something else than in the whole run.

    Args:
        runs: of the subject.
        sizes: of the chunks.
    """
    x = runs.tokens(BATCH, sum(sizes))
    whole, model = runs.clean(), runs.clean()
    if not isinstance(whole.module, nn.Module) or runs.source is not None:
        return None
    usual = _calls(whole.module, lambda: runs.call(whole, x), sum(sizes))
    cached = _calls(model.module, lambda: runs.cached(x, sizes, on=model), 0)
    start, at = 0, 0
    for number, size in enumerate(sizes):
        own = cached[at : at + len(usual)]
        if [name for name, _, _ in own] != [name for name, _, _ in usual]:
            return None  # parts are called otherwise with a cache: that is told elsewhere
        for (name, given, made), (_, all_given, all_made) in zip(own, usual, strict=True):
            if given.shape[1] != size or made.shape[1] != size:
                continue
            end = start + size
            if _agree(given, all_given[:, start:end]) and not _agree(made, all_made[:, start:end]):
                kind = type(dict(whole.module.named_modules())[name]).__name__
                behind = f"chunk {number + 1}, behind {start} cached token{'s' * (start != 1)}"
                return (
                    f"in {behind}, {name or 'the model'} ({kind}) is given what it is given in the whole run and gives "
                    "something else for the new tokens: what it keeps of those before, or how it goes on from it, is "
                    "wrong"
                )
        start, at = start + size, at + len(usual)
    return None


def remembered_cause(runs: CachedRuns) -> str | None:
    """Say whose states a layer is handed for the past, where they are not those of the whole run.

    Args:
        runs: of a subject that keeps states, and projects them anew for each chunk.
    """
    x, past = runs.tokens(2, 6), 3
    whole, model = runs.clean(), runs.clean()
    if not isinstance(whole.module, nn.Module) or runs.source is not None:
        return None
    usual = _calls(whole.module, lambda: runs.call(whole, x), x.shape[1])
    cached = _calls(model.module, lambda: runs.cached(x, [past, x.shape[1] - past], on=model), 0)
    wanted = {name: given for name, given, _ in usual}
    for name, given, _ in cached:
        if name not in wanted or given.shape != wanted[name].shape or _agree(given[:, :past], wanted[name][:, :past]):
            continue
        made = [other for other, _, output in usual if _agree(given[:, :past], output[:, :past])]
        if made and not _agree(wanted[name][:, past:], given[:, past:]):
            return None  # the new tokens are other ones, too: it is wrong before
        if made:
            return (
                f"for the tokens before, {name} is handed what {made[-1] or 'the model'} gave of them, where the whole "
                "run hands it what that was given: states are kept behind a layer, not before it, one layer too high"
            )
    return None


def sources_cause(runs: CachedRuns) -> str | None:
    """Say whose keys of the source a cross-attention is given in a cached run, where they are another layer's.

    Args:
        runs: of an encoder-decoder.
    """
    if runs.source is None:
        return None
    x, many = runs.tokens(2, 4), runs.source.shape[1]
    whole, cached = (
        [a for a in attentions(run) if a.weights.shape[-1] == many and a.weights.shape[-2] != many]
        for run in (lambda: runs.whole(x), lambda: runs.cached(x, [1] * x.shape[1]))
    )
    if len(whole) < 2 or len(cached) % len(whole):
        return None
    for number, got in enumerate(cached):
        own = number % len(whole)
        for what in ("key", "value"):
            one = getattr(got, what)
            others = [n for n, expected in enumerate(whole) if _agree(one, getattr(expected, what))]
            if others and own not in others:
                return (
                    f"in a cached run cross-attention {own + 1} of {len(whole)} is given the {what}s that "
                    f"cross-attention {others[0] + 1} has of the source: what is kept of the source is not kept for "
                    "each layer by itself"
                )
    return None


def _calls(module: nn.Module, run: Callable[[], object], length: int) -> Calls:
    """Return the calls of the parts of a model, the innermost first."""
    found: Calls = []

    def note(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[object, ...], output: object) -> None:
            made = output[0] if isinstance(output, tuple) and output else output
            given = next((a for a in args if isinstance(a, Tensor)), None)
            if not isinstance(made, Tensor) or given is None or made.ndim != 3 or given.ndim != 3:
                return
            if made.is_floating_point() and (not length or made.shape[1] == given.shape[1] == length):
                found.append((name, given.detach().clone(), made.detach().clone()))

        return keep

    with hooked(part.register_forward_hook(note(name)) for name, part in module.named_modules()), torch.no_grad():
        run()
    return found


def _agree(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and float((one - two).abs().max()) <= 1e-4 * max(size_of(two), 1e-6)
