import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from veriformer.properties import DrawnConfig, Subject


class BertSelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, extended):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        if extended is not None:
            scores = scores.masked_fill(~extended, torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(dim=-1), v)
        return self.dense(context.permute(0, 2, 1, 3).reshape(x.shape))


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate):
        super().__init__()
        self.attention = BertSelfAttention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.intermediate = nn.Linear(hidden, intermediate)
        self.output = nn.Linear(intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x, extended):
        x = self.attention_norm(x + self.attention(x, extended))
        return self.output_norm(x + self.output(nn.functional.gelu(self.intermediate(x))))


class Bert(nn.Module):
    """An encoder that keeps no activations of its layers: they are computed again in the backward."""

    def __init__(self, vocab_size, hidden, heads, layers, intermediate, max_positions):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden)
        self.position_embeddings = nn.Embedding(max_positions, hidden)
        self.embedding_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.ModuleList([BertLayer(hidden, heads, intermediate) for _ in range(layers)])

    def forward(self, input_ids, attention_mask=None):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding_norm(self.word_embeddings(input_ids) + self.position_embeddings(positions))
        extended = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = checkpoint(layer, x, extended, use_reentrant=False)
            else:
                x = layer(x, extended)
        return x


subject = Subject(
    kind="encoder",
    name="BERT with gradient checkpointing",
    build=lambda c: Bert(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "right",
    },
)
