"""Whether what attention gives stays in the stream of a pre-LN layer; part of `residual.placement`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case

_QUERY_KEY_VALUE = ("the queries", "the keys", "the values")
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
    # kernels of convolutions too: what acts beside attention need not be an nn.Linear
    matrices = {name: p for name, p in module.named_parameters() if p.ndim > 1 and min(p.flatten(1).shape) > 1}
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


def raw_inputs(case: Case, built: Built, x: Tensor, large: float) -> str | None:
    """Name a part of a pre-norm layer that is given the stream as it is: what it gets grows with the stream.

    Args:
        case: of the violation.
        built: the layer.
        x: `[B, T, D]`.
        large: a factor on it.
    """
    seen: list[dict[tuple[str, int], Tensor]] = []
    for scale in (1.0, large):
        got: dict[tuple[str, int], Tensor] = {}

        def note(name: str, got: dict[tuple[str, int], Tensor] = got) -> Callable[..., None]:
            def keep(_: nn.Module, args: tuple[object, ...]) -> None:
                for place, arg in enumerate(args):
                    if isinstance(arg, Tensor) and arg.is_floating_point():
                        got.setdefault((name, place), arg.detach().double())

            return keep

        parts = [(n, m) for n, m in built.module.named_modules() if n and not is_norm(m)]
        hooks = [m.register_forward_pre_hook(note(n)) for n, m in parts]
        try:
            with torch.no_grad():
                case.call(built, x * scale)
        finally:
            for hook in hooks:
                hook.remove()
        seen.append(got)
    one, two = seen
    named = dict(built.module.named_modules())
    raw = [
        (name, place)
        for (name, place), given in one.items()
        if (name, place) in two and float(two[name, place].norm()) > 0.1 * large * float(given.norm()) > 0
    ]
    if not raw:
        return None
    name = raw[0][0]
    part, places = named[name], [place for other, place in raw if other == name]
    words = [_QUERY_KEY_VALUE[p] if isinstance(part, nn.MultiheadAttention) and p < 3 else f"input {p}" for p in places]
    kind = type(part).__name__
    return f"{name} ({kind}) is given the stream as it is, without its norm: {', '.join(words)}"


def with_held_conditions(case: Case, built: Built, x: Tensor, large: float) -> Tensor:
    """Return the output for `large` times `x`; parts that make a condition of the whole give what they do for `x`.

    A condition has no positions: `[B, D]`, pooled from the stream say. What it scales, by adaLN, grows with it, and
    says nothing of where the norm stands.

    Args:
        case: off whose record the layer is called.
        built: the layer.
        x: `[B, T, D]`.
        large: a factor on it.
    """
    given: dict[nn.Module, list[Tensor]] = {}

    def is_condition(args: tuple[object, ...]) -> bool:
        return bool(args) and all(isinstance(a, Tensor) and a.shape == (len(x), x.shape[-1]) for a in args)

    def keep(module: nn.Module, args: tuple[object, ...], out: object) -> None:
        if is_condition(args) and isinstance(out, Tensor):
            given.setdefault(module, []).append(out)

    def put_back(module: nn.Module, args: tuple[object, ...], out: object) -> object:
        return given[module].pop(0) if is_condition(args) and given.get(module) else out

    parts = [m for name, m in built.module.named_modules() if name]
    with off_the_record(case), torch.no_grad():
        for hook, factor in ((keep, 1.0), (put_back, large)):
            with hooked([part.register_forward_hook(hook) for part in parts]):
                out = case.call(built, x * factor)
    return out.detach().double()
