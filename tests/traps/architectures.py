"""Whole right models as people write them, declaring little: blocks of many families, each with its own habits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap

RIGHT = {"padding_side": "right"}  # a table of positions is read from the left
CALL = lambda m, tokens, attention_mask=None: m(tokens, attention_mask)  # noqa: E731


class Attention(nn.Module):
    """Causal or bidirectional attention with the habits that a family asks for."""

    def __init__(self, c: DrawnConfig, *, causal: bool, groups: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.width, self.causal = c.num_heads, groups or c.num_heads, c.d_head, causal
        self.q = nn.Linear(c.d_model, self.heads * self.width, bias=bias)
        self.k, self.v = (nn.Linear(c.d_model, self.groups * self.width, bias=bias) for _ in range(2))
        self.o = nn.Linear(c.d_model, c.d_model, bias=bias)

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * self.width**-0.5

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def allowed(self, length: int) -> Tensor:
        every = torch.ones(length, length, dtype=torch.bool)
        return every.tril() if self.causal else every

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.turn(q, k)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        allow = self.allowed(x.shape[1])[None, None]
        if mask is not None:
            allow = allow & mask[:, None, None, :]
        scores = self.scores(q, k)
        scores = scores.masked_fill(~allow, torch.finfo(scores.dtype).min)
        return self.o((self.weights(scores) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Two linear maps around an activation."""

    def __init__(self, c: DrawnConfig, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__(nn.Linear(c.d_model, c.d_ff), activation(), nn.Linear(c.d_ff, c.d_model))


class Model(nn.Module):
    """Embeddings, a stack of blocks made by `block(config)`, a norm and an output."""

    def __init__(
        self, c: DrawnConfig, block: Callable[[DrawnConfig], nn.Module], *, table: bool, out: int | None
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_emb = nn.Embedding(c.max_len, c.d_model) if table else None
        self.blocks = nn.ModuleList(block(c) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, out or c.vocab_size, bias=False)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tok_emb(tokens)
        if self.pos_emb is not None:
            x = x + self.pos_emb(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(self.ln_f(x))


def decoder(block: Callable[[DrawnConfig], nn.Module], *, table: bool = False, **given: Any) -> Subject:
    return _model("decoder", lambda c: Model(c, block, table=table, out=None), {"causal": True}, table, given)


def encoder(block: Callable[[DrawnConfig], nn.Module], *, table: bool = True, **given: Any) -> Subject:
    return _model("encoder", lambda c: Model(c, block, table=table, out=c.d_model), {}, table, given)


def _model(kind: str, build: Any, facts: dict[str, Any], table: bool, given: dict[str, Any]) -> Subject:
    return Subject(kind=kind, build=build, forward=CALL, declares={**facts, **(RIGHT if table else {}), **given})


class PreNorm(nn.Module):
    def __init__(self, c: DrawnConfig, attention: nn.Module, network: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attention, self.network = attention, network or FeedForward(c)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.network(self.norm2(x))


@trap("model-gpt-j", "Parallel blocks and rotary positions on a part of the channels", "architecture of GPT-J")
def gpt_j() -> Subject:
    class Rotary(Attention):
        def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            part = max(2, self.width // 2 // 2 * 2)
            rates = 10000.0 ** (-torch.arange(0, part, 2, dtype=torch.float32) / part)
            angle = torch.arange(q.shape[2])[:, None] * rates
            cos, sin = (t.repeat_interleave(2, -1).to(q.dtype) for t in (angle.cos(), angle.sin()))

            def turned(x: Tensor) -> Tensor:
                a = x[..., :part]
                other = torch.stack([-a[..., 1::2], a[..., ::2]], -1).flatten(-2)
                return torch.cat([a * cos + other * sin, x[..., part:]], -1)

            return turned(q), turned(k)

    class Parallel(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.norm, self.attention, self.network = nn.LayerNorm(c.d_model), Rotary(c, causal=True), FeedForward(c)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            inner = self.norm(x)
            return x + self.attention(inner, mask) + self.network(inner)

    return decoder(Parallel, padding_side="both")


@trap("model-deepnorm", "Post-LN whose stream is multiplied before it is normalised", "Wang et al. 2022")
def deep_norm() -> Subject:
    class Deep(PreNorm):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.norm1(1.7 * x + self.attention(x, mask))
            return self.norm2(1.7 * x + self.network(x))

    return encoder(lambda c: Deep(c, Attention(c, causal=False)), structure="other")


@trap("model-sandwich", "Norms before and behind each sublayer, scores capped", "architecture of Gemma 2")
def sandwich() -> Subject:
    class Capped(Attention):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return 20.0 * torch.tanh(super().scores(q, k) / 20.0)

    class Sandwich(PreNorm):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, Capped(c, causal=True))
            self.norm3, self.norm4 = nn.RMSNorm(c.d_model), nn.RMSNorm(c.d_model)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = x + self.norm3(self.attention(self.norm1(x), mask))
            return x + self.norm4(self.network(self.norm2(x)))

    return decoder(Sandwich, table=True)


@trap("model-layer-scale", "Branches multiplied by small learned gains", "architecture of CaiT and ReZero")
def layer_scale() -> Subject:
    class Scaled(PreNorm):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, Attention(c, causal=False))
            self.gain1, self.gain2 = (nn.Parameter(torch.full((c.d_model,), 1e-2)) for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = x + self.gain1 * self.attention(self.norm1(x), mask)
            return x + self.gain2 * self.network(self.norm2(x))

    return encoder(Scaled)


@trap("model-alibi-mqa", "One key-value head for all queries, biases by distance", "architecture of MPT and Falcon")
def alibi_mqa() -> Subject:
    class Alibi(Attention):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
            slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads)
            return super().scores(q, k) + (slopes[:, None, None] * distance).to(q.dtype)

    return decoder(lambda c: PreNorm(c, Alibi(c, causal=True, groups=1, bias=False)), padding_side="both")


@trap("model-linear-attention", "Attention as a ratio of running sums, without a softmax", "Katharopoulos et al. 2020")
def linear_attention() -> Subject:
    class Linear(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
            q, k = functional.elu(q) + 1, functional.elu(k) + 1
            if mask is not None:
                k = k * mask[:, None, :, None].to(k.dtype)
            state = (k[..., :, None] * v[..., None, :]).cumsum(2)
            mixed = (q[..., None, :] @ state).squeeze(-2) / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6)
            return self.o(mixed.transpose(1, 2).flatten(2))

    return decoder(lambda c: PreNorm(c, Linear(c, causal=True)), table=True)


@trap("model-retention", "Scores that decay with distance, without a softmax", "Sun et al. 2023")
def retention() -> Subject:
    class Retention(Attention):
        def weights(self, scores: Tensor) -> Tensor:
            distance = torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])
            decay = torch.where(distance >= 0, 0.9 ** distance.clamp(min=0), 0.0)
            return scores.masked_fill(scores <= torch.finfo(scores.dtype).min, 0.0) * decay.to(scores.dtype)

    return decoder(lambda c: PreNorm(c, Retention(c, causal=True)))


@trap("model-bert", "Token types, a norm behind the embeddings, post-LN, a pooled first token", "architecture of BERT")
def bert() -> Subject:
    class Bert(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.word, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.types, self.norm = nn.Embedding(2, c.d_model), nn.LayerNorm(c.d_model, eps=1e-12)
            layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.1, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, c.num_layers, enable_nested_tensor=False)
            self.pooler, self.classify = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, c.num_classes)

        def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x = self.word(tokens) + self.place(torch.arange(tokens.shape[1])) + self.types(torch.zeros_like(tokens))
            blocked = None if attention_mask is None else ~attention_mask
            hidden = self.encoder(self.norm(x), src_key_padding_mask=blocked)
            return self.classify(self.pooler(hidden[:, 0]).tanh())

    return Subject(
        kind="classifier", build=Bert, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares=RIGHT,
    )  # fmt: skip


@trap("model-t5", "A learned bias by distance, no scale, RMSNorm, no biases", "architecture of T5")
def t5() -> Subject:
    class Relative(Attention):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, causal=False, bias=False)
            self.relative_attention_bias = nn.Embedding(9, c.num_heads)

        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            distance = (torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]).clamp(-4, 4) + 4
            return q @ k.transpose(-2, -1) + self.relative_attention_bias(distance).permute(2, 0, 1)

    class Block(PreNorm):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, Relative(c), FeedForward(c, nn.ReLU))
            self.norm1, self.norm2 = nn.RMSNorm(c.d_model), nn.RMSNorm(c.d_model)  # type: ignore[assignment]

    return encoder(Block, table=False, attention_scale="1", padding_side="both")


@trap("model-experts", "Each token goes to two of four experts", "architecture of Mixtral")
def experts() -> Subject:
    class Experts(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.gate, self.experts = (
                nn.Linear(c.d_model, 4, bias=False),
                nn.ModuleList(FeedForward(c) for _ in range(4)),
            )

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
            weight = weight / weight.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                share = (weight * (chosen == number)).sum(-1, keepdim=True)
                out = out + share * expert(x)
            return out

    return decoder(lambda c: PreNorm(c, Attention(c, causal=True), Experts(c)), table=True)


@trap("model-universal", "One block applied again and again", "Dehghani et al. 2019")
def universal() -> Subject:
    class Shared(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.inner, self.times = PreNorm(c, Attention(c, causal=True)), 3

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            for _ in range(self.times):
                x = self.inner(x, mask)
            return x

    return decoder(Shared, table=True, shared_layers=True)


@trap(
    "model-zero-attention",
    "A learned key and a zero key beside those of the sequence",
    "options of nn.MultiheadAttention",
)
def zero_attention() -> Subject:
    class Block(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(c.d_model)
            self.attention = nn.MultiheadAttention(
                c.d_model, c.num_heads, batch_first=True, add_bias_kv=True, add_zero_attn=True
            )

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            inner, blocked = self.norm(x), None if mask is None else ~mask
            return x + self.attention(inner, inner, inner, key_padding_mask=blocked, need_weights=False)[0]

    return encoder(Block)


@trap("model-sinks", "A window, and the first two tokens seen from everywhere", "StreamingLLM")
def window_and_sinks() -> Subject:
    class Window(Attention):
        def allowed(self, length: int) -> Tensor:
            allow = super().allowed(length)
            near = allow.triu(-3)
            near[:, :2] = allow[:, :2]
            return near

    return decoder(lambda c: PreNorm(c, Window(c, causal=True)), table=True, window=4, sink_tokens=2)


@trap("model-qk-norm", "Normalised queries and keys, squared ReLU", "architecture of nanochat")
def query_key_norm() -> Subject:
    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(x).square()

    class Normalised(Attention):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, causal=True, bias=False)
            self.temperature = nn.Parameter(torch.full((c.num_heads, 1, 1), 8.0))

        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return (
                functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
            )

    return decoder(lambda c: PreNorm(c, Normalised(c), FeedForward(c, Squared)), table=True)


@trap("model-talking-heads", "Heads are mixed before and behind the softmax", "Shazeer et al. 2020")
def talking_heads() -> Subject:
    class Talking(Attention):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, causal=False)
            self.before, self.behind = (nn.Parameter(torch.eye(c.num_heads) + 0.1) for _ in range(2))

        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return torch.einsum("gh,bhts->bgts", self.before, super().scores(q, k))

        def weights(self, scores: Tensor) -> Tensor:
            return torch.einsum("gh,bhts->bgts", self.behind, super().weights(scores))

    return encoder(lambda c: PreNorm(c, Talking(c)))


@trap(
    "model-token-shift",
    "A causal convolution over neighbouring tokens before attention",
    "architecture of RWKV and Hyena",
)
def token_shift() -> Subject:
    class Shift(Attention):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, causal=True)
            self.near = nn.Conv1d(c.d_model, c.d_model, 3, groups=c.d_model)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(self.near(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2), mask)

    return decoder(lambda c: PreNorm(c, Shift(c)), padding_side="right")


@trap("model-sinks-layer", "One layer with a window, and the first two tokens seen from everywhere", "StreamingLLM")
def window_and_sinks_in_a_layer() -> Subject:
    class Window(Attention):
        def allowed(self, length: int) -> Tensor:
            allow = super().allowed(length)
            near = allow.triu(-3)
            near[:, :2] = allow[:, :2]
            return near

    return Subject(
        kind="layer", build=lambda c: PreNorm(c, Window(c, causal=True)),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "window": 4, "sink_tokens": 2, "padding_side": "right"},
    )  # fmt: skip


@trap("model-windows", "Each of several layers sees a window, all of them together more", "architecture of Mistral")
def windows() -> Subject:
    class Window(Attention):
        def allowed(self, length: int) -> Tensor:
            return super().allowed(length).triu(-2)

    return decoder(lambda c: PreNorm(c, Window(c, causal=True)), table=True, window=3)
