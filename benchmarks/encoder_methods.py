"""Sentence encoders of BERT's layout, dense or made cheaper in other ways than by a retrofit."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
PRUNE_AFTER = 2
"""Layers before token pruning."""


def make_batch(rows: Sequence[list[int]]) -> Batch:
    """Pad with zeros on the right."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": mask.long()}


def batches(rows: Sequence[list[int]], size: int) -> Iterator[Batch]:
    for start in range(0, len(rows), size):
        yield make_batch(rows[start : start + size])


def pool(states: Tensor, batch: Batch) -> Tensor:
    """Sentence embeddings: the mean of the real tokens, of length 1."""
    keep = batch["attention_mask"][..., None].to(states.dtype)
    return F.normalize((states * keep).sum(dim=1), dim=-1)


class Encoder(nn.Module):
    """A model as it is, retrofitted, or with fewer layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def states(self, batch: Batch) -> Tensor:
        """(batch, time, dim)."""
        return self.model(**batch).last_hidden_state

    def embed(self, batch: Batch) -> Tensor:
        """(batch, dim), of length 1."""
        return pool(self.states(batch), batch)


def visible(batch: Batch) -> Tensor | None:
    """The attention mask (batch, 1, 1, time), if there is padding."""
    mask = batch["attention_mask"].bool()
    return None if bool(mask.all()) else mask[:, None, None, :]


class Pruned(Encoder):
    """Some tokens stop after the second layer: those that received least attention in it."""

    def __init__(self, model: Any, keep: float) -> None:
        super().__init__(model)
        self.keep = keep

    def states(self, batch: Batch) -> Tensor:
        x, mask = self.model.embeddings(batch["input_ids"]), batch["attention_mask"].bool()
        layers, see = self.model.encoder.layer, visible(batch)
        for layer in layers[: PRUNE_AFTER - 1]:
            x = layer(x, see)
        x, received = self.attend(layers[PRUNE_AFTER - 1], x, mask)
        received = received.masked_fill(~mask, -1.0)
        # of every sequence the same fraction, rounded up
        counts = (mask.sum(dim=1) * self.keep).ceil().long()
        order = received.argsort(dim=1, descending=True)[:, : int(counts.max())]
        real = torch.arange(order.shape[1]) < counts[:, None]
        place = order[..., None].expand(-1, -1, x.shape[-1])
        kept = x.gather(1, place)
        for layer in layers[PRUNE_AFTER:]:
            kept = layer(kept, None if bool(real.all()) else real[:, None, None, :])
        return x.scatter(1, place, torch.where(real[..., None], kept, x.gather(1, place)))

    @staticmethod
    def attend(layer: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """A layer, and the attention that each of its tokens received from real ones."""
        part = layer.attention.self
        q, k, v = (
            f(x).unflatten(-1, (part.num_attention_heads, -1)).transpose(1, 2)
            for f in (part.query, part.key, part.value)
        )
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask[:, None, None, :], -math.inf).softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        received = (weights.detach().sum(dim=1) * mask[..., None]).sum(dim=1)
        return layer.feed_forward_chunk(layer.attention.output(mixed, x)), received


class EarlyExit(Encoder):
    """A text leaves when the embeddings predicted after two layers agree."""

    maps: Tensor
    threshold: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        layers, width = model.config.num_hidden_layers, model.config.hidden_size
        self.register_buffer("maps", torch.zeros(layers, width + 1, width))
        self.register_buffer("threshold", torch.ones(()))

    def predict(self, states: Tensor, batch: Batch, layer: int) -> Tensor:
        pooled = pool(states, batch)
        return F.normalize(F.pad(pooled, (0, 1), value=1.0) @ self.maps[layer], dim=-1)

    def embed(self, batch: Batch) -> Tensor:
        return self.run(batch)[0]

    def run(self, batch: Batch) -> tuple[Tensor, float]:
        """Embeddings, and the layers run per text."""
        layers = self.model.encoder.layer
        x = self.model.embeddings(batch["input_ids"])
        rows, before, ran = torch.arange(len(x)), None, 0
        found = x.new_zeros(len(x), x.shape[-1])
        for i, layer in enumerate(layers):
            ran += len(x)
            x = layer(x, visible(batch))
            guess = pool(x, batch) if i == len(layers) - 1 else self.predict(x, batch, i)
            done = torch.full((len(x),), i == len(layers) - 1)
            if before is not None:
                done = done | ((guess * before).sum(dim=-1) >= self.threshold)
            found[rows[done]] = guess[done]
            if bool(done.all()):
                break
            stay = ~done
            rows, x, before = rows[stay], x[stay], guess[stay]
            batch = {name: value[stay] for name, value in batch.items()}
        return found, ran / len(found)

    @torch.no_grad()
    def fit(self, data: list[Batch], layers: float) -> None:
        """Fit the maps by least squares, and the threshold to a number of layers per text.

        The last quarter of the texts sets the threshold: on the others, which the maps know, predictions agree more.
        """
        pooled: list[list[Tensor]] = [[] for _ in self.model.encoder.layer]
        for batch in data:
            states = self.model(**batch, output_hidden_states=True).hidden_states[1:]
            for place, state in zip(pooled, states, strict=True):
                place.append(pool(state, batch))
        wanted = torch.cat(pooled[-1]).double()
        fitted = len(wanted) * 3 // 4
        guesses = []
        for i, place in enumerate(pooled):
            x = F.pad(torch.cat(place), (0, 1), value=1.0).double()
            ridge = 1e-3 * fitted / x.shape[1] * torch.eye(x.shape[1], dtype=x.dtype)
            some = x[:fitted]
            self.maps[i] = torch.linalg.solve(some.mT @ some + ridge, some.mT @ wanted[:fitted]).float()
            guesses.append(F.normalize(x[fitted:] @ self.maps[i].double(), dim=-1))
        agree = torch.stack([(a * b).sum(-1) for a, b in pairwise(guesses)], dim=1)
        low, high = -1.0, 1.0 + 1e-6
        for _ in range(40):
            middle = (low + high) / 2
            # the second layer is the first that can be compared with one before it
            left = agree[:, :-1] >= middle
            depth = torch.where(left.any(dim=1), left.int().argmax(dim=1) + 2, len(pooled))
            low, high = (low, middle) if float(depth.float().mean()) > layers else (middle, high)
        self.threshold.fill_(middle)


def weakest_layer(model: Any, data: list[Batch], targets: Mapping[str, Tensor]) -> int:
    """The layer whose absence changes the embedding least."""
    scores = []
    for i in range(len(model.encoder.layer)):
        smaller = without_layer(model, i)
        with torch.no_grad():
            cosines = [
                (Encoder(smaller).embed(batch) * pool(targets[str(n)].float(), batch)).sum(dim=-1).mean()
                for n, batch in enumerate(data)
            ]
        scores.append(float(torch.stack(cosines).mean()))
    return int(np.argmax(scores))


def without_layer(model: Any, index: int) -> Any:
    """A copy that shares the layers that stay."""
    smaller = copy.copy(model)
    smaller._modules = dict(model._modules)
    smaller.encoder = copy.copy(model.encoder)
    smaller.encoder._modules = dict(model.encoder._modules)
    smaller.encoder.layer = nn.ModuleList(layer for i, layer in enumerate(model.encoder.layer) if i != index)
    return smaller
