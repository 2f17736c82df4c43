"""ALBERT style encoder: one layer used num_layers times, a narrow embedding mapped to d_model, einsum with [D, H, d] weights.

Unusual: the layers share all parameters on purpose; embeddings, positions and their norm have half the width of the model.
"""

import torch
import torch.nn as nn

from veriformer.properties import Subject


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


class DenseLayer3d(nn.Module):
    """A dense layer with a 3D kernel: [B, T, D] -> [B, T, H, d]."""

    def __init__(self, hidden_size, num_heads, head_size):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(hidden_size, num_heads, head_size) * hidden_size**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_heads, head_size))

    def forward(self, x):
        return torch.einsum("BFH,HND->BFND", x, self.kernel) + self.bias


class DenseLayer3dProj(nn.Module):
    """[B, T, H, d] -> [B, T, D]."""

    def __init__(self, hidden_size, num_heads, head_size):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(num_heads, head_size, hidden_size) * hidden_size**-0.5)
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x):
        return torch.einsum("BFND,NDH->BFH", x, self.kernel) + self.bias


class AlbertLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        head_size = c.d_model // c.num_heads
        self.rsqrt_head = head_size**-0.5
        self.query = DenseLayer3d(c.d_model, c.num_heads, head_size)
        self.key = DenseLayer3d(c.d_model, c.num_heads, head_size)
        self.value = DenseLayer3d(c.d_model, c.num_heads, head_size)
        self.dense = DenseLayer3dProj(c.d_model, c.num_heads, head_size)
        self.attention_norm = nn.LayerNorm(c.d_model)
        self.ffn = nn.Linear(c.d_model, c.d_ff)
        self.ffn_output = nn.Linear(c.d_ff, c.d_model)
        self.full_layer_norm = nn.LayerNorm(c.d_model)
        self.attention_dropout = nn.Dropout(c.dropout)
        self.dropout = nn.Dropout(c.dropout)

    def attend(self, x, mask):
        scores = torch.einsum("BTND,BFND->BNFT", self.key(x), self.query(x)) * self.rsqrt_head
        if mask is not None:
            adder = torch.zeros_like(scores).masked_fill(~mask[:, None, None, :], -10000.0)
            scores = scores + adder
        probs = torch.softmax(scores, dim=-1)
        if mask is not None:  # -10000 may leave a trace where scores are large; this leaves none
            probs = probs * mask[:, None, None, :]
            probs = probs / probs.sum(dim=-1, keepdim=True).clamp(min=1e-30)
        return self.dense(torch.einsum("BNFT,BTND->BFND", self.attention_dropout(probs), self.value(x)))

    def forward(self, x, mask):
        x = self.attention_norm(x + self.dropout(self.attend(x, mask)))
        return self.full_layer_norm(x + self.dropout(self.ffn_output(gelu_new(self.ffn(x)))))


class Albert(nn.Module):
    def __init__(self, c):
        super().__init__()
        narrow = max(2, c.d_model // 2)
        self.repeats = c.num_layers
        self.word_embeddings = nn.Embedding(c.vocab_size, narrow)
        self.position_embeddings = nn.Embedding(c.max_len, narrow)
        self.embedding_norm = nn.LayerNorm(narrow)
        self.embedding_hidden_mapping_in = nn.Linear(narrow, c.d_model)
        self.dropout = nn.Dropout(c.dropout)
        self.inner_group = AlbertLayer(c)

    def forward(self, ids, mask=None):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.word_embeddings(ids) + self.position_embeddings(places)
        x = self.embedding_hidden_mapping_in(self.dropout(self.embedding_norm(x)))
        for _ in range(self.repeats):
            x = self.inner_group(x, mask)
        return x


COMMON = dict(
    kind="encoder",
    build=Albert,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "right",
        "shared_layers": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu_tanh",
        "bias": True,
        "structure": "other",
    },
)
