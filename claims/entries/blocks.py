"""What is said of the causal mask, the feed-forward network and the residual stream."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import gap, generator, mean_interval, normal, slope
from veriformer.claims.systems.initialisations import orthogonal
from veriformer.reference.attention import MultiHeadAttention
from veriformer.reference.config import Config
from veriformer.reference.feedforward import FeedForward, GatedFeedForward
from veriformer.reference.model import build


@claim(
    16,
    "-inf becomes exactly 0 after the softmax; each position sees itself and the past.",
    "A 6.1", "C 3.4",
    topic="masks",
    formula=r"e^{-\infty} = 0",
    derivation="exp(-inf) is 0 in IEEE arithmetic, so the masked key adds nothing at all to any sum. The diagonal "
    "is never masked, so no row is empty.",
)  # fmt: skip
def causal_mask(see: Evidence) -> None:
    mask = torch.triu(torch.ones(6, 6) * float("-inf"), diagonal=1)  # as the notes write it
    weights = functional.softmax(normal(generator(16), 6, 6).float() + mask, dim=-1)
    see.written("largest weight on the future", weights.triu(1).max().item(), most=0.0)
    see.written(
        "least weight on the past and on itself", weights[torch.ones(6, 6).tril().bool()].min().item(), least=1e-6
    )
    see.written("the notes' own line makes that mask", bool((mask.isinf() == torch.ones(6, 6).triu(1).bool()).all()))
    see.properties(
        ["softmax.masked-is-zero", "causality.no-future-influence", "causality.no-future-gradient"],
        ["reference:softmax", "reference:causal-heads", "torch:TransformerEncoder-causal"],
    )


@claim(
    18,
    "The feed-forward network acts on each position independently, and equals a 1x1 convolution.",
    "A 4.2", "D 3.2",
    topic="feed-forward",
    formula=r"FFN(x)_t = W_2\,\max(0, W_1 x_t + b_1) + b_2",
    derivation="One matrix applied to every position is a convolution with a kernel of one position.",
)  # fmt: skip
def position_wise(see: Evidence) -> None:
    draw = generator(18)
    network = FeedForward(8, 20, torch.relu).double()
    x, other = normal(draw, 2, 7, 8), normal(draw, 2, 7, 8)
    first, second = (m for m in network.modules() if isinstance(m, nn.Linear))
    inner = functional.conv1d(x.transpose(1, 2), first.weight[..., None], first.bias).relu()
    outer = functional.conv1d(inner, second.weight[..., None], second.bias).transpose(1, 2)
    see.written("largest difference to two convolutions with kernel 1", gap(network(x), outer), most=1e-13)
    changed = torch.where(torch.arange(7)[:, None] == 3, x, other)
    see.written(
        "largest change at a position when all others are replaced",
        gap(network(x)[:, 3], network(changed)[:, 3]),
        most=0.0,
    )
    gated = GatedFeedForward(8, 20, torch.nn.functional.silu).double()
    see.written("the same of SwiGLU", gap(gated(x)[:, 3], gated(changed)[:, 3]), most=0.0)
    see.properties(["ffn.position-wise"], ["reference:feed-forward", "reference:swiglu"])


@claim(
    45,
    "Scaling the residual branches by 1/sqrt(2N), or 1/sqrt(L), stops the output's variance from growing with "
    "depth.",
    "A 9.3", "C Implementation",
    topic="residual",
    formula=r"\mathrm{Var}(x_N) = \mathrm{Var}(x_0) + \sum_{l=1}^{2N} \mathrm{Var}(f_l)",
    derivation="Branches of a pre-LN stack start out nearly independent, so variances add: 2N of them, each times "
    "1/(2N), add up to a constant; with 1/N to twice that. The scheme of the weights changes the constant alone: "
    "with orthogonal matrices, which keep every length, the stream grows likewise. (The lecture credits 1/sqrt(L) to "
    "ReZero and DeepNet: the one begins with branches of 0, the other multiplies the stream.)",
    cites="Radford et al. 2019, section 2.3; Saxe et al. 2014; Bachlechner et al. 2021; Wang et al. 2022.",
)  # fmt: skip
def residual_scaling(see: Evidence) -> None:
    depths = [2, 4, 8, 16] if see.quick else [2, 4, 8, 16, 32]
    ways = {"unscaled": lambda n: 1.0, "1/sqrt(2N)": lambda n: (2 * n) ** -0.5, "1/sqrt(N)": lambda n: n**-0.5}
    shown = {}
    for init, (word, scale) in itertools.product(("Xavier", "orthogonal"), ways.items()):
        added = [[_growth(n, scale(n), init, seed) for n in depths] for seed in see.seeds()]
        exponent = mean_interval(torch.tensor([slope([float(n) for n in depths], row) for row in added]))
        shown[f"{init}, {word}"] = torch.tensor(added).mean(0).tolist()
        limits = {"least": 0.7} if word == "unscaled" else {"least": -0.2, "most": 0.2}
        see.written(f"exponent of depth in the variance that is added, {init}, {word}", exponent, **limits)
    see.show("variance added by the stack over that of its input", {"depth": depths, **shown})
    see.properties(["init.residual-scaling"], ["reference:decoder-gpt2"])


def _growth(depth: int, scale: float, init: str, seed: int) -> float:
    """Return the share of its input's variance that a pre-LN stack of fresh layers adds, branches times `scale`."""
    draw = generator(seed)
    model = build(Config(num_layers=depth, d_model=64, positions="none"), draw).double()
    if init == "orthogonal":
        orthogonal(model, draw)
    for layer in model.stack.layers:  # type: ignore[union-attr]
        for last in (layer.attention.o_proj, layer.feed_forward.down):
            last.weight.data *= scale
    x = normal(draw, 2, 16, 64)
    stream = x
    with torch.no_grad():
        for layer in model.stack.layers:  # type: ignore[union-attr]
            stream, _ = layer(stream)
    return (stream.var() / x.var() - 1).item()


@claim(
    49,
    "The residual-stream form: x_i gets the sum over heads and tokens of alpha W x_j added.",
    "E 3.2",
    topic="residual",
    formula=r"x_i \leftarrow x_i + \sum_h \sum_j \alpha^{(h)}_{ij} W^{(h)} x_j, \quad W^{(h)} = W_O^{(h)} W_V^{(h)}",
    derivation="Values and output projection are linear, so they can be multiplied out head by head; biases add a "
    "constant.",
)  # fmt: skip
def residual_stream(see: Evidence) -> None:
    draw, heads, width = generator(49), 3, 12
    layer, x = MultiHeadAttention(width, heads, bias=False).double(), normal(draw, 1, 6, width)
    output, weights = layer(x)
    values = layer.v_proj.weight.unflatten(0, (heads, -1))  # [H, K, D]
    outputs = layer.o_proj.weight.unflatten(1, (heads, -1))  # [D, H, K]
    both = torch.einsum("dhk,hke->hde", outputs, values)
    summed = torch.einsum("hij,hde,je->id", weights[0], both, x[0])
    see.written("largest |MHA(x) - sum of alpha W x|", gap(output[0], summed), most=1e-12)
    see.properties(["attention.head-decomposition"], ["reference:multi-head", "torch:MultiheadAttention"])


@claim(
    50,
    "dx_{l+1} / dx_l = I + dF / dx_l.",
    "D 3.3",
    topic="residual",
    derivation="The derivative of a sum. With the norm after the sum (post-LN) the whole is multiplied by the "
    "norm's Jacobian.",
)  # fmt: skip
def residual_jacobian(see: Evidence) -> None:
    layer, x = FeedForward(6, 10, torch.relu).double(), normal(generator(50), 6)
    whole = torch.autograd.functional.jacobian(lambda v: v + layer(v), x)
    branch = torch.autograd.functional.jacobian(layer, x)
    see.written("largest difference of the two", gap(whole, torch.eye(6, dtype=torch.float64) + branch), most=1e-13)
    see.properties(["residual.jacobian"], ["reference:layer-pre"])
