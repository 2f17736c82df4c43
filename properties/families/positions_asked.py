"""A subject at sizes of its own and in numbers of few bits: what it refuses there is not asked again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.palette import fitted
from veriformer.properties.subject.sizes import DrawnConfig


@dataclass(frozen=True)
class Counting:
    """A way to count in few bits: a model moved to the dtype, or one of float32 under autocast."""

    dtype: torch.dtype
    autocast: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"under {name} autocast" if self.autocast else f"in {name}"


COUNTINGS = tuple(Counting(dtype, autocast) for autocast in (False, True) for dtype in (torch.bfloat16, torch.float16))


def sized(case: Case, **sizes: int) -> DrawnConfig:
    """Return sizes for a model, as near to these as the subject's domain allows; its own where it is given."""
    subject = case.subject
    if subject.module is not None or subject.config is not None:
        return case.config()
    own = replace(DrawnConfig(num_layers=1), num_key_value_heads=sizes.get("num_heads", 2), **sizes)
    return own if subject.is_functional else fitted(own, subject) or case.config()


def made(case: Case, config: DrawnConfig, dtype: torch.dtype) -> Built | None:
    """Return a model that is not kept, for it may be large; None where these sizes are refused."""
    try:
        return case.bench.pool.fresh(config, dtype)
    except SubjectError:
        return None


def asked(case: Case, built: Built | None, *args: Any, counting: Counting | None = None) -> Tensor | None:
    """Return what the subject gives, on the CPU; None where it refuses."""
    if built is None:
        return None
    autocast = counting is not None and counting.autocast
    dtype = counting.dtype if counting is not None and autocast else torch.bfloat16
    try:
        with torch.autocast(case.bench.device.type, dtype=dtype, enabled=autocast):
            return case.call(built, *args).detach().cpu()
    except SubjectError:
        return None


def countings(case: Case, config: DrawnConfig) -> Iterator[tuple[Counting, Built]]:
    """Give the models that count in few bits, where the subject is meant to."""
    if case.subject.fact("half_precision") is False:
        return
    single = made(case, config, torch.float32)
    for counting in COUNTINGS:
        if not counting.autocast and case.subject.is_functional and case.subject.kind != "rotary":
            continue  # a function of a length alone has nothing that could be moved
        built = single if counting.autocast else made(case, config, counting.dtype)
        if built is not None:
            yield counting, built


def claimed(case: Case, config: DrawnConfig, wanted: int) -> int:
    """Return how many positions may be asked for: the wanted number, or the claimed length where that is less."""
    if case.subject.is_functional or case.subject.fact("beyond_max_len") == "works":
        return wanted
    return int(min(case.subject.fact("max_len", config.max_len), config.max_len, wanted))


def widened(case: Case, low: Built) -> Built:
    """Return the model with the same, rounded, weights in float64."""
    wide = replace(case.copy_of(low), dtype=torch.float64)
    case.apply(widen, wide.module)
    return wide


def widen(module: Any) -> None:
    """Move a model to float64."""
    if isinstance(module, nn.Module):
        module.double()
