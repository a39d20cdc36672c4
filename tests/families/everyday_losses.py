"""Losses as people write them, of a model's outputs and its batch."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.functional import cross_entropy


def one(outputs, batch):
    return cross_entropy(outputs, batch["one"])


def target(outputs, batch):
    return cross_entropy(outputs, batch["target"])


def tokens(outputs, batch):
    return cross_entropy(outputs.flatten(0, 1), batch["label"].flatten())


def smoothed(outputs, batch):
    weight = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=outputs.dtype)
    return cross_entropy(outputs.flatten(0, 1), batch["label"].flatten(), weight=weight, label_smoothing=0.1)


def several(outputs, batch):
    """Tokens, classes and numbers, as long as the model holds each for uncertain."""
    losses = torch.stack(
        [
            cross_entropy(outputs["tokens"].flatten(0, 1), batch["label"].flatten()),
            functional.smooth_l1_loss(outputs["numbers"], batch["number"]),
        ]
    )
    return (losses * torch.exp(-outputs["log_variance"]) + outputs["log_variance"]).sum() + 0.3 * one(
        outputs["classes"], batch
    )


def two_heads(outputs, batch):
    return one(outputs["classes"], batch) + functional.mse_loss(outputs["numbers"], batch["number"])


def gaussian(outputs, batch):
    return functional.gaussian_nll_loss(outputs[:, :3], batch["number"], functional.softplus(outputs[:, 3:]))


def focal(outputs, batch):
    """Divided by the number of positives in the batch (RetinaNet)."""
    positive = batch["positive"].to(outputs.dtype)
    loss = functional.binary_cross_entropy_with_logits(outputs[..., 0], positive, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).sum() / positive.sum().clamp(min=1)


def dice(outputs, batch):
    """One ratio over the whole batch."""
    positive, found = batch["positive"].to(outputs.dtype), torch.sigmoid(outputs[..., 0])
    return 1 - 2 * (positive * found).sum() / (positive.sum() + found.sum())


def weighed(outputs, batch):
    losses = cross_entropy(outputs, batch["one"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def added_up(outputs, batch):
    return cross_entropy(outputs, batch["one"], reduction="sum")


def perplexity(outputs, batch):
    return torch.exp(cross_entropy(outputs, batch["one"]))


def root(outputs, batch):
    return torch.sqrt(functional.mse_loss(outputs[:, :3], batch["number"]))


def masked_mean(outputs, batch):
    """A mean over what a mask leaves, by indexing."""
    labels = batch["label"].flatten()
    losses = -outputs.flatten(0, 1).log_softmax(1)[torch.arange(len(labels)), labels.clamp(min=0)]
    return losses[labels >= 0].mean()


def numbers(outputs, batch):
    return functional.mse_loss(outputs, batch["number"])


def first_number(outputs, batch):
    return functional.l1_loss(outputs, batch["number"][:, 0])


def squares(outputs, batch):
    return outputs.square().mean()


def variances(outputs, batch):
    """Keeps the outputs of a batch apart (VICReg)."""
    return functional.relu(1 - outputs.std(0)).mean() + one(outputs, batch)


def hardest(outputs, batch):
    """The mean of the worst half of the losses of the batch."""
    losses = cross_entropy(outputs, batch["one"], reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()
