"""Faults beside a forward: in the loss that a model gives with its logits, and in what its generation draws from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.decoding import decoder
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import sized


def right_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def right_sampling(model: nn.Module, tokens: Tensor, steps: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    drawn = []
    for _ in range(steps):
        drawn.append((model(tokens)[:, -1] / temperature).softmax(-1))
        tokens = torch.cat([tokens, drawn[-1].topk(2, dim=-1).indices[:, 1:]], dim=1)
    return tokens, torch.stack(drawn, dim=1)


def with_loss(loss: Any) -> Subject:
    return replace(decoder(None), cache=None, loss=put(loss, instead_of=right_loss))


@fault(
    "LS01-model",
    "A model's own loss moves logits and labels the wrong way round",
    killed_by=("loss.of-model",),
    cause="wrong way round",
)
def moved_backwards() -> Subject:
    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), labels[:, :-1].flatten())

    return with_loss(loss)


@fault(
    "LS04-model",
    "A model's own loss is divided by all positions, those that are not counted among them",
    killed_by=("loss.of-model",),
    cause="divided by all positions",
)
def divided_by_all() -> Subject:
    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").mean()

    return with_loss(loss)


@fault(
    "sampling-temperature",
    "The logits are multiplied by the temperature before a token is drawn",
    killed_by=("decoding.sampling",),
    cause="multiplied by the temperature",
)
def multiplied_by_the_temperature() -> Subject:
    def sampling(model: nn.Module, tokens: Tensor, steps: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        return right_sampling(model, tokens, steps, 1 / temperature)

    return replace(decoder(None), cache=None, sampling=put(sampling, instead_of=right_sampling))


@fault(
    "sampling-behind-softmax",
    "The temperature divides the probabilities, which what draws from them normalises again",
    killed_by=("decoding.sampling",),
    cause="divides the probabilities, behind the softmax",
)
def divided_behind_the_softmax() -> Subject:
    def sampling(model: nn.Module, tokens: Tensor, steps: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        drawn = []
        for _ in range(steps):
            weights = model(tokens)[:, -1].softmax(-1) / temperature
            drawn.append(weights / weights.sum(-1, keepdim=True))
            tokens = torch.cat([tokens, drawn[-1].topk(2, dim=-1).indices[:, 1:]], dim=1)
        return tokens, torch.stack(drawn, dim=1)

    return replace(decoder(None), cache=None, sampling=put(sampling, instead_of=right_sampling))


def _cut(logits: Tensor, top_k: int | None) -> Tensor:
    if top_k is None:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[:, -1:], -torch.inf)


@fault(
    "sampling-batch",
    "Top k cuts all samples of a batch at one threshold, the smallest of their k-th largest logits",
    killed_by=("decoding.sampling",),
    cause="one threshold for the batch",
)
def cut_at_one_threshold() -> Subject:
    def for_all(logits: Tensor, top_k: int | None) -> Tensor:
        return logits if top_k is None else logits.masked_fill(logits < logits.topk(top_k).values.min(), -torch.inf)

    keep = put(for_all, instead_of=_cut)

    def sampling(
        model: nn.Module, tokens: Tensor, steps: int, temperature: float = 1.0, top_k: int | None = None
    ) -> tuple[Tensor, Tensor]:
        drawn = []
        for _ in range(steps):
            drawn.append(keep(model(tokens)[:, -1] / temperature, top_k).softmax(-1))
            tokens = torch.cat([tokens, drawn[-1].topk(2, dim=-1).indices[:, :1]], dim=1)
        return tokens, torch.stack(drawn, dim=1)

    return replace(decoder(None), cache=None, sampling=sampling)


class Images(nn.Module):
    """What stands before an encoder of images: patches of 4 x 4 pixels become tokens."""

    def __init__(self, width: int, *, moves: bool) -> None:
        super().__init__()
        self.patches, self.moves = nn.Conv2d(3, width, 4, 4), moves

    def forward(self, images: Tensor) -> Tensor:
        seen = self.patches(images)
        return seen.flatten(2).transpose(1, 2) if self.moves else seen.reshape(len(seen), -1, seen.shape[1])


def right_patches(model: nn.Module, images: Tensor) -> Tensor:
    torch.manual_seed(0)
    return Images(16, moves=True)(images)


@fault(
    "patches-mixed",
    "A map [B, D, h, w] is reshaped to [B, N, D]: each token has a few channels of many patches",
    killed_by=("embedding.patches",),
    cause="channels and patches are mixed",
)
def patches_are_mixed() -> Subject:
    def patches(model: nn.Module, images: Tensor) -> Tensor:
        torch.manual_seed(0)
        return Images(16, moves=False)(images)

    return replace(of_images(16, 16), patches=put(patches, instead_of=right_patches))


def of_images(height: int, width: int) -> Subject:
    return Subject(
        kind="encoder",
        build=lambda c: build(sized(c, architecture="encoder", positions="learned")),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"positions": "learned", "causal": False},
        image=(3, height, width),
    )


def right_places(model: nn.Module, images: Tensor) -> Tensor:
    h, w = images.shape[-2] // 4, images.shape[-1] // 4
    places = torch.arange(h, dtype=images.dtype), torch.arange(w, dtype=images.dtype)
    x, y = torch.meshgrid(places[1], places[0], indexing="xy")
    rates = 10 ** -torch.arange(4, dtype=images.dtype)
    added = [f(g.flatten()[:, None] * rates) for g in (y, x) for f in (torch.sin, torch.cos)]
    return right_patches(model, images) + torch.cat(added, dim=-1)


@fault(
    "patches-grid",
    "The positions of patches are laid out column by column, the patches row by row",
    killed_by=("embedding.patches",),
    cause="column by column",
)
def grid_of_positions_is_turned() -> Subject:
    def patches(model: nn.Module, images: Tensor) -> Tensor:
        h, w = images.shape[-2] // 4, images.shape[-1] // 4
        places = torch.arange(h, dtype=images.dtype), torch.arange(w, dtype=images.dtype)
        x, y = torch.meshgrid(places[1], places[0], indexing="ij")
        rates = 10 ** -torch.arange(4, dtype=images.dtype)
        added = [f(g.flatten()[:, None] * rates) for g in (y, x) for f in (torch.sin, torch.cos)]
        return right_patches(model, images) + torch.cat(added, dim=-1)

    return replace(of_images(8, 12), patches=put(patches, instead_of=right_places))


@fault(
    "patches-spread",
    "An image is reshaped with the axes of the grid and of a patch exchanged: a token takes every n-th pixel",
    killed_by=("embedding.patches",),
    cause="every 2. row and every 3. column",
)
def patches_are_spread() -> Subject:
    cut = put("b c (p h) (q w)", instead_of="b c (h p) (w q)")

    def patches(model: nn.Module, images: Tensor) -> Tensor:
        h, w = images.shape[-2] // 4, images.shape[-1] // 4
        rows, columns = ((4, h), (4, w)) if "(p h)" in cut else ((h, 4), (w, 4))
        parts = images.unflatten(3, columns).unflatten(2, rows)
        order = (0, 3, 5, 1, 2, 4) if "(p h)" in cut else (0, 2, 4, 1, 3, 5)
        pixels = parts.permute(*order).reshape(len(images), h * w, -1)
        return pixels @ torch.linspace(-1, 1, pixels.shape[-1] * 16, dtype=images.dtype).sin().view(-1, 16)

    return replace(of_images(8, 12), patches=patches)


@fault(
    "patches-strips",
    "Rows within a patch and columns of patches are not exchanged: a token is a strip of the image, not a square",
    killed_by=("embedding.patches",),
    cause="of 2 rows of the image from side to side",
)
def patches_are_strips() -> Subject:
    order = put((0, 2, 3, 4, 5, 1), instead_of=(0, 2, 4, 3, 5, 1))

    def patches(model: nn.Module, images: Tensor) -> Tensor:
        h, w = images.shape[-2] // 4, images.shape[-1] // 4
        pixels = images.unflatten(3, (w, 4)).unflatten(2, (h, 4)).permute(*order).reshape(len(images), h * w, -1)
        return pixels @ torch.linspace(-1, 1, pixels.shape[-1] * 16, dtype=images.dtype).sin().view(-1, 16)

    return replace(of_images(8, 8), patches=patches)
