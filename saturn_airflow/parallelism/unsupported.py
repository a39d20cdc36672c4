"""What some techniques can't train, found by looking at the model."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.jobs import AS_MICRO_BATCHES, Job
from saturn_airflow.training.ranks import Ranks


def refuse_scripted(model: nn.Module, technique: str) -> None:
    """Refuse to take weights of modules apart that TorchScript has compiled.

    :raises DoesNotFit: when ``model`` has one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise DoesNotFit(
                f"{name or 'the model'} is compiled by TorchScript, whose weights and forward passes "
                f"{technique} can't change; leave out torch.jit.script, or use single or ddp"
            )


def refuse_sparse(model: nn.Module, ranks: Ranks) -> None:
    """Refuse to hand around among devices what is kept as a sparse tensor, which torch sends to none.

    :raises DoesNotFit: on several devices, when ``model`` has such a parameter or buffer.
    """
    tensors = itertools.chain(model.named_parameters(), model.named_buffers()) if ranks.size > 1 else ()
    for name, tensor in tensors:
        if tensor.layout != torch.strided:
            raise DoesNotFit(
                f"{name!r} of the model is a sparse tensor, which torch sends from no device to another; "
                "keep it dense (to_dense()), make it sparse in forward, or use one device"
            )


def refuse_shortened_embeddings(model: nn.Module, ranks: Ranks) -> None:
    """Refuse to share batches among devices where a lookup shortens the vectors it finds, which others'
    copies or shards of them do not see. It may begin long after the steps that are compared.

    :raises DoesNotFit: on several devices, when ``model`` has such an embedding.
    """
    for name, module in model.named_modules() if ranks.size > 1 else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise DoesNotFit(
                f"{name or 'the model'} is an {type(module).__name__} with max_norm, which shortens the "
                "vectors that one device's samples look up and leaves those on other devices as they are; "
                "leave max_norm out, or train on one device"
            )


def refuse_batch_norm(model: nn.Module, ranks: Ranks) -> None:
    """Refuse to spread a model over stages that looks at all of a batch at once.

    :raises DoesNotFit: on several devices, when the model trains with a BatchNorm.
    """
    if ranks.size > 1 and (name := _batch_norm_in(model)):
        raise DoesNotFit(
            f"{name}, whose statistics would be those of each micro-batch of a pipeline; use ddp or fsdp, "
            "freeze it, or use LayerNorm or GroupNorm"
        )


def refuse_accumulated_batch_norm(model: nn.Module, job: Job) -> None:
    """Refuse to accumulate the gradients of a model that looks at all of a batch at once.

    :raises DoesNotFit: when it trains with a BatchNorm, and batches are cut into several micro-batches.
    """
    accumulate = job.hparams.accumulate
    if accumulate > 1 and not job.in_micro_batches and (name := _batch_norm_in(model)):
        raise DoesNotFit(
            f"{name}, whose statistics would be those of each of the {accumulate} micro-batches that "
            "accumulate cuts a batch into, not of the batch; set accumulate to 1, freeze it, use LayerNorm "
            f"or GroupNorm, {AS_MICRO_BATCHES}"
        )


def _batch_norm_in(model: nn.Module) -> str:
    """The name and class of the first BatchNorm that trains; empty where there is none."""
    model.train()  # which models override that keep theirs frozen
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{name or 'the model'} is a {type(module).__name__}"
    return ""
