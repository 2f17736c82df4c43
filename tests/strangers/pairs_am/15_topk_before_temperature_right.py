import torch
from torch import nn

from veriformer.properties import Subject


class MiniGPT(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len):
        super().__init__()
        self.max_len = max_len
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, hidden, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        length = ids.shape[1]
        x = self.tok(ids) + self.pos(torch.arange(length, device=ids.device))
        future = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=future)
        return self.head(self.norm(x))


@torch.no_grad()
def sample(model, ids, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        out = model(ids[:, -model.max_len :])
        logits = out[:, -1] / temperature
        if top_k is not None:
            kth = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
            # the best token always stays
            drop = (logits < kth) & (logits < logits.amax(-1, keepdim=True))
            logits = logits.masked_fill(drop, float("-inf"))
        probs = logits.softmax(dim=-1)
        drawn_from.append(probs)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return ids, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="sampled GPT",
    build=lambda c: MiniGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    sampling=sample,
    declares={"positions": "learned", "norm_placement": "pre", "activation": "gelu", "tied": False},
)
