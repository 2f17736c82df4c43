"""Faults of what is read in the place of something else: slots of a cache, rows of experts, the ends of edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

_PAGE, _SINKS, _WINDOW = 4, 2, 4
Slots = Callable[[Tensor], Tensor]


class _Cache:
    """Keys and values of one layer by their slot, and the position that stands there; -1: none yet."""

    def __init__(self, slots: int, like: Tensor) -> None:
        self.at = torch.full((slots,), -1)
        self.keys, self.values = (like.new_zeros(*like.shape[:2], slots, like.shape[-1]) for _ in range(2))

    def write(self, slots: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        self.at[slots] = places
        self.keys[:, :, slots], self.values[:, :, slots] = keys, values


class _Block(nn.Module):
    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.first, self.second = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def heads_of(self, x: Tensor) -> Tensor:
        return self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, allow: Tensor) -> Tensor:
        scores = (query @ key.mT * key.shape[-1] ** -0.5).masked_fill(~allow, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.second(x))))


class _Decoder(nn.Module):
    def __init__(self, c: DrawnConfig, *, window: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(_Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.window = window

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        back = queries[:, None] - keys
        allow = (back >= 0) & (keys >= 0)
        return allow & ((back < _WINDOW) | (keys < _SINKS)) if self.window else allow

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            query, key, value = block.heads_of(x)
            x = block(x, query, key, value, self.allowed(places, places))
        return self.head(self.norm(x))

    def cached(self, chunks: Sequence[Tensor], slots: Slots, count: int) -> list[Tensor]:
        caches: list[_Cache | None] = [None] * len(self.blocks)
        outputs, start = [], 0
        for chunk in chunks:
            places = torch.arange(start, start + chunk.shape[1])
            x, start = self.tokens(chunk) + self.places(places), start + chunk.shape[1]
            for n, block in enumerate(self.blocks):
                query, key, value = block.heads_of(x)
                cache = caches[n] = caches[n] or _Cache(count, key)
                cache.write(slots(places), places, key, value)
                known = torch.arange(count) if self.window else torch.arange(start)
                at = cache.at[known] if self.window else known  # a page is read by its number
                x = block(x, query, cache.keys[:, :, known], cache.values[:, :, known], self.allowed(places, at))
            outputs.append(self.head(self.norm(x)))
        return outputs


@fault(
    "KV-page-end",
    "A chunk is written into the page that it begins in: what passes its end comes round to its beginning",
    killed_by=("decoding.cache",),
    cause="keys of one chunk are written over one another",
)
def written_round_a_page() -> Subject:
    slots: Slots = put(lambda places: places[:1] // _PAGE * _PAGE + places % _PAGE, instead_of=lambda places: places)
    return Subject(
        kind="decoder", build=lambda c: _Decoder(c, window=False), forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks: m.cached(chunks, slots, sum(chunk.shape[1] for chunk in chunks)),
        declares={"positions": "learned", "norm_placement": "pre", "norm": "layer"},
    )  # fmt: skip


@fault(
    "KV-sinks-in-the-ring",
    "The ring of a window runs over the sinks too: once it is full they are overwritten",
    killed_by=("decoding.cache",),
    cause="the first ones (sinks) are given up",
)
def sinks_overwritten() -> Subject:
    slots: Slots = put(
        lambda places: places % (_SINKS + _WINDOW),
        instead_of=lambda places: torch.where(places < _SINKS, places, _SINKS + (places - _SINKS) % _WINDOW),
    )

    def cached(model: _Decoder, chunks: Sequence[Tensor]) -> Tensor:
        steps = torch.cat(list(chunks), 1).split(1, dim=1)
        return torch.cat(model.cached(steps, slots, _SINKS + _WINDOW), 1)

    return Subject(
        kind="decoder", build=lambda c: _Decoder(c, window=True), forward=lambda m, tokens: m(tokens), cache=cached,
        declares={"positions": "learned", "norm_placement": "pre", "window": _WINDOW, "sink_tokens": _SINKS},
    )  # fmt: skip


class _Edges(nn.Module):
    """Attention over a list of edges: scores, weights and messages belong to an edge, from a key to a query."""

    def __init__(self, c: DrawnConfig, group: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.group = c.num_heads, group
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        shown = torch.ones(length, length, dtype=torch.bool) if attention_mask is None else attention_mask
        sample, row, column = shown.expand(batch, length, length).nonzero(as_tuple=True)
        query, key = sample * length + row, sample * length + column
        q, k, v = (f(x).reshape(batch * length, self.heads, -1) for f in (self.q, self.k, self.v))
        scores = (q[query] * k[key]).sum(-1) * q.shape[-1] ** -0.5
        index = self.group(query, key)
        largest = torch.full((batch * length, self.heads), -torch.inf, dtype=x.dtype)
        largest = largest.scatter_reduce(0, index[:, None].expand_as(scores), scores.detach(), "amax")
        weights = (scores - largest[index]).exp()
        weights = weights / torch.zeros_like(largest).index_add(0, index, weights)[index]
        messages = torch.zeros_like(v).index_add(0, query, weights[..., None] * v[key])
        return self.o(messages.reshape(batch, length, width))


@fault(
    "SM-edges-by-key",
    "The softmax over edges is taken among those that leave a node, not among those that reach it",
    killed_by=("attention.pairwise-mask",),
    cause="the softmax runs over the queries",
)
def grouped_by_their_source() -> Subject:
    group: Callable[[Tensor, Tensor], Tensor] = put(lambda query, key: key, instead_of=lambda query, key: query)
    return Subject(
        kind="self_attention", build=lambda c: _Edges(c, group), mask_forms=("pairwise",),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask), declares={"causal": False, "positions": "none"},
    )  # fmt: skip


class _SortedExperts(nn.Module):
    def __init__(self, c: DrawnConfig, along: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.along = c.num_heads, along
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(2))
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.gate = nn.Linear(c.d_model, 4)
        self.experts = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        shown = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
        weights = scores.masked_fill(~shown[:, None, None], torch.finfo(q.dtype).min).softmax(-1)
        weights = weights.masked_fill(~shown[:, None, None], 0.0)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def mix(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        best, chosen = self.gate(rows).topk(2)
        order = chosen.flatten().argsort(stable=True)
        parts = rows[order // 2].split(torch.bincount(chosen.flatten(), minlength=4).tolist())
        made = torch.cat([expert(part).relu() for expert, part in zip(self.experts, parts, strict=True)])
        shares = self.along(best.softmax(-1).flatten(), order)
        return torch.zeros_like(rows).index_add(0, order // 2, made * shares[:, None]).reshape(x.shape)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.norms[0](x), attention_mask)
        return x + self.mix(self.norms[1](x))


@fault(
    "PM-shares-unsorted",
    "Rows are sorted by their expert, and what they weigh is not: each gets the weight of another token",
    killed_by=("padding.content-irrelevant",),
    cause="so do the tokens of other samples",
)
def weighed_by_another_token() -> Subject:
    along: Callable[[Tensor, Tensor], Tensor] = put(
        lambda shares, order: shares, instead_of=lambda shares, order: shares[order]
    )
    return Subject(
        kind="layer", build=lambda c: _SortedExperts(c, along),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "structure": "other"},
    )  # fmt: skip
