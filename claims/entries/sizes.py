"""What is said of numbers of parameters and of operations."""

from __future__ import annotations

import itertools
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import generator, slope
from veriformer.reference.config import Config
from veriformer.reference.counting import PUBLISHED, count_flops, count_parameters
from veriformer.reference.model import build


def _sum(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@claim(
    35,
    "An encoder layer has 12 d^2 + 13 d parameters, N of them with the embedding V d + N (12 d^2 + 13 d); "
    "1000/128/6 gives 1,317,632.",
    "A 8.1",
    topic="size",
    formula="4(d^2 + d) + (4d^2 + 4d) + (4d^2 + d) + 4d = 12d^2 + 13d",
    derivation="Four projections, two maps of the feed-forward network with d_ff = 4d, two norms, all with biases.",
)  # fmt: skip
def layer_count(see: Evidence) -> None:
    for d, heads in ((8, 2), (128, 8)):
        ours = _sum(_layer(d, heads))
        see.written(
            f"parameters of nn.TransformerEncoderLayer less 12 d^2 + 13 d, d = {d}",
            _sum(nn.TransformerEncoderLayer(d, heads, 4 * d)) - 12 * d**2 - 13 * d,
            least=0,
            most=0,
        )
        see.written(f"those of the reference's layer, d = {d}", ours - 12 * d**2 - 13 * d, least=0, most=0)
    notebook = Config(vocab_size=1000, d_model=128, num_heads=8, num_layers=6, norm_placement="post")
    see.written(
        "parameters of the post-LN encoder 1000/128/6",
        _sum(build(notebook, generator(35))),
        least=1_317_632,
        most=1_317_632,
    )
    see.properties(["parameters.exact-count"], ["reference:encoder", "torch:TransformerEncoder"])


def _layer(d: int, heads: int) -> nn.Module:
    return build(Config(d_model=d, num_heads=heads, num_layers=1), generator(d)).stack.layers[0]  # type: ignore[union-attr, index, return-value]


_PRINTED = {
    "Transformer base": (65e6, 0.5e6),
    "Transformer big": (213e6, 0.5e6),
    "BERT base": (110e6, 0.5e6),
    "GPT-2 small": (117e6, 0.5e6),
    "GPT-3": (175e9, 0.5e9),
}
"""As the notes print them, and half a unit of the last digit."""


@claim(
    37,
    "Base has 65M parameters, Big 213M, BERT-base 110M, GPT-2 small 117M, GPT-3 175B, the notebook's about 1M.",
    "A 5",
    topic="size",
    derivation="The formulas give 63.1M for Base with the 37 000 tokens that the paper names, 124.4M for GPT-2 "
    "small (its paper miscounts; the released weights hold 124,439,808) and 1.32M for the notebook.",
    corrected="GPT-2 small has 124.4M; Base has 63.1M at 37 000 shared tokens, 65M at 40 700; the notebook's has "
    "1.3M; Big, BERT-base and GPT-3 are as printed to about one percent.",
    cites="Vaswani et al. 2017, table 3; Radford et al. 2019, table 2.",
)  # fmt: skip
def published(see: Evidence) -> None:
    for name, (printed, half) in _PRINTED.items():
        count = PUBLISHED[name].count
        see.written(f"parameters of {name} by the formulas", count, least=printed - half, most=printed + half)
        if name in ("Transformer big", "BERT base", "GPT-3"):
            see.corrected(f"those of {name} over the printed number", count / printed, least=0.985, most=1.015)
    see.corrected("parameters of GPT-2 small", PUBLISHED["GPT-2 small"].count, least=124_439_808, most=124_439_808)
    see.corrected(
        "parameters of Base at 37 000 tokens, millions",
        PUBLISHED["Transformer base"].count / 1e6,
        least=63.0,
        most=63.2,
    )
    see.corrected(
        "of Base at 40 700 tokens, millions",
        (PUBLISHED["Transformer base"].count + 3700 * 512) / 1e6,
        least=64.9,
        most=65.1,
    )
    notebook = count_parameters(
        Config(vocab_size=1000, d_model=128, num_heads=8, num_layers=6, norm_placement="post")
    ).total
    see.corrected("parameters of the notebook's encoder, millions", notebook / 1e6, least=1.3, most=1.35)
    see.written("those of the notebook's encoder, millions", notebook / 1e6, least=0.5, most=1.5)
    small = Config(
        architecture="encoder_decoder", vocab_size=7, d_model=12, num_heads=3, norm_placement="post", tied=True
    )
    see.corrected(
        "parameters of a small encoder-decoder that was built less those by the formulas",
        _sum(build(small, generator(37))) - count_parameters(small).total,
        least=0,
        most=0,
    )
    see.properties(["parameters.paper-table"], ["reference:encoder"], role="corrected")


@claim(
    38,
    "A layer costs O(T^2 d + T d^2) operations and O(T^2 + T d) memory.",
    "A 8.2", "C 8.1",
    topic="cost",
    formula=r"\mathrm{FLOPs} = 24\,T d^2 + 4\,T^2 d",
    derivation="24 T d^2 for the six linear maps of d_ff = 4d, 4 T^2 d for q k^T and the weighted sum, exactly. "
    "The weights take h T^2 numbers, one table a head: with h growing with d that is O(h T^2 + T d). Fused kernels "
    "never store them. (The lecture's theorem 8.1 has O(T^2 d) alone, which leaves the linear maps out: for T below 6d "
    "they are the larger part.)",
    condition="T d^2 is counted and the number of heads is held; with h heads the memory is O(h T^2 + T d)",
)  # fmt: skip
def layer_cost(see: Evidence) -> None:
    worst = 0
    for length, d in itertools.product((16, 48), (32, 64)):
        model = build(Config(d_model=d, num_heads=2, num_layers=1, positions="none", vocab_size=4), generator(1))
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.long))
        worst = max(worst, abs(counter.get_total_flops() - 24 * length * d**2 - 4 * length**2 * d))
    see.restricted("largest difference of the counted operations to 24 T d^2 + 4 T^2 d", worst, most=0)
    see.written(
        "share of the operations that the lecture's T^2 d leaves out, T = d = 64", _linear_share(64, 64), most=0.5
    )
    see.restricted("the same at T = 6d: the two terms are equal", _linear_share(384, 64), least=0.5, most=0.5)
    stored = {h: _weights_stored(h) for h in (2, 8)}
    see.written("numbers in the weights of 8 heads over those of 2", stored[8] / stored[2], most=1.0)
    see.restricted("numbers in the weights over h T^2", stored[8] / (8 * 20**2), least=1, most=1)
    see.properties(["complexity.flops"], ["reference:multi-head", "reference:encoder"], role="restricted")


def _weights_stored(heads: int) -> int:
    model = build(Config(d_model=32, num_heads=heads, num_layers=1, vocab_size=4), generator(1))
    return model.with_weights(torch.zeros(1, 20, dtype=torch.long))[1][0].numel()  # type: ignore[operator]


def _linear_share(length: int, d: int) -> float:
    """Return the share of a layer's operations that its linear maps take."""
    return 1 / (1 + _shares(length, d)[1])


def _shares(length: int, d: int) -> tuple[float, float]:
    """Return the operations of attention's two products over the feed-forward network's, and over all linear maps'."""
    flops = count_flops(Config(d_model=d, num_heads=8, num_layers=1, vocab_size=4), 1, length)
    return flops.scores / flops.feed_forward, flops.scores / (flops.feed_forward + flops.projections)


@claim(
    39,
    "For T < d the feed-forward network dominates, for T > d attention; d = T = 512 is balanced, at T = 4096 "
    "attention is 16 times larger.",
    "A 8.2",
    topic="cost",
    formula=r"\frac{4T^2d}{16Td^2} = \frac{T}{4d}",
    derivation="The constants decide: attention's two products cost 4 T^2 d, the feed-forward network 16 T d^2, "
    "all linear maps 24 T d^2. Attention passes the first at T = 4d and the second at T = 6d. At d = 512: a quarter "
    "at T = 512, twice at 4096; without the constants T/d = 8, not 16.",
    corrected="Attention's products pass the feed-forward network at T = 4d and all linear maps at T = 6d; at d = "
    "512 they are a quarter of the feed-forward network at T = 512 and twice it at T = 4096.",
)  # fmt: skip
def crossing(see: Evidence) -> None:
    see.written("attention over feed-forward at T = d / 2 = 256", _shares(256, 512)[0], most=1.0)
    see.written("attention over feed-forward at T = 2d = 1024", _shares(1024, 512)[0], least=1.0)
    see.written("attention over feed-forward at T = d = 512", _shares(512, 512)[0], least=0.5, most=2.0)
    see.written("attention over feed-forward at T = 4096, d = 512", _shares(4096, 512)[0], least=15, most=17)
    for d in (64, 512):
        see.corrected(f"attention over feed-forward at T = 4d, d = {d}", _shares(4 * d, d)[0], least=1, most=1)
        see.corrected(f"attention over all linear maps at T = 6d, d = {d}", _shares(6 * d, d)[1], least=1, most=1)
    see.corrected("attention over feed-forward at T = d = 512", _shares(512, 512)[0], least=0.25, most=0.25)
    see.corrected("attention over feed-forward at T = 4096, d = 512", _shares(4096, 512)[0], least=2, most=2)
    lengths = [128, 256, 512, 1024, 2048, 4096, 8192]
    shares = [_shares(length, 512) for length in lengths]
    see.show("operations of attention's products, d = 512, over those of", {
        "T": lengths, "the feed-forward network": [a for a, _ in shares], "all linear maps": [b for _, b in shares],
    })  # fmt: skip


PROFILE = (50, 100, 200, 400, 800)


@claim(
    40,
    "Profiled at T of 50 to 800 (d = 128, h = 8, N = 4) the quadratic growth becomes unmistakable.",
    "A 14",
    topic="cost",
    derivation="24 T d^2 + 4 T^2 d has the local exponent 1 + T / (6d + T): 1.06 at T = 50 and 1.51 at T = 800, "
    "where attention's share of the operations is a half. The times that are shown depend on the machine and decide "
    "nothing.",
    corrected="Up to T = 800 the operations grow with exponents of 1.06 to 1.5; the quadratic term passes the "
    "linear one at T = 6d = 768.",
)  # fmt: skip
def profile(see: Evidence) -> None:
    flops = [_notebook_flops(length) for length in PROFILE]
    last = slope([400.0, 800.0], flops[-2:])
    see.written("exponent of the operations from T = 400 to 800", last, least=1.8)
    see.corrected(
        "exponent of the operations from T = 50 to 100", slope([50.0, 100.0], flops[:2]), least=1.05, most=1.15
    )
    see.corrected("exponent of the operations from T = 400 to 800", last, least=1.35, most=1.55)
    see.corrected("attention's operations over all linear maps' at T = 768", _shares(768, 128)[1], least=1, most=1)
    lengths = PROFILE[:3] if see.quick else PROFILE
    see.show(
        "seconds of one sequence on this machine, one thread",
        {
            "T": list(lengths),
            "inference": [_seconds(t, False) for t in lengths],
            "training": [_seconds(t, True) for t in lengths],
        },
    )


def _notebook_flops(length: int) -> float:
    return float(count_flops(Config(d_model=128, num_heads=8, num_layers=4, vocab_size=4), 1, length).total)


def _seconds(length: int, trains: bool, times: int = 3) -> float:
    """Return the least time of a forward, or of a forward and a backward, of the notebook's encoder."""
    model = build(Config(d_model=128, num_heads=8, num_layers=4, vocab_size=1000, norm_placement="post"), generator(40))
    tokens, threads = torch.zeros(1, length, dtype=torch.long), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            with torch.set_grad_enabled(trains):
                output = model(tokens)
                if trains:
                    output.square().mean().backward()
            taken.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return min(taken)
