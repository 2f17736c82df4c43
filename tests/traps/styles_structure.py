"""Right models that are not the textbook's: more matrices or fewer, other costs and stacks, weights of other forms."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrize

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap


class Heads(nn.Module):
    """Self-attention in the open, causal or both ways."""

    def __init__(self, c: DrawnConfig, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = c.num_heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        allow = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        allow = (allow.tril() if self.causal else allow)[None, None]
        if mask is not None:
            allow = allow & mask[:, None, None, :]
        scores = self.scores(q, k)
        weights = scores.masked_fill(~allow, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o(self.combine(x, (weights @ v).transpose(1, 2).flatten(2)))


def attention(cls: Any, **facts: Any) -> Subject:
    return Subject(kind="self_attention", build=cls, forward=lambda m, x: m(x), mask_forms=(), declares=facts)


class Shaw(Heads):
    """Keys of relative positions, clipped at four."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__(c)
        self.table = nn.Parameter(torch.randn(9, c.d_head))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        near = self.table[(place[None] - place[:, None]).clamp(-4, 4) + 4]
        return (q @ k.transpose(-2, -1) + torch.einsum("bhtk,tsk->bhts", q, near)) * q.shape[-1] ** -0.5


@trap("structure-shaw", "A table of relative keys beside the four projections", "Shaw et al. 2018")
def relative_keys() -> Subject:
    return attention(Shaw, causal=False, positions="relative", bias=True)


class Gated(Heads):
    """A sigmoid gate on what attention gives."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__(c)
        self.gate = nn.Linear(c.d_model, c.d_model)

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * y


@trap("structure-gate", "A fifth matrix: the output of attention is gated", "Qiu et al. 2025")
def gated() -> Subject:
    return attention(Gated, causal=False, positions="none", bias=True, structure="other")


class OneMap(Heads):
    """Queries and keys share their map."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__(c)
        self.k = self.q


@trap("structure-shared-query-key", "Queries are keys: one matrix is missing", "Kitaev et al. 2020, section 2")
def shared_map() -> Subject:
    return attention(OneMap, causal=False, positions="none", bias=True, structure="other")


class Linearised(Heads):
    """elu(x) + 1 in place of the exponential, by running sums.

    As in the authors' code 1e-6 is added below: without it keys and queries of -90 give a gradient of 0 / 0.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        sums = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        y = torch.einsum("bhtd,bhtde->bhte", q, sums) / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6)
        return self.o(y.transpose(1, 2).flatten(2))


@trap("structure-linear-attention", "No table of scores is made", "Katharopoulos et al. 2020")
def linear_attention() -> Subject:
    return attention(Linearised, causal=True, positions="none", bias=True, memory="linear")


class Band(Heads):
    """A causal window of eight in blocks that look back at the one before."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        length, w = x.shape[1], 8
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k, v = (functional.pad(t, (0, 0, 0, -length % w)).unflatten(2, (-1, w)) for t in (q, k, v))
        k, v = (torch.cat([functional.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t], 3) for t in (k, v))
        place = torch.arange(length + -length % w, device=x.device).view(-1, w)
        keys = torch.cat([place - w, place], -1)[:, None, :]
        gap = place[:, :, None] - keys
        scores = self.scores(q, k)
        allowed = (gap >= 0) & (gap < w) & (keys >= 0)
        y = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) @ v
        return self.o(y.flatten(2, 3)[:, :, :length].transpose(1, 2).flatten(2))


@trap("structure-band", "A window without a table of T x T", "Beltagy et al. 2020")
def band() -> Subject:
    return attention(Band, causal=True, positions="none", bias=True, window=8)


class Integers(nn.Module):
    """A linear map of int8 weights in a buffer, with a scale a row."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        made = nn.Linear(d_in, d_out)
        scale = made.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (made.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(made.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return functional.linear(x, weight.to(x.dtype) * self.scale, self.bias)


def network(c: DrawnConfig, cls: Any = nn.Linear) -> nn.Sequential:
    return nn.Sequential(cls(c.d_model, c.d_ff), nn.ReLU(), cls(c.d_ff, c.d_model))


@trap("structure-int8", "The weights are buffers of integers", "Dettmers et al. 2022")
def integers() -> Subject:
    facts = {"activation": "relu", "bias": True, "quantised": True}
    return Subject(kind="feed_forward", build=lambda c: network(c, Integers), declares=facts)


class Centred(nn.Module):
    """Weights whose rows have mean zero."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(1, keepdim=True)


@trap("structure-parametrised", "Weights are made anew by a parametrization, which refuses to be pickled")
def parametrised() -> Subject:
    def build(c: DrawnConfig) -> nn.Module:
        made = network(c)
        for linear in (made[0], made[2]):
            parametrize.register_parametrization(linear, "weight", Centred())
        return made

    return Subject(kind="feed_forward", build=build, declares={"activation": "relu", "bias": True})


@trap("structure-keeps-its-output", "What it gave last stays on the model, with its graph, so it cannot be copied")
def keeps() -> Subject:
    class Keeps(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.net, self.last = network(c), None

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x)
            self.last = y.clone()  # type: ignore[assignment]
            return y

    return Subject(kind="feed_forward", build=Keeps, declares={"activation": "relu", "bias": True})


@trap("structure-dict", "What build gives is no module, but a dict of tensors")
def plain_dict() -> Subject:
    def build(c: DrawnConfig) -> dict[str, Tensor]:
        return {"gain": torch.ones(c.d_model)}

    def forward(m: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], m["gain"].to(x.dtype), 1e-6)

    return Subject(kind="norm", build=build, forward=forward, declares={"norm": "rms"})


class Block(nn.Module):
    """A pre-LN block."""

    def __init__(self, c: DrawnConfig, *, causal: bool = False) -> None:
        super().__init__()
        self.attention, self.network = Heads(c, causal=causal), network(c)
        self.norm_1, self.norm_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.network(self.norm_2(x))


_PRE = {"norm": "layer", "norm_placement": "pre", "residual": True, "bias": True, "activation": "relu"}


class Encoder(nn.Module):
    """Blocks over tokens, without positions."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def through(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.norm(self.through(self.tokens(tokens), mask))


def encoder(cls: Any, **facts: Any) -> Subject:
    return Subject(
        kind="encoder",
        build=cls,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "positions": "none", "padding_side": "both", **_PRE, **facts},
    )


@trap("structure-rows", "A loop over rows: every layer is called once a row")
def by_rows() -> Subject:
    class Rows(Encoder):
        def through(self, x: Tensor, mask: Tensor | None) -> Tensor:
            through = super().through
            rows = [through(x[i : i + 1], None if mask is None else mask[i : i + 1]) for i in range(len(x))]
            return torch.cat(rows)

    return encoder(Rows)


@trap("structure-residual-outside", "The residual stands outside of the only list of modules")
def outside() -> Subject:
    class Outside(Encoder):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c)
            self.gain = nn.Parameter(torch.full((1,), 0.5))

        def through(self, x: Tensor, mask: Tensor | None) -> Tensor:
            for block in self.blocks:
                x = x + self.gain * (block(x, mask) - x)
            return x

    return encoder(Outside)


class Template(nn.Module):
    """Weights of all layers stacked; a template without storage of its own is called with slices of them."""

    def __init__(self, c: DrawnConfig, *, device: str) -> None:
        super().__init__()
        layers = [Block(c) for _ in range(c.num_layers)]
        self.names = [name for name, _ in layers[0].named_parameters()]
        stacked = [torch.stack([layer.get_parameter(name).detach() for layer in layers]) for name in self.names]
        self.stacked = nn.ParameterList(stacked)
        self.template = [copy.deepcopy(layers[0]).to(device)]
        self.tokens, self.norm = nn.Embedding(c.vocab_size, c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        for i in range(self.stacked[0].shape[0]):
            weights = {name: stack[i] for name, stack in zip(self.names, self.stacked, strict=True)}
            x = functional_call(self.template[0], weights, (x, mask))
        return self.norm(x)


@trap("structure-template", "A module in a list, which is called with weights from elsewhere", "torch.func")
def template() -> Subject:
    return encoder(lambda c: Template(c, device="cpu"))


@trap("structure-template-meta", "The same with a template on the meta device", "torch.func")
def meta_template() -> Subject:
    return encoder(lambda c: Template(c, device="meta"))


@trap("structure-small-embeddings", "torch's default initialisation after embeddings of 0.02, layers cloned")
def small() -> Subject:
    class Small(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens = nn.Embedding(c.vocab_size, c.d_model)
            nn.init.normal_(self.tokens.weight, std=0.02)
            layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, norm_first=True)
            self.stack = nn.TransformerEncoder(layer, c.num_layers, enable_nested_tensor=False)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(tokens).transpose(0, 1) * math.sqrt(self.tokens.embedding_dim)  # time first
            return self.stack(x).transpose(0, 1)

    made = encoder(Small, final_norm=False, embedding_scale=True, init="other")
    return Subject(kind="encoder", build=made.build, forward=lambda m, tokens: m(tokens), declares=made.declares)


class Decoder(nn.Module):
    """A language model whose gains start at zero, without norms."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, causal=True) for _ in range(c.num_layers))
        self.gains = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(c.num_layers))
        self.norm, self.output = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x = x + gain * (block(x) - x)
        return self.output(self.norm(x))


@trap("structure-gains", "A gain of one number a layer, and an output bias that nothing declares", "Bachlechner 2020")
def gains() -> Subject:
    facts = {"causal": True, "positions": "none", "tied": False, **_PRE}
    return Subject(kind="decoder", build=Decoder, forward=lambda m, tokens: m(tokens), declares=facts)


@trap("structure-tied-default", "A tied table at torch's default standard deviation of 1, which nobody chose")
def tied_default() -> Subject:
    class Tied(Decoder):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c)
            self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)
            self.output.weight = self.tokens.weight

    facts = {"causal": True, "positions": "none", "tied": True, "output_bias": False, "init": "default", **_PRE}
    return Subject(kind="decoder", build=Tied, forward=lambda m, tokens: m(tokens), declares=facts)


@trap("structure-classifier", "Token types besides, and a head without a bias", "Devlin et al. 2019")
def token_types() -> Subject:
    class Typed(Encoder):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c)
            self.types, self.head = nn.Embedding(2, c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(tokens) + self.types(torch.zeros_like(tokens))
            x = self.norm(self.through(x, mask))
            shown = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
            shown = (shown | ~shown.any(1, keepdim=True))[..., None]
            return self.head((x * shown).sum(1) / shown.sum(1))

    made = encoder(Typed, pooling="mean", final_norm=True)
    return Subject(kind="classifier", build=made.build, forward=made.forward, declares=made.declares)


@trap("structure-t5-table", "The table of relative positions stands in the attention itself", "Raffel et al. 2020")
def t5_table() -> Subject:
    class Buckets(Heads):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c)
            self.table = nn.Embedding(32, c.num_heads)

        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            place = torch.arange(q.shape[2], device=q.device)
            gap = place[None] - place[:, None]
            size, exact = gap.abs(), 8
            far = exact + (torch.log(size.clamp(min=1).float() / exact) / math.log(128 / exact) * 8).long()
            bucket = torch.where(size < exact, size, far.clamp(max=15)) + 16 * (gap > 0)
            return super().scores(q, k) + self.table(bucket).permute(2, 0, 1)

    return attention(Buckets, causal=False, positions="t5", bidirectional=True, num_buckets=32, bias=True)
