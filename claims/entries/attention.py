"""What is said of attention: symmetry, scale, softmax, linearity."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import gap, generator, mean_interval, normal
from veriformer.reference.attention import MultiHeadAttention, attention, softmax
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.reference.positions import sinusoidal


def random_heads(draw: torch.Generator, d_model: int = 12, num_heads: int = 3) -> MultiHeadAttention:
    """Return attention in float64 whose parameters, biases too, are normal with variance 1 / d_model."""
    layer = MultiHeadAttention(d_model, num_heads).double()
    for parameter in layer.parameters():
        parameter.data = normal(draw, *parameter.shape) / d_model**0.5
    return layer


@claim(
    10,
    "Self-attention is permutation-equivariant; with positions added it is not.",
    "C 8.2", "E 4.1",
    topic="attention",
    formula=r"MHA(PX) = P\,MHA(X), \quad MHA(PX + S) \ne P\,MHA(X + S)",
    derivation="Scores become P S P^T, the softmax of rows commutes with both permutations, and P^T P = I cancels "
    "before the values. S is not permuted, so P(X + S) = PX + PS is another input than PX + S unless PS = S.",
)  # fmt: skip
def equivariance(see: Evidence) -> None:
    draw = generator(10)
    layer, x = random_heads(draw), normal(draw, 1, 7, 12)
    order = torch.randperm(7, generator=draw)
    table = sinusoidal(torch.arange(7), 12)[None]
    see.written("largest |MHA(PX) - P MHA(X)|", gap(layer(x[:, order])[0], layer(x)[0][:, order]), most=1e-12)
    see.written(
        "largest |MHA(PX + S) - P MHA(X + S)|",
        gap(layer(x[:, order] + table)[0], layer(x + table)[0][:, order]),
        least=1e-2,
    )
    see.properties(
        ["permutation.equivariance", "permutation.broken-by-positions"],
        ["reference:multi-head", "reference:encoder-none", "reference:encoder", "torch:MultiheadAttention"],
    )


@claim(
    11,
    "Without positions 'cat sat on mat' and 'mat on sat cat' give the same representation.",
    "C 4",
    topic="attention",
    derivation="They give the same rows in another order (equivariance), so each word has the same representation; "
    "the sequence of representations is another. Only what does not see the order, as the mean, is the same.",
    condition="the representation is that of each word, or is pooled without regard to order",
)  # fmt: skip
def cat_and_mat(see: Evidence) -> None:
    model = build(Config(vocab_size=4, d_model=16, positions="none", num_layers=2), generator(11)).double().eval()
    forth, back = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 2, 1, 0]])
    with torch.no_grad():
        one, other = model(forth)[0], model(back)[0]
    see.written("largest difference of the two representations, position by position", gap(one, other), most=1e-12)
    see.restricted("largest difference word by word", gap(one, other.flip(0)), most=1e-12)
    see.restricted("largest difference of the means", gap(one.mean(0), other.mean(0)), most=1e-12)


@claim(
    12,
    "softmax(P X P^T) = P softmax(X) P^T.",
    "E 4.1",
    topic="attention",
    derivation="The softmax of a row sees its entries as a set: it commutes with a reordering of the columns, and "
    "rows are treated alike.",
)  # fmt: skip
def conjugation(see: Evidence) -> None:
    draw = generator(12)
    scores, order = normal(draw, 9, 9) * 5, torch.randperm(9, generator=draw)
    see.written(
        "largest difference", gap(softmax(scores[order][:, order]), softmax(scores)[order][:, order]), most=1e-15
    )
    see.properties(["permutation.softmax-conjugation"], ["reference:softmax", "torch:softmax"])


@claim(
    13,
    "With q, k ~ N(0, I/d_k) the dot product has variance 1; unscaled it grows as d_k.",
    "C Lemma 1.1",
    topic="attention",
    formula=r"\mathrm{Var}(q^\top k) = d_k \sigma_q^2 \sigma_k^2",
    derivation="d_k independent products of variance sigma_q^2 sigma_k^2. With variances 1/d_k that is 1/d_k, not "
    "1; with variances 1 it is d_k, and division by sqrt(d_k) makes it 1.",
    corrected="With q, k ~ N(0, I) the product has variance d_k and variance 1 after division by sqrt(d_k); with "
    "N(0, I/d_k) it has 1/d_k.",
    cites="Vaswani et al. 2017, footnote 4.",
)  # fmt: skip
def variance(see: Evidence) -> None:
    draw, number = generator(13), 20_000 if see.quick else 100_000
    for width in (16, 256):
        products = (normal(draw, number, width) * normal(draw, number, width)).sum(1)
        see.written(f"variance for N(0, I/d_k), d_k = {width}", _squares(products / width), least=0.95, most=1.05)
        see.corrected(
            f"variance over d_k for N(0, I), d_k = {width}", _squares(products / width**0.5), least=0.95, most=1.05
        )
        see.corrected(
            f"variance times d_k for N(0, I/d_k), d_k = {width}", _squares(products / width**0.5), least=0.95, most=1.05
        )
    see.properties(["attention.score-variance"], ["reference:multi-head"], role="corrected")


def _squares(values: Tensor) -> tuple[float, float]:
    return mean_interval(values**2)


@claim(
    14,
    "For x_i, x_j ~ N(0, sigma^2 I) the product x_i . x_j has variance of order sigma^4 e; dividing by sqrt(e) keeps "
    "the variance bounded and prevents excessively large logits.",
    "E 2.1",
    topic="attention",
    formula=r"\mathrm{Var}(x_i^\top x_j) = \sigma^4 e,\quad \mathrm{Var}(x_i^\top x_i) = 2\sigma^4 e,\quad "
    r"\mathbb{E}[x_i^\top x_i] = \sigma^2 e",
    derivation="For i != j as in claim 13. On the diagonal the product is a squared norm: its variance, 2 sigma^4 e, "
    "is of the same order and bounded by the division too. But its mean is sigma^2 e, which becomes sigma^2 sqrt(e): "
    "the variance is bounded, the logit is not, and without projections every token comes to see itself alone.",
    condition="i != j (the logit of a token with itself has mean sigma^2 sqrt(e) after the division)",
)  # fmt: skip
def raw_products(see: Evidence) -> None:
    draw, sigma, number = generator(14), 1.5, 20_000 if see.quick else 60_000
    for width in (16, 256):
        x, y = sigma * normal(draw, number, width), sigma * normal(draw, number, width)
        apart, itself = (x * y).sum(1) / width**0.5, (x * x).sum(1) / width**0.5
        of_pairs, of_one = apart / sigma**2, itself / sigma**2
        for say in (see.written, see.restricted):
            say(f"variance over sigma^4, i != j, e = {width}", _squares(of_pairs), least=0.93, most=1.07)
        spread = mean_interval((of_one - of_one.mean()) ** 2)
        see.written(f"variance over 2 sigma^4, i = j, e = {width}", (spread[0] / 2, spread[1] / 2), least=0.9, most=1.1)
        see.written(f"mean logit over sigma^2, i = j, e = {width}", mean_interval(of_one), most=LARGE)
        see.restricted(
            f"share of |logit| over {LARGE:g} sigma^2, i != j, e = {width}",
            (of_pairs.abs() > LARGE).double().mean().item(),
            most=0.01,
        )
        see.restricted(
            f"mean logit over sigma^2 sqrt(e), i = j, e = {width}",
            mean_interval(of_one / width**0.5),
            least=0.98,
            most=1.02,
        )


LARGE = 3.5
"""Of a logit over sigma^2, whose standard deviation is 1 after the division: rarer than one in a thousand."""


@claim(
    15,
    "Subtracting the maximum before the softmax changes nothing and prevents overflow.",
    "C Prop. 1.1",
    topic="attention",
    formula=r"\frac{e^{s_j - m}}{\sum_k e^{s_k - m}} = \frac{e^{s_j}}{\sum_k e^{s_k}}",
    derivation="e^{-m} cancels; after it no exponent is above 0, and the largest is 0: the denominator lies between 1 "
    "and T, so it neither overflows nor vanishes. (The lecture adds 'underflow': single weights still become 0, which "
    "is below 1e-308 of the largest.)",
)  # fmt: skip
def maximum(see: Evidence) -> None:
    scores = normal(generator(15), 50, 20) * 8
    plain = scores.exp() / scores.exp().sum(-1, keepdim=True)
    far = torch.tensor([[1000.0, 999.0, -1000.0]], dtype=torch.float64)
    see.written("largest difference with and without, scores to 30", gap(softmax(scores), plain), most=1e-14)
    see.written("weights at scores of 1000 are finite and sum to one", abs(softmax(far).sum().item() - 1), most=1e-15)
    see.written(
        "without the maximum they are not: entries that are no number",
        int((far.exp() / far.exp().sum(-1, keepdim=True)).isnan().sum()),
        least=1,
    )
    low = far - 3000
    see.written("at scores of -2000 they sum to one", abs(softmax(low).sum().item() - 1), most=1e-15)
    see.written(
        "without the maximum their denominator is 0: entries that are no number",
        int((low.exp() / low.exp().sum(-1, keepdim=True)).isnan().sum()),
        least=1,
    )
    see.properties(["softmax.shift-invariance", "softmax.no-overflow"], ["reference:softmax", "torch:softmax"])


@claim(
    17,
    "On its own attention is linear in the input embeddings.",
    "D 3.2",
    topic="attention",
    derivation="It is linear in the values for fixed weights; the weights themselves depend on the input through "
    "the softmax of a quadratic form.",
    corrected="Attention is linear in its values while the weights are held; in the input embeddings it is not.",
)  # fmt: skip
def linearity(see: Evidence) -> None:
    draw = generator(17)
    layer = random_heads(draw)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    x, y = normal(draw, 1, 6, 12), normal(draw, 1, 6, 12)
    both, apart = layer(x + y)[0], layer(x)[0] + layer(y)[0]
    see.written("relative size of A(x + y) - A(x) - A(y)", ((both - apart).norm() / both.norm()).item(), most=1e-9)
    q, k, v, w = (normal(draw, 1, 2, 6, 4) for _ in range(4))
    sums = attention(q, k, v + w)[0] - attention(q, k, v)[0] - attention(q, k, w)[0]
    see.corrected("largest |A(q, k, v + w) - A(q, k, v) - A(q, k, w)|", sums.abs().max().item(), most=1e-14)
    see.properties(
        ["attention.value-linearity"], ["reference:attention", "torch:scaled_dot_product_attention"], role="corrected"
    )


@claim(
    46,
    "The parameter count of self-attention does not depend on the number of tokens.",
    "E 2.2",
    topic="attention",
    derivation="W_q, W_k, W_v, W_o act on one token at a time; the softmax has no parameters.",
)  # fmt: skip
def parameters_of_attention(see: Evidence) -> None:
    layer = random_heads(generator(46))
    before = {name: p.shape for name, p in layer.named_parameters()}
    for length in (1, 5, 300):
        layer(torch.zeros(1, length, 12, dtype=torch.float64))
    see.written(
        "parameters after sequences of 1, 5 and 300 tokens are those before",
        {n: p.shape for n, p in layer.named_parameters()} == before,
    )
    see.written(
        "parameters over 4 (d^2 + d)", sum(p.numel() for p in layer.parameters()) / (4 * (12**2 + 12)), least=1, most=1
    )
