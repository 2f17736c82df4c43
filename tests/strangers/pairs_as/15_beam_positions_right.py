import torch
from torch import nn, Tensor
from torch.nn import functional as F
from veriformer.properties import Subject


class State:
    def __init__(self, layers: int):
        self.kv: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.mask: Tensor | None = None
        self.next: Tensor | None = None  # [B]: the position of each sample's next token

    def reorder(self, index: Tensor) -> None:
        self.kv = [(k[index], v[index]) for k, v in self.kv]
        self.mask = self.mask[index]
        self.next = self.next[index]


class Block(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, visible, past):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        s = (q @ k.mT) / q.size(-1) ** 0.5
        p = s.masked_fill(~visible, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~visible, 0.0)
        x = x + self.out((p @ v).transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)))), (k, v)


class BeamLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, state=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        state = State(len(self.blocks)) if state is None else state
        B, T = tokens.shape
        if state.mask is None:
            state.mask, state.next = mask[:, :0], tokens.new_zeros(B)
        place = (state.next[:, None] + mask.long().cumsum(1) - 1).clamp(min=0)
        state.next = state.next + mask.sum(1)
        state.mask = torch.cat([state.mask, mask], 1)
        L = state.mask.shape[1]
        visible = torch.ones(T, L, dtype=torch.bool, device=tokens.device).tril(L - T) & state.mask[:, None, None, :]
        x = self.tok(tokens) + self.pos(place)
        for i, block in enumerate(self.blocks):
            x, state.kv[i] = block(x, visible, state.kv[i])
        return self.head(self.ln(x)), state


def cached(model, chunks, attention_mask=None, reorder=None):
    state, out, at = None, [], 0
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            state.reorder(torch.as_tensor(reorder, device=chunk.device))
        part = None if attention_mask is None else attention_mask[:, at:at + chunk.shape[1]]
        y, state = model(chunk, part, state)
        out.append(y)
        at += chunk.shape[1]
    return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    build=BeamLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cached,
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "gelu", "bias": True, "output_bias": False, "tied": False,
              "padding_side": "both"},
)
