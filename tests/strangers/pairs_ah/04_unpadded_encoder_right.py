"""ModernBERT-like: padding is taken out, all sequences lie behind one another, and go back at the end."""
import torch
from torch import Tensor, nn

from veriformer.properties import Subject


def unpad(mask: Tensor):
    """Indices of the real tokens in the flat batch, and where each sequence ends among them."""
    indices = mask.flatten().nonzero().squeeze(1)
    ends = mask.sum(1).cumsum(0)
    return indices, ends


class UnpaddedAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(width, 3 * width)
        self.Wo = nn.Linear(width, width)

    def forward(self, x: Tensor, same: Tensor) -> Tensor:  # x [N, D], same [N, N]
        q, k, v = self.Wqkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        scores = torch.einsum("nhc,mhc->hnm", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~same, -torch.inf).softmax(-1)
        return self.Wo(torch.einsum("hnm,mhc->nhc", weights, v).flatten(1))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = UnpaddedAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, same: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), same)
        return x + self.mlp(self.mlp_norm(x))


class UnpaddedEncoder(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, layers: int, hidden: int, max_len: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, hidden) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        mask = mask.bool()
        indices, ends = unpad(mask)
        place = (mask.long().cumsum(1) - 1).flatten()[indices]
        x = self.tokens(tokens.flatten()[indices]) + self.places(place)
        sequence = torch.searchsorted(ends, torch.arange(len(indices), device=x.device), right=True)
        same = sequence[:, None] == sequence[None, :]
        for layer in self.layers:
            x = layer(x, same)
        x = self.final_norm(x)
        padded = x.new_zeros(tokens.numel(), x.shape[-1]).index_copy(0, indices, x)
        return padded.unflatten(0, tokens.shape)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=lambda c: UnpaddedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm_placement": "pre", "norm": "layer", "final_norm": True,
              "activation": "gelu", "padding_side": "both"},
)
