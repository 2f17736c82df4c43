"""Keys that stand for no token: zeros by which windows and blocks are filled up, and which no mask hides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream, sides
from veriformer.properties.engine.violations import Violation

_LEAST = 1e-6
"""A weight below is that of a hidden key."""

_SAMPLES = 4


class _Rows(TorchFunctionMode):
    """Notes what goes into every softmax along the last axis, and what comes out.

    Attributes:
        seen: scores and weights `[..., S]`, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        out = func(*args, **given)
        if name == "softmax" and isinstance(out, Tensor):
            dim = given.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, out.ndim - 1):
                self._note(args[0] if args else given["input"], out)
        elif name == "scaled_dot_product_attention":
            mask = given.get("attn_mask", args[3] if len(args) > 3 else None)
            scores = (args[0].detach() @ args[1].detach().transpose(-2, -1)) if args else None
            if scores is not None and mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            elif scores is not None and mask is not None:
                scores = scores + mask.detach()
            if scores is not None:
                self._note(scores, scores.softmax(-1))
        return out

    def _note(self, scores: Tensor, weights: Tensor) -> None:
        if scores.shape == weights.shape and weights.ndim > 1 and weights.shape[-1] > 1:
            self.seen.append((scores.detach().double().cpu(), weights.detach().double().cpu()))


def weight_of_ghosts(case: Case, stream: Stream) -> tuple[float, int] | None:
    """Return the mean weight that tokens, each by itself, give to keys that stand for no token, and how many these are.

    A sequence of one token has one key. What else a softmax weighs then, with one and the same score whatever the
    token is, is no token: a key of zeros. Learned keys and sinks have scores that differ by token or by head.

    Args:
        case: whose generator draws the tokens.
        stream: model that takes sequences.
    """
    for each, shares in _rows_of_one_token(case, stream):
        is_one = (each == each[:1]).all(0) & (shares > _LEAST).all(0)  # [rows, S]
        moves = (each != each[:1]).any(0) & (shares > _LEAST).any(0)
        is_one &= moves.any(-1, keepdim=True)
        same = each[0][is_one]
        if bool(is_one.any()) and bool((same == same[0]).all()):
            row = is_one.any(-1)
            return float((shares * is_one)[:, row].sum(-1).mean()), int(is_one[row][0].sum())
    return None


def doubled_keys(case: Case, stream: Stream) -> int:
    """Return how many keys a sequence of one token has that are seen and are one key again and again; 1 is right.

    Args:
        case: whose generator draws the tokens.
        stream: model that takes sequences.
    """
    for each, shares in _rows_of_one_token(case, stream):
        seen = (shares > _LEAST).all(0)  # [rows, S]
        for scores, keys in zip(each.transpose(0, 1), seen, strict=True):
            own = scores[:, keys]  # [samples, S']
            alike = (own[:, :, None] == own[:, None]).all(0)
            moves = bool((own != own[:1]).any())
            if moves and own.shape[1] > 1 and bool(alike.all()):
                return own.shape[1]
    return 1


def _rows_of_one_token(case: Case, stream: Stream) -> list[tuple[Tensor, Tensor]]:
    """Return scores and weights `[samples, rows, S]` of every softmax over sequences of one token."""
    try:
        with off_the_record(case), torch.no_grad(), _Rows() as noted:
            stream(stream.draw(_SAMPLES, 1))
    except (SubjectError, RuntimeError, ValueError, IndexError, TypeError):
        return []
    return [
        (scores.reshape(_SAMPLES, -1, scores.shape[-1]), weights.reshape(_SAMPLES, -1, weights.shape[-1]))
        for scores, weights in noted.seen
        if not len(scores) % _SAMPLES
    ]


def ghosts_told(ghosts: tuple[float, int] | None) -> str | None:
    """Return the sentence on keys of zeros."""
    if ghosts is None:
        return None
    many = f"{ghosts[1]} {'key' if ghosts[1] == 1 else 'keys'}"
    return (
        f"a token by itself gives {ghosts[0]:.2g} of its weight to {many} of one score whatever the token is: zeros by "
        "which the sequence is filled up (for a window or a block), and which no mask hides"
    )


def ghost_opinion(case: Case, problem: Violation) -> str | None:
    """Explain a failure by keys of zeros that are seen, where the subject has any."""
    del problem
    if case.subject.fact("sink") or case.subject.fact("structure") == "other":
        return None
    built = case.bench.pool.get(case.config(), judged_dtypes(case.bench)[-1])
    return ghosts_told(weight_of_ghosts(case, Stream(case, built, side=sides(case.subject)[0])))
