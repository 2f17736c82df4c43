WHAT = "The MLP with its dropout is recomputed without restoring the random state: the backward uses another dropout mask than the forward, so that gradients are wrong in training (line 43)."
"""A pre-LN encoder layer whose MLP is recomputed in the backward, to save the memory of its hidden activations."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


class MLP(nn.Module):
    def __init__(self, n_embd, n_hidden, dropout):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, n_hidden)
        self.c_proj = nn.Linear(n_hidden, n_embd)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.c_proj(self.drop(F.gelu(self.c_fc(x))))


class Layer(nn.Module):
    def __init__(self, n_embd, n_head, n_hidden, dropout):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = MLP(n_embd, n_hidden, dropout)
        self.gradient_checkpointing = True

    def attend(self, x, attention_mask):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x, attention_mask=None):
        x = x + self.attend(self.ln_1(x), attention_mask)
        y = self.ln_2(x)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            y = checkpoint(self.mlp, y, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self.mlp(y)
        return x + y


subject = Subject(
    kind="layer",
    name="layer with a checkpointed MLP",
    build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "norm": "layer", "norm_placement": "pre", "activation": "gelu", "bias": True},
)
