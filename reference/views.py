"""Several views of one object, classified together: a network for each view, a head over the set of views."""

from __future__ import annotations

from torch import Tensor, nn

from veriformer.reference.blocks import EncoderLayer
from veriformer.reference.config import Config


class MultiViewClassifier(nn.Module):
    """Class logits of a set of views: each through `backbone`, then layers without positions, then their mean.

    Attention without positions is equivariant to the order of the views and the mean invariant, so is the whole.
    With no layers it is the plain average of the views' vectors, which is invariant too.
    """

    def __init__(self, backbone: nn.Module, config: Config) -> None:
        """Take the network of a view and the sizes of the head.

        Args:
            backbone: one view `[N, ...]` to its vector `[N, D]`.
            config: `d_model`, `num_heads`, `num_layers` (0 by `without_attention`), `num_classes`; positions "none".

        Raises:
            ValueError: the configuration has positions, which would tell the order of the views.
        """
        super().__init__()
        if config.positions != "none":
            raise ValueError(f"positions was {config.positions!r}; a set of views has no order, give positions='none'")
        self.backbone = backbone
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.classify = nn.Linear(config.d_model, config.num_classes)

    @classmethod
    def without_attention(cls, backbone: nn.Module, config: Config) -> MultiViewClassifier:
        """Return the baseline: the views' vectors are averaged, nothing else."""
        plain = cls(backbone, config)
        plain.layers = nn.ModuleList()
        return plain

    def forward(self, views: Tensor) -> Tensor:
        """Return logits `[B, C]` of views `[B, V, ...]`; V may differ from call to call."""
        x = self.backbone(views.flatten(0, 1)).unflatten(0, views.shape[:2])
        for layer in self.layers:
            x, _ = layer(x)
        return self.classify(x.mean(dim=1))
