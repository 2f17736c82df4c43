"""What a subject claims to reach: sizes that it declares, that an instance has, that a domain ends with."""

from __future__ import annotations

from veriformer.properties.subject.subject import Subject

SIZES = {"max_len": "T", "d_model": "d_model", "num_heads": "num_heads", "num_layers": "num_layers"}
"""Sizes that a claim can be about, and how a report of what was reached calls them."""


def claims_of(subject: Subject) -> dict[str, int]:
    """Return the largest sizes that a subject claims, by the name in a report; none that it says nothing of.

    >>> claims_of(Subject(kind="decoder", build=print, declares={"max_len": 512}, domain={"d_model": (64, 128)}))
    {'T': 512, 'd_model': 128}
    """
    config = subject.config if subject.build is None else None
    found = {name: getattr(config, name) for name in SIZES} if config is not None else {}
    found |= {name: max(subject.domain[name]) for name in SIZES if name in subject.domain}
    if "max_len" in subject.declares:
        found["max_len"] = subject.declares["max_len"]
    return {called: int(found[name]) for name, called in SIZES.items() if name in found}
