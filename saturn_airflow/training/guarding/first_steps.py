"""The plain loop's steps on a few samples, which those of techniques are compared with."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from saturn_airflow.launch import failures
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism import caches
from saturn_airflow.parallelism.module_state import ModuleState, parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import nested, rng
from saturn_airflow.training.batches import Cut, Data, GlobalBatch, Position, total_steps
from saturn_airflow.training.guarding import comparing, other_draws, pairs, resumed_optimizer, whole
from saturn_airflow.training.guarding.bent_gradients import bent_gradient
from saturn_airflow.training.guarding.bent_losses import bends
from saturn_airflow.training.guarding.differences import TOLERANCES
from saturn_airflow.training.guarding.few_samples import met_again, numbers_of_samples
from saturn_airflow.training.guarding.followed_data import FollowedData
from saturn_airflow.training.guarding.forgetting import Watched
from saturn_airflow.training.guarding.own_plain import OwnPlainLoop
from saturn_airflow.training.guarding.plain import PlainLoop, Step
from saturn_airflow.training.guarding.randomness import without_randomness
from saturn_airflow.training.guarding.remembered import Keys, KnownSamples
from saturn_airflow.training.guarding.samples import Samples
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.losses.decompose import objectives
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.losses.rules import SAMPLES
from saturn_airflow.training.ranks import Ranks

Load = Callable[[], nn.Module]

#: Samples of the steps that see whether random numbers are those of one device.
RANDOM = (16, 16, 16)
#: More samples than any batch has.
WHOLE = 1 << 30
# What share of their norm gradients are clipped to in the second step, where the job clips: its own norm may
# be such that it clips none of the first steps, and training comes to others.
_CLIPPED_SHARE = 0.5


@dataclass
class PlainSteps:
    """What the plain loop did.

    :param sizes: samples of each step's batch.
    :param skipped: the numbers of those batches of which the loss is no number, as where no sample has a
        label: nobody takes steps on them.
    :param steps: on the others.
    :param number_format: the lowest one that anything was computed in.
    :param drew: whether it would have drawn random numbers.
    :param random_losses: of further steps in which it drew what ``single`` draws, where that can be told,
        and
    :param random_effect: how much other random numbers change the loss of one of them, at most.
    :param hidden_draws: whether they change gradients, though losses by too little to tell which were drawn.
    :param device: on what kind of device.
    :param evaluations: the losses of a batch of the evaluation data: after the first step, where the loop
        takes it, and after the last; none where there are no such data.
    :param remembered: what the loss has to know of single samples, and does by then, after the first step.
    :param bent: a parameter whose gradient does not grow as its loss does, as where something clamps it or
        adds noise: gradients of parts do not add up to the whole batch's then. Empty where there is none.
    :param bent_by_hooks: whether it, or another such one, has hooks.
    :param bent_loss: whether the loss is no linear function of the means over a batch that it is made of.
    :param alone: whether they are compared with those of one device, which draws by generators of the job's
        own what one device draws.
    """

    sizes: Sequence[int]
    device: str
    skipped: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    number_format: torch.dtype = torch.float64
    drew: bool = False
    random_losses: list[float] = field(default_factory=list)
    random_effect: float = math.inf
    hidden_draws: bool = False
    evaluations: list[float] = field(default_factory=list)
    remembered: Keys = field(default_factory=dict)
    bent: str = ""
    bent_by_hooks: bool = False
    bent_loss: bool = False
    alone: bool = True

    @property
    def shows(self) -> bool:
        """Whether anything has a gradient in a step, so that another one would show."""
        gradients = (gradient for step in self.steps for gradient in step.gradients.values())
        return any(gradient is not None and gradient.norm > 0 for gradient in gradients)

    def noise_of(self, loss: float) -> float:
        """How far the losses of two takes of a step with this one may be apart."""
        return TOLERANCES[self.number_format].loss * max(abs(loss), 1e-2)


def take(
    job: Job,
    model: nn.Module,
    load: Load,
    ranks: Ranks,
    data: Data,
    eval_data: Data | None,
    *,
    whole_batch: bool,
) -> PlainSteps:
    """The plain steps on the device, or where it is too small on the CPU.

    :param whole_batch: take a whole batch, too, if it fits: models may look at how many samples there are.
    """
    several, few = numbers_of_samples(ranks.size, job.hparams.accumulate)
    # What begins at zero, such as an adapter, shows in a later step. Some models need more than one sample,
    # and some a certain number of them.
    wholes: list[list[int]] = [[WHOLE], []] if whole_batch else [[]]
    attempts = [
        [*sizes, *whole, *RANDOM] for sizes in ([several, few, several], [several] * 3) for whole in wholes
    ] + [[WHOLE] * (3 + len(RANDOM))]
    plain = PlainSteps((), ranks.device.type)
    # As with a loss of pairs on few samples, of which no two are of one class.
    shows_nothing: PlainSteps | None = None
    device = ranks.device
    while attempts:
        sizes, *later = attempts
        plain = PlainSteps(sizes, device.type, alone=ranks.size == 1)
        ran_out = False
        try:
            take_each(plain, job, model, load, device, data, eval_data)
        except Exception as error:
            ran_out = device.type != "cpu" and failures.ran_out_of_memory(error)
            if not ran_out and not later:
                raise
        if ran_out:
            # From here on nothing refers to what failed, and to what it held.
            torch.cuda.empty_cache()
            if sizes.count(WHOLE) == 1 or shows_nothing is not None:
                attempts = later
            else:
                device = torch.device("cpu")
            continue
        if plain.shows:
            return plain
        shows_nothing = shows_nothing or (plain if plain.steps else None)
        attempts = later
    return shows_nothing or plain


def take_each(
    plain: PlainSteps,
    job: Job,
    model: nn.Module,
    load: Load,
    device: torch.device,
    data: Data,
    eval_data: Data | None,
) -> None:
    """Take the steps of ``plain.sizes``, except those on batches of which the loss is no number.

    :raises JobError: when the job can't be trained, or its training can't be resumed.
    """
    hooks, done = True, False
    while not done:
        plain.evaluations = []
        try:
            users = UsersState(job, model)
            with users.put_back():  # each time from the start, and the technique as well
                args = plain, job, model, load, device, data, eval_data
                done = _take_steps(*args, hooks=hooks, held=users.holds_model)
        except JobError as error:
            if not hooks or "saved tensor hooks" not in str(error):  # which torch.func's gradients don't bear
                raise
            hooks = False


def _take_steps(
    plain: PlainSteps,
    job: Job,
    model: nn.Module,
    load: Load,
    device: torch.device,
    data: Data,
    eval_data: Data | None,
    *,
    hooks: bool,
    held: bool,
) -> bool:
    """Take the steps; whether all losses were numbers. Where one was not, its batch is to be skipped.

    :param held: whether the job's code refers to the model, so that it would not know a copy.
    """
    batches, random, followed = _batches(plain, job, data)
    loop = _plain_loop(job, _copied(model, load, held).to(device), device, data)
    if isinstance(loop, PlainLoop) and batches:
        _refuse_caches_that_matter(job, model, loop, next(iter(batches.values())).micro_batches[0].data)
    watched = Watched(job, loop.model, device) if isinstance(loop, PlainLoop) else None
    steps: list[Step] = []
    remembered: Keys = {}
    with (
        without_randomness(own_generators=plain.alone) as what,
        comparing.noting_formats(plain, model, hooks=hooks),
    ):
        for number, batch in batches.items():
            rng.seed(job.hparams.seed, "step", len(steps), 0, 0)
            if isinstance(loop, PlainLoop):
                loop.clipped_share = _CLIPPED_SHARE if len(steps) == 1 else None
            step = loop.step(batch.micro_batches)
            if not math.isfinite(step.loss):
                if job.own_step:  # which may have kept something of it
                    break
                plain.skipped.add(number)
                return False
            steps.append(step)
            if watched is not None and len(steps) == 1:
                remembered = watched.remembered.keys()
                plain.evaluations = _evaluated(plain, job, loop, eval_data)
    # With the randomness that its batches were fetched with.
    followed.refuse_what_training_changes(what.generators.values())
    forgotten = watched.forgotten() if watched is not None and len(steps) > 1 else {}
    plain.steps, plain.drew = steps, what.drew
    if steps and len(steps) == len(batches):
        with without_randomness():
            plain.evaluations += _evaluated(plain, job, loop, eval_data)
    if plain.drew:
        _take_with_other_draws(plain, job, loop, random)
    if watched is not None and isinstance(loop, PlainLoop) and len(steps) > 1:
        plain.steps = []  # so that what this raises is what the guard raises
        pairs.refuse_means(job, loop, steps[0], data, [*batches.values(), *random])
        plain.remembered = _that_matters(remembered, watched.remembered, job, loop, batches)
        _refuse_what_is_not_kept(job, watched, forgotten, loop, model, load, plain, batches, held=held)
        _note_bent(plain, job, loop, batches)
        plain.steps = steps
    elif len(steps) > 1:
        _note_bent(plain, job, loop, batches)
    return True


def _evaluated(
    plain: PlainSteps, job: Job, loop: PlainLoop | OwnPlainLoop, eval_data: Data | None
) -> list[float]:
    """The loss of a batch of the evaluation data, where there are any."""
    if eval_data is None:
        return []
    with of_the_job(f"load_eval_dataloader {job.load_eval_dataloader!r}"):
        some = eval_data.few(plain.sizes[:1]).first()
    return [loop.evaluate(some.data)]


def _batches(
    plain: PlainSteps, job: Job, data: Data
) -> tuple[dict[int, GlobalBatch], list[GlobalBatch], FollowedData]:
    """The steps' batches by number, those with other draws, and what training may change."""
    few, count = data.few(plain.sizes), len(plain.sizes)
    with of_the_job(f"load_dataloader {job.load_dataloader!r}"):
        upcoming = enumerate(few.batches(Position(), _plain_cut(job), count))
        batches = {number: batch for number, batch in upcoming if number not in plain.skipped}
    followed = FollowedData(job, data, plain.sizes, _plain_cut(job), batches)
    batches = met_again(batches, _plain_cut(job), few)
    random = [batches.pop(number) for number in range(count - len(RANDOM), count) if number in batches]
    return batches, random, followed


def _take_with_other_draws(
    plain: PlainSteps, job: Job, loop: PlainLoop | OwnPlainLoop, batches: Sequence[GlobalBatch]
) -> None:
    """Take steps on batches that are drawn anew, and note how much other random numbers change their loss."""
    otherwise: list[float] = []
    if isinstance(loop, PlainLoop):
        loop.clipped_share = None
    for number, batch in enumerate(batches, len(plain.steps)):
        otherwise.append(other_draws.loss_drawn_otherwise(job, loop, batch.micro_batches[0].data))
        rng.seed(job.hparams.seed, "step", number, 0, 0)
        plain.random_losses.append(loop.step(batch.micro_batches).loss)
    if otherwise:
        effects = zip(otherwise, plain.random_losses, strict=True)
        plain.random_effect = max(abs(other - loss) for other, loss in effects)
        if not all(plain.random_effect > 10 * plain.noise_of(loss) for loss in plain.random_losses):
            data = batches[-1].micro_batches[0].data
            plain.hidden_draws = other_draws.change_gradients(job, loop, data)


def _refuse_what_is_not_kept(
    job: Job,
    watched: Watched,
    forgotten: dict[str, str],
    loop: PlainLoop,
    model: nn.Module,
    load: Load,
    plain: PlainSteps,
    batches: Mapping[int, GlobalBatch],
    *,
    held: bool,
) -> None:
    """:raises JobError: when the job's steps depend on what a resumed job would have lost."""
    first = next(iter(batches.values())).micro_batches
    if forgotten:
        with without_randomness():
            watched.refuse_what_is_missed(forgotten, functools.partial(loop.gradients, first))
    with without_randomness():
        bare = None if held else whole.without_weights(model)
        another = _loaded(model, load) if bare is None else bare
        allowed = 10 * TOLERANCES[plain.number_format].loss
        watched.refuse_what_is_lost(another, loop.loss_of, first[0].data, allowed)
    resumed_optimizer.refuse_what_is_lost(job, model)


def _that_matters(
    keys: Keys, remembered: KnownSamples, job: Job, loop: PlainLoop, batches: Mapping[int, GlobalBatch]
) -> Keys:
    """Those of ``keys`` without which the first batch, which was met before, has other gradients."""
    parts = next(iter(batches.values())).micro_batches

    def gradients() -> tuple[float, Samples]:
        copies = [part._replace(data=nested.copied(part.data)) for part in parts]
        loss, _, found = loop.gradients(copies)
        loop.model.zero_grad(set_to_none=True)
        return loss, found

    users = functools.partial(UsersState, job, loop.model)
    with without_randomness():
        return {name: of for name, of in keys.items() if remembered.matters(name, users, gradients)}


def _note_bent(
    plain: PlainSteps, job: Job, loop: PlainLoop | OwnPlainLoop, batches: Mapping[int, GlobalBatch]
) -> None:
    """Note whether parts of a batch need not make up the whole though they do in the steps that are taken."""
    data = [batch.micro_batches[0].data for batch in batches.values()]
    users, state = UsersState(job, loop.model), ModuleState(loop.model.modules())

    @contextmanager
    def put_back() -> Iterator[None]:
        with without_randomness(), users.put_back(), state.put_back():
            yield

    plain.bent_loss = bends(lambda number: loop.loss(nested.copied(data[number]))[0], put_back)
    # In float16 small gradients vanish.
    if torch.float16 not in (plain.number_format, *(p.dtype for p in parameters_of(loop.model))):
        plain.bent, plain.bent_by_hooks = bent_gradient(
            loop.model,
            lambda scale: loop.unclipped(nested.copied(data[0]), scale),
            put_back,
            TOLERANCES[plain.number_format],
        )


def _refuse_caches_that_matter(job: Job, model: nn.Module, loop: PlainLoop, batch: Any) -> None:
    """Compare the loss of a batch with that of the model as ``load_model`` gave it, with its caches on.

    :raises JobError: when it is another.
    """
    with without_randomness(), torch.no_grad():
        with caches.as_given(model, loop.model) as had_caches:
            if not had_caches:
                return
            with UsersState(job, loop.model).put_back(), ModuleState(loop.model.modules()).put_back():
                given = loop.loss_of(loop.model, nested.copied(batch))
        with UsersState(job, loop.model).put_back(), ModuleState(loop.model.modules()).put_back():
            here = loop.loss_of(loop.model, nested.copied(batch))
    if abs(given - here) > 10 * TOLERANCES[torch.float32].loss * max(abs(given), 1e-2):
        raise JobError(
            f"the model's loss is another with the use_cache=True of its configuration ({given:.6g}) than "
            f"without ({here:.6g}), as of a row that packs several sequences, which transformers keeps apart "
            "only without. Saturn trains without: set use_cache=False in load_model where that is meant"
        )


def _plain_loop(job: Job, model: nn.Module, device: torch.device, data: Data) -> PlainLoop | OwnPlainLoop:
    if job.own_step:
        return OwnPlainLoop(job, model, device, total_steps(job.hparams, data))
    rule = SAMPLES
    if job.in_micro_batches:
        alone = Parallel(model, Ranks(rank=0, size=1, device=device))
        rule = objectives(alone, Objective(job, model, device).of(data), data, None, job, "single")[0].rule
    loop, count_steps = PlainLoop(job, model, device, rule), itertools.count()
    # As the training loop does it; torch's hooks are called for the step of a base class as well.
    loop.before_step = lambda: rng.seed(job.hparams.seed, "optimizer", next(count_steps))
    return loop


def _plain_cut(job: Job) -> Cut:
    """How a plain loop cuts batches."""
    return Cut(job.hparams.accumulate if job.in_micro_batches else 1)


def _copied(model: nn.Module, load: Load, held: bool) -> nn.Module:
    if held or not whole.can_be_copied(model):
        return _loaded(model, load)
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError):  # some tensors that are not parameters can't be copied so
        return _loaded(model, load)


def _loaded(model: nn.Module, load: Load) -> nn.Module:
    """Another model with the weights of ``model``; a copy where the job's code hands out one and the same."""
    another = load()
    if another is model:
        return copy.deepcopy(model)
    with torch.no_grad():
        for own, weight in zip(parameters_of(another), parameters_of(model), strict=True):
            own.copy_(weight)
    return another
