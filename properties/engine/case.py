"""One case of one property: draws inputs, calls the subject, judges what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import (
    closed_form_tolerance,
    computes_in_float64,
    half_tolerance_of,
    is_swamped,
    makes_choices,
    rounding_of,
    tolerance_of,
)
from veriformer.properties.bench.noise import least_tolerance
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import non_finite, size_of, why_vacuous, worst_difference
from veriformer.properties.definitions.rounding import GAP, epsilon
from veriformer.properties.engine.calling import Calling
from veriformer.properties.engine.own_rounding import tolerance_at
from veriformer.properties.engine.violations import InfluenceMap, VacuousCheckError, Violation
from veriformer.properties.subject.inputs import has_ordinary_inputs
from veriformer.properties.subject.paths import Path

Cause = Callable[[], str | None]


class Case(Calling):
    """What a check receives: it draws (`Drawing`), calls the subject (`Calling`), and judges what comes back.

    Attributes:
        subject: what is being judged.
        bench: its models and settings.
        choices: label to drawn value, in the order of drawing.
        path: the path that is walked, in words.
    """

    def _on_record(self, kind: str, got: Any, expected: Any = None, unit: Any = 1.0, limit: float = 0.0) -> None:
        self.bench.tally.comparisons += 1
        if self.bench.recorder:
            self.bench.recorder.judge(kind, got, expected, unit, limit)

    def witness(self) -> None:
        """Count that the premise of the property really held here."""
        self.bench.tally.witnesses += 1

    def leave_out(self, what: str) -> None:
        """Say what was not looked at though the property speaks of it, and why; it stands in the report."""
        self.bench.tally.note_unreached(what)

    def tolerance(self, built: Built | None = None, error: float | None = None) -> float:
        """Return the relative tolerance measured for the model called last (or for `built`), to judge an error by."""
        chosen = built or self._built
        if chosen is None:
            return 64 * epsilon(torch.float32)
        own = tolerance_of(self.bench, chosen, error)
        half = self._walking.autocast
        if not half or (error is not None and error <= own):
            return own
        return max(own, half_tolerance_of(self.bench, chosen, getattr(torch, half)))

    def measure(self, what: str, value: float) -> None:
        """Keep the largest value of something measured beside the judgement; it stands in the report."""
        self.bench.tally.measures[what] = max(value, self.bench.tally.measures.get(what, value))

    def say(self, sentence: str) -> None:
        """Tell what was shown, where that is more than that the property holds; it stands in the report."""
        self.bench.tally.told = sentence

    def shifted_bound(self, built: Built, got: Tensor, expected: Tensor) -> float:
        """Return the absolute tolerance for outputs whose positions were shifted; measured where `got` asks for it.

        Angles and tables of positions are made in float32 in most models, whatever their dtype, and round anew at
        every position; so a shift is judged with the tolerance of float32, or the model's own if that is coarser.
        """
        least = least_tolerance(torch.float32) * size_of(expected)
        is_comparable = got.shape == expected.shape and not self.bench.recorder
        if is_comparable and worst_difference(got, expected, least).error <= 1.0:
            return least
        single = self.bench.pool.get(built.config, torch.float32) if self.subject.module is None else built
        return max(tolerance_of(self.bench, built), tolerance_of(self.bench, single)) * size_of(expected)

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
        asks: tuple[str, Any] | None = None,
        in_single: Callable[[], tuple[Tensor, Tensor]] | None = None,
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
            asks: `(fact, value)`: what to declare if a difference is by design; undeclared, one is a question.
            in_single: gives both in float32 where they are made by the same operations on inputs that differ in what
                must not be seen alone: equal to the bit there, they are no less so in half precision, whose rounding
                would hide a leak. Asked where they differ in half precision.

        Raises:
            Violation: they do not.
            VacuousCheckError: the comparison could not have failed.
        """
        self._same_shape(got, expected, what)
        _refuse_vacuous(got, expected, what, constants_allowed=constants_allowed)
        if self._built and _is_coarse(got, self._walking) and makes_choices(self.bench, self._built):
            return  # rounding flips such picks: see `ChoiceWatch`
        unit: float | Tensor = size_of(expected) if bound is None else bound
        worst = worst_difference(got, expected, unit)
        if bound is not None and (worst.error > 1.0 or self.bench.recorder):
            unit = self._at_least(bound, expected)
            worst = worst_difference(got, expected, unit)
        # what a script asks for is what was measured: it may run where another rounding is
        limit = self.tolerance(error=None if self.bench.recorder else worst.error) if bound is None else 1.0
        if in_single is not None and worst.error > 0 and self._leaks_in_half(got, worst.error > limit, in_single):
            asks = asks or ("half_precision", False)
            limit = 0.0
        elif bound is None and limit < worst.error <= GAP.get(got.dtype, 0.0) and self._built and self._called_with:
            limit = max(limit, tolerance_at(self.bench, self._built, *self._called_with))
        self._on_record("close", got, expected, unit, limit)
        self.bench.tally.note(worst.error, limit)
        if worst.error > limit and (not limit or not self._is_swamped(got, worst.error if bound is None else None)):
            scale = bound if isinstance(bound, int | float) else 1.0  # a bound of its own is told as it is
            raise Violation(
                headline=what,
                got=f"{worst.got:.6g}",
                expected=f"{worst.expected:.6g}",
                index=worst.index,
                error=worst.error * scale,
                unit=_words_of(unit, is_derived=bound is not None),
                tolerance=limit * scale,
                path=self.path,
                cause=cause,
                influence=influence,
                asks=asks,
            )

    def _leaks_in_half(self, got: Tensor, is_large: bool, both: Callable[[], tuple[Tensor, Tensor]]) -> bool:
        """Whether two tensors that differ in half precision, within its rounding, are equal to the bit in float32.

        They are made for this alone: of that a script says nothing.
        """
        if not _is_coarse(got, self._walking) or self.subject.fact("half_precision") is False:
            return False
        if self.bench.spares_float64 or (is_large and not self._is_swamped(got, None)):
            return False  # cases in float32 show it there; or it is a failure as it is
        recorder, self.bench.recorder = self.bench.recorder, None
        try:
            return torch.equal(*both())
        except SubjectError:
            return False
        finally:
            self.bench.recorder = recorder

    def _is_left_to_float64(self, got: Tensor) -> bool:
        """Whether weights that were given, not re-drawn to unit gain, are judged in float64 too."""
        is_coarse = _is_coarse(got, self._walking)
        given = self.subject.module is not None and not self.bench.settings.dtypes
        if not given or not (is_coarse or got.dtype == torch.float32):
            return False
        if not self.bench.spares_float64:
            return computes_in_float64(self.bench)
        if is_coarse:  # left to float32
            return True
        self.bench.tally.wants_float64 = computes_in_float64(self.bench)
        return self.bench.tally.wants_float64

    def _is_swamped(self, got: Tensor, error: float | None) -> bool:
        """Whether nothing can be said in this dtype, since the model amplifies rounding: float64 shows the rest.

        Of a large instance it is asked then. What no rounding explains, however much it is amplified, needs no asking.
        """
        if self._built is None or self.bench.settings.dtypes or not has_ordinary_inputs(self.subject.kind):
            return False
        dtype = getattr(torch, self._walking.autocast) if self._walking.autocast else got.dtype
        if dtype == torch.float64 or not dtype.is_floating_point:
            return False
        built = self.bench.pool.get(self._built.config, dtype)
        if not self.bench.spares_float64:
            swamped = is_swamped(self.bench, built)
            self.bench.tally.wants_float64 |= swamped and error is not None  # the same case tells there what it is
            return swamped
        if error is not None and error > rounding_of(self.bench, built):
            return False
        self.bench.tally.wants_float64 |= is_swamped(self.bench, built)
        return self.bench.tally.wants_float64

    def _at_least(self, bound: float | Tensor, expected: Tensor) -> float | Tensor:
        """Return a derived bound, or what is known to be rounded besides where that is more."""
        if self._built is None or not has_ordinary_inputs(self.subject.kind):
            return bound
        known = closed_form_tolerance(self.bench, self._built, autocast=self._walking.autocast)
        floor = known * size_of(expected)
        return bound.clamp(min=floor) if isinstance(bound, Tensor) else max(bound, floor)

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
        _refuse_vacuous(got, expected, what, constants_allowed=True)
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

    def differs(
        self,
        got: Tensor,
        other: Tensor,
        what: str,
        *,
        cause: Cause | None = None,
        asks: tuple[str, Any] | None = None,
    ) -> None:
        """Require that two tensors differ beyond rounding: the other side of a two-sided property.

        In half precision and under autocast one unit in the last place suffices: float32 and float64 show the rest. A
        given model may have weights so small that float32 rounds a difference away: then float64 shows it alone.
        """
        self._same_shape(got, other, what)
        limit = epsilon(got.dtype) if _is_coarse(got, self._walking) else self.tolerance()
        self._on_record("differs", got, other, size_of(other), limit)
        worst = worst_difference(got, other, size_of(other))
        self.bench.tally.note(limit, max(worst.error, 1e-300))
        if not worst.error > limit and not self._is_left_to_float64(got):
            raise Violation(
                headline=what,
                got=f"a difference of {worst.error:.3g}",
                expected=f"a difference above {limit:.3g}",
                index=worst.index,
                path=self.path,
                cause=cause,
                asks=asks,
            )

    def finite(
        self, value: Tensor, what: str, *, cause: Cause | None = None, asks: tuple[str, Any] | None = None
    ) -> None:
        """Require every entry to be finite; `cause` and `asks` as in `close`."""
        self._on_record("finite", value)
        if not bool(value.isfinite().all()):
            got = non_finite(value)
            raise Violation(headline=what, got=got, expected="finite numbers", path=self.path, cause=cause, asks=asks)

    def require(
        self,
        holds: bool | Tensor,
        what: str,
        *,
        got: str = "",
        expected: str = "",
        error: float | Tensor = math.nan,
        unit: str = "",
        tolerance: float = 0.0,
        cause: Cause | None = None,
        influence: Callable[[], InfluenceMap | None] | None = None,
        asks: tuple[str, Any] | None = None,
    ) -> None:
        """Require a condition; `got` and `expected` say in words what it was about.

        Args:
            holds: as a tensor of what the subject gave, so that a script can ask it too; a `bool` is known here alone.
            what: the sentence that a failure opens with.
            got: in words.
            expected: in words.
            error: measured.
            unit: what one unit of it is, in words; "" where it is the difference of what is told.
            tolerance: in the same unit.
            cause: gives the likely cause, measured.
            influence: gives an influence map.
            asks: `(fact, value)`: what to declare if that is by design; undeclared, it is a question.

        Raises:
            Violation: it does not hold.
        """
        self._on_record("require", holds if isinstance(holds, Tensor) else None)
        if not bool(holds):
            raise Violation(
                headline=what,
                got=got,
                expected=expected,
                error=float(error),
                unit=unit,
                tolerance=tolerance,
                path=self.path,
                cause=cause,
                influence=influence,
                asks=asks,
            )

    def equal(
        self,
        value: Any,
        wanted: Any,
        what: str,
        *,
        got: str = "",
        expected: str = "",
        error: float = math.nan,
        cause: Cause | None = None,
        asks: tuple[str, Any] | None = None,
    ) -> None:
        """Require equality of what is no tensor: a text, a list of tokens, a count.

        Args:
            value: what the subject gave, or `apply` made of it.
            wanted: what it must be.
            what: the sentence that a failure opens with.
            got: in words; the value itself if left out.
            expected: in words; the wanted value itself if left out.
            error: measured.
            cause: gives the likely cause, measured.
            asks: `(fact, value)`: what to declare if that is by design; undeclared, it is a question.

        Raises:
            Violation: they differ.
        """
        self._on_record("equal", value, wanted)
        if value != wanted:
            raise Violation(
                headline=what,
                got=got or repr(value)[:120],
                expected=expected or repr(wanted)[:120],
                error=error,
                path=self.path,
                cause=cause,
                asks=asks,
            )

    def _same_shape(self, got: Tensor, expected: Tensor, what: str) -> None:
        if got.shape != expected.shape:
            raise SubjectError(
                f"{what}: compared shapes {list(got.shape)} and {list(expected.shape)}; the subject's output "
                "does not have the shape of its kind"
            )


def _refuse_vacuous(got: Tensor, expected: Tensor, what: str, *, constants_allowed: bool) -> None:
    """Raise if the comparison cannot fail.

    Raises:
        VacuousCheckError: no elements, shared storage, or constants on both sides.
    """
    if why := why_vacuous(got, expected, constants_allowed=constants_allowed):
        raise VacuousCheckError(f"{what}: {why}")


def _words_of(unit: float | Tensor, *, is_derived: bool) -> str:
    """Return what an error is counted in; "" where it is told as the difference itself."""
    if isinstance(unit, Tensor):
        return "what rounding may do to that entry"
    return "" if is_derived or unit == 1 else f"{unit:.3g}, the root mean square of what is expected"


def _is_coarse(value: Tensor, path: Path) -> bool:
    return bool(path.autocast) or value.dtype in (torch.bfloat16, torch.float16)
