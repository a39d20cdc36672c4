"""LightningModules as people write them."""

from __future__ import annotations

import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from own_step_jobs import WIDTH, net, rows
from torch import nn
from torch.nn import functional

__all__ = ["rows"]


class Classifier(pl.LightningModule):
    """Automatic optimization, a schedule by steps that asks for all of them, and logged numbers."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = functional.mse_loss(self(x), y) * (1 + 0.1 * self.current_epoch + 0.01 * self.global_step)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", functional.mse_loss(self(x), y))
        self.log_dict({"val_mae": functional.l1_loss(self(x), y)})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class GAN(pl.LightningModule):
    """Manual optimization, with two optimizers, one of which is toggled."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = net(seed=1), net(1, seed=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        g, c = self.optimizers()
        real, noise = batch
        c.zero_grad()
        c_loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
        self.manual_backward(c_loss)
        self.clip_gradients(c, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        c.step()
        self.toggle_optimizer(g)
        g_loss = -self.critic(self.generator(noise)).mean()
        g.zero_grad()
        self.manual_backward(g_loss)
        g.step()
        self.untoggle_optimizer(g)
        if self.trainer.sanity_checking:
            raise RuntimeError("this is no check")
        self.lr_schedulers().step()
        self.log_dict({"c_loss": c_loss, "g_loss": g_loss}, prog_bar=True)
        return g_loss

    def configure_optimizers(self) -> Any:
        g = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        c = torch.optim.SGD(self.critic.parameters(), lr=1e-2)
        return [g, c], [torch.optim.lr_scheduler.ExponentialLR(g, 0.95)]


class Frozen(Classifier):
    """A part in evaluation mode from the beginning, and a loss that is known after the evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double().eval()
        self.found: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_mae", functional.l1_loss(self(x), y), batch_size=len(x))
        self.found.append((self(x) - y).square().mean(1))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.cat(self.found).mean())
        self.found.clear()


class Measured(Classifier):
    """Metric objects in both steps, whose values are not means of those of batches, and one that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.of_step, self.of_epoch = torchmetrics.MeanSquaredError(squared=False), torchmetrics.R2Score()
        self.of_both = torchmetrics.SumMetric()
        both = [torchmetrics.MeanSquaredError(squared=False), torchmetrics.MeanAbsoluteError()]
        self.in_training = torchmetrics.MetricCollection(both, prefix="fit_")
        self.in_validation = self.in_training.clone(prefix="val_")
        self.val_loss, self.best = torchmetrics.MeanMetric(), torchmetrics.MinMetric()
        self.val_median = Median()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        found = self(x)
        self.of_step(found, y)
        self.log("of_step", self.of_step)
        self.of_epoch.update(found.mean(1), y.mean(1))
        self.log("r2_of_epoch", self.of_epoch, on_step=False, on_epoch=True)
        self.of_both(found)
        self.log("sum", self.of_both, on_step=True, on_epoch=True)
        self.in_training.update(found, y)
        self.log_dict(self.in_training, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_loss.update((self(x) - y).square().mean(1))
        self.log("val_loss", self.val_loss)
        self.in_validation.update(self(x), y)
        self.log_dict(self.in_validation, on_epoch=True, on_step=False)
        self.val_median.update((self(x) - y).square().mean(1))
        self.log("val_median", self.val_median, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.best.update(self.val_loss.compute())
        self.log("val_best", self.best.compute())


class Median(torchmetrics.Metric):
    """Of what it was given, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, values: torch.Tensor) -> None:
        self.seen.append(values)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.seen).median()


class MeasuredByMeans(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("mean_loss", self.mean, on_step=False, on_epoch=True)
        return loss


class Uncalled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        self.log("mean_loss", self.mean)
        return loss


class Hidden(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mean = torchmetrics.MeanMetric()
        mean(1.0)
        self.log("mean", mean)
        return super().training_step(batch, batch_idx)


class Setting(Classifier):
    def setup(self, stage: str) -> None: ...


class Asking(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.datamodule.scale


class LoggingEpochs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True)
        return loss


class Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.all_gather(batch[0]).sum()


def transformers_trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(net(), TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[]))


def fitted(name: str, epochs: int) -> tuple[nn.Module, pl.Trainer]:
    """The model as Lightning's own Trainer trains it."""
    model = {"Classifier": Classifier, "Frozen": Frozen, "GAN": GAN, "Measured": Measured}[name]()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    evaluated = {"val_dataloaders": rows()} if name != "GAN" else {}
    trainer.fit(model, rows(), **evaluated)
    return model, trainer
