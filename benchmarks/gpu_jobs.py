"""The models and batches of gpu.py: what a job names, for Saturn and for plain loops alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from saturn_airflow.model.jobs import HParams, Job


@dataclass(frozen=True)
class Shape:
    """A GPT-2-like model, or one like Llama where it has an ``inner`` width, and its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int  # in a sequence
    batch_size: int
    inner: int = 0
    adapters: int = 0  # the rank of those that are trained alone, beside frozen weights in bfloat16

    @property
    def parameters(self) -> int:
        """Parameters, the output tied to the embedding, without adapters."""
        if self.inner:
            return (
                self.layers * (4 * self.width**2 + 3 * self.width * self.inner) + self.vocabulary * self.width
            )
        return self.layers * 12 * self.width**2 + (self.vocabulary + self.tokens) * self.width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 for each parameter (4 where it is frozen), and attention."""
        each = 4 if self.adapters else 6
        return each * self.parameters + 12 * self.layers * self.width * self.tokens

    def device_bytes(self, *, recompute: bool) -> int:
        """About what a GPU needs to train it in memory, mixed in bfloat16: weights, gradients and AdamW's
        moments in float32 (and in bfloat16 the copies that autocast keeps, where nothing is computed again),
        what the backward pass keeps, and the logits of a batch with their gradients.

        What a layer keeps of a token was counted by hand: 40 bytes times the width with GPT-2's fused GELU,
        72 in Llama's shape; computed again, its input in float32, and one layer's share at a time.
        """
        weights = (2 if self.adapters else 16 if recompute else 18) * self.parameters
        tokens = self.batch_size * self.tokens
        layer = (72 if self.inner else 40) * self.width
        kept = 4 * self.width * self.layers + layer if recompute else layer * self.layers
        return weights + tokens * (kept + 20 * self.vocabulary)

    def host_bytes(self, *, spilled: bool) -> int:
        """About what the host needs: to load it, and to hold it with gradients and moments where it does."""
        if self.adapters:
            return 2 * self.parameters
        return (17 if spilled else 5) * self.parameters


def model(
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    tokens: int,
    inner: int = 0,
    adapters: int = 0,
) -> nn.Module:
    """GPT-2 or Llama of this shape, its weights filled quickly: what they are does not change the speed."""
    import transformers

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config: Any
    if inner:
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            max_position_embeddings=tokens,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            tie_word_embeddings=True,
            **ends,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=tokens,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # One kernel; the usual "gelu_new" is eight, one of them in float32 under autocast.
            activation_function="gelu_pytorch_tanh",
            **ends,
        )
    with torch.device("meta"):
        auto: Any = transformers.AutoModelForCausalLM
        built = auto.from_config(config, dtype=torch.bfloat16 if adapters else torch.float32)
    built.to_empty(device="cpu")
    built.tie_weights()
    for buffer in built.buffers():
        buffer.zero_()
    if inner:  # whose angles are computed
        built.model.rotary_emb = type(built.model.rotary_emb)(config=config)
    return adapted(filled(built), adapters) if adapters else filled(built)


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a product of two small ones (LoRA, Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def adapted(built: nn.Module, rank: int) -> nn.Module:
    """``built`` frozen, with adapters at the queries and values of its attention."""
    built.requires_grad_(False)
    for module in list(built.modules()):
        for name in ("q_proj", "v_proj"):
            if isinstance(base := getattr(module, name, None), nn.Linear):
                setattr(module, name, Adapted(base, rank))
    return built


def filled(built: nn.Module) -> nn.Module:
    """A model with small random matrices, ones in its norms and zeros as biases."""
    pattern = torch.randn(2**20) * 0.02  # which is cast where it is copied
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float(("ln" in name or "norm" in name) and name.endswith("weight")))
            else:
                for part in parameter.flatten().split(len(pattern)):  # type: ignore[no-untyped-call]
                    part.copy_(pattern[: len(part)])
    return built


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __init__(self, vocabulary: int, tokens: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, vocabulary, (samples, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def data(vocabulary: int, tokens: int, batch_size: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Four batches of random tokens."""
    return DataLoader(
        RandomTokens(vocabulary, tokens, 4 * batch_size),
        batch_size=batch_size,
        pin_memory=torch.cuda.is_available(),
    )


def loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def job(shape: Shape, **hparams: Any) -> Job:
    """The job of this shape."""
    sizes = {"vocabulary": shape.vocabulary, "tokens": shape.tokens}
    return Job(
        "benchmark",
        load_model="gpu_jobs:model",
        load_dataloader="gpu_jobs:data",
        loss_function="gpu_jobs:loss",
        model_args={
            "layers": shape.layers,
            "width": shape.width,
            "heads": shape.heads,
            "inner": shape.inner,
            "adapters": shape.adapters,
            **sizes,
        },
        data_args=sizes,
        hparams=HParams(**{"lr": 1e-4, "batch_size": shape.batch_size, **hparams}),
    )
