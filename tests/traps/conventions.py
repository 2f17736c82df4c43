"""Right parts that follow another convention: where to cast, which GELU, which divisor, which alignment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.cache import LayerCache
from veriformer.tests.mutants.decoding import decoder, reordering
from veriformer.tests.mutants.parts import SelfAttention, attention, layer, masked, self_attention
from veriformer.tests.traps import trap


@trap("T03", "The queries are scaled, not the scores", "facebookresearch/XLM#357")
def scaled_queries() -> Subject:
    class Scaled(SelfAttention):
        def scores(self, x: Tensor) -> Tensor:
            return (self.split(self.q(x)) * self.width**-0.5) @ self.split(self.k(x)).transpose(-2, -1)

    return self_attention(Scaled, weights=True)


@trap("T04", "Scores are divided by the number of the layer and multiplied by it again", "Oneflow-Inc/libai#54")
def cancelled_scale() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int) -> Tensor:
        layer_number = 7
        scores = s * (d**-0.5 / layer_number)  # keeps float16 in range
        return (
            masked(scores.float() * layer_number if s.dtype == torch.float16 else scores * layer_number, allow).to(
                v.dtype
            )
            @ v
        )

    return attention(combine)


@trap("T17", "Causal attention aligned to the top left, as documented", "pytorch/pytorch#108108")
def top_left() -> Subject:
    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        if attention_mask is not None and causal:
            attention_mask = attention_mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            causal = False
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=causal)

    return Subject(kind="attention", forward=forward, declares={"causal_alignment": "top-left"})


@trap("T18", "triu(diagonal=1) as the set of blocked keys is right", "pytorch/tutorials#2250")
def blocked_above() -> Subject:
    class Blocked(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            blocked = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(diagonal=1)
            return x + self.o(
                self.merge(self.weights(self.scores(x) + blocked, attention_mask) @ self.split(self.v(x)))
            )

    return layer(Blocked, causal=True, positions="none")


def _rms(before: bool) -> Subject:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
            scaled = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            return self.weight * scaled.to(x.dtype) if before else (self.weight.to(scaled.dtype) * scaled).to(x.dtype)

    return Subject(kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x), declares={"norm": "rms"})


@trap("T22-llama", "RMSNorm casts before it multiplies by the gain", "NVIDIA/TransformerEngine#1132")
def casts_before() -> Subject:
    return _rms(before=True)


@trap("T22-gemma", "RMSNorm casts after it multiplied by the gain", "NVIDIA/TransformerEngine#1132")
def casts_after() -> Subject:
    return _rms(before=False)


@trap("T23", "GELU by its tanh form", "kyutai-labs/pocket-tts#278")
def tanh_gelu() -> Subject:
    class Network(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(functional.gelu(self.up(x), approximate="tanh"))

    return Subject(kind="feed_forward", build=Network, forward=lambda m, x: m(x), declares={"activation": "gelu_tanh"})


@trap("T25", "0.5 of the tokens left over are 10 % of all", "huggingface/transformers#17377")
def conditional_half() -> Subject:
    def forward(model: Any, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def coins(share: float) -> Tensor:
            return torch.rand(tokens.shape, generator=generator) < share

        chosen = coins(0.15) & (tokens > 4)
        labels = torch.where(chosen, tokens, -100)
        hidden = chosen & coins(0.8)
        replaced = chosen & ~hidden & coins(0.5)
        others = torch.randint(5, 1000, tokens.shape, generator=generator)
        return torch.where(hidden, 4, torch.where(replaced, others, tokens)), labels

    return Subject(
        kind="masking", forward=forward, domain={"vocab_size": [1000]},
        declares={"mask_id": 4, "special_ids": (0, 1, 2, 3)},
    )  # fmt: skip


@trap("T27", "The padding token has an embedding like any other", "microsoft/Graphormer#41")
def ordinary_padding() -> Subject:
    return replace(shipped("reference")["encoder"], name="padding_row")


@trap("T28", "The padding moves what is summed, and with it the last bits", "huggingface/transformers#29419")
def summed_in_another_order() -> Subject:
    class Blocks(SelfAttention):
        """Keys are read in blocks of four, as fused kernels do: padding changes which are summed together."""

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            scores, value = self.scores(x), self.split(self.v(x))
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask[:, None, None, :], torch.finfo(x.dtype).min)
            largest = scores.amax(-1, keepdim=True)
            total, summed = torch.zeros_like(largest), torch.zeros_like(value)
            for block, part in zip(scores.split(4, -1), value.split(4, -2), strict=True):
                shown = (block - largest).exp()
                total, summed = total + shown.sum(-1, keepdim=True), summed + shown @ part
            return x + self.o(self.merge(summed / total))

    return layer(Blocks, causal=False, positions="none", padding_side="both")


@trap("T30", "log_softmax stands before the cross-entropy, which is idempotent", "DSKSD/DeepNLP-models-Pytorch#2")
def log_twice() -> Subject:
    return Subject(
        kind="loss",
        forward=lambda m, logits, labels: functional.cross_entropy(
            logits.log_softmax(-1).flatten(0, -2), labels.flatten(), ignore_index=-100
        ),
        declares={"empty_loss": "nan"},
    )


@trap("T31", "What is the same in all beams is not reordered", "huggingface/transformers#28357")
def memory_stays() -> Subject:
    return decoder(reordering(LayerCache))  # the keys of the tokens are; a memory of encoder states is not there


@trap("T33", "The labels are not shifted in forward, since the loss does it", "huggingface/transformers#35066")
def shifting_loss() -> Subject:
    return Subject(
        kind="loss",
        forward=lambda m, logits, labels: functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        ),
        declares={"shifts_labels": True, "empty_loss": "nan"},
    )


@trap("T34", "The difference of window ids is taken in the other order", "microsoft/Swin-Transformer#42")
def other_order() -> Subject:
    class Windows(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                ids = (~mask).to(scores.dtype)
                difference = ids[:, None, :] - torch.zeros_like(ids)[:, :, None]
                scores = scores.masked_fill((difference != 0)[:, None], -100.0 * 1e3)
            return scores.softmax(-1)

    return layer(Windows, causal=False, positions="none", half_precision=False)


@trap("T37", "Softmax then top-k then renormalised, or top-k then softmax", "NVIDIA/Megatron-LM#955")
def two_experts() -> Subject:
    class Experts(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.router = nn.Linear(config.d_model, 4)
            self.experts = nn.ModuleList(nn.Linear(config.d_model, config.d_model) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
            weight = weight / weight.sum(-1, keepdim=True)
            every = torch.stack([functional.gelu(expert(x)) for expert in self.experts], dim=-2)
            picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
            return (weight[..., None] * picked).sum(-2)

    return Subject(kind="feed_forward", build=Experts, forward=lambda m, x: m(x))


@trap("T39-int8", "One scale of int8 for the whole batch couples its samples", "vllm-project/vllm#7022")
def quantised() -> Subject:
    class Quantised(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)

        def forward(self, x: Tensor) -> Tensor:
            scale = x.detach().abs().amax().clamp(min=1e-8) / 127
            rounded = x + ((x / scale).round() * scale - x).detach()
            return x + self.down(functional.relu(self.up(rounded)))

    return Subject(
        kind="layer", build=Quantised, forward=lambda m, x: m(x),
        declares={"batch_coupled": True, "quantised": True},
    )  # fmt: skip


@trap("T40", "LayerNorm by the unbiased deviation, eps outside the root", "harvardnlp/annotated-transformer#122")
def unbiased() -> Subject:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a_2, self.b_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2

    return Subject(kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x), declares={"norm": "other"})
