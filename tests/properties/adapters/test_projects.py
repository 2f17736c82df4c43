"""Files of whole projects: what they import, what their constructors ask for, and what the code beside them gives."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from veriformer.properties.adapters.target import TargetError
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.subject.subject import Subject
from veriformer.properties.targets import load

MAP = """
from torch import nn
class Map(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)
    def forward(self, x):
        return self.map(x)
"""
WHOLE = """
class Whole(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.one = Map(d_model)
    def forward(self, x):
        return self.one(x)
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")


def outcome(subject: Subject, prop: str) -> str:
    return Judge(subject, Settings(profile="quick"), is_brief=True).judge(named((prop,))[0]).outcome


@pytest.mark.parametrize(
    ("imports", "parts"),
    [
        ("from src.model.parts_a import Map", "src/model/parts_a.py"),
        ("from model.parts_b import Map", "src/model/parts_b.py"),
        ("from .parts_c import Map", "src/model/parts_c.py"),
        ("from ..shared_d import Map", "src/shared_d.py"),
        ("from parts_e import Map", "src/model/parts_e.py"),
    ],
    ids=["from the root", "from a folder above", "relative", "relative, a folder above", "beside"],
)
def test_imports_are_found_as_where_the_project_runs(imports: str, parts: str, tmp_path: Path) -> None:
    """None of these folders has an `__init__.py`."""
    write(tmp_path, {parts: MAP, "src/model/whole.py": f"from torch import nn\n{imports}\n{WHOLE}"})
    (subject,) = load(str(tmp_path / "src" / "model" / "whole.py"))
    assert subject.name == "Whole"
    assert subject.kind == "feed_forward"


DECODER = """
import torch
from torch import nn
class GPT(nn.Module):
    def __init__(self, vocab_size, d_model, n_heads, max_len):
        super().__init__()
        self.table, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        layer = nn.TransformerEncoderLayer(d_model, n_heads, 2 * d_model, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d_model, vocab_size)
    def forward(self, ids, mask=None):
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        return self.out(self.body(x, mask=mask))
"""


def test_a_caller_that_makes_the_causal_mask_is_done_as(tmp_path: Path) -> None:
    trains = "import torch\ndef step(model, ids):\n    t = ids.shape[1]\n    mask = torch.ones(t, t).triu(1).bool()\n"
    write(tmp_path, {"model.py": DECODER, "train.py": trains + "    return model(ids, mask)\n"})
    (subject,) = load(str(tmp_path / "model.py"))
    assert subject.kind == "decoder"
    assert any("mask is made here, as its caller would: causal" in note for note in subject.notes)
    assert outcome(subject, "causality.no-future-influence") == "PASS"


def test_where_nobody_makes_a_causal_mask_the_model_is_asked_for_one(tmp_path: Path) -> None:
    write(tmp_path, {"model.py": DECODER})
    (subject,) = load(str(tmp_path / "model.py"), kind="decoder")
    assert not any("as its caller would" in note for note in subject.notes)
    assert outcome(subject, "causality.no-future-influence") in ("FAIL", "OPEN")


CHOICES = """
import enum
from typing import Literal
from torch import nn
class Norm(enum.Enum):
    LAYER = "layer"
    NONE = "none"
class Layer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, norm: Norm, place: Literal["pre", "post"], style: str, steps: int):
        super().__init__()
        if style == "relu":
            self.act = nn.ReLU()
        elif style == "gelu":
            self.act = nn.GELU()
        else:
            raise ValueError(style)
        self.norm = nn.LayerNorm(d_model) if norm is Norm.LAYER else nn.Identity()
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.map, self.is_pre, self.steps = nn.Linear(d_model, d_model), place == "pre", steps
    def forward(self, x):
        y = self.norm(x) if self.is_pre else x
        x = x + self.attention(y, y, y, need_weights=False)[0]
        for _ in range(self.steps):
            x = x + self.map(self.act(x))
        return x if self.is_pre else self.norm(x)
"""


def test_what_is_no_size_is_chosen_as_the_code_allows_and_guesses_are_told(tmp_path: Path) -> None:
    write(tmp_path, {"layer.py": CHOICES})
    (subject,) = load(f"{tmp_path}/layer.py:Layer")
    assert subject.kind == "layer"
    assert any("steps = 2 was guessed" in note for note in subject.notes)


def test_what_stops_a_constructor_is_told(tmp_path: Path) -> None:
    text = MAP.replace("super().__init__()", "super().__init__(); raise ValueError('a table of names is required')")
    write(tmp_path, {"map.py": text})
    with pytest.raises(TargetError, match="cannot be built from drawn sizes: ValueError: a table of names is required"):
        load(f"{tmp_path}/map.py:Map")


PARTS = """
from torch import nn
class Encoder(nn.Module):
    def __init__(self, d_model, n_heads, blocks{more}):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model, n_heads, 2 * d_model, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    def forward(self, x):
        return self.body(x)
class Whole(nn.Module):
    def __init__(self, encoder{typed}, vocab_size, d_model):
        super().__init__()
        self.table, self.encoder = nn.Embedding(vocab_size, d_model), encoder
    def forward(self, tokens):
        return self.encoder(self.table(tokens))
"""


@pytest.mark.parametrize("typed", ["", ": Encoder", ": nn.Module"])
def test_parts_that_a_constructor_takes_are_made_by_their_type_or_name(typed: str, tmp_path: Path) -> None:
    write(tmp_path, {"whole.py": PARTS.format(typed=typed, more="")})
    (subject,) = load(f"{tmp_path}/whole.py:Whole")
    assert subject.kind == "encoder"
    assert "encoder is a Encoder made here" in subject.notes or "encoder is an Encoder made here" in subject.notes


def test_of_parts_that_are_not_known_it_is_told_who_makes_them(tmp_path: Path) -> None:
    maker = "from whole import Encoder, Whole\ndef build(d_model):\n    whole = "
    write(tmp_path, {
        "whole.py": PARTS.format(typed="", more=", flavour"),
        "making.py": maker + "Whole(Encoder(d_model, 2, 1, None), 9, d_model)\n    return whole.to('cpu').eval()\n",
    })  # fmt: skip
    with pytest.raises(TargetError, match=r"needs the argument 'encoder'.*making.py:build makes one"):
        load(f"{tmp_path}/whole.py:Whole")
    (subject,) = load(f"{tmp_path}/making.py")
    assert subject.kind == "encoder"


def test_what_a_configuration_is_asked_for_without_a_default_is_a_number_if_that_serves(tmp_path: Path) -> None:
    text = """
    from torch import nn
    class Low(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.down = nn.Linear(config.n_embd, config.rank, bias=getattr(config, "has_rest", False))
            self.up = nn.Linear(config.rank, config.n_embd)
        def forward(self, x):
            return self.up(self.down(x).relu())
    """
    write(tmp_path, {"low.py": text})
    (subject,) = load(f"{tmp_path}/low.py:Low")
    assert subject.kind == "feed_forward"
    assert any("config.rank = 2 was guessed" in note for note in subject.notes)


EMBEDS = """
import torch
from torch import nn
class TokenAndPosition(nn.Module):
    def __init__(self, vocab_size, d_model, max_len):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
    def forward(self, ids):
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
"""


def test_what_embeds_tokens_one_by_one_is_no_encoder(tmp_path: Path) -> None:
    write(tmp_path, {"embeds.py": EMBEDS})
    with pytest.raises(TargetError, match="embeds each token by itself, without a map or an attention"):
        load(f"{tmp_path}/embeds.py")


TURNS = """
import torch
from torch import nn
class Attention(nn.Module):
    def __init__(self, d_model, n_heads, max_len):
        super().__init__()
        self.heads, width = n_heads, d_model // n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        angles = torch.outer(torch.arange(max_len).float(), 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
    def turned(self, x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[2]]).flatten(3)
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))
"""


def test_complex_tables_keep_their_imaginary_part(tmp_path: Path) -> None:
    write(tmp_path, {"turns.py": TURNS})
    (subject,) = load(f"{tmp_path}/turns.py", kind="self_attention", declares={"positions": "rotary", "causal": True})
    assert any("turns is complex" in note for note in subject.notes)
    assert outcome(subject, "anatomy.positions") == "PASS"
    assert outcome(subject, "parameters.registered") == "PASS"


ONE_ROW = """
import torch
from torch import nn
class GPT(nn.Module):
    def __init__(self, vocab_size, d_model, max_len):
        super().__init__()
        self.table, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.mix, self.out = nn.MultiheadAttention(d_model, 2, batch_first=True), nn.Linear(d_model, vocab_size)
    def forward(self, ids):
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.out(x + self.mix(x, x, x, attn_mask=hidden, need_weights=False)[0])
    @torch.no_grad()
    def generate(self, ids, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits = self(ids)[:, -1] / temperature
            if top_k is not None:
                least = torch.topk(logits, top_k).values[:, -1]
                logits = logits.masked_fill(logits < least, -torch.inf)  # of one text alone
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return ids
"""


def test_what_generates_for_one_text_is_given_one(tmp_path: Path) -> None:
    write(tmp_path, {"one_row.py": ONE_ROW, "wrong.py": ONE_ROW.replace("logits < least", "logits <= least")})
    (subject,) = load(f"{tmp_path}/one_row.py")
    assert any(note.startswith("what it draws") and note.endswith("one sample at a time") for note in subject.notes)
    assert outcome(subject, "decoding.sampling") == "PASS"
    (wrong,) = load(f"{tmp_path}/wrong.py")
    assert outcome(wrong, "decoding.sampling") == "FAIL"


ROPE = """
import torch
from torch import nn
class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_seq_len=64, base=10000):
        super().__init__()
        angles = torch.outer(torch.arange(max_seq_len).float(), base ** (-torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())
    def forward(self, {takes}):
        cos, sin = {rows}
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
"""


@pytest.mark.parametrize(
    ("takes", "rows"),
    [
        ("x", "self.cos[: x.shape[2]], self.sin[: x.shape[2]]"),
        ("x", "self.cos[: x.shape[1], None], self.sin[: x.shape[1], None]"),
        ("x, positions", "self.cos[positions], self.sin[positions]"),
        (
            "x, offset=0",
            "self.cos[offset : offset + x.shape[2]], self.sin[offset : offset + x.shape[2]]",
        ),
    ],
    ids=["heads first", "time first", "positions", "offset"],
)
def test_a_part_that_rotates_one_tensor_is_rotary_by_its_name(takes: str, rows: str, tmp_path: Path) -> None:
    text = ROPE.format(takes=takes, rows=rows)
    write(tmp_path, {"right.py": text, "wrong.py": text.replace("-x[..., half:]", "x[..., half:]")})
    (subject,) = load(f"{tmp_path}/right.py")
    assert subject.kind == "rotary"
    assert [outcome(subject, p) for p in ("rotary.isometry", "rotary.relative")] == ["PASS", "PASS"]
    (wrong,) = load(f"{tmp_path}/wrong.py")
    assert outcome(wrong, "rotary.isometry") == "FAIL"


def test_a_softmax_is_one_by_its_name(tmp_path: Path) -> None:
    text = "import torch\ndef my_softmax(x, dim):\n    e = torch.exp(x - x.amax(dim, keepdim=True))\n"
    text += "    return e / e.sum(dim, keepdim=True)\n"
    write(tmp_path, {"right.py": text, "wrong.py": text.replace(" - x.amax(dim, keepdim=True)", "")})
    (subject,) = load(f"{tmp_path}/right.py:my_softmax")
    assert subject.kind == "softmax"
    assert outcome(subject, "softmax.no-overflow") == "PASS"
    (wrong,) = load(f"{tmp_path}/wrong.py:my_softmax")
    assert outcome(wrong, "softmax.no-overflow") == "FAIL"


SPANS = """
import torch
from torch import nn
class Spans(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.table, self.out = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, 1)
        self.mix = nn.MultiheadAttention(d_model, 2, batch_first=True)
    def forward(self, ids):
        x = self.table(ids)
        return self.out(x + self.mix(x, x, x, need_weights=False)[0]).squeeze(-1)
"""


def test_one_number_for_each_position_is_an_encoder(tmp_path: Path) -> None:
    write(tmp_path, {"spans.py": SPANS})
    (subject,) = load(f"{tmp_path}/spans.py")
    assert subject.kind == "encoder"
    assert outcome(subject, "permutation.equivariance") in ("PASS", "NOT_APPLICABLE")


MADE = """
import torch
from torch import nn
class Two(nn.Module):
    def __init__(self, encoder, table, out):
        super().__init__()
        self.encoder, self.table, self.out = encoder, table, out
    def forward(self, x, y_below):
        memory = self.encoder(self.table(x)).mean(1, keepdim=True)
        return self.out(self.table(y_below) + memory).flatten(0, 1)
def build_model(config, source_vocabulary_size):
    table = nn.Embedding(source_vocabulary_size, config["d_model"])
    model = Two(nn.Linear(config["d_model"], config["d_model"]), table, nn.Linear(config["d_model"], 9))
    return model
"""


def test_a_function_that_makes_the_model_is_meant_and_a_target_may_have_any_name(tmp_path: Path) -> None:
    write(tmp_path, {"made.py": MADE})
    (subject,) = load(f"{tmp_path}/made.py")
    assert subject.name == "build_model"
    assert subject.kind == "encoder_decoder"
    assert outcome(subject, "causality.no-future-influence") == "PASS"
