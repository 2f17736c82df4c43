"""GPT-OSS attention with a learned sink, as flash-decoding computes it: keys in splits, each with a state, states merged."""

from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject

SPLIT = 4


@dataclass
class State:
    """Of a softmax that is under way: largest score, sum of exp(score - largest), the same sum of values."""

    peak: torch.Tensor  # [B, H, T, 1]
    mass: torch.Tensor  # [B, H, T, 1]
    value: torch.Tensor  # [B, H, T, E]


def state_of_sink(sink, like):
    peak = sink.view(1, -1, 1, 1).expand(*like.shape[:-1], 1)
    return State(peak, torch.ones_like(peak), torch.zeros_like(like))


def state_of_keys(scores, visible, v):
    low = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~visible, low)
    peak = scores.amax(-1, keepdim=True)
    grown = (scores - peak).exp() * visible
    return State(peak, grown.sum(-1, keepdim=True), grown @ v)


def merge(a, b):
    peak = torch.maximum(a.peak, b.peak)
    left, right_ = (a.peak - peak).exp(), (b.peak - peak).exp()
    return State(peak, a.mass * left + b.mass * right_, a.value * left + b.value * right_)


def splits(q, k, v, visible):
    for start in range(0, k.shape[2], SPLIT):
        part = slice(start, start + SPLIT)
        yield state_of_keys(q @ k[:, :, part].mT, visible[..., part], v[:, :, part])


def once(q, k, v, visible, sink):
    state = state_of_sink(sink, q)
    for part in splits(q, k, v, visible):
        state = merge(state, part)
    return state.value / state.mass


def per_split(q, k, v, visible, sink):
    state = None
    for part in splits(q, k, v, visible):
        part = merge(state_of_sink(sink, q), part)
        state = part if state is None else merge(state, part)
    return state.value / state.mass


class SinkAttention(nn.Module):
    def __init__(self, width, heads, kv_heads, kernel):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, kv_heads * self.head), nn.Linear(width, kv_heads * self.head)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.kernel = kernel

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head).transpose(1, 2) * self.head**-0.5
        k, v = (p(x).view(b, t, self.kv_heads, self.head).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        k, v = (z.repeat_interleave(self.heads // self.kv_heads, 1) for z in (k, v))
        visible = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None, None]
        y = self.kernel(q, k, v, visible, self.sinks.to(q.dtype))
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))


def subject(name, kernel):
    return Subject(
        kind="self_attention",
        name=name,
        build=lambda c: SinkAttention(c.d_model, c.num_heads, c.num_key_value_heads, kernel),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "sink": True},
    )


right = subject("sinks, split keys", once)
wrong = subject("sinks, split keys, a sink each", per_split)

WHAT = "Every split of the keys starts its softmax from the sink, so that the merged sum counts the sink once a split instead of once."
CAUSE = (
    "In per_split the sink's exp enters the denominator ceil(T / 4) times, hidden splits included: the more keys there are, even "
    "later or padded ones, the smaller the outputs become."
)
