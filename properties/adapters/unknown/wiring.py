"""A call of somebody's model in the making: what each argument is given, and which part of what comes back is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.unknown.written import attempt


def all_of(x: str) -> str:
    """Return the source of a mask `[B, T]` that hides nothing of a sequence `x`."""
    return f"torch.ones({x}.shape[:2], dtype=torch.bool, device={x}.device)"


ALL = all_of("x")
"""That of the one sequence, for a model whose mask must be given."""

MASKS = ("attention_mask", "source_mask", "target_mask", "memory_mask")


@dataclass(frozen=True)
class Wiring:
    """A call, as source.

    Attributes:
        inputs: names of what our forward takes after the model.
        given: source of each argument, by its name; "*" for the first ones by place.
        before: lines before the call.
        pick: what follows `output` to give the tensor.
        target: what is called: the model, or a part of it.
        masks: the masks that our forward takes.
        around: what is applied to the tensor at the end; empty for nothing.
    """

    inputs: tuple[str, ...]
    given: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    pick: str = ""
    target: str = "model"
    masks: tuple[str, ...] = ()
    around: str = ""

    def having(self, **given: str) -> Wiring:
        """Return a copy that gives more arguments."""
        return replace(self, given={**self.given, **given})

    def unmasked(self) -> Wiring:
        """Return a copy that takes no masks: what was given them is given None, or one that hides nothing."""
        given = dict(self.given)
        for name, value in self.given.items():
            for mask in (m for m in self.masks if m in value):
                given[name] = value.replace(or_all(mask), ALL) if or_all(mask) in value else "None"
        return replace(self, given=given, masks=())

    @property
    def source(self) -> str:
        """The whole function."""
        heads = ", ".join(["model", *self.inputs, *(f"{m}=None" for m in self.masks)])
        words = ", ".join(value if name.startswith("*") else f"{name}={value}" for name, value in self.given.items())
        lines = [f"output = {self.target}({words})", f"output = output{self.pick}", f"output = {self.around}(output)",
                 "return output"]  # fmt: skip
        if not self.around:
            lines = [lines[0], f"return output{self.pick}"] if self.pick else [f"return {self.target}({words})"]
        elif not self.pick:
            del lines[1]
        body = "\n".join(f"    {line}" for line in [*self.before, *lines])
        text = f"def forward({heads}):\n{body}\n"
        return f"import torch\n\n\n{text}" if "torch." in text else text

    def call(self, model: Any, *inputs: Tensor, **masks: Tensor | None) -> Any:
        """Call it once."""
        with torch.no_grad():
            return attempt(self.source, "forward", {})(model, *inputs, **masks)


def or_all(mask: str) -> str:
    """Return the source of a mask, or of one that hides nothing where there is none."""
    return f"({ALL} if {mask} is None else {mask})"


def picks(output: Any, leading: Sequence[int], flat: int) -> list[tuple[str, Tensor]]:
    """Return the tensors in an output that may be meant, each with the source that takes it, the likeliest first.

    Args:
        output: whatever a model gave.
        leading: B and T.
        flat: B * T, of outputs whose positions lie in one axis.
    """
    found = [(where, t) for where, t in tensors_in(output) if t.is_floating_point() and t.ndim >= 2]
    fitting = [(w, t) for w, t in found if list(t.shape[:2]) == list(leading) and t.ndim == 3]
    one_axis = [(f"{w}.view(*x.shape[:2], -1)", t) for w, t in found if t.ndim == 2 and t.shape[0] == flat]
    rest = [(w, t) for w, t in found if t.shape[0] == leading[0] and t.ndim in (2, 3)]
    return fitting + one_axis + rest


def tensors_in(output: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in an output, each with the source that takes it."""
    if isinstance(output, Tensor):
        return [("", output)]
    if isinstance(output, Mapping):
        names = sorted(output, key=lambda n: _RANK.get(str(n), 9))
        return [(f"[{n!r}]{w}", t) for n in names for w, t in tensors_in(output[n])]
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return [(f"[{i}]{w}", t) for i, part in enumerate(output[:8]) for w, t in tensors_in(part)]
    if hasattr(output, "__dict__") or hasattr(output, "_fields"):
        names = getattr(output, "_fields", None) or list(vars(output))
        ranked = sorted((n for n in names if not n.startswith("_")), key=lambda n: _RANK.get(n, 9))
        return [(f".{n}", v) for n in ranked if isinstance(v := getattr(output, n, None), Tensor)]
    return []


_RANK = {
    name: rank for rank, name in enumerate(("logits", "lm_logits", "prediction_logits", "output", "last_hidden_state"))
}


def reached_by(run: Any, x: Tensor, at: tuple[int, int], size: int) -> Tensor | None:
    """Return which cells `[axis 0, axis 1]` of an output change when one cell of the input does; None if none can tell.

    Args:
        run: gives the output of an input.
        x: tokens `[., .]` or embeddings `[., ., D]`.
        at: the cell that is changed.
        size: of the vocabulary.
    """
    other = x.clone()
    other[at] = (other[at] % (size - 1)) + 1 if not x.is_floating_point() else torch.randn(
        x.shape[-1], generator=torch.Generator().manual_seed(5)
    ).to(x.dtype)  # fmt: skip
    before, after = run(x), run(other)
    if before.shape != after.shape:
        return None
    limit = 1e-5 * float(before.nan_to_num().abs().max())
    apart = (after - before).abs().nan_to_num(nan=torch.inf).flatten(2).amax(-1) if before.ndim > 2 else (
        (after - before).abs().nan_to_num(nan=torch.inf)
    )  # fmt: skip
    return apart > limit


def stirred(model: nn.Module) -> None:
    """Move every parameter a little: weights that start at zero show nothing of what they connect."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
                parameter.add_(0.2 * noise)
