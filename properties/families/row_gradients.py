"""Gradients of weights add up over tokens and samples: a backward that takes rows in blocks takes the last, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.bench.measured import makes_choices
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.rounding import rounding_bound
from veriformer.properties.diagnosis.lengths import wrong_lengths
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream

_SAMPLES = 17
_ROUNDED = {torch.float64: 1e-3, torch.float32: 1e-2}
"""Gradients that are off by more of their size are others: float32 inside a model leaves 10^-5, its sums some more."""

_LONGEST_CHUNK = 8
"""Chunks up to this length are looked for, at every length up to three of them."""
_ADDED, _FEW = 555, 37
"""Tokens: whole blocks of any power of two to 256 and a rest, against fewer than most blocks have."""


def gradients_add_up(case: Case, built: Built) -> None:
    """Compare the gradients of the weights for many tokens with the sum of those for a few at a time.

    Two sums over the tokens, one after another or in parts, differ by `rounding_bound` of the sum of what they add,
    whose size is that of the gradient times the root of its number where signs are random.

    Args:
        case: of a subject that takes every token `[B, T, D]` by itself.
        built: model.
    """
    module = built.module
    named = dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}
    weights = [p for p in named.values() if p.requires_grad and p.numel()]
    if not weights or (built.dtype != torch.float64 and makes_choices(case.bench, built)):
        return
    x = case.normal(_ADDED, built.config.d_model, dtype=built.dtype)
    probe = case.normal(_ADDED, built.config.d_model, dtype=built.dtype)
    together = case.apply(_gradients, weights, case.caller(built), x, probe, _ADDED)
    parts = case.apply(_gradients, weights, case.caller(built), x, probe, _FEW)
    summing = rounding_bound(built.dtype, _ADDED) * _ADDED**0.5
    bound = (4 * case.tolerance(built) + summing) * size_of(parts)

    def cause() -> str | None:
        off, begin = (together - parts).abs() > bound, 0
        bad = []
        for name, p in named.items():
            if p.requires_grad and p.numel():
                bad += [name] * bool(off[begin : begin + p.numel()].any())
                begin += p.numel()
        with off_the_record(case):
            told = wrong_lengths(
                lambda count: _is_off(weights, case, built, x, probe, bound, count), 0, _ADDED, "tokens"
            )
            if rest := _left_over(lambda count: _never_computed(case.caller(built), x[:count])):
                return rest
            counted = _counted(weights, case.caller(built), x, probe)
        what = f"the gradient of {', '.join(bad)} {counted or 'counts some tokens more than once, or misses some'}"
        return "; ".join(filter(None, (what, told)))

    case.close(
        together, parts,
        f"the gradient of the weights for {_ADDED} tokens is not the sum of those for {_FEW} at a time", bound=bound,
        cause=cause,
    )  # fmt: skip


def _never_computed(call: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return how many of the last of `[N, D]` tokens give zeros, where no other does, nor the last by itself."""
    empty = (call(x[None])[0] == 0).all(-1)
    last = int(empty.sum())
    by_itself = bool((call(x[-1:, None]) != 0).any())
    return last if by_itself and bool(empty[len(x) - last :].all()) else 0


def _left_over(never: Callable[[int], int]) -> str | None:
    """Say that what is left behind the last whole chunk is not computed, where that is so at every length.

    Args:
        never: how many of the last tokens of a sequence of some length are not.
    """
    rests = {count: never(count) for count in range(1, _LONGEST_CHUNK * 3)}
    for size in range(2, _LONGEST_CHUNK + 1):
        if all(rests[count] == count % size for count in range(size + 1, _LONGEST_CHUNK * 3)):
            told = f"whole chunks of {size} tokens alone are computed: what is left behind the last of them gives zeros"
            return f"{told} ({2 * size + 1} tokens: the last one), as where the number of chunks is rounded down"
    return None


def gradients_of_samples_add_up(case: Case, stream: Stream, x: Tensor) -> None:
    """Compare the gradients of the weights for a batch with the sum of those for a few samples at a time.

    In the widest dtype, and parameter by parameter: rounding moves a gradient by some units of its own size, or of all,
    where it is a sum that vanishes (that of a bias of keys does), and tables and softmaxes are of float32 in most
    models; rows that are left out move it by the root of their share, a tenth and more.

    Args:
        case: of many samples.
        stream: model of the widest dtype.
        x: its inputs.
    """
    module = stream.built.module
    named = dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}
    named = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
    if not named or len(x) <= _SAMPLES or makes_choices(case.bench, stream.built) or stream.built.dtype not in _ROUNDED:
        return
    out = stream(x)
    if not out.requires_grad:
        return
    probe = case.normal(*out.shape, dtype=out.dtype)
    weights, apart = list(named.values()), torch.zeros((), dtype=out.dtype, device=out.device)
    for part, along in zip(x.split(_SAMPLES), probe.split(_SAMPLES), strict=True):
        apart = apart + (stream(part) * along).sum()
    together = torch.autograd.grad((out * probe).sum(), weights, allow_unused=True, materialize_grads=True)
    parts = torch.autograd.grad(apart, weights, allow_unused=True, materialize_grads=True)
    unit = _ROUNDED[out.dtype]
    whole = size_of(torch.cat([g.flatten() for g in parts]))
    for name, got, expected in zip(named, together, parts, strict=True):
        case.close(
            got,
            expected,
            f"the gradient of {name} for a batch of {len(x)} is not the sum of those for {_SAMPLES} samples at a time",
            bound=unit * (size_of(expected) + whole / 10),
            constants_allowed=True,
            cause=partial(_samples_words, case, stream, name, x, probe, got),
        )


def _samples_words(case: Case, stream: Stream, name: str, x: Tensor, probe: Tensor, got: Tensor) -> str:
    """Say that a gradient is a mean where a sum is due, or misses samples."""
    weight = dict(stream.built.module.named_parameters())[name]
    alone = torch.zeros_like(weight)
    with off_the_record(case):
        for sample, along in zip(x.split(1), probe.split(1), strict=True):
            alone += torch.autograd.grad((stream(sample) * along).sum(), weight)[0]
    if float((got * len(x) - alone).abs().max()) < 1e-3 * float(alone.abs().max()):
        return (
            f"the gradient of {name} for {len(x)} samples is 1 / {len(x)} of the sum of theirs: the backward takes a "
            "mean over the batch where it must take a sum"
        )
    return f"the backward of {name} leaves samples out"


def _is_off(
    weights: list[torch.nn.Parameter], case: Case, built: Built, x: Tensor, probe: Tensor, bound: float, count: int
) -> bool:
    """Whether the gradients for so many tokens are not the sum of those for one at a time."""
    call = case.caller(built)
    together = _gradients(weights, call, x[:count], probe[:count], count)
    return bool(((together - _gradients(weights, call, x[:count], probe[:count], 1)).abs() > bound).any())


def _counted(
    weights: list[torch.nn.Parameter], call: Callable[[Tensor], Tensor], x: Tensor, probe: Tensor
) -> str | None:
    """Tell how often each token is counted, by what it adds by itself; None where that is no whole number."""
    out, times = call(x[None])[0], []
    for token in range(len(x)):
        added = torch.autograd.grad(
            (out[token] * probe[token]).sum(), weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        got = torch.cat([g.flatten() for g in added])
        alone = _gradients(weights, call, x[token : token + 1], probe[token : token + 1], 1)
        factor = float((got * alone).sum() / (alone * alone).sum().clamp_min(1e-30))
        if abs(factor - round(factor)) > 1e-2 or float((got - factor * alone).abs().max()) > 1e-2 * size_of(alone):
            return None
        times.append(round(factor))
    missed = [t for t, n in enumerate(times) if n == 0]
    more = [t for t, n in enumerate(times) if n > 1]
    if not missed and not more:
        return None
    told = []
    if missed:
        at = (
            f"{missed[0]} to {missed[-1]}"
            if len(missed) == missed[-1] - missed[0] + 1
            else ", ".join(map(str, missed[:8]))
        )
        told.append(f"misses {len(missed)} of {len(x)} tokens, {at}")
    if more:
        told.append(f"counts {len(more)} of {len(x)} tokens {times[more[0]]} times, {', '.join(map(str, more[:8]))}")
    return " and ".join(told)


def _gradients(
    weights: list[torch.nn.Parameter], call: Callable[[Tensor], Tensor], x: Tensor, probe: Tensor, at_once: int
) -> Tensor:
    """Return the gradients by all weights in one row, added up over calls with so many tokens."""
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for part, along in zip(x.split(at_once), probe.split(at_once), strict=True):
        total = total + (call(part[None]) * along).sum()
    found = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])
