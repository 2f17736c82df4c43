"""A multi-query decoder after GPTBigCode, with top-k sampling."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class MultiQueryAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.c_attn = nn.Linear(hidden_size, hidden_size + 2 * self.head_dim)
        self.c_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states):
        bsz, seq, width = hidden_states.shape
        query, key, value = self.c_attn(hidden_states).split((width, self.head_dim, self.head_dim), dim=2)
        query = query.view(bsz, seq, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(query, key.unsqueeze(1).transpose(-1, -2)) * self.head_dim**-0.5
        future = torch.ones(seq, seq, dtype=torch.bool, device=scores.device).triu(1)
        probs = scores.masked_fill(future, torch.finfo(scores.dtype).min).softmax(-1)
        context = torch.matmul(probs, value.unsqueeze(1))
        return self.c_proj(context.transpose(1, 2).reshape(bsz, seq, width))


class Block(nn.Module):
    def __init__(self, hidden_size, num_heads, inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size)
        self.attn = MultiQueryAttention(hidden_size, num_heads)
        self.ln_2 = nn.LayerNorm(hidden_size)
        self.c_fc, self.c_out = nn.Linear(hidden_size, inner), nn.Linear(inner, hidden_size)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states))
        return hidden_states + self.c_out(F.gelu(self.c_fc(self.ln_2(hidden_states)), approximate="tanh"))


class BigCode(nn.Module):
    def __init__(self, vocab, hidden_size, num_heads, layers, inner, n_positions):
        super().__init__()
        self.n_positions = n_positions
        self.wte, self.wpe = nn.Embedding(vocab, hidden_size), nn.Embedding(n_positions, hidden_size)
        self.h = nn.ModuleList(Block(hidden_size, num_heads, inner) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab, bias=False)

    def forward(self, input_ids):
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            hidden_states = block(hidden_states)
        return self.lm_head(self.ln_f(hidden_states))

    @torch.no_grad()
    def sample(self, input_ids, steps, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(steps):
            logits = self(input_ids[:, -self.n_positions :])[:, -1] / temperature
            if top_k is None:
                probs = logits.softmax(-1)
                token = torch.multinomial(probs, num_samples=1)
            else:
                best, indices = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
                kept = best.softmax(-1)
                choice = torch.multinomial(kept, num_samples=1)
                token = indices.gather(-1, choice)
                probs = torch.zeros_like(logits).scatter(-1, indices, kept)
            drawn_from.append(probs)
            input_ids = torch.cat((input_ids, token), dim=1)
        return input_ids, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="BigCode",
    build=lambda c: BigCode(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
    },
)
