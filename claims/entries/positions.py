"""What is said of position encodings: values, distances, frequencies, lengths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import gap, generator, raises
from veriformer.claims.systems.positions import one_hot, resolution, scalar
from veriformer.reference.positions import LearnedPositions, sinusoidal
from veriformer.reference.rotary import Rotary

WIDTHS = (2, 8, 64, 512)


@claim(
    1,
    "Sinusoidal values lie in [-1, 1], whatever the length.",
    "A 3.2",
    topic="positions",
    formula=r"|\sin\,x| \leq 1, \quad |\cos\,x| \leq 1",
    derivation="Every entry is a sine or a cosine.",
)  # fmt: skip
def bounded(see: Evidence) -> None:
    positions = torch.cat([torch.arange(10_000), torch.tensor([10**6, 10**7])])
    largest = max(sinusoidal(positions, d).abs().max().item() for d in WIDTHS)
    see.written("largest |PE(p, i)| for p to 10 000, 10^6 and 10^7 and widths 2 to 512", largest, most=1.0)
    see.properties(["sinusoidal.bounded", "sinusoidal.any-length"], ["reference:sinusoidal"])


@claim(
    2,
    "Each position gets a distinct pattern.",
    "A 3.2",
    topic="positions",
    derivation="The first pair of channels turns by one radian a position; as pi is irrational, p and p' give the same "
    "pair only if p = p'. With finite precision the distance of two patterns is what matters: it must "
    "exceed the rounding.",
    formula=r"\|PE(p) - PE(p')\|^2 = \sum_i 4 \sin^2(\omega_i (p - p') / 2) > 0",
)  # fmt: skip
def distinct(see: Evidence) -> None:
    for d in WIDTHS:
        table = sinusoidal(torch.arange(5000), d)
        nearest = torch.pdist(table).min().item() if d <= 8 else _nearest(table)
        see.written(f"least distance of two of 5000 positions, width {d}", nearest, least=1e-9)
    see.show(
        "distance of neighbours over the largest norm, 512 positions",
        {
            "sinusoidal, width 64": resolution(sinusoidal(torch.arange(512), 64)),
            "scalar p / m": resolution(scalar(512, 64)),
            "one-hot, width 512": resolution(one_hot(512)),
        },
    )


def _nearest(table: torch.Tensor) -> float:
    """Return the least distance between rows; it depends on the offset alone, so one row against all is enough."""
    return (table[1:] - table[:1]).norm(dim=1).min().item()


@claim(
    3,
    "PE(p + k) is a linear function of PE(p): a rotation that depends on k alone.",
    "A 3.2", "C 4.1", "D 2", "E 4.2",
    topic="positions",
    formula=r"\sin\,\omega(p+k) = \cos\,\omega k\ \sin\,\omega p + \sin\,\omega k\ \cos\,\omega p, \quad "
    r"\cos\,\omega(p+k) = -\sin\,\omega k\ \sin\,\omega p + \cos\,\omega k\ \cos\,\omega p",
    derivation="Addition theorems of sine and cosine, channel pair by channel pair.",
)  # fmt: skip
def rotation(see: Evidence) -> None:
    worst = 0.0
    for d in WIDTHS:
        table = sinusoidal(torch.arange(600), d)
        omega = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        for k in (1, 7, 100):
            sine, cosine = (omega * k).sin(), (omega * k).cos()
            even, odd = table[:500, 0::2], table[:500, 1::2]
            turned = torch.stack([cosine * even + sine * odd, -sine * even + cosine * odd], -1).flatten(1)
            worst = max(worst, gap(turned, table[k : 500 + k]))
    see.written("largest |R_k PE(p) - PE(p + k)|, p < 500, k in {1, 7, 100}", worst, most=1e-11)
    see.properties(["sinusoidal.relative-shift"], ["reference:sinusoidal"])


@claim(
    4,
    "The dot product of PE(p) and PE(p + k) depends on k alone.",
    "A 3.2",
    topic="positions",
    formula=r"PE(p)\cdot PE(p+k) = \sum_i \cos \omega_i k",
    derivation="cos a cos b + sin a sin b = cos(a - b), summed over the channel pairs.",
)  # fmt: skip
def dot_products(see: Evidence) -> None:
    spread = size = 0.0
    for d in WIDTHS:
        table = sinusoidal(torch.arange(2000), d)
        for k in (0, 1, 13, 400):
            products = (table[: 2000 - k] * table[k:]).sum(1)
            spread = max(spread, (products.max() - products.min()).item())
        size = max(size, (sinusoidal(torch.arange(2), d)[0] @ sinusoidal(torch.arange(400), d).T).std().item())
    see.written("largest spread over p of PE(p) . PE(p + k)", spread, most=1e-9)
    see.written("how far the product varies with k (standard deviation)", size, least=0.1)


@claim(
    5,
    "Low dimensions oscillate fast, high ones slowly (one of the notes says that higher positions oscillate "
    "faster).",
    "A 3.2", "C 4.1", "D 2",
    topic="positions",
    formula=r"\omega_i = 10000^{-2i/d}",
    derivation="The frequency falls with the dimension i. With the position p it does not change: a channel is a "
    "pure sine. (Should 'higher positions' mean places in the vector, the sentence has it the wrong way round.)",
    corrected="Low dimensions oscillate fast, high ones slowly; the frequency of a channel is the same at every "
    "position.",
)  # fmt: skip
def frequencies(see: Evidence) -> None:
    table = sinusoidal(torch.arange(60_000), 64)
    crossings = ((table[1:] * table[:-1]) < 0).sum(0)[0::2].double()
    early, late = (((t[1:] * t[:-1]) < 0).sum().item() for t in (table[:20_000, 0], table[40_000:, 0]))
    see.written(
        "sign changes of the slowest over those of the fastest channel",
        (crossings[-1] / crossings[0]).item(),
        most=0.01,
    )
    see.written("sign changes of channel 0 at positions 40 000-60 000 over those at 0-20 000", late / early, least=1.05)
    see.corrected(
        "largest rise of the number of sign changes from one channel pair to the next",
        (crossings[1:] - crossings[:-1]).max().item(),
        most=0,
    )
    see.corrected("the same for channel 0 at high and at low positions", late / early, least=0.99, most=1.01)


@claim(
    6,
    "The wavelengths run from 2 pi to 10000 * 2 pi.",
    "C 4.1",
    topic="positions",
    formula=r"\lambda_i = 2\pi \cdot 10000^{2i/d}, \quad i = 0 \dots d/2 - 1",
    derivation="The last pair has i = d/2 - 1, so the longest wavelength is 2 pi 10000^(1 - 2/d): it nears 10000 * "
    "2 pi as d grows and never reaches it (0.75 of it at d = 64).",
    corrected="From 2 pi to 10000^(1 - 2/d) * 2 pi.",
    cites="Vaswani et al. 2017, section 3.5, has the same words.",
)  # fmt: skip
def wavelengths(see: Evidence) -> None:
    for d in (64, 512):
        table = sinusoidal(torch.tensor([0, 1]), d)
        omega = torch.atan2(table[1, 0::2], table[1, 1::2])
        shortest, longest = 2 * math.pi / omega[0].item(), 2 * math.pi / omega[-1].item()
        see.written(
            f"longest wavelength over 10000 * 2 pi, width {d}", longest / (2e4 * math.pi), least=1 - 1e-9, most=1 + 1e-9
        )
        see.corrected(f"shortest over 2 pi, width {d}", shortest / (2 * math.pi), least=1 - 1e-9, most=1 + 1e-9)
        see.corrected(
            f"longest over 10000^(1 - 2/d) * 2 pi, width {d}",
            longest / (2 * math.pi * 10000 ** (1 - 2 / d)),
            least=1 - 1e-9,
            most=1 + 1e-9,
        )


def refuses_beyond() -> tuple[bool, bool]:
    """Return whether the formula is finite beyond 128 positions, and whether a table of 128 rows refuses the next."""
    table = LearnedPositions(16, 128)
    refused = raises(ValueError, lambda: table(torch.zeros(1, 129, 16), torch.arange(129)[None]))
    return bool(sinusoidal(torch.arange(128, 140), 16).isfinite().all()), refused


def rotary_numbers() -> tuple[float, float, float]:
    """Return how far products of pairs 3 apart differ over positions, how far norms change, and left from right."""
    turn, draw = Rotary(8).double(), generator(51)
    q, k = (torch.randn(1, 1, 1, 8, generator=draw, dtype=torch.float64) for _ in range(2))

    def at(x: Tensor, p: int) -> Tensor:
        return turn(x, torch.tensor([[p]]))

    def product(i: int, j: int) -> float:
        return (at(q, i) * at(k, j)).sum().item()

    same = max(abs(product(i, i - 3) - product(3, 0)) for i in range(3, 500, 7))
    norms = max(abs((at(q, p).norm() / q.norm()).item() - 1) for p in range(0, 5000, 97))
    return same, norms, abs(product(3, 0) - product(0, 3))
