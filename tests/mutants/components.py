"""Faults of single components: softmax in few bits, routers, tables of embeddings, masks as objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.adapters.reference_tokenizers import encode
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.pooling import WeightedPooling
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.init import started
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import CausalLayer, masked, model
from veriformer.tests.mutants.tokenization import byte_pairs


def weights(of: Any) -> Subject:
    of = put(of, instead_of=torch.softmax)
    return Subject(kind="softmax", forward=lambda m, scores, dim=-1: of(scores, dim), name="softmax")


@fault(
    "SM05",
    "Softmax evaluated in half precision without upcast",
    killed_by=("softmax.accuracy",),
    cause="less accurate than rounding",
)
def without_upcast() -> Subject:
    def softmax(scores: Tensor, dim: int) -> Tensor:
        largest = scores.amax(dim, keepdim=True)
        shifted = (scores - torch.where(largest.isinf(), 0, largest)).exp()
        total = torch.zeros_like(largest)
        for term in shifted.split(1, dim=dim):  # every partial sum is rounded to the dtype of the scores
            total = total + term
        return shifted / torch.where(total == 0, 1, total)

    return weights(softmax)


@fault(
    "ME01",
    "Auxiliary loss on softmax(softmax(logits))",
    killed_by=("softmax.masked-is-zero", "softmax.jacobian"),
    cause="softmax of the softmax",
)
def twice() -> Subject:
    return weights(lambda scores, dim: scores.softmax(dim).softmax(dim))


@fault(
    "ME04",
    "renormalize=False path returns raw logits as weights",
    killed_by=("softmax.simplex",),
    cause="no weights at all|scores",
)
def raw_logits() -> Subject:
    return weights(lambda scores, dim: scores)


@fault(
    "ME02",
    "softmax after top-1 kills the router gradient",
    killed_by=("parameters.all-used",),
    cause="without a weight that is differentiable|every weight is 1",
)
def dead_router() -> Subject:
    class Experts(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.router = nn.Linear(config.d_model, 3)
            self.experts = nn.ModuleList(nn.Linear(config.d_model, config.d_model) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            logits, chosen = self.router(x).topk(1, dim=-1)
            weight = logits.softmax(-1)  # of one number: always 1
            every = torch.stack([expert(x).relu() for expert in self.experts], dim=-2)
            return weight * every.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1])).squeeze(-2)

    return Subject(kind="feed_forward", build=Experts, forward=lambda m, x: m(x))


@fault(
    "SC07",
    "Soft-cap 0 means 'off' in one path and 'collapse to 0/NaN' in another",
    killed_by=("numerics.finite",),
    cause="NaN",
)
def cap_of_zero() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int, cap: float = 0.0) -> Tensor:
        return masked(cap * torch.tanh(s * d**-0.5 / torch.tensor(cap)), allow) @ v

    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        return (0.0 * torch.tanh(q @ k.transpose(-2, -1) / torch.tensor(0.0))).softmax(-1) @ v

    return Subject(kind="attention", forward=forward, name="attention")


@fault(
    "CM08",
    "Bottom-right alignment with T_q > T_k: empty rows must be defined, versions disagree",
    killed_by=("causality.alignment",),
    cause="top left|off by one",
)
def aligned_to_the_first() -> Subject:
    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        allow = torch.ones(scores.shape[-2:], dtype=torch.bool) if attention_mask is None else attention_mask
        if causal:
            allow = allow & torch.ones(scores.shape[-2:], dtype=torch.bool).tril(max(0, k.shape[2] - q.shape[2]))
        return masked(scores, allow) @ v

    return Subject(kind="attention", forward=forward, declares={"causal_alignment": "bottom-right"})


class Mask:
    """A causal mask as an object; what moves or copies it makes a mask without the flag."""

    def __init__(self, causal: bool = True) -> None:
        self.causal = causal

    def __deepcopy__(self, memo: Any) -> Mask:
        return Mask(causal=False)  # right: Mask(self.causal)

    def __reduce__(self) -> Any:
        return Mask, (False,)


class MaskedByObject(CausalLayer):
    """A causal layer that asks an object for its mask."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__(config)
        self.mask = Mask()

    def allowed(self, length: int) -> Tensor:
        every = torch.ones(length, length, dtype=torch.bool)
        return every.tril() if self.mask.causal else every


@fault(
    "CM05",
    "Causal-ness lost when the mask object is moved, copied or sliced",
    killed_by=("parameters.registered",),
    cause="deepcopy changes",
)
def lost_on_the_way() -> Subject:
    return Subject(
        kind="layer", build=MaskedByObject, forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "positions": "none"},
    )  # fmt: skip


class Unmasked(WeightedPooling):
    """Pools the padding with the tokens."""

    def forward(self, extras: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        return super().forward(extras, tokens, torch.ones_like(mask))


@fault(
    "PM11",
    "Pooling token ignores the mask",
    killed_by=("padding.content-irrelevant", "padding.pooling"),
    cause="padded positions",
)
def pooled_with_padding() -> Subject:
    def change(built: nn.Module) -> None:
        built.get_submodule("pooling").__class__ = Unmasked

    return model(change, {"pooling": "weighted"}, architecture="classifier", pooling="weighted")


@fault(
    "EM01",
    "padding_idx row overwritten by custom init",
    killed_by=("embedding.padding-row",),
    cause="overwrites the row",
)
def overwritten_row() -> Subject:
    def change(built: nn.Module) -> None:
        built.embedding.tokens.weight.data.normal_()  # type: ignore[union-attr,operator]

    def keep(built: nn.Module) -> None:
        table: Any = built.get_submodule("embedding.tokens")
        table.padding_idx = 0
        table.weight[0] = 0.0

    return started("encoder", change, {"padding_idx": 0}, keep)


@fault(
    "EM02",
    "padding_idx=None zeroes the whole table",
    killed_by=("init.token-spread",),
    cause="starts the same for every token",
)
def zeroed_table() -> Subject:
    def change(built: nn.Module, padding_idx: int | None = None) -> None:
        built.embedding.tokens.weight[padding_idx] = 0.0  # type: ignore[union-attr,index]

    return started("encoder", change, positions="none")


@fault("EM04", "T5 logit scale applied in the wrong tie case", killed_by=("init.loss",), cause="variance")
def scaled_if_untied() -> Subject:
    class Head(nn.Linear):
        tied = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.tied else x * x.shape[-1] ** -0.5)  # right: the other way round

    def change(built: nn.Module) -> None:
        built.embedding.tokens.weight.data.normal_()  # type: ignore[union-attr,operator]
        built.output.__class__ = Head

    return started("decoder", change, {"tied": True}, tied=True, positions="t5", embedding_scale=False)


class OwnPositions(nn.Module):
    """Tokens and a learned table of positions, one row of which is taken for padding."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model, padding_idx=1)
        self.inner = nn.TransformerEncoderLayer(config.d_model, config.num_heads, config.d_ff, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.inner(x)


@fault(
    "EM07",
    "Position table row padding_idx never trained",
    killed_by=("gradients.gradcheck",),
    cause="row 1 of positions.weight is its padding_idx and gets no gradient",
)
def untrained_row() -> Subject:
    return Subject(
        kind="encoder", build=OwnPositions, forward=lambda m, tokens: m(tokens),
        declares={"causal": False, "positions": "learned"},
    )  # fmt: skip


@fault(
    "PE-halved",
    "Two neighbours share a position",
    killed_by=("positions.distinct",),
    cause="neighbours share a vector",
)
def halved_positions() -> Subject:
    class Halved(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.inner(x, positions // 2)

    def change(built: nn.Module) -> None:
        built.embedding.positions = Halved(built.embedding.positions)  # type: ignore[union-attr,arg-type,assignment]

    return model(change, architecture="decoder", positions="learned")


@fault(
    "DR05",
    "drop_path1 reused for the FFN branch",
    killed_by=("droppath.expectation",),
    cause="stochastic depth is used in its place",
)
def reused() -> Subject:
    class DropPath(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.drop_prob = rate

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            kept = torch.rand(len(x), *(1,) * (x.ndim - 1)) >= self.drop_prob
            return x * kept / (1 - self.drop_prob)

    class Layer(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(config.d_model, config.d_model) for _ in range(2))
            self.drop_path1, self.drop_path2 = DropPath(0.2), DropPath(0.4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.drop_path1(self.first(x).relu())
            return x + self.drop_path1(self.second(x).relu())  # right: drop_path2

    return Subject(kind="feed_forward", build=Layer, forward=lambda m, x: m(x))


@fault(
    "IN04",
    "deepcopy clones start with identical weights",
    killed_by=("init.layers-differ",),
    cause="copies of one layer",
)
def clones() -> Subject:
    def change(built: nn.Module) -> None:
        layers = list(built.get_submodule("stack.layers").children())
        for other in layers[1:]:
            other.load_state_dict(layers[0].state_dict())

    return started("encoder", change)


class _OtherMask(torch.autograd.Function):
    """Dropout whose backward draws a mask of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.kept, ctx.rate = torch.rand_like(x) >= rate, rate
        return x * ctx.kept / (1 - rate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.kept.roll(1, dims=-1) / (1 - ctx.rate), None  # right: ctx.kept


@fault(
    "EX02",
    "Fused dropout kernel uses a different RNG index in backward",
    killed_by=("dropout.gradient",),
    cause="drops others than the forward",
)
def other_mask_in_backward() -> Subject:
    class Network(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
            self.rate = config.dropout

        def forward(self, x: Tensor) -> Tensor:
            inner = functional.gelu(self.up(x))
            return self.down(_OtherMask.apply(inner, self.rate) if self.training and self.rate else inner)

    return Subject(kind="feed_forward", build=Network, forward=lambda m, x: m(x))


@fault(
    "TK02",
    "Merges applied whose result is not in the vocabulary",
    killed_by=("tokenizer.bpe-merges",),
    cause="are never given",
)
def merged_beyond_the_vocabulary() -> Subject:
    def forward(model: Any, text: str) -> list[int]:
        names = {number: piece for piece, number in model.vocabulary.items()}
        cut = {"".join(pair) for pair in model.merges[:2]}  # not in the vocabulary, and merged all the same
        ids = ([i] if names.get(i) not in cut else [model.vocabulary[c] for c in names[i]] for i in encode(model, text))
        return [i for part in ids for i in part]

    return byte_pairs(forward=forward)


@fault("NM14", "eps underflows in half precision", killed_by=("norm.half-precision",), cause="float16")
def vanishing_eps() -> Subject:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            eps = torch.tensor(1e-8).to(x.dtype)  # 0 in float16
            return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weight + self.bias

    return Subject(kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x), declares={"norm": "layer"})
