"""Sizes that a model has of its own: `build` does not read them from the config that it is given."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.isolation import reseed
from veriformer.properties.bench.pool import WEIGHT_SEED, Built
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.subject.sizes import DrawnConfig

_NAMES = frozenset(f.name for f in fields(DrawnConfig))


class ReadConfig(DrawnConfig):
    """A config that notes which of its fields are read; `vars`, `asdict` and the like read all."""

    def __getattribute__(self, name: str) -> Any:
        read = object.__getattribute__(self, "__dict__").setdefault("_read", set())
        read |= _NAMES if name in ("__dict__", "__dataclass_fields__") else {name} & _NAMES
        return object.__getattribute__(self, name)


def fields_read(bench: Workbench, config: DrawnConfig) -> frozenset[str]:
    """Return the fields of a config that `build` reads; all of them where that cannot be told."""
    build = bench.subject.build
    if build is None or type(config) is not DrawnConfig:
        return _NAMES
    watched = ReadConfig(**{name: getattr(config, name) for name in _NAMES})
    watched.__dict__["_read"] = set()
    with torch.random.fork_rng(devices=[]):
        reseed(WEIGHT_SEED)
        try:
            bench.call(build, watched)
        except SubjectError:
            return _NAMES
    return frozenset(object.__getattribute__(watched, "__dict__")["_read"])


def sizes_of(bench: Workbench, built: Built) -> DrawnConfig:
    """Return the sizes of a model: those of its config, but for a width of its own of its feed-forward networks.

    A `build` that hands `c.d_ff` on and gets another width is not excused: the field was read.
    """
    key = ("own sizes", built.config)
    if key not in bench.measured:
        own = None if "d_ff" in fields_read(bench, built.config) else _inner_width(built)
        bench.measured[key] = replace(built.config, d_ff=own) if own else built.config
    found: DrawnConfig = bench.measured[key]
    return found


def _inner_width(built: Built) -> int | None:
    """Return the one width that matrices lead from d_model to, and back from."""
    if not isinstance(built.module, nn.Module):
        return None
    config, width = built.config, built.config.d_model
    known = {width, *(n * config.num_key_value_heads * config.d_head for n in (1, 2)), config.vocab_size}
    shapes = [p.shape for p in built.module.parameters() if p.ndim == 2 and width in p.shape]
    tall = {s[0] for s in shapes if s[1] == width} - known
    wide = {s[1] for s in shapes if s[0] == width} - known
    both = (tall & wide) or {n for n in tall | wide if {n, 2 * n} <= tall | wide}
    return int(both.pop()) if len(both) == 1 else None
