"""A class token that a model puts before its sequence and does not read out again."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.probes.findings import Finding, Question, a_stream

_NAMES = r"(cls|class)_?(token|emb|embed|embedding)s?"
_LENGTH = 6


def class_token(bench: Workbench) -> Iterator[Finding]:
    """Ask where a model has a class token and what it gives does not depend on what became of it."""
    subject = bench.subject
    if subject.kind not in ("classifier", "encoder") or (subject.kind == "encoder" and subject.image is None):
        return
    stream = a_stream(bench)
    module = stream.built.module
    if not isinstance(module, nn.Module):
        return
    x = stream.draw(1, _LENGTH)
    run: Callable[[], Any] = lambda: stream(x)  # noqa: E731
    if subject.image is not None:
        if not isinstance(vars(module).get("whole"), nn.Module):
            return
        module = copy.deepcopy(module.__dict__["whole"]).float().eval()
        image = torch.randn(1, *subject.image, generator=torch.Generator().manual_seed(0)).to(bench.device)
        run = lambda: module(image)  # noqa: E731
    names = [n for n, _ in module.named_parameters() if re.fullmatch(_NAMES, n.rpartition(".")[2].lower())]
    reached = read_out(module, run) if names else None
    if reached is None or (subject.image is None and len(reached) != _LENGTH + 1):
        return
    if reached[0] or reached[-1]:
        return
    text = (
        f"it has a class token ({names[0]}), and what it gives does not depend on what becomes of that: is another "
        "position read out?"
    )
    prop = "embedding.patches" if subject.image is not None else "parameters.all-used"
    asks = Question(prop, text, "pooling='other'")
    yield Finding("class token", names[0], "by its name", is_fact=False, told=False, asks=asks)


def read_out(model: nn.Module, run: Callable[[], Any]) -> list[bool] | None:
    """Return on which positions of the last sequence inside a model its output depends; None where that is not told.

    Args:
        model: that is called.
        run: calls it on one sample.
    """
    calls: list[nn.Module] = []
    made: list[Tensor] = []

    def is_sequence(output: Any) -> bool:
        return isinstance(output, Tensor) and output.ndim == 3 and min(output.shape[:2]) == 1 < max(output.shape[:2])

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if is_sequence(output):
            calls.append(module)

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        if not is_sequence(output):
            return None
        calls.append(module)
        if len(calls) < count:
            return None
        made.append(output.detach().clone().requires_grad_())
        return made[0]

    parts = [m for m in model.modules() if m is not model]
    with torch.enable_grad():
        with _hooked(parts, note):
            run()
        count = len(calls)
        calls.clear()
        if not count:
            return None
        with _hooked(parts, cut):
            output = run()
    output = next(iter(output.values())) if isinstance(output, dict) else output
    output = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(output, Tensor) or len(made) != 1 or not output.requires_grad:
        return None
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    total = (output * weight).sum()
    (gradient,) = torch.autograd.grad(total, made[0], allow_unused=True, materialize_grads=True)
    rows: list[bool] = gradient.abs().sum(-1).flatten().ne(0).tolist()
    return rows if any(rows) else None


@contextlib.contextmanager
def _hooked(parts: list[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [part.register_forward_hook(hook) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
