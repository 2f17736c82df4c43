"""Which rows of its tables a model looks up: where order does not matter, all positions may read one and the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.watches import DispatchWatch
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.inputs import ordinary

_LOOK_UPS = ("embedding", "index", "index_select")


@dataclass(frozen=True)
class Lookup:
    """One look into a table.

    Attributes:
        name: of the table among the model's parameters and buffers.
        rows: integers, as many as were looked up.
    """

    name: str
    rows: Tensor


class _Watch(DispatchWatch):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tables = (*module.named_parameters(), *module.named_buffers())
        self.tables = {t.data_ptr(): (name, t.shape) for name, t in tables if t.ndim >= 2 and t.numel()}
        self.seen: list[Lookup] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _LOOK_UPS and isinstance(args[0], Tensor):
            table = self.tables.get(args[0].data_ptr())
            rows = next((x for x in _tensors(args[1:]) if x.dtype in (torch.int32, torch.int64)), None)
            if table is not None and table[1] == args[0].shape and rows is not None:
                self.seen.append(Lookup(table[0], rows.detach().clone()))
        return func(*args, **(kwargs or {}))


def _tensors(args: Any) -> list[Tensor]:
    return [x for a in args for x in (a if isinstance(a, list | tuple) else (a,)) if isinstance(x, Tensor)]


def lookups(module: nn.Module, run: Callable[[], object]) -> list[Lookup]:
    """Return the looks into a module's tables that a call takes, in order."""
    watch = _Watch(module)
    with torch.no_grad(), watch:
        run()
    return watch.seen


def lookup_opinion(case: Case, problem: Violation) -> str | None:
    """Name a table of which one row alone is looked up, whatever the position; None if there is no such table."""
    del problem
    built = case.built()
    if not isinstance(built.module, nn.Module):
        return None
    inputs = ordinary(case.subject, built.config, torch.Generator().manual_seed(0), built.dtype)
    seen = lookups(built.module, lambda: case.call(built, *[x.to(case.bench.device) for x in inputs.tensors]))
    length = max((x.shape[1] for x in inputs.tensors if x.ndim > 1), default=0)
    for name in dict.fromkeys(look.name for look in seen):
        rows = torch.cat([look.rows.flatten() for look in seen if look.name == name])
        if len(rows) >= length > 2 and len(rows.unique()) == 1 and len(built.module.state_dict()[name]) > 1:
            what = "position" if all(look.rows.shape[-1] == length for look in seen if look.name == name) else "look"
            return f"every {what} reads row {int(rows[0])} of {name}, which has {len(built.module.state_dict()[name])}"
    return None
