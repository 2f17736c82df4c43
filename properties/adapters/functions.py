"""A function of queries, keys and values: how it is called, and which of its masks hides what."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.adapters.constructing.building import reached
from veriformer.properties.adapters.unknown.arguments import arguments_of, by_role, hides_where_true
from veriformer.properties.adapters.unknown.understanding import NotCalledError
from veriformer.properties.adapters.unknown.wiring import picks
from veriformer.properties.adapters.unknown.written import attempt, written
from veriformer.properties.subject.kinds import KINDS, Kind
from veriformer.properties.subject.subject import Subject

_MASKS = (
    ("attention_mask", "True = may attend"),
    ("~attention_mask", "True = masked"),
    ("torch.where(attention_mask, 0.0, float('-inf')).to(q.dtype)", "float, -inf = masked"),
)
_AXES = ("dim", "axis")
_B, _H, _T, _S, _K = 2, 3, 4, 5, 8


def takes_scores_parts(function: Any) -> bool:
    """Whether a function takes queries, keys and values by the names of its arguments, and nothing else it needs.

    >>> takes_scores_parts(lambda q, k, v, mask=None: q), takes_scores_parts(lambda q, scale: q)
    (True, False)
    """
    if not inspect.isfunction(function):
        return False
    arguments = arguments_of(function)
    roles = [a.role for a in arguments[:3]]
    return roles == ["query", "key", "value"] and not any(a.is_required and a.role != "mask" for a in arguments[3:])


def is_a_softmax(function: Any) -> bool:
    """Whether a function is a softmax by its name and its arguments: scores, and the axis if anything.

    >>> is_a_softmax(torch.nn.functional.softmax), is_a_softmax(torch.relu)
    (False, False)
    """
    if not inspect.isfunction(function) or not re.fullmatch(r"(?i)(\w+_)?softmax(_\w+)?", function.__name__):
        return False
    parameters = list(inspect.signature(function).parameters.values())
    others = {p.name for p in parameters[1:] if p.default is p.empty} - {*_AXES}
    known = function.__module__.startswith("torch.") or re.search(r"(?i)log|cross|entropy|loss", function.__name__)
    return not (known or others or not parameters or {p.name for p in parameters} & {"mask", "attention_mask"})


def softmax_of(function: Any) -> Subject:
    """Return the subject of kind softmax that a function of scores is."""
    user, called = reached(function)
    axis = next((n for n in inspect.signature(function).parameters if n in _AXES), None)
    given = f"scores, {axis}=dim" if axis else "scores"
    heads = "model, scores, dim=-1" if axis else "model, scores"
    source = f"def forward({heads}):\n    return {called}({given})\n"
    note = "judged as a softmax by its name"
    return Subject(kind="softmax", name=function.__name__, forward=written(source, "forward", user), notes=(note,))


def asked_for_kind(function: Any, target: str) -> str:
    """Return what to say of a function that needs arguments, and so makes no subject; "" for one that needs none.

    Args:
        function: that was named and is not recognised.
        target: that named it.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not needed:
        return ""
    kind = _kind_like([p.name.lower() for p in parameters])
    said = f"--kind {kind.name} perhaps: that is called with {kind.signature}" if kind else "--kind KIND"
    model_first = ", or (model, ...) where its first argument is called model" if kind else ""
    returns = f", and returns {kind.returns}" if kind else ""
    return (
        f"{target} is a function of ({', '.join(p.name for p in parameters)}), and one that makes a Subject takes "
        f"no argument; if it is itself what is to be judged say its kind, {said}{model_first}{returns}; "
        "`veriformer kinds` lists them all"
    )


def _kind_like(names: Sequence[str]) -> Kind | None:
    """Return the kind whose required arguments are all among these names; None where there is none, or are none."""
    words = {_OTHER_WORDS.get(name, name) for name in names}
    found: dict[str, set[str]] = {}
    for name, kind in KINDS.items():
        bare = re.sub(r"\[[^]]*\]", "", kind.signature).strip("()")
        found[name] = {part.strip() for part in bare.split(",") if part.strip() and "=" not in part}
    fitting = [name for name, needed in found.items() if needed and needed <= words]
    return KINDS[max(fitting, key=lambda name: len(found[name]))] if fitting else None


_OTHER_WORDS = {
    "query": "q", "queries": "q", "key": "k", "keys": "k", "value": "v", "values": "v", "input_ids": "tokens",
    "idx": "tokens", "ids": "tokens", "hidden_states": "x", "src": "source", "tgt": "target", "targets": "labels",
}  # fmt: skip
"""Other names of the arguments of kinds."""


def attention_of(function: Any) -> Subject:
    """Return the subject of kind attention that a function is.

    Raises:
        NotCalledError: it refuses `[B, H, T, K]`, or gives something else.
    """
    user, called = reached(function)
    arguments = arguments_of(function)
    masks = [a.name for a in by_role(arguments, "mask")]
    flag = next((a.name for a in arguments if a.name in ("causal", "is_causal")), None)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(_B, _H, n, _K, generator=generator) for n in (_T, _S, _S))
    required = [a.name for a in by_role(arguments, "mask") if a.is_required]
    plain = _source(called, dict.fromkeys(required, "None"), flag, "")
    try:
        with torch.no_grad():
            output = attempt(plain, "forward", user)(None, q, k, v)
    except Exception as problem:
        raise NotCalledError(
            f"{function.__name__} was called with q {[*q.shape]}, k and v {[*k.shape]} and raised "
            f"{type(problem).__name__}: {problem}; write Subject(kind='attention', forward=...)"
        ) from problem
    found = [where for where, t in picks(output, (_B, _H), 0) + _of_four(output) if tuple(t.shape) == (_B, _H, _T, _K)]
    if not found:
        raise NotCalledError(f"{function.__name__} gave no [B, H, T, K]; write Subject(kind='attention', forward=...)")
    pick = found[0]
    notes = ["judged as attention by the names of its arguments"]
    source = _source(called, dict.fromkeys(required, "None"), flag, pick)
    forms: tuple[str, ...] = ()
    for name in masks[:1]:
        source, told = _masked(called, name, flag, pick, user, (q, k, v))
        if told:
            forms = ("pairwise",)
            notes.append(f"{name} is {told}")
    return Subject(kind="attention", name=function.__name__, forward=written(source, "forward", user),
                   mask_forms=forms, notes=tuple(notes))  # fmt: skip


def _of_four(output: Any) -> list[tuple[str, Tensor]]:
    parts = [("", output)] if isinstance(output, Tensor) else [(f"[{i}]", part) for i, part in enumerate(output)]
    return [(where, t) for where, t in parts if isinstance(t, Tensor)]


def _source(called: str, given: dict[str, str], flag: str | None, pick: str, *, masked: bool = False) -> str:
    words = ", ".join(["q", "k", "v", *(f"{n}={v}" for n, v in given.items()), *([f"{flag}=causal"] if flag else [])])
    heads = "model, q, k, v" + ", attention_mask=None" * masked + ", causal=False" * bool(flag)
    text = f"def forward({heads}):\n    return {called}({words}){pick}\n"
    return f"import torch\n\n\n{text}" if "torch." in text else text


def _masked(
    called: str, name: str, flag: str | None, pick: str, user: dict[str, Any], inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[str, str]:
    """Return the call with a mask, and what the mask is; "" where no form of it is taken."""
    first = ""
    told_first = ""
    for form, told in _ordered(hides_where_true(name)):
        given = form if form == "attention_mask" else f"None if attention_mask is None else {form}"
        source = _source(called, {name: given}, flag, pick, masked=True)
        try:
            if _hides(attempt(source, "forward", user), inputs):
                return source, f"{told}: found by trying which form hides a key"
        except Exception:
            continue
        first, told_first = first or source, told_first or f"{told}, by its name alone: no form was seen to hide a key"
    return first or _source(called, {name: "None"}, flag, pick), told_first


def _ordered(hidden_first: bool) -> Iterator[tuple[str, str]]:
    yield from (_MASKS[1], _MASKS[0], _MASKS[2]) if hidden_first else _MASKS


def _hides(forward: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether the value of a masked key reaches no output, and that of another one does."""
    q, k, v = inputs
    allow = torch.ones(_B, 1, _T, _S, dtype=torch.bool)
    allow[..., 1] = False
    with torch.no_grad():
        before = forward(None, q, k, v, attention_mask=allow)
        moved = []
        for at in (1, 0):
            other = v.clone()
            other[:, :, at] += 1
            moved.append(not torch.allclose(forward(None, q, k, other, attention_mask=allow), before, atol=1e-5))
    return moved == [False, True]
