WHAT = "talking heads (heads mixed before and after the softmax), LayerScale from 1e-4, DropPath, 2 registers in front and a class token behind that are cut off again, a dataclass with hidden states as output"
from dataclasses import dataclass

import torch
from torch import nn

REGISTERS = 2


@dataclass
class Output:
    last_hidden_state: torch.Tensor
    pooled: torch.Tensor
    hidden_states: tuple


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.p
        return x * keep.to(x.dtype) / (1 - self.p)


class Block(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h = h
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.before, self.after = nn.Linear(h, h), nn.Linear(h, h)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((d,), 1e-4)) for _ in range(2))
        self.fc1, self.fc2, self.path = nn.Linear(d, ff), nn.Linear(ff, d), DropPath(p)

    def attend(self, x, seen):
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        s = (q * (D // self.h) ** -0.5) @ k.transpose(-2, -1)
        s = self.before(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        w = s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1)
        w = self.after(w.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        w = w.masked_fill(~seen, 0.0)  # the bias of `after` must not bring hidden keys back
        return self.proj((w @ v).transpose(1, 2).reshape(B, N, D))

    def forward(self, x, seen):
        x = x + self.path(self.gamma1 * self.attend(self.norm1(x), seen))
        return x + self.path(self.gamma2 * self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))))


class CaiT(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len, p):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab, d), nn.Parameter(torch.randn(max_len, d) * 0.2)
        self.registers, self.cls = nn.Parameter(torch.randn(REGISTERS, d)), nn.Parameter(torch.randn(1, d))
        rates = torch.linspace(0, p, layers).tolist()
        self.blocks = nn.ModuleList(Block(d, h, ff, r) for r in rates)
        self.norm = nn.LayerNorm(d, eps=1e-6)

    def forward(self, ids, mask=None) -> Output:
        B, T = ids.shape
        if mask is None:
            mask = torch.ones(B, T, dtype=torch.bool, device=ids.device)
        x = self.embed(ids) + self.places[(mask.long().cumsum(1) - 1).clamp(min=0)]
        x = torch.cat([self.registers.expand(B, -1, -1), x, self.cls.expand(B, -1, -1)], 1)
        seen = nn.functional.pad(mask, (REGISTERS, 1), value=True)[:, None, None]
        states = []
        for block in self.blocks:
            states.append(x[:, REGISTERS:-1])
            x = block(x, seen)
        x = self.norm(x)
        return Output(x[:, REGISTERS:-1], x[:, -1], tuple(states))


from veriformer.properties import Subject


def build(c):
    return CaiT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask).last_hidden_state


undeclared = Subject(kind="encoder", build=build, forward=forward)
declared = Subject(
    kind="encoder", name="talking heads", build=build, forward=forward,
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "structure": "other", "init": "other", "padding_side": "both", "drop_path_scaled": True},
)
