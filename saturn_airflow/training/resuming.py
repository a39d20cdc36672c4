"""Where a training stands, as a checkpoint keeps it besides tensors and the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.base_training import BaseTraining
from saturn_airflow.training.batches import Position
from saturn_airflow.training.checkpoints import Checkpoints
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.job_globals import JobGlobals
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.structure import FIRST_STEPS, Structure


def to_dict(training: BaseTraining, lacks: Sequence[str] = ()) -> dict[str, Any]:
    """Where ``training`` stands, JSON-ready.

    :param lacks: what :func:`lacking` told.
    """
    structure = training.structure
    return {
        "seed": training.hparams.seed,
        "step": training.step,
        "epoch": training.position.epoch,
        "batch": training.position.batch,
        "epoch_sum": training.epoch_sum,
        "epoch_batches": training.epoch_batches,
        "metrics": training.metrics,
        "own_metrics": training.own_metrics,
        "lr": optimizers.learning_rates(training.optimizer),
        "plateau": training.plateau.to_dict(),
        "extent": training.data.extent,
        "samples": training.samples_known_by,
        "data": training.data.kept(training.position),
        "technique": training.request.technique,
        "devices": training.ranks.size,
        "looked": training.step if training.spot_checks is None else training.last_compared,
        **({} if structure is None else {"made_first": structure.made_first}),
        **({} if training.code is None else {"code": training.code.digests()}),
        **({"lacks": lacks} if lacks else {}),
    }


def checkpoints(training: BaseTraining) -> Checkpoints | None:
    """Those of ``training``; None where it writes none."""
    request = training.request
    if request.measure is not None or not request.folder:
        return None
    return Checkpoints(
        request.checkpoints,
        training.ranks,
        request.keep_checkpoints,
        training.warn,
        definition=Definition.from_dict(request.definition or Definition.of(training.job).to_dict()),
        goes_on_from=request.goes_on_from,
    )


def job_globals(
    training: BaseTraining, functions: Mapping[str, Any] = MappingProxyType({})
) -> JobGlobals | None:
    """The global variables of the job's code, where ``training`` writes checkpoints.

    :param functions: as :class:`JobGlobals` has them.
    """
    saves = training.request.measure is None and training.request.folder
    return JobGlobals(training.job, training.parallel.model, functions) if saves else None


def schedule(training: BaseTraining) -> Callable[[], None]:
    """The job's schedule as it is after the steps that are done; what to call after each that comes.

    One that looks at more than the number of steps, such as a counter of the job's code, would come out
    otherwise when it goes through the steps again, and would count them twice.
    """
    users = UsersState(training.job, training.parallel.model)
    groups = training.state.groups
    step = optimizers.make_scheduler(
        training.hparams, training.optimizer, training.step, groups, training.total
    )
    saved = training.checkpoints
    if training.scheduled and saved is not None and not saved.changes:
        users.restore()
        groups.set(training.scheduled)
    return step


def resume(training: BaseTraining, saved: Checkpoints, extra: Mapping[str, Any]) -> None:
    """Have ``training`` go on from where it stood.

    :param extra: as :func:`to_dict` told, which ``saved`` has read.
    :raises JobError: when nothing is left to train for what is another definition by now.
    """
    training.step = extra["step"]
    training.position = Position(extra["epoch"], extra["batch"])
    training.data.go_on(extra.get("data"))
    training.epoch_sum, training.epoch_batches = extra["epoch_sum"], extra["epoch_batches"]
    _check_data(training, extra)
    training.made_first = extra.get("made_first")
    code, before = training.code, extra.get("code", {})
    if code is not None and (why := code.why_mixed(before, training.checkpoint)):
        training.warn(why, mixed=True)
    if (lacks := extra.get("lacks")) and not training.finished:
        raise JobError(
            f"checkpoint {training.checkpoint} lacks what training has changed ({', '.join(lacks[:5])}), so "
            "nothing can go on from it: start the job from scratch"
        )
    # Before anybody looked again, the trial's comparison was all there was.
    training.last_compared = extra.get("looked", training.step)
    training.metrics.update(extra["metrics"])
    training.own_metrics = extra.get("own_metrics", {})
    if "plateau" in extra:
        training.plateau.go_on(extra["plateau"])
    before = (extra["technique"], extra["devices"])
    now = (training.request.technique, training.ranks.size)
    if training.last_compared < training.step and before != now:
        training.warn(
            f"{before[0]} x {before[1]} trained up to step {training.step}, and was last compared with one "
            f"device at step {training.last_compared}; {now[0]} x {now[1]} goes on from there"
        )
    warn_of_forgotten(training, "was not in the checkpoint that training goes on from", saved.forgotten)
    if saved.changes and training.finished:
        changes = "; ".join(map(str, saved.changes))
        raise JobError(
            f"checkpoint {training.checkpoint} is at the end of a training under another definition "
            f"({changes}), and nothing is left to train: start the job from scratch"
        )


def _check_data(training: BaseTraining, extra: Mapping[str, Any]) -> None:
    """See whether a place in the data is one in those that there are now.

    :raises JobError: when they are others, and the epoch can't be begun anew.
    """
    data, (epoch, batch) = training.data, training.position
    now, most = list(data.extent), data.batches_per_epoch
    # Earlier versions did not write it.
    before = list(extra.get("extent", now))
    changed = before != now or (data.is_sure_of_length and most is not None and batch >= most)
    if changed and batch:
        was, is_now = (" of ".join(filter(None, parts)) for parts in (_in_words(before), _in_words(now)))
        training.begin_epoch_anew(
            f"the data have changed since {training.checkpoint} was written: an epoch had {was}, and has "
            f"{is_now}. Epoch {epoch}, of which {batch} batches were trained, can't go on"
        )
    known, known_before = training.samples_known_by, extra.get("samples")
    if before == now and known is not None and known_before not in (None, known) and not training.finished:
        training.warn(
            f"samples are others than those that {training.checkpoint} was trained on, as where files have "
            "changed, or load_dataloader goes by what differs from process to process, such as a generator "
            "without a seed (numpy.random.default_rng()) or a folder's order: training goes on with them",
            mixed=True,
        )
    if training.hparams.batches is None and data.is_sure_of_length and most is not None:
        training.steps_beside = training.step - epoch * most - training.position.batch


def _in_words(extent: list[int | None]) -> tuple[str, str]:
    batches, samples = extent
    return f"{batches or 'some'} batches", "" if samples is None else f"{samples} samples"


def structure(training: BaseTraining) -> Structure | None:
    """What the model of ``training`` is made of, where it writes checkpoints."""
    if training.checkpoints is None or training.made_first is None:
        return None
    return Structure(training.job, training.parallel.model, training.made_first)


def lacking(training: BaseTraining) -> list[str]:
    """What training has changed of its model after the steps that a trial compares, and that no checkpoint
    has; every rank must call this together.

    :raises JobError: when there are parameters that no optimizer has.
    """
    structure, ranks = training.structure, training.ranks
    if structure is None:
        return []
    if training.step <= FIRST_STEPS:
        structure.note_first_steps(training.step)
    everyones = ranks.everyones((structure.other_parameters(), structure.changed()))
    if parameters := sorted({name for others, _ in everyones for name in others}):
        raise JobError(
            f"training has put other parameters in the place of {', '.join(parameters[:5])} by step "
            f"{training.step}: no optimizer and no checkpoint has those (make them in load_model, and let "
            "training switch between them or write into them)"
        )
    return sorted({name for _, changed in everyones for name in changed})


def warn_of_lacking(training: BaseTraining, lacks: Sequence[str]) -> None:
    """Tell once that no checkpoint is kept, because of what :func:`lacking` told."""
    told = {f"lacks {name}" for name in lacks}
    if not training.warned_of.issuperset(told):
        training.warned_of |= told
        training.warn(
            f"training has changed {', '.join(lacks[:5])} (modules, functions or hooks), which no checkpoint "
            f"has: from step {training.step} on, none is kept. A job that is stopped goes on from an earlier "
            "one or begins anew, and comes to the same. Have them there from the first, and let them look at "
            "an attribute of a module or at a buffer"
        )


def warn_of_forgotten(training: BaseTraining, what: str, forgotten: Mapping[str, str]) -> None:
    """Tell once what a resumed training begins anew with.

    :param what: has become of it.
    :param forgotten: why it can't be kept, by its name.
    """
    new = {name: why for name, why in forgotten.items() if name not in training.warned_of}
    training.warned_of |= new.keys()
    if new:
        words = "; ".join(f"{name!r} ({why})" for name, why in new.items())
        training.warn(
            f"what training changes {what}: {words}. No step has read it so far that was compared with "
            "one device's; if later ones do, keep it in a buffer, or let get_extra_state() return it"
        )
