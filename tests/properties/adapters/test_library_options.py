"""Options of released libraries: what is windowed, cached, switched and differentiated as its adapter says."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import check
from veriformer.properties.adapters import litgpt_models, x_transformers
from veriformer.properties.adapters.libraries import LIBRARIES
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.adapters.shared.own_backwards import ByGrad
from veriformer.properties.known.deviations import read_deviations
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.targets import load

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of x_transformers
SIZES = DrawnConfig(d_model=24, num_heads=2, num_key_value_heads=2, num_layers=2, vocab_size=13, max_len=40)
ELEVEN = (
    "x-transformers", "litgpt", "torchtune", "torchscale", "local-attention", "nystrom-attention", "reformer-pytorch",
    "linear-attention-transformer", "linformer", "performer-pytorch", "memory-efficient-attention",
)  # fmt: skip


class Reentrant(nn.Module):
    """Computes its first map again in the backward pass, as torch.autograd.grad refuses to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=True) if again else self.first(x)
        return self.second(hidden.tanh())


class Raising(nn.Module):
    """Its backward pass raises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        out.register_hook(lambda _: (_ for _ in ()).throw(TypeError("expected a state of the generator")))
        return out


def test_gradients_by_grad_are_those_of_the_plain_model() -> None:
    torch.manual_seed(0)
    model, x = Reentrant(), torch.randn(4, 3, requires_grad=True)
    leaves = [x, *model.parameters()]
    with pytest.raises(RuntimeError, match="use_reentrant"):
        torch.autograd.grad(model(x).square().sum(), leaves, allow_unused=True)
    model.first.weight.grad = torch.full_like(model.first.weight, 7)
    got = torch.autograd.grad(ByGrad(model)(x).square().sum(), leaves, allow_unused=True)
    wanted = torch.autograd.grad(model(x, again=False).square().sum(), leaves, allow_unused=True)
    assert [g is None for g in got] == [w is None for w in wanted] == [False] * 5 + [True] * 2
    for g, w in zip(got, wanted, strict=True):
        assert g is None or w is None or torch.equal(g, w)
    assert torch.equal(model.first.weight.grad, torch.full_like(model.first.weight, 7))


def test_what_a_backward_raises_is_raised() -> None:
    model = Raising()
    total = ByGrad(model)(torch.randn(4, 3)).sum()
    with pytest.raises(TypeError, match="expected a state of the generator"):
        torch.autograd.grad(total, list(model.parameters()))
    assert model.linear.weight.grad is None


def test_without_gradients_the_model_is_called_as_it_is() -> None:
    model, x = Reentrant(), torch.randn(4, 3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(ByGrad(model)(x), model(x))


class Embedded(nn.Module):
    """Pads its tokens to four, embeds them and looks through a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 3), Reentrant()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(nn.functional.pad(tokens, (0, 4 - tokens.shape[1])))).cumsum(dim=1)


def test_embeddings_in_place_of_tokens_give_the_same_and_have_a_gradient() -> None:
    torch.manual_seed(0)
    model, tokens = Embedded(), torch.tensor([[3, 1, 5]])
    wrapped, embeddings = ByGrad(model), model.table(tokens).detach().requires_grad_()
    output = wrapped.from_embeddings(embeddings, model.table)
    assert torch.equal(output, model(tokens))
    (gradient,) = torch.autograd.grad(output[0, 1].sum(), embeddings)
    assert gradient[0, :2].abs().amin() > 0
    assert not gradient[0, 2].any()


@pytest.mark.parametrize(
    ("pattern", "layers", "wanted"),
    [([1, 0] * 8, 1, [1]), ([1, 1, 1, 1, 1, 0, 1], 2, [1, 0]), ([0, 0, 1], 3, [1, 0, 1]), ([1] * 32, 2, [1, 1])],
)
def test_a_small_model_has_windowed_and_full_layers(pattern: list[int], layers: int, wanted: list[int]) -> None:
    assert litgpt_models._indices(pattern, layers) == wanted


@pytest.mark.parametrize("name", x_transformers._DECODERS)
def test_a_cache_is_used_where_the_model_says_that_it_can_be(name: str) -> None:
    subject = shipped("x-transformers")[f"decoder-{name}"]
    assert subject.build is not None
    assert (subject.cache is not None) == subject.build(SIZES).can_cache_kv


FLASH = [*(f"decoder-{n}" for n in x_transformers._DECODERS), *(f"encoder-{n}" for n in x_transformers._ENCODERS)]


@pytest.mark.parametrize("name", FLASH)
def test_flash_is_what_its_name_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend: Any = importlib.import_module("x_transformers.attend")
    subject = shipped("x-transformers")[name]
    assert subject.build is not None
    calls: list[int] = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attend.F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or plain(*a, **k))
    with torch.no_grad():
        subject.build(SIZES).eval()(torch.arange(9)[None])
    assert bool(calls) == name.endswith("flash")


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("name", "of", "outcome", "page"),
    [
        ("encoder-absolute", "padding.content-irrelevant", "PASS", ""),
        ("encoder-shift-tokens", "padding.content-irrelevant", "DEVIATION", "shift-tokens-mask.md"),
        ("decoder-value-gate", "causality.no-future-influence", "PASS", ""),
        ("decoder-orthogonal-values", "causality.no-future-influence", "DEVIATION", "x-transformers-orthogonal.md"),
        ("decoder-latent-keys", "decoding.cache", "PASS", ""),
        ("decoder-latent-value-residual", "decoding.cache", "DEVIATION", "x-transformers-cache.md"),
    ],
)
def test_an_option_that_breaks_is_found_and_its_twin_passes(name: str, of: str, outcome: str, page: str) -> None:
    (subject,) = load(f"x-transformers:{name}")
    (result,) = check(subject, profile="quick", only=[of]).results
    assert result.outcome == outcome
    assert page in result.reason


@pytest.mark.parametrize("library", ELEVEN)
def test_each_entry_names_a_model_that_is_shipped(library: str) -> None:
    names = [n for module in LIBRARIES[library].modules for n in importlib.import_module(module).SHIPPED]
    entries = [e for e in read_deviations(None).entries if e.subject.startswith(f"{library}:")]
    for entry in entries:
        pattern = ".*".join(map(re.escape, entry.subject.partition(":")[2].split("*")))
        assert any(re.fullmatch(pattern, name) for name in names), entry.subject


def test_no_adapter_declares_away_what_is_a_defect() -> None:
    for library in ELEVEN:
        for module in LIBRARIES[library].modules:
            for name, subject in importlib.import_module(module).SHIPPED.items():
                assert not subject.declares.get("batch_coupled"), f"{library}:{name}"
