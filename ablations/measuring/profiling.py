"""Time, memory and FLOPs of an encoder against T, N and d, eager and fused, and where attention overtakes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.ablations.measuring.measurement import Measurement, Point, register
from veriformer.ablations.statistics.fits import fit_power
from veriformer.reference.attention import MultiHeadAttention, attention
from veriformer.reference.config import Config
from veriformer.reference.counting import count_flops
from veriformer.reference.model import build

BASE = {"num_layers": 2, "d_model": 64, "num_heads": 4}
LENGTHS = {"cpu": (50, 100, 200, 400, 800), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
SHORT = (6, 12, 25)
"""Lengths before these, for the crossover: attention is slower than its FLOPs say."""
DEPTHS, WIDTHS = (1, 2, 4, 8), (32, 64, 128, 256)
INNER_WIDTHS = (64, 128, 256, 512, 1024)
"""Of the feed-forward network, d_ff = 1 to 16 times d."""
REPEATS = 5
"""Of a timing; the median counts."""


class FusedAttention(MultiHeadAttention):
    """The reference's attention with `F.scaled_dot_product_attention` inside; returns no weights."""

    def forward(self, x: Tensor, memory: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor]:
        """Attend from `x` `[B, T, D]` to itself."""
        query, key, value = (
            self._split(project(x), self.num_heads) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        output = functional.scaled_dot_product_attention(query, key, value)
        return self.o_proj(output.transpose(1, 2).flatten(2)), x.new_zeros(())


def _model(backend: str, device: str, **changes: int) -> tuple[nn.Module, Config]:
    config = Config(architecture="encoder", vocab_size=16, positions="sinusoidal", **{**BASE, **changes})  # type: ignore[arg-type]
    model = build(config, torch.Generator().manual_seed(0))
    if backend == "fused":
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                module.__class__ = FusedAttention
    return model.to(device), config


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds(work: Callable[[], object], device: str) -> float:
    """Return the median time of a call, after one that does not count."""
    work()
    _synchronise(device)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        _synchronise(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def kept_bytes(work: Callable[[], Tensor]) -> int:
    """Return the bytes that a forward keeps for its backward, each storage once; parameters included."""
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # or an address could be given out again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        work()
    return sum(storages.values())


def _point(backend: str, device: str, length: int, varied: str, **changes: int) -> Point:
    point: Point = {"varied": varied, "backend": backend, "T": length, "batch": 1, **{**BASE, **changes}}
    try:
        model, config = _model(backend, device, **changes)
        tokens = torch.randint(16, (1, length), device=device, generator=torch.Generator(device).manual_seed(0))

        def step() -> None:
            model.zero_grad(set_to_none=True)
            model(tokens).sum().backward()

        point["flops"] = 3 * count_flops(config, 1, length).total
        point["seconds"] = _seconds(step, device)
        point["bytes"] = kept_bytes(lambda: model(tokens))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            point["peak_bytes"] = torch.cuda.max_memory_allocated()
    except (torch.OutOfMemoryError, MemoryError):
        point["failed"] = "out of memory"
    return point


def _shares(device: str, length: int) -> Point:
    """Time the two sides of the crossover, forward alone: attention, that grows with T^2, and the six linear maps."""
    config = Config(**BASE)  # type: ignore[arg-type]
    d, heads = config.d_model, config.num_heads
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, d // heads, generator=generator).to(device) for _ in range(3))
    x, inner = torch.randn(1, length, d, generator=generator).to(device), torch.randn(1, length, 4 * d).to(device)
    square, up, down = (torch.randn(*s, generator=generator).to(device) for s in ((d, d), (d, 4 * d), (4 * d, d)))

    def linear() -> None:
        for _ in range(4):
            torch.matmul(x, square)
        torch.matmul(x, up)
        torch.matmul(inner, down)

    with torch.no_grad():
        eager = _seconds(lambda: attention(q, k, v), device)
        fused = _seconds(lambda: functional.scaled_dot_product_attention(q, k, v), device)
        maps = _seconds(linear, device)
    return {"varied": "shares", "T": length, "d_model": d, "eager": eager, "fused": fused, "linear": maps}


def _count(device: str) -> int:
    return len(SHORT) + 3 * len(_lengths(device)) + len(DEPTHS) + len(WIDTHS) + len(INNER_WIDTHS)


def _lengths(device: str) -> tuple[int, ...]:
    return LENGTHS["cuda" if device == "cuda" else "cpu"]


def _points(device: str, seeds: int) -> Iterator[Point]:
    for backend in ("eager", "fused"):
        for length in _lengths(device):
            yield _point(backend, device, length, "T")
    middle = _lengths(device)[2]
    for depth in DEPTHS:
        yield _point("eager", device, middle, "N", num_layers=depth)
    for width in WIDTHS:
        yield _point("eager", device, middle, "d", d_model=width)
    for inner in INNER_WIDTHS:
        yield _point("eager", device, middle, "d_ff", d_ff=inner)
    for length in (*SHORT, *_lengths(device)):
        yield _shares(device, length)


def _conclude(points: list[Point]) -> dict[str, Any]:
    done = [p for p in points if "failed" not in p]
    fits: list[dict[str, Any]] = []
    for varied, x, backends in (
        ("T", "T", ("eager", "fused")),
        ("N", "num_layers", ("eager",)),
        ("d", "d_model", ("eager",)),
        ("d_ff", "d_ff", ("eager",)),
    ):
        for backend in backends:
            chosen = [p for p in done if p["varied"] == varied and p["backend"] == backend]
            for quantity in ("seconds", "bytes", "flops"):
                if len(chosen) >= 3:
                    fit = fit_power([p[x] for p in chosen], [p[quantity] for p in chosen])
                    local = fit_power([p[x] for p in chosen[-3:]], [p[quantity] for p in chosen[-3:]])
                    fits.append(
                        {"of": quantity, "against": varied, "backend": backend, **fit, "at the end": local["exponent"]}
                    )
    shares = [p for p in done if p["varied"] == "shares"]
    crossings = {side: _crossing(shares, side) for side in ("eager", "fused")}
    return {"kind": "profile", "fits": fits, "crossings": crossings, "lines": _lines(fits, crossings, points)}


def _crossing(shares: list[Point], side: str) -> float | None:
    """Return the T at which attention takes as long as the linear maps, by interpolation of the logarithms."""
    ratios = [np.log(p[side] / p["linear"]) for p in shares]
    for (a, ra), (b, rb) in zip(
        zip(shares, ratios, strict=True), zip(shares[1:], ratios[1:], strict=True), strict=False
    ):
        if ra < 0 <= rb:
            share = -ra / (rb - ra)
            return float(np.exp(np.log(a["T"]) + share * (np.log(b["T"]) - np.log(a["T"]))))
    return None


def _lines(fits: list[dict[str, Any]], crossings: dict[str, float | None], points: list[Point]) -> list[str]:
    names = {"seconds": "time", "bytes": "memory kept for the backward", "flops": "FLOPs"}
    told = [
        f"{names[f['of']]} of a step against {f['against']} ({f['backend']}): exponent {f['exponent']:.2f} "
        f"[{f['low']:.2f}, {f['high']:.2f}], over the last three points {f['at the end']:.2f}"
        for f in fits
    ]
    told += _inner_width(points)
    d = BASE["d_model"]
    shares = [p for p in points if p["varied"] == "shares"]
    for side, length in crossings.items():
        lengths = [p["T"] for p in shares]
        if length:
            measured = f"takes as long as the linear maps at T = {length:.0f}"
        else:
            slower = all(p[side] >= p["linear"] for p in shares)
            measured = (
                f"takes {'longer' if slower else 'less time'} than the linear maps at every measured T, "
                f"{min(lengths)} to {max(lengths)}"
            )
        told.append(f"{side} attention {measured}; by FLOPs, 4 T^2 d = 24 T d^2 at T = 6 d = {6 * d}")
    told += [f"T = {p['T']} ({p['backend']}): {p['failed']}" for p in points if "failed" in p]
    return told


def _inner_width(points: list[Point]) -> list[str]:
    """Say what the widest feed-forward network costs against the usual one: most of a layer does not grow with it."""
    own = {p["d_ff"]: p for p in points if p["varied"] == "d_ff" and "failed" not in p}
    usual, widest = 4 * BASE["d_model"], INNER_WIDTHS[-1]
    if usual not in own or widest not in own:
        return []
    ratios = {q: own[widest][q] / own[usual][q] for q in ("bytes", "flops", "seconds")}
    return [
        f"d_ff = {widest} instead of {usual} takes {ratios['bytes']:.2f} times the memory kept for the backward, "
        f"{ratios['flops']:.2f} times the FLOPs and {ratios['seconds']:.2f} times the time of a step"
    ]


register(
    Measurement(
        name="profile",
        question="How do time, memory and FLOPs grow with length, depth and width?",
        source="Vaswani et al. 2017, table 1; 4 T^2 d against 24 T d^2",
        count=_count,
        points=_points,
        conclude=_conclude,
    )
)
