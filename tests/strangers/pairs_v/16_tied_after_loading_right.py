"""GPT that is loaded from the state of a checkpoint; the tied output projection is tied again behind it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        nn.init.normal_(self.tokens.weight, std=c.d_model**-0.5)
        self.tie()

    def tie(self):
        """The output projection and the embedding of tokens are one."""
        self.head.weight = self.tokens.weight

    def load(self, state):
        """Checkpoints have no output projection of their own."""
        missing, unknown = self.load_state_dict(state, strict=False, assign=True)
        if unknown or set(missing) - {"head.weight"}:
            raise ValueError(f"not a checkpoint of this model: {missing}, {unknown}")
        self.tie()
        return self

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(c):
    """A fresh checkpoint, as it is saved, loaded into a model."""
    saved = {name: value.detach().clone() for name, value in GPT(c).state_dict().items() if name != "head.weight"}
    return GPT(c).load(saved)


subject = Subject(
    kind="decoder",
    name="GPT from a checkpoint",
    build=build,
    forward=lambda model, tokens: model(tokens),
    declares={"tied": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 4, dtype=torch.long)).shape)
