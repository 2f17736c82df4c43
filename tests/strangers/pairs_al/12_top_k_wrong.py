WHAT = 'The top-k threshold is the least over the whole batch, not of each sample: samples with higher logits keep more than k tokens (line 32)'
import torch
from torch import nn
from veriformer.properties import Subject


class CharLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.token_embedding_table = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embedding_table = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList([
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True, norm_first=True)
            for _ in range(c.num_layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, idx):
        T = idx.shape[1]
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(T, device=idx.device))
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        dists = []
        for _ in range(max_new_tokens):
            logits = self(idx)[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < v.min()] = -float("inf")
            probs = logits.softmax(-1)
            dists.append(probs)
            idx = torch.cat((idx, torch.multinomial(probs, 1)), 1)
        return idx, torch.stack(dists, 1)


subject = Subject(
    kind="decoder", name="char lm", build=CharLM, forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "relu"},
)
