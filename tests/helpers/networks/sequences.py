"""Sequences: attention in both orders, recurrence, embeddings, inputs as tuples and dicts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.case import network, real, tokens


class Transformer(nn.Module):
    """Tied embedding and head, learned positions, a block of nn.TransformerEncoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(7, 4), nn.Parameter(0.3 * torch.randn(5, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.head(self.encoder(self.embedding(x) + self.positions))).mean(1))


@network(outputs=3)
def transformer_tied():
    return Transformer(), tokens(5, 7)


class SequenceFirst(nn.Module):
    """Everything runs as (T, N, D), with as many positions as examples, and norms before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(2, 4), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, norm_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.lift(x.transpose(0, 1)))[0])


@network(outputs=2, examples=6)
def encoder_sequence_first():
    return SequenceFirst(), real(6, 2)


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, add_bias_kv=not batch_first)
        self.out, self.batch_first = nn.Linear(4, 3), batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        h, _ = self.attention(x, x, x, need_weights=not self.batch_first)
        return self.out(torch.tanh(h).mean(1 if self.batch_first else 0))


@network(outputs=3)
def self_attention_batch_first():
    return Attention(batch_first=True), real(3, 4)


@network(outputs=3, examples=6)
def self_attention_sequence_first():
    return Attention(batch_first=False), real(6, 4)


class CrossAttention(nn.Module):
    """Learned queries look at the inputs, whose keys and values have sizes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4))
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
        self.second = nn.MultiheadAttention(4, 1, batch_first=True, bias=False)
        self.out = nn.Linear(8, 2)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = x
        queries = self.queries.expand(len(keys), -1, -1)
        h, _ = self.attention(queries, keys, values)
        memory = torch.cat([h, queries], 1)
        h, _ = self.second(h, memory, memory, need_weights=False)
        return self.out(torch.tanh(h).flatten(1))


@network(outputs=2)
def cross_attention_tuple():
    return CrossAttention(), lambda n: (torch.randn(n, 5, 3), torch.randn(n, 5, 2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layer = nn.TransformerDecoderLayer(4, 2, 3, dropout=0.0, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, words: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=memory.dtype)
        return self.out(self.layer(self.embedding(words), memory, tgt_mask=mask, tgt_is_causal=True)[:, -1])


@network(outputs=2)
def decoder_dict():
    return Decoder(), lambda n: {"words": torch.randint(0, 6, (n, 3)), "memory": torch.randn(n, 4, 4)}


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, size: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


@network(outputs=3, func=False)
def lstm():
    return Recurrent(nn.LSTM(2, 4, batch_first=True), 4), real(4, 2)


@network(outputs=3, func=False)
def gru():
    return Recurrent(nn.GRU(2, 3, num_layers=2, bidirectional=True, batch_first=True), 6), real(3, 2)


class Cell(nn.Module):
    """A cell unrolled by hand: the same layer, once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.out(h)


@network(outputs=2)
def unrolled_cell():
    return Cell(), real(3, 2)


class EmbeddingHead(nn.Module):
    """One matrix as embedding (with padding), as head, and once more transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.embedding(x))).mean(1)
        logits = F.linear(h, self.embedding.weight)
        return (torch.tanh(logits) @ self.embedding.weight)[:, :3]


@network(outputs=3)
def embedding_as_head():
    return EmbeddingHead(), tokens(4, 6)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.table, self.out = (
            nn.EmbeddingBag(6, 3, mode="mean"),
            nn.Parameter(torch.randn(5, 3)),
            nn.Linear(3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            torch.tanh(self.bag(x) * self.table[x[:, 0] % 5] + self.table.index_select(0, x[:, 1] % 5))
        )


@network(outputs=2, func=False)
def embedding_bag():
    return Bags(), tokens(4, 6)
