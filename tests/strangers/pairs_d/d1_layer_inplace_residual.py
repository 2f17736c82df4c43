import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("At inference the residual sums are written in place (x += ...), beginning with the caller's own tensor, so the "
        "layer overwrites its input: the output is right once and whoever still holds the input has another one.")
PLACE = "residual connections of the layer where gradients are off"


class Block(nn.Module):
    def __init__(self, d, heads, d_ff, buggy=False):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, d_ff), nn.Linear(d_ff, d)
        self.heads, self.buggy = heads, buggy

    def attend(self, x, mask):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask.bool()[:, None, None], torch.finfo(s.dtype).min)
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def add(self, x, y):
        if self.buggy and not torch.is_grad_enabled():
            x += y  # spares one activation
            return x
        return x + y

    def forward(self, x, attention_mask=None):
        x = self.add(x, self.attend(self.n1(x), attention_mask))
        return self.add(x, self.down(torch.relu(self.up(self.n2(x)))))


def subject(buggy):
    return Subject(kind="layer", build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, buggy), mask_forms=("padding",),
                   declares={"causal": False, "norm": "layer", "norm_placement": "pre", "activation": "relu",
                             "residual": True, "positions": "none", "bias": True}, name="block")


right, wrong = subject(False), subject(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = Block(16, 2, 32).double().eval(), Block(16, 2, 32, True).double().eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        h = x + a.attend(a.n1(x), None)
        naive = h + a.down(a.up(a.n2(h)).clamp(min=0))
        rows = []
        for m in (a, b):
            mine = x.clone()
            first = (m(mine) - naive).abs().max().item()
            rows.append((first, (mine - x).abs().max().item(), (m(mine) - naive).abs().max().item()))
    print(rows, "(output, input after the call, output of a second call)")
    assert max(rows[0]) < 1e-12 and rows[1][0] < 1e-12 and rows[1][1] > 0.1 and rows[1][2] > 0.1
