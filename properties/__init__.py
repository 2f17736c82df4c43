"""Properties that every right Transformer has, and the engine that checks them.

>>> from veriformer.properties import Subject, check
>>> from torch.nn.functional import softmax
>>> mine = Subject(kind="softmax", forward=lambda model, scores, dim=-1: softmax(scores, dim))
>>> check(mine, profile="quick").ok
True

The public names are loaded when first used, so that importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.checking import check
    from veriformer.properties.engine.property import holds
    from veriformer.properties.parametrizing import parametrize
    from veriformer.properties.power.canaries import Canary
    from veriformer.properties.power.faults import Fault, broken_by
    from veriformer.properties.power.injection import Injected
    from veriformer.properties.results.records import Report, Result
    from veriformer.properties.subject.sizes import DrawnConfig
    from veriformer.properties.subject.subject import Subject

__all__ = [
    "Canary", "DrawnConfig", "Fault", "Injected", "Report", "Result", "Settings", "Subject", "broken_by", "check",
    "holds", "parametrize",
]  # fmt: skip

_HOMES = {
    "Canary": "power.canaries",
    "DrawnConfig": "subject.sizes",
    "Fault": "power.faults",
    "Injected": "power.injection",
    "Report": "results.records",
    "Result": "results.records",
    "Settings": "bench.profiles",
    "Subject": "subject.subject",
    "broken_by": "power.faults",
    "check": "checking",
    "holds": "engine.property",
    "parametrize": "parametrizing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"veriformer.properties has no {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"veriformer.properties.{_HOMES[name]}"), name)
