"""Whether what attention gives stays in the stream of a pre-LN layer; part of `residual.placement`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.engine.case import Case

_SEEN = 1e-6
"""Of the largest number that comes out; a change that is seen is far larger."""


def attention_stays_in_the_stream(case: Case) -> None:
    """Require that other positions are seen without matrices that act on each position by itself.

    A pre-LN layer adds what attention gives to what comes out. Where it is seen through the feed-forward network alone,
    the stream that this one is added to does not hold it.
    """
    built = case.built(fresh=True)
    if not isinstance(built.module, nn.Module) or not built.is_fresh:
        return
    x = case.normal(1, 4, built.config.d_model, dtype=built.dtype)
    other = torch.cat([case.normal(1, 1, built.config.d_model, dtype=built.dtype), x[:, 1:]], dim=1)
    needed = case.apply(needed_beside_attention, built.module, case.caller(built, x), case.caller(built, other))
    case.equal(
        needed,
        [],
        "a pre-LN layer sees other positions through its feed-forward network alone",
        got=f"without {', '.join(needed)} no position sees another",
        expected="x + attention(x) in what comes out",
        cause=lambda: (
            "what attention gives is lost from the stream: the next sublayer sees it, behind its norm, and is "
            "added to the stream from before attention"
        ),
    )


def needed_beside_attention(module: nn.Module, run: Callable[[], Tensor], changed: Callable[[], Tensor]) -> list[str]:
    """Return all matrices that act without attention, if the last position sees no other without any of them.

    Args:
        module: a layer.
        run: calls it.
        changed: calls it on an input of which the first position is another one.
    """
    matrices = {name: p for name, p in module.named_parameters() if p.ndim == 2 and min(p.shape) > 1}
    kept = {name: p.detach().clone() for name, p in matrices.items()}

    def without(*names: str) -> tuple[Tensor, bool]:
        with torch.no_grad():
            for name in names:
                matrices[name].zero_()
            one, two = run().detach(), changed().detach()
            for name in names:
                matrices[name].copy_(kept[name])
        return one, bool((one - two)[:, -1].abs().max() > _SEEN * one.abs().max())

    if not without()[1]:
        return []
    needed = {name for name in matrices if not without(name)[1]}
    for name in sorted(needed):
        alone = without(name)[0]
        acting = []
        for other in matrices:
            brought = alone - without(name, other)[0]
            # biases bring every position the same
            if other != name and bool((brought - brought[:, :1]).abs().max() > _SEEN * alone.abs().max()):
                acting.append(other)
        if acting and needed.issuperset(acting):
            return acting
    return []
