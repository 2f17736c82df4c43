"""The sizes that models are built with: few, so that built models are reused, and chosen to tell axes apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_CANDIDATES = (
    # smallest first: a failure shrinks towards the first entry. Within one entry all sizes differ
    # (an index mix-up cannot pass), except where the point is that two of them coincide.
    DrawnConfig(d_model=8, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32),
    DrawnConfig(
        d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=36, vocab_size=13, max_len=29, dropout=0.1
    ),
    DrawnConfig(d_model=18, num_heads=3, num_key_value_heads=1, num_layers=2, d_ff=22, vocab_size=17, max_len=31),
    DrawnConfig(d_model=8, num_heads=1, num_key_value_heads=1, num_layers=1, d_ff=12, vocab_size=19, max_len=27),
    DrawnConfig(
        d_model=12, num_heads=6, num_key_value_heads=3, num_layers=3, d_ff=28, vocab_size=23, max_len=26, dropout=0.2
    ),
)


LONG, WIDE, LARGEST, CROWDED, ODD = "long", "wide", "largest", "many samples", "odd heads"
OTHER = 6
"""Length of the second of two sequences, where it is not what is varied."""
MANY = 300
"""Above this length one path is called: a forward costs the square of its length."""
MOST_SAMPLES = 9
"""Batch of the models that are reached for: one more than those that are taken eight at a time."""
CROWD = 67
"""Batch of the case of many samples: whole groups of any power of two to 64 of them, and a rest."""
FEW = 40
"""That length on a large instance, whose every token costs much."""

_FURTHER = {
    # the smallest one, made for long sequences; and one with many heads, layers and channels: no width is a multiple
    # of 16, so that what is taken in lanes, blocks or groups leaves a rest
    LONG: replace(_CANDIDATES[0], max_len=1030),
    WIDE: DrawnConfig(
        d_model=120, num_heads=12, num_key_value_heads=4, num_layers=5, d_ff=170, vocab_size=257, max_len=34
    ),
}

_LONGEST = 4096
"""A model may keep a table of all pairs of its positions: 64 MB of float32 at this length."""

_ROWS = {
    # what kernels choose by: the width of a head (odd, no power of two, beyond 64), eight heads that share their keys,
    # the number of layers; vocabularies on both sides of a byte. Few layers where channels are many, which cost most
    "eight heads": DrawnConfig(
        d_model=64, num_heads=8, num_key_value_heads=1, num_layers=6, d_ff=72, vocab_size=131, max_len=34
    ),
    "heads of 32": DrawnConfig(
        d_model=128, num_heads=4, num_key_value_heads=2, num_layers=4, d_ff=76, vocab_size=258, max_len=34
    ),
    "heads of 80": DrawnConfig(
        d_model=160, num_heads=2, num_key_value_heads=1, num_layers=1, d_ff=84, vocab_size=300, max_len=34
    ),
    "heads of 96": DrawnConfig(
        d_model=192, num_heads=2, num_key_value_heads=2, num_layers=1, d_ff=100, vocab_size=259, max_len=34
    ),
    "heads of 128": DrawnConfig(
        d_model=256, num_heads=2, num_key_value_heads=1, num_layers=1, d_ff=68, vocab_size=513, max_len=34
    ),
    ODD: DrawnConfig(
        d_model=90, num_heads=6, num_key_value_heads=3, num_layers=1, d_ff=110, vocab_size=127, max_len=34
    ),
    "odd width": DrawnConfig(
        d_model=65, num_heads=1, num_key_value_heads=1, num_layers=2, d_ff=130, vocab_size=129, max_len=34
    ),
}
"""More sizes, each of which a right model may refuse: an odd width, say."""


def further(subject: Subject) -> dict[str, DrawnConfig]:
    """Return the sizes that are reached for beside those that are drawn: a ready-made instance has its own alone."""
    if subject.build is None:
        own = subject.config or DrawnConfig()
        return {LONG: own, WIDE: own, CROWDED: own}
    smallest, longest = palette(subject)[0], min(subject.fact("max_len", 0), _LONGEST)
    wanted = {LONG: replace(_FURTHER[LONG], max_len=max(_FURTHER[LONG].max_len, longest)), WIDE: _FURTHER[WIDE]}
    found = {name: fitted(config, subject) or smallest for name, config in wanted.items()}
    return found | {CROWDED: smallest} | _rows(subject)


def _rows(subject: Subject) -> dict[str, DrawnConfig]:
    """Return those of `_ROWS` that the domain leaves as they are meant, or makes into others that are nowhere else."""
    found: dict[str, DrawnConfig] = {}
    known = {_shape(c) for c in (*palette(subject), fitted(_FURTHER[WIDE], subject)) if c is not None}
    for name, config in ({LARGEST: _largest(subject)} | _ROWS).items():
        sizes = fitted(config, subject)
        if sizes is not None and _shape(sizes) not in known:
            known.add(_shape(sizes))
            found[name] = sizes
    return found


def _largest(subject: Subject) -> DrawnConfig:
    """Return the sizes at the ends of the domain, or the wide ones where such a model is too large for a check."""
    ends = {name: max(subject.domain[name]) for name in _SHAPE if name in subject.domain}
    found = replace(_FURTHER[WIDE], **{"num_layers": 1, **ends}) if ends else _FURTHER[WIDE]
    if subject.fact("grouped_queries") and "num_key_value_heads" not in subject.domain and not found.has_groups:
        between = [g for g in range(2, found.num_heads) if found.num_heads % g == 0]
        found = replace(found, num_key_value_heads=between[0]) if between else found
    return found if 12 * found.num_layers * found.d_model**2 <= _MOST_PARAMETERS else _FURTHER[WIDE]


_MOST_PARAMETERS = 8_000_000
"""Built, drawn and called a few times in half a second."""

_SHAPE = ("d_model", "num_heads", "num_key_value_heads", "num_layers")


def _shape(config: DrawnConfig) -> tuple[int, ...]:
    """Return the sizes that choose a kernel or a branch; of a vocabulary or a hidden width another one chooses none."""
    return tuple(getattr(config, name) for name in _SHAPE)


def palette(subject: Subject) -> list[DrawnConfig]:
    """Return the configurations that `subject` is built with, smallest first, those with groups of heads before others.

    A `domain` replaces sizes outside it by the nearest size inside; entries that no longer make sense
    (heads that do not divide d_model) are made to, within the domain, or left out.

    Raises:
        ValueError: no configuration fits the domain.
    """
    if subject.build is None:
        return [subject.config or DrawnConfig()]
    found: list[DrawnConfig] = []
    for candidate in _CANDIDATES:
        sizes = fitted(candidate, subject)
        if sizes is not None and sizes not in found:
            found.append(sizes)
    if not found:
        raise ValueError(
            f"no sizes fit domain={dict(subject.domain)!r}: num_heads must divide d_model; widen the domain"
        )
    if subject.fact("grouped_queries"):  # which heads share keys shows where there are several groups of several heads
        found.sort(key=lambda sizes: not sizes.has_groups)
    return found


def fitted(candidate: DrawnConfig, subject: Subject) -> DrawnConfig | None:
    """Return sizes that `subject` can be built with, the nearest to the wanted ones in its `domain`; None if none."""
    sizes: dict[str, Any] = {}
    for f in fields(DrawnConfig):
        wanted = getattr(candidate, f.name)
        allowed = subject.domain.get(f.name)
        sizes[f.name] = wanted if allowed is None else _nearest(allowed, wanted)
    found = replace(candidate, **sizes)
    if found.d_model % found.num_heads:
        heads = [h for h in subject.domain.get("num_heads", range(1, 9)) if found.d_model % h == 0]
        widths = [d for d in subject.domain.get("d_model", ()) if d % found.num_heads == 0]
        if "num_heads" in subject.domain and not heads:
            if "d_model" in subject.domain and not widths:
                return None
            width = min(widths) if widths else found.num_heads * candidate.d_head
            found = replace(found, d_model=width)
        elif not heads:
            return None
        else:
            found = replace(found, num_heads=min(heads, key=lambda h: (abs(h - candidate.num_heads), h)))
    found = _with_room_to_turn(found, subject)
    if found.num_heads % found.num_key_value_heads and "num_key_value_heads" not in subject.domain:
        groups = [g for g in range(1, found.num_heads + 1) if found.num_heads % g == 0]
        found = replace(found, num_key_value_heads=min(groups, key=lambda g: abs(g - candidate.num_key_value_heads)))
    return found


def _with_room_to_turn(sizes: DrawnConfig, subject: Subject) -> DrawnConfig:
    """Return sizes whose heads are as wide as what is declared to be rotated of them, where the domain has such."""
    turned = subject.fact("rotary_dim", 0)
    if sizes.d_head >= turned:
        return sizes
    wide = [h for h in range(1, sizes.num_heads + 1) if sizes.d_model % h == 0 and sizes.d_model // h >= turned]
    heads = [h for h in wide if h in subject.domain.get("num_heads", wide)]
    if heads:
        return replace(sizes, num_heads=max(heads))
    return sizes if "d_model" in subject.domain else replace(sizes, d_model=sizes.num_heads * turned)


def _nearest(allowed: Sequence[Any], wanted: Any) -> Any:
    return min(allowed, key=lambda value: (abs(value - wanted), value))


def colliding_lengths(subject: Subject, config: DrawnConfig) -> list[int]:
    """Return the sequence lengths that coincide with another size, where index mix-ups and edge cases live.

    1 and 2, 11 (which leaves a rest in chunks of any size), the numbers of heads and of key-value heads, the widths of
    a head and of the model, the window and its neighbours, the longest length; of two sequences that of the other one.
    """
    if subject.kind == "attention":
        return [5, 17]  # one more than a tile of a kernel; its sizes are drawn, not configured
    lengths = {1, 2, 11, config.num_heads, config.num_key_value_heads, config.d_head, config.d_model}
    lengths |= {min(config.max_len, subject.fact("max_len", config.max_len))}
    if subject.kind in ("encoder_decoder", "cross_attention"):
        lengths |= {OTHER}
    if window := subject.fact("window"):
        lengths |= {window - 1, window, window + 1}
    return sorted(n for n in lengths if n >= 1)
