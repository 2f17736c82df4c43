"""How long real sizes take: a GPT of 27 million parameters, GPT-2 (124 million), BERT base (109 million).

    python benchmarks/large_models.py [--models gpt gpt2 bert] [--profile standard] [--level core] [--leaks] > table.md

Each model, of random weights, is judged as an instance, in a process of its own with one torch thread; nothing is
downloaded. GPT-2 and BERT need transformers. With --leaks each defect of `LEAKS` is put into GPT-2, and the table says
which property noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties import check
from veriformer.reports.reach import reach


class Block(nn.Module):
    """One pre-LN layer, causal."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, D]`."""
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder as people write it: learned positions, tied embeddings, a standard deviation of 0.02."""

    def __init__(self, vocab_size: int, d_model: int, num_heads: int, num_layers: int, max_len: int) -> None:
        super().__init__()
        self.num_layers, self.max_len = num_layers, max_len
        self.tokens, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]`."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _transformers() -> ModuleType:
    from veriformer.properties.adapters.huggingface_calls import transformers

    return transformers()


def gpt() -> nn.Module:
    """Return a GPT of 27.7 million parameters."""
    return GPT(vocab_size=10_000, d_model=512, num_heads=8, num_layers=7, max_len=1024)


def gpt2() -> Any:
    """Return GPT-2 small."""
    return _transformers().GPT2LMHeadModel(_transformers().GPT2Config())


def bert() -> Any:
    """Return BERT base."""
    return _transformers().BertModel(_transformers().BertConfig())


MODELS: dict[str, Callable[[], Any]] = {"gpt": gpt, "gpt2": gpt2, "bert": bert}


def mask_ends(model: Any) -> None:
    """Let positions from 700 on see one another, in every layer."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
        length = q.shape[-2]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        allowed[700:] = True
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2), None

    _attend_by(model, attend, range(12))


def one_head_sees_ahead(model: Any) -> None:
    """Let the eighth head of the fifth layer see one position ahead."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
        length = q.shape[-2]
        allowed = torch.ones(12, length, length, dtype=torch.bool).tril()
        allowed[7] = torch.ones(length, length, dtype=torch.bool).tril(1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2), None

    _attend_by(model, attend, [4])


def _attend_by(model: Any, attend: Callable[..., Any], layers: Any) -> None:
    """Let the attention of some layers of GPT-2 go through a function, and nothing else of them change."""
    module = sys.modules[type(model).__module__]
    implementations = module.ALL_ATTENTION_FUNCTIONS
    right = implementations["sdpa"]
    implementations["sdpa"] = lambda part, *args, **given: (attend if part.layer_idx in layers else right)(
        part, *args, **given
    )


LEAKS: dict[str, Callable[[Any], None]] = {
    "the mask vanishes from position 700 on": mask_ends,
    "the eighth head of the fifth layer sees one position ahead": one_head_sees_ahead,
}


def judge(name: str, profile: str, level: str, leak: str) -> dict[str, Any]:
    """Judge one model in this process, and return a row of the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[name]()
    if leak:
        LEAKS[leak](model)
    check(nn.LayerNorm(8), kind="norm", only=["norm"], profile="quick")  # imports, first kernels
    started, used = time.perf_counter(), time.process_time()
    report = check(model, profile=profile, level=level, only=["causality"] if leak else ())
    (part,) = report.subjects
    plain = {"reach": part.reach, "facts": part.facts}
    row = {
        "model": name + (f", {leak}" if leak else ""),
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M",
        "processor s": round(time.process_time() - used), "s": round(time.perf_counter() - started),
        "pass": part.count("PASS"), "of": part.applicable,
        "faults noticed": f"{part.power['noticed']}/{part.power['tried']}" if part.power else "",
        "reach": reach(plain), "left out": "; ".join(part.unreached),
    }  # fmt: skip
    if leak:
        failed = next((r for r in part.results if r.outcome == "FAIL"), None)
        row["noticed"] = f"{failed.id}: {failed.counterexample.cause}" if failed and failed.counterexample else "no"
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt", "gpt2"], choices=list(MODELS))
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--level", default="core")
    parser.add_argument("--leaks", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(judge(*json.loads(options.one))))
        return
    asked = [(name, options.profile, options.level, "") for name in options.models]
    asked += [("gpt2", options.profile, options.level, leak) for leak in LEAKS if options.leaks]
    rows = []
    for one in asked:
        command = [sys.executable, __file__, "--one", json.dumps(one)]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.PIPE, text=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(pd.DataFrame(rows).fillna("").to_markdown(index=False))


if __name__ == "__main__":
    main()
