"""What a model's own code says and its numbers do not show: smaller initial weights, an end of text that is pooled."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.probes.findings import Finding, Question, a_stream
from veriformer.properties.probes.module_parts import layer_lists, writers

_N = r"[\w.\[\]'\"]*(layers?|depth|blocks?)\w*['\"\])]*"
_SCALED = re.compile(
    rf"(2(\.0)?\s*\*\s*{_N}|{_N}\s*\*\s*2(\.0)?)\s*\)*\s*\*\*\s*-?\s*\(?0?\.5|sqrt\(\s*\(?2(\.0)?\s*\*\s*{_N}"
)
"""A square root of twice the number of layers, as code writes it."""
_STARTS = re.compile(r"std|normal_|weight|gain|\.mul_|\.data|init")

_ENDS = r"(eot|eos|end_of_text|sep)(_?(token|tok|id|idx|index|token_id))?"


def smaller_starts(bench: Workbench) -> Iterator[Finding]:
    """Compare what writes into the stream with other matrices, where code that initialises speaks of sqrt(2 N)."""
    subject = bench.subject
    if subject.kind not in ("encoder", "decoder") or subject.build is None or subject.fact("init") is not None:
        return
    wanted = {"d_model": 48, "num_heads": 4, "num_key_value_heads": 4, "num_layers": 4}
    config = replace(bench.configs[0], **{n: v for n, v in wanted.items() if n not in subject.domain})
    if config.d_model % config.num_heads or not (
        code := _initialising(bench.pool.get(bench.configs[0], torch.float32).module)
    ):
        return
    module = bench.pool.fresh(config, torch.float32, raw=True).module
    found = writers(module, config)
    wrote = {id(p) for p in found.values()}
    inside = [p for layers in layer_lists(module, config) for layer in layers for p in layer.parameters()]
    others = [p.detach().flatten().double() for p in inside if p.ndim == 2 and id(p) not in wrote]
    if not found or not others:
        return
    usual = torch.cat(others).square().mean().sqrt()
    factor = (2 * config.num_layers) ** -0.5
    ratios = {n: float(p.detach().double().square().mean().sqrt() / usual) / factor for n, p in found.items()}
    missed = [n for n, r in ratios.items() if r > factor**-0.5]  # nearer to no scaling at all, on a scale of ratios
    if not missed:
        return
    text = (
        f"its code scales initial weights ({code}), and {len(missed)} of the {len(found)} matrices that write into "
        f"the stream do not start 1/sqrt(2 N) as large as the others ({missed[0]}): is the scaling applied to nothing?"
    )
    asks = Question("parameters.all-used", text, "init='other'")
    yield Finding("smaller starts", missed[0], "against its code", is_fact=False, told=False, asks=asks)


def _initialising(module: object) -> str:
    """Return where code that initialises takes a root of twice the number of layers; "" where none does."""
    if not isinstance(module, nn.Module):
        return ""
    for cls in dict.fromkeys(base for m in module.modules() for base in type(m).__mro__ if base is not object):
        if cls.__module__.startswith("torch."):
            continue
        for name, method in vars(cls).items():
            function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
            if not inspect.isfunction(function) or not re.search(r"init|reset", name):
                continue
            try:
                lines = inspect.getsource(function).splitlines()
            except (OSError, TypeError):
                continue
            for at, line in enumerate(lines):
                said = _SCALED.search(line.partition("#")[0])
                if said and _STARTS.search(" ".join(lines[max(at - 2, 1) : at + 2])):
                    return line.strip()[:60]
    return ""


def ends_of_texts(bench: Workbench) -> Iterator[Finding]:
    """Change what stands behind the token that a model calls the end of a text: without a mask it is padding."""
    subject = bench.subject
    if subject.kind != "classifier" or not subject.takes_tokens or subject.takes_mask("padding"):
        return
    stream = a_stream(bench)
    module, size = stream.built.module, stream.built.config.vocab_size
    if not isinstance(module, nn.Module):
        return
    holders = [module, *(vars(module)[n] for n in ("config", "cfg", "args") if n in vars(module))]
    named = {n: v for holder in holders for n, v in getattr(holder, "__dict__", {}).items()
             if type(v) is int and 0 <= v < size and re.fullmatch(_ENDS, n.lower())}  # fmt: skip
    if not named or size < 5:
        return
    name, end = next(iter(named.items()))
    words = [t for t in range(1, size) if t != end][:3]
    text = torch.tensor([[words[0], words[1], end, words[0], words[2]]], device=bench.device)
    other = torch.tensor([[words[0], words[1], end, words[1], words[0]]], device=bench.device)
    with torch.no_grad():
        one, two = stream(text).detach(), stream(other).detach()
    if float((one - two).abs().max()) <= 1e-4 * float(one.abs().max()):
        return
    text_of_it = (
        f"what stands behind the token that it calls {name} ({end}) changes what is pooled, and no mask hides it: is "
        "another token pooled than the end of the text?"
    )
    asks = Question("batch.independence", text_of_it, "pooling='other'")
    yield Finding("end of a text", end, "by its name", is_fact=False, told=False, asks=asks)
