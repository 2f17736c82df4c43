"""The ways one subject can be called that must all give the same answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties.subject.subject import Subject

GRAD_MODES = ("grad", "no_grad", "inference")
TURNS = 3
"""Every path is walked by the first case of a property, then by one case in so many; the first path by all."""
COMPILED_LENGTH = 5
"""Length at which properties walk compiled code: longer than one, and no size of the smallest model."""


@dataclass(frozen=True)
class Path:
    """One way to call a subject.

    Attributes:
        mask: form of the mask: "none", "ones" (all may be attended), "padded".
        mode: "grad", "no_grad" or "inference"; fast paths differ by it.
        backend: key of `Subject.backends`, or "default".
        training: whether the model is in train mode (only where it is deterministic there).
        layout: of the inputs in memory, see `layouts.LAYOUTS`; "" for contiguous.
        autocast: dtype of torch.autocast, "bfloat16" or "float16"; "" for none.
        compiled: through torch.compile.
    """

    mask: str = "none"
    mode: str = "grad"
    backend: str = "default"
    training: bool = False
    layout: str = ""
    autocast: str = ""
    compiled: bool = False

    def __str__(self) -> str:
        words = [f"mask={self.mask}", f"mode={self.mode}"]
        if self.backend != "default":
            words.append(f"backend={self.backend}")
        words += ["autocast"] * bool(self.autocast) + [self.autocast] * (self.autocast == "float16")
        words += ["compiled"] * self.compiled
        if self.training:
            words.append("train")
        if self.layout:
            words.append(self.layout)
        return " ".join(words)


DEFAULT = Path()


def paths_of(
    subject: Subject,
    *,
    masks: Sequence[str] = ("none", "ones"),
    modes: Sequence[str] = GRAD_MODES,
    training: bool = False,
    autocast: bool = False,
    compiled: bool = False,
) -> list[Path]:
    """Return the paths that `subject` offers: masks x modes, each backend with each mask, and strided inputs.

    Args:
        subject: masks other than "none" are left out where it takes no padding mask.
        masks: forms of mask that the property can use.
        modes: gradient modes that the property can use.
        training: whether train mode is among them.
        autocast: whether autocast is.
        compiled: whether torch.compile is.
    """
    forms = [m for m in masks if m == "none" or subject.takes_mask("padding")]
    found = [Path(mask=m, mode=g) for m in forms for g in modes]
    found += [Path(mask=m, mode=modes[0], backend=b) for b in subject.backends for m in forms]
    if training:
        found += [Path(mask=m, mode=modes[0], training=True) for m in forms]
    if forms:
        found.append(Path(mask=forms[-1], mode=modes[0], layout="strided"))
        found += [Path(mask=forms[-1], mode=modes[0], autocast="bfloat16")] * autocast
        found += [Path(mask=forms[-1], mode=modes[0], compiled=True)] * compiled
    return found


def in_turn(offered: Sequence[Path], turn: int) -> list[Path]:
    """Return the paths whose turn it is: all at turn 0, else the first, the compiled one, and one in `TURNS`.

    >>> [path.mode for path in in_turn([Path(mode=m) for m in GRAD_MODES], 2)]
    ['grad', 'inference']
    """
    if not turn:
        return list(offered)
    return [p for number, p in enumerate(offered) if not number or p.compiled or number % TURNS == turn % TURNS]


@contextmanager
def walking(path: Path, subject: Subject, module: object, device: torch.device) -> Iterator[None]:
    """Hold the gradient mode, the backend, autocast and the train mode of `path` while the block runs."""
    grad: AbstractContextManager[object] = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }[path.mode]()
    backend = subject.backends[path.backend]() if path.backend != "default" else nullcontext()
    mixed = torch.autocast(device.type, dtype=getattr(torch, path.autocast)) if path.autocast else nullcontext()
    trained = module if path.training and isinstance(module, nn.Module) else None
    with grad, backend, mixed:
        if trained is not None:
            trained.train()
        try:
            yield
        finally:
            if trained is not None:
                trained.eval()
