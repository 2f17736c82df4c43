import math
import torch
from torch import nn


class AlibiDecoder(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers):
        super().__init__()
        self.h = num_heads
        self.emb = nn.Embedding(vocab_size, hidden_size)
        self.qkv = nn.ModuleList([nn.Linear(hidden_size, 3 * hidden_size) for _ in range(num_layers)])
        self.o = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)])
        self.ln = nn.ModuleList([nn.LayerNorm(hidden_size) for _ in range(num_layers)])
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.register_buffer("slopes", torch.tensor([2 ** (-8 * (i + 1) / num_heads) for i in range(num_heads)]))

    def forward(self, input_ids, attention_mask=None, return_dict=False):
        B, T = input_ids.shape
        x = self.emb(input_ids)
        pos = torch.arange(T, device=x.device)
        bias = -(pos[:, None] - pos[None, :]).to(x.dtype) * self.slopes[:, None, None].to(x.dtype)
        bias = bias.masked_fill(pos[:, None] < pos[None, :], float("-inf"))[None]
        if attention_mask is not None:
            bias = bias + (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e9
        for qkv, o, ln in zip(self.qkv, self.o, self.ln):
            q, k, v = qkv(ln(x)).view(B, T, 3, self.h, -1).permute(2, 0, 3, 1, 4)
            w = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + bias).softmax(-1)
            x = x + o((w @ v).transpose(1, 2).reshape(B, T, -1))
        return self.head(x)
