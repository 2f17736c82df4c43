WHAT = "dropout_p is handed to scaled_dot_product_attention whether or not the model trains: the function drops whatever it is told to, and eval() still draws attention weights at random (line 60)."
"""An encoder in the manner of ModernBERT: rotary positions, no biases, GeGLU, fused attention."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class ModernBertEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, dropout):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, input_ids):
        return self.drop(self.norm(self.tok_embeddings(input_ids)))


class ModernBertMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size, dropout):
        super().__init__()
        self.Wi = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.drop = nn.Dropout(dropout)
        self.Wo = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        hidden, gate = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(self.drop(F.gelu(hidden) * gate))


class ModernBertAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, dropout):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        if self.head_dim % 2:
            raise ValueError("an even head_dim, please")
        self.attn_dropout = dropout
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.Wo = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out_drop = nn.Dropout(dropout)

    def rotate(self, x):
        inv_freq = 10000.0 ** -(torch.arange(0, self.head_dim, 2, dtype=x.dtype, device=x.device) / self.head_dim)
        freqs = torch.arange(x.size(-2), dtype=x.dtype, device=x.device).outer(inv_freq)
        cos, sin = freqs.cos().repeat(1, 2), freqs.sin().repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def forward(self, x, mask):
        bs, length, width = x.shape
        qkv = self.Wqkv(x).view(bs, length, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.transpose(3, 1).unbind(dim=2)
        out = F.scaled_dot_product_attention(
            self.rotate(query),
            self.rotate(key),
            value,
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.attn_dropout)
        return self.out_drop(self.Wo(out.transpose(1, 2).reshape(bs, length, width)))


class ModernBertLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout):
        super().__init__()
        self.attn_norm = nn.LayerNorm(hidden_size, bias=False)
        self.attn = ModernBertAttention(hidden_size, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden_size, bias=False)
        self.mlp = ModernBertMLP(hidden_size, intermediate_size, dropout)

    def forward(self, x, mask):
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class ModernBert(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, intermediate_size, dropout=0.1):
        super().__init__()
        self.embeddings = ModernBertEmbeddings(vocab_size, hidden_size, dropout)
        self.layers = nn.ModuleList(
            [ModernBertLayer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)]
        )
        self.final_norm = nn.LayerNorm(hidden_size, bias=False)

    def forward(self, input_ids, attention_mask=None):
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.final_norm(x)


subject = Subject(
    kind="encoder",
    name="ModernBERT",
    build=lambda c: ModernBert(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "halves",
        "norm": "layer",
        "norm_bias": False,
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "other",
        "bias": False,
        "padding_side": "both",
        "structure": "other",
    },
)
