"""Models that are trained: the reference by its configuration, and the multi-view classifier."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.reference.config import Config
from veriformer.reference.initialization import INITS
from veriformer.reference.model import Embedding, Stack, build, run_layers
from veriformer.reference.views import MultiViewClassifier


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


def views_model(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Return a classifier of sets of images `[B, V, 8, 8]`, each parameter drawn by torch's default scheme.

    Args:
        config: `head`, "transformer" or "average", and fields of the reference's Config.
        seed: of every weight.
    """
    head = Config(positions="none", **{name: value for name, value in config.items() if name != "head"})
    make = MultiViewClassifier if config["head"] == "transformer" else MultiViewClassifier.without_attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cnn = nn.Sequential(
            nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2),
            nn.ReLU(), nn.Flatten(), nn.Linear(144, head.d_model),
        )  # fmt: skip
        return make(cnn, head)


class Reader(nn.Module):
    """Tokens `[B, T]` to logits of the token at each place `[B, T, V]`, from what stands around it or before it.

    Reading both ways it is BERT's model (Devlin et al. 2019): the place itself is hidden by a mask token, or its answer
    would be read off. Reading to the left, the logits of a place are made from the one before it (Radford et al. 2019),
    so that one set of labels serves both, and the first place is guessed evenly.
    """

    def __init__(self, *, reads: str, **config: Any) -> None:
        super().__init__()
        if reads not in ("left", "both"):
            raise ValueError(f"reads was {reads!r}; it must be left or both")
        self.is_causal = reads == "left"
        self.config = Config(architecture="decoder", **config)
        self.embedding = Embedding(self.config)
        self.stack = Stack(self.config, causal=self.is_causal)
        self.output = nn.Linear(self.config.d_model, self.config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]` of tokens `[B, T]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden, _ = run_layers(self.stack, self.embedding(tokens, None, positions), None, positions)
        logits: Tensor = self.output(hidden)
        if not self.is_causal:
            return logits
        return torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], dim=1)


def reader_model(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Return a reader of the left or of both sides; both start from the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Reader(**config)
        INITS[model.config.init](model, model.config, lambda name: _generator(seed, name))
        return model


MODELS: Mapping[str, Callable[[Mapping[str, Any], int], nn.Module]] = {
    "reference": reference_model,
    "views": views_model,
    "reader": reader_model,
}
"""Makers of a model from its configuration and a seed, by `Task.model`."""
