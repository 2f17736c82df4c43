"""Whisper's shape on tokens: two convolutions (the second halves the length), sinusoids, a learned-place decoder."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


def sinusoids(length, channels, like):
    half = -(-channels // 2)
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=like.device) / max(half - 1, 1))
    angle = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)[:, :channels].to(like.dtype)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.key = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state, bias=False)
        self.value, self.out = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, see=None):
        xa = x if xa is None else xa
        q, k, v = self.query(x), self.key(xa), self.value(xa)
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = (q @ k).masked_fill(~see, torch.finfo(q.dtype).min)
        w = F.softmax(qk, dim=-1)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state, n_head, n_mlp, cross=False):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(n_state, n_head), nn.LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross else None
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, see, xa=None, xa_see=None):
        x = x + self.attn(self.attn_ln(x), see=see)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, see=xa_see)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.max_len = c.max_len
        self.source = nn.Embedding(c.vocab_size, d)
        self.conv1 = nn.Conv1d(d, d, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(d, d, kernel_size=3, stride=2, padding=1)
        self.enc = nn.ModuleList([ResidualAttentionBlock(d, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_post = nn.LayerNorm(d)
        self.token_embedding, self.positional_embedding = nn.Embedding(c.vocab_size, d), nn.Parameter(torch.randn(c.max_len, d))
        self.dec = nn.ModuleList([ResidualAttentionBlock(d, c.num_heads, c.d_ff, True) for _ in range(c.num_layers)])
        self.ln = nn.LayerNorm(d)

    def encode(self, source, mask):
        if source.shape[1] > self.max_len:
            raise ValueError("incorrect source shape")
        keep = mask[:, None].to(self.source.weight.dtype)  # what is no input is as silent as what lies outside
        x = self.source(source).transpose(1, 2) * keep
        x = F.gelu(self.conv1(x)) * keep
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        half = mask[:, ::2]
        x = x + sinusoids(x.shape[1], x.shape[2], x)
        for block in self.enc:
            x = block(x, half[:, None, None])
        return self.ln_post(x), half

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask.bool()
        xa, xa_mask = self.encode(source, source_mask)
        t = target.shape[1]
        see = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            see = see & target_mask.bool()[:, None, None]
        x = self.token_embedding(target) + self.positional_embedding[:t]
        for block in self.dec:
            x = block(x, see, xa, xa_mask[:, None, None])
        return self.ln(x) @ self.token_embedding.weight.transpose(0, 1)


def forward(model, source, target, source_mask=None, target_mask=None):
    return model(source, target, source_mask, target_mask)


declared = Subject(
    kind="encoder_decoder", name="Whisper's shape", build=Whisper, forward=forward,
    declares={
        "causal": True, "positions": "other", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "residual": True, "activation": "gelu", "output_bias": False, "tied": True, "padding_side": "right",
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "error", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="encoder_decoder", build=Whisper, forward=forward)
