"""The twin: what is proved equal, where others part, and that weights are the model's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject, check
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.results.records import Result


def judged(subject: Subject) -> Result:
    (result,) = check(subject, only=["twin"], profile="quick").results
    return result


@pytest.mark.parametrize(
    ("library", "name", "words"),
    [
        ("reference", "decoder-rotary", "positions rotary"),
        ("reference", "decoder-alibi", "positions alibi"),
        ("reference", "decoder-t5", "positions t5"),
        ("reference", "decoder-tied", "tied"),
        ("reference", "decoder-gpt2", "gelu, positions learned"),
        ("reference", "decoder-parallel", "side by side, 2 of 4 channels turned"),
        ("reference", "decoder-sandwich", "sandwich-LN (rms), geglu_tanh, positions rotary, base 100000, queries"),
        ("reference", "classifier-weighted", "pooling weighted, 1 registers"),
        ("reference", "encoder", "post-LN"),
        ("torch", "TransformerEncoder", "post-LN"),
        ("torch", "TransformerEncoder-pre", "pre-LN"),
        ("torch", "TransformerEncoder-causal", "decoder"),
        ("torch", "TransformerDecoder-pre", "decoder with a memory"),
    ],
)
def test_a_textbooks_model_is_proved_equal(library: str, name: str, words: str) -> None:
    result = judged(shipped(library)[name])
    assert result.outcome == "PASS", result.reason
    assert "equal to the textbook's model" in result.reason
    assert words in result.reason


@pytest.mark.parametrize(
    ("library", "name"), [("reference", "decoder-rotary"), ("reference", "encoder"), ("torch", "TransformerEncoder")]
)
def test_wide_sizes_are_proved_too(library: str, name: str) -> None:
    """Profile standard has feed-forward networks narrower than the model, and embeddings that saturate softmax."""
    (result,) = check(shipped(library)[name], only=["twin"], profile="standard").results
    assert result.outcome == "PASS", result.reason
    assert result.reach["d_model"][-1] >= 120


def test_a_size_at_which_nothing_can_be_told_does_not_void_the_others() -> None:
    """The wide rows of standard have one layer, which differs from no other, and embeddings that saturate softmax."""
    ids = ["anatomy.feed-forward", "init.layers-differ", "twin.equal"]
    results = check(shipped("reference")["encoder"], only=ids, profile="standard").results
    assert [result.outcome for result in results] == ["PASS"] * 3
    equal = next(result for result in results if result.id == "twin.equal")
    assert any("tell nothing" in told for told in equal.unreached)


class Llama(nn.Module):
    """Halves layout, one matrix for queries, keys and values, names of its own; `deviate` changes one thing."""

    def __init__(self, c: Any, deviate: str = "") -> None:
        super().__init__()
        self.heads, self.width, self.deviate = c.num_heads, c.d_head, deviate
        self.words = nn.Embedding(c.vocab_size, c.d_model)
        self.parts = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.RMSNorm(c.d_model, eps=1e-6),
                    "n2": nn.RMSNorm(c.d_model, eps=1e-6),
                    "qkv": nn.Linear(c.d_model, 3 * c.d_model, bias=False),
                    "back": nn.Linear(c.d_model, c.d_model, bias=False),
                    "both": nn.Linear(c.d_model, 2 * c.d_ff, bias=False),
                    "down": nn.Linear(c.d_ff, c.d_model, bias=False),
                }
            )
            for _ in range(c.num_layers)
        )
        self.last = nn.RMSNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        half = self.width // 2
        omega = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        positions = torch.arange(x.shape[2], dtype=torch.float64)
        angle = positions.clamp(max=199 if self.deviate == "late" else 1e9)[:, None] * omega
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        length = tokens.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[:, None, None, :]
        for part in self.parts:
            q, k, v = (
                y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in part["qkv"](part["n1"](x)).chunk(3, -1)
            )
            scores = self.turned(q) @ self.turned(k).mT * self.width**-0.5
            mixed = scores.masked_fill(hidden, -1e30).softmax(-1) @ v
            x = x + part["back"](mixed.transpose(1, 2).flatten(2))
            gate, up = part["both"](part["n2"](x)).chunk(2, -1)
            x = x + part["down"](nn.functional.silu(gate) * up)
        made: Tensor = self.head(self.last(x))
        return {"cap": 3 * (made / 3).tanh(), "output": 1.5 * made}.get(self.deviate, made)


def subject(deviate: str = "", **facts: Any) -> Subject:
    return Subject(
        kind="decoder",
        build=lambda c: Llama(c, deviate),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        domain={"d_model": [8, 16], "num_heads": [2]},
        declares={"positions": "rotary", **facts},
    )


def test_names_packing_and_layout_do_not_matter() -> None:
    result = judged(subject())
    assert result.outcome == "PASS", result.reason
    assert "swiglu, positions rotary" in result.reason


def test_where_outputs_differ_it_says_so_and_fails_nothing() -> None:
    result = judged(subject("cap"))
    assert result.outcome == "NOT_APPLICABLE"
    assert "every part is the textbook's, and the outputs differ by" in result.reason


def test_where_a_number_alone_is_another_one_it_asks() -> None:
    result = judged(subject("output"))
    assert (result.outcome, result.declare) == ("OPEN", "structure='other'")
    assert "the outputs are 1.5 times" in result.reason
    assert judged(subject("output", structure="other")).outcome == "NOT_APPLICABLE"


def test_declared_to_be_the_textbooks_it_fails() -> None:
    result = judged(subject("cap", structure="textbook"))
    assert result.outcome == "FAIL"


def test_what_goes_wrong_at_a_far_length_alone_is_found() -> None:
    result = judged(subject("late"))
    assert (result.outcome, result.declare) == ("OPEN", "structure='other'")
    assert result.reach["T"][1] == 257
    assert judged(subject("late", structure="textbook")).outcome == "FAIL"


def test_a_model_of_other_parts_says_where_they_part() -> None:
    class Bag(nn.Module):
        def __init__(self, c: Any) -> None:
            super().__init__()
            self.words = nn.Embedding(c.vocab_size, c.d_model)

        def forward(self, tokens: Tensor) -> Tensor:
            made: Tensor = self.words(tokens).cumsum(1)
            return made

    result = judged(Subject(kind="decoder", build=Bag, forward=lambda m, t: m(t)))
    assert result.outcome == "NOT_APPLICABLE"
    assert "no twin: no attention could be followed" in result.reason


def test_a_norm_behind_a_post_ln_stack_is_no_layers_own_where_gains_are_alike() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False).eval()
    given = Subject(kind="encoder", module=model, inputs="embeddings", forward=lambda m, x: m(x), config=DrawnConfig())
    result = judged(given.with_facts(causal=False, positions="none", structure="textbook"))
    assert result.outcome == "PASS", result.reason


def test_a_cache_that_gives_other_outputs_than_the_twins_is_found() -> None:
    right = shipped("reference")["decoder-gpt2"]
    assert right.cache is not None

    def forgetful(model: Any, chunks: Any, attention_mask: Any = None, reorder: Any = None) -> Tensor:
        made = [right.cache(model, [chunk]) for chunk in chunks]  # each chunk as if nothing stood before it
        return torch.cat(made, 1)

    result = judged(replace(right, cache=forgetful))
    assert result.outcome == "OPEN"
    assert "the outputs through the cache are not those of the textbook's model" in result.reason
