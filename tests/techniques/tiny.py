"""Tiny models and data for the tests of techniques; float64 and deterministic."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 37


def gpt2(n_layer: int = 4) -> nn.Module:
    """Hugging Face's GPT-2: fused attention weights, output tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=16,
            n_layer=n_layer,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def llama(n_layer: int = 4, tied: bool = False) -> nn.Module:
    """Hugging Face's Llama, with four heads and four key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY + 3,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=n_layer,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=16,
            tie_word_embeddings=tied,
        )
    )


def vit(n_layer: int = 4) -> nn.Module:
    """Hugging Face's ViT for images of one channel."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=n_layer,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=4,
        patch_size=2,
        num_channels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 5
    return ViTForImageClassification(config)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Plain(nn.Sequential):
    """A module that has nothing to do with Hugging Face, with a plan of its own for tensor parallelism."""

    def __init__(self, width: int = 8, depth: int = 4, classes: int = 5) -> None:
        super().__init__(
            nn.Linear(16, width), *[Block(width) for _ in range(depth)], nn.Linear(width, classes)
        )
        self.tp_plan = {"*.up": "colwise", "*.down": "rowwise"}


def plain(depth: int = 4) -> nn.Module:
    return Plain(depth=depth)


def compiled_plain(depth: int = 4) -> nn.Module:
    """The same with blocks that are compiled as far as a machine without a compiler of C++ can."""
    model = plain(depth)
    for block in model.children():
        block.compile(backend="aot_eager")
    return model


def dropping() -> nn.Module:
    """Plain, with dropout after each block."""
    model = Plain()
    for block in list(model)[1:-1]:
        block.down = nn.Sequential(block.down, nn.Dropout(0.2))
    model.tp_plan = {"*.up": "colwise", "*.down.0": "rowwise"}
    return model


def frozen_gpt2(n_layer: int = 4) -> nn.Module:
    """GPT-2 with frozen embeddings and a frozen first block."""
    model = gpt2(n_layer)
    for module in (model.transformer.wpe, model.transformer.h[0]):
        module.requires_grad_(False)
    return model


def tied_llama() -> nn.Module:
    return llama(tied=True)


def frozen_llama() -> nn.Module:
    """Llama with a frozen embedding and a frozen first block."""
    model = llama()
    for module in (model.model.embed_tokens, model.model.layers[0]):
        module.requires_grad_(False)
    return model


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def tokens(samples: int = 22, batch_size: int = 6, ragged_targets: bool = True) -> DataLoader[Any]:
    """Random tokens; some targets are ignored, and the last batch is smaller."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(samples):
        ids = torch.randint(0, VOCABULARY, (12,), generator=generator)
        labels = ids.clone()
        if ragged_targets:
            labels[: number % 5] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return DataLoader(Rows(rows), batch_size=batch_size, shuffle=True)


def images(samples: int = 22, batch_size: int = 6) -> DataLoader[Any]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(2)
    rows = [
        {
            "pixel_values": torch.randn(1, 4, 4, generator=generator),
            "labels": torch.randint(0, 5, (), generator=generator),
        }
        for _ in range(samples)
    ]
    return DataLoader(Rows(rows), batch_size=batch_size, shuffle=True)


def vectors(samples: int = 22, batch_size: int = 6, shuffle: bool = True) -> DataLoader[Any]:
    """Random vectors and classes, as pairs."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        (torch.randn(16, generator=generator), torch.randint(0, 5, (), generator=generator))
        for _ in range(samples)
    ]
    return DataLoader(Rows(rows), batch_size=batch_size, shuffle=shuffle)


def token_loss(outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the tokens that count, and their number."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return cross_entropy(logits, labels, reduction="sum", ignore_index=-100), (labels != -100).sum()


def image_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits, batch["labels"])


def vector_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets)
