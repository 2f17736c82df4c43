"""Somebody's own file, as people write them, judged from one word: what is right passes, a subtle bug is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from veriformer.properties.adapters.constructing.size_names import meanings
from veriformer.properties.adapters.contents import those_in
from veriformer.properties.adapters.pasted import as_source
from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.adapters.target import TargetError
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge
from veriformer.properties.targets import load

FIRST = Path(__file__).parents[2] / "strangers" / "first"
BUGS: dict[str, list[str]] = json.loads((FIRST / "bugs.json").read_text(encoding="utf-8"))
NOTICED_BY = {
    "nanogpt:GPT": ("decoder", "causality.no-future-influence"),
    "mingpt:GPT": ("decoder", "causality.no-future-influence"),
    "gptdev:GPTLanguageModel": ("decoder", "causality.no-future-influence"),
    "annotated:make_model": ("encoder_decoder", "padding.content-irrelevant"),
    "tutorial:TransformerModel": ("decoder", "causality.no-future-influence"),
    "vit:ViT": ("encoder", "anatomy.softmax"),
    "bert:BERT": ("encoder", "padding.amount-irrelevant"),
    "lucid:TransformerWrapper": ("decoder", "causality.no-future-influence"),
    "hf_custom:TinyForCausalLM": ("decoder", "padding.content-irrelevant"),
    "raschka:GPTModel": ("decoder", "numerics.finite"),
    "namespace_args:TransformerLM": ("decoder", "causality.no-future-influence"),
    "pydantic_cfg:DecoderLM": ("decoder", "causality.no-future-influence"),
    "text_classifier:SentimentClassifier": ("classifier", "padding.amount-irrelevant"),
    "mha_youtube:MultiHeadAttentionBlock": ("self_attention", "permutation.equivariance"),
    "seq2seq_nn:Seq2SeqTransformer": ("encoder_decoder", "batch.independence"),
    "aladdin:Transformer": ("encoder_decoder", "causality.no-future-influence"),
    "llama2c:Transformer": ("decoder", ""),  # keys turned the wrong way: not noticed where rotations cannot be followed
}


name_operators()  # transformers imports torchvision, which may be of another torch


def outcome(target: str, prop: str) -> str:
    (subject,) = load(target, declares={"positions": "none"} if prop.startswith("permutation") else None)
    return Judge(subject, Settings(profile="quick"), is_brief=True).judge(catalogue()[prop]).outcome


@pytest.mark.parametrize("target", BUGS)
def test_a_file_as_people_write_it_is_judged_from_one_word(target: str, tmp_path: Path) -> None:
    name, _, attribute = target.partition(":")
    kind, prop = NOTICED_BY[target]
    (subject,) = load(f"{FIRST / name}.py:{attribute}")
    assert subject.kind == kind
    right, wrong = BUGS[target]
    text = (FIRST / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(right) == 1
    (tmp_path / "broken.py").write_text(text.replace(right, wrong), encoding="utf-8")
    assert outcome(f"{FIRST / name}.py:{attribute}", prop or "causality.no-future-influence") in (
        "PASS",
        "NOT_APPLICABLE",
    )
    if prop:
        assert outcome(f"{tmp_path}/broken.py:{attribute}", prop) in ("FAIL", "OPEN")


SECOND = FIRST.parent / "second"
KINDS = {
    "typed_dict": "encoder",
    "fairseq_style": "encoder",
    "cls_classifier": "classifier",
    "cross": "cross_attention",
    "nn_seq2seq": "encoder_decoder",
    "swiglu": "feed_forward",
    "plain_bert": "encoder",
    "time_series": "layer",
}


@pytest.mark.parametrize("target", json.loads((SECOND / "bugs.json").read_text(encoding="utf-8")))
def test_other_styles_are_understood(target: str) -> None:
    name, _, attribute = target.partition(":")
    (subject,) = load(f"{SECOND / name}.py:{attribute}")
    assert subject.kind == KINDS.get(name, "decoder")


class Attends(nn.Module):
    """An encoder of one attention; `hides` says what True means in its mask."""

    hides = True

    def __init__(self, vocab_size: int, dim: int, heads: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(tokens)
        hidden = mask if mask is None or self.hides else ~mask
        return x + self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]


class AttendsWhereTrue(Attends):
    hides = False


class Ignores(Attends):
    def forward(self, tokens: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(tokens)
        return x + self.attention(x, x, x, need_weights=False)[0]


def test_the_polarity_of_a_mask_is_told_by_what_it_hides() -> None:
    hides, attends = as_subject(Attends), as_subject(AttendsWhereTrue)
    assert any("mask is [B, T] of bool, True = masked: found by trying" in note for note in hides.notes)
    assert any("mask is [B, T] of bool, True = may attend: found by trying" in note for note in attends.notes)
    for subject in (hides, attends):
        assert Judge(subject, Settings(profile="quick"), is_brief=True).judge(
            catalogue()["padding.content-irrelevant"]
        ).outcome == "PASS"  # fmt: skip


def test_a_mask_that_hides_nothing_is_taken_by_its_name_and_found_out() -> None:
    subject = as_subject(Ignores)
    assert any("by its name alone" in note for note in subject.notes)
    judged = Judge(subject, Settings(profile="quick"), is_brief=True).judge(catalogue()["padding.content-irrelevant"])
    assert judged.outcome == "FAIL"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["ntoken", "d_model", "nhead", "d_hid", "nlayers"],
            ["vocab_size", "d_model", "num_heads", "d_ff", "num_layers"],
        ),
        (["n_embd", "n_head", "block_size"], ["d_model", "num_heads", "max_len"]),
        (["dim", "hidden_dim", "n_kv_heads"], ["d_model", "d_ff", "num_key_value_heads"]),
        (["hidden", "attn_heads", "flavour"], ["d_model", "num_heads"]),
    ],
)
def test_names_of_sizes_mean_what_their_houses_mean(names: list[str], expected: list[str]) -> None:
    assert list(meanings(names).values()) == expected


def test_a_file_alone_is_the_one_thing_that_nothing_else_in_it_uses() -> None:
    (subject,) = load(str(FIRST / "nanogpt.py"))
    assert subject.name == "GPT"
    assert subject.target.endswith("nanogpt.py:GPT")
    assert "also there: LayerNorm, CausalSelfAttention, MLP, Block" in subject.notes[0]


def test_of_a_file_all_is_judged_that_nothing_else_in_it_is_made_of(tmp_path: Path) -> None:
    whole = "class {0}(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n        self.norm = "
    one = whole + "nn.LayerNorm(dim)\n    def forward(self, x):\n        return self.norm(x)\n"
    text = "from torch import nn\n" + "".join(one.format(name) for name in "AB")
    (tmp_path / "two.py").write_text(text + "class C(nn.Module):\n    def __init__(self, flavour):\n        ...\n")
    first, second = load(str(tmp_path / "two.py"))
    assert [first.name, second.name] == ["A", "B"]
    assert second.target.endswith("two.py:B")
    assert "A, B and C are judged" in first.notes[0]
    assert "not judged: " in first.notes[1]
    assert "'flavour'" in first.notes[1]


def test_a_file_of_many_things_is_listed(tmp_path: Path) -> None:
    classes = "".join(f"class {name}(nn.Linear): ...\n" for name in "ABCDEFG")
    (tmp_path / "many.py").write_text(f"from torch import nn\n{classes}")
    with pytest.raises(
        TargetError, match=r"holds 7 things that could be judged; name one of them:\n  .*many.py:A  class"
    ):
        load(str(tmp_path / "many.py"))


PARTS = """
import torch
from torch import nn
class Embed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.map = nn.Linear(dim, dim)
    def forward(self, x):
        return self.map(x)
class Block(nn.Linear): ...
def blocks(dim):
    return [Block(dim, dim) for _ in range(2)]
class Whole(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.embed, self.blocks = Embed(dim), nn.Sequential(*blocks(dim))
    @torch.no_grad()
    def forward(self, x):
        return self.blocks(self.embed(x))
def whole_tiny(**given):
    return Whole(dim=8, **given)
"""


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("", "Whole"),
        ("model = Whole()\nm = model.to('cpu')\n", "model"),
        ("body = Embed(8)\nmodel = nn.Sequential(body, nn.Linear(8, 8))\n", "model"),
    ],
    ids=["used by a function that nothing uses", "two names", "a part of another"],
)
def test_what_the_rest_of_a_file_is_parts_of_is_meant(more: str, name: str) -> None:
    module = ModuleType("parts_of_a_file")
    exec(PARTS + more, vars(module))
    (found,), note = those_in(module, "parts.py")
    assert found == name
    assert f"{name}," not in note.partition("also there")[2]


def test_a_kind_and_facts_can_be_said_of_a_target() -> None:
    (subject,) = load(f"{FIRST / 'bert.py'}:BERT", kind="encoder", declares={"causal": False})
    assert subject.fact("causal") is False
    with pytest.raises(TargetError, match="is a Subject of kind 'decoder', and --kind was 'encoder'"):
        load("reference:decoder-rotary", kind="encoder")


@pytest.mark.parametrize(
    "target", ["nanogpt:GPT", "gptdev:GPTLanguageModel", "seq2seq_nn:Seq2SeqTransformer", "vit:ViT"]
)
def test_what_init_prints_is_the_subject_that_was_judged(target: str, tmp_path: Path) -> None:
    name, _, attribute = target.partition(":")
    (tmp_path / f"{name}.py").write_text((FIRST / f"{name}.py").read_text(encoding="utf-8"), encoding="utf-8")
    (subject,) = load(f"{tmp_path / name}.py:{attribute}")
    (tmp_path / "pasted.py").write_text(as_source(subject), encoding="utf-8")
    (again,) = load(f"{tmp_path}/pasted.py:mine")
    same = ("kind", "name", "inputs", "mask_forms", "declares", "domain", "guesses", "image")
    assert [getattr(again, f) for f in same] == [getattr(subject, f) for f in same]
    beside = ("cache", "generate", "sampling", "loss", "patches")
    assert [getattr(again, f) is None for f in beside] == [getattr(subject, f) is None for f in beside]
    assert (
        Judge(again, Settings(profile="quick"), is_brief=True).judge(catalogue()["batch.independence"]).outcome
        == "PASS"
    )


def test_an_error_shows_the_line_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import torch\nfrom torch import nn\nclass Bad(nn.Module):\n"
        "    def __init__(self, vocab_size, dim):\n        super().__init__()\n"
        "        self.table = nn.Embedding(vocab_size, dim)\n"
        "    def forward(self, x):\n        return self.table(x).view(7, 7)\n"
    )
    with pytest.raises(TargetError, match=r"bad.py, line 8, in forward: return self.table\(x\).view\(7, 7\)"):
        load(f"{tmp_path}/bad.py:Bad")


def test_the_script_of_a_failure_pastes_what_was_understood(tmp_path: Path) -> None:
    right, wrong = BUGS["seq2seq_nn:Seq2SeqTransformer"]
    text = (FIRST / "seq2seq_nn.py").read_text(encoding="utf-8").replace(right, wrong)
    (tmp_path / "broken.py").write_text(text, encoding="utf-8")
    (subject,) = load(f"{tmp_path}/broken.py:Seq2SeqTransformer")
    result = Judge(subject, Settings(profile="quick")).judge(catalogue()["batch.independence"])
    assert result.counterexample is not None
    (tmp_path / "script.py").write_text(result.counterexample.script, encoding="utf-8")
    ran = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "user.Seq2SeqTransformer(" in result.counterexample.script
