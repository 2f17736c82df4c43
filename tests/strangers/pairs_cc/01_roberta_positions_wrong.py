WHAT = "the table's position ids start at padding_idx instead of padding_idx + 1 when no attention mask is given (line 31), so the first token reads the padding row and the same input with a full mask gives other states"
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def attend(q, k, v, ok):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~ok, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(~ok, 0.0) @ v


PAD = 1


class RobertaEmbeddings(nn.Module):
    def __init__(self, vocab, width, max_len, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)
        self.position_embeddings = nn.Embedding(max_len + PAD + 1, width, padding_idx=PAD)
        self.LayerNorm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def position_ids(self, input_ids, attention_mask):
        if attention_mask is None:
            length = input_ids.shape[1]
            ids = torch.arange(PAD, PAD + length, device=input_ids.device)
            return ids.unsqueeze(0).expand(input_ids.shape)
        mask = attention_mask.long()
        return torch.cumsum(mask, dim=1) * mask + PAD

    def forward(self, input_ids, attention_mask=None):
        states = self.word_embeddings(input_ids)
        states = states + self.position_embeddings(self.position_ids(input_ids, attention_mask))
        return self.dropout(self.LayerNorm(states))


class RobertaLayer(nn.Module):
    def __init__(self, width, heads, inner, dropout):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.intermediate, self.output = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, ok):
        y = attend(self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x)), ok)
        x = self.norm1(x + self.dropout(self.dense(y.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class RobertaModel(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner, max_len, dropout):
        super().__init__()
        self.embeddings = RobertaEmbeddings(vocab, width, max_len, dropout)
        self.layer = nn.ModuleList(RobertaLayer(width, heads, inner, dropout) for _ in range(layers))

    def forward(self, input_ids, attention_mask=None):
        x = self.embeddings(input_ids, attention_mask)
        seen = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        for layer in self.layer:
            x = layer(x, seen[:, None, None, :])
        return x


subject = Subject(
    kind="encoder",
    name="roberta",
    build=lambda c: RobertaModel(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "position_offset": PAD + 1, "norm": "layer",
              "norm_placement": "post", "activation": "gelu", "bias": True, "padding_side": "both"},
)
