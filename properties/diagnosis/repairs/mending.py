"""A property judged again while one line of the subject's code is mended, slip by slip."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.causes.tracing.lines import line_of_code
from veriformer.properties.diagnosis.repairs import (
    slips_of_axes,
    slips_of_masks,
    slips_of_numbers,
    slips_of_orders,
    slips_of_pieces,
)
from veriformer.properties.diagnosis.repairs.slips import Slip
from veriformer.properties.diagnosis.rewriting.executed import OURS

_BY_NAME: dict[str, list[Slip]] = {}
for _slips in (slips_of_masks, slips_of_orders, slips_of_pieces, slips_of_numbers, slips_of_axes):
    for _slip in _slips.SLIPS:
        for _name in _slip.names:
            _BY_NAME.setdefault(_name, []).append(_slip)


@dataclass(frozen=True)
class Site:
    """All calls of one function on one line of code."""

    name: str
    file: str
    number: int


class Sites(TorchFunctionMode):
    """Notes, of every line of a subject, which slips would change what it gives.

    Attributes:
        found: slips by site, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Site, list[Slip]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        made = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name in _BY_NAME and (not name.endswith("_") or name.startswith("__")):
            file, number = line_of_code()
            if file and not file.startswith(OURS):
                self._note(Site(name, file, number), (func, args, given), made)
        return made

    def _note(self, site: Site, call: Any, made: Any) -> None:
        known = self.found.setdefault(site, [])
        for slip in _BY_NAME.get(site.name, ()):
            if slip not in known and _differs(_undone(slip, call), made):
                known.append(slip)


class Mended(TorchFunctionMode):
    """Undoes one slip at one site."""

    def __init__(self, site: Site, slip: Slip) -> None:
        super().__init__()
        self.site, self.slip = site, slip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == self.site.name and line_of_code() == (self.site.file, self.site.number):
            mended = _undone(self.slip, (func, args, given))
            if mended is not NotImplemented:
                return mended
        return func(*args, **given)


def _undone(slip: Slip, call: Any) -> Any:
    try:
        with warnings.catch_warnings(), torch._C.DisableTorchFunction():
            warnings.simplefilter("ignore")
            return slip.undo(call)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return NotImplemented


def _differs(mended: Any, made: Any) -> bool:
    """Whether what a slip undone gives may stand where the other stood, and is another."""
    if mended is NotImplemented:
        return False
    if isinstance(made, tuple | list):
        return isinstance(mended, tuple) and any(_differs(a, b) for a, b in zip(mended, made, strict=False))
    if not isinstance(mended, Tensor) or not isinstance(made, Tensor):
        return False
    return mended.shape == made.shape and mended.dtype == made.dtype and not torch.equal(mended, made)


def sites_of(run: Callable[[], object]) -> dict[Site, list[Slip]]:
    """Return the sites of a run of the subject, each with the slips that it may be."""
    with Sites() as sites:
        run()
    return {site: slips for site, slips in sites.found.items() if slips}
