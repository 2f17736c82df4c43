"""What a case is drawn from: labelled choices, recorded for a replay, and tensors of a private generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from veriformer.properties.bench.measured import is_swamped, judged_dtypes
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.rounding import HALVES, name_of
from veriformer.properties.engine.draws import Draws, RandomDraws
from veriformer.properties.engine.searching.costs import effort_of
from veriformer.properties.engine.violations import NotSpokenOfError
from veriformer.properties.subject.inputs import has_ordinary_inputs
from veriformer.properties.subject.palette import CROWD, CROWDED, LONG, MOST_SAMPLES, colliding_lengths
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_LARGE = 100
"""Of so many token ids a case of a few positions would hardly ever draw the last one."""

_MANY = 2048
"""Numbers that are drawn in float64 at most: those of all cases at small sizes."""


class Drawing:
    """The choices and inputs of one case; see `Case`."""

    def __init__(self, bench: Workbench, draws: Draws) -> None:
        self.bench = bench
        self.subject: Subject = bench.subject
        self.choices: dict[str, Any] = {}
        self._draws = draws
        self._generator: torch.Generator | None = None
        self._config: DrawnConfig | None = None

    @property
    def reaches(self) -> bool:
        """Whether this case is one beyond the small sizes; see `reaching`."""
        return self._draws.says("reach") or "reach" in self.choices

    def go_on(self) -> None:
        """Draw at random from now on: the search is over, and what explains its case may need more than it drew."""
        self._draws = RandomDraws(0, {})

    def _record(self, label: str, draw: Callable[[str], Any]) -> Any:
        unique, copies = label, 1
        while unique in self.choices:
            copies += 1
            unique = f"{label}#{copies}"
        self.choices[unique] = value = draw(unique)
        return value

    def integer(self, label: str, low: int, high: int) -> int:
        """Draw an integer in [low, high]; shrinks towards `low`. Lengths begin where the subject's do."""
        if label in ("T", "S"):
            low, high = self._lengths(low, high)
        return int(self._record(label, lambda unique: self._draws.integer(unique, low, high)))

    def choice(self, label: str, options: Sequence[Any]) -> Any:
        """Draw one of the options (numbers, words, booleans, None); shrinks towards the first."""
        return self._record(label, lambda unique: self._draws.choice(unique, options))

    def flag(self, label: str) -> bool:
        """Draw False or True; shrinks towards False."""
        return bool(self.choice(label, (False, True)))

    def permutation(self, label: str, size: int) -> list[int]:
        """Draw an ordering of range(size); shrinks towards the identity."""
        return list(self._record(label, lambda unique: self._draws.permutation(unique, size)))

    def text(self, label: str, alphabet: str = "", longest: int = 20) -> str:
        """Draw a text of these characters (any of Unicode if empty); shrinks towards short ones of early characters."""
        return str(self._record(label, lambda unique: self._draws.text(unique, alphabet, longest)))

    def length(self, label: str = "T", low: int = 1, high: int = 9) -> int:
        """Draw a sequence length: low..high, or one that collides with a size of the model (heads, window, max_len)."""
        config = self.config()
        low, high = self._lengths(low, high)
        if self.reaches:
            longest = min(self.subject.fact("max_len", config.max_len), config.max_len)
            return int(self.choice(label, range(low, longest + 1)))
        limit = min(self.subject.fact("max_len", 64), config.max_len)
        colliding = colliding_lengths(self.subject, self.config())
        longest = self.longest_affordable(limit)
        options = sorted({*range(low, high + 1), *(n for n in colliding if n <= longest)})
        options = [n for n in options if low <= n <= limit]
        return int(self.choice(label, options or [low]))

    def fitting(self, length: int) -> int:
        """Return a length that needs no drawing, or the subject's shortest or longest where it takes none such."""
        longest = self.subject.longest
        return max(self.subject.shortest, length if longest is None else min(length, longest))

    def _lengths(self, low: int, high: int) -> tuple[int, int]:
        """Return the ends of a range of lengths moved to where the subject's sequences begin and end."""
        over = max(0, self.subject.shortest - low)
        longest = self.subject.longest
        if longest is not None and longest < low + over:
            self.reject(f"it is declared to take sequences of {longest} at most, and {low + over} are needed")
        return low + over, high + over if longest is None else min(high + over, longest)

    def longest_affordable(self, limit: int) -> int:
        """Return the longest sequence of ordinary cases, at most `limit`; of a large instance its cost decides."""
        return min(limit, effort_of(self.bench).tokens or limit)

    def batch(self, low: int = 1, high: int = 3) -> int:
        """Draw a number of samples, low..high: up to `MOST_SAMPLES` of a wide model, the fewest of a long sequence.

        Up to `CROWD` where the case is one of many samples.
        """
        self.config()
        if self.reaches:
            most = CROWD if self.choices.get("reach") == CROWDED else MOST_SAMPLES
            high = low if self.choices.get("reach") == LONG else max(high, most)
        return self.integer("B", low, high) if low < high else low

    def config(self) -> DrawnConfig:
        """Draw, once a case, the sizes of the model."""
        if self._config is None and self.reaches:
            reaching = self.bench.pool.reaching
            self._config = reaching[self.choice("reach", tuple(reaching))]
        if self._config is None:
            configs = self.bench.configs
            index = self.integer("config", 0, len(configs) - 1) if len(configs) > 1 else 0
            self._config = configs[index]
        return self._config

    @property
    def sizes(self) -> str:
        """The drawn sizes in words; empty if none were drawn."""
        return "" if self._config is None else str(self._config)

    def dtype(self) -> torch.dtype:
        """Return the dtype that is fixed, or draw one of those to judge in; seldom one whose rounding swamps all."""
        names = [name_of(d) for d in judged_dtypes(self.bench)]
        if self._draws.says("dtype"):  # enumerated, recorded, or made for this case alone
            spared = ("float32", "float64") if self.bench.spares_float64 else ()
            names = list(dict.fromkeys([*names, *HALVES, *spared]))
        elif len(names) > 1 and self._draws_wide():
            names = [*names[1:] * 4, names[0]]
        name = self.choice("dtype", names) if len(names) > 1 else names[0]
        return getattr(torch, name)

    @property
    def is_in_half(self) -> bool:
        """Whether this case is one in half precision, of a subject that is judged in wider dtypes."""
        return self.choices.get("dtype") in HALVES and self.choices["dtype"] not in map(
            name_of, judged_dtypes(self.bench)
        )

    def loudness(self, *options: float) -> float:
        """Draw how many times larger the inputs are that must not be seen; the largest in bfloat16, none in float16.

        A weight that is only small shows by them where an entry has eight bits; products of such overflow float16.
        """
        if self.is_in_half:
            return max(options) if self.choices["dtype"] == "bfloat16" else 1.0
        return options[self.flag("loud")] if len(options) == 2 else float(self.choice("loud", options))

    def _draws_wide(self) -> bool:
        """Whether the first dtype, of two, is one in which nothing but finite numbers and exact claims is judged."""
        if self.bench.settings.dtypes or not has_ordinary_inputs(self.subject.kind):
            return False
        return is_swamped(self.bench, self.bench.pool.get(self.config(), judged_dtypes(self.bench)[0]))

    def reject(self, reason: str) -> None:
        """Give this case up: it does not meet the premise."""
        self.bench.tally.given_up.add(reason)
        self._draws.reject(reason)

    def does_not_apply(self, reason: str) -> NoReturn:
        """Stop: the property does not speak of this subject, as its built model shows.

        Raises:
            NotSpokenOfError: always.
        """
        raise NotSpokenOfError(reason)

    @property
    def generator(self) -> torch.Generator:
        """The private generator of this case, seeded by the drawn `seed`."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.integer("seed", 0, 2**16 - 1))
        return self._generator

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return unit normal values times `scale`, on the device; the same values in every dtype, up to rounding.

        Many are drawn in float32, in a fifth of the time.
        """
        drawn = torch.float64 if math.prod(shape) <= _MANY else torch.float32
        value = torch.randn(shape, generator=self.generator, dtype=drawn)
        value = value if scale == 1.0 else value * scale  # a script has a line for each step
        return value.to(dtype) if torch.device(self.bench.device).type == "cpu" else value.to(self.bench.device, dtype)

    def tokens(self, *shape: int, vocabulary: int = 0) -> Tensor:
        """Return uniform token ids of a vocabulary, int64, on the device: of the drawn one or of a given size.

        Of a large one both ends are among them.
        """
        size = vocabulary or self.config().vocab_size
        ids = torch.randint(0, size, shape, generator=self.generator)
        if size >= _LARGE and ids.numel() > 1:
            ids.view(-1)[torch.randperm(ids.numel(), generator=self.generator)[:2]] = torch.tensor([0, size - 1])
        return ids.to(self.bench.device)

    def other_tokens(self, tokens: Tensor, vocabulary: int = 0) -> Tensor:
        """Return token ids that differ from `tokens` at every place, of the same vocabulary; see `tokens`."""
        size = vocabulary or self.config().vocab_size
        step = torch.randint(1, size, tuple(tokens.shape), generator=self.generator).to(tokens.device)
        return (tokens + step) % size
