"""Recognisers: classes, instances, functions, models of other houses; what cannot be recognised says what to write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from broken_models import TinyLanguageModel
from veriformer.properties import Subject, check
from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.reference.config import Config
from veriformer.reference.model import build


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("thing", "kind", "name"),
    [
        (nn.MultiheadAttention, "self_attention", "nn.MultiheadAttention"),
        (nn.MultiheadAttention(8, 2, batch_first=True), "self_attention", "nn.MultiheadAttention"),
        (nn.MultiheadAttention(8, 2), "self_attention", "nn.MultiheadAttention"),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "layer", "nn.TransformerEncoderLayer"),
        (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), "encoder_decoder", "nn.Transformer"),
        (nn.LayerNorm(8), "norm", "nn.LayerNorm"),
        (nn.Softmax(dim=-1), "softmax", "nn.Softmax"),
        (functional.softmax, "softmax", "F.softmax"),
        (functional.scaled_dot_product_attention, "attention", "F.scaled_dot_product_attention"),
        (build(Config(architecture="decoder", vocab_size=11)), "decoder", "reference decoder"),
        (build(Config(architecture="classifier")), "classifier", "reference classifier"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_known_things_are_recognised(thing: object, kind: str, name: str) -> None:
    subject = as_subject(thing)
    assert (subject.kind, subject.name) == (kind, name)
    if isinstance(thing, nn.Module):  # classes and functions are verified as shipped subjects
        report = check(thing, profile="quick", level="core")
        assert all(r.outcome in ("PASS", "NOT_APPLICABLE", "DEVIATION") for r in report.results), report.results


class OtherHouse(nn.Module):
    """Sizes by other names, logits in a record, token ids in."""

    def __init__(self, n_vocab: int, n_embd: int, n_head: int, n_layer: int, block_size: int) -> None:
        super().__init__()
        self.model = TinyLanguageModel(
            DrawnConfig(vocab_size=n_vocab, d_model=n_embd, num_heads=n_head, max_len=block_size)
        )

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:
        return self.model(idx), None


def test_a_class_of_another_house_is_built_from_its_argument_names() -> None:
    subject = as_subject(OtherHouse)
    assert (subject.kind, subject.takes_tokens) == ("decoder", True)
    assert check(OtherHouse, profile="quick", only=["causality", "parameters.registered"]).ok


def test_an_instance_is_checked_as_it_is() -> None:
    module = OtherHouse(13, 12, 3, 1, 20)
    before = [p.detach().clone() for p in module.parameters()]
    report = check(module, profile="quick")
    assert report.ok, [r for r in report.results if r.outcome not in ("PASS", "NOT_APPLICABLE")]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert module.training


def test_a_function_needs_its_kind() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)

    assert check(attend, kind="attention", profile="quick").ok
    with pytest.raises(TypeError, match=r"'attend' is not recognised; say what it is: Subject\(kind="):
        check(attend)


class Unknown(nn.Module):
    def __init__(self, flavour: str) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (Unknown, r"Unknown needs the argument 'flavour', which is no size that is known here; write Subject\("),
        (nn.TransformerEncoderLayer(8, 2), r"was built with batch_first=False, whose inputs are \[T, B, D\]"),
        (7, r"'int' is not recognised"),
    ],
)
def test_what_is_not_recognised_says_what_to_write(thing: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        as_subject(thing)


def test_wrong_declarations_name_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"there is no fact .causel. to declare; did you mean .causal.\?"):
        Subject(kind="layer", forward=lambda m, x: x, declares={"causel": True})
    with pytest.raises(ValueError, match="the fact 'positions' was declared as 'rotery'; it must be one of none"):
        Subject(kind="layer", forward=lambda m, x: x, declares={"positions": "rotery"})
    with pytest.raises(ValueError, match=r"there is no kind .lair.; did you mean .layer.\?"):
        Subject(kind="lair", forward=lambda m, x: x)
    with pytest.raises(ValueError, match=r"domain names no such size: n_heads; the sizes are: d_model"):
        Subject(kind="layer", forward=lambda m, x: x, domain={"n_heads": [2]})


def test_meta_parameters_are_refused() -> None:
    with torch.device("meta"):
        module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = check(module, profile="quick", only=["numerics"], exclude=["numerics.compile"])
    assert {r.outcome for r in report.results} == {"ERROR"}
    assert "holds no values (meta device or lazy); materialise the model" in report.results[0].reason
