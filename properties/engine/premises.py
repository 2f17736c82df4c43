"""Reasons why a property does not apply, as functions of the subject: for `holds(..., unless=...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veriformer.properties.subject.subject import Subject

Premise = Callable[[Subject], str | None]


def needs_fact(name: str, *values: Any) -> Premise:
    """Apply only where the fact `name` has one of `values` (any value but None if none is given)."""

    def reason(subject: Subject) -> str | None:
        value = subject.fact(name)
        if value is None:
            return f"the fact {name!r} is neither declared nor known"
        if values and value not in values:
            return f"speaks of {name} = {' or '.join(map(repr, values))}; here it is {value!r}"
        return None

    reason.rests_on = name  # type: ignore[attr-defined]
    return reason


def excludes_fact(name: str, *values: Any) -> Premise:
    """Do not apply where the fact `name` has one of `values` (any truthy value if none is given)."""

    def reason(subject: Subject) -> str | None:
        value = subject.fact(name)
        excluded = value in values if values else bool(value)
        return f"does not hold with {name} = {value!r}, which is declared" if excluded else None

    return reason


def sees_every_key(subject: Subject) -> str | None:
    """Apply not to kernels that hide keys of their own accord, whatever they are given; see attention.tiles."""
    hides = next((name for name in ("causal", "window") if subject.fact(name)), None)
    if subject.kind != "attention" or hides is None:
        return None
    return f"it hides keys of its own accord ({hides} is declared): attention.tiles holds it to the definition"


def needs_mask(form: str) -> Premise:
    """Apply only to subjects that take masks of this form ("padding", "pairwise", "additive")."""

    def reason(subject: Subject) -> str | None:
        return None if subject.takes_mask(form) else f"the subject takes no {form} mask"

    return reason


def needs_part(name: str) -> Premise:
    """Apply only where the subject offers the callable `name` (weights, cache, projections, backends, build)."""

    def reason(subject: Subject) -> str | None:
        return None if getattr(subject, name) else f"the subject offers no {name}"

    return reason


def needs_module(subject: Subject) -> str | None:
    """Apply only to subjects that are models rather than plain functions."""
    return "the subject is a plain function without parameters" if subject.is_functional else None


def is_one_network(subject: Subject) -> str | None:
    """Apply only to feed-forward networks that are no mixture of experts."""
    return None if subject.router is None else "its router mixes experts, of which each has maps of its own"
