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


LONG, WIDE = "long", "wide"
MANY = 300
"""Above this length one path is called: a forward costs the square of its length."""
FEW = 40
"""That length on a large instance, whose every token costs much."""

_FURTHER = {
    # the smallest one, made for long sequences; and one with many heads, layers and channels
    LONG: replace(_CANDIDATES[0], max_len=1030),
    WIDE: DrawnConfig(
        d_model=96, num_heads=12, num_key_value_heads=4, num_layers=5, d_ff=160, vocab_size=257, max_len=34
    ),
}


def further(subject: Subject) -> dict[str, DrawnConfig]:
    """Return the sizes that are reached for beside those that are drawn: a ready-made instance has its own alone."""
    if subject.build is None:
        own = subject.config or DrawnConfig()
        return {LONG: own, WIDE: own}
    smallest = palette(subject)[0]
    return {name: fitted(config, subject) or smallest for name, config in _FURTHER.items()}


def palette(subject: Subject) -> list[DrawnConfig]:
    """Return the configurations that `subject` is built with, smallest first.

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
    if found.num_heads % found.num_key_value_heads and "num_key_value_heads" not in subject.domain:
        groups = [g for g in range(1, found.num_heads + 1) if found.num_heads % g == 0]
        found = replace(found, num_key_value_heads=min(groups, key=lambda g: abs(g - candidate.num_key_value_heads)))
    return found


def _nearest(allowed: Sequence[Any], wanted: Any) -> Any:
    return min(allowed, key=lambda value: (abs(value - wanted), value))


def colliding_lengths(subject: Subject, config: DrawnConfig) -> list[int]:
    """Return the sequence lengths that coincide with another size, where index mix-ups and edge cases live.

    1 and 2, 11 (which leaves a rest in chunks of any size), the numbers of heads and of key-value heads, the widths of
    a head and of the model, the window and its neighbours, the longest length.
    """
    if subject.kind == "attention":
        return [5, 17]  # one more than a tile of a kernel; its sizes are drawn, not configured
    lengths = {1, 2, 11, config.num_heads, config.num_key_value_heads, config.d_head, config.d_model}
    lengths |= {min(config.max_len, subject.fact("max_len", config.max_len))}
    if window := subject.fact("window"):
        lengths |= {window - 1, window, window + 1}
    return sorted(n for n in lengths if n >= 1)
