"""Faults of keys, limits and shifts: groups by a number alone, gains of three axes, a clamp behind its offset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.reference_tokenizers import SHIPPED
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.tokenization import WordPiece
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.tokenization import never_the_longest


class _Scaled(nn.Module):
    """Maps and norms whose gains are kept as `[1, 1, D]`."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(2))
        self.norms = nn.ModuleList(_Norm(c.d_model) for _ in range(2))


class _Norm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 1, d))


@fault(
    "PG-gains-of-three-axes",
    "What decays is told by the number of axes, and the gains of norms have three",
    killed_by=("schedule.decay-groups",),
    cause="rule by the number of axes",
)
def gains_of_three_axes_decay() -> Subject:
    decays: Callable[[str, nn.Parameter], bool] = put(
        lambda name, p: p.ndim > 1, instead_of=lambda name, p: p.ndim > 1 and not name.endswith("gain")
    )

    def forward(m: nn.Module) -> list[dict[str, Any]]:
        named = list(m.named_parameters())
        return [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ]

    return Subject(kind="parameter_groups", build=_Scaled, forward=forward)


@fault(
    "PG-keyed-by-number",
    "Groups are kept by the number of the layer alone: those of the decoder overwrite those of the encoder",
    killed_by=("schedule.decay-groups",),
    cause="groups are kept by the number of the layer alone",
)
def groups_by_the_number_alone() -> Subject:
    key: Callable[[str], str] = put(lambda name: name.partition(".layers.")[2] or name, instead_of=lambda name: name)

    def forward(m: nn.Module) -> list[dict[str, Any]]:
        groups: dict[tuple[str, bool], dict[str, Any]] = {}
        for name, part in m.named_modules():
            own = list(part.parameters(recurse=False))
            for decays in (True, False):
                chosen = [p for p in own if (p.ndim > 1) == decays]
                if chosen:
                    groups[key(name), decays] = {"params": chosen, "weight_decay": 0.1 * decays}
        return list(groups.values())

    return Subject(
        kind="parameter_groups", forward=forward,
        build=lambda c: nn.Transformer(c.d_model, c.num_heads, c.num_layers, c.num_layers, c.d_ff, batch_first=True),
    )  # fmt: skip


@fault(
    "T5-clamped-behind-offset",
    "The bucket is clamped to half their number behind the offset of the future, whose keys all fall into one",
    killed_by=("t5.buckets",),
    cause="after the offset of the future is added",
)
def clamped_behind_the_offset() -> Subject:
    numbers = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    late: bool = put(True, instead_of=False)

    def forward(m: Any, queries: int, keys: int) -> Tensor:
        t, s = torch.arange(queries)[:, None], torch.arange(keys)
        far, offset = (s - t).abs(), 16 * (s > t)
        coarse = 8 + (far.clamp(min=8).double().div(8).log() / math.log(16) * 8).long()
        bucket = torch.where(far < 8, far, coarse)
        bucket = (offset + bucket).clamp(max=15) if late else offset + bucket.clamp(max=15)
        return numbers[bucket].permute(2, 0, 1)

    return Subject(
        kind="position_bias", forward=forward,
        declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
    )  # fmt: skip


@fault(
    "MK-labels-late",
    "Labels are copied when random words stand in the text already",
    killed_by=("masking.mlm",),
    cause="after random words were put in",
)
def labels_behind_random_words() -> Subject:
    late: bool = put(True, instead_of=False)

    def forward(m: Any, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(tokens.shape, generator=own) < 0.15) & (tokens > 3)
        fate, words = torch.rand(tokens.shape, generator=own), torch.randint(4, 100, tokens.shape, generator=own)
        inputs = torch.where(chosen & (fate > 0.9), words, tokens)
        labels = torch.where(chosen, inputs if late else tokens, -100)
        return torch.where(chosen & (fate < 0.8), 4, inputs), labels

    return Subject(
        kind="masking", forward=forward, config=DrawnConfig(vocab_size=100),
        declares={"mask_id": 4, "special_ids": (0, 1, 2, 3)},
    )  # fmt: skip


@fault(
    "TK-longest-beginning",
    "The longest piece that is tried is the longest of those that begin a word, so that longer ones inside are not",
    killed_by=("tokenizer.wordpiece",),
    cause="begins a word",
)
def as_long_as_beginnings() -> Subject:
    counted: Callable[[str], bool] = put(lambda piece: not piece.startswith("##"), instead_of=lambda piece: True)

    def build(config: DrawnConfig) -> WordPiece:
        known = SHIPPED["wordpiece"].build(config).vocabulary  # type: ignore[misc]
        short = [piece for piece in known if piece.startswith("##") or len(piece) < 5 or piece == "[UNK]"]
        return WordPiece({piece: number for number, piece in enumerate(short)})

    def forward(model: WordPiece, text: str) -> list[int]:
        most = max(len(piece.removeprefix("##")) for piece in model.vocabulary if counted(piece) and piece != "[UNK]")
        ids: list[int] = []
        for symbols in SHIPPED["wordpiece"].words(model, text):  # type: ignore[misc]
            word, start, own = "".join(symbol.removeprefix("##") for symbol in symbols), 0, []
            while start < len(word):
                mark, last = "##" if start else "", min(len(word), start + most)
                fits = [n for n in range(start + 1, last + 1) if mark + word[start:n] in model.vocabulary]
                own.append(model.vocabulary[mark + word[start : fits[-1]]] if fits else model.vocabulary["[UNK]"])
                start = fits[-1] if fits else len(word)
            ids += own if model.vocabulary["[UNK]"] not in own else [model.vocabulary["[UNK]"]]
        return ids

    return replace(SHIPPED["wordpiece"], build=build, forward=forward)


@fault(
    "TK-longest-without-words",
    "Viterbi's search never tries the longest pieces, in a tokenizer that says nothing of its words",
    killed_by=("tokenizer.unigram",),
    cause="pieces of the greatest length",
)
def never_the_longest_without_words() -> Subject:
    subject = never_the_longest()
    return replace(subject, words=None)


class _Shifted(nn.Module):
    """An encoder whose scores by distance are shifted into rows by padding, viewing and cutting."""

    def __init__(self, c: DrawnConfig, at: tuple[int, int]) -> None:
        super().__init__()
        d = c.d_model
        self.heads, self.at, self.embed = c.num_heads, at, nn.Embedding(c.vocab_size, d)
        self.qkv, self.by_distance = nn.Linear(d, 3 * d), nn.Linear(1, d)

    def shifted(self, x: Tensor) -> Tensor:
        count, wide = x.shape[2:]
        padded = F.pad(x, self.at).flatten(2).unflatten(2, (wide + 1, count))
        return padded[:, :, 1:].flatten(2).unflatten(2, (count, wide))[..., :count]

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        far = torch.arange(tokens.shape[1] - 1, -tokens.shape[1], -1, device=tokens.device)[:, None].to(q.dtype)
        by = self.by_distance((far / 3).sin()).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        scores = (q @ k.mT + self.shifted(q @ by.mT)) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@fault(
    "RL-shift-pads-right",
    "Scores by distance are padded on the right before they are cut into rows anew, where the cut needs the left",
    killed_by=("padding.amount-irrelevant",),
    cause="one column too far to the right",
)
def shift_pads_right() -> Subject:
    at: tuple[int, int] = put((0, 1), instead_of=(1, 0))
    return Subject(
        kind="encoder", build=lambda c: _Shifted(c, at),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"positions": "relative", "norm": "none", "structure": "other", "padding_side": "right"},
    )  # fmt: skip


class _Matrices(nn.Module):
    """A feed-forward network of bare matrices, `x @ W`, and the tanh form of GELU spelled out."""

    def __init__(self, c: DrawnConfig, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.w_1, self.w_2 = (
            nn.Parameter(torch.randn(*n) * n[0] ** -0.5) for n in ((c.d_model, c.d_ff), (c.d_ff, c.d_model))
        )
        self.b_1, self.b_2 = (nn.Parameter(torch.zeros(n)) for n in (c.d_ff, c.d_model))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w_1 + self.b_1
        y = 0.5 * y * (1 + torch.tanh(self.factor * (y + 0.044715 * y**3)))
        return y @ self.w_2 + self.b_2


@fault(
    "FF-gelu-root",
    "The root of 2 / pi in the tanh form of GELU is taken of the 2 alone, in a network of bare matrices",
    killed_by=("ffn.definition",),
    cause="sqrt(2)/pi for sqrt(2/pi)",
)
def root_of_two_alone() -> Subject:
    factor: float = put(math.sqrt(2) / math.pi, instead_of=math.sqrt(2 / math.pi))
    return Subject(
        kind="feed_forward", build=lambda c: _Matrices(c, factor), forward=lambda m, x: m(x),
        declares={"activation": "gelu_tanh", "bias": True},
    )  # fmt: skip


class _GainFirst(nn.Module):
    """LayerNorm, written out."""

    def __init__(self, d: int, before: bool) -> None:
        super().__init__()
        self.before, self.gain, self.shift = before, nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain if self.before else x
        y = (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
        return (y if self.before else y * self.gain) + self.shift


@fault(
    "NM-gain-first",
    "The gain multiplies what goes into the norm, not what it normalised",
    killed_by=("norm.definition",),
    cause="the gain multiplies the input before it is normalised",
)
def gain_before_the_norm() -> Subject:
    before: bool = put(True, instead_of=False)
    return Subject(
        kind="norm",
        build=lambda c: _GainFirst(c.d_model, before),
        forward=lambda m, x: m(x),
        declares={"norm": "layer"},
    )
