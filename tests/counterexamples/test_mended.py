"""A script decides by the code as it is now: it says that a property holds once the mistake is mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts_run import HOLDS, VIOLATED, decision
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge
from veriformer.properties.targets import at_home, load

GPT = """
import torch
import torch.nn.functional as F
from torch import nn


class GPT(nn.Module):
    def __init__(self, vocab_size, d_model, block_size):
        super().__init__()
        self.block_size = block_size
        self.tokens, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(block_size, d_model)
        self.qkv, self.head = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, vocab_size)

    def forward(self, idx):
        assert idx.shape[1] <= self.block_size
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, do_sample=True):
        for _ in range(max_new_tokens):
            logits = self(CONTEXT)[:, -1] / temperature
            if top_k is not None:
                kept = torch.topk(logits, min(top_k, logits.shape[-1])).values
                logits = logits.masked_fill(logits < kept[:, -1:], -torch.inf)
            p = logits.softmax(-1)
            chosen = p.multinomial(1) if do_sample else p.argmax(-1, keepdim=True)
            idx = torch.cat([idx, chosen], 1)
        return idx
"""
RIGHT = "idx[:, -self.block_size :]"


@pytest.mark.parametrize("prop", ["decoding.sampling", "decoding.generate"])
@pytest.mark.parametrize("wrong", ["idx[:, : self.block_size]", "idx[:, -self.block_size // 4 :]"])
def test_a_context_of_another_length_is_right_once_it_is_mended(prop: str, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "gpt.py"
    file.write_text(GPT.replace("CONTEXT", wrong), encoding="utf-8")
    (subject,) = load(f"{file}:GPT")
    with at_home(subject.target):
        found = Judge(subject, Settings(profile="standard")).judge(catalogue()[prop]).counterexample
    assert found is not None
    assert decision(found.script) == VIOLATED
    for kept in (RIGHT, "idx[:, -(self.block_size - 1) :]"):
        file.write_text(GPT.replace("CONTEXT", kept), encoding="utf-8")
        assert decision(found.script) == HOLDS
