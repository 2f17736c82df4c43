import argparse
import torch
import torch.nn as nn


class TransformerLM(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.embed_dim)
        self.pos = nn.Parameter(torch.zeros(1, args.max_length, args.embed_dim))
        nn.init.normal_(self.pos, std=0.02)
        layer = nn.TransformerEncoderLayer(args.embed_dim, args.num_heads, args.ffn_dim, args.dropout,
                                           batch_first=True, norm_first=args.pre_norm)
        self.encoder = nn.TransformerEncoder(layer, args.num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.embed_dim, args.vocab_size)

    def forward(self, x):
        T = x.size(1)
        h = self.embed(x) + self.pos[:, :T]
        mask = torch.triu(torch.ones(T, T, device=x.device, dtype=torch.bool), diagonal=1)
        h = self.encoder(h, mask=mask)
        return {"logits": self.head(h), "hidden": h}


def get_args(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("--vocab_size", type=int, default=10000)
    p.add_argument("--embed_dim", type=int, default=256)
    p.add_argument("--max_length", type=int, default=512)
    p.add_argument("--num_heads", type=int, default=8)
    p.add_argument("--ffn_dim", type=int, default=1024)
    p.add_argument("--num_layers", type=int, default=6)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--pre_norm", action="store_true")
    return p.parse_args(argv)


if __name__ == "__main__":
    model = TransformerLM(get_args())
