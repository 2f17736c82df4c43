"""Local checkpoint folders: what is loaded from them, and what is said where nothing can be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from veriformer.properties import check
from veriformer.properties.adapters.huggingface_calls import transformers
from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.adapters.target import TargetError
from veriformer.properties.targets import load

Once = Callable[[str, Callable[[Path], None]], Path]
SIZES = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 61, "n_positions": 48}


def _gpt2() -> Any:
    torch.manual_seed(0)
    return transformers().GPT2LMHeadModel(transformers().GPT2Config(**SIZES))


@pytest.fixture(scope="module")
def saved(once: Once) -> Path:
    """Return a folder with checkpoints of one small GPT-2, whole, in shards and pickled, and of other families."""

    def save(folder: Path) -> None:
        library, model = transformers(), _gpt2()
        model.save_pretrained(folder / "gpt2")
        model.save_pretrained(folder / "shards", max_shard_size="20KB")
        (folder / "pickled").mkdir()
        shutil.copy(folder / "gpt2" / "config.json", folder / "pickled")
        torch.save(model.state_dict(), folder / "pickled" / "pytorch_model.bin")
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        library.BertForSequenceClassification(library.BertConfig(**small, vocab_size=70, num_labels=3)).save_pretrained(
            folder / "bert"
        )
        library.ViTModel(library.ViTConfig(**small, image_size=16, patch_size=8)).save_pretrained(folder / "vit")
        library.Wav2Vec2Config(hidden_size=16, num_hidden_layers=1).save_pretrained(folder / "sound")

    return once("checkpoints", save)


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a checkpoint and changes entries of its configuration."""

    def copy(name: str = "gpt2", **entries: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(saved / name, folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
        return folder

    return copy


@pytest.mark.parametrize("name", ["gpt2", "shards", "pickled"])
def test_a_folder_gives_the_instance_that_it_holds(saved: Path, name: str) -> None:
    (subject,) = load(f"hf:{saved / name}")
    assert (subject.kind, subject.target) == ("decoder", f"hf:{saved / name}")
    assert type(subject.module).__name__ == "GPT2LMHeadModel"
    assert subject.config is not None
    assert (subject.config.d_model, subject.config.vocab_size, subject.config.max_len) == (32, 61, 48)
    right = _gpt2().state_dict()
    assert all(torch.equal(value, right[key]) for key, value in subject.module.state_dict().items())


def test_the_kind_follows_the_class_that_the_configuration_names(saved: Path) -> None:
    assert load(f"hf:{saved / 'bert'}")[0].kind == "classifier"
    (vision,) = load(f"hf:{saved / 'vit'}")
    assert (vision.kind, vision.inputs) == ("encoder", "embeddings")


def test_a_configuration_that_names_no_class_gives_the_usual_one(broken: Callable[..., Path]) -> None:
    assert type(load(f"hf:{broken(architectures=None)}")[0].module).__name__ == "GPT2LMHeadModel"


def test_it_is_judged_up_to_its_longest(saved: Path) -> None:
    report = check(load(f"hf:{saved / 'gpt2'}")[0], level="core", only=["causality", "padding"], profile="quick")
    assert report.ok
    assert report.subjects[0].reach["T"] == [1, 48]


def test_weights_keep_their_dtype(saved: Path, tmp_path: Path) -> None:
    _gpt2().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert next(load(f"hf:{tmp_path / 'half'}")[0].module.parameters()).dtype == torch.bfloat16


def test_a_relative_path_is_one_too(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    assert load("hf:./gpt2")[0].kind == "decoder"
    assert load("hf:shards")[0].name == "hf:shards"  # a folder with config.json needs no separator
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5").mkdir()
    assert load("hf:t5")[0].module is None  # one without is no checkpoint, and the name stays that of a type


def test_a_failure_there_has_a_script_that_loads_it(saved: Path, tmp_path: Path) -> None:
    model = _gpt2()
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    (subject,) = load(f"hf:{tmp_path / 'nan'}")
    (result,) = check(subject, only=["numerics.finite"], profile="quick").results
    assert result.outcome == "FAIL"
    assert result.counterexample is not None
    assert f"GPT2LMHeadModel.from_pretrained('{tmp_path / 'nan'}'" in result.counterexample.script


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gtp2"}, "has model_type 'gtp2', which is no type .*; the nearest one is 'gpt2'"),
        ({"model_type": None}, "has model_type None"),
        (
            {"auto_map": {"AutoModel": "modeling_own.Own"}},
            "needs code of its own: .* modeling_own.Own; that is not run",
        ),
        ({"n_embd": 64}, "do not fit its config.json: .* have another shape there"),
        ({"n_layer": 3}, r"are not all of GPT2LMHeadModel, .*transformer\.h\.2\..* and 9 more are missing"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_told(
    broken: Callable[..., Path], change: dict[str, Any], told: str
) -> None:
    with pytest.raises(TargetError, match=told) as problem:
        load(f"hf:{broken(**change)}")
    assert "\n" not in str(problem.value)


def test_what_is_missing_is_told(broken: Callable[..., Path], tmp_path: Path, saved: Path) -> None:
    with pytest.raises(TargetError, match="does not exist; hf:PATH takes the folder of a checkpoint"):
        load(f"hf:{tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match=r"has no config.json; hf:PATH takes a folder with config.json and model.saf"):
        load(f"hf:{tmp_path / 'empty'}")
    with pytest.raises(TargetError, match=r"has model_type 'wav2vec2', which is no type .* that reads text"):
        load(f"hf:{saved / 'sound'}")
    folder = broken("shards")
    next(iter(sorted(folder.glob("model-00002*")))).unlink()
    with pytest.raises(TargetError, match=r"lacks 1 of the \d+ shards .*: model-00002-of"):
        load(f"hf:{folder}")
    folder = broken("gpt2")
    (folder / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(TargetError, match="cannot be loaded into GPT2LMHeadModel"):
        load(f"hf:{folder}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"holds no weights; one of model.safetensors, pytorch_model.bin is required"):
        load(f"hf:{folder}")
    (folder / "config.json").write_text("[]")
    with pytest.raises(TargetError, match="holds a list, where a JSON object is required"):
        load(f"hf:{folder}")


class Spy:
    """Pickled, it would run code where it is read."""

    seen: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return _run, ()


def _run() -> dict[str, Any]:
    Spy.seen.append(1)
    return {}


def test_code_in_a_pickle_is_not_run(broken: Callable[..., Path]) -> None:
    folder = broken("pickled")
    torch.save(Spy(), folder / "pytorch_model.bin")
    with pytest.raises(TargetError, match="cannot be loaded into GPT2LMHeadModel"):
        load(f"hf:{folder}")
    assert not Spy.seen


def test_what_lies_elsewhere_or_is_no_file_is_not_opened(broken: Callable[..., Path]) -> None:
    folder = broken("shards")
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    for away in ("../gpt2/model.safetensors", "/etc/passwd", "below/model.safetensors", ""):
        index.write_text(json.dumps({**told, "weight_map": {**told["weight_map"], "lm_head.weight": away}}))
        with pytest.raises(TargetError, match="a shard must lie in the folder itself"):
            load(f"hf:{folder}")
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(TargetError, match=r"config\.json cannot be read: it nests its data too deeply"):
        load(f"hf:{folder}")
    for name in ("generation_config.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(TargetError, match=f"{name} is neither a file nor a folder; take it away"):
            load(f"hf:{folder}")
        (folder / name).unlink()


def test_a_class_of_ones_own_is_what_the_class_of_the_library_is() -> None:
    class Pooled(transformers().BertForSequenceClassification):  # type: ignore[misc]
        pass

    assert as_subject(Pooled).kind == "classifier"
    assert as_subject(Pooled, kind="encoder").kind == "encoder"


def test_what_of_a_folder_is_not_judged_is_said(tmp_path: Path, saved: Path) -> None:
    library = transformers()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = library.BertForSequenceClassification(library.BertConfig(vocab_size=61, **small))
    model.save_pretrained(tmp_path)
    assert not load(f"hf:{tmp_path}")[0].notes
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertMeanPooled"]}))
    (note,) = load(f"hf:{tmp_path}")[0].notes
    assert "judged as BertModel alone: it was saved as BertMeanPooled, which is no class of transformers" in note
    assert "no part of it takes classifier.bias, classifier.weight of its weights" in note
    assert not load(f"hf:{saved / 'gpt2'}")[0].notes
