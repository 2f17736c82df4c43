"""Right models that look wrong: garbage under padding, prefixes, windows, shared layers, experts, parallel blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.parts import CausalLayer, SelfAttention, layer, model
from veriformer.tests.traps import trap


@trap("T26", "Outputs at padded positions are garbage", "huggingface/transformers#17463")
def garbage() -> Subject:
    class Garbage(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            output = x + super().forward(x, attention_mask)
            return (
                output
                if attention_mask is None
                else torch.where(attention_mask[..., None], output, x.sum(1, keepdim=True))
            )

    return layer(Garbage, causal=False, positions="none")


@trap("T19", "A prefix-LM sees both ways inside the prefix")
def prefix() -> Subject:
    class Prefix(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            allowed = super().allowed(length)
            allowed[:3, :3] = True
            return allowed

    return layer(Prefix, causal=True, positions="none", prefix=3, padding_side="right")


@trap("T16", "A window of w keys, the token itself among them", "huggingface/transformers#29623")
def window() -> Subject:
    class Window(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            return super().allowed(length).triu(-3)

    return layer(Window, causal=True, positions="none", window=4)


@trap("T38", "Layers share their parameters on purpose", "design of ALBERT")
def shared() -> Subject:
    def change(built: nn.Module) -> None:
        built.stack.layers = nn.ModuleList([built.stack.layers[0]] * len(built.stack.layers))

    facts = {"bias": True, "norm": "layer", "activation": "relu", "norm_placement": "pre", "shared_layers": True}
    return model(change, facts)


@trap("T36", "Expert capacity couples the samples of a batch", "sramshetty/mixture-of-depths#3")
def experts() -> Subject:
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.attention, self.expert = SelfAttention(config), nn.Linear(config.d_model, config.d_model)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            crowd = torch.softmax(x.mean(dim=(1, 2)), dim=0)[:, None, None]  # each sample's share of the expert
            return x + crowd * self.expert(x)

    return Subject(
        kind="layer",
        build=Experts,
        forward=lambda m, x: m(x),
        declares={"causal": False, "positions": "none", "batch_coupled": True},
    )


@trap("T20", "Attention and feed-forward network side by side", "architecture of GPT-J")
def parallel() -> Subject:
    class Parallel(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.attention, self.norm = CausalLayer(config), nn.RMSNorm(config.d_model)
            self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            inner = self.norm(x)
            return x + self.attention(inner, attention_mask) + self.down(torch.nn.functional.gelu(self.up(inner)))

    return layer(Parallel)


@trap("T08", "Weights returned in train mode include dropout", "pytorch/pytorch#42929")
def dropped_weights() -> Subject:
    return Subject(
        kind="self_attention",
        build=lambda c: nn.MultiheadAttention(c.d_model, c.num_heads, dropout=0.3, batch_first=True),
        forward=lambda m, x: m(x, x, x, need_weights=False)[0],
        weights=lambda m, x: m(x, x, x, average_attn_weights=False)[1],
        declares={"causal": False, "positions": "none"},
    )


@trap("T21", "Post-LN instead of pre-LN, RMSNorm, no biases", "harvardnlp/annotated-transformer#110")
def post_norm() -> Subject:
    facts = {"norm": "rms", "norm_placement": "post", "bias": False, "activation": "swiglu", "padding_side": "both"}
    return model(lambda m: None, facts, norm="rms", norm_placement="post", bias=False, activation="swiglu")


@trap("T20-registers", "A class token and registers stand before the sequence")
def registers() -> Subject:
    facts = {"positions": "none", "pooling": "cls", "extra_tokens": 4}
    return model(lambda m: None, facts, architecture="classifier", positions="none", pooling="cls", num_registers=3)


@trap("T34-float-mask", "A large negative constant stands for -inf and underflows to exactly 0")
def large_constant() -> Subject:
    class Constant(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            blocked = torch.zeros_like(scores) if mask is None else (~mask[:, None, None, :]).to(scores.dtype) * -1e9
            return (scores + blocked).softmax(dim=-1)

    return layer(Constant, causal=False, positions="none")
