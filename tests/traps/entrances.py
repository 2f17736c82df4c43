"""Right models of which a part alone is judged, and networks that are more than a formula says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap
from veriformer.tests.traps.architectures import Attention, FeedForward, PreNorm


class _Images(nn.Module):
    """An image model: its stack is judged on embeddings, its patches and its head are other entrances."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, c.d_model, 4, 4)
        self.registers = nn.Parameter(torch.randn(1, 2, c.d_model))
        self.blocks = nn.ModuleList(PreNorm(c, Attention(c, causal=False)) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def tokens(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        return torch.cat([self.registers.expand(len(x), -1, -1), x], dim=1)

    def stack(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stack(self.tokens(images)).mean(1))


@trap("layer-of-images", "The stack of an image model, with a norm behind it; its head is judged nowhere")
def stack_of_images() -> Subject:
    return Subject(
        kind="layer", build=_Images, forward=lambda m, x: m.stack(x), mask_forms=(),
        patches=lambda m, images: m.tokens(images), image=(3, 8, 12),
        declares={"causal": False, "positions": "none", "norm_placement": "pre", "norm": "layer", "final_norm": True},
    )  # fmt: skip


@trap("layer-of-images-alone", "The stack of an image model, of which nothing else is offered")
def stack_alone() -> Subject:
    return Subject(kind="layer", build=_Images, forward=lambda m, x: m.stack(x), mask_forms=())


@trap("layer-with-sinusoids", "A stack of layers that adds sinusoids to what it is given, with a norm behind it")
def stack_with_sinusoids() -> Subject:
    class Stack(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(PreNorm(c, Attention(c, causal=False)) for _ in range(c.num_layers))
            self.norm = nn.LayerNorm(c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            places = torch.arange(x.shape[1], dtype=torch.float64)
            angles = torch.outer(places, 1e4 ** -(torch.arange(half, dtype=torch.float64) / half))
            x = x + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    return Subject(
        kind="layer", build=Stack, forward=lambda m, x: m(x), mask_forms=(), domain={"d_model": [8, 16]},
        declares={
            "causal": False, "positions": "sinusoidal", "layout": "halves", "norm_placement": "pre", "norm": "layer",
            "final_norm": True, "activation": "gelu", "bias": True, "attention_scale": "1/sqrt(d_head)",
        },
    )  # fmt: skip


@trap("ffn-weight-norm", "A network whose matrices are weight-normed: torch differentiates that once")
def weight_normed() -> Subject:
    def build(c: DrawnConfig) -> nn.Module:
        network = FeedForward(c)
        for number in (0, 2):
            weight_norm(network[number])
        return network

    return Subject(
        kind="feed_forward", build=build, forward=lambda m, x: m(x),
        declares={"activation": "gelu", "bias": True, "once_differentiable": True},
    )  # fmt: skip


@trap("ffn-experts", "Experts under a router: no formula of one network holds, and nothing has to be said of it")
def experts() -> Subject:
    class Experts(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.gate = nn.Linear(c.d_model, 4, bias=False)
            self.experts = nn.ModuleList(FeedForward(c) for _ in range(4))

        def route(self, x: Tensor) -> Tensor:
            best, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
            return torch.zeros(*x.shape[:-1], 4).to(x).scatter(-1, chosen, best / best.sum(-1, keepdim=True))

        def forward(self, x: Tensor) -> Tensor:
            made: Any = torch.stack([expert(x) for expert in self.experts], dim=-2)
            return F.linear(self.route(x)[..., None, :] @ made, torch.eye(x.shape[-1]).to(x)).squeeze(-2)

    return Subject(
        kind="feed_forward", build=Experts, forward=lambda m, x: m(x), router=lambda m, x: m.route(x),
        declares={"activation": "gelu", "bias": True, "norm_topk_prob": True},
    )  # fmt: skip
