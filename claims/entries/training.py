"""What is said of the first steps of training: scales at initialisation, schedules, the optimiser."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import generator, mean_interval
from veriformer.reference.attention import attention
from veriformer.reference.positions import sinusoidal
from veriformer.reference.schedules import noam


@claim(
    9,
    "Embeddings have norm about sqrt(d) under N(0, 1) and positions about sqrt(d/2), so the factor sqrt(d) puts "
    "them on a comparable scale.",
    "A 3.4",
    topic="positions",
    formula=r"\|E\| \approx \sqrt{d},\quad \|PE\| = \sqrt{d/2},\quad \|\sqrt{d}\, E\| \approx d",
    derivation="Both norms are right, and already comparable (a factor of sqrt 2). The factor makes the embeddings "
    "d: sqrt(2d) times the positions. With N(0, 1/d), as a tied output projection asks for, the factor restores the "
    "comparable scale.",
    condition="the embeddings are drawn from N(0, 1/d)",
    cites="Vaswani et al. 2017, section 3.4.",
)  # fmt: skip
def embedding_scale(see: Evidence) -> None:
    for d in (64, 512):
        norms = torch.randn(4000, d, generator=generator(9), dtype=torch.float64).norm(dim=1)
        positions = sinusoidal(torch.arange(100), d).norm(dim=1)
        see.written(
            f"norm of N(0, 1) embeddings over sqrt(d), d = {d}", mean_interval(norms / d**0.5), least=0.95, most=1.05
        )
        see.written(
            f"norm of positions over sqrt(d/2), d = {d}",
            (positions.max() / (d / 2) ** 0.5).item(),
            least=1 - 1e-9,
            most=1 + 1e-9,
        )
        see.written(
            f"embeddings times sqrt(d), N(0, 1), over positions, d = {d}",
            mean_interval(norms * d**0.5 / positions.mean()),
            least=0.5,
            most=2,
        )
        see.restricted(
            f"embeddings times sqrt(d), N(0, 1/d), over positions, d = {d}",
            mean_interval(norms / positions.mean()),
            least=0.5,
            most=2,
        )


@claim(
    42,
    "The schedule d^-0.5 min(t^-0.5, t warm^-1.5) peaks at the end of warm-up.",
    "A 9.1",
    topic="training",
    derivation="One branch rises, the other falls; they meet at t = warm.",
)  # fmt: skip
def schedule(see: Evidence) -> None:
    for warm in (1, 100, 4000):
        rates = [noam(t, d_model=512, warmup_steps=warm) for t in range(1, 3 * warm + 10)]
        see.written(
            f"step of the largest rate less the warm-up's {warm}", rates.index(max(rates)) + 1 - warm, least=0, most=0
        )
    see.properties(["schedule.warmup"], ["reference:noam"])


@claim(
    43,
    "Attention is near uniform at initialisation.",
    "A 9.1",
    topic="attention",
    formula=r"H / \ln T",
    derivation="Scores of variance s^2 give weights whose entropy is ln T - s^2/2 to first order (0.86 of ln T at T = "
    "32, s = 1). Scaled scores have variance 1 where queries and keys have. In the notes' own encoder they do not: "
    "nn.Embedding draws from N(0, 1), times sqrt(d) that is a token of variance d, so the queries of the first layer "
    "have variance d/2 and its weights sit on one token. The layers after a norm are near uniform.",
    condition="scores are scaled by 1/sqrt(d_k), and queries and keys have unit variance or less, as after a norm",
)  # fmt: skip
def uniform(see: Evidence) -> None:
    draw, without = generator(43), {}
    for width in (16, 64, 512):
        q, k = (torch.randn(8, 4, 32, width, generator=draw, dtype=torch.float64) for _ in range(2))
        scaled, plain = (_evenness(attention(q, k, k, scale=scale)[1]) for scale in (None, 1.0))
        see.restricted(f"entropy over ln T, scaled, d_k = {width}", scaled, least=0.8)
        without[f"d_k = {width}"] = sum(plain) / 2
    see.show("entropy over ln T without the scale", without)
    layer = nn.MultiheadAttention(128, 8, batch_first=True).double()
    nn.init.xavier_uniform_(layer.in_proj_weight, generator=draw)  # as the layer does by itself, with our generator
    tokens = torch.randn(8, 32, 128, generator=draw, dtype=torch.float64)
    x = 128**0.5 * tokens + sinusoidal(torch.arange(32), 128)
    for say, name, given in (
        (see.written, "first layer of the notes' encoder", x),
        (see.restricted, "the same layer after a LayerNorm", functional.layer_norm(x, (128,))),
    ):
        weights = layer(given, given, given, average_attn_weights=False)[1]
        say(f"entropy over ln T, {name}", _evenness(weights.detach()), least=0.8)
    see.properties(["init.entropy"], ["reference:multi-head"], role="restricted")


def _evenness(weights: torch.Tensor) -> tuple[float, float]:
    """Return the interval of the entropy of weights `[B, H, T, S]` over that of even ones, a sample of B each."""
    entropy = -torch.xlogy(weights, weights).sum(-1) / math.log(weights.shape[-1])
    return mean_interval(entropy.mean((1, 2)))


@claim(
    67,
    "Adam's early steps have unbounded variance; warm-up tames it.",
    "B Why?",
    topic="training",
    formula=r"\Delta_1 = -\eta\, g/\sqrt{g^2} = -\eta\,\mathrm{sign}(g)",
    derivation="What has no finite variance is the adaptive rate 1/sqrt(v) of the first steps (v of few squared "
    "normals; Liu et al. 2020, theorem 1). The step itself is bounded: by Cauchy and Schwarz |m|/sqrt(v) after t steps "
    "is at most b_t = sqrt(sum of a_i^2 / c_i), a_i and c_i being the weights of g_i in m and of g_i^2 in v. b_1 = 1, "
    "b_10 = 1.04, and b_t rises to (1 - beta1) / sqrt((1 - beta2)(1 - beta1^2/beta2)) = 7.27. It is reached by "
    "gradients that grow as (beta2/beta1)^t, so the (1 - beta1)/sqrt(1 - beta2) = 3.16 of Adam's paper, argued for a "
    "single gradient after zeros, is no bound. Warm-up multiplies the step.",
    corrected="The adaptive rate's variance is unbounded at first; the step is bounded, by the learning rate at step "
    "1, by 1.05 times it up to step 10 and by 7.3 times it ever (beta1 = 0.9, beta2 = 0.999); warm-up makes it small.",
    cites="Liu et al. 2020, theorem 1; Kingma & Ba 2015, section 2.1.",
)  # fmt: skip
def adam(see: Evidence) -> None:
    gradients = torch.randn(4_000_000, generator=generator(67), dtype=torch.float64)
    rate = 1 / gradients.abs()
    small, large = (rate[:n].var().item() for n in (4_000, 4_000_000))
    moved = _first_steps(gradients[:4000], 1)
    see.written("standard deviation of the first step over the learning rate", moved.std().item(), least=1.5)
    see.corrected("variance of the adaptive rate over 4 000 000 draws, over that of 4 000", large / small, least=10)
    see.corrected("largest first step over the learning rate", moved.abs().max().item(), most=1 + 1e-6)
    steps = _steps_on_growing()
    bounds = [_bound(t) for t in range(1, len(steps) + 1)]
    see.corrected(
        "largest step over its bound b_t, gradients that grow as (beta2/beta1)^t",
        max(s / b for s, b in zip(steps, bounds, strict=True)),
        least=1 - 1e-6,
        most=1 + 1e-6,
    )
    see.corrected("b_10", bounds[9], most=1.05)
    see.corrected("largest of 3000 such steps over the learning rate", max(steps), least=7.0, most=7.3)
    rare = _largest(50)
    see.corrected("largest of 50 steps over b_50, rare large gradients", rare / bounds[49], most=1 + 1e-6)
    see.corrected("the same in 10 steps of a warm-up of 100, over the rate", _largest(10, warm=100), most=0.1 * 1.05)


def _bound(step: int, beta1: float = 0.9, beta2: float = 0.999) -> float:
    """Return the largest |m| / sqrt(v), both corrected for their start, that `step` gradients can give."""
    ratio = beta1**2 / beta2
    starts = (1 - beta1) / (1 - beta1**step) * math.sqrt((1 - beta2**step) / (1 - beta2))
    return starts * math.sqrt((1 - ratio**step) / (1 - ratio))


def _steps_on_growing(number: int = 3000) -> list[float]:
    """Return the sizes of torch's Adam's steps, at rate 1, on the gradients that make them largest."""
    weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser, sizes = torch.optim.Adam([weights], lr=1.0, eps=0.0), []
    for step in range(number):
        weights.grad = torch.full_like(weights, (0.999 / 0.9) ** step)
        before = weights.item()
        optimiser.step()
        sizes.append(abs(weights.item() - before))
    return sizes


def _first_steps(gradients: torch.Tensor, steps: int) -> torch.Tensor:
    weights = torch.zeros_like(gradients, requires_grad=True)
    optimiser = torch.optim.Adam([weights], lr=1.0, eps=1e-12)
    for _ in range(steps):
        weights.grad = gradients.clone()
        optimiser.step()
    return weights.detach()


def _largest(steps: int, warm: int = 0) -> float:
    """Return the largest step of Adam over the base rate, on gradients with rare large entries."""
    draw = generator(6700)
    weights = torch.zeros(2000, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([weights], lr=1.0, eps=1e-12)
    largest = 0.0
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = min(1.0, (step + 1) / warm) if warm else 1.0
        noise = torch.randn(2000, generator=draw, dtype=torch.float64)
        weights.grad = noise * torch.where(torch.rand(2000, generator=draw) < 0.02, 1e4, 1.0)
        before = weights.detach().clone()
        optimiser.step()
        largest = max(largest, (weights.detach() - before).abs().max().item())
    return largest
