"""Faults of models as they are served: forked beams, next positions, masks that outlive a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


@dataclass
class _State:
    """What a decoder of one layer keeps: a buffer `[2, T, H, K]` a sample, which slots are real, the next positions."""

    buffers: list[Tensor]
    real: Tensor
    next: Tensor
    length: int = 0


class _Model(nn.Module):
    """A causal decoder of one layer with learned positions, counted from the first real token."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads, self.longest = c.num_heads, c.max_len
        self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def start(self, tokens: Tensor) -> _State:
        shape = (2, self.longest, self.heads, self.embed.embedding_dim // self.heads)
        buffers = [self.embed.weight.new_zeros(shape) for _ in tokens]
        return _State(buffers, tokens.new_ones(len(tokens), self.longest).bool(), tokens.new_zeros(len(tokens)))

    def forward(self, tokens: Tensor, mask: Tensor | None = None, state: _State | None = None) -> Tensor:
        begin = state.length if state else 0
        end = begin + tokens.shape[1]
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        place = (real.long().cumsum(1) - 1 + (state.next[:, None] if state else 0)).clamp(min=0)
        x = self.embed(tokens) + self.place(place)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if state:
            for buffer, own in zip(state.buffers, torch.stack([k, v], 1), strict=True):
                buffer[:, begin:end] = own
            k, v = torch.stack(state.buffers, 1)[:, :, :end]
            state.real[:, begin:end] &= real
            state.next, state.length, real = state.next + real.sum(1), end, state.real[:, :end]
        seen = (torch.ones(end, end, dtype=torch.bool, device=x.device).tril()[begin:] & real[:, None])[:, None]
        scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~seen, 0.0)
        return self.head(x + self.out(torch.einsum("bhts,bshk->bthk", weights, v).flatten(2)))


def _subject(
    fork: Callable[[_State, list[int]], None], again: Callable[[_Model, _State], None], side: str = "both"
) -> Subject:
    def run(m: _Model, chunks: Any, attention_mask: Tensor | None = None, reorder: Tensor | None = None) -> Tensor:
        state, outputs = m.start(chunks[0]), []
        again(m, state)
        for number, chunk in enumerate(chunks):
            if number == 1 and reorder is not None:
                fork(state, reorder.tolist())
            begin = state.length
            mask = None if attention_mask is None else attention_mask[:, begin : begin + chunk.shape[1]]
            outputs.append(m(chunk, mask, state))
        return torch.cat(outputs, 1)

    return Subject(
        kind="decoder", build=_Model, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        cache=run, mask_forms=("padding",),
        declares={"positions": "learned", "padding_side": side, "structure": "other"},
    )  # fmt: skip


def _forked(state: _State, order: list[int]) -> None:
    state.buffers = [state.buffers[n].clone() for n in order]
    state.real, state.next = state.real[order], state.next[order]


def _nothing(model: _Model, state: _State) -> None:
    return


@fault(
    "KV-fork-shares",
    "Two beams of one sample go on in one buffer: it is not copied before it is written to",
    killed_by=("decoding.beam-reorder",),
    cause="write into one place",
)
def beams_share_a_buffer() -> Subject:
    def fork(state: _State, order: list[int]) -> None:
        _forked(state, order)
        kept = {n: state.buffers[at] for at, n in enumerate(order)}
        state.buffers = [kept[n] for n in order]

    return _subject(put(fork, instead_of=_forked), _nothing)


@fault(
    "KV-next-stays",
    "Keys, values and masks follow the beams, and the next positions do not",
    killed_by=("decoding.beam-reorder",),
    cause="the next positions are not",
)
def next_positions_stay() -> Subject:
    def fork(state: _State, order: list[int]) -> None:
        own = state.next
        _forked(state, order)
        state.next = own

    return _subject(put(fork, instead_of=_forked), _nothing)


@fault(
    "KV-hidden-stays",
    "Which slots are real is kept from one decoding to the next of as many samples",
    killed_by=("decoding.cache",),
    cause="of which a position was hidden",
)
def hidden_slots_stay() -> Subject:
    def again(model: _Model, state: _State) -> None:
        kept = model.__dict__.setdefault("kept", {})
        state.real = kept.setdefault((len(state.buffers), state.real.device), state.real)

    return _subject(_forked, put(again, instead_of=_nothing), side="right")
