WHAT = 'Keys and values of the memory that the cross-attention keeps for decoding in eval mode are not reset at the start of `forward` (the call of reset() is missing): another source of the same shape is answered with the old one.'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class BartAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, static=False):
        super().__init__()
        self.num_heads, self.static, self.saved = num_heads, static, None
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def shape(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, -1).transpose(1, 2)

    def keys_values(self, states):
        if self.static and not self.training and self.saved is not None and self.saved[0].size(2) == states.size(1) \
                and self.saved[0].size(0) == states.size(0) and self.saved[0].dtype == states.dtype:
            return self.saved
        kv = self.shape(self.k_proj(states)), self.shape(self.v_proj(states))
        if self.static and not self.training:
            self.saved = kv[0].detach(), kv[1].detach()
        return kv

    def forward(self, x, states, mask):
        k, v = self.keys_values(states)
        out = F.scaled_dot_product_attention(self.shape(self.q_proj(x)), k, v, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class BartLayer(nn.Module):
    def __init__(self, d, h, f, cross):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = BartAttention(d, h), nn.LayerNorm(d)
        if cross:
            self.encoder_attn, self.encoder_attn_layer_norm = BartAttention(d, h, static=True), nn.LayerNorm(d)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(d, f), nn.Linear(f, d), nn.LayerNorm(d)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
        if memory is not None:
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, memory_mask))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


class Bart(nn.Module):
    OFFSET = 2

    def __init__(self, vocab, d, h, layers, f, max_len):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.encoder_positions = nn.Embedding(max_len + self.OFFSET, d)
        self.decoder_positions = nn.Embedding(max_len + self.OFFSET, d)
        self.encoder = nn.ModuleList(BartLayer(d, h, f, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(BartLayer(d, h, f, cross=True) for _ in range(layers))

    def reset(self):
        for layer in self.decoder:
            layer.encoder_attn.saved = None

    def embed(self, ids, table):
        return self.shared(ids) + table(torch.arange(ids.size(1), device=ids.device) + self.OFFSET)

    def encode(self, source, source_mask):
        x = self.embed(source, self.encoder_positions)
        for layer in self.encoder:
            x = layer(x, source_mask)
        return x

    def decode(self, target, memory, source_mask, target_mask=None):
        T = target.size(1)
        mask = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            mask = mask & target_mask[:, None, None, :]
        x = self.embed(target, self.decoder_positions)
        for layer in self.decoder:
            x = layer(x, mask, memory, source_mask)
        return F.linear(x, self.shared.weight)

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is not None:
            source_mask = source_mask[:, None, None, :]
        memory = self.encode(source, source_mask)
        return self.decode(target, memory, source_mask, target_mask)

    @torch.no_grad()
    def translate(self, source, steps, bos=0):
        self.eval()
        self.reset()
        memory, out = self.encode(source, None), source.new_full((len(source), 1), bos)
        for _ in range(steps):
            out = torch.cat((out, self.decode(out, memory, None)[:, -1:].argmax(-1)), 1)
        self.reset()
        return out


subject = Subject(
    kind="encoder_decoder",
    name="BART",
    build=lambda c: Bart(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"positions": "learned", "position_offset": 2, "norm": "layer", "norm_placement": "post",
              "final_norm": False, "activation": "gelu", "tied": True, "padding_side": "right"},
)
