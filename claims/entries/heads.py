"""What is said of heads: hard and associative readings, several against one, widths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.claims.claim import claim
from veriformer.claims.entries.attention import random_heads
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import gap, generator, normal, raises
from veriformer.claims.systems.associative import energy, retrieved, update
from veriformer.reference.attention import attention, softmax


@claim(
    47,
    "Hard attention is the limit of the soft one; its gradient is zero almost everywhere.",
    "E 2.3",
    topic="attention",
    formula=r"\lim_{c\to\infty} \mathrm{softmax}(c\,s) = e_{\arg\max s}",
    derivation="With a unique maximum the softmax of c s tends to the arg max, exponentially in c times the gap. "
    "The chosen key does not change under small moves, so queries and keys get no gradient; the chosen value does "
    "get one (it is copied).",
    condition="the largest score is the only one, and the gradient is that of queries and keys (the value that was "
    "picked gets the whole of it)",
)  # fmt: skip
def hard(see: Evidence) -> None:
    draw = generator(47)
    q, k, v = (normal(draw, 1, 1, 5, 4).requires_grad_() for _ in range(3))
    scores = q @ k.transpose(-1, -2)
    picked = v[0, 0][scores.argmax(-1)[0, 0]][None, None]
    errors = [gap(softmax(c * scores) @ v, picked) for c in (10.0, 100.0, 1000.0)]
    see.restricted("largest difference to the arg max at scores times 1000", errors[-1], most=1e-8)
    see.restricted("the difference falls with the factor", errors[0] > errors[1] >= errors[2])
    soft = (softmax(1e4 * scores) @ v).square().sum()
    of_query, of_key, of_value = torch.autograd.grad(soft, (q, k, v))
    see.restricted(
        "largest gradient of queries and keys at scores times 10 000",
        max(of_query.abs().max().item(), of_key.abs().max().item()),
        most=1e-9,
    )
    see.restricted("largest gradient of values", of_value.abs().max().item(), least=0.1)
    tied = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    see.written("largest weight in the limit when two scores tie", softmax(1e4 * tied).max().item(), least=1 - 1e-9)
    see.written(
        "largest gradient of all three", max(g.abs().max().item() for g in (of_query, of_key, of_value)), most=1e-9
    )


@claim(
    48,
    "Multi-head attention is strictly more expressive than one head at the same number of parameters.",
    "C Theorem 2.1",
    topic="attention",
    derivation="Both directions fail. Two heads that pick different tokens give x_1 W1 + x_2 W2; one head gives "
    "(a x_1 + (1 - a) x_2) W, which is that for all x_1, x_2 only if W1 and W2 are multiples of one W. And one head "
    "whose scores x A y have rank d is no sum of heads of width d/h, whose A_h have rank d/h: for two tokens x and x + "
    "t the head gives x V + s(x A t) t V with the logistic s, and logistic functions of x along different directions "
    "are linearly independent, so A t would have to be plus or minus one of the A_h t for every t. That a single head "
    "is 'the special case h = 1' shows nothing: there the width of a head is d, not d/h.",
    corrected="Neither contains the other: several heads give several patterns, a single wide one gives scores of "
    "higher rank.",
    cites="Bhojanapalli et al. 2020, theorem 1.",
)  # fmt: skip
def several_heads(see: Evidence) -> None:
    draw, d = generator(48), 8
    full = normal(draw, d, d)
    left, sizes, right = torch.linalg.svd(full)
    parts = [(left[:, i : i + 2] * sizes[i : i + 2]) @ right[i : i + 2] for i in range(0, d, 2)]  # they add up to it
    missed = _logistic_miss(draw, full, parts)
    see.written("share of one head's pattern that four heads of a quarter of its width miss", missed, most=1e-9)
    see.corrected("share of one head's pattern that four heads of a quarter of its width miss", missed, least=0.01)
    see.corrected(
        "the same when the four are as wide as the one", _logistic_miss(draw, full, [full, *parts]), most=1e-9
    )
    picked = _picking_miss(draw, d)
    see.corrected("share of what two heads that pick two tokens give that one head misses", picked, least=0.05)
    see.corrected("heads of one width sum their parts exactly: |MHA - sum over heads|", _head_sum_gap(draw), most=1e-12)


def _logistic_miss(draw: torch.Generator, one: Tensor, several: list[Tensor]) -> float:
    """Return how much of s(x A t) as a function of x the functions s(x A_h t) and a constant leave over, relatively."""
    x, step = normal(draw, 2000, len(one)), normal(draw, len(one))
    wanted = torch.sigmoid(x @ one @ step)[:, None]
    given = torch.stack([torch.ones(len(x), dtype=x.dtype), *(torch.sigmoid(x @ a @ step) for a in several)], dim=1)
    left_over = wanted - given @ torch.linalg.lstsq(given, wanted, driver="gelsd").solution
    return (left_over.norm() / (wanted - wanted.mean()).norm()).item()


def _picking_miss(draw: torch.Generator, d: int) -> float:
    """Return the least relative error of (a x_1 + (1 - a) x_2) W as x_1 W1 + x_2 W2, the best W for each of 101 a."""
    first, second = normal(draw, 500, d), normal(draw, 500, d)
    wanted = first @ normal(draw, d, d) + second @ normal(draw, d, d)
    least = float("inf")
    for a in torch.linspace(0, 1, 101, dtype=torch.float64):
        mixed = a * first + (1 - a) * second
        left_over = wanted - mixed @ torch.linalg.lstsq(mixed, wanted).solution
        least = min(least, (left_over.norm() / wanted.norm()).item())
    return least


def _head_sum_gap(draw: torch.Generator) -> float:
    layer, x = random_heads(draw), normal(draw, 1, 5, 12)
    q, k, v = (proj(x).unflatten(-1, (3, -1)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    per_head = attention(q, k, v)[0][0]  # [H, T, K]
    blocks = layer.o_proj.weight.T.reshape(3, 4, 12)
    return gap(torch.einsum("htk,hkd->td", per_head, blocks) + layer.o_proj.bias, layer(x)[0])


@claim(
    54,
    "Self-attention is one update of a modern Hopfield network, and a kernel average; memories inherit exponential "
    "capacity.",
    "C 8.1",
    topic="attention",
    formula=r"\xi' = X^\top \mathrm{softmax}(\beta X \xi), \quad \beta = 1/\sqrt{d_k}",
    derivation="With W_q W_k^T = I and W_v = I the two formulas are the same. The update lowers the energy "
    "-lse(beta X xi)/beta + xi.xi/2. Of N random patterns of norm sqrt(d) the wanted one weighs e^(beta d), the others "
    "together N e^(beta^2 d / 2): with beta held, below 2, N may grow as e^(c d). Attention's beta is 1/sqrt(d_k), "
    "where N may grow as e^sqrt(d) only. Patterns that lie close blend. Trained projections need not store patterns.",
    condition="the projections are identities (or are absorbed into the stored patterns), patterns are apart, and beta "
    "does not fall with the width (at attention's 1/sqrt(d_k) the capacity is e^sqrt(d), not e^(c d))",
    cites="Ramsauer et al. 2021, theorems 1 and 3.",
)  # fmt: skip
def hopfield(see: Evidence) -> None:
    draw, d = generator(54), 64
    patterns = normal(draw, 200, d)
    state = patterns[:5] + 0.1 * normal(draw, 5, d)
    as_attention = attention(state[None, None], patterns[None, None], patterns[None, None], scale=d**-0.5)[0][0, 0]
    see.restricted(
        "largest difference of attention and one Hopfield update",
        gap(as_attention, update(patterns, state, d**-0.5)),
        most=1e-12,
    )
    see.restricted(
        "largest rise of the energy in 10 updates",
        max(
            energy(patterns, update(patterns, s, d**-0.5), d**-0.5).item() - energy(patterns, s, d**-0.5).item()
            for s in state
        ),
        most=1e-9,
    )
    see.restricted(
        "share of 200 random patterns of width 64 retrieved in one step, 10 % noise",
        retrieved(patterns, 0.1, d**-0.5, draw),
        least=0.99,
    )
    many = normal(draw, 5000, d)
    see.written("the same of 5000 patterns", retrieved(many, 0.1, d**-0.5, draw), least=0.99)
    see.restricted("the same of 5000 patterns at beta = 1", retrieved(many, 0.1, 1.0, draw), least=0.99)
    for width in (16, 32, 40):
        number = 2 ** (width // 4)
        share = retrieved(normal(draw, number, width), 0.1, 1.0, draw)
        see.restricted(f"the same of 2^(d/4) = {number} patterns at beta = 1, d = {width}", share, least=0.98)
    close = patterns[:1] + 0.05 * normal(draw, 200, d)
    see.written("the same when the patterns are 5 % apart", retrieved(close, 0.001, d**-0.5, draw), least=0.99)
    see.restricted("kernel average: largest |A - sum k(q, k_j) v_j / sum k(q, k_j)|", _kernel_gap(draw), most=1e-13)
    see.properties(
        ["attention.hopfield-step", "attention.kernel-average"],
        ["reference:attention", "torch:scaled_dot_product_attention"],
        role="restricted",
    )


def _kernel_gap(draw: torch.Generator) -> float:
    q, k, v = (normal(draw, 1, 1, 6, 4) for _ in range(3))
    kernel = (q @ k.transpose(-1, -2) / math.sqrt(4)).exp()
    return gap(attention(q, k, v)[0], kernel @ v / kernel.sum(-1, keepdim=True))


@claim(
    55,
    "Queries and keys share d_k; values may have a width d_v of their own.",
    "D 3.1",
    topic="attention",
    derivation="q . k needs equal widths; the weights only multiply the values.",
)  # fmt: skip
def value_width(see: Evidence) -> None:
    draw = generator(55)
    q, k, v = normal(draw, 1, 2, 5, 4), normal(draw, 1, 2, 7, 4), normal(draw, 1, 2, 7, 9)
    see.written("width of the output for d_k = 4, d_v = 9", attention(q, k, v)[0].shape[-1], least=9, most=9)
    expected = softmax(q @ k.transpose(-1, -2) / 2) @ v
    see.written("largest difference to softmax(q k^T / 2) v", gap(attention(q, k, v)[0], expected), most=1e-14)
    see.written("keys of another width than queries are refused", raises(RuntimeError, lambda: attention(q, v, v)))
