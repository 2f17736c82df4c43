"""What is said of LayerNorm, its gradient, and where norms stand."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import gap, generator, mean_interval, normal, slope
from veriformer.reference.blocks import DecoderLayer
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.reference.normalization import LayerNorm


@claim(
    19,
    "LayerNorm does not depend on the batch, BatchNorm does.",
    "A 4.4", "D 3.4",
    topic="norms",
    derivation="LayerNorm's mean and variance are those of one token. BatchNorm's are those of the batch while it "
    "trains; in eval mode they are stored numbers, and its outputs are as independent as LayerNorm's.",
    condition="the network is in training mode",
)  # fmt: skip
def batches(see: Evidence) -> None:
    draw = generator(19)
    x, others = normal(draw, 1, 5, 8), normal(draw, 3, 5, 8)
    layer, batch = LayerNorm(8).double(), nn.BatchNorm1d(8).double()
    of_layer = gap(layer(torch.cat([x, others]))[:1], layer(torch.cat([x, others + 3]))[:1])
    see.written("largest change of a sample's LayerNorm when the other samples change", of_layer, most=0.0)
    trained = _batch_change(batch.train(), x, others)
    resting = _batch_change(batch.eval(), x, others)
    see.written("the same of BatchNorm in eval mode", resting, least=1e-2)
    see.restricted("the same of LayerNorm in training mode", of_layer, most=0.0)
    see.restricted("the same of BatchNorm in training mode", trained, least=1e-2)
    see.properties(["norm.per-token"], ["reference:layer-norm", "torch:LayerNorm"], role="restricted")


def _batch_change(norm: nn.Module, x: Tensor, others: Tensor) -> float:
    def of(rest: Tensor) -> Tensor:
        return norm(torch.cat([x, rest]).transpose(1, 2))[:1]

    with torch.no_grad():
        return gap(of(others), of(others + 3))


@claim(
    20,
    "The Jacobian of LayerNorm is O(sqrt(D) / |x|), and starves early layers of gradient.",
    "B Why?",
    topic="norms",
    formula=r"\frac{\partial LN}{\partial x} = \frac{1}{\sigma}\left(I - \frac{1}{D} 1 1^T - \frac{1}{D} "
    r"\hat{x}\hat{x}^T\right), \quad \left\|\frac{\partial LN}{\partial x}\right\|_2 = \frac{\sqrt{D}}{\|x - \mu\|}",
    derivation="The bracket is a projection, so the norm is 1/sigma exactly, and sigma = |x - mu| / sqrt(D): the "
    "norm of the centred vector, not of x; with a large mean |x| says nothing. In the block as these notes draw it "
    "the norm stands inside the branch, and the gradient reaches early layers through the sum beside it: it is the "
    "largest there.",
    corrected="It is sqrt(D) / |x - mean| exactly; with pre-LN blocks the early layers get the larger gradients.",
    cites="Xiong et al. 2020, lemma 3.",
)  # fmt: skip
def jacobian(see: Evidence) -> None:
    draw, width = generator(20), 32
    norm = LayerNorm(width, eps=0.0).double()
    for name, x in (("centred", normal(draw, width)), ("moved by 100", normal(draw, width) + 100)):
        size = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(norm, x), 2).item()
        if name != "centred":
            see.written(
                f"norm of the Jacobian times |x| / sqrt(D), {name}", size * (x.norm() / width**0.5).item(), most=2.0
            )
        see.corrected(
            f"norm of the Jacobian times |x - mean| / sqrt(D), {name}",
            size * ((x - x.mean()).norm() / width**0.5).item(),
            least=1 - 1e-9,
            most=1 + 1e-9,
        )
    by_layer = [_gradients("pre", 12, seed) for seed in see.seeds(few=12)]
    first = mean_interval(torch.tensor([row[0] / row[-1] for row in by_layer]))
    see.written("gradient in the first of 12 pre-LN layers over that in the last", first, most=0.9)
    see.corrected("gradient in the first of 12 pre-LN layers over that in the last", first, least=1.1)
    see.properties(["norm.jacobian"], ["reference:layer-norm", "torch:LayerNorm"], role="corrected")


def _gradients(placement: str, depth: int, seed: int) -> list[float]:
    """Return the norm of the gradient of W_2 in each layer of an untrained decoder (Xiong et al. 2020, theorem 1)."""
    draw = generator(seed)
    config = Config(architecture="decoder", num_layers=depth, norm_placement=placement, embedding_scale=False)
    model = build(config, draw)
    tokens, labels = (torch.randint(32, (8, 12), generator=draw) for _ in range(2))
    functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    return [layer.feed_forward.down.weight.grad.norm().item() for layer in model.stack.layers]  # type: ignore[union-attr]


@claim(
    21,
    "The gradient's scale grows with depth in post-LN and is about constant in pre-LN.",
    "A 4.5",
    topic="norms",
    derivation="'With depth' can mean two things. Across models: at initialisation the gradient of the last layer's "
    "parameters is of order 1 in post-LN whatever the depth L, and of order 1/sqrt(L) in pre-LN, since the closing "
    "norm divides by a stream whose variance grew with L. Along the layers of one model: every post-LN norm takes away "
    "about what the branch beside it adds, so the gradient grows a little at most; a pre-LN branch divides by a stream "
    "that is the smaller the earlier it is, so there it grows towards the early layers. In neither reading are both "
    "halves true.",
    corrected="In the last layer of deeper models it is about constant in post-LN and falls as 1/sqrt(L) in pre-LN; "
    "along the layers of one pre-LN model it falls.",
    cites="Xiong et al. 2020, theorem 1 (across models) and figure 3 (along the layers).",
)  # fmt: skip
def gradient_scale(see: Evidence) -> None:
    depths = [4, 8, 16] if see.quick else [4, 8, 16, 32]
    exponents, along, shown = {}, {}, {}
    for where in ("pre", "post"):
        by_seed = [{n: _gradients(where, n, seed) for n in depths} for seed in see.seeds(24, few=24)]
        last = [[row[n][-1] for n in depths] for row in by_seed]
        exponents[where] = mean_interval(torch.tensor([slope([float(n) for n in depths], row) for row in last]))
        along[where] = mean_interval(torch.tensor([math.log(row[16][-1] / row[16][0]) for row in by_seed]))
        shown[where] = torch.tensor(last).mean(0).tolist()
    see.show("gradient of the last layer by depth, mean of the seeds", {"depth": depths, **shown})
    across, inside = "exponent of depth in the last layer's gradient", "ln of the last of 16 layers over the first"
    see.written(f"{across}, post-LN", exponents["post"], least=0.2)
    see.written(f"{across}, pre-LN", exponents["pre"], least=-0.2, most=0.2)
    see.written(f"{inside}, post-LN", along["post"], least=0.0)
    see.written(f"{inside}, pre-LN", along["pre"], least=-0.2, most=0.2)
    see.corrected(f"{across}, post-LN", exponents["post"], least=-0.2, most=0.2)
    see.corrected(f"{across}, pre-LN", exponents["pre"], least=-0.7, most=-0.3)
    see.corrected(f"{inside}, pre-LN", along["pre"], most=-0.2)


@claim(
    36,
    "A decoder layer has 6 LayerNorm modules.",
    "A 6.3",
    topic="norms",
    derivation="One for each of its three sublayers. An encoder layer has 2, and 3 + 2 = 5 in a pair of layers.",
    corrected="3, one a sublayer.",
    cites="Vaswani et al. 2017, section 3.1.",
)  # fmt: skip
def norms_of_a_decoder_layer(see: Evidence) -> None:
    ours = sum(isinstance(m, LayerNorm) for m in DecoderLayer(Config()).modules())
    torchs = sum(isinstance(m, nn.LayerNorm) for m in nn.TransformerDecoderLayer(16, 2).modules())
    see.written("LayerNorms in the reference's decoder layer", ours, least=6, most=6)
    see.corrected("LayerNorms in the reference's decoder layer", ours, least=3, most=3)
    see.corrected("LayerNorms in nn.TransformerDecoderLayer", torchs, least=3, most=3)


@claim(
    57,
    "LayerNorm(x) = gamma (x - mu) / sigma + beta, without an epsilon.",
    "B Layer Norm",
    topic="norms",
    derivation="Where all entries are equal sigma is 0 and the quotient 0/0. The epsilon inside the root makes it "
    "beta.",
    corrected="(x - mu) / sqrt(sigma^2 + eps): defined everywhere; it differs by less than eps / (2 sigma^2) of "
    "the value.",
)  # fmt: skip
def without_epsilon(see: Evidence) -> None:
    same, x = torch.full((1, 8), 3.0, dtype=torch.float64), normal(generator(57), 50, 8)

    def plain(v: Tensor) -> Tensor:
        return (v - v.mean(-1, keepdim=True)) / v.std(-1, correction=0, keepdim=True)

    see.written("entries that are no number for equal entries", int(plain(same).isnan().sum()), most=0)
    norm = LayerNorm(8, eps=1e-5).double()
    see.corrected("the same with an epsilon", int(norm(same).isnan().sum()), most=0)
    bound = (1e-5 / (2 * x.var(-1, correction=0, keepdim=True)) * plain(x).abs() + 1e-12).detach()
    see.corrected(
        "largest difference over eps / (2 sigma^2) of the value",
        ((norm(x) - plain(x)).abs() / bound).max().item(),
        most=1.0,
    )
    see.properties(["norm.constant-input"], ["reference:layer-norm", "torch:LayerNorm"], role="corrected")
