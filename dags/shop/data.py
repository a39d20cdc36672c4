"""Real data that needs no network: the text Python ships with, and scikit-learn's hand-written digits."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

Sample = dict[str, torch.Tensor]


class Table(Dataset[Sample]):
    """Samples that are rows of tensors, each under a name."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Sample:
        return {name: column[index] for name, column in self.columns.items()}


def python_text(batch_size: int = 16, window: int = 64, samples: int = 1024) -> DataLoader[Sample]:
    """Windows of ``window`` bytes from the start of the text that Python ships with."""
    return DataLoader(_windows(window, 0, samples), batch_size=batch_size, shuffle=True)


def python_text_eval(batch_size: int = 16, window: int = 64, samples: int = 1024) -> DataLoader[Sample]:
    """A tenth as many windows, from the text that follows what :func:`python_text` trains on."""
    return DataLoader(_windows(window, samples, max(1, samples // 10)), batch_size=batch_size)


def packages_with_text(least_bytes: int) -> list[str]:
    """Names of Python's own packages whose files hold that many bytes of text at least."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    return [name for name in names if len(_text_of(folder / name)) >= least_bytes]


def package_text(
    package: str, batch_size: int = 16, window: int = 64, samples: int = 512
) -> DataLoader[Sample]:
    """Windows of ``window`` bytes from the text of one of Python's own packages."""
    text = _text_of(Path(sysconfig.get_paths()["stdlib"], package))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: samples * window].long().view(-1, window)
    return DataLoader(Table(input_ids=tokens, labels=tokens), batch_size=batch_size, shuffle=True)


def digits(batch_size: int = 32, train: bool = True) -> DataLoader[Sample]:
    """scikit-learn's 1797 digits of 8 x 8 pixels in [-1, 1]; every fifth is kept for evaluation."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    held_out = torch.arange(len(classes)) % 5 == 4
    chosen = ~held_out if train else held_out
    table = Table(
        pixel_values=(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1)[chosen],
        labels=torch.tensor(classes, dtype=torch.long)[chosen],
    )
    return DataLoader(table, batch_size=batch_size, shuffle=train)


def digits_eval(batch_size: int = 32) -> DataLoader[Sample]:
    """The digits that :func:`digits` keeps for evaluation, in order."""
    return digits(batch_size, train=False)


def _text_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def _windows(window: int, first: int, count: int) -> Table:
    start, end = first * window, (first + count) * window
    text = bytearray()
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*folder.glob("*.py"), *folder.glob("*.txt")]):
        text += path.read_bytes()
        if len(text) >= end:
            break
    if len(text) < end:
        raise ValueError(
            f"{folder} holds {len(text)} bytes of text; {end} are asked for: lower window or samples"
        )
    tokens = torch.frombuffer(text, dtype=torch.uint8)[start:end].long().view(count, window)
    return Table(input_ids=tokens, labels=tokens)
