"""GPT-J's parallel block with one norm, partial interleaved rotary, and PaLM's single key-value head."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

ROTARY = 2


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_pos_emb(x, sin, cos):  # x [B, T, H, R]
    sin, cos = (z[None, :, None, :].repeat_interleave(2, 3) for z in (sin, cos))
    return x * cos + rotate_every_two(x) * sin


class GPTJBlock(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.h, self.k = h, d // h
        if self.k < ROTARY:
            raise ValueError("heads narrower than the rotary part")
        self.ln_1 = nn.LayerNorm(d)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, self.k, bias=False), nn.Linear(d, self.k, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)
        self.fc_in, self.fc_out, self.drop = nn.Linear(d, f), nn.Linear(f, d), nn.Dropout(p)

    def attend(self, x, hidden):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.h, self.k)
        k = self.k_proj(x).view(b, t, 1, self.k)
        rate = 10000 ** (-torch.arange(0, ROTARY, 2, dtype=torch.float64, device=x.device) / ROTARY)
        angle = torch.arange(t, dtype=torch.float64, device=x.device)[:, None] * rate
        sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
        q = torch.cat([apply_rotary_pos_emb(q[..., :ROTARY], sin, cos), q[..., ROTARY:]], -1)
        k = torch.cat([apply_rotary_pos_emb(k[..., :ROTARY], sin, cos), k[..., ROTARY:]], -1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), self.v_proj(x)[:, None]
        w = torch.matmul(q, k.transpose(-1, -2)) / self.k**0.5
        w = torch.where(hidden, torch.finfo(w.dtype).min, w).softmax(-1)
        return self.out_proj(torch.matmul(w, v).permute(0, 2, 1, 3).reshape(b, t, d))

    def forward(self, x, hidden):
        y = self.ln_1(x)
        mlp = self.fc_out(nn.functional.gelu(self.fc_in(y), approximate="tanh"))
        return self.drop(self.attend(y, hidden)) + self.drop(mlp) + x


class GPTJ(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([GPTJBlock(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, ids, mask=None):
        t = ids.shape[1]
        hidden = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)[None, None]
        if mask is not None:
            hidden = hidden | (mask == 0)[:, None, None, :]
        x = self.wte(ids)
        for block in self.h:
            x = block(x, hidden)
        return self.lm_head(self.ln_f(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="parallel blocks", build=GPTJ, forward=forward,
    declares={
        "causal": True, "positions": "rotary", "rotary_dim": ROTARY, "layout": "interleaved", "norm": "layer",
        "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "gelu_tanh", "output_bias": True,
        "tied": False, "grouped_queries": True, "padding_side": "both", "attention_scale": "1/sqrt(d_head)",
        "beyond_max_len": "works", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=GPTJ, forward=forward)
