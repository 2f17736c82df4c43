"""P-tuning v2: every layer of an encoder gets PREFIX trained keys and values before those of the sequence."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject

PREFIX = 3


class PrefixAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.prefix_key = nn.Parameter(torch.randn(num_heads, PREFIX, self.head_dim))
        self.prefix_value = nn.Parameter(torch.randn(num_heads, PREFIX, self.head_dim))

    def _shape(self, tensor, bsz):
        return tensor.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden, attention_mask):
        bsz, tgt_len, _ = hidden.size()
        query = self._shape(self.q_proj(hidden), bsz)
        key = torch.cat([self.prefix_key.expand(bsz, -1, -1, -1), self._shape(self.k_proj(hidden), bsz)], dim=2)
        value = torch.cat([self.prefix_value.expand(bsz, -1, -1, -1), self._shape(self.v_proj(hidden), bsz)], dim=2)
        if attention_mask is not None:
            prefix_mask = attention_mask.new_ones(bsz, PREFIX)
            attention_mask = torch.cat([prefix_mask, attention_mask], dim=1)[:, None, None, :]
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return self.out_proj(output.transpose(1, 2).reshape(bsz, tgt_len, -1))


class PrefixEncoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim):
        super().__init__()
        self.self_attn = PrefixAttention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, hidden, attention_mask):
        residual = hidden
        hidden = self.self_attn(self.self_attn_layer_norm(hidden), attention_mask)
        hidden = residual + hidden
        residual = hidden
        hidden = self.fc2(F.gelu(self.fc1(self.final_layer_norm(hidden))))
        return residual + hidden


class PrefixEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            [PrefixEncoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)]
        )
        self.layer_norm = nn.LayerNorm(c.d_model)

    def forward(self, input_ids, attention_mask=None):
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        return self.layer_norm(hidden)


subject = Subject(
    kind="encoder",
    name="prefix-tuned encoder",
    build=PrefixEncoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "structure": "other",
    },
)
