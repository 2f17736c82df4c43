"""Where the choices of a check come from: Hypothesis, a private random generator, or a recorded case.

Every choice is a plain number, word or list, labelled; tensors are made from a drawn seed. So a case is a
small JSON object that can be replayed without Hypothesis, and reading one executes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hypothesis import reject
from hypothesis import strategies as st


class RejectedError(Exception):
    """The drawn case does not meet the premise of the property; it is not counted."""


class Draws(Protocol):
    """A source of labelled choices."""

    def integer(self, label: str, low: int, high: int) -> int:
        """Draw an integer in [low, high]."""

    def choice(self, label: str, options: Sequence[Any]) -> Any:
        """Draw one of the options; earlier ones count as simpler."""

    def permutation(self, label: str, size: int) -> list[int]:
        """Draw an ordering of range(size)."""

    def text(self, label: str, alphabet: str, longest: int) -> str:
        """Draw a text of at most `longest` of these characters; any at all if `alphabet` is empty."""

    def reject(self, reason: str) -> None:
        """Give the case up."""

    def says(self, label: str) -> bool:
        """Whether this choice is made beforehand: fixed, or recorded."""


_ANY = st.characters(exclude_categories=["Cs"])  # halves of surrogate pairs are no characters


class HypothesisDraws:
    """Choices drawn, and shrunk, by Hypothesis."""

    def __init__(self, data: st.DataObject, fixed: Mapping[str, Any] | None = None) -> None:
        # below `data.draw`, which prints every choice for a reader: ours are told by the case
        below = getattr(data, "conjecture_data", None)
        self._draw = below.draw if below is not None else data.draw
        self._number = getattr(below, "draw_integer", None)
        self._fixed = dict(fixed or {})

    def says(self, label: str) -> bool:  # noqa: D102
        return label in self._fixed

    def integer(self, label: str, low: int, high: int) -> int:  # noqa: D102
        if label in self._fixed:
            if not low <= self._fixed[label] <= high:
                reject()
            return int(self._fixed[label])
        return self._between(low, high)

    def _between(self, low: int, high: int) -> int:
        """Draw an integer in [low, high] below `st.integers`, whose own work takes as long as a small case."""
        return int(self._number(low, high) if self._number else self._draw(st.integers(low, high)))

    def choice(self, label: str, options: Sequence[Any]) -> Any:  # noqa: D102
        if label in self._fixed:
            if self._fixed[label] not in options:
                reject()
            return self._fixed[label]
        return options[self._between(0, len(options) - 1)]

    def permutation(self, label: str, size: int) -> list[int]:  # noqa: D102
        return list(self._draw(st.permutations(range(size))))

    def text(self, label: str, alphabet: str, longest: int) -> str:  # noqa: D102
        if label in self._fixed:
            return str(self._fixed[label])
        return self._draw(st.text(st.sampled_from(alphabet) if alphabet else _ANY, max_size=longest))

    def reject(self, reason: str) -> None:  # noqa: D102
        reject()


class RandomDraws:
    """Choices from a private generator, some of them fixed: how a sweep covers sizes one by one."""

    def __init__(self, seed: int, fixed: Mapping[str, Any]) -> None:
        self._random = random.Random(seed)
        self._fixed = dict(fixed)

    def says(self, label: str) -> bool:  # noqa: D102
        return label in self._fixed

    def integer(self, label: str, low: int, high: int) -> int:  # noqa: D102
        drawn = self._random.randint(low, high)
        value = int(self._fixed.get(label, drawn))
        if not low <= value <= high:
            raise RejectedError(f"{label}={value} lies outside [{low}, {high}]")
        return value

    def choice(self, label: str, options: Sequence[Any]) -> Any:  # noqa: D102
        value = self._fixed.get(label, self._random.choice(options))
        if value not in options:
            raise RejectedError(f"{label}={value!r} is none of {list(options)}")
        return value

    def permutation(self, label: str, size: int) -> list[int]:  # noqa: D102
        order = list(range(size))
        self._random.shuffle(order)
        return order

    def text(self, label: str, alphabet: str, longest: int) -> str:  # noqa: D102
        size = self._random.randint(0, longest)
        if alphabet:
            return str(self._fixed.get(label, "".join(self._random.choices(alphabet, k=size))))
        codes = [code for _ in range(size) if not 0xD800 <= (code := self._random.randrange(0x110000)) < 0xE000]
        return str(self._fixed.get(label, "".join(map(chr, codes))))

    def reject(self, reason: str) -> None:  # noqa: D102
        raise RejectedError(reason)


class ReplayError(ValueError):
    """A recorded case does not fit the property any more; says which choice and why."""


class RecordedDraws:
    """The choices of a recorded case, each checked against what the property allows.

    A case is recorded up to its violation. A subject that does not violate it any more goes on from there, and what it
    asks for then is drawn from a seed.
    """

    def __init__(self, recorded: Mapping[str, Any], seed: int = 0) -> None:
        self._recorded = recorded
        self._unused = set(recorded)
        self._beyond = RandomDraws(seed, {})

    def says(self, label: str) -> bool:  # noqa: D102
        return label in self._recorded

    def _is_over(self, label: str) -> bool:
        """Whether the record ends before this choice."""
        if label in self._recorded:
            return False
        if self._unused:
            raise ReplayError(f"the recorded case has no choice {label!r}; it was edited or made by another version")
        return True

    def _get(self, label: str) -> Any:
        self._unused.discard(label)
        return self._recorded[label]

    def integer(self, label: str, low: int, high: int) -> int:  # noqa: D102
        if self._is_over(label):
            return self._beyond.integer(label, low, high)
        value = self._get(label)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ReplayError(f"the recorded {label} is {value!r}; it must be an integer in [{low}, {high}]")
        return value

    def choice(self, label: str, options: Sequence[Any]) -> Any:  # noqa: D102
        if self._is_over(label):
            return self._beyond.choice(label, options)
        value = self._get(label)
        if value not in options:
            raise ReplayError(f"the recorded {label} is {value!r}; it must be one of {list(options)}")
        return value

    def permutation(self, label: str, size: int) -> list[int]:  # noqa: D102
        if self._is_over(label):
            return self._beyond.permutation(label, size)
        value = self._get(label)
        if not isinstance(value, list) or sorted(value) != list(range(size)):
            raise ReplayError(f"the recorded {label} is {value!r}; it must order the numbers 0 to {size - 1}")
        return list(value)

    def text(self, label: str, alphabet: str, longest: int) -> str:  # noqa: D102
        if self._is_over(label):
            return self._beyond.text(label, alphabet, longest)
        value = self._get(label)
        allowed = isinstance(value, str) and len(value) <= longest and (not alphabet or set(value) <= set(alphabet))
        if not allowed:
            of = f" of the characters {alphabet!r}" if alphabet else ""
            raise ReplayError(
                f"the recorded {label} is {value!r}; it must be a text of at most {longest} characters{of}"
            )
        return str(value)

    def reject(self, reason: str) -> None:  # noqa: D102
        raise RejectedError(reason)
