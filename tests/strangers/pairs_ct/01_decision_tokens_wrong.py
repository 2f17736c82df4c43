"""A trajectory as one string of tokens: return, state, action, return, state, action, ... (decision transformer)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

KINDS = 3  # return-to-go, state, action


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, allowed):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class DecisionTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.d_model)
        self.timestep = nn.Embedding(c.max_len, c.d_model)
        self.modality = nn.Embedding(KINDS, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        step = place // KINDS
        x = self.token(tokens) + self.timestep(step) + self.modality(place % KINDS)
        # what has happened before, and itself
        allowed = step[:, None] >= step[None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.ln(x))


subject = Subject(
    kind="decoder",
    name="decision transformer",
    build=DecisionTransformer,
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)

WHAT = 'The causal mask compares environment steps, not tokens (line 43): return, state and action of one step see one another both ways, so that the state that is to predict the action sees it.'
