"""The stack of layers inside a model of images: what is a sequence there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked


def image_of(sample: nn.Module) -> Tensor | None:
    """Return an image that a model can take `[B, C, 8, 8]`, or None where nothing says that it takes images."""
    for channels in _channels(sample):
        for side in (8, 16, 32, 28, 224):
            image = torch.randn(3, channels, side, side, generator=torch.Generator().manual_seed(0))
            try:
                with torch.no_grad():
                    sample(image)
                return image
            except Exception:
                continue
    return None


def _channels(sample: nn.Module) -> list[int]:
    found = [m.in_channels for m in sample.modules() if isinstance(m, nn.Conv2d)]
    return found[:1] or [3, 1]


def stack_inside(sample: nn.Module, image: Tensor, width: int) -> tuple[str, bool] | None:
    """Return the path of the part that maps `[B, N, D]` to `[B, N, D]`, and whether it is a list of such parts.

    Args:
        sample: a model of images.
        image: that it takes.
        width: D.
    """
    maps: set[str] = set()

    def noted(path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            fits = args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and args[0].shape == output.shape
            if fits and output.ndim == 3 and output.shape[-1] == width and len(args) == 1:
                maps.add(path)

        return note

    hooks = (m.register_forward_hook(noted(path)) for path, m in sample.named_modules() if path)
    with hooked(hooks), torch.no_grad():
        sample(image)
    parts = dict(sample.named_modules())
    lists = {path: True for path, m in parts.items() if path and isinstance(m, nn.ModuleList | nn.Sequential) and len(m)
             and all(f"{path}.{i}" in maps for i in range(len(m)))}  # fmt: skip
    found = {
        **{path: False for path in maps if _attends(parts[path])},
        **{p: b for p, b in lists.items() if _attends(parts[p])},
    }
    if not found:
        return None
    largest = max(found, key=lambda path: (sum(p.numel() for p in parts[path].parameters()), -len(path)))
    return _subscripted(largest), found[largest] and isinstance(parts[largest], nn.ModuleList)


def _attends(part: nn.Module) -> bool:
    return any("att" in type(m).__name__.lower() or "transformer" in type(m).__name__.lower() for m in part.modules())


def _subscripted(path: str) -> str:
    """Return a path as Python writes it: numbers as indices."""
    first, *rest = path.split(".")
    return first + "".join(f"[{word}]" if word.isdigit() else f".{word}" for word in rest)
