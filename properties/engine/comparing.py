"""Comparisons that can fail: refuses those that cannot."""

from __future__ import annotations

from torch import Tensor

from veriformer.properties.engine.violations import VacuousCheckError


def refuse_vacuous(got: Tensor, expected: Tensor, what: str, *, constants_allowed: bool) -> None:
    """Raise if the comparison cannot fail.

    Raises:
        VacuousCheckError: no elements, shared storage, or constants on both sides.
    """
    if got.numel() == 0:
        raise VacuousCheckError(f"{what}: nothing to compare (shape {list(got.shape)})")
    if got.data_ptr() == expected.data_ptr() and got.data_ptr() != 0 and got.stride() == expected.stride():
        raise VacuousCheckError(f"{what}: a tensor is compared with itself")
    if constants_allowed or got.numel() < 3:
        return
    if bool((got == got.flatten()[0]).all()) and bool((expected == expected.flatten()[0]).all()):
        raise VacuousCheckError(f"{what}: both sides are the same constant everywhere, which no fault would disturb")
