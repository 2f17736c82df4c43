"""Faults of what is taken for what: means of means, labels of what changed, one threshold, one source for layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.pooling import MeanPooling
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.decoding import decoder
from veriformer.tests.mutants.dropout import Branches, scaled
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.objectives import masking
from veriformer.tests.mutants.parts import model


class _MeanOfBlocks(MeanPooling):
    """Averages blocks of four, and then their means."""

    def forward(self, extras: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        means, some = [], []
        for x, keep in zip(tokens.split(4, 1), mask.split(4, 1), strict=True):
            shown = keep[..., None].to(x.dtype)
            means.append((x * shown).sum(1) / shown.sum(1).clamp(min=1))
            some.append(keep.any(1).to(x.dtype)[:, None])
        weight = torch.stack(some)
        return (torch.stack(means) * weight).sum(0) / weight.sum(0).clamp(min=1)


@fault(
    "PM-mean-of-blocks",
    "A mean that is accumulated block by block weighs blocks alike, however many tokens they hold",
    killed_by=("padding.pooling",),
    cause="blocks of 4 positions are averaged first",
)
def blocks_weigh_alike() -> Subject:
    def change(built: nn.Module) -> None:
        built.get_submodule("pooling").__class__ = _MeanOfBlocks

    return model(change, {"pooling": "mean"}, architecture="classifier", pooling="mean")


@fault(
    "MS-labels-of-changes",
    "Labels stand where the input was changed, not where a token was chosen",
    killed_by=("masking.mlm",),
    cause="labels stand where the input is another token than before",
)
def labels_of_what_changed() -> Subject:
    def forward(m: Any, tokens: Tensor, seed: int) -> Any:
        own = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(tokens.shape, generator=own) < 0.15) & (tokens > 4)
        fate, words = torch.rand(tokens.shape, generator=own), torch.randint(5, 100, tokens.shape, generator=own)
        inputs = torch.where(chosen & (fate < 0.8), 4, tokens)
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words, inputs)
        return inputs, torch.where(inputs != tokens, tokens, -100)

    return masking(forward)


@fault(
    "sampling-first-threshold",
    "Top k cuts all samples of a batch at the k-th largest logit of the first one",
    killed_by=("decoding.sampling",),
    cause="the k-th largest logit of the first of them",
)
def cut_at_that_of_the_first() -> Subject:
    least = put(lambda best: best[0, -1], instead_of=lambda best: best[:, -1:])

    def sampling(
        m: nn.Module, tokens: Tensor, steps: int, temperature: float = 1.0, top_k: int | None = None
    ) -> tuple[Tensor, Tensor]:
        drawn = []
        for _ in range(steps):
            logits = m(tokens)[:, -1] / temperature
            if top_k is not None:
                best = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values
                logits = logits.masked_fill(logits < least(best), torch.finfo(logits.dtype).min)
            drawn.append(logits.softmax(-1))
            tokens = torch.cat([tokens, drawn[-1].topk(2, dim=-1).indices[:, :1]], dim=1)
        return tokens, torch.stack(drawn, dim=1)

    return replace(decoder(None), cache=None, sampling=sampling)


class _Dropping(Branches):
    """A layer that keeps the rate of its stochastic depth."""

    def __init__(self, config: DrawnConfig, kept: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__(config, scaled)
        self.drop_path_rate, self.kept = config.dropout, kept

    def drop(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        return x * self.kept(torch.rand(len(x), 1, 1), self.rate) / (1 - self.rate)


@fault(
    "droppath-turned-round",
    "Branches are kept with the probability at which they are to be dropped",
    killed_by=("droppath.expectation",),
    cause="the comparison is turned round",
)
def kept_for_dropped() -> Subject:
    kept = put(lambda drawn, rate: drawn < rate, instead_of=lambda drawn, rate: drawn >= rate)
    return Subject(
        kind="layer", build=lambda c: _Dropping(c, kept), forward=lambda m, x: m(x),
        declares={"causal": False, "drop_path_scaled": True},
    )  # fmt: skip


@fault(
    "GQ-order-of-heads",
    "Groups and the heads of a group change places before heads are merged",
    killed_by=("attention.grouped-queries", "attention.tiles"),
    cause="groups and the heads of a group change places",
)
def heads_come_out_in_another_order() -> Subject:
    merged = put(lambda x: x.transpose(1, 2).flatten(1, 2), instead_of=lambda x: x.flatten(1, 2))

    def attend(m: None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(1, (k.shape[1], -1))
        return merged(F.scaled_dot_product_attention(q, k[:, :, None], v[:, :, None]))

    return Subject(kind="attention", forward=attend)


class _Translator(nn.Module):
    """A source of embeddings, a decoder of two layers with self- and cross-attention, post-norm."""

    def __init__(self, c: DrawnConfig, name: Callable[[int], int]) -> None:
        super().__init__()
        self.heads, self.name = c.num_heads, name
        self.source, self.target = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.own = nn.ModuleList(nn.Linear(c.d_model, 3 * c.d_model) for _ in range(2))
        self.query = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(2))
        self.both = nn.ModuleList(nn.Linear(c.d_model, 2 * c.d_model) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(4))
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def split(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (count, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, source: Tensor, target: Tensor, kept: dict[Any, Any] | None = None) -> Tensor:
        memory, x = self.source(source), self.target(target)
        for n in range(2):
            q, k, v = self.split(self.own[n](x), 3)
            if kept is not None:
                k, v = (torch.cat([*kept.get((n, i), ()), z], 2) for i, z in enumerate((k, v)))
                kept[n, 0], kept[n, 1] = (k,), (v,)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - q.shape[2])
            given = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = self.norms[2 * n](x + given.transpose(1, 2).flatten(2))
            (q,) = self.split(self.query[n](x), 1)
            place = self.name(n)
            if kept is None or place not in kept:
                k, v = self.split(self.both[n](memory), 2)
                if kept is not None:
                    kept[place] = k, v
            else:
                k, v = kept[place]
            x = self.norms[2 * n + 1](x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x)


@fault(
    "KV-one-source",
    "In cached decoding all layers attend to the keys and values that the first has of the source",
    killed_by=("decoding.cache",),
    cause="is not kept for each layer by itself",
)
def one_source_for_all_layers() -> Subject:
    name = put(lambda n: -1, instead_of=lambda n: n)

    def cache(m: _Translator, source: Tensor, chunks: list[Tensor]) -> Tensor:
        kept: dict[Any, Any] = {}
        return torch.cat([m(source, chunk, kept) for chunk in chunks], 1)

    return Subject(
        kind="encoder_decoder", build=lambda c: _Translator(c, name), forward=lambda m, s, t: m(s, t), cache=cache,
        mask_forms=(), declares={"positions": "none", "structure": "other"},
    )  # fmt: skip


@fault(
    "LS-samples-alike",
    "A model's own loss is the mean of its samples' means, however many labels count in each",
    killed_by=("loss.of-model",),
    cause="averaged in parts first (samples, say)",
)
def samples_weigh_alike() -> Subject:
    def right(total: Tensor, counted: Tensor) -> Tensor:
        return total.sum() / counted.sum()

    joined = put(lambda total, counted: (total.sum(1) / counted.sum(1).clamp(min=1)).mean(), instead_of=right)

    def loss(m: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(m(tokens).mT, labels, reduction="none")
        return joined(total, labels != -100)

    return replace(decoder(None), cache=None, loss=loss).with_facts(ignore_index=-100)


@fault(
    "LS-chunks-by-length",
    "Means of chunks are weighed by the length of a chunk, labels that do not count among it",
    killed_by=("loss.definition",),
    cause="weighed by all that stands in it",
)
def chunks_weighed_by_their_length() -> Subject:
    weight = put(lambda counted: counted.numel(), instead_of=lambda counted: int(counted.sum()))

    def loss(m: None, logits: Tensor, labels: Tensor) -> Tensor:
        total, many = logits.sum() * 0, 0
        for x, y in zip(logits.flatten(0, -2).split(4), labels.flatten().split(4), strict=True):
            counted = y != -100
            mean = F.cross_entropy(x, y, reduction="sum") / counted.sum().clamp(min=1)
            total, many = total + mean * weight(counted), many + weight(counted)
        return total / many if many else total

    return Subject(kind="loss", forward=loss, declares={"empty_loss": "zero"})
