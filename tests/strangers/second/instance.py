import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, V, D, H, L, M):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(M, D)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(L))
        self.o = nn.ModuleList(nn.Linear(D, D) for _ in range(L))
        self.H = H

    def forward(self, ids):
        B, T = ids.shape
        x = self.wte(ids) + self.wpe.weight[:T]
        for qkv, o in zip(self.qkv, self.o):
            q, k, v = (a.view(B, T, self.H, -1).transpose(1, 2) for a in qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, -1))
            x = x + o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))
        return x @ self.wte.weight.T


torch.manual_seed(0)
model = Model(V=50, D=24, H=3, L=2, M=40)
