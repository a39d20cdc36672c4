"""Batches as people have them: vectors with classes and numbers, records, graphs of several sizes."""

from __future__ import annotations

import torch

from families import data

WIDTH = 8


CLASSES = 4


LENGTH = 6


def rows(samples: int = data.SAMPLES, *, ignored: bool = False):
    """Vectors, classes (none in two samples of the second batch where ``ignored``), numbers, weights."""

    def batches():
        def row(number, generator):
            label = torch.randint(0, CLASSES, (LENGTH,), generator=generator)
            label[: (2 * number) % 5] = -100
            if ignored and number in (5, 6):
                label[:] = -100
            return {
                "x": torch.randn(LENGTH, WIDTH, generator=generator),
                "length": torch.tensor(1 + number % LENGTH),
                "label": label,
                "one": torch.randint(0, CLASSES, (), generator=generator),
                "number": torch.randn(3, generator=generator),
                "weight": torch.rand((), generator=generator) + 0.1,
                "positive": (torch.rand(LENGTH, generator=generator) > 0.6).long(),
            }

        return data.loader(row, samples)

    return batches


def told():
    """Dictionaries with names, nothing, and lists of pairs in them, by a collate function."""

    def row(number, generator):
        return {"id": f"sample {number}", "x": torch.randn(WIDTH, generator=generator), "y": number % CLASSES}

    def collate(batch):
        return {
            "names": [sample["id"] for sample in batch],
            "extra": None,
            "pairs": [(sample["x"], sample["id"]) for sample in batch],
            "target": torch.tensor([sample["y"] for sample in batch]),
        }

    return data.loader(row, collate=collate)


def graphs():
    """Graphs of several sizes in one batch: nodes in a row, edges between them, and whose they are."""

    def row(number, generator):
        return torch.randn(2 + number % 3, WIDTH, generator=generator)

    def collate(nodes):
        whose = torch.cat([torch.full((len(n),), i) for i, n in enumerate(nodes)])
        edges = torch.arange(len(whose) - 1)
        return {
            "nodes": torch.cat(nodes),
            "edges": torch.stack([edges, edges + 1]),
            "whose": whose,
            "target": torch.arange(len(nodes)) % CLASSES,
        }

    return data.loader(row, collate=collate)
