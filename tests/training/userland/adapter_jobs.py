"""Jobs that fine-tune a pretrained model, whole or by adapters of PEFT's, on a table or a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

assert GPT2LMHeadModel, "imported here, so that the server that ranks are forked from imports it once"

_IDS = torch.randint(0, 64, (22, 8), generator=torch.Generator().manual_seed(2))


def pretrained(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def adapted(folder: str) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        pretrained(folder),
        LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )


class _Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(_IDS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": _IDS[index], "labels": _IDS[index]}


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"input_ids": row, "labels": row} for row in _IDS)


def table(batch_size: int) -> DataLoader[Any]:
    return DataLoader(_Rows(), batch_size=batch_size)


def stream(batch_size: int) -> DataLoader[Any]:
    return DataLoader(_Stream(), batch_size=batch_size)
