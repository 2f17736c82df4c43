"""What the sweep of released libraries taught the engine: right models that were once misjudged, beside wrong ones."""

from __future__ import annotations

from torch import Tensor, nn

from veriformer.properties import Subject, check
from veriformer.properties.probes.module_parts import layer_lists
from veriformer.properties.subject.sizes import DrawnConfig


class Embedded(nn.Module):
    """An encoder in the manner of BERT: a norm over the embeddings, then layers that are post-LN or pre-LN."""

    def __init__(self, config: DrawnConfig, norm_first: bool) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(config.vocab_size, config.d_model), nn.LayerNorm(config.d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.d_model, config.num_heads, config.d_ff, 0.0, batch_first=True, norm_first=norm_first
            )
            for _ in range(config.num_layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens))
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]


def test_the_place_of_a_norm_is_told_behind_a_norm_of_the_embeddings() -> None:
    for norm_first, told in ((False, "norm_placement = 'post'"), (True, "norm_placement = 'pre'")):
        subject = Subject(
            kind="encoder", build=lambda c, first=norm_first: Embedded(c, first), domain={"num_layers": (2,)}
        )
        (part,) = check(subject, profile="quick", only=["numerics.finite"]).subjects
        assert any(note.startswith(told) for note in part.probed), part.probed


def test_lists_side_by_side_are_parts_and_one_list_is_the_layers() -> None:
    config = DrawnConfig(num_layers=2)
    holder = nn.Module()
    holder.attentions = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert len(layer_lists(holder, config)) == 1
    holder.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
    assert layer_lists(holder, config) == []
