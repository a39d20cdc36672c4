"""Small data of every sort: batches of 5, 5 and 1 samples, so that shares are unequal and one is empty."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

VOCABULARY = 48
SAMPLES, BATCH = 11, 5
#: What stands for padding, and what a tokenizer masks with.
PAD, MASK = 0, 1


class Rows(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    """Batches that can only be run through."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader(
    row: Callable[[int, torch.Generator], Any],
    samples: int = SAMPLES,
    batch_size: int = BATCH,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """Samples ``row(number, generator)`` in order, in batches."""
    generator = torch.Generator().manual_seed(7)
    rows = [row(number, generator) for number in range(samples)]
    return DataLoader(Rows(rows), batch_size=batch_size, collate_fn=collate)


def ids(generator: torch.Generator, length: int, least: int = 4) -> torch.Tensor:
    return torch.randint(least, VOCABULARY, (length,), generator=generator)


def causal(length: int = 9) -> DataLoader[Any]:
    """Tokens and labels of one length; more of the labels are ignored in some samples than in others."""

    def row(number: int, generator: torch.Generator) -> Any:
        tokens = ids(generator, length)
        labels = tokens.clone()
        labels[: number % 4] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    return loader(row)


def padded_causal() -> DataLoader[Any]:
    """Token lists of several lengths, padded by the collator for causal language models."""
    return _collated(lambda collators: collators.DataCollatorForLanguageModeling(_tokenizer(), mlm=False))


def masked(length: int = 9) -> DataLoader[Any]:
    """Tokens some of which are masked; labels for those alone, of another number in each sample."""

    def row(number: int, generator: torch.Generator) -> Any:
        tokens = ids(generator, length)
        chosen = torch.arange(length) % 5 <= number % 3
        labels = torch.where(chosen, tokens, -100)
        tokens = torch.where(chosen, MASK, tokens)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    return loader(row)


def masked_by_collator() -> DataLoader[Any]:
    """Token lists that the collator masks; what it draws follows from the samples it is given."""
    return _collated(
        lambda collators: DrawnFromBatch(
            collators.DataCollatorForLanguageModeling(_tokenizer(), mlm_probability=0.4)
        )
    )


def classified(classes: int = 3, length: int = 9) -> DataLoader[Any]:
    """Token lists of several lengths with a class each, padded by the collator for that."""

    def row(number: int, generator: torch.Generator) -> Any:
        tokens = ids(generator, length - number % 4)
        label = int(torch.randint(0, classes, (), generator=generator))
        return {"input_ids": tokens.tolist(), "attention_mask": [1] * len(tokens), "label": label}

    from transformers import DataCollatorWithPadding

    return loader(row, collate=DataCollatorWithPadding(_tokenizer()))


def tagged(classes: int = 3) -> DataLoader[Any]:
    """Token lists of several lengths with a class for each token."""

    def row(number: int, generator: torch.Generator) -> Any:
        tokens = ids(generator, 9 - number % 4)
        labels = torch.randint(0, classes, tokens.shape, generator=generator)
        return {
            "input_ids": tokens.tolist(),
            "attention_mask": [1] * len(tokens),
            "labels": labels.tolist(),
        }

    from transformers import DataCollatorForTokenClassification

    return loader(row, collate=DataCollatorForTokenClassification(_tokenizer()))


def pairs_of_texts() -> DataLoader[Any]:
    """Inputs and labels of several lengths each, padded by the collator for sequence-to-sequence models."""

    def row(number: int, generator: torch.Generator) -> Any:
        tokens, labels = ids(generator, 9 - number % 4), ids(generator, 4 + number % 3)
        return {
            "input_ids": tokens.tolist(),
            "attention_mask": [1] * len(tokens),
            "labels": labels.tolist(),
        }

    from transformers import DataCollatorForSeq2Seq

    return loader(row, collate=DataCollatorForSeq2Seq(_tokenizer()))


def fields(**make: Callable[[int, torch.Generator], torch.Tensor]) -> Callable[[], DataLoader[Any]]:
    """Data of samples with these fields."""

    def data() -> DataLoader[Any]:
        return loader(lambda number, generator: {name: one(number, generator) for name, one in make.items()})

    return data


def normal(*shape: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda number, generator: torch.randn(shape, generator=generator)


def whole(low: int, high: int, *shape: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda number, generator: torch.randint(low, high, shape, generator=generator)


def ones(*shape: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda number, generator: torch.ones(shape, dtype=torch.long)


class DrawnFromBatch:
    """A collator whose draws are seeded by the samples it is given."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(repr([list(sample["input_ids"]) for sample in samples]).encode()))
            return self.collate(samples)


def _collated(make: Callable[[Any], Callable[[list[Any]], Any]]) -> DataLoader[Any]:
    def row(number: int, generator: torch.Generator) -> Any:
        return {"input_ids": ids(generator, 9 - number % 4).tolist()}

    import transformers

    return loader(row, collate=make(transformers))


def _tokenizer() -> Any:
    """A tokenizer of a few words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": PAD, "[MASK]": MASK, "[UNK]": 2, "[CLS]": 3}
    words |= {f"w{number}": number for number in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        cls_token="[CLS]",
    )
