"""What became of parameters: tied by a copy, owned by a module that is never called, left out of all groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def tying_cause(module: nn.Module, shape: tuple[int, int]) -> str | None:
    """Say whether two matrices that should be one are copies, share their memory, or have nothing in common.

    Args:
        module: as it is built, untrained.
        shape: of both, `(V, D)`.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        if tuple(parameter.shape) == shape:
            found.setdefault(id(parameter), (name, parameter))
    named = list(found.values())
    if len(named) < 2:
        return None
    for i, (name, one) in enumerate(named):
        for other, two in named[i + 1 :]:
            if one.data_ptr() == two.data_ptr():
                return (
                    f"{other} shares the memory of {name} (.data) but is another parameter, with a gradient of its own"
                )
            if torch.equal(one, two):
                return f"{other} is a copy of {name}: equal when built, but another parameter, and trained apart"
    names = " and ".join(name for name, _ in named[:3])
    return f"{names} are parameters of their own, unlike already when built: nothing ties them"


@contextmanager
def assignments() -> Iterator[list[tuple[nn.Module, str, Tensor | None]]]:
    """Note which module is given which parameter under which name while the block runs, in order."""
    noted: list[tuple[nn.Module, str, Tensor | None]] = []
    register = nn.Module.register_parameter

    def registering(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        noted.append((self, name, param))

    nn.Module.register_parameter = registering  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def tie_broken(
    module: nn.Module, shape: tuple[int, int], noted: list[tuple[nn.Module, str, Tensor | None]]
) -> str | None:
    """Say which of two matrices was given a new parameter after both had been one, while their model was built."""
    paths = {id(part): path for path, part in module.named_modules()}
    holders: dict[int, set[str]] = {}
    for part, label, parameter in noted:
        if id(part) not in paths or parameter is None or tuple(parameter.shape) != shape:
            continue
        name = f"{paths[id(part)]}.{label}".lstrip(".")
        tied = next((names for held, names in holders.items() if name in names and held != id(parameter)), set())
        others = sorted(tied - {name})
        if others and id(parameter) not in holders:
            return (
                f"{name} and {others[0]} were one parameter until {name} was given a new one: the tie was made before "
                "this, and is broken by it (draw the weights first, or in place)"
            )
        tied.discard(name)
        holders.setdefault(id(parameter), set()).add(name)
    return None


def untied_cause(module: nn.Module, shape: tuple[int, int]) -> str | None:
    """Say which names one matrix has that should be two."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if tuple(parameter.shape) == shape:
            names.setdefault(id(parameter), []).append(name)
    shared = next((found for found in names.values() if len(found) > 1), None)
    return None if shared is None else f"{' and '.join(shared[:3])} are one and the same parameter"


def not_carried(module: nn.Module, twin: nn.Module) -> str | None:
    """Name a tensor that a copy of a model has not taken over, and why: it is in no state dict, or no buffer at all."""
    kept, parts = set(module.state_dict()), dict(twin.named_modules())
    own = {name: id(x) for name, x in (*module.named_parameters(), *module.named_buffers())}
    changed: list[tuple[str, Tensor, object]] = []
    for path, part in module.named_modules():
        before = f"{path}." if path else ""
        held = {**vars(part), **part._buffers, **part._parameters}
        for label, one in held.items():
            if not isinstance(one, Tensor) or path not in parts:
                continue
            other = getattr(parts[path], label, None)
            if isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other):
                continue
            name = f"{before}{label}"
            if name in kept:
                changed.append((name, one, other))
                continue
            if isinstance(one, nn.Parameter):
                return _saved_otherwise(name, one, other)
            where = "a buffer with persistent=False" if name in own else "an attribute, neither parameter nor buffer"
            return f"{name} is {where}: it is in no state dict, and another model has its own, drawn or computed anew"
    return _held_apart(module, parts) or _comes_back_changed(changed)


def _held_apart(module: nn.Module, others: dict[str, nn.Module]) -> str | None:
    """Name a tensor in a plain list or dict that is another one in a copy: made when a model is built."""
    for path, part in module.named_modules():
        for label, value in vars(part).items():
            other: Any = vars(others[path]).get(label) if path in others else None
            if label.startswith("_") or type(value) is not type(other) or not isinstance(value, list | tuple | dict):
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in items:
                try:
                    two = other[key]
                except (KeyError, IndexError):
                    continue
                if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.shape != two.shape:
                    continue
                if not torch.equal(one, two):
                    name = f"{path}.{label}[{key!r}]" if path else f"{label}[{key!r}]"
                    return (
                        f"{name} stands in a plain list or dict and is made when the model is built"
                        f"{_made_of(module, one)}: it is in no state dict, and what is loaded, moved or trained does "
                        "not reach it"
                    )
    return None


def _made_of(module: nn.Module, one: Tensor) -> str:
    """Say of which parameters a tensor is a copy: of one, or of several in a stack."""
    for name, p in module.named_parameters():
        if p.shape == one.shape and torch.equal(p, one):
            return f", a copy of {name}"
        if one.ndim and p.shape == one.shape[1:] and any(torch.equal(p, row) for row in one):
            return f", a copy of parameters ({name} is one of them)"
    return ""


def _comes_back_changed(changed: list[tuple[str, Tensor, object]]) -> str | None:
    """Say what becomes of the numbers that stand in the state dict and come back as others."""
    told: dict[str, list[str]] = {}
    for name, one, other in changed:
        told.setdefault(_change(one, other), []).append(name)
    if not told:
        return None
    change, names = max(told.items(), key=lambda item: len(item[1]))
    more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} {'come' if more else 'comes'} back {change}: what loading does to it (a hook, "
        "_load_from_state_dict, a conversion of older checkpoints) is done to a state dict of its own too"
    )


def _change(one: Tensor, other: object) -> str:
    if not isinstance(other, Tensor) or other.shape != one.shape or not one.is_floating_point():
        return "as another tensor"
    a, b = one.detach().double().flatten(), other.detach().double().flatten()
    near, apart = 1e-6 * float(a.abs().amax().clamp(min=1e-6)), b - a
    if float((apart - apart[0]).abs().amax()) <= near:
        return f"{'larger' if apart[0] > 0 else 'smaller'} by {abs(float(apart[0])):.4g}"
    factor = float(a @ b) / max(float(a @ a), 1e-300)
    if float((b - factor * a).abs().amax()) <= near and factor:
        return f"{factor:.4g} times as large"
    if one.ndim == 2 and one.shape[0] == one.shape[1] and torch.equal(one.T, other):
        return "transposed"
    if torch.equal(a.sort().values, b.sort().values):
        return "with its numbers in another order"
    if float(apart.abs().amax()) <= 1e-2 * float(a.abs().amax()):
        return "rounded to fewer bits"
    return "as it was before loading, or as another"


def made_at_a_call(called: nn.Module, uncalled: nn.Module) -> str | None:
    """Name what a model holds since it was called, beside what it was built with: it was made of the weights then."""
    kept = set(called.state_dict())
    for (path, part), (_, new) in zip(called.named_modules(), uncalled.named_modules(), strict=False):
        before = {**vars(new), **new._buffers, **new._parameters}
        for label, value in {**_attributes(part), **part._buffers}.items():
            name = f"{path}.{label}".lstrip(".")
            if _holds_tensors(value) and not _holds_tensors(before.get(label)) and name not in kept:
                return f"{name} was made of the weights at the first call and is kept: it is not made anew of new ones"
    return None


def _attributes(part: nn.Module) -> dict[str, object]:
    own = ("_parameters", "_buffers", "_modules")
    return {name: value for name, value in vars(part).items() if name not in own and not name.endswith("_hooks")}


def _holds_tensors(value: object) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(_holds_tensors(x) for x in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _saved_otherwise(name: str, one: Tensor, other: object) -> str:
    told = f"{name} stands in the state dict under other names (a state_dict of its own), and comes back as another one"
    if isinstance(other, Tensor) and one.ndim > 1 and one.shape == other.shape:
        rows = [[bool(torch.equal(x, y)) for y in other] for x in one]
        if all(sum(row) == 1 for row in rows):
            moved = [(at, row.index(True)) for at, row in enumerate(rows) if not row[at]][:4]
            mine, then = (", ".join(map(str, places)) for places in zip(*moved, strict=True))
            told += f": its rows {mine} are its rows {then} then, cut or put together otherwise"
    return told


def decay_cause(module: nn.Module, names: Iterable[str], *, decays: bool, why: str | None = None) -> str | None:
    """Say which sort of parameters decays, or does not, wrongly: all of a sort, or some, and how their names differ.

    Args:
        module: that has the parameters.
        names: of those that stand in the wrong group.
        decays: whether the wrong ones decay.
        why: what lets gains decay, if that is known.
    """
    wrong = set(names)
    sorts = _sorts(module)
    for sort, members in sorts.items():
        bad = [name for name in members if name in wrong]
        if not bad:
            continue
        right = [name for name in members if name not in wrong]
        verb = ("decay" if decays else "do not decay") if len(bad) > 1 else ("decays" if decays else "does not decay")
        extent = "all" if not right else f"{len(bad)} of"
        told = f"{extent} {len(members)} {sort} {verb} ({', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''})"
        if right:
            told += f", {', '.join(right[:2])} {'not' if decays else 'as it should'}"
        if sort.startswith("gains") and why:
            told += f": {why}"
        elif sort.startswith("gains") and decays:
            unnamed = [name for name in bad if "norm" not in name.lower()]
            if len(unnamed) == len(bad):
                told += ": no 'norm' stands in their names, by which norms may be looked for"
                inside = all("." in name.rpartition(".")[0] for name in right)
                if right and inside and all("." not in name.rpartition(".")[0] for name in bad):
                    told += (
                        "; or with a dot before the name, for they stand at the top of the model and the others inside "
                        "of parts"
                    )
            elif all(parameter.ndim < 2 for name, parameter in module.named_parameters() if name in bad):
                told += ": neither their type nor their one axis keeps them out"
        others = [
            s for s, found in sorts.items() if s != sort and decays and not wrong & set(found) and s != "matrices"
        ]
        if sort == "matrices" and not decays:
            words = [w for w in ("norm", "bias", "ln") if all(w in n for n in bad) and not any(w in n for n in right)]
            told += f": '{words[0]}' stands in all their names, by which it may be told what decays" if words else ""
            holders = [module.get_submodule(name.rpartition(".")[0]) for name in bad]
            if not words and all(next(holder.children(), None) is not None for holder in holders):
                told += (
                    ": they are parameters of a module that holds others too, whose own are not looked at (or only "
                    "those of linear maps are)"
                )
        if sort == "biases" and decays and all(module.get_parameter(name).ndim > 1 for name in bad):
            told += ": biases of several maps in one tensor of two axes or more, by whose number is told what decays"
        if others and decays and not right:
            told += f"; {' and '.join(others)} do not"
        return told
    return None


def mixed_cause(module: nn.Module, names: Iterable[str], groups: Iterable[dict[str, Any]]) -> str | None:
    """Say that groups hold matrices and vectors together, as where they are formed by something else than what decays.

    Args:
        module: that has the parameters.
        names: of those that decay, or do not, wrongly.
        groups: as an optimiser takes them.
    """
    wrong, known = set(names), {id(p): name for name, p in module.named_parameters()}
    mixed = []
    for group in groups:
        members = [p for p in group["params"] if id(p) in known]
        if members and all(p.ndim < 2 for p in members):
            owners = {known[id(p)].rpartition(".")[0] for p in members}
            if any(p.ndim > 1 and name.rpartition(".")[0] in owners for name, p in module.named_parameters()):
                return None  # biases stand in other groups than their matrices
        if not wrong & {known[id(p)] for p in members}:
            continue
        if len({p.ndim > 1 for p in members}) == 1 or (members[0].ndim > 1) != (group.get("weight_decay", 0.0) > 0):
            return None
        mixed.append([known[id(p)] for p in members])
    if len(mixed) < 2:
        return None
    held = [name for members in mixed for name in members]
    shown = f"{mixed[0][0]} with {', '.join(name for name in mixed[0] if name in wrong)[:80]}"
    return (
        f"matrices and vectors stand together in {len(mixed)} groups of {len(held)} parameters in all ({shown}), each "
        "of which decays as its first parameter should: groups are formed by something else (the layer, say), and "
        "whether a parameter decays is not part of what tells them apart"
    )


def is_bias_of_several(name: str, parameter: nn.Parameter, owner: nn.Module | None) -> bool:
    """Whether a parameter of several axes is the biases of maps that stand in one tensor: `up_bias` by `up_weight`."""
    own = name.rpartition(".")[2]
    if owner is None or parameter.ndim < 2 or not own.endswith("bias"):
        return False
    weight = getattr(owner, own.removesuffix("bias") + "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim < parameter.ndim or weight.numel() <= parameter.numel():
        return False
    if parameter.shape == weight.shape[-parameter.ndim :]:
        return True  # `[H, K]` by `[D, H, K]`
    return weight.shape[0] == parameter.shape[0] and parameter.shape[-1] in weight.shape[-2:]


def _sorts(module: nn.Module) -> dict[str, list[str]]:
    sorts: dict[str, list[str]] = {"gains of norms": [], "biases of norms": [], "biases": [], "matrices": []}
    for path, part in module.named_modules():
        is_norm = "norm" in type(part).__name__.lower()
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            if is_norm:
                sorts["biases of norms" if "bias" in name else "gains of norms"].append(full)
            elif parameter.ndim < 2 or is_bias_of_several(full, parameter, part):
                sorts["biases"].append(full)
            elif not isinstance(part, nn.Embedding):
                sorts["matrices"].append(full)
    return {sort: names for sort, names in sorts.items() if names}


def lost_cause(module: nn.Module, lost: list[str], groups: list[dict[str, Any]]) -> str | None:
    """Say what parameters have in common that stand in no group of an optimiser: they are never trained."""
    told = _lost(module, lost)
    empty = [number for number, group in enumerate(groups) if not list(group["params"])]
    if told and empty:
        told += (
            f"; group {empty[0]} of {len(groups)} holds none at all: what it is made of was empty by then (a generator "
            "that was gone through before, or a rule that no name or shape fulfils)"
        )
    known = {id(p) for p in module.parameters()}
    strange = [p for group in groups for p in group["params"] if id(p) not in known]
    if told and strange:
        told += (
            f"; {len(strange)} parameters in the groups are none of the model's (of {tuple(strange[0].shape)}, say): "
            "the groups were made before a part of the model was replaced by another"
        )
    return told


def _lost(module: nn.Module, lost: list[str]) -> str | None:
    parts, tables = dict(module.named_modules()), []
    bare, owners = [], set()
    for name in lost:
        owner = parts.get(name.rpartition(".")[0])
        if owner is None:
            continue
        owners.add(type(owner).__name__)
        if any(True for _ in owner.children()) or name.rpartition(".")[2] not in ("weight", "bias"):
            bare.append(name)
        elif isinstance(owner, nn.Embedding):
            tables.append(name)
    if len(bare) == len(lost) > 0:
        owner_of = type(parts[bare[0].rpartition(".")[0]]).__name__
        if all(module.get_parameter(name).ndim == 0 for name in bare):
            return (
                f"{', '.join(bare[:3])} in no group and so never trained: it has no axis, where a rule by their number "
                "may say one, and two or more"
            )
        verb, what = ("is", "a bare parameter") if len(bare) == 1 else ("are", "bare parameters")
        return (
            f"{', '.join(bare[:3])} {verb} in no group and so never trained: {what} of {owner_of} itself, no weight or "
            "bias of a layer by which groups may be made"
        )
    if len(tables) == len(lost) > 0:
        return f"embeddings ({', '.join(tables[:3])}) are in no group and so never trained"
    biases = [name for name in lost if name.endswith("bias")]
    if len(biases) == len(lost):
        return f"{len(biases)} biases are in no group and so never trained"
    kinds = " and ".join(sorted(owners))
    return f"{len(lost)} parameters of {kinds} are in no group and so never trained" if owners else None


def twice_cause(module: nn.Module, twice: list[str]) -> str | None:
    """Say whether what stands in two groups is a parameter with two names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for found in names.values():
        if len(found) > 1 and set(found) & set(twice):
            return f"{' and '.join(found[:3])} are one parameter, and each name puts it into a group"
    return f"{', '.join(twice[:3])}: it is stepped twice, and meets the rules of two groups"
