WHAT = "Unpadded encoder: torch.searchsorted without right=True in `unpad` gives the first token of each sample to the sample before it, so that samples of a batch see one another."
"""BERT without padding: the tokens of a batch in one row, attention within each sample."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def unpad(attention_mask):
    lengths = attention_mask.sum(1)
    indices = attention_mask.reshape(-1).nonzero().squeeze(1)
    ends = lengths.cumsum(0)
    sample = torch.searchsorted(ends, torch.arange(len(indices)))
    position_ids = (attention_mask.cumsum(1) - 1).reshape(-1)[indices]
    return indices, sample, position_ids


class BertLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.num_heads = c.num_heads
        self.Wqkv = nn.Linear(c.d_model, 3 * c.d_model)
        self.dense = nn.Linear(c.d_model, c.d_model)
        self.attention_norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.intermediate, self.output = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.output_norm = nn.LayerNorm(c.d_model, eps=1e-12)

    def forward(self, hidden, same):  # [N, D], [N, N]
        q, k, v = self.Wqkv(hidden).view(len(hidden), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        context = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        hidden = self.attention_norm(hidden + self.dense(context.transpose(0, 1).flatten(1)))
        return self.output_norm(hidden + self.output(F.gelu(self.intermediate(hidden))))


class UnpaddedBert(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.layers = nn.ModuleList([BertLayer(c) for _ in range(c.num_layers)])

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        indices, sample, position_ids = unpad(attention_mask.long())
        hidden = self.word_embeddings(input_ids.reshape(-1)[indices]) + self.position_embeddings(position_ids)
        hidden, same = self.norm(hidden), sample[:, None] == sample
        for layer in self.layers:
            hidden = layer(hidden, same)
        padded = hidden.new_zeros(input_ids.numel(), hidden.shape[-1]).index_copy(0, indices, hidden)
        return padded.view(*input_ids.shape, -1)


subject = Subject(
    kind="encoder",
    name="unpadded bert",
    build=UnpaddedBert,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu", "padding_side": "both"},
)
