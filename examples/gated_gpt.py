"""Does my part earn its place? Ablate a model of your own in ten lines.

    veriformer ablate examples/gated_gpt.py

trains the GPT below with and without its gate, for as many seeds of each, and says what the gate buys.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.ablations import Recipe, Study, Variant


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a skip; a gate on what attention brings."""

    def __init__(self, d_model: int, num_heads: int, gate: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.gate = nn.Linear(d_model, d_model) if gate else None
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Return the new residual stream `[B, T, D]`."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x))
        x = x + self.out(attended)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder from tokens `[B, T]` to logits `[B, T, V]`."""

    def __init__(self, vocab_size: int, max_len: int, gate: bool = True, d_model: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.blocks = nn.ModuleList([Block(d_model, 2, gate) for _ in range(2)])
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every place."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


study = Study(
    name="gated-gpt",
    question="Does a gate on the attention help a small GPT?",
    build=GPT,
    tasks=["copy", "sort"],
    recipe=Recipe(steps=100, learning_rate=3e-3, warm_up=10),
    variants=[Variant("gate"), Variant("no gate", "the gate on what attention brings", {"gate": False})],
)
