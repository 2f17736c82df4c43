"""Models that are trained: the reference by its configuration, and the multi-view classifier."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.reference.blocks import EncoderLayer
from veriformer.reference.config import Config
from veriformer.reference.model import build


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def reference_model(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Return the reference that `config` describes; each parameter's weights are a function of seed and its name.

    Variants of one seed thus start from the same weights wherever name and shape agree.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what torch.nn draws by itself (init="default", class tokens)
        return build(Config(**config), lambda name: _generator(seed, name))


class ViewsClassifier(nn.Module):
    """A small CNN for each view, then a head over the set of views: attention (no positions) or plain averaging.

    Either head is invariant to the order of the views: attention without positions is equivariant, the mean invariant.
    """

    def __init__(self, head: str, d_model: int, num_heads: int, num_layers: int, num_classes: int) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(144, d_model),
        )  # fmt: skip
        layer = Config(d_model=d_model, num_heads=num_heads, positions="none")
        depth = num_layers if head == "transformer" else 0
        self.layers = nn.ModuleList(EncoderLayer(layer) for _ in range(depth))
        self.classify = nn.Linear(d_model, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return class logits `[B, C]` for images `[B, V, 8, 8]` of V views."""
        x = self.cnn(images.flatten(0, 1)[:, None]).unflatten(0, images.shape[:2])
        for layer in self.layers:
            x, _ = layer(x)
        return self.classify(x.mean(dim=1))


def views_model(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Return a multi-view classifier, each parameter drawn from seed and name by torch's default scheme."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViewsClassifier(**config)


MODELS: Mapping[str, Callable[[Mapping[str, Any], int], nn.Module]] = {
    "reference": reference_model,
    "views": views_model,
}
"""Makers of a model from its configuration and a seed, by `Task.model`."""
