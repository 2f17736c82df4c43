import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_args(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("--vocab-size", type=int, default=120)
    p.add_argument("--emb", type=int, default=48)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--ffn", type=int, default=96)
    p.add_argument("--seq-len", type=int, default=64)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--lr", type=float, default=3e-4)
    return p.parse_args(argv)


class SelfAttn(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.qkv = nn.Linear(args.emb, args.emb * 3)
        self.out = nn.Linear(args.emb, args.emb)

    def forward(self, x):
        b, t, e = x.shape
        h = self.args.heads
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = [z.reshape(b, t, h, e // h).transpose(1, 2) for z in (q, k, v)]
        p = self.args.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(b, t, e))


class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.ln1 = nn.LayerNorm(args.emb)
        self.ln2 = nn.LayerNorm(args.emb)
        self.attn = SelfAttn(args)
        self.fc1 = nn.Linear(args.emb, args.ffn)
        self.fc2 = nn.Linear(args.ffn, args.emb)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        h = F.relu(self.fc1(self.ln2(x)))
        h = F.dropout(h, p=self.args.dropout)
        return x + self.fc2(h)


class LanguageModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok = nn.Embedding(args.vocab_size, args.emb)
        self.pos = nn.Embedding(args.seq_len, args.emb)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.depth))
        self.ln = nn.LayerNorm(args.emb)
        self.head = nn.Linear(args.emb, args.vocab_size)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


if __name__ == "__main__":
    args = get_args()
    net = LanguageModel(args)
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    print(sum(p.numel() for p in net.parameters()))
