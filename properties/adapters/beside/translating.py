"""How an encoder-decoder generates from a source: which of its methods does, and what it is given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.beside.generating import candidates
from veriformer.properties.adapters.beside.offers import Offer, tried

_NAMES = r"(greedy_)?(generate|translate|sample|complete|greedy|infer|inference|decode_greedy)(_\w+)?" \
         r"|greedy_(search|decode|decoding)"  # fmt: skip
_SOURCES = r"(\w+_)?(src|source|sources?|input_?ids|inputs?|tokens|ids|x|text|encoder_inputs?)(_\w+)?"
_NEW = r"(max_|num_|n_)?(new_?)?(tokens?|steps?|gen_len|n)|max_new|max_new_tokens"
_TOTAL = r"(max|total|num|n|tgt|target)_?(seq_|target_|tgt_|out_|output_|decode_|gen_)?(len|length|steps|tokens)" \
         r"|length|maxlen"  # fmt: skip
_GIVEN: tuple[tuple[str, str], ...] = (
    (r"(bos|sos|start|begin)(_?(id|idx|token|token_id|symbol|index))*", "1"),
    (r"(eos|end|stop)(_?(id|idx|token|token_id|symbol|index))*", "2"),
    (r"(use_)?(kv_)?cach(e|ed|ing)", "use_cache"),
    (r"do_sample|sample|sampling", "False"),
    (r"(num_)?beams?(_size|_width)?", "1"),
)  # fmt: skip
_S, _STEPS = 5, 6


def translate_beside(sample: nn.Module, module: ModuleType | None, size: int, before: str) -> list[Offer]:
    """Return an encoder-decoder's generation as `generate(model, source, steps, use_cache)`, the start with it.

    Args:
        sample: in eval mode.
        module: the user's.
        size: of the vocabulary.
        before: source of what the model is given for `source`.
    """
    refused, names = "", {} if module is None else {"user": module}
    for called, function, skip in candidates(sample, module, _NAMES):
        given = _given(function, skip)
        if isinstance(given, str):
            refused = refused or f"its {called} is not judged: nothing is known of its argument {given!r}"
            continue
        words = ", ".join(["model"] * called.startswith("user.") + [before, *(f"{n}={v}" for n, v in given.items())])
        source = f"def generate(model, source, steps, use_cache):\n    return {called}({words})\n"
        if why := _why_not(source, names, sample, size):
            refused = refused or f"its {called} is not judged: {why}"
            continue
        told = called.removeprefix("model.").removeprefix("user.")
        return [Offer("generate", source, (f"its {told}({words}) is judged: the same tokens come out at every call",))]
    return [Offer("generate", "", (refused,))] if refused else []


def _given(function: Any, skip: int) -> Mapping[str, str] | str:
    """Return the arguments behind the source; or the name of one that nothing is known for."""
    parameters = [p for p in inspect.signature(function).parameters.values()
                  if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][skip:]  # fmt: skip
    if not parameters or not re.fullmatch(_SOURCES, parameters[0].name.lower()):
        return parameters[0].name if parameters else "the source"
    found: dict[str, str] = {}
    for p in parameters[1:]:
        name, is_required = p.name.lower(), p.default is p.empty
        value = next((v for pattern, v in _GIVEN if re.fullmatch(pattern, name)), None)
        if re.fullmatch(_NEW, name) and "steps" not in found.values():
            found[p.name] = "steps"
        elif re.fullmatch(_TOTAL, name) and not {"steps", "steps + 1"} & set(found.values()):
            found[p.name] = "steps + 1"
        elif value is not None and (is_required or value in ("use_cache", "False")):
            found[p.name] = value
        elif is_required and ("mask" in name or "pad" in name):
            found[p.name] = "None"
        elif is_required:
            return p.name
    return found if {"steps", "steps + 1"} & set(found.values()) else "how many tokens it is to give"


def _why_not(source: str, names: Mapping[str, Any], sample: nn.Module, size: int) -> str:
    """Return why a generation cannot be judged; "" where it gives tokens, the same whatever is drawn."""
    tokens = torch.randint(1, max(size, 2), (2, _S), generator=torch.Generator().manual_seed(3))
    try:
        found = [tried(source, "generate", names, sample, tokens, _STEPS, False, seed=s) for s in (1, 2, 3)]
    except Exception as problem:
        return f"it raised {type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
    if not all(isinstance(got, Tensor) and got.ndim == 2 and not got.is_floating_point() for got in found):
        return "it gave no tokens [B, T]"
    if len(found[0]) != 2 or not 2 <= found[0].shape[1] <= _STEPS + 2:
        return f"for a source [2, {_S}] and {_STEPS} tokens it gave {list(found[0].shape)}"
    if len(found[0][:, 0].unique()) > 1:
        return "what it gives does not begin with one token in all rows"
    return "" if all(torch.equal(found[0], got) for got in found[1:]) else "what it gives differs from call to call"
