"""How a model decodes chunk by chunk: what it keeps itself, is given, or gives back to be given again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import thread_time
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.beside.offers import Offer, tried
from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.wiring import Wiring, picks

_START = (
    r"(start|cache|past|prev|prefix|cur|curr|position|pos|seq|kv|token)_?(pos|position|offset|len|length|idx|index|start)"
    r"|offset|start|(start|curr?|cache|input)_pos"
)
_POSITIONS = r"(input_)?(pos|positions|position_ids|pos_ids)|cache_positions?"
_PAST = (
    r"(past|prev|layer|incremental|decoder|kv|key_value|decoding|inference|present|rnn|recurrent|attn|attention|self_attn)*_?"
    r"(past|past_key_values?|past_kvs?|key_values?|kvs?|kv_cache|cache|caches|kv_caches|states?|params|past_kv"
    r"|presents?)"
)
_FLAG = (
    r"(use|return|with|output)_?(kv_|key_value_)?(cache|caching|past|kvs?|presents?|states?)|incremental|is_decoding"
)
_MAKERS = (
    r"(init|make|new|empty|create|alloc|allocate|get|build|initial|setup|prepare)_?\w*(caches?|states?|kv|past)\w*"
)
_RESETS = r"(reset|clear|empty|init|setup|free|drop)_?\w*(cache|caches|state|states|kv|past)?"
_LENGTHS = r"(max_)?(seq_?)?(len|length|size|seq|t|positions|cache_len|tokens)|max_seq_len(gth)?|max_cache_len"
_B, _T, _CUT = 2, 7, 4
_SECONDS = 20.0
"""Of the processor, for finding out how a cache is given: a large model has no time for all ways."""


@dataclass(frozen=True)
class _Way:
    given: Mapping[str, str]
    past: str = ""
    argument: str = ""
    reset: str = ""
    told: str = ""


def cache_beside(
    sample: nn.Module, module: ModuleType | None, wiring: Wiring, arguments: Sequence[Argument], size: int
) -> Offer | None:
    """Return a model's cached decoding as `cache(model, chunks)`; None where nothing in its forward is called so.

    Args:
        sample: in eval mode.
        module: the user's.
        wiring: how its forward is called.
        arguments: of its forward.
        size: of the vocabulary.
    """
    generator = torch.Generator().manual_seed(8)
    x = torch.randint(1 if size > 3 else 0, max(size, 2), (_B, _T), generator=generator)  # of one token all are alike
    names = {} if module is None else {"user": module}
    try:
        whole = wiring.call(sample, x)
    except Exception:
        return None
    best: tuple[int, str, str] | None = None
    is_asked = ""
    until = thread_time() + _SECONDS
    for way in _all_ways(sample, module, arguments):
        if thread_time() > until:
            break
        is_asked = is_asked or way.told
        for pick, kept in _returned(sample, wiring, way, names, x):
            for split in ("", "behind", "all"):
                source = _source(wiring, way, pick, kept, split)
                rank = _rank(source, sample, names, x, whole)
                if rank and (best is None or rank > best[0]):
                    note = f"decoded chunk by chunk with {way.told}" + _NOTES[split]
                    best = (rank, source, note)
                if rank:
                    break
            if best and best[0] == 3:
                return Offer("cache", best[1], (best[2],))
    if best is not None:
        return Offer("cache", best[1], (best[2],))
    if is_asked:
        told = (
            f"no cache is judged: with {is_asked} a second chunk was not seen to go on behind the first; give cache= "
        )
        return Offer("cache", "", (told + "of a Subject if it has one",))
    return None


_NOTES = {
    "": "",
    "behind": "; behind the first chunk it takes one token at a time",
    "all": "; it takes one token at a time",
}


def _all_ways(sample: nn.Module, module: ModuleType | None, arguments: Sequence[Argument]) -> Iterator[_Way]:
    """Yield what to give for a cache, the surest first."""
    rest = arguments[1:]
    flags = {a.name: "True" for a in rest if re.fullmatch(_FLAG, a.name.lower())}
    counted = _counting_from_zero(sample)
    starts = {a.name: "start" for a in rest if re.fullmatch(_START, a.name.lower()) or a.name in counted}
    places = {
        a.name: "torch.arange(start, start + x.shape[1], device=x.device)"
        for a in rest
        if re.fullmatch(_POSITIONS, a.name.lower())
    }
    pasts = [
        a.name for a in rest if re.fullmatch(_PAST, a.name.lower()) and a.name not in {**flags, **starts, **places}
    ]
    resets = list(_resets(sample))
    for name in pasts:
        for first in _firsts(sample, module):
            for more in _subsets(starts, places):
                told = f"{name}={first}" + "".join(f", {n}={v}" for n, v in {**flags, **more}.items())
                yield _Way({**flags, **more}, first, name, "", told)
    if starts or places or (flags and resets):
        for more in [one for one in _subsets(starts, places) if one or not (starts or places)]:
            for reset in [*resets, ""] if not starts else ["", *resets]:
                told = ", ".join(f"{n}={v}" for n, v in {**flags, **more}.items())
                yield _Way({**flags, **more}, "", "", reset, told)


def _counting_from_zero(sample: nn.Module) -> set[str]:
    """Return the arguments of a forward whose default is the number 0: a place in the text, by whatever name."""
    try:
        parameters = inspect.signature(sample.forward).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if type(p.default) is int and p.default == 0}


def _subsets(starts: dict[str, str], places: dict[str, str]) -> Iterator[dict[str, str]]:
    yield {**starts, **places}
    if places:  # a row for all samples
        yield {**starts, **{name: f"{value}[None]" for name, value in places.items()}}
    if starts or places:
        yield {}


def _firsts(sample: nn.Module, module: ModuleType | None) -> Iterator[str]:
    """Yield the sources of an empty cache."""
    yield from _made_by(sample, "model")
    lists = [path for path, m in sample.named_modules() if isinstance(m, nn.ModuleList) and path and "." not in path]
    lists += [path for path, m in sample.named_modules() if isinstance(m, nn.ModuleList) and path.count(".") == 1]
    yield "None"
    for path in lists[:2]:
        yield f"[None] * len(model.{path})"
        yield f"[{{}} for _ in model.{path}]"
    yield "{}"
    yield "[]"
    for name, thing in vars(module).items() if module is not None else ():
        is_own = isinstance(thing, type) and thing.__module__ == getattr(module, "__name__", "")
        if not is_own or not re.search(r"(?i)cache|state|inferenceparams", name) or issubclass(thing, nn.Module):
            continue
        words = _words(thing)
        if words is not None:
            yield f"user.{name}({words})"
            for path in lists[:1]:
                yield f"[user.{name}({words}) for _ in model.{path}]"


def _made_by(sample: nn.Module, called: str) -> Iterator[str]:
    for name in dir(type(sample)):
        is_own = inspect.isfunction(getattr(type(sample), name)) and not hasattr(nn.Module, name)
        if re.fullmatch(_MAKERS, name) and is_own:
            words = _words(getattr(sample, name))
            if words is not None:
                yield f"{called}.{name}({words})"


def _words(function: Any) -> str | None:
    """Return the arguments of what makes a cache: how many samples, how long, for how many layers."""
    words = []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        name = p.name.lower()
        if re.fullmatch(r"(max_)?(batch|bsz|b|batch_size|bs|n_samples)(_size)?", name):
            words.append(f"{p.name}=chunks[0].shape[0]")
        elif re.fullmatch(
            r"(max_)?(seq_?)?(len|length|size|seq|t|positions|cache_len|tokens)|max_seq_len(gth)?|max_cache_len", name
        ):
            words.append(f"{p.name}=sum(c.shape[1] for c in chunks)")
        elif re.fullmatch(r"dtype", name) and p.default is p.empty:
            words.append("dtype=next(model.parameters()).dtype")
        elif re.fullmatch(r"device", name) and p.default is p.empty:
            words.append("device=chunks[0].device")
        elif re.fullmatch(r"(n|num)_?layers?", name) and p.default is p.empty:
            words.append(f"{p.name}=sum(isinstance(m, torch.nn.ModuleList) * len(m) for m in model.modules())")
        elif p.default is p.empty:
            return None
    return ", ".join(words)


def _resets(sample: nn.Module) -> Iterator[str]:
    for name in dir(type(sample)):
        if not re.fullmatch(_RESETS, name) or not inspect.isfunction(getattr(type(sample), name)):
            continue
        words = _words(getattr(sample, name))
        if words is not None and ("cache" in name or "state" in name or "kv" in name or name == "reset"):
            yield f"model.{name}({words})"


def _returned(
    sample: nn.Module, wiring: Wiring, way: _Way, names: Mapping[str, Any], x: Tensor
) -> Iterator[tuple[str, str]]:
    """Yield how logits are picked from what a first chunk gives, and how the cache is: "" where it stays the same."""
    source = _source(wiring, way, "", "", "").replace("outputs.append(output)", "return output")
    source = re.sub(r"outputs\.append\(.*\)", "return output", source)
    try:
        output = tried(source, "cache", names, sample, [x[:, :_CUT], x[:, _CUT:]])
    except Exception:
        return
    is_turned = ".transpose(0, 1)" in wiring.pick
    leading = (_CUT, _B) if is_turned else (_B, _CUT)
    found = [w for w, t in picks(output, leading, 0) if t.ndim == 3]
    if not found:
        return
    pick = found[0]
    after = ".transpose(0, 1)" * is_turned
    if way.argument:
        for part in _other_parts(output, pick):
            yield pick + after, part
    if not way.argument or way.past != "None":
        yield pick + after, ""


def _other_parts(output: Any, pick: str) -> Iterator[str]:
    if isinstance(output, Mapping):
        found = [(f"[{n!r}]", v) for n, v in output.items()]
    elif isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        found = [(f"[{i}]", v) for i, v in enumerate(output)]
    else:
        names = getattr(output, "_fields", None) or list(getattr(output, "__dict__", {}))
        found = [(f".{n}", getattr(output, n, None)) for n in names]
    for where, value in sorted(found, key=lambda one: re.search(r"past|cache|kv|state|mem|present", one[0]) is None):
        if where != pick and value is not None and not (isinstance(value, Tensor) and value.numel() < 2):
            yield where


def _source(wiring: Wiring, way: _Way, pick: str, kept: str, split: str) -> str:
    given = {n: v for n, v in wiring.given.items() if n not in way.given and n != way.argument}
    given |= way.given
    if way.argument:
        given[way.argument] = "past"
    words = ", ".join(v if n.startswith("*") else f"{n}={v}" for n, v in given.items())
    over = {
        "": "chunks",
        "behind": "[chunks[0], *(t for chunk in chunks[1:] for t in chunk.split(1, dim=1))]",
        "all": "[t for chunk in chunks for t in chunk.split(1, dim=1)]",
    }[split]
    chosen = f"output{pick}"
    added = f"{wiring.around}({chosen})" if wiring.around else chosen
    lines = [
        *([way.reset] if way.reset else []),
        *([f"past = {way.past}"] if way.argument else []),
        "start, outputs = 0, []",
        f"for {wiring.inputs[0]} in {over}:",
        *(f"    {line}" for line in wiring.before),
        f"    output = {wiring.target}({words})",
        f"    outputs.append({added})",
        *([f"    past = output{kept}"] if kept else []),
        f"    start += {wiring.inputs[0]}.shape[1]",
        "return torch.cat(outputs, dim=1)",
    ]
    return "import torch\n\n\ndef cache(model, chunks):\n" + "".join(f"    {line}\n" for line in lines)


def _rank(source: str, sample: nn.Module, names: Mapping[str, Any], x: Tensor, whole: Tensor) -> int:
    """Return how well a cache goes on: 3 as the whole, 2 as the whole in some cuts, 1 behind its past, 0 not at all."""
    limit = 1e-4 * float(whole.abs().max())
    cuts = ([1] * _T, [_CUT, *[1] * (_T - _CUT)], [_CUT, _T - _CUT])
    held = []
    for cut in cuts:
        try:
            got = tried(source, "cache", names, sample, list(x.split(cut, dim=1)))
            again = tried(source, "cache", names, sample, list(x.split(cut, dim=1)))
        except Exception:
            return 0
        if not isinstance(got, Tensor) or got.shape != whole.shape:
            return 0
        held.append(bool((got - whole).abs().max() <= limit) and bool((again - whole).abs().max() <= limit))
    if all(held):
        return 3
    other = x.clone()
    other[:, 0] = other[:, 0] % (int(x.max())) + 1
    moved = tried(source, "cache", names, sample, list(other.split(cuts[1], dim=1)))
    first = tried(source, "cache", names, sample, list(x.split(cuts[1], dim=1)))
    reaches = bool((moved - first)[:, _CUT:].abs().max() > limit)
    return (2 if any(held) else 1) if reaches else 0
