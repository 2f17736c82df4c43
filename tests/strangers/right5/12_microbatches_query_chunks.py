WHAT = "the forward runs the batch two rows at a time, attention three queries at a time with a float32 softmax; OPT positions: counted from the mask, offset 2, padding at 1"
import torch
from torch import nn

OFFSET, ROWS, QUERIES = 2, 2, 3


class LearnedPositions(nn.Embedding):
    def __init__(self, n, d):
        super().__init__(n + OFFSET, d)

    def forward(self, mask):
        at = torch.cumsum(mask.long(), dim=1) * mask.long() - 1
        return super().forward(at + OFFSET)


class Layer(nn.Module):
    def __init__(self, d, h, ff, dropout):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2, self.dropout = nn.Linear(d, ff), nn.Linear(ff, d), dropout

    def forward(self, x, mask):
        B, T, D = x.shape
        n = self.self_attn_layer_norm(x)
        q, k, v = (f(n).view(B, T, self.h, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = q * (D // self.h) ** -0.5
        key = torch.arange(T, device=x.device)
        parts = []
        for start in range(0, T, QUERIES):
            piece = q[:, :, start : start + QUERIES]
            last = start + piece.shape[2]
            s = piece @ k[:, :, :last].transpose(2, 3)
            seen = (key[None, :last] <= key[start:last, None]) & mask[:, None, None, :last]
            s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
            w = torch.softmax(s, -1, dtype=torch.promote_types(s.dtype, torch.float32)).to(s.dtype)
            parts.append(w @ v[:, :, :last])
        y = torch.cat(parts, 2).transpose(1, 2).reshape(B, T, D)
        x = x + self.dropout(self.out_proj(y))
        return x + self.dropout(self.fc2(torch.relu(self.fc1(self.final_layer_norm(x)))))


class OPT(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len, p):
        super().__init__()
        self.dropout = nn.Dropout(p)  # one module, shared by all layers
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab, d), LearnedPositions(max_len, d)
        self.layers = nn.ModuleList(Layer(d, h, ff, self.dropout) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(d)

    def rows(self, ids, mask):
        x = self.embed_tokens(ids) + self.embed_positions(mask)
        for layer in self.layers:
            x = layer(x, mask)
        return self.final_layer_norm(x) @ self.embed_tokens.weight.T

    def forward(self, ids, mask=None):
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        return torch.cat([self.rows(a, b) for a, b in zip(ids.split(ROWS), mask.split(ROWS))])


from veriformer.properties import Subject


def build(c):
    return OPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="micro-batched opt", build=build, forward=forward,
    declares={"positions": "learned", "position_offset": OFFSET, "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "relu", "tied": True, "bias": True, "output_bias": False, "padding_side": "both",
              "beyond_max_len": "error"},
)
