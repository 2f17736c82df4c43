"""T5 (Raffel et al., 2020) in one file.

RMS norm before every sublayer, no biases, unscaled dot products, bucketed relative position biases
shared by all layers of a stack, and a tied output projection scaled by d_model ** -0.5. When `labels`
are given the decoder is fed the labels shifted right behind the start token (teacher forcing).
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class T5Config:
    def __init__(self, vocab_size=100, d_model=48, d_kv=12, num_heads=4, d_ff=96, num_layers=2,
                 relative_attention_num_buckets=16, relative_attention_max_distance=64,
                 dropout_rate=0.1, layer_norm_epsilon=1e-6, pad_token_id=0, eos_token_id=1,
                 decoder_start_token_id=0):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.d_kv = d_kv
        self.num_heads = num_heads
        self.d_ff = d_ff
        self.num_layers = num_layers
        self.relative_attention_num_buckets = relative_attention_num_buckets
        self.relative_attention_max_distance = relative_attention_max_distance
        self.dropout_rate = dropout_rate
        self.layer_norm_epsilon = layer_norm_epsilon
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.decoder_start_token_id = decoder_start_token_id


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


class RelativePositionBias(nn.Module):
    def __init__(self, config, bidirectional):
        super().__init__()
        self.bidirectional = bidirectional
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.embedding = nn.Embedding(self.num_buckets, config.num_heads)

    def bucket(self, relative_position):
        num_buckets = self.num_buckets
        buckets = torch.zeros_like(relative_position)
        if self.bidirectional:
            num_buckets //= 2
            buckets = buckets + (relative_position > 0).long() * num_buckets
            distance = relative_position.abs()
        else:
            distance = -torch.clamp(relative_position, max=0)
        max_exact = num_buckets // 2
        large = max_exact + (
            torch.log(distance.float().clamp(min=1) / max_exact)
            / math.log(self.max_distance / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return buckets + torch.where(distance < max_exact, distance, large)

    def forward(self, query_length, key_length, device):
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        values = self.embedding(self.bucket(memory - context))
        return values.permute(2, 0, 1).unsqueeze(0)


class T5Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_heads = config.num_heads
        self.d_kv = config.d_kv
        inner = config.num_heads * config.d_kv
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.n_heads, self.d_kv).transpose(1, 2)

    def forward(self, hidden, bias, kv=None):
        kv = hidden if kv is None else kv
        q, k, v = self.split(self.q(hidden)), self.split(self.k(kv)), self.split(self.v(kv))
        scores = torch.matmul(q, k.transpose(3, 2)) + bias
        weights = self.dropout(F.softmax(scores.float(), dim=-1).type_as(scores))
        out = torch.matmul(weights, v).transpose(1, 2).reshape(hidden.size(0), hidden.size(1), -1)
        return self.o(out)


class T5FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x):
        return self.wo(self.dropout(F.relu(self.wi(x))))


class T5Block(nn.Module):
    def __init__(self, config, is_decoder):
        super().__init__()
        eps = config.layer_norm_epsilon
        self.self_attention = T5Attention(config)
        self.self_norm = T5LayerNorm(config.d_model, eps)
        if is_decoder:
            self.cross_attention = T5Attention(config)
            self.cross_norm = T5LayerNorm(config.d_model, eps)
        self.feed_forward = T5FeedForward(config)
        self.ff_norm = T5LayerNorm(config.d_model, eps)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x, self_bias, memory=None, cross_bias=None):
        x = x + self.dropout(self.self_attention(self.self_norm(x), self_bias))
        if memory is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), cross_bias, kv=memory))
        return x + self.dropout(self.feed_forward(self.ff_norm(x)))


class T5Stack(nn.Module):
    def __init__(self, config, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.position_bias = RelativePositionBias(config, bidirectional=not is_decoder)
        self.block = nn.ModuleList([T5Block(config, is_decoder) for _ in range(config.num_layers)])
        self.final_layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, embeds, mask=None, memory=None, memory_mask=None):
        length = embeds.size(1)
        lowest = torch.finfo(embeds.dtype).min
        bias = self.position_bias(length, length, embeds.device)
        keep = torch.ones(1, 1, length, length, dtype=torch.bool, device=embeds.device)
        if self.is_decoder:
            keep = keep.tril()
        if mask is not None:
            keep = keep & mask[:, None, None, :].bool()
        bias = bias.masked_fill(~keep, lowest)
        cross_bias = None
        if memory is not None:
            cross_bias = torch.zeros(1, 1, 1, memory.size(1), dtype=embeds.dtype, device=embeds.device)
            if memory_mask is not None:
                cross_bias = cross_bias.masked_fill(~memory_mask[:, None, None, :].bool(), lowest)
        x = self.dropout(embeds)
        for block in self.block:
            x = block(x, bias, memory, cross_bias)
        return self.dropout(self.final_layer_norm(x))


class T5ForConditionalGeneration(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.config = config
        self.model_dim = config.d_model
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, is_decoder=False)
        self.decoder = T5Stack(config, is_decoder=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.lm_head.weight = self.shared.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        d_model = self.config.d_model
        if isinstance(module, T5Attention):
            nn.init.normal_(module.q.weight, std=(d_model * self.config.d_kv) ** -0.5)
            nn.init.normal_(module.k.weight, std=d_model ** -0.5)
            nn.init.normal_(module.v.weight, std=d_model ** -0.5)
            nn.init.normal_(module.o.weight, std=(self.config.num_heads * self.config.d_kv) ** -0.5)
        elif isinstance(module, T5FeedForward):
            nn.init.normal_(module.wi.weight, std=d_model ** -0.5)
            nn.init.normal_(module.wo.weight, std=self.config.d_ff ** -0.5)
        elif isinstance(module, RelativePositionBias):
            nn.init.normal_(module.embedding.weight, std=d_model ** -0.5)

    def _shift_right(self, labels):
        shifted = torch.zeros_like(labels)
        shifted[:, 1:] = labels[:, :-1]
        shifted[:, 0] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, labels=None):
        if decoder_input_ids is None:
            decoder_input_ids = self._shift_right(labels)
        memory = self.encoder(self.shared(input_ids), attention_mask)
        hidden = self.decoder(self.shared(decoder_input_ids), memory=memory, memory_mask=attention_mask)
        logits = self.lm_head(hidden * (self.model_dim ** -0.5))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100)
        return loss, logits
