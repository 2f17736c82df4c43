WHAT = "the residual of the feed-forward sublayer is the layer's input instead of the attention's output (line 55, wrong variable)"
"""A layer of BERT in the manner of Hugging Face: SelfOutput and Output add their residual and normalise (post-LN)."""
import torch
from torch import nn

from veriformer.properties import Subject


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = self.dropout(scores.softmax(dim=-1))
        return (probs @ v).permute(0, 2, 1, 3).flatten(2)


class BertOutput(nn.Module):
    def __init__(self, in_size, hidden_size, dropout):
        super().__init__()
        self.dense = nn.Linear(in_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout=0.0):
        super().__init__()
        self.self = BertSelfAttention(hidden_size, num_heads, dropout)
        self.attention_output = BertOutput(hidden_size, hidden_size, dropout)
        self.intermediate = nn.Sequential(nn.Linear(hidden_size, intermediate_size), nn.GELU())
        self.output = BertOutput(intermediate_size, hidden_size, dropout)

    def forward(self, hidden_states, attention_mask=None):
        context = self.self(hidden_states, attention_mask)
        attention_output = self.attention_output(context, hidden_states)
        intermediate = self.intermediate(attention_output)
        return self.output(intermediate, hidden_states)


def run(model, x, attention_mask=None):
    if attention_mask is not None:
        hidden = ~attention_mask[:, None, None, :]
        attention_mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
    return model(x, attention_mask)


subject = Subject(
    kind="layer",
    name="BERT layer",
    build=lambda c: BertLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=run,
    declares={"causal": False, "norm": "layer", "norm_placement": "post", "activation": "gelu", "residual": True, "bias": True},
)
