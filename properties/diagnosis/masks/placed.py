"""Where tokens stand under a padding mask, read off the first queries; and what a mask of ones changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.diagnosis.attentions import Attended, attentions, module_calls, near, rows_of
from veriformer.properties.diagnosis.masks.masked import Masked
from veriformer.properties.engine.stream import Stream

_SCANNED = 24
"""Lengths up to it are tried one by one: three times a usual block."""

_LEAST = 1e-9  # a weight below is that of a hidden key


def placed_cause(masked: Masked, side: str) -> str | None:
    """Say at which positions real tokens stand behind or before padding, where it is not where they stand alone."""
    x = masked.draw(1)
    mask = masked.padded(x, [masked.real], side)
    first = int(mask[0].long().argmax())
    cut = slice(first, first + masked.real)
    among, alone = masked(x, mask), masked(x[:, cut], mask[:, cut])
    if not bool(masked.moved(among[:, cut] if masked.per_position else among, alone).any()):
        return None
    x = _repeated(masked)
    wanted, read = _read(masked, x[:, cut], mask[:, cut]), _read(masked, x, mask)
    if wanted is None or read is None or -1 in wanted or -1 in read[cut] or read[cut] == wanted:
        return None
    told = (
        f"real tokens {'behind' if first else 'before'} {masked.length - masked.real} padded ones stand at positions "
    )
    told += f"{read[cut]}, alone at {wanted}"
    if first and read[cut] == [place + first for place in wanted]:
        return f"{told}: positions count padding (declare padding_side='right' if that is meant)"
    return told


def placed_in_batch(masked: Masked, mask: Tensor) -> str | None:
    """Say at which positions the samples of a batch stand, where it is not where each stands alone."""
    same = _repeated(masked)
    x = same.expand(len(mask), *same.shape[1:]).contiguous()
    known, seen = masked.attended(_repeated_like(masked, same)), masked.attended(x, mask)
    if not known or not seen or seen[0].query.shape[-2] != x.shape[1] or len(seen[0].query) != len(mask):
        return None
    table = known[0].query
    if rows_of(table, table) != list(range(table.shape[-2])):
        return None
    among, alone = [], []
    for b, real in enumerate(mask.cpu()):
        own = _read(masked, x[b : b + 1], mask[b : b + 1])
        rows = rows_of(seen[0].query[b : b + 1], table)
        if own is None:
            return None
        among.append([p for p, is_real in zip(rows, real, strict=True) if is_real])
        alone.append([p for p, is_real in zip(own, real, strict=True) if is_real])
    if among == alone or any(-1 in places for places in (*among, *alone)):
        return None
    told = f"in a batch the tokens of the samples stand at positions {', '.join(map(_few, among))}, alone each at "
    told += f"{_few(alone[0])}"
    shortest = min(map(len, alone))
    if all(set(places[:shortest]) == {b} for b, places in enumerate(among)):
        told += ": positions count over the batch instead of over time"
    elif among == [[p + sum(map(len, alone[:b])) for p in places] for b, places in enumerate(alone)]:
        told += ": positions run on through the batch instead of starting again in each sample"
    elif shift := _one_shift(mask, among):
        told += f": all samples are shifted by {shift}, not each by its own padding"
    return told


def _one_shift(mask: Tensor, among: list[list[int]]) -> str | None:
    """Say by whose padding all samples are shifted, if by that of one: positions below 0 are 0, then."""
    starts = mask.long().argmax(1).tolist()
    for words, shift in (
        ("the padding of the most padded one", max(starts)),
        ("the padding of the least padded one", min(starts)),
        ("the padding of the first one", starts[0]),
    ):
        shifted = [
            [max(start + n - shift, 0) for n in range(len(own))] for start, own in zip(starts, among, strict=True)
        ]
        if shifted == among:
            return f"{words}, {shift}"
    return None


def ones_cause(stream: Stream) -> str | None:
    """Say what a mask that hides nothing changes."""
    masked = Masked(stream.case, stream)
    x = masked.draw(3, min(6, masked.length))
    ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    without, given = masked(x), masked(x, ones)
    if not bool(masked.moved(given, without).any()):
        return None
    same = _repeated(masked)
    usual = _read(masked, same, None)
    now = _read(masked, same, torch.ones(same.shape[:2], dtype=torch.bool, device=same.device))
    if usual is not None and now is not None and -1 not in now and usual != now:
        return f"with a mask of ones the tokens stand at positions {_few(now)}, without a mask at {_few(usual)}"
    plain, other = attentions(lambda: masked(x)), attentions(lambda: masked(x, ones))
    if plain and len(plain) == len(other):
        elsewhere = attentions(lambda: masked(masked.stream.other(x)))
        for number, (a, b) in enumerate(zip(plain, other, strict=True)):
            if len(elsewhere) == len(plain) and (told := _filling(a, b, elsewhere[number], number, len(plain))):
                more = a.key.shape[-2] - x.shape[1]
                return (_hidden_tokens(a, b, more) if masked.case.subject.kind == "classifier" else None) or told
            if told := _parted(a, b, number, len(plain), x.shape[1]):
                return told
    return _left_out(masked, x, ones) or _filled_up(masked)


def _filled_up(masked: Masked) -> str | None:
    """Say to multiples of what sequences are filled up, where a mask of ones changes nothing at these lengths alone."""
    lengths = range(2, 1 + int(min(masked.case.subject.fact("max_len", 64), masked.built.config.max_len, _SCANNED)))
    same = []
    for length in lengths:
        x = masked.stream.draw(1, length)
        ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if not bool(masked.moved(masked(x, ones), masked(x)).any()):
            same.append(length)
    size = next((n for n in range(2, len(lengths)) if same == [m for m in lengths if m % n == 0]), None)
    if size is None or len(same) < 2:
        return None
    return (
        f"at lengths that are multiples of {size} a mask of ones changes nothing, at all others it does: sequences are "
        f"filled up to a multiple of {size}, and without a mask what is filled in is attended to"
    )


def _few(places: list[int]) -> str:
    return f"{places[:4]}".replace("]", ", ...]") if len(places) > 4 else f"{places}"


def _filling(a: Attended, b: Attended, elsewhere: Attended, number: int, many: int) -> str | None:
    """Tell whether what a mask of ones hides are keys that no input reaches: filling, which is seen without a mask."""
    if a.weights.shape != b.weights.shape or a.key.shape != b.key.shape or a.key.shape != elsewhere.key.shape:
        return None
    if a.weights.shape[:-2] != a.key.shape[:-2]:
        return None
    gone = (b.weights <= _LEAST) & (a.weights > _LEAST)
    if bool(((a.weights <= _LEAST) & (b.weights > _LEAST)).any()) or not bool(gone.any()):
        return None
    unreached = ((a.key - elsewhere.key).abs() <= near(a.key) * a.key.abs().max()).all(-1)
    hidden = gone.any(-2)  # [..., S]
    if bool((hidden & ~unreached).any()) or bool(unreached.all()):
        return None
    share = (a.weights * gone).sum(-1)
    rows = share[share > _LEAST]
    places = hidden.flatten(0, -2).any(0).nonzero().flatten().tolist()
    what = "keys of zeros" if not bool(a.key[hidden].any()) else "the same keys whatever the input"
    return (
        f"without a mask, filling is attended: attention {number + 1} of {many} gives the places {places} of a block "
        f"or row of keys, {what}, {float(rows.mean()):.2g} of the weight of a query that sees them; with a mask "
        "of ones they get none"
    )


def _hidden_tokens(a: Attended, b: Attended, more: int) -> str | None:
    """Say that a mask of ones hides the tokens of a classifier's own, a class token say, in front or behind."""
    gone = ((b.weights <= _LEAST) & (a.weights > _LEAST)).flatten(0, -2).any(0).nonzero().flatten().tolist()
    length = a.key.shape[-2] - more
    if more < 1 or not (gone == list(range(more)) or gone == list(range(length, length + more))):
        return None
    which = "class token" if more == 1 else f"{more} tokens of its own"
    return (
        f"once a mask is given, of ones even, the {which} (at {', '.join(map(str, gone))}) is hidden from all queries: "
        "the mask's places for what the model adds are filled with False, where they are real"
    )


def _parted(a: Attended, b: Attended, number: int, many: int, length: int) -> str | None:
    where = f"attention {number + 1} of {many}"
    if a.weights.shape != b.weights.shape:
        return (
            f"with a mask of ones {where} is over {b.weights.shape[-1]} keys, without a mask over {a.weights.shape[-1]}"
        )
    alike = [bool(((p - q).abs() <= near(p) * p.abs().max()).all()) for p, q in ((a.query, b.query), (a.key, b.key))]
    if not all(alike):
        return None
    if bool(((a.weights - b.weights).abs() <= 1e-5).all()):
        return None
    gone = ((b.weights <= 1e-9) & (a.weights > 1e-9)).flatten(0, -2).any(0).nonzero().flatten().tolist()
    more = ((a.weights <= 1e-9) & (b.weights > 1e-9)).flatten(0, -3)
    if bool(more.any()):
        pairs = more.any(0).nonzero().tolist()
        if all(s > t for t, s in pairs):
            return f"with a mask of ones {where} lets queries see later keys: the mask replaces the causal one"
        return f"with a mask of ones {where} gives weight to keys that have none without a mask"
    if gone and len(gone) < b.weights.shape[-1]:
        front = " (a token put in front of the sequence)" if gone == [0] and b.weights.shape[-1] == length + 1 else ""
        return f"with a mask of ones {where} gives the keys {gone} no weight{front}: the mask hides them"
    if gone:
        return f"with a mask of ones {where} hides keys from every query: a mask of ones is read as hiding"
    if float((b.weights - b.weights[..., :1]).abs().max()) < 1e-6:
        return f"with a mask of ones {where} gives all keys the same weight: every score is masked"
    return f"with a mask of ones {where} gives other weights to the same queries and keys: scores are scaled or shifted"


def _left_out(masked: Masked, x: Tensor, ones: Tensor) -> str | None:
    one, two = masked.clean(), masked.clean()
    if not isinstance(one.module, nn.Module):
        return None
    without = module_calls(one.module, lambda: masked(x, None, one))
    given = module_calls(two.module, lambda: masked(x, ones, two))
    parts = dict(one.module.named_modules())
    for less, more, told in (
        (given, without, "is called without a mask and not with one"),
        (without, given, "is called with a mask and not without one"),
    ):
        for name, count in more.items():
            if name and less.get(name, 0) < count:
                often = "" if not less.get(name) else f" as often ({less[name]} times, not {count})"
                return f"{name} ({type(parts[name]).__name__}) {told}{often}"
    return None


def _repeated(masked: Masked) -> Tensor:
    """Return one token, or one vector, at every position."""
    x = masked.draw(1)
    return x[:, :1].expand_as(x).contiguous()


def _read(masked: Masked, x: Tensor, mask: Tensor | None) -> list[int] | None:
    """Return at which position of an unpadded sequence each position stands; -1: none. None where it does not show."""
    known = masked.attended(_repeated_like(masked, x))
    seen = masked.attended(x, mask)
    if not known or not seen or seen[0].query.shape[-2] != x.shape[1]:
        return None
    table, rows = known[0].query, seen[0].query
    if table.shape[:-2] != rows.shape[:-2] or rows_of(table, table) != list(range(table.shape[-2])):
        return None
    return rows_of(rows, table)


def _repeated_like(masked: Masked, x: Tensor) -> Tensor:
    longest = int(min(masked.case.subject.fact("max_len", 64), masked.built.config.max_len, 24))
    return x[:, :1].expand(-1, longest, *x.shape[2:]).contiguous()
