WHAT = "the decoder's cache advances its position by one per call (state['step'] += 1) in place of by the number of tokens of the chunk: chunks of several tokens are followed by wrong positions"
import torch
from torch import nn
from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def keys_values(self, x):
        return self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def forward(self, x, kv, allowed=None):
        q, (k, v) = self.split(self.q_proj(x)), kv
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        y = torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)
        return self.out_proj(y.transpose(1, 2).reshape(x.shape))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(c.d_model, c.num_heads), nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.ffn = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, allowed):
        x = self.norm1(x + self.attn(x, self.attn.keys_values(x), allowed))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(EncoderLayer):
    def __init__(self, c):
        super().__init__(c)
        self.cross, self.norm3 = Attention(c.d_model, c.num_heads), nn.LayerNorm(c.d_model)

    def forward(self, x, memory, allowed, memory_allowed, state=None):
        k, v = self.attn.keys_values(x)
        if state is None:
            cross = self.cross.keys_values(memory)
        else:
            if "k" in state:
                k, v = torch.cat([state["k"], k], 2), torch.cat([state["v"], v], 2)
            state["k"], state["v"] = k, v
            if "cross" not in state:
                state["cross"] = self.cross.keys_values(memory)
            cross = state["cross"]
        x = self.norm1(x + self.attn(x, (k, v), allowed))
        x = self.norm3(x + self.cross(x, cross, memory_allowed))
        return self.norm2(x + self.ffn(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.src, self.tgt = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.src_pos, self.tgt_pos = nn.Embedding(c.max_len, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.lm_head = nn.Linear(c.d_model, c.vocab_size)

    def encode(self, source, mask=None):
        x = self.src(source) + self.src_pos.weight[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x, None if mask is None else mask[:, None, None])
        return x

    def decode(self, target, memory, memory_mask=None, target_mask=None, state=None):
        T = target.shape[1]
        step = 0 if state is None else state["step"]
        past = 0 if state is None or "k" not in state["layers"][0] else state["layers"][0]["k"].shape[2]
        x = self.tgt(target) + self.tgt_pos(torch.arange(step, step + T, device=target.device))
        allowed = torch.ones(T, past + T, dtype=torch.bool, device=target.device).tril(past)
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None]
        for i, layer in enumerate(self.decoder):
            x = layer(x, memory, allowed, None if memory_mask is None else memory_mask[:, None, None],
                      None if state is None else state["layers"][i])
        if state is not None:
            state["step"] += 1
        return self.lm_head(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)

    def incremental(self, source, chunks):
        memory = self.encode(source)
        state = {"step": 0, "layers": [{} for _ in self.decoder]}
        return torch.cat([self.decode(chunk, memory, state=state) for chunk in chunks], 1)


subject = Subject(kind="encoder_decoder", build=Seq2Seq,
                  forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                  cache=lambda m, source, chunks: m.incremental(source, chunks),
                  declares={"positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "relu"})
