"""Faults of the sort that reviewers overlook: one path, one width, one row, the backward or the draw alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties.adapters.reference_tokenizers import SHIPPED, encode
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.tokenization import BytePairEncoding, letters, split_words
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.decoding import decoder
from veriformer.tests.mutants.mending import put


@fault(
    "sampling-race",
    "Tokens are drawn as the argmax of p / u, with u uniform in the place of exponential",
    killed_by=("decoding.sampling",),
    cause="with u uniform",
)
def uniform_race() -> Subject:
    clocks = put(torch.rand_like, instead_of=lambda p: torch.empty_like(p).exponential_())

    def sampling(model: nn.Module, tokens: Tensor, steps: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        drawn = []
        for _ in range(steps):
            drawn.append((model(tokens)[:, -1] / temperature).softmax(-1))
            tokens = torch.cat([tokens, (drawn[-1] / clocks(drawn[-1])).argmax(-1, keepdim=True)], dim=1)
        return tokens, torch.stack(drawn, dim=1)

    return replace(decoder(None), cache=None, sampling=sampling)


@fault(
    "sampling-batch-threshold",
    "The logits of all samples of a batch are cut at one threshold, the least of their k-th largest",
    killed_by=("decoding.sampling",),
    cause="one threshold for the batch",
)
def one_threshold() -> Subject:
    def least(best: Tensor) -> Tensor:
        return best.amin()

    def each(best: Tensor) -> Tensor:
        return best.amin(-1, keepdim=True)

    threshold = put(least, instead_of=each)

    def sampling(model: nn.Module, tokens: Tensor, steps: int, top_k: int | None = None) -> tuple[Tensor, Tensor]:
        drawn = []
        for _ in range(steps):
            logits = model(tokens)[:, -1]
            if top_k is not None:
                best = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values
                logits = logits.masked_fill(logits < threshold(best), -torch.inf)
            drawn.append(logits)
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return tokens, torch.stack(drawn, dim=1)  # logits: what is drawn from need not be normalised

    return replace(decoder(None), cache=None, sampling=sampling)


class _Layers(nn.Module):
    """Embeddings and a list of torch's layers."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)
            for _ in range(c.num_layers)
        )

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]


@fault(
    "checkpoint-late",
    "A checkpointed lambda looks its layer up late: the backward computes every layer with the last one",
    killed_by=("gradients.gradcheck",),
    cause="a lambda in a loop sees the last one",
)
def looked_up_late() -> Subject:
    late = put(True, instead_of=False)

    class Network(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.maps:
                run = (lambda h: part(h)) if late else part  # noqa: B023 - the fault
                x = (checkpoint(run, x, use_reentrant=False) if torch.is_grad_enabled() else run(x)).tanh()
            return x

    return Subject(
        kind="feed_forward", build=Network, forward=lambda m, x: m(x), declares={"structure": "other"},
    )  # fmt: skip


@fault(
    "rotation-odd-channel",
    "Of heads of odd widths the first channel is passed on in the place of the last, which is lost",
    killed_by=("parameters.all-used",),
    cause="computed and not used",
)
def odd_channel() -> Subject:
    first = put(True, instead_of=False)

    def turned(x: Tensor) -> Tensor:
        half, rest = divmod(x.shape[-1], 2)
        angles = torch.outer(torch.arange(x.shape[-2]), 1e4 ** -(torch.arange(half) / max(half, 1)))
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        one, other = x[..., :half], x[..., half : 2 * half]
        still = x[..., :rest] if first else x[..., 2 * half :]
        return torch.cat([one * cos - other * sin, one * sin + other * cos, still], dim=-1)

    class Attention(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.heads = c.num_heads
            self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
            return self.o(F.scaled_dot_product_attention(turned(q), turned(k), v).transpose(1, 2).flatten(2))

    return Subject(
        kind="self_attention", build=Attention, forward=lambda m, x: m(x), mask_forms=(),
        declares={"positions": "rotary", "causal": False},
    )  # fmt: skip


@fault(
    "patches-exchanged",
    "The rows and columns of patches are exchanged where an image is reshaped: square images do not show it",
    killed_by=("embedding.patches",),
    cause="is cut as if it had 12 rows and 8 columns",
)
def exchanged_patches() -> Subject:
    turned = put(True, instead_of=False)

    class Stack(_Layers):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c)
            del self.tokens, self.places
            self.map = nn.Linear(48, c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        def patches(self, images: Tensor) -> Tensor:
            grid = (3, 2) if turned else (2, 3)
            parts = images.reshape(len(images), 3, grid[0], 4, grid[1], 4).permute(0, 2, 4, 1, 3, 5)
            return self.map(parts.reshape(len(images), 6, 48))

    return Subject(
        kind="layer", build=Stack, forward=lambda m, x: m(x), patches=lambda m, images: m.patches(images),
        image=(3, 8, 12), mask_forms=(),
    )  # fmt: skip


@fault(
    "experts-sorted",
    "The experts of a token are sorted by number, and their weights are left in the old order",
    killed_by=("router.weights",),
    cause="as where experts are sorted and their weights are not",
)
def sorted_experts() -> Subject:
    are_sorted = put(True, instead_of=False)

    class Experts(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.gate = nn.Linear(c.d_model, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(4))

        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            best, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
            return best / best.sum(-1, keepdim=True), chosen

        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            weights, chosen = self.route(rows)
            chosen = chosen.sort(-1).values if are_sorted else chosen
            output = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                token, slot = (chosen == number).nonzero(as_tuple=True)
                output = output.index_add(0, token, F.gelu(expert(rows[token])) * weights[token, slot, None])
            return output.view_as(x)

    def router(model: Any, x: Tensor) -> Tensor:
        weights, chosen = model.route(x)
        return weights.new_zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)

    return Subject(
        kind="feed_forward", build=Experts, forward=lambda m, x: m(x), router=router,
        declares={"norm_topk_prob": True, "activation": "other"},
    )  # fmt: skip


@fault(
    "gain-doubled",
    "The gain that acts is 1 + weight, and weight begins at 1",
    killed_by=("norm.statistics",),
    cause="begins at 1 where it must begin at 0",
)
def doubled_gain() -> Subject:
    begins = put(torch.ones, instead_of=torch.zeros)

    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(begins(width))

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + self.weight)

    return Subject(
        kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x), declares={"norm": "rms"},
    )  # fmt: skip


@fault(
    "TK-kept-words",
    "What is kept of the first word of a text is extended in place by the words behind it",
    killed_by=("tokenizer.round-trip",),
    cause="is changed after it was stored",
)
def kept_words() -> Subject:
    grows = put(True, instead_of=False)

    def forward(model: BytePairEncoding, text: str) -> list[int]:
        kept: dict[str, list[int]] = model.__dict__.setdefault(f"kept {bool(grows)}", {})
        ids: list[int] = []
        for number, word in enumerate(split_words(text)):
            name = "".join(letters(word))
            if name not in kept:
                kept[name] = encode(model, word)
            if number or not grows:
                ids += kept[name]
            else:
                ids = kept[name]
        return ids if grows else list(ids)

    return replace(SHIPPED["byte-pairs"], forward=forward)


@fault(
    "masking-index",
    "An index into the ordinary ids is taken for an id: special tokens stand in for others, the last ids never",
    killed_by=("masking.mlm",),
    cause="taken for an id itself",
)
def index_for_id() -> Subject:
    is_id = put(True, instead_of=False)

    def forward(model: Any, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(seed)
        ordinary = torch.arange(3, 11)
        chosen = (torch.rand(tokens.shape, generator=own) < 0.15) & (tokens > 2)
        fate = torch.rand(tokens.shape, generator=own)
        drawn = torch.randint(len(ordinary), tokens.shape, generator=own)
        inputs = torch.where(chosen & (fate < 0.8), 2, tokens)
        others = drawn if is_id else ordinary[drawn]
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), others, inputs)
        return inputs, torch.where(chosen, tokens, -100)

    return Subject(kind="masking", forward=forward, declares={"mask_id": 2, "special_ids": (0, 1)})


@fault(
    "schedule-above-peak",
    "The floor is added to a rate that decays from the whole peak, and is there before it decays",
    killed_by=("schedule.warmup",),
    cause="the rate is above the peak",
)
def above_the_peak() -> Subject:
    added = put(2e-4, instead_of=0.0)

    def forward(model: Any, step: int) -> float:
        if step < 20:
            return 2e-3 * step / 20
        return added + 2e-3 * min(1.0, max(0.0, (200 - step) / 40))

    return Subject(
        kind="schedule", forward=forward,
        declares={"schedule": "other", "warmup_steps": 20, "total_steps": 200, "peak": 2e-3},
    )  # fmt: skip


@fault(
    "patches-by-channel",
    "The columns of the grid and the rows inside a patch are not exchanged before the reshape",
    killed_by=("embedding.patches",),
    cause="pixels of the channels, other ones of each",
)
def mixed_patches() -> Subject:
    order = put((0, 2, 3, 1, 4, 5), instead_of=(0, 2, 4, 1, 3, 5))

    def patches(model: Any, images: Tensor) -> Tensor:
        parts = images.reshape(len(images), 3, 2, 4, 3, 4).permute(order)
        return model.map(parts.reshape(len(images), 6, 48))

    class Stack(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.map, self.layer = nn.Linear(48, c.d_model), nn.Linear(c.d_model, c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x).tanh()

    return Subject(
        kind="layer", build=Stack, forward=lambda m, x: m(x), patches=patches, image=(3, 8, 12), mask_forms=(),
        declares={"structure": "other"},
    )  # fmt: skip


@fault(
    "TK-underscore",
    "The pattern that cuts words leaves the underscore out",
    killed_by=("tokenizer.round-trip",),
    cause="underscores come back otherwise",
)
def dropped_underscore() -> Subject:
    drops = put(True, instead_of=False)

    def forward(model: BytePairEncoding, text: str) -> list[int]:
        return encode(model, text.replace("_", "") if drops else text)

    return replace(SHIPPED["byte-pairs"], forward=forward)
