"""What an influence map says about the likely cause of a leak."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.engine.violations import InfluenceMap
from veriformer.properties.probes.influence import by_substitution
from veriformer.properties.subject.paths import Path
from veriformer.properties.subject.subject import Subject

_MOST = 0.75  # of the places of a band: a gradient may be zero by chance


def causal_region(length: int, window: int | None = None, prefix: int | None = None, sinks: int = 0) -> Tensor:
    """Return `[T, T]` bool: whether output t may depend on input s.

    Args:
        length: T.
        window: if given, s > t - window too.
        prefix: if given, the first `prefix` positions see one another both ways.
        sinks: with a window, the first tokens that are seen from everywhere behind them.

    >>> causal_region(3, window=2).tolist()
    [[True, False, False], [True, True, False], [False, True, True]]
    """
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        near = torch.ones(length, length, dtype=torch.bool).triu(1 - window)
        near[:, :sinks] = True
        allowed &= near
    if prefix is not None:
        allowed[: min(prefix, length), : min(prefix, length)] = True
    return allowed


def declared_region(subject: Subject, length: int) -> Tensor:
    """Return `[T, T]` bool: what an output of a causal attention may see, by what is declared of it."""
    fact = subject.fact
    return causal_region(length, fact("window"), fact("prefix"), fact("sink_tokens", 0))


def map_of(influence: Tensor, allowed: Tensor) -> InfluenceMap:
    """Return both as nested lists, for the report."""
    return InfluenceMap(influence.double().cpu().tolist(), allowed.cpu().tolist())


def measured_map(case: Case, stream: Stream, x: Tensor, mask: Tensor | None, path: Path) -> Tensor:
    """Return `[T, T]`: what reaches what on this path, for one sample; by gradients where they can be had."""
    one, one_mask = x[:1], None if mask is None else mask[:1]
    if path.mode == "grad":
        found = stream.influence(one, one_mask, path=path)
        if found is not None:
            return found.double().cpu()
    return by_substitution(stream, one, one_mask, path)


def leak_cause(influence: Tensor, allowed: Tensor, num_layers: int = 1, sinks: int = 0) -> str | None:
    """Name the shape of what an influence map shows where nothing may be.

    Args:
        influence: `[T, T]`, zero where nothing reaches.
        allowed: `[T, T]` bool.
        num_layers: layers of the model; a leak of one step in each adds up.
        sinks: so many of the first positions every later one is meant to see, whatever the window.

    Returns:
        One sentence, or None if nothing illegal is seen.
    """
    reaches = influence > 0
    illegal = reaches & ~allowed
    length = len(allowed)
    if not bool(illegal.any()):
        return None
    ahead = sorted({s - t for t, s in illegal.nonzero().tolist()})
    future = [step for step in ahead if step > 0]
    if not future:
        far = -min(ahead)
        return f"influence from {far} steps back, outside the declared window: the window is off by one or not applied"
    if not bool(illegal[:, sinks:].any()):
        return (
            f"the first {sinks} positions, the sinks, are seen by those before them, too: they are let in behind the "
            "causal mask, which must hide what lies ahead among the sinks as well"
        )
    everything = bool(reaches[~allowed].all())
    if length > 2 and bool((reaches == allowed.T).all()):
        return "influence from the future and none from the past: the mask is transposed or inverted"
    is_band = _is_band(reaches, max(future))
    if length > 2 and max(future) == 1 and is_band:
        return "influence exactly one step ahead: the mask's diagonal is off by one"
    if everything:
        return "influence from every later position: the causal mask is not applied on this path"
    if size := _blocks(illegal):
        return (
            f"positions of one block of {size} see one another both ways, and the blocks before: the mask compares "
            f"blocks, or steps of {size} tokens, where it must compare tokens"
        )
    if (size := _block(illegal)) > 2:
        return f"the first {size} positions see one another both ways, the others the past alone"
    if is_band and max(future) == num_layers < length - 1:
        return (
            f"influence up to {num_layers} steps ahead in a model of {num_layers} layers: "
            "the mask's diagonal is off by one in each of them"
        )
    if is_band and max(future) < length - 1:
        return f"influence up to {max(future)} steps ahead: the mask's diagonal is off by {max(future)}"
    rows = sorted({t for t, _ in illegal.nonzero().tolist()})
    if len(rows) == 1:
        return f"only output {rows[0]} sees the future"
    columns = sorted({s for _, s in illegal.nonzero().tolist()})
    if len(columns) == 1:
        return f"only input {columns[0]} leaks into earlier outputs"
    told = f"influence from {int(illegal.sum())} of {int((~allowed).sum())} forbidden positions"
    return f"{told}{_repeats(illegal)}"


def gap_cause(influence: Tensor, allowed: Tensor) -> str | None:
    """Name the shape of what an influence map misses where something must be; None if nothing is missing."""
    missing = (influence == 0) & allowed
    if not bool(missing.any()):
        return None
    back = sorted({t - s for t, s in missing.nonzero().tolist()})
    if back == [0]:
        return "no output depends on its own input: the diagonal is masked too"
    if bool(missing[allowed].all()):
        return "no output depends on any input"
    steps = torch.arange(len(allowed))[:, None] - torch.arange(allowed.shape[1])[None]
    late = int(steps[(influence > 0) & allowed].min())
    if late > 0 and bool((missing == allowed & (steps < late)).all()):
        return (
            f"output t depends on the inputs up to t - {late} alone, each of them: outputs stand {late} places late, "
            "as where what was put in front of a sequence is not cut off again, or the sequence is moved"
        )
    if min(back) > 0 and not bool((missing == allowed & (steps >= min(back))).all()):
        return (
            f"no influence from {min(back)} to {max(back)} steps back, for some outputs alone: what is seen depends on "
            "where in a block of keys a query stands"
        )
    if min(back) > 0:
        return (
            f"no influence from {min(back)} steps back and more: a window is applied that was not declared "
            "(declare window, the number of tokens that one layer sees, if that is meant)"
        )
    return f"no influence from {int(missing.sum())} of {int(allowed.sum())} permitted positions"


def _repeats(illegal: Tensor) -> str:
    """Say that every second, third ... output sees ahead, where they do."""
    rows = illegal.any(1).nonzero().flatten()
    steps = set(rows.diff().tolist())
    if len(steps) != 1 or (step := steps.pop()) < 2:
        return ""
    seen = sorted({s for _, s in illegal.nonzero().tolist()})
    return (
        f": outputs {', '.join(map(str, rows.tolist()))}, each {step} further, see inputs {', '.join(map(str, seen))}: "
        f"parts of {step} positions are made into one, and what is made of later ones is given to earlier ones "
        "(they are moved by too little)"
    )


def _is_band(reaches: Tensor, steps: int) -> bool:
    """Whether nearly every place up to so many steps ahead is reached: a diagonal that is off concerns every row.

    Args:
        reaches: `[T, T]`, bool.
        steps: ahead of the diagonal.
    """
    places = torch.ones_like(reaches).triu(1).tril(steps)
    return bool(reaches[places].float().mean() > _MOST)


def _blocks(illegal: Tensor) -> int:
    """Return of how many positions blocks are that see one another, two blocks and more; 0 if it is not so."""
    length = len(illegal)
    at = torch.arange(length)
    sizes = range(2, length // 2 + 1)
    return next((n for n in sizes if torch.equal(illegal, (at[:, None] // n == at // n).triu(1))), 0)


def _block(illegal: Tensor) -> int:
    """Return how many of the first positions all see one another, where no other sees ahead; 0 if it is not so."""
    size = int(illegal.any(1).nonzero().max()) + 2 if bool(illegal.any()) else 0
    block = torch.zeros_like(illegal)
    block[:size, :size] = True
    return size if size < len(illegal) and bool((illegal == block.triu(1)).all()) else 0
