"""The first GPT (norms behind the residuals, tied head), with its loss, left padding and cached generation."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject

Past = List[Tuple[Tensor, Tensor]]


class OpenAIGPTAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.n_head, self.split_size = n_head, n_embd
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], self.n_head, x.size(-1) // self.n_head).transpose(1, 2)

    def forward(self, x: Tensor, visible: Tensor, past: Optional[Tuple[Tensor, Tensor]]):
        query, key, value = map(self.split_heads, self.c_attn(x).split(self.split_size, dim=2))
        if past is not None:
            key, value = torch.cat((past[0], key), dim=-2), torch.cat((past[1], value), dim=-2)
        w = torch.matmul(query, key.transpose(-1, -2)) / query.size(-1) ** 0.5
        w = F.softmax(w.masked_fill(~visible, torch.finfo(w.dtype).min), dim=-1)
        a = torch.matmul(w, value).transpose(1, 2)
        return self.c_proj(a.reshape(*a.size()[:-2], -1)), (key, value)


class OpenAIGPTBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int, n_inner: int):
        super().__init__()
        self.attn = OpenAIGPTAttention(n_embd, n_head)
        self.ln_1 = nn.LayerNorm(n_embd, eps=1e-5)
        self.c_fc, self.c_proj = nn.Linear(n_embd, n_inner), nn.Linear(n_inner, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd, eps=1e-5)

    def forward(self, x, visible, past):
        a, present = self.attn(x, visible, past)
        n = self.ln_1(x + a)
        m = self.c_proj(F.gelu(self.c_fc(n), approximate="tanh"))
        return self.ln_2(n + m), present


class OpenAIGPTLMHeadModel(nn.Module):
    def __init__(self, vocab_size: int, n_positions: int, n_embd: int, n_layer: int, n_head: int, n_inner: int):
        super().__init__()
        self.tokens_embed = nn.Embedding(vocab_size, n_embd)
        self.positions_embed = nn.Embedding(n_positions, n_embd)
        self.h = nn.ModuleList([OpenAIGPTBlock(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.tokens_embed.weight

    def forward(self, input_ids, attention_mask=None, past: Optional[Past] = None, labels=None):
        """attention_mask is that of past and present together."""
        batch, new = input_ids.shape
        seen = 0 if past is None else past[0][0].size(-2)
        if attention_mask is None:
            attention_mask = torch.ones(batch, seen + new, dtype=torch.bool, device=input_ids.device)
        attention_mask = attention_mask[:, : seen + new]
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, seen:]
        causal = torch.ones(new, seen + new, dtype=torch.bool, device=input_ids.device).tril(seen)
        visible = causal & attention_mask[:, None, None, :]
        x = self.tokens_embed(input_ids) + self.positions_embed(position_ids)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, visible, None if past is None else past[i])
            presents.append(present)
        logits = self.lm_head(x)
        loss = None if labels is None else self.loss(logits, labels)
        return loss, logits, presents

    @staticmethod
    def loss(logits, labels):
        logits, labels = logits[:, :-1], labels[:, 1:]
        counted = labels != -100
        nll = F.cross_entropy(logits.transpose(1, 2), labels.masked_fill(~counted, 0), reduction="none")
        return (nll * counted).sum() / counted.sum().clamp(min=1)

    @torch.no_grad()
    def generate(self, input_ids, steps, use_cache=True):
        past, feed = None, input_ids
        for _ in range(steps):
            _, logits, presents = self(feed, past=past)
            best = logits[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat((input_ids, best), dim=-1)
            past, feed = (presents, best) if use_cache else (None, input_ids)
        return input_ids


def cached(model, chunks, attention_mask=None, reorder=None):
    past, outputs, seen = None, [], 0
    for number, chunk in enumerate(chunks):
        _, logits, past = model(chunk, attention_mask, past)
        outputs.append(logits)
        seen += chunk.size(1)
        if number == 0 and reorder is not None:
            past = [(k.index_select(0, reorder), v.index_select(0, reorder)) for k, v in past]
            if attention_mask is not None:
                attention_mask = torch.cat((attention_mask[reorder, :seen], attention_mask[:, seen:]), dim=1)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="openai gpt",
    build=lambda c: OpenAIGPTLMHeadModel(c.vocab_size, c.max_len, c.d_model, c.num_layers, c.num_heads, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[1],
    cache=cached,
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    loss=lambda m, tokens, labels: m(tokens, labels=labels)[0],
    declares={
        "causal": True,
        "positions": "learned",
        "beyond_max_len": "error",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "embedding_scale": False,
        "memory": "quadratic",
        "padding_side": "both",
        "cached_chunks": True,
        "shifts_labels": True,
        "ignore_index": -100,
        "plain_loss": True,
        "empty_loss": "zero",
        "structure": "textbook",
    },
)
