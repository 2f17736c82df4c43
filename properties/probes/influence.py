"""Probes of what reaches what: causal or not, windows, prefixes, order, and the scale of the scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.stream import PER_POSITION, SEQUENCES, Stream
from veriformer.properties.probes.findings import Finding, Question, a_stream
from veriformer.properties.probes.observed_scale import ObservedScale, ScaleWatch
from veriformer.properties.subject.paths import DEFAULT, Path

LENGTH = 6  # long enough to tell one step ahead from all steps ahead, short enough for any window or table
LONG = 14  # long enough to show the windows that tests use
_STACKS = ("encoder", "decoder", "encoder_decoder", "classifier")
_UNORDERED = Question(
    "attention.attends",
    "The output does not depend on the order of the tokens: are positions forgotten, or is it a set on purpose?",
    "positions='none'",
)
_ORDERED = tuple(kind for kind in SEQUENCES if kind != "cross_attention")


def what_reaches_what(bench: Workbench) -> Iterator[Finding]:
    """Tell whether a subject is causal, and how far back it sees; by gradients, or else by substitution."""
    subject = bench.subject
    if subject.kind not in PER_POSITION or subject.fact("quantised"):  # what is rounded away is not seen
        return
    influence = _influence(bench, LENGTH)
    if _partly_blind(influence, _prefix(influence)):  # by chance perhaps, or for want of a gradient: look closer
        stream = a_stream(bench)
        more = [_influence(bench, LENGTH, other) for other in range(1, 5)]
        influence = torch.stack([influence, *more, by_substitution(stream, stream.draw(1, LENGTH))]).amax(0)
    causal = not bool(influence.triu(1).any())
    prefix = _prefix(influence)
    yield Finding("causal", causal or bool(prefix), _reach(influence, prefix), asks=_partly_blind(influence, prefix))
    if prefix and subject.declares.get("causal") is not True:  # what was declared is judged: a prefix stands beside it
        seen = f"the first {prefix} positions see one another both ways, later ones the past"
        question = Question("causality.no-future-influence", f"{seen}: a leak, or a prefix?", f"prefix={prefix}")
        yield Finding("prefix", prefix, seen, asks=question)
    one_layer = subject.kind in ("self_attention", "layer")
    longest = min(bench.configs[0].max_len, int(subject.fact("max_len", LONG)))
    if causal and one_layer and longest >= LONG:
        wide = _influence(bench, LONG)
        reach = [int((t - row.nonzero().min()).item()) for t, row in enumerate(wide) if bool(row.any())]
        window = max(reach) + 1
        if 1 < window < LONG and all(r == min(t, window - 1) for t, r in enumerate(reach)):
            seen = f"output t depends on the last {window} inputs alone, itself among them"
            question = Question("causality.window", f"{seen}: a mask too strict, or a window?", f"window={window}")
            yield Finding("window", window, seen, asks=question)


def _partly_blind(influence: Tensor, prefix: int) -> Question | None:
    """Ask of a subject that sees some later inputs and not all whether a causal mask leaks."""
    above = torch.ones_like(influence, dtype=torch.bool).triu(1)
    if prefix or not bool(influence[above].any()) or bool((influence[above] > 0).all()):
        return None
    seen = f"{_reach(influence, prefix).partition(';')[0]}, and not on all of them"
    return Question(
        "causality.declared-bidirectional-is", f"{seen}: a causal mask that leaks, or meant?", "causal=False"
    )


def _reach(influence: Tensor, prefix: int) -> str:
    ahead = {int(s - t) for t, s in influence.triu(1).nonzero().tolist()}
    if not ahead:
        return "no output depends on a later input"
    if ahead == {1}:
        return (
            "outputs depend on the input exactly one step ahead and on no later one; "
            "if the subject is meant to be causal, its mask is off by one: declare causal=True to have it judged"
        )
    if prefix:
        return f"no output depends on a later input, but for the first {prefix} positions"
    if max(ahead) < LENGTH - 1:
        return f"outputs depend on inputs up to {max(ahead)} steps ahead"
    return "outputs depend on all later inputs"


def _prefix(influence: Tensor) -> int:
    """Return the length of a prefix that sees itself both ways while all else is causal; 0 if there is none."""
    for size in range(2, len(influence) - 1):
        allowed = torch.ones_like(influence, dtype=torch.bool).tril()
        allowed[:size, :size] = True
        if bool((influence[~allowed] == 0).all()) and bool((influence[:size, :size] > 0).all()):
            return size
    return 0


def _influence(bench: Workbench, length: int, which: int = 0) -> Tensor:
    """Return `[T, T]`: what reaches what on one of many inputs; exact zeros where nothing does."""
    stream = a_stream(bench)
    x = stream.draw(1 + which, length)[which:]
    found = stream.influence(x)
    return found.cpu() if found is not None else by_substitution(stream, x)


def by_substitution(stream: Stream, x: Tensor, attention_mask: Tensor | None = None, path: Path = DEFAULT) -> Tensor:
    """Return `[T, T]`: entry (t, s) is the change of output t when input s is replaced; rounding counts as 0.

    Args:
        stream: the subject.
        x: one sequence `[1, T]` or `[1, T, D]`.
        attention_mask: `[1, T]`.
        path: the way to call.
    """
    length = x.shape[1]
    changed = x.repeat(length, *(1,) * (x.ndim - 1))
    other = stream.other(changed)
    each = torch.arange(length)
    changed[each, each] = other[each, each]
    with torch.no_grad():
        many = None if attention_mask is None else attention_mask.expand(length, -1)
        base, moved = stream(x, attention_mask, path=path), stream(changed, many, path=path)
    change = (moved - base).abs().amax(dim=-1).T.double().cpu()
    return torch.where(change <= stream.case.tolerance(stream.built) * size_of(base), torch.zeros_like(change), change)


def order_matters(bench: Workbench) -> Iterator[Finding]:
    """Tell whether a subject that sees everything depends on the order of its input."""
    subject = bench.subject
    if subject.kind not in _ORDERED:
        return
    stream = a_stream(bench)
    x = stream.draw(1, LENGTH)
    if not x.is_floating_point():
        x = torch.arange(LENGTH, device=x.device)[None] % bench.configs[0].vocab_size
    if subject.fact("causal") and subject.kind in _STACKS:
        yield from _forgotten_order(stream, x)
    if subject.fact("causal") or (subject.kind in PER_POSITION and not bool((_influence(bench, LENGTH) > 0).all())):
        return  # a mask tells positions apart by itself
    order = [0, 2, 4, 1, 3, 5] if subject.kind == "classifier" else [2, 0, 5, 1, 4, 3]  # an end may be what is pooled
    with torch.no_grad():
        straight, permuted = stream(x), stream(x[:, order])
    expected = straight[:, order] if subject.kind in PER_POSITION else straight
    same = worst_difference(permuted, expected, size_of(expected)).error <= stream.case.tolerance(stream.built)
    manner = "does not depend on" if same else "depends on"
    asks = _UNORDERED if same and subject.kind in _STACKS else None
    yield Finding("positions", "none" if same else "other", f"the output {manner} the order of the input", asks=asks)


def _forgotten_order(stream: Stream, x: Tensor) -> Iterator[Finding]:
    """Reorder all inputs of a causal stack but the last: its last output tells the orders apart."""
    with torch.no_grad():
        straight, permuted = stream(x)[:, -1], stream(x[:, [2, 0, 4, 1, 3, 5]])[:, -1]
    if worst_difference(permuted, straight, size_of(straight)).error <= stream.case.tolerance(stream.built):
        yield Finding("positions", "none", "the last output does not depend on the order before it", asks=_UNORDERED)


def observed_scales(bench: Workbench) -> Iterator[Finding]:
    """Read the attention scale off the running model."""
    if bench.subject.kind not in SEQUENCES or bench.subject.is_functional:
        return
    stream = a_stream(bench)
    with ScaleWatch() as watch, torch.no_grad():
        stream(stream.draw(2, LENGTH))
    yield Finding("observed_scale", bool(watch.found), "scores seen before and after they are scaled", told=False)
    for scale in sorted(set(watch.found), key=lambda s: (s.d_head, s.factor)):
        yield Finding(
            "attention_scale", round(scale.factor, 6), _scale_words(scale), is_fact=False, told=not _is_usual(scale)
        )


def _is_usual(scale: ObservedScale) -> bool:
    return abs(scale.factor * scale.d_head**0.5 - 1) <= 1e-3


def _scale_words(scale: ObservedScale) -> str:
    if _is_usual(scale):
        return f"1/sqrt(d_head) at d_head = {scale.d_head}"
    return (
        f"seen at d_head = {scale.d_head}, where 1/sqrt(d_head) is {scale.d_head**-0.5:.4g} "
        "(1 if the queries were scaled before); declare it"
    )
