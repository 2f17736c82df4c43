from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("parameter groups are collected by module type (Linear, LayerNorm, Embedding), so parameters that hang directly on another "
        "module (class token, position table, layer scale) are in no group and are never trained")
PLACE = "groups(): loop over modules, `else: continue` for types that are not listed"


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down, self.h = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ff), nn.Linear(ff, d), h
        self.gamma = nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.gamma * self.o(y)
        return x + self.gamma * self.down(torch.relu(self.up(self.n2(x))))


class Vitish(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.cls, self.place = nn.Parameter(torch.zeros(1, 1, d)), nn.Parameter(0.02 * torch.randn(1, c.max_len + 1, d))
        self.tok, self.norm, self.head = nn.Embedding(c.vocab_size, d), nn.LayerNorm(d), nn.Linear(d, c.num_classes)
        self.blocks = nn.ModuleList(Block(d, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def forward(self, ids):
        x = torch.cat([self.cls.expand(len(ids), -1, -1), self.tok(ids)], 1) + self.place[:, : ids.size(1) + 1]
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x)[:, 0])


def groups(model, loose, decay=0.1):
    shrink, keep = [], []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear):
                (shrink if name == "weight" else keep).append(p)
            elif isinstance(module, (nn.LayerNorm, nn.Embedding)) or loose:
                keep.append(p)
            else:
                continue
    return [{"params": shrink, "weight_decay": decay}, {"params": keep, "weight_decay": 0.0}]


right = Subject(kind="parameter_groups", build=Vitish, forward=lambda m: groups(m, True))
wrong = Subject(kind="parameter_groups", build=Vitish, forward=lambda m: groups(m, False))

if __name__ == "__main__":
    torch.set_num_threads(1)
    c = SimpleNamespace(d_model=16, num_heads=2, d_ff=32, vocab_size=11, max_len=8, num_layers=2, num_classes=3)
    for s, want in ((right, set()), (wrong, {"cls", "place", "blocks.0.gamma", "blocks.1.gamma"})):
        torch.manual_seed(0); m = Vitish(c); g = s.forward(m)
        ids = [id(p) for x in g for p in x["params"]]; assert len(ids) == len(set(ids))
        missing = {n for n, p in m.named_parameters() if id(p) not in set(ids)}           # naive: compare with all names
        assert {id(p) for p in g[0]["params"]} == {id(p) for n, p in m.named_parameters() if p.dim() == 2 and "tok" not in n}
        before = {n: p.detach().clone() for n, p in m.named_parameters()}
        nn.functional.cross_entropy(m(torch.randint(0, 11, (4, 8))), torch.tensor([0, 1, 2, 0])).backward()
        torch.optim.AdamW(g, lr=1e-2).step()
        still = {n for n, p in m.named_parameters() if torch.equal(p, before[n])}
        print("in no group", sorted(missing), "not moved by a step", sorted(still))
        assert missing == want and want <= still and (want or not {"cls", "place"} & still)
