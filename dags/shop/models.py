"""Small Hugging Face models built from configs, with random weights, and their losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def gpt2(
    n_layer: int = 2, n_embd: int = 64, n_head: int = 2, vocab_size: int = 256, n_positions: int = 64
) -> nn.Module:
    """GPT-2 over bytes: as deep and wide as asked, without dropout, its output tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=n_positions,
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=n_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def vit(
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    image_size: int = 8,
    patch_size: int = 2,
    num_labels: int = 10,
) -> nn.Module:
    """A vision transformer for images of one channel, ``image_size`` pixels square."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=4 * hidden_size,
        image_size=image_size,
        patch_size=patch_size,
        num_channels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = num_labels
    return ViTForImageClassification(config)


def lm_loss(outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Cross-entropy of each next token: its sum and the number of tokens."""
    predicted, actual = outputs.logits[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(predicted.flatten(0, 1), actual.flatten(), reduction="sum"), actual.numel()


def classification_loss(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the classes."""
    return cross_entropy(outputs.logits, batch["labels"])
