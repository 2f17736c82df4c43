"""One callable of a subject that was found beside a forward, as source, and how such sources are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from veriformer.properties.adapters.unknown.written import attempt


@dataclass(frozen=True)
class Offer:
    """A callable that is found.

    Attributes:
        part: which callable of `Subject` it is.
        source: of it; empty where it could not be told.
        notes: what was found out, or what could not be told, one sentence each.
        guesses: facts that names suggest.
    """

    part: str
    source: str = ""
    notes: tuple[str, ...] = ()
    guesses: Mapping[str, Any] = field(default_factory=dict)


def tried(source: str, part: str, names: Mapping[str, Any], *args: Any, seed: int = 0, **given: Any) -> Any:
    """Call a source once, without gradients, the global generators as they were afterwards.

    Args:
        source: of a function.
        part: its name.
        names: what it finds in its module besides.
        args: what it is called on.
        seed: of the global generator during the call.
        given: what it is called with by name.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return attempt(source, part, names)(*args, **given)
