"""Encoder with linear attention (Katharopoulos et al. 2020), feature map elu + 1, for long inputs."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def linear_attention(q, k, v, mask=None, eps=1e-6):
    """q, k, v [N, L, H, D]; mask [N, L], True where a key may be seen."""
    Q, K = F.elu(q) + 1, F.elu(k) + 1
    if mask is not None:
        K = K * mask[:, :, None, None].to(K.dtype)
    KV = torch.einsum("nshd,nshm->nhmd", K, v)
    Z = 1 / (torch.einsum("nlhd,nhd->nlh", Q, K.sum(dim=1)) + eps)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", Q, KV, Z)


class Layer(nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.linear1, self.linear2 = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, mask):
        N, L, d = x.shape
        q, k, v = (f(x).view(N, L, self.heads, -1) for f in (self.query, self.key, self.value))
        x = self.norm1(x + self.out(linear_attention(q, k, v, mask).reshape(N, L, d)))
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class LinearEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


subject = Subject(
    kind="encoder",
    name="linear attention encoder",
    build=LinearEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "structure": "other",
    },
)
