import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject

WHAT = ("The class token is put before the sequence but its 1 is put at the end of the mask, so under padding the mask is "
        "off by one: the last real token is hidden and the last padded one is seen.")
PLACE = "extension of the attention mask by the class token, F.pad at the wrong end"


class ClsClassifier(nn.Module):
    def __init__(self, vocab, d, heads, d_ff, layers, classes, max_len, buggy=False):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, d), nn.Embedding(max_len + 1, d)
        self.cls = nn.Parameter(torch.randn(1, 1, d))
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "qkv": nn.Linear(d, 3 * d), "out": nn.Linear(d, d), "up": nn.Linear(d, d_ff), "down": nn.Linear(d_ff, d),
            "n1": nn.LayerNorm(d), "n2": nn.LayerNorm(d)}) for _ in range(layers))
        self.head = nn.Linear(d, classes)
        self.heads, self.buggy = heads, buggy

    def forward(self, tokens, attention_mask=None):
        x = torch.cat([self.cls.expand(len(tokens), 1, -1), self.words(tokens)], 1)
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        see = None
        if attention_mask is not None:
            see = F.pad(attention_mask.bool(), (0, 1) if self.buggy else (1, 0), value=True)[:, None, None]
        for b in self.blocks:
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in b["qkv"](x).chunk(3, -1))
            s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            if see is not None:
                s = s.masked_fill(~see, torch.finfo(s.dtype).min)
            x = b["n1"](x + b["out"]((s.softmax(-1) @ v).transpose(1, 2).flatten(2)))
            x = b["n2"](x + b["down"](F.gelu(b["up"](x))))
        return self.head(x[:, 0])


def subject(buggy):
    return Subject(kind="classifier", mask_forms=("padding",), name="cls classifier",
                   build=lambda c: ClsClassifier(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.num_classes,
                                                 c.max_len, buggy),
                   declares={"pooling": "cls", "positions": "learned", "causal": False, "extra_tokens": 1, "norm": "layer",
                             "norm_placement": "post", "final_norm": False, "activation": "gelu",
                             "padding_side": "right", "beyond_max_len": "error"})


right, wrong = subject(False), subject(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = (ClsClassifier(11, 16, 2, 32, 2, 3, 12, w).double().eval() for w in (False, True))
    b.load_state_dict(a.state_dict())
    tokens, mask = torch.randint(11, (2, 7)), torch.arange(7)[None] < torch.tensor([[4], [7]])
    naive = torch.cat([a(t[None, :n]) for t, n in zip(tokens, (4, 7))])  # each without padding and without a mask
    gap = [(m(tokens, mask) - naive).abs().amax(1).tolist() for m in (a, b)]
    other = tokens.clone()
    other[0, 6] = (tokens[0, 6] + 1) % 11
    leak = [(m(tokens, mask) - m(other, mask))[0].abs().max().item() for m in (a, b)]
    print(gap, leak)
    assert max(gap[0]) < 1e-12 and gap[1][0] > 1e-3 and gap[1][1] < 1e-12 and leak[0] < 1e-12 and leak[1] > 1e-3
