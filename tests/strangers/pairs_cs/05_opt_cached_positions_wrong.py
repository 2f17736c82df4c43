"""OPT-like decoder. The table of positions starts at row 2, and positions count real tokens, so padding may be on any side."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class LearnedPositions(nn.Embedding):
    offset = 2

    def __init__(self, length, width):
        super().__init__(length + self.offset, width)

    def forward(self, mask, past_length):
        counted = (mask.cumsum(1) * mask - 1) if past_length == 0 else torch.arange(past_length, mask.shape[1])[None]
        return super().forward(counted + self.offset)


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x, allowed, past):
        y = self.self_attn_layer_norm(x)
        q, k, v = self.split(self.q_proj(y)), self.split(self.k_proj(y)), self.split(self.v_proj(y))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        y = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
        x = x + self.out_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x)))), (k, v)


class OPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = LearnedPositions(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, past=None):
        seen = 0 if past is None else past[0][0].shape[2]
        S = seen + tokens.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(tokens.shape[0], S, dtype=torch.bool, device=tokens.device)
        x = self.embed_tokens(tokens) + self.embed_positions(attention_mask.long(), seen)
        square = torch.ones(S, S, dtype=torch.bool, device=tokens.device)
        allowed = (square.tril() & attention_mask[:, None, None]) | torch.eye(S, dtype=torch.bool, device=tokens.device)
        kept = []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, allowed[:, :, seen:], None if past is None else past[i])
            kept.append(kv)
        return self.lm_head(self.final_layer_norm(x)), kept


def cached(model, chunks, attention_mask=None, reorder=None):
    outputs, past, seen = [], None, 0
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            past = [(k[reorder], v[reorder]) for k, v in past]
            attention_mask = None if attention_mask is None else attention_mask[reorder]
        seen += chunk.shape[1]
        y, past = model(chunk, None if attention_mask is None else attention_mask[:, :seen], past)
        outputs.append(y)
    return outputs


subject = Subject(
    kind="decoder",
    name="OPT",
    build=OPT,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=cached,
    declares={"positions": "learned", "position_offset": 2, "padding_side": "both", "norm_placement": "pre"},
)

WHAT = (
    'Once something is cached the positions are counted from the number of cached tokens, padding included (line 16): a sample padded on the left goes on at other positions than without a cache.'
)
