"""Small GPT with tied embeddings."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "Only .data is shared between embedding and head: they stay two parameters, each with its own gradient and optimizer state."
PLACE = "tying of the output projection"


def tie(head, emb):
    head.weight = emb.weight


def tie_data(head, emb):
    head.weight.data = emb.weight.data


class GPT(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, tie):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.emb.weight, std=0.02)
        tie(self.head, self.emb)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "n1": nn.LayerNorm(d), "n2": nn.LayerNorm(d), "qkv": nn.Linear(d, 3 * d), "o": nn.Linear(d, d),
            "ff": nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))}) for _ in range(layers))
        self.norm, self.h = nn.LayerNorm(d), h

    def forward(self, ids, mask=None):
        x, t = self.emb(ids), ids.shape[1]
        ok = torch.ones(1, 1, t, t, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask.bool()[:, None, None]
        for b in self.blocks:
            q, k, v = b["qkv"](b["n1"](x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
            s = q @ k.mT / q.shape[-1] ** 0.5
            w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
            x = x + b["o"]((w @ v).transpose(1, 2).flatten(2))
            x = x + b["ff"](b["n2"](x))
        return self.head(self.norm(x))


def subject(tie):
    return Subject(kind="decoder", mask_forms=("padding",),
                   build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, tie),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": True, "tied": True, "positions": "none", "norm": "layer", "norm_placement": "pre",
                             "final_norm": True, "activation": "gelu", "output_bias": False, "padding_side": "both"})


right, wrong = subject(tie), subject(tie_data)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = GPT(11, 16, 2, 1, 32, tie), GPT(11, 16, 2, 1, 32, tie_data)
    z.load_state_dict(a.state_dict())
    ids = torch.randint(0, 11, (2, 6))
    target = torch.randint(0, 11, (2, 5))
    print("same outputs", (a(ids) - z(ids)).abs().max().item(), "parameters", *(sum(1 for _ in m.parameters()) for m in (a, z)))
    assert torch.allclose(a(ids), z(ids)) and a.head.weight is a.emb.weight and z.head.weight is not z.emb.weight
    for m in (a, z):
        opt = torch.optim.Adam(m.parameters(), lr=0.01)
        nn.functional.cross_entropy(m(ids)[:, :-1].flatten(0, 1), target.flatten()).backward()
        opt.step()
    g = (a.emb.weight.grad - z.emb.weight.grad - z.head.weight.grad).abs().max().item()
    d = (a.emb.weight - z.emb.weight).abs().max().item()
    print("sum of the two gradients is the tied one:", g, "after one step of Adam:", d)
    assert g < 1e-6 and d > 1e-3 and (a.emb.weight.grad - z.emb.weight.grad).abs().max() > 1e-4
