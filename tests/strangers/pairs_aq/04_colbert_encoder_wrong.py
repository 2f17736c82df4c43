WHAT = 'late-interaction embeddings are normalised to length one over the tokens (dim=1) instead of over the channels: each output depends on all other positions, padded ones too (line 49: return F.normalize(self.linear(x), p=2, dim=1))'
"""ColBERT-style token encoder for retrieval: BERT trunk, projection, unit-length token vectors."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.intermediate, self.output = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=1e-12)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, extended_mask):
        context = F.scaled_dot_product_attention(
            self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x)), attn_mask=extended_mask
        )
        x = self.attention_norm(x + self.dense(context.transpose(1, 2).flatten(2)))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class ColBERT(nn.Module):
    def __init__(self, vocab, hidden, heads, layers, intermediate, max_positions):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(max_positions, hidden)
        self.embeddings_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layer = nn.ModuleList([BertLayer(hidden, heads, intermediate) for _ in range(layers)])
        self.linear = nn.Linear(hidden, hidden, bias=False)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embeddings_norm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))
        extended = torch.zeros(attention_mask.shape, dtype=x.dtype, device=x.device)
        extended = extended.masked_fill(~attention_mask, torch.finfo(x.dtype).min)[:, None, None, :]
        for layer in self.layer:
            x = layer(x, extended)
        return F.normalize(self.linear(x), p=2, dim=1)


subject = Subject(
    kind="encoder",
    name="ColBERT",
    build=lambda c: ColBERT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu",
              "padding_side": "right", "structure": "other"},
)
