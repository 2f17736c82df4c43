"""What an argument of a `forward` is, by its name; whatever may go either way by convention is told by trying."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ROLES: tuple[tuple[str, str], ...] = (
    ("mask", r".*(mask|_pad|padding|padding_lens)\w*|pad"),
    ("query", r"x?_?(q|query|queries)(_in)?s?"),
    ("key", r"x?_?(k|key|keys)(_in)?s?"),
    ("value", r"x?_?(v|value|values)(_in)?s?"),
    ("positions", r"((src|tgt|trg|source|target|enc|dec)_)(pos|positions?|position_ids)"),
    ("target", r"(tgt|trg|target)s?(_?(seq|ids|tokens|input|inputs|sequence|in))?|(dec|decoder)_?\w*"
               r"|output_(seq|ids|tokens)"
               r"|target_\w*(embeddings?|tokens|inputs?)"
               r"|(tokens?|ids|x|seq|sequence|inputs?|embeddings?)_(tgt|trg|target|dec|decoder)|outputs?|y"),
    ("memory", r"memory|mem|context|ctx|cond|enc(oder)?_(out|output|outputs|src|hidden_states?|states?)|enc_output"
               r"|encoder_hidden_states"),
    ("labels", r"labels?|targets?|tgts?|y|target_ids|next_tokens"),
    ("cache", r"((past|prev|layer|kv|key_value)_?)*(caches?|past|kvs?|key_values?)"),
    ("start", r"(start|pos|position|past|cache|kv)_?(pos|offset|len|length|idx|index|start)?|offset|start|curr?_pos"),
    ("positions", r"(input_)?(pos|positions?|position_ids|pos_ids)"),
    ("segments", r"(token_?type(_?ids)?|seg(ment)?s?(_?\w+)?|type_ids)"),
    ("flag", r"(is_)?causal|use_cache|return_\w+|need_weights|average_attn_weights|training|verbose|output_\w+"),
)  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One argument of a forward.

    Attributes:
        name: of it.
        role: "mask", "query", "key", "value", "target", "memory", "labels", "cache", "start", "positions", "segments",
            "flag", "first" for the first one that is none of these, or "" for what is not known.
        is_required: whether it has no default.
    """

    name: str
    role: str
    is_required: bool


def arguments_of(forward: Callable[..., Any]) -> list[Argument]:
    """Return the arguments of a forward in their order, without `*args` and `**kwargs`."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return [Argument("x", "first", True)]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not named:
        return [Argument("x", "first", True)]
    found = []
    for number, p in enumerate(named):
        is_required = p.default is p.empty
        role = "first" if number == 0 else _role(p.name, is_required)
        if number == 0 and (own := _role(p.name, True)) in ("query", "key", "value"):
            role = own
        found.append(Argument(p.name, role, is_required))
    if {"query", "key", "value"} - {a.role for a in found}:  # q alone, or y as a name, is no attention
        found[0] = Argument(found[0].name, "first", found[0].is_required)
    return found


def _role(name: str, is_required: bool) -> str:
    for role, pattern in _ROLES:
        if role == "target" and not is_required:
            continue
        if role == "labels" and is_required and re.fullmatch(r"y|tgts?", name):
            continue
        if re.fullmatch(pattern, name.lower()):
            return role
    return ""


def by_role(arguments: Sequence[Argument], role: str) -> list[Argument]:
    """Return the arguments of a role."""
    return [a for a in arguments if a.role == role]


def hides_where_true(name: str) -> bool:
    """Whether by the convention of its name True in a mask means that a position is hidden, as in torch.nn.

    >>> hides_where_true("src_key_padding_mask"), hides_where_true("attention_mask")
    (True, False)
    """
    return re.search(r"(key_padding|padding|pad)(_?mask)?$", name.lower()) is not None
