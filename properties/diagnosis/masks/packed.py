"""Samples that are packed into one row, without padding: at which positions their tokens stand there."""

from __future__ import annotations

import torch
from torch import nn

from veriformer.properties.diagnosis.masks.masked import Masked
from veriformer.properties.diagnosis.places.lookups import lookups

_REAL = (4, 6, 3, 5)


def packed_cause(masked: Masked) -> str | None:
    """Say which rows of a table of positions packed samples read, where these are not theirs.

    Args:
        masked: a subject that leaves padding out.
    """
    built, x = masked.clean(), masked.distinct(len(_REAL), max(_REAL))
    if not isinstance(built.module, nn.Module) or x.is_floating_point():
        return None
    mask = masked.padded(x, _REAL, "left" if masked.side == "left" else "right")
    tokens = x[mask].cpu()
    for look in lookups(built.module, lambda: masked(x, mask, built)):
        rows = look.rows.flatten().cpu()
        if len(rows) != len(tokens) or torch.equal(rows, tokens):
            continue
        parts = [part.tolist() for part in rows.split(list(_REAL))]
        wanted = [[parts[0][0] + n for n in range(count)] for count in _REAL]
        if parts == wanted:
            continue
        stream = torch.arange(len(rows))
        rule = ""
        if torch.equal(rows - rows[0], stream):
            rule = ": they run on through the row, and do not begin again where a sample does"
        elif torch.equal(rows - rows[0], stream % max(_REAL)):
            rule = f": they begin again every {max(_REAL)} tokens, the longest sample's, not where a sample does"
        shown = ", ".join(map(str, parts[:3]))
        return f"samples of {', '.join(map(str, _REAL))} tokens in one row read rows {shown} ... of {look.name}{rule}"
    return None
