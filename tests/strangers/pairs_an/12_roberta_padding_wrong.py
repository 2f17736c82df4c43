WHAT = '_init_weights draws the embedding tables again, the row of padding_idx too, and does not put it back to zero; it gets no gradient and stays noise forever (line 42: elif isinstance(module, nn.Embedding):)'
"""RoBERTa's encoder: positions count real tokens from padding_idx + 1 on, and the padding token has no embedding."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PAD = 1


class RobertaLayer(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(hidden, 3 * hidden)
        self.out_proj = nn.Linear(hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=1e-5), nn.LayerNorm(hidden, eps=1e-5)
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x, visible):
        b, t, d = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :].expand(b, 1, t, t))
        x = self.norm1(x + self.out_proj(y.transpose(1, 2).reshape(b, t, d)))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class RobertaModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(c.max_len + PAD + 1, c.d_model, padding_idx=PAD)
        self.norm = nn.LayerNorm(c.d_model, eps=1e-5)
        self.layers = nn.ModuleList([RobertaLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()

    def forward(self, input_ids, attention_mask=None):
        visible = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        position_ids = visible.long().cumsum(dim=1) * visible.long() + PAD
        x = self.norm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))
        for layer in self.layers:
            x = layer(x, visible)
        return x


subject = Subject(
    kind="encoder",
    name="RoBERTa",
    build=RobertaModel,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "padding_idx": PAD, "position_offset": PAD + 1, "norm": "layer",
        "norm_placement": "post", "activation": "gelu", "bias": True, "padding_side": "both",
    },
)
