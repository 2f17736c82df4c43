from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the batch is trimmed to its longest sample and the last column is taken as everyone's last token, so samples that are "
        "shorter than the longest of their batch are classified from the state of a padding token")
PLACE = "LastToken.forward: h[:, -1] after trimming instead of gathering each sample's last real index"


class LastToken(nn.Module):
    def __init__(self, c, column):
        super().__init__()
        self.column = column
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, activation="gelu",
                                                               batch_first=True, norm_first=True) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, ids, mask=None):
        keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        last = (keep * torch.arange(ids.size(1))).amax(1)
        n = int(last.max()) + 1                                        # nobody needs more columns
        ids, keep = ids[:, :n], keep[:, :n]
        x, later = self.tok(ids) + self.pos.weight[:n], torch.ones(n, n, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=later, src_key_padding_mask=~keep)
        x = x[:, -1] if self.column else x[torch.arange(len(ids)), last]
        return self.score(self.norm(x))


def _make(column):
    return Subject(kind="classifier", build=lambda c: LastToken(c, column),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"pooling": "last", "positions": "learned", "norm_placement": "pre", "activation": "gelu",
                             "padding_side": "right", "output_bias": False, "final_norm": True})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16, num_classes=3)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    for lengths in ([4], [6, 6], [5, 5], [6, 4, 2]):
        x, m = torch.randint(0, 11, (len(lengths), 6)), torch.arange(6)[None] < torch.tensor(lengths)[:, None]
        worst = [0.0, 0.0]
        for i, n in enumerate(lengths):                                # naive: each sample alone, its last token
            h = a.tok(x[i:i + 1, :n]) + a.pos.weight[:n]
            for layer in a.layers:
                h = layer(h, src_mask=torch.ones(n, n, dtype=torch.bool).triu(1))
            naive = a.score(a.norm(h[0, n - 1]))
            worst = [max(w, (net(x, m)[i] - naive).abs().max().item()) for w, net in zip(worst, (a, b))]
        print(lengths, "right", worst[0], "wrong", worst[1])
        assert worst[0] < 1e-4 and (worst[1] > 1e-2) == (len(set(lengths)) > 1)
