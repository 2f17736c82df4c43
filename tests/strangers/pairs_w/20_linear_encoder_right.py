"""An encoder with linear attention (elu + 1): keys and values are summed once, whatever the length."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject


def feature(x: Tensor) -> Tensor:
    return F.elu(x) + 1


class LinearAttention(nn.Module):
    """y_t = phi(q_t) . sum_s phi(k_s) v_s / phi(q_t) . sum_s phi(k_s), over real tokens s."""

    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)) for w in (self.wq, self.wk, self.wv))
        q = feature(q)
        if mask is None:
            k = feature(k)
        else:
            real = mask[:, :, None, None].to(x.dtype)
            k = feature(k) * real
            v = v * real
        memory = torch.einsum("bshd,bshe->bhde", k, v)
        total = torch.einsum("bthd,bhd->bth", q, k.sum(dim=1))
        y = torch.einsum("bthd,bhde->bthe", q, memory) / total.clamp(min=1e-6)[..., None]
        return self.wo(y.flatten(2))


class EncoderBlock(nn.Module):
    """Post-norm, as in the original."""

    def __init__(self, dim: int, n_heads: int, hidden: int):
        super().__init__()
        self.attn = LinearAttention(dim, n_heads)
        self.attn_norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.ffn_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attn_norm(x + self.attn(x, mask))
        return self.ffn_norm(x + self.fc2(F.relu(self.fc1(x))))


class LinearEncoder(nn.Module):
    def __init__(self, vocab: int, dim: int, n_heads: int, depth: int, hidden: int, max_len: int):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.emb_norm = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList([EncoderBlock(dim, n_heads, hidden) for _ in range(depth)])

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.emb_norm(self.tok(ids) + self.pos(place))
        for block in self.blocks:
            x = block(x, mask)
        return x


subject = Subject(
    kind="encoder",
    name="linear-attention encoder",
    build=lambda c: LinearEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
        "structure": "other",
    },
)
