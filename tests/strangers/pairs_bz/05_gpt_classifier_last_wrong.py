WHAT = "The last token is looked up as the number of real tokens minus one, which is not its index when padding is on the left (line 59)"
"""GPT for sequence classification (rotary, so that padding on either side is fine): the last real token is pooled."""
import torch
from torch import nn

from veriformer.properties import Subject

NEG = -1e30


class RotaryAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        assert (width // heads) % 2 == 0, "even head width needed"
        self.heads = heads
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))

    def rotate(self, x):
        d = x.size(-1)
        theta = 10000.0 ** (-torch.arange(0, d, 2, device=x.device).to(x.dtype) / d)
        phase = torch.arange(x.size(-2), device=x.device).to(x.dtype)[:, None] * theta
        even, odd = x[..., 0::2], x[..., 1::2]
        pairs = (even * phase.cos() - odd * phase.sin(), even * phase.sin() + odd * phase.cos())
        return torch.stack(pairs, dim=-1).flatten(-2)

    def forward(self, x, mask):
        B, T, C = x.shape
        split = lambda z: z.view(B, T, self.heads, -1).transpose(1, 2)
        q, k, v = self.rotate(split(self.query(x))), self.rotate(split(self.key(x))), split(self.value(x))
        scores = q @ k.mT / (C // self.heads) ** 0.5
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~(causal & mask[:, None, None, :]), NEG)
        scores = scores.masked_fill(~causal, float("-inf"))
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, T, C))


class GPTForSequenceClassification(nn.Module):
    def __init__(self, vocab, width, heads, depth, hidden, num_labels):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.attn = nn.ModuleList(RotaryAttention(width, heads) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(depth)
        )
        self.ln_1 = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ln_2 = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.score = nn.Linear(width, num_labels, bias=False)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.wte(input_ids)
        for attn, mlp, ln_1, ln_2 in zip(self.attn, self.mlp, self.ln_1, self.ln_2):
            x = x + attn(ln_1(x), attention_mask)
            x = x + mlp(ln_2(x))
        logits = self.score(self.ln_f(x))
        steps = torch.arange(input_ids.size(1), device=input_ids.device)
        last = attention_mask.sum(dim=1).clamp(min=1) - 1
        return logits[torch.arange(input_ids.size(0), device=input_ids.device), last]


subject = Subject(
    kind="classifier",
    name="gpt classifier",
    build=lambda c: GPTForSequenceClassification(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "rotary", "layout": "interleaved", "norm_placement": "pre",
              "final_norm": True, "pooling": "last", "padding_side": "both", "output_bias": False},
)
