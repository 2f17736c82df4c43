"""Which ways of calling a subject were walked in a run, and why others were not: a path never walked is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from veriformer.properties.bench.compiling import why_not_compiled
from veriformer.properties.engine.stream import SEQUENCES
from veriformer.properties.subject.forms import TWO_SEQUENCES
from veriformer.properties.subject.subject import Subject


def _mask(form: str) -> Callable[[Subject], str | None]:
    return lambda s: None if s.takes_mask(form) else f"it takes no {form} mask"


def _part(name: str) -> Callable[[Subject], str | None]:
    return lambda s: None if getattr(s, name) is not None else f"it offers no {name}"


def _always(subject: Subject) -> str | None:
    return None


def _module(subject: Subject) -> str | None:
    return "it is a plain function" if subject.is_functional else None


def _built(subject: Subject) -> str | None:
    return "it is a ready-made instance" if subject.build is None else None


def _compiled(subject: Subject) -> str | None:
    return why_not_compiled(subject) or "torch.compile is costly: profile thorough"


_FORMS: Mapping[str, Callable[[Subject], str | None]] = {
    "mask=ones": _mask("padding"),
    "mask=padded": _mask("padding"),
    "mask=pairwise": _mask("pairwise"),
    "mask=additive": _mask("additive"),
    "mode=no_grad": _always,
    "mode=inference": _always,
    "train": _module,
    "strided": _always,
    "autocast": _module,
    "compiled": _compiled,
    "B=1": _always,
    "T=1": _always,
    "T_q != T_k": lambda s: None if s.kind in TWO_SEQUENCES else "it has one sequence",
    "dropout > 0 in eval": _built,
    "weights": _part("weights"),
    "cache": _part("cache"),
    "embed": _part("embed"),
}
"""Every form of path, with the reason why a subject does not offer it."""


def never_walked(subject: Subject, walked: Iterable[str]) -> dict[str, str]:
    """Return the forms of path that no property walked, each with the reason; "" where there is none but the run.

    Args:
        subject: its facts resolved.
        walked: names of the paths that results report.
    """
    if subject.kind not in (*SEQUENCES, "attention"):
        return {}
    seen = {word for path in walked if "refused" not in path for word in (path, *path.split())}
    missing = {form: why(subject) or "" for form, why in _FORMS.items() if form not in seen}
    missing |= {f"backend={name}": "" for name in subject.backends if f"backend={name}" not in seen}
    return missing
