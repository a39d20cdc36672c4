"""Models with training steps of their own, of plain torch: nothing of Saturn but ``whole_batch``, which is
the identity outside of it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from own_rates import Draws, Noisy, counting
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from saturn_airflow.training.whole_batch import whole_batch

WIDTH, SAMPLES = 6, 21


def rows(batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, noise), batch_size=batch_size)


def net(out: int = WIDTH, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, out)).double()


class GAN(nn.Module):
    """Two optimizers, one of which steps twice as often, with a schedule each."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(seed=1), net(1, seed=2)

    def configure_optimizers(self) -> Any:
        self.g = torch.optim.Adam(self.generator.parameters(), 2e-2, betas=(0.5, 0.9))
        self.c = torch.optim.SGD(self.critic.parameters(), 1e-1, momentum=0.9)
        self.schedules = [
            torch.optim.lr_scheduler.ExponentialLR(self.g, 0.9),
            torch.optim.lr_scheduler.OneCycleLR(self.c, 0.2, total_steps=40),
        ]
        return [self.g, self.c], self.schedules

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        real, noise = batch
        for _ in range(2):
            self.c.zero_grad()
            c_loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
            c_loss = c_loss + 10 * self.penalty(real)
            c_loss.backward()
            nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
            self.c.step()
        self.g.zero_grad()
        g_loss = -self.critic(self.generator(noise)).mean()
        g_loss.backward()
        self.g.step()
        for schedule in self.schedules:
            schedule.step()
        return {"loss": g_loss, "c_loss": c_loss}

    def penalty(self, real: torch.Tensor) -> torch.Tensor:
        real = real.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(real).sum(), real, create_graph=True)
        return ((slope.norm(dim=1) - 1) ** 2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        real, noise = batch
        return {
            "loss": self.critic(real).mean() - self.critic(self.generator(noise)).mean(),
            "rows": real.sum(),
        }


class Distillation(nn.Module):
    """A frozen teacher, one optimizer, and a schedule by epochs."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.student, self.teacher = net(seed=3), net(seed=4).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.student.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        student = self.student(x)
        soft = functional.kl_div(student.log_softmax(1), self.teacher(x).softmax(1), reduction="batchmean")
        return soft + functional.mse_loss(student, y)


class EMA(nn.Module):
    """An average of the weights, moved after each step, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.student = net(seed=5)
        self.average = copy.deepcopy(self.student).requires_grad_(False)
        self.moves = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.student.parameters(), 1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        with torch.no_grad():
            target = self.average(x)
        return functional.mse_loss(self.student(x), y + target)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.moves += 1
        decay = min(0.9, self.moves / (10 + self.moves))
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.student.parameters(), strict=True):
                mean.lerp_(new, 1 - decay)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(self.average(batch[0]), batch[1])


class MoCo(nn.Module):
    """Momentum contrast (He et al., 2020): negatives come from a queue of the keys of earlier batches.

    :param whole: whether the queue gets the keys of the whole batch, wherever they are computed.
    """

    SIZE = 12

    def __init__(self, whole: bool = True) -> None:
        super().__init__()
        self.query, self.key = net(seed=6), net(seed=6).requires_grad_(False)
        torch.manual_seed(7)
        self.register_buffer("queue", functional.normalize(torch.randn(self.SIZE, WIDTH).double(), dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.gather: Callable[[torch.Tensor], torch.Tensor] = whole_batch if whole else torch.Tensor.detach

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.query.parameters(), 1e-1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.lerp_(query, 0.1)
            keys = functional.normalize(self.key(batch[1]), dim=1)
        queries = functional.normalize(self.query(batch[0]), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().T], dim=1) / 0.2
        keys = self.gather(keys)
        places = (self.at + torch.arange(len(keys))) % self.SIZE
        self.queue[places] = keys
        self.at += len(keys)
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class Accumulating(nn.Module):
    """Steps every third batch, so that gradients are there between batches, and at a checkpoint."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = net(seed=8)

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2)
        return self.optimizer

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        (loss / 3).backward()
        if batch_idx % 3 == 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss}


class Closing(nn.Module):
    """Its optimizer computes losses by itself, by a closure."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = net(seed=9)

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), 0.1, max_iter=3, history_size=4)
        return self.optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = functional.mse_loss(self.net(batch[0]), batch[1])
            loss.backward()
            return loss

        return self.optimizer.step(closure)


class Searching(Closing):
    """Its optimizer takes steps as long as the losses that its closure returns want them."""

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), 1.0, line_search_fn="strong_wolfe")
        return self.optimizer


class Sparse(nn.Module):
    """Its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.words = nn.Embedding(9, WIDTH, sparse=True).double()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.words.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        words = (4 * batch[0][:, 0].abs()).long().clamp(max=8)
        return functional.mse_loss(self.words(words), batch[1])


class Scaling(nn.Module):
    """Scales its loss by an object of torch's, whose state it tells; the scale matters to its clipping."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scaler = net(seed=1), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def get_extra_state(self) -> Any:
        return self.scaler.state_dict()

    def set_extra_state(self, state: Any) -> None:
        self.scaler.load_state_dict(state)

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        return self.optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), self.scaler.get_scale() / 2**14)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


class ClosingByItself(Closing):
    automatic_optimization = True


class Finding(EMA):
    """Logs what it finds in its samples: on two devices each logs something else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sign = "positive" if batch[0][0, 0] > 0 else "negative"
        return {"loss": super().training_step(batch, batch_idx), sign: batch[0].mean()}


class Unfilled(EMA):
    """Has a buffer of what is no number yet, and a logger among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor([math.nan, math.inf, -math.inf]))
        self.logger = logging.getLogger("own_step_jobs.unfilled")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.logger.debug("batch %d", batch_idx)
        return super().training_step(batch, batch_idx)


class Drawing(EMA):
    """Its optimizer draws random numbers, and its step draws others for each of its samples."""

    def configure_optimizers(self) -> Any:
        return Noisy(self.student.parameters(), 1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch[0] + torch.rand_like(batch[0]), batch[1]], batch_idx)


class Forgetful(EMA):
    """Keeps a tensor where no checkpoint has it: it is too large."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.last = torch.zeros(2**22).double() + batch[0].mean()
        return super().training_step(batch, batch_idx)


class Hidden(EMA):
    """Hides the average from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [self._modules.pop("average")]

    def __getattr__(self, name: str) -> Any:
        return self.hidden[0] if name == "average" else super().__getattr__(name)


class Thawing(EMA):
    """Trains more after its third step: in the group that there is."""

    def configure_optimizers(self) -> Any:
        first, *self.further = self.student.parameters()
        self.optimizer = torch.optim.Adam([first], 1e-2)
        return self.optimizer

    def thaw(self) -> None:
        self.optimizer.param_groups[0]["params"].extend(self.further)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.moves == 3:
            self.thaw()


class Regrouping(Thawing):
    """In a group of its own."""

    def thaw(self) -> None:
        self.optimizer.add_param_group({"params": self.further})


class Hooked(EMA):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Coupled(nn.Module):
    """Contrasts samples with the others of their batch, from step ``after`` on."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.net, self.after, self.steps = net(seed=9), after, 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        one, other = self.net(batch[0]), batch[1]
        if self.steps <= self.after:
            return functional.mse_loss(one, other)
        return functional.cross_entropy(one @ other.T, torch.arange(len(one)))


class Summed(Coupled):
    """Its loss is a sum over the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().sum()


class Normed(Coupled):
    """Has a BatchNorm, and an epoch's hook that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(WIDTH).double(), 0.0

    def on_train_epoch_start(self) -> None:
        self.scale += 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.scale * functional.mse_loss(self.norm(self.net(batch[0])), batch[1])


class Exchanging(Coupled):
    """It adds what all ranks computed, where there are several, and learns more from a sample that it has met
    before."""

    def __init__(self, remembers: bool = False) -> None:
        super().__init__()
        self.met: dict[float, int] | None = {} if remembers else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found = self.net(batch[0])
        everyones = [found]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyones = [torch.empty_like(found) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, found.detach())
        weights = torch.ones(len(found), 1, dtype=found.dtype)
        if self.met is not None:
            for row, key in enumerate(batch[0].sum(1).tolist()):
                weights[row] += self.met.get(key, 0)
                self.met[key] = 1
        loss = (weights * (found - batch[1]) ** 2).mean()
        return loss + 0.1 * (len(everyones) - 1) * torch.cat(everyones).mean()


class Dropping(Coupled):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(functional.dropout(self.net(batch[0])), batch[1])


class Several(GAN):
    automatic_optimization = True


class Stepless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()


class Following(EMA):
    """Follows a metric of its evaluation; which optimizer it has is said by the hyper-parameters' names."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.student.parameters(), 1e-1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "eval_loss"}}


class Scheduled(EMA):
    """Its schedules are of functions that remember things: one that closes over them, and an object."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p]} for p in self.student.parameters()]
        optimizer = torch.optim.SGD(groups, 1e-1)
        rates = [counting() if number % 2 else Draws() for number, _ in enumerate(groups)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class EveryOther(EMA):
    """Its schedule is stepped after every other step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.student.parameters(), 1e-1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2},
        }
