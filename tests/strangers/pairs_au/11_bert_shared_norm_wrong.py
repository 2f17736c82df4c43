WHAT = "one LayerNorm object is handed to both 'add and norm' of a layer (line 50): gain and bias, independent in a post-LN layer, are the same parameters"
"""A BERT encoder, post-LN, written with a wrapper for 'add and norm'."""
import torch
from torch import nn

from veriformer.properties import Subject


class AddNorm(nn.Module):
    """LayerNorm(x + Dropout(sublayer(x)))"""

    def __init__(self, norm, dropout):
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer_output):
        return self.norm(x + self.dropout(sublayer_output))


class BertSelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)

    def transpose_for_scores(self, x):
        return x.view(*x.size()[:-1], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x, extended_mask):
        q = self.transpose_for_scores(self.query(x))
        k = self.transpose_for_scores(self.key(x))
        v = self.transpose_for_scores(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / self.size**0.5
        if extended_mask is not None:
            scores = scores + extended_mask
        context = torch.matmul(nn.Softmax(dim=-1)(scores), v).permute(0, 2, 1, 3).contiguous()
        return self.dense(context.view(*context.size()[:-2], -1))


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate, dropout):
        super().__init__()
        self.attention = BertSelfAttention(hidden, heads)
        self.intermediate = nn.Linear(hidden, intermediate)
        self.output = nn.Linear(intermediate, hidden)
        norm = nn.LayerNorm(hidden, eps=1e-12)
        self.after_attention = AddNorm(norm, dropout)
        self.after_output = AddNorm(norm, dropout)

    def forward(self, x, extended_mask):
        x = self.after_attention(x, self.attention(x, extended_mask))
        return self.after_output(x, self.output(nn.functional.gelu(self.intermediate(x))))


class BertEncoder(nn.Module):
    def __init__(self, vocab, hidden, heads, layers, intermediate, max_len, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(max_len, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.layer = nn.ModuleList([BertLayer(hidden, heads, intermediate, dropout) for _ in range(layers)])

    def forward(self, input_ids, attention_mask=None):
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))
        extended_mask = None
        if attention_mask is not None:
            extended_mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layer:
            x = layer(x, extended_mask)
        return x


subject = Subject(
    kind="encoder",
    name="BertEncoder",
    build=lambda c: BertEncoder(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu",
        "padding_side": "right", "shared_layers": False, "bias": True,
    },
)
