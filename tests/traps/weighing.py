"""Right models whose weights or initial tables look wrong: negative weights, rotations of what a norm gave."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap
from veriformer.tests.traps.architectures import CALL, RIGHT, Attention, FeedForward, Model, PreNorm, decoder


@trap("model-differential", "Differential attention: a second softmax is subtracted, a norm by head", "Ye et al. 2024")
def differential() -> Subject:
    class Differential(Attention):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, causal=True)
            self.q, self.k = (nn.Linear(c.d_model, 2 * c.d_model) for _ in range(2))
            self.share = nn.Parameter(torch.full((c.num_heads, 1, 1), 0.3))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k = (p(x).unflatten(-1, (2, self.heads, self.width)).permute(2, 0, 3, 1, 4) for p in (self.q, self.k))
            v = self.v(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
            allow = self.allowed(x.shape[1])[None, None]
            if mask is not None:
                allow = allow & mask[:, None, None, :]
            scores = self.scores(q, k)
            one, other = scores.masked_fill(~allow, torch.finfo(scores.dtype).min).softmax(-1)
            mixed = functional.rms_norm((one - self.share * other) @ v, (self.width,))
            return self.o((0.7 * mixed).transpose(1, 2).flatten(2))

    return decoder(lambda c: PreNorm(c, Differential(c), FeedForward(c)), table=True)


@trap("model-rotated-behind-norm", "Normalised queries and keys are turned, half of their channels", "Qwen3, GPT-NeoX")
def rotated_behind_a_norm() -> Subject:
    class Turned(Attention):
        def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return self.rotated(functional.rms_norm(q, q.shape[-1:])), self.rotated(
                functional.rms_norm(k, k.shape[-1:])
            )

        def rotated(self, x: Tensor) -> Tensor:
            half = max(1, x.shape[-1] // 4)
            rates = 1e4 ** -(torch.arange(half) / half)
            angles = torch.outer(torch.arange(x.shape[-2]), rates)
            one, other, still = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            cos, sin = angles.cos().to(x), angles.sin().to(x)
            return torch.cat([one * cos - other * sin, one * sin + other * cos, still], dim=-1)

    return decoder(lambda c: PreNorm(c, Turned(c, causal=True)))


@trap("model-gpt2-tables", "A GPT-2 whose positions start half as large, as in the released code", "openai/gpt-2")
def gpt2_tables() -> Subject:
    class GPT2(Model):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, lambda c: PreNorm(c, Attention(c, causal=True)), table=True, out=None)
            for name, p in self.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(p)
                elif p.ndim == 2:
                    writes = name.endswith(("attention.o.weight", "network.2.weight"))
                    usual = 0.01 if name == "pos_emb.weight" else 0.02
                    nn.init.normal_(p, 0.0, usual / math.sqrt(2 * c.num_layers) if writes else usual)

    return Subject(
        kind="decoder", build=GPT2, forward=CALL,
        declares={"init": "gpt2", "positions": "learned", "causal": True, **RIGHT},
    )  # fmt: skip


@trap("router-own-bias", "A router with its own bias, beside experts in stacked tensors", "Fedus 2021")
def router_with_a_bias() -> Subject:
    class Switch(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.router = nn.Linear(c.d_model, 3)
            self.up = nn.Parameter(torch.randn(3, c.d_model, c.d_ff) * c.d_model**-0.5)
            self.down = nn.Parameter(torch.randn(3, c.d_ff, c.d_model) * c.d_ff**-0.5)

        def weights(self, x: Tensor) -> Tensor:
            p = self.router(x).softmax(-1)
            best = p.argmax(-1, keepdim=True)
            return torch.zeros_like(p).scatter(-1, best, p.gather(-1, best))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            gate, chosen = self.router(flat).softmax(-1).max(-1)
            made = torch.empty_like(flat)
            for number in range(3):
                rows = (chosen == number).nonzero().squeeze(1)
                made = made.index_copy(0, rows, (flat[rows] @ self.up[number]).relu() @ self.down[number])
            return (gate[:, None] * made).view(x.shape)

    return Subject(
        kind="feed_forward", build=Switch, forward=lambda m, x: m(x), router=lambda m, x: m.weights(x),
        declares={"norm_topk_prob": False},
    )  # fmt: skip
