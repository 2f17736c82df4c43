"""One case of one property: draws inputs, calls the subject, judges what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from veriformer.properties.compare import epsilon, non_finite, refuse_vacuous, size_of, worst_difference
from veriformer.properties.draws import Draws
from veriformer.properties.forms import forms_of
from veriformer.properties.layouts import laid_out
from veriformer.properties.palette import colliding_lengths
from veriformer.properties.paths import COMPILED_LENGTH, DEFAULT, GRAD_MODES, Path, paths_of, walking
from veriformer.properties.pool import Built
from veriformer.properties.subject import DrawnConfig, Subject
from veriformer.properties.violations import InfluenceMap, NotSpokenOfError, SubjectError, Violation
from veriformer.properties.workbench import Workbench

Cause = Callable[[], str | None]


class Case:
    """What a check receives. Every choice is labelled and recorded, so that the case can be replayed.

    Attributes:
        subject: what is being judged.
        bench: its models and settings.
        choices: label to drawn value, in the order of drawing.
    """

    def __init__(self, bench: Workbench, draws: Draws) -> None:
        self.bench = bench
        self.subject: Subject = bench.subject
        self.choices: dict[str, Any] = {}
        self.path = ""
        self._draws = draws
        self._generator: torch.Generator | None = None
        self._config: DrawnConfig | None = None
        self._built: Built | None = None
        self._walking = DEFAULT
        self._refused = False

    # drawing ---------------------------------------------------------------------------------------------------

    def _record(self, label: str, draw: Callable[[str], Any]) -> Any:
        unique, copies = label, 1
        while unique in self.choices:
            copies += 1
            unique = f"{label}#{copies}"
        self.choices[unique] = value = draw(unique)
        return value

    def integer(self, label: str, low: int, high: int) -> int:
        """Draw an integer in [low, high]; shrinks towards `low`."""
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
        limit = min(self.subject.fact("max_len", 64), self.config().max_len)
        colliding = colliding_lengths(self.subject, self.config())
        options = sorted({n for n in (*range(low, high + 1), *colliding) if low <= n <= limit})
        return int(self.choice(label, options or [low]))

    def config(self) -> DrawnConfig:
        """Draw, once a case, the sizes of the model."""
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
        """Draw one of the dtypes in which the subject is judged."""
        names = [str(d).removeprefix("torch.") for d in self.bench.dtypes()]
        name = self.choice("dtype", names) if len(names) > 1 else names[0]
        return getattr(torch, name)

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

    # tensors ---------------------------------------------------------------------------------------------------

    @property
    def generator(self) -> torch.Generator:
        """The private generator of this case, seeded by the drawn `seed`."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.integer("seed", 0, 2**16 - 1))
        return self._generator

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return unit normal values times `scale`, on the device; the same values in every dtype, up to rounding."""
        value = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return value.to(self.bench.device, dtype)

    def tokens(self, *shape: int) -> Tensor:
        """Return uniform token ids of the drawn vocabulary, int64, on the device."""
        size = self.config().vocab_size
        return torch.randint(0, size, shape, generator=self.generator).to(self.bench.device)

    def other_tokens(self, tokens: Tensor) -> Tensor:
        """Return token ids that differ from `tokens` at every place."""
        size = self.config().vocab_size
        step = torch.randint(1, size, tuple(tokens.shape), generator=self.generator).to(tokens.device)
        return (tokens + step) % size

    # the subject -----------------------------------------------------------------------------------------------

    def built(self, *, dtype: torch.dtype | None = None, raw: bool = False, fresh: bool = False) -> Built:
        """Return the model for the drawn sizes.

        Args:
            dtype: drawn if None.
            raw: with the weights of its own initialisation instead of re-drawn ones.
            fresh: one of its own, free to be altered; else it is shared and must be left as it is.
        """
        config = self.config()
        chosen = dtype or self.dtype()
        maker = self.bench.pool.fresh if fresh else self.bench.pool.get
        self._built = maker(config, chosen, raw=raw)
        if self.bench.recorder:
            self.bench.recorder.know_model(self._built)
        return self._built

    def _on_record(self, kind: str, got: Any, expected: Any = None, unit: Any = 1.0, limit: float = 0.0) -> None:
        if self.bench.recorder:
            self.bench.recorder.judge(kind, got, expected, unit, limit)

    def call(self, built: Built, *args: Any, path: Path = DEFAULT, **kwargs: Any) -> Tensor:
        """Call the subject's forward on a path; None-valued keywords are not passed.

        Raises:
            SubjectError: it raised, or returned no tensor.
        """
        given = {k: v for k, v in kwargs.items() if v is not None}
        self._built = built
        for form in forms_of(self.subject, args, given, self._config):
            self.bench.tally.paths[form] = self.bench.tally.paths.get(form, 0) + 1
        is_extra = path is self._walking and (path.layout or path.autocast or path.compiled)
        try:
            return self._call_on(path, built, args, given)
        except SubjectError:
            if not is_extra:
                raise
            self._refused = True  # judged by numerics.strided, .autocast and .compile; not again by every property
            return self._call_on(Path(mask=path.mask, mode=path.mode), built, args, given)

    def _call_on(self, path: Path, built: Built, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        if path.layout:
            args = tuple(laid_out(x, path.layout) if isinstance(x, Tensor) else x for x in args)
        if self.bench.recorder:
            self.bench.recorder.path = path
        with walking(path, self.subject, built.module):
            return self.bench.forward(built, *args, compiled=path.compiled, **given)

    def paths(
        self,
        *,
        masks: Sequence[str] = ("none", "ones"),
        modes: Sequence[str] = GRAD_MODES,
        training: bool = False,
        compiled: bool = False,
    ) -> Iterator[Path]:
        """Go through the paths that the subject offers; each is counted as walked.

        Args:
            masks: forms of mask that the property can use.
            modes: gradient modes that it can use.
            training: whether it also holds in train mode, where the model called last is deterministic there.
            compiled: whether to walk torch.compile too: at one size, since every new form of input is compiled anew.
        """
        if training:
            training = self._built is not None and self.bench.is_deterministic_in_training(self._built)
        single = self._built is not None and self._built.dtype == torch.float32
        autocast = single and isinstance(self._built.module, torch.nn.Module) if self._built else False
        at_one_size = self._config == self.bench.configs[0] and self.choices.get("T") == COMPILED_LENGTH
        compiles = compiled and autocast and at_one_size and self.bench.compiles
        for path in paths_of(
            self.subject, masks=masks, modes=modes, training=training, autocast=autocast, compiled=compiles
        ):
            self.path, self._walking, self._refused = str(path), path, False
            yield path
            walked = f"{self.path} (refused)" if self._refused else self.path
            self.bench.tally.paths[walked] = self.bench.tally.paths.get(walked, 0) + 1
        self.path, self._walking = "", DEFAULT

    def ask(self, part: str, *args: Any, path: Path = DEFAULT, built: Built | None = None, **kwargs: Any) -> Any:
        """Call another callable of the subject (`weights`, `decode`, ...); with `built`, its model comes first.

        Raises:
            SubjectError: it raised, or is not there.
        """
        function = getattr(self.subject, part)
        args = args if built is None else (built.module, *args)
        if self.bench.recorder:
            self.bench.recorder.path = path
        return self.bench.call(function, *args, **kwargs)

    # judging ---------------------------------------------------------------------------------------------------

    def witness(self) -> None:
        """Count that the premise of the property really held here."""
        self.bench.tally.witnesses += 1

    def tolerance(self, built: Built | None = None) -> float:
        """Return the relative tolerance measured for the model called last (or for `built`)."""
        chosen = built or self._built
        if chosen is None:
            return 64 * epsilon(torch.float32)
        own = self.bench.tolerance(chosen)
        return max(own, self.bench.half_tolerance(chosen)) if self._walking.autocast else own

    def measure(self, what: str, value: float) -> None:
        """Keep the largest value of something measured beside the judgement; it stands in the report."""
        self.bench.tally.measures[what] = max(value, self.bench.tally.measures.get(what, value))

    def shifted_bound(self, built: Built, expected: Tensor) -> float:
        """Return the absolute tolerance for outputs whose positions were shifted.

        Angles and tables of positions are made in float32 in most models, whatever their dtype, and round anew at
        every position; so a shift is judged with the tolerance of float32, or the model's own if that is coarser.
        """
        single = self.bench.pool.get(built.config, torch.float32) if self.subject.module is None else built
        return max(self.bench.tolerance(built), self.bench.tolerance(single)) * size_of(expected)

    def close(
        self,
        got: Tensor,
        expected: Tensor,
        what: str,
        *,
        bound: float | Tensor | None = None,
        constants_allowed: bool = False,
        cause: Cause | None = None,
        influence: Callable[[], InfluenceMap | None] | None = None,
    ) -> None:
        """Require two tensors to agree up to rounding.

        Args:
            got: what the subject gave.
            expected: what the property requires; same shape.
            what: the sentence that a failure opens with ("the output changed when ...").
            bound: derived absolute bound (a number, or one an entry); None: the tolerance measured
                on the subject times the root mean square of `expected`.
            constants_allowed: the claim may be about constants (a row of zeros).
            cause: gives the likely cause, measured; asked once, on the smallest failing case.
            influence: gives an influence map; asked likewise.

        Raises:
            Violation: they do not.
            VacuousCheckError: the comparison could not have failed.
        """
        self._same_shape(got, expected, what)
        refuse_vacuous(got, expected, what, constants_allowed=constants_allowed)
        if self._built and _is_coarse(got, self._walking) and self.bench.makes_choices(self._built):
            return  # rounding flips such picks: see `ChoiceWatch`
        unit: float | Tensor = size_of(expected) if bound is None else bound
        limit = self.tolerance() if bound is None else 1.0
        self._on_record("close", got, expected, unit, limit)
        worst = worst_difference(got, expected, unit)
        self.bench.tally.note(worst.error, limit)
        if worst.error > limit:
            scale = bound if isinstance(bound, int | float) else 1.0  # a bound of its own is told as it is
            raise Violation(
                headline=what,
                got=f"{worst.got:.6g}",
                expected=f"{worst.expected:.6g}",
                index=worst.index,
                error=worst.error * scale,
                tolerance=limit * scale,
                path=self.path,
                cause=cause,
                influence=influence,
            )

    def exact(
        self,
        got: Tensor,
        expected: Tensor,
        what: str,
        *,
        cause: Cause | None = None,
        influence: Callable[[], InfluenceMap | None] | None = None,
    ) -> None:
        """Require two tensors to be equal to the bit (an exact claim: a zero gradient, a masked weight)."""
        self._same_shape(got, expected, what)
        refuse_vacuous(got, expected, what, constants_allowed=True)
        self._on_record("exact", got, expected)
        worst = worst_difference(got, expected)
        self.bench.tally.note(worst.error, 0.0)
        if worst.error > 0:
            raise Violation(
                headline=what,
                got=f"{worst.got:.6g}",
                expected=f"{worst.expected:.6g}",
                index=worst.index,
                error=worst.error,
                tolerance=0.0,
                path=self.path,
                cause=cause,
                influence=influence,
            )

    def differs(self, got: Tensor, other: Tensor, what: str, *, cause: Cause | None = None) -> None:
        """Require that two tensors differ beyond rounding: the other side of a two-sided property.

        In half precision and under autocast one unit in the last place suffices: float32 and float64 show the rest.
        """
        self._same_shape(got, other, what)
        limit = epsilon(got.dtype) if _is_coarse(got, self._walking) else self.tolerance()
        self._on_record("differs", got, other, size_of(other), limit)
        worst = worst_difference(got, other, size_of(other))
        self.bench.tally.note(limit, max(worst.error, 1e-300))
        if not worst.error > limit:
            raise Violation(
                headline=what,
                got=f"a difference of {worst.error:.3g}",
                expected=f"a difference above {limit:.3g}",
                index=worst.index,
                path=self.path,
                cause=cause,
            )

    def finite(self, value: Tensor, what: str) -> None:
        """Require every entry to be finite."""
        self._on_record("finite", value)
        if not bool(value.isfinite().all()):
            raise Violation(headline=what, got=non_finite(value), expected="finite numbers", path=self.path)

    def require(
        self,
        holds: bool,
        what: str,
        *,
        got: str = "",
        expected: str = "",
        error: float = math.nan,
        tolerance: float = 0.0,
        cause: Cause | None = None,
        influence: Callable[[], InfluenceMap | None] | None = None,
    ) -> None:
        """Require a condition; `got` and `expected` say in words what it was about."""
        self._on_record("require", None)
        if not holds:
            raise Violation(
                headline=what,
                got=got,
                expected=expected,
                error=error,
                tolerance=tolerance,
                path=self.path,
                cause=cause,
                influence=influence,
            )

    def _same_shape(self, got: Tensor, expected: Tensor, what: str) -> None:
        if got.shape != expected.shape:
            raise SubjectError(
                f"{what}: compared shapes {list(got.shape)} and {list(expected.shape)}; the subject's output "
                "does not have the shape of its kind"
            )


def _is_coarse(value: Tensor, path: Path) -> bool:
    return path.autocast or value.dtype in (torch.bfloat16, torch.float16)
