"""Linear attention with elu + 1, in chunks: quadratic inside, a running state between; the state is the cache."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject

CHUNK = 3


def linear_attention(q, k, v, state):
    """q, k, v [B, H, T, K]; state (S [B, H, K, K], z [B, H, K]) of all before."""
    S, z = state
    out = []
    for q_c, k_c, v_c in zip(q.split(CHUNK, 2), k.split(CHUNK, 2), v.split(CHUNK, 2)):
        inner = (q_c @ k_c.mT).tril()
        above = inner @ v_c + q_c @ S
        below = inner.sum(-1, keepdim=True) + (q_c @ z[..., None])
        out.append(above / torch.where(below == 0, 1.0, below))  # 0: nothing but padding so far
        S, z = S + k_c.mT @ v_c, z + k_c.sum(2)
    return torch.cat(out, 2), (S, z)


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.fc, self.proj = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x, real, state):
        b, t, d = x.shape
        y = self.ln1(x)
        q, k, v = (f(y).view(b, t, self.h, d // self.h).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if real is not None:
            k = torch.where(real[:, None, :, None], k, 0.0)
        if state is None:
            state = (q.new_zeros(b, self.h, d // self.h, d // self.h), q.new_zeros(b, self.h, d // self.h))
        y, state = linear_attention(q, k, v, state)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.proj(F.relu(self.fc(self.ln2(x)))), state


class LinearGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d = c.d_model
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln = nn.LayerNorm(c.d_model)

    def forward(self, tokens, mask=None, states=None, start=0):
        place = torch.arange(start, start + tokens.shape[1], device=tokens.device, dtype=torch.float64)[:, None]
        channel = torch.arange(self.d, device=tokens.device)
        angle = place / 10000.0 ** ((channel - channel % 2).double() / self.d)
        x = self.emb(tokens)
        x = x + torch.where(channel % 2 == 0, angle.sin(), angle.cos()).to(x.dtype)
        states = [None] * len(self.blocks) if states is None else states
        new = []
        for block, state in zip(self.blocks, states):
            x, state = block(x, mask, state)
            new.append(state)
        return F.linear(self.ln(x), self.emb.weight), new


def forward(model, tokens, attention_mask=None):
    return model(tokens, None if attention_mask is None else attention_mask.bool())[0]


def cache(model, chunks, attention_mask=None, reorder=None):
    outputs, states, start = [], None, 0
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            states = [(S[reorder], z[reorder]) for S, z in states]
            attention_mask = None if attention_mask is None else attention_mask[reorder]
        stop = start + chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, start:stop].bool()
        out, states = model(chunk, mask, states, start)
        outputs.append(out)
        start = stop
    return torch.cat(outputs, 1)


declared = Subject(
    kind="decoder", name="chunked linear attention", build=LinearGPT, forward=forward, cache=cache,
    declares={
        "causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "relu", "bias": False, "output_bias": False, "tied": True,
        "padding_side": "right", "beyond_max_len": "works", "structure": "other", "memory": "linear", "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=LinearGPT, forward=forward)
