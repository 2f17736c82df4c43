import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import DrawnConfig, Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, position_ids):
    """x [B, H, T, K], position_ids [B, T]; pairs are (i, i + K/2)."""
    half = x.size(-1) // 2
    inv_freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = position_ids[:, None, :, None].double() * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = RMSNorm(dim), RMSNorm(dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, position_ids, allowed, past):
        B, T, D = x.shape
        h = self.input_norm(x)
        q, k, v = (p(h).view(B, T, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, position_ids), rotate(k, position_ids)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o_proj(out.transpose(1, 2).reshape(B, T, D))
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), (k, v)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.d_head % 2:
            raise ValueError("rotary positions need heads of even width")
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(LlamaLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past=None):
        B, T = input_ids.shape
        start = 0 if past is None else past[0][0].size(2)
        if attention_mask is None:
            attention_mask = torch.ones(B, start + T, dtype=torch.bool, device=input_ids.device)
        if past is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        else:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, start:]
        rows = torch.arange(start, start + T, device=input_ids.device)[:, None]
        columns = torch.arange(start + T, device=input_ids.device)[None, :]
        # a padded query keeps itself, so that no row is empty
        allowed = ((columns <= rows) & attention_mask[:, None, None, :].bool()) | (columns == rows)
        x, presents = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, position_ids, allowed, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.norm(x)), presents


def cached(model, chunks, attention_mask=None):
    past, outputs, end = None, [], 0
    for chunk in chunks:
        end += chunk.size(1)
        logits, past = model(chunk, None if attention_mask is None else attention_mask[:, :end], past)
        outputs.append(logits)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="Llama, batched with left padding",
    build=Llama,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "padding_side": "both",
    },
)
