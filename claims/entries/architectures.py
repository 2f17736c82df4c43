"""What is said of whole systems: special tokens, sets of views, convolutions, approximation."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import gap, generator, normal
from veriformer.claims.systems.convolutions import convolution, kernel_attention, long_convolution, non_local
from veriformer.reference.attention import attention
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.reference.views import MultiViewClassifier


@claim(
    62,
    "A class token gathers the sequence; register tokens are never read; both keep the set structure.",
    "E 6",
    topic="pooling",
    derivation="Both are further members of the set, without a position. The head reads the class token alone; "
    "registers reach it through attention only: their values matter, their outputs do not.",
)  # fmt: skip
def special_tokens(see: Evidence) -> None:
    draw = generator(62)
    config = Config(
        architecture="classifier", pooling="cls", num_registers=2, positions="none", vocab_size=9, d_model=16
    )
    model = build(config, draw).double().eval()
    tokens, order = torch.arange(8)[None], torch.randperm(8, generator=draw)
    see.written(
        "largest change of the logits when the tokens are reordered",
        gap(model(tokens), model(tokens[:, order])),
        most=1e-12,
    )
    changes = [gap(model(tokens), model(torch.where(torch.arange(8) == t, 8, tokens))) for t in range(8)]
    see.written("least change of the logits when one token is another", min(changes), least=1e-6)
    hidden: dict[str, Tensor] = {}
    model.stack.final_norm.register_forward_hook(lambda _, __, out: hidden.update(out=out))  # type: ignore[union-attr]
    logits = model(tokens)
    read = torch.autograd.grad(logits.square().sum(), hidden["out"])[0].abs().amax(-1)[0]
    see.written(
        "outputs that the head reads, of class token, registers and tokens", int((read > 0).sum()), least=1, most=1
    )
    extras = torch.autograd.grad(model(tokens).square().sum(), model.extras)[0].abs().amax(-1)  # type: ignore[arg-type]
    see.written("least gradient of a register: attention uses it", extras.min().item(), least=1e-9)
    see.properties(["permutation.invariance"], ["reference:classifier-cls", "reference:classifier-mean"])


@claim(
    63,
    "A Transformer over views and average pooling is invariant to the views' order; plain averaging is a valid "
    "baseline.",
    "E 7",
    topic="pooling",
    formula=r"\frac{1}{V} 1^T T(PX) = \frac{1}{V} 1^T P\,T(X) = \frac{1}{V} 1^T T(X)",
    derivation="Equivariance, then 1^T P = 1^T. The baseline cannot weigh views by each other: its logits are a "
    "mean of one function of each view, which the Transformer's are not.",
)  # fmt: skip
def views(see: Evidence) -> None:
    draw = generator(63)
    config = Config(d_model=12, num_heads=3, num_layers=2, num_classes=4, positions="none")

    def backbone() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 12))

    images, order = normal(draw, 2, 5, 1, 8, 8), torch.randperm(5, generator=draw)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(63)
        full, plain = (
            MultiViewClassifier(backbone(), config).double(),
            MultiViewClassifier.without_attention(backbone(), config).double(),
        )
    see.written(
        "largest change of the logits when views are reordered, Transformer",
        gap(full(images), full(images[:, order])),
        most=1e-12,
    )
    see.written("the same, plain averaging", gap(plain(images), plain(images[:, order])), most=1e-12)

    def mean_of_single(model: nn.Module) -> float:
        return gap(model(images), torch.stack([model(images[:, v : v + 1]) for v in range(5)]).mean(0))

    see.written("the baseline is the mean of one function of each view", mean_of_single(plain), most=1e-12)
    see.written("the Transformer is not", mean_of_single(full), least=1e-3)


@claim(
    70,
    "A Transformer of sufficient size approximates any sequence-to-sequence function (Yun et al. 2020).",
    "C 8.2",
    topic="architectures",
    derivation="Without positions every one is permutation-equivariant, so a function that is not, as reversing the "
    "sequence, is missed by at least half the distance that equivariance leaves. The theorem is for continuous "
    "functions on a compact domain with trained positions, or for equivariant ones without. That weights exist for "
    "every such function is proved, not found by a measurement; what is measured are instances: a random function on "
    "all sequences of three tokens, fitted exactly, and a lookup of one position built by hand.",
    condition="with positions, and for continuous functions on a compact domain",
    cites="Yun et al. 2020, theorems 2 and 3.",
)  # fmt: skip
def universal(see: Evidence) -> None:
    draw = generator(70)
    plain = build(Config(positions="none", d_model=16, vocab_size=4), draw).double().eval()
    # two equal tokens: an equivariant model gives equal outputs, "the first is +1, the second -1" needs other ones
    x = normal(draw, 1, 1, 16).expand(1, 2, 16)
    out = plain(embeddings=x)[0]
    see.written(
        "how far two outputs can differ for two equal tokens (the function asks for 2)", gap(out[0], out[1]), least=1.9
    )
    see.restricted(
        "share of right tokens of a random function on all 64 sequences of 3 of 4 tokens, fitted", _fitted(), least=1.0
    )
    # one head that looks one position on, built by hand out of sinusoids: the weight on the wanted key tends to one
    table = _positions(12, 16)
    shift = _rotation(1, 16)
    scores = 200.0 * (table @ shift.T) @ table.T
    weights = torch.softmax(scores, dim=-1)
    wanted = weights[torch.arange(11), torch.arange(1, 12)]
    see.restricted("least weight on the next position of a head made of sinusoids", wanted.min().item(), least=0.99)


def _fitted(steps: int = 250) -> float:
    """Return the accuracy of a small encoder that was fitted to random labels of all sequences, at every position."""
    draw = generator(71)
    sequences = torch.tensor(list(itertools.product(range(4), repeat=3)))
    labels = torch.randint(4, sequences.shape, generator=draw)
    model = build(Config(vocab_size=4, d_model=32, num_layers=1), draw)
    readout = nn.Linear(32, 4)
    with torch.no_grad():
        readout.weight.normal_(std=32**-0.5, generator=draw)
        readout.bias.zero_()
    optimiser = torch.optim.Adam([*model.parameters(), *readout.parameters()], lr=5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        functional.cross_entropy(readout(model(sequences)).flatten(0, 1), labels.flatten()).backward()
        optimiser.step()
    with torch.no_grad():
        return (readout(model(sequences)).argmax(-1) == labels).double().mean().item()


def _positions(length: int, width: int) -> Tensor:
    from veriformer.reference.positions import sinusoidal

    return sinusoidal(torch.arange(length), width)


def _rotation(offset: int, width: int) -> Tensor:
    """Return R with R PE(p) = PE(p + offset)."""
    result = torch.zeros(width, width, dtype=torch.float64)
    for i in range(0, width, 2):
        angle = torch.tensor(offset * 10000 ** (-i / width), dtype=torch.float64)
        result[i : i + 2, i : i + 2] = torch.stack(
            [torch.stack([angle.cos(), angle.sin()]), torch.stack([-angle.sin(), angle.cos()])]
        )
    return result


@claim(
    71,
    "A long convolution recovers a convolution, and self-attention is a simplified non-local model: h_i is a sum over "
    "j of g(x_i, x_j) x_j.",
    "E 1.3", "E 1.4",
    topic="architectures",
    formula=r"h_i = \sum_j g(i-j) x_j, \qquad h_i = \sum_j g(x_i, x_j) x_j",
    derivation="The weights of a long convolution know offsets alone: with W inside a window and 0 outside it is a "
    "convolution, and it is linear in x, so no attention. A non-local model with g(x_i, x_j) = exp(q_i . k_j) W_v "
    "gives attention without its denominator. The softmax divides by a sum over all tokens, which no function of a "
    "pair can know: with a third token the weight between two others changes. (The chapter derives attention from "
    "these models; that both contain it is not said there.)",
    condition="a pair's weight may also be divided by a sum over the sequence",
    cites="Wang et al. 2018, section 3.1 (its C(x) normalises).",
)  # fmt: skip
def convolutions(see: Evidence) -> None:
    draw = generator(71)
    x, query, key, value = normal(draw, 6, 4), *(normal(draw, 4, 4) / 2 for _ in range(3))

    def attend(tokens: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = ((tokens @ w)[None, None] for w in (query, key, value))
        output, weights = attention(q, k, v)
        return output[0, 0], weights[0, 0]

    def pairwise(a: Tensor, b: Tensor) -> Tensor:
        return ((a @ query) @ (b @ key) / 2).exp() * value.T

    kernel = normal(draw, 3, 4, 4)

    def as_kernel(offsets: Tensor) -> Tensor:
        inside = (offsets.abs() <= 1)[..., None, None]
        return torch.where(inside, kernel[(offsets.clamp(-1, 1) + 1).long()], 0.0)

    of_kernel = gap(long_convolution(x, as_kernel), convolution(x, kernel))
    linear = gap(long_convolution(2 * x, as_kernel), 2 * long_convolution(x, as_kernel))
    for say in (see.written, see.restricted):
        say("largest difference of a long convolution to a convolution of 3", of_kernel, most=1e-13)
        say("largest |h(2x) - 2 h(x)| of the long convolution", linear, most=1e-13)
        say("the same of attention, which is none therefore", gap(attend(2 * x)[0], 2 * attend(x)[0]), least=1e-3)
    see.written(
        "largest difference of the non-local model of pairs to self-attention",
        gap(non_local(x, pairwise), attend(x)[0]),
        most=1e-9,
    )
    see.restricted(
        "its largest difference to attention without the denominator",
        gap(non_local(x, pairwise), kernel_attention(x, query, key, value)),
        most=1e-12,
    )
    total = ((x @ query) @ (x @ key).T / 2).exp().sum(1)
    known = {tuple(row.tolist()): t for row, t in zip(x, total, strict=True)}
    see.restricted(
        "its largest difference to self-attention once a pair's weight is divided by the row's sum",
        gap(non_local(x, lambda a, b: pairwise(a, b) / known[tuple(a.tolist())]), attend(x)[0]),
        most=1e-12,
    )
    with_third = [attend(torch.cat([x[:2], extra[None]]))[1][0, 1] for extra in (x[2], 3 * x[3])]
    see.restricted("change of the weight between two tokens when a third is another one", gap(*with_third), least=1e-3)
