"""Faults of sizes that small models do not have: a width, a head, a layer, a batch, a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class
from veriformer.tests.mutants.parts import CausalLayer, SelfAttention, layer, self_attention

_INFLUENCE = "causality.no-future-influence"
_CONTENT = "padding.content-irrelevant"


@fault(
    "reach-batch",
    "Padding is turned into a mask eight samples at a time, and what is left over goes unmasked",
    killed_by=(_CONTENT,),
    cause="it begins with batches of 9",
)
def ninth_sample() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None and len(mask) > 8:
                mask = torch.cat([mask[: len(mask) // 8 * 8], torch.ones_like(mask[len(mask) // 8 * 8 :])])
            return super().weights(scores, mask)

    return self_attention(Wrong)


@fault(
    "reach-wide-head",
    "Heads of more than 96 channels are left to another kernel, which is called without the causal flag",
    killed_by=(_INFLUENCE,),
    cause="no mask has reached them",
)
def wide_head() -> Subject:
    class Wrong(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            allow = super().allowed(length)
            return torch.ones_like(allow) if self.width > 96 else allow

    return layer(Wrong, causal=True, positions="none")


@fault(
    "reach-odd-head",
    "The keys of odd heads are padded to an even width, and with that the padding mask is lost",
    killed_by=(_CONTENT,),
    cause="padding",
)
def odd_head() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return super().weights(scores, None if self.width % 2 else mask)

    return self_attention(Wrong)


@fault(
    "reach-eighth-head",
    "Which heads are causal stands in the bits of an int8, of which the eighth is the sign",
    killed_by=(_INFLUENCE,),
    cause="the mask of head",
)
def eighth_head() -> Subject:
    class Wrong(CausalLayer):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            bits = torch.tensor([1 << n for n in range(self.heads)]).to(torch.int8) > 0
            bits[8:] = True  # a second byte, of which nothing went wrong
            hidden = ~self.allowed(x.shape[1]) & bits[None, :, None, None]
            scores = self.scores(x).masked_fill(hidden, -torch.inf)
            return x + self.o(self.merge(self.weights(scores, attention_mask) @ self.split(self.values(x))))

    return layer(Wrong, causal=True, positions="none")


class Grouped(CausalLayer):
    """A causal layer whose heads share keys and values."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__(config)
        self.groups = config.num_key_value_heads
        self.k, self.v = (nn.Linear(config.d_model, self.groups * self.width) for _ in range(2))

    def shared(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.groups, self.width)).transpose(1, 2)

    def all_heads(self, x: Tensor) -> Tensor:
        return self.shared(x).repeat_interleave(self.heads // self.groups, dim=1)

    def scores(self, x: Tensor) -> Tensor:
        return self.split(self.q(x)) @ self.all_heads(self.k(x)).transpose(-2, -1) * self.width**-0.5

    def mixed(self, weights: Tensor, x: Tensor) -> Tensor:
        return weights @ self.all_heads(self.v(x))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x).masked_fill(~self.allowed(x.shape[1]), -torch.inf)
        return x + self.o(self.merge(self.mixed(self.weights(scores, attention_mask), x)))


@fault(
    "reach-one-key-head",
    "With one key-value head the queries of eight heads are one long sequence, and are masked as one",
    killed_by=(_INFLUENCE,),
    cause="the mask of head",
)
def one_key_value_head() -> Subject:
    class Wrong(Grouped):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            if self.groups > 1 or self.heads < 8:
                return super().forward(x, attention_mask)
            length = x.shape[1]
            rows = torch.arange(self.heads * length).view(self.heads, length)  # query t of head h is row h T + t
            hidden = torch.arange(length) > rows[..., None]
            scores = self.scores(x).masked_fill(hidden, -torch.inf)
            return x + self.o(self.merge(self.mixed(self.weights(scores, attention_mask), x)))

    return layer(Wrong, causal=True, positions="none")


class _Bytes(nn.Module):
    """A decoder over tokens."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layer = CausalLayer(config)
        self.out = nn.Linear(config.d_model, config.vocab_size)

    def ends(self, tokens: Tensor) -> Tensor:
        return torch.zeros_like(tokens, dtype=torch.bool)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        after = torch.where(self.ends(tokens).any(dim=-1)[:, None, None], x.mean(dim=1, keepdim=True), 0.0)
        out: Tensor = self.out(self.layer(x) + after)
        return out


@fault(
    "reach-last-token",
    "A sample that holds the last id of a vocabulary of more than a byte is taken for one that is over, and averaged",
    killed_by=(_INFLUENCE,),
    cause="influence",
)
def last_id() -> Subject:
    class Wrong(_Bytes):
        def ends(self, tokens: Tensor) -> Tensor:
            size = self.embedding.num_embeddings
            return tokens == size - 1 if size > 256 else super().ends(tokens)

    return Subject(
        kind="decoder", build=put_class(Wrong), forward=lambda m, tokens: m(tokens),
        declares={"causal": True, "positions": "none"},
    )  # fmt: skip


@fault(
    "reach-sixth-layer",
    "Every sixth layer attends to the whole sequence, as in a model that alternates, and nobody wrote that down",
    killed_by=(_INFLUENCE,),
    cause="layers.5",
)
def sixth_layer() -> Subject:
    class Open(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            return torch.ones(length, length, dtype=torch.bool)

    class Stack(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                (Open if number % 6 == 5 else CausalLayer)(config) for number in range(config.num_layers)
            )

        def forward(self, x: Tensor) -> Tensor:
            for part in self.layers:
                x = part(x)
            return x

    return Subject(
        kind="encoder", build=Stack, inputs="embeddings", forward=lambda m, x: m(x),
        declares={"causal": True, "positions": "none", "stacked": False},
    )  # fmt: skip
