"""Forms of a mask, as source: what other houses are given for a mask that says True = may attend."""

from __future__ import annotations

from collections.abc import Iterator

_PADDING = (
    ("{m}", "[B, T] of bool, True = may attend"),
    ("~{m}", "[B, T] of bool, True = masked"),
    ("{m}[:, None, None, :]", "[B, 1, 1, T] of bool, True = may attend"),
    ("~{m}[:, None, None, :]", "[B, 1, 1, T] of bool, True = masked"),
    ("{m}[:, None, :]", "[B, 1, T] of bool, True = may attend"),
    ("~{m}[:, None, :]", "[B, 1, T] of bool, True = masked"),
    ("{m}.long()", "[B, T] of int, 1 = may attend"),
    ("torch.where({m}, 0.0, float('-inf'))[:, None, None, :]", "[B, 1, 1, T] of float, -inf = masked"),
    ("torch.where({m}, 0.0, float('-inf'))", "[B, T] of float, -inf = masked"),
)
_PAIRWISE = (
    ("{m}", "[T, T] of bool, True = may attend"),
    ("~{m}", "[T, T] of bool, True = masked"),
    ("torch.where({m}, 0.0, float('-inf'))", "[T, T] of float, -inf = masked"),
    ("{m}[None, None]", "[1, 1, T, T] of bool, True = may attend"),
    ("~{m}[None, None]", "[1, 1, T, T] of bool, True = masked"),
    ("{m}[None]", "[1, T, T] of bool, True = may attend"),
    ("~{m}[None]", "[1, T, T] of bool, True = masked"),
)


def padding_forms(mask: str, *, hidden_first: bool) -> Iterator[tuple[str, str]]:
    """Yield the forms of a padding mask and what each is, those of one polarity before those of the other.

    Args:
        mask: source of the mask `[B, T]`, True = may attend.
        hidden_first: whether the convention of the argument's name is True = masked.
    """
    yield from _ordered(_PADDING, mask, hidden_first)


def pairwise_forms(mask: str, *, hidden_first: bool) -> Iterator[tuple[str, str]]:
    """Yield the forms of a pairwise mask `[T, T]` likewise."""
    yield from _ordered(_PAIRWISE, mask, hidden_first)


def _ordered(forms: tuple[tuple[str, str], ...], mask: str, hidden_first: bool) -> Iterator[tuple[str, str]]:
    hiding = [f for f in forms if "masked" in f[1]]
    showing = [f for f in forms if f not in hiding]
    for source, told in hiding + showing if hidden_first else showing + hiding:
        yield source.format(m=mask), told
