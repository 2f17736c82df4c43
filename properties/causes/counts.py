"""What a surplus or a lack of parameters is."""

from __future__ import annotations

from torch import nn

from veriformer.properties.definitions.costs.counts import Component
from veriformer.properties.subject.sizes import DrawnConfig


def surplus_cause(difference: int, components: list[Component], config: DrawnConfig) -> str | None:
    """Name what a difference of so many parameters is, if one component explains it.

    >>> surplus_cause(-88, [Component("output projection", 88)], DrawnConfig())
    '88 too few: one output projection is missing, shared or tied'
    """
    sign, size = ("too many", difference) if difference > 0 else ("too few", -difference)
    verb = "is there besides" if difference > 0 else "is missing, shared or tied"
    by_layer = sum(c.each * c.times for c in components if c.times and c.times % config.num_layers == 0)
    for c in components:
        if c.times > 1 and size == c.each * c.times:
            return f"{size:,} {sign}: every {c.name} ({c.times} times {c.each:,}) {verb}"
    by_presence = sorted(components, key=lambda c: (c.times > 0) == (difference > 0))
    known = [(c.name, c.each) for c in by_presence if c.each]
    known += [("whole layer", by_layer // config.num_layers)] if config.num_layers > 1 else []
    known += [("vector of d_model (a bias or a gain)", config.d_model), ("vector of d_ff (a bias)", config.d_ff)]
    known += [("d_model x d_model matrix", config.d_model**2), ("d_model x d_ff matrix", config.d_model * config.d_ff)]
    for name, each in known:
        if each and size == each:
            return f"{size:,} {sign}: one {name} {verb}"
    for name, each in known:
        if each and size % each == 0 and size // each <= 12:
            plural = "are there besides" if difference > 0 else "are missing, shared or tied"
            return f"{size:,} {sign}: {size // each} times a {name} {plural}"
    return None


def shared_parts(module: nn.Module) -> tuple[int, str]:
    """Return how many parameters fewer a model has since parts are one module under several names, and which these are.

    >>> shared = nn.Linear(3, 4)
    >>> shared_parts(nn.ModuleDict({"own": shared, "cross": shared}))
    (16, 'own and cross are one module with one set of weights: its 16 parameters are used 2 times')
    """
    names: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(part, []).append(name)
    shared = {part: at for part, at in names.items() if len(at) > 1 and any(True for _ in part.parameters())}
    inside = {inner for part in shared for inner in part.modules() if inner is not part}
    outer = {part: at for part, at in shared.items() if part not in inside}
    sizes = {part: sum(p.numel() for p in part.parameters()) for part in outer}
    if not outer:
        return 0, ""
    (part, at), *others = outer.items()
    told = f"{' and '.join(at[:3])} are one module with one set of weights: its {sizes[part]:,} parameters are used"
    told += f" {len(at)} times{f', and so are those of {len(others)} more' if others else ''}"
    return sum(sizes[part] * (len(at) - 1) for part, at in outer.items()), told
