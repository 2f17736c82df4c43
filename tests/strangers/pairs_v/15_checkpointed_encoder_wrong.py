WHAT = "The checkpointed function is a lambda that looks up `layer` late: in the backward every layer is computed again with the last layer's weights, so that the gradients of the earlier ones are wrong (line 46)."
"""Encoder with gradient checkpointing: activations of a layer are computed again in the backward."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import DrawnConfig, Subject


class Layer(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, allowed):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = self.norm_1(x + self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT's order of things: embeddings are normalised, norms follow the sums."""

    def __init__(self, c):
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.norm = nn.LayerNorm(c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        length = tokens.shape[1]
        allowed = None
        if attention_mask is not None:
            itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
            allowed = attention_mask[:, None, None] | itself
        x = self.norm(self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device)))
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = checkpoint(lambda h: layer(h, allowed), x, use_reentrant=False)
            else:
                x = layer(x, allowed)
        return x


subject = Subject(
    kind="encoder",
    name="encoder with checkpoints",
    build=Encoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu", "padding_side": "right"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 4, dtype=torch.long)).shape)
