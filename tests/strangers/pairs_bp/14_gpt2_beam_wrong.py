WHAT = "Beams are reordered in place: new_key and new_value are the cache itself and not a copy (line 67), so a beam whose source has already been overwritten gets the wrong past (an exchange of two beams makes both alike)."
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, layer_past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in (q, k, v))
        if layer_past is not None:
            k = torch.cat((layer_past[0], k), dim=2)
            v = torch.cat((layer_past[1], v), dim=2)
        S = k.size(2)
        bias = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        att = (q @ k.transpose(-2, -1)) * (C // self.n_head) ** -0.5
        att = att.masked_fill(~bias, float("-inf")).softmax(dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y), (k, v)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention(n_embd, n_head)
        self.c_fc, self.c_proj = nn.Linear(n_embd, n_inner), nn.Linear(n_inner, n_embd)

    def forward(self, x, layer_past=None):
        a, present = self.attn(self.ln_1(x), layer_past)
        x = x + a
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), present


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, past=None):
        offset = 0 if past is None else past[0][0].size(2)
        x = self.wte(input_ids) + self.wpe(torch.arange(offset, offset + input_ids.size(1), device=input_ids.device))
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def reorder_cache(past, beam_idx):
    reordered = []
    for key, value in past:
        new_key, new_value = key, value
        for beam, source in enumerate(beam_idx.tolist()):
            new_key[beam] = key[source]
            new_value[beam] = value[source]
        reordered.append((new_key, new_value))
    return reordered


@torch.no_grad()
def decode(model, chunks, reorder=None):
    outputs, past = [], None
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            past = reorder_cache(past, torch.as_tensor(reorder))
        logits, past = model(chunk, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-2 with beams",
    build=GPT2,
    forward=lambda m, tokens: m(tokens)[0],
    cache=decode,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
    },
)
