"""What a user wants trained: jobs. Plain data that fits in JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model import exact_json, initial_weights, metrics, references, secrets, trainer_jobs
from saturn_airflow.model.arguments import checked, fields_of, hint, is_int, json_mapping
from saturn_airflow.model.early_stopping import EarlyStopping
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.hparams import DEFAULT, EXAMPLES
from saturn_airflow.model.hparams import HParams as HParams
from saturn_airflow.model.references import Reference

#: To which depth the mappings in a field are arguments by name.
_ARGUMENTS = {"model_args": 1, "data_args": 1, "metrics": 1, "hparams": 2}
# What schedulers are called with besides their arguments.
_TO_SCHEDULERS = ["optimizer", "total_steps", "num_training_steps"]
_REFERENCES = (
    *("load_model", "load_dataloader", "loss_function", "load_eval_dataloader"),
    *("on_step", "on_epoch"),
)
#: The way out for what can't be computed in parts, ending a sentence.
AS_MICRO_BATCHES = (
    "or say Job(trust=['single']), with which micro-batches are computed one by one, as in a plain "
    "PyTorch loop"
)


@checked("job")
@dataclass(frozen=True)
class Job:
    """One model to train.

    Callables are ``"module:name"`` references or module-level functions.

    :param name: unique within the sweep; may hold ``{placeholders}`` that :func:`grid` fills.
    :param load_model: called with ``model_args``, returns a ``torch.nn.Module`` (on the CPU; seeded).
    :param load_dataloader: called with ``data_args`` (and ``batch_size`` where it takes one and the
        hyper-parameters give one), returns a ``torch.utils.data.DataLoader`` or another iterable of batches.
        Only a job with ``trainer=True`` has none.
    :param loss_function: called with the model's outputs and the targets; returns the mean over the
        samples as a scalar, or a pair ``(sum, count)`` where the mean is over something else, such as
        tokens. Without it the outputs' ``loss`` is used, as Hugging Face models have it. A batch that is a
        mapping or a dataclass goes to the model as keyword arguments and to the loss whole (with a loss
        function, ``labels`` are kept from the model); one that is a pair is (inputs, targets).
    :param hparams: hyper-parameters.
    :param model_args: keyword arguments of ``load_model``. ``Secret("conn_id", "password")`` may stand for
        any value among these and ``data_args``.
    :param data_args: keyword arguments of ``load_dataloader``.
    :param load_eval_dataloader: like ``load_dataloader``; its mean loss is the metric ``eval_loss`` at the
        end of each epoch.
    :param metrics: what else to measure on that data, by name: ``{"accuracy": "shop.metrics:accuracy"}``. A
        function of the model's outputs and the targets, called as ``loss_function`` is, that returns the
        mean over the samples of the batch as a number, a pair ``(sum, count)``, or a mapping of those; or a
        metric of torchmetrics, its class, a function without parameters that makes one, or anything else
        with ``update(predictions, targets)``, ``compute()`` and ``reset()``.
    :param batch_dim: the dimension that samples lie along, where Saturn finds another than is meant: a
        number for all tensors that have so many dimensions (1 for batches that are time first), or a mapping
        from the names of parts of a batch (their keys or positions, joined by dots) to their dimension, None
        for what belongs to all samples. Data of samples that a DataLoader collates does not need it.
    :param own_step: the model that ``load_model`` returns has a ``training_step(batch, batch_idx)`` of its
        own, and ``configure_optimizers()`` and ``validation_step(batch, batch_idx)`` where it needs them, as
        a ``LightningModule`` has. There is then no ``loss_function``, and what ``validation_step`` logs
        are the job's metrics.
    :param trainer: ``load_model`` returns a ``transformers.Trainer``, which trains as it is, on one device.
        It has its data, its loss and its ``TrainingArguments``; the job has none of them.
    :param couples_batch: the loss of a sample depends on the others of its batch, as with in-batch negatives.
        Only what leaves a global batch whole may then train the job.
    :param on_step: called after each step with a mapping of what it came to: ``step``, ``epoch``, ``loss``,
        ``lr``, ``seconds`` and more. By the first of the devices alone; what it raises fails the job.
    :param on_epoch: the same after each epoch, with ``step``, ``epoch``, ``epoch_loss``, and ``eval_loss``
        and ``metrics`` where there are.
    :param techniques: names of the techniques this job may use (default: all in the library).
    :param nodes: names of the nodes this job may run on (default: all).
    :param neutral: names of hyper-parameters and of keys of ``model_args`` and ``data_args`` whose values
        don't change how fast it trains, such as the day of ``data_args={"day": "{{ ds }}"}``: what was
        measured under one value then holds under the others.
    :param data_version: what names the state of the data, such as a table's snapshot. It belongs to the job's
        definition: a cleared job starts anew where it has changed.
    :param init_from: the weights to start from, and nothing else of it: ``"models:/name@champion"``,
        ``"models:/name/3"``, ``"runs:/<id>/model"``, or the absolute path of a safetensors file or of an
        exported model's folder. Which version an alias means, or a file holds, is settled once, when the
        sweep begins. Names and shapes must be the model's.
    :param init_missing: what to do where that is not there (yet): ``"fail"``, or start from ``"scratch"``.
    :param trust: names of techniques that may train this job though they change its result, or though the
        guard says so by mistake: they are not compared with one device. With ``single`` among them, what
        ``accumulate`` makes of a batch is the result that the other techniques are compared with.
    :param connections: ids of Airflow connections that the job's code gets by ``BaseHook.get_connection``.
    :param exact: refuse techniques whose result is only equal in distribution, as where dropout's masks are
        others than on one device, and those that can't be compared with one device.
    """

    name: str
    load_model: Reference
    load_dataloader: Reference = ""
    loss_function: Reference | None = None
    hparams: HParams = DEFAULT
    model_args: Mapping[str, Any] = field(default_factory=dict)
    data_args: Mapping[str, Any] = field(default_factory=dict)
    load_eval_dataloader: Reference | None = None
    metrics: Mapping[str, Reference] = field(default_factory=dict)
    batch_dim: int | Mapping[str, int | None] | None = None
    couples_batch: bool = False
    own_step: bool = False
    trainer: bool = False
    on_step: Reference | None = None
    on_epoch: Reference | None = None
    techniques: Sequence[str] | None = None
    nodes: Sequence[str] | None = None
    neutral: Sequence[str] = ()
    data_version: str | None = None
    init_from: str | None = None
    init_missing: str = initial_weights.FAIL
    trust: Sequence[str] = ()
    exact: bool = False
    connections: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or len(self.name) > 200:
            raise InvalidSweepError(f"job {self.name!r}: a job's name is text of 1 to 200 characters")
        if not self.name.isprintable():
            raise InvalidSweepError(f"job {self.name!r}: a job's name has no control characters")
        if not isinstance(self.hparams, HParams):
            raise InvalidSweepError(
                f"job {self.name!r}: hparams is of type {type(self.hparams).__name__}; write HParams(lr=...)"
            )
        trainer_jobs.check(self, self.hparams, DEFAULT)
        for name in _REFERENCES:
            value = getattr(self, name)
            if self.trainer and name == "load_dataloader":
                continue
            if value is None and name not in ("load_model", "load_dataloader"):
                continue
            object.__setattr__(self, name, references.to_reference(value, f"job {self.name!r}: {name}"))
        for name in ("model_args", "data_args"):
            object.__setattr__(self, name, json_mapping(getattr(self, name), f"job {self.name!r}: {name}"))
        for name in ("techniques", "nodes", "trust"):
            value = getattr(self, name)
            if value is None or (name == "trust" and isinstance(value, list | tuple) and not value):
                continue
            if isinstance(value, str) or not value or not all(isinstance(item, str) for item in value):
                raise InvalidSweepError(f"job {self.name!r}: {name} is {value!r}; give a list of names")
            object.__setattr__(self, name, tuple(value))
        if self.data_version is not None and not isinstance(self.data_version, str):
            raise InvalidSweepError(f"job {self.name!r}: data_version is {self.data_version!r}; give a text")
        self._check_initial_weights()
        self._check_metrics()
        self._check_batches()
        self._check_own_step()
        if (stopping := self.hparams.early_stopping) is not None:
            assert isinstance(stopping, EarlyStopping)
            check_metric(stopping.metric, [self], f"job {self.name!r}: early_stopping's metric")
        if not isinstance(self.exact, bool):
            raise InvalidSweepError(f"job {self.name!r}: exact is {self.exact!r}; it must be True or False")
        self._check_neutral()
        object.__setattr__(self, "connections", secrets.checked_connections(self))

    def _check_initial_weights(self) -> None:
        if self.init_from is not None:
            initial_weights.check(self.init_from, f"job {self.name!r}: init_from")
        choices = (initial_weights.FAIL, initial_weights.SCRATCH)
        if self.init_missing not in choices:
            raise InvalidSweepError(
                f"job {self.name!r}: init_missing is {self.init_missing!r}; it is "
                f"{' or '.join(map(repr, choices))}"
            )

    def _check_metrics(self) -> None:
        what = f"job {self.name!r}: metrics"
        if not isinstance(self.metrics, Mapping):
            raise InvalidSweepError(
                f"{what} is {self.metrics!r:.80}; give a mapping from names to functions, such as "
                "{'accuracy': 'shop.metrics:accuracy'}"
            )
        for name in self.metrics:
            metrics.check_name(name, what)
        if self.metrics and self.load_eval_dataloader is None:
            raise InvalidSweepError(
                f"{what} are measured on the data of load_eval_dataloader, which the job does not have"
            )
        found = {n: references.to_reference(value, f"{what}[{n!r}]") for n, value in self.metrics.items()}
        object.__setattr__(self, "metrics", found)

    def _check_batches(self) -> None:
        what = f"job {self.name!r}"
        if isinstance(self.batch_dim, Mapping):
            object.__setattr__(self, "batch_dim", json_mapping(self.batch_dim, f"{what}: batch_dim"))
        dims = self.batch_dim.values() if isinstance(self.batch_dim, Mapping) else [self.batch_dim]
        if not all(dim is None or (is_int(dim) and dim >= 0) for dim in dims):
            raise InvalidSweepError(
                f"{what}: batch_dim is {self.batch_dim!r}; give the number of a dimension, from 0, "
                "or a mapping from names of a batch's parts to such numbers"
            )
        if not isinstance(self.couples_batch, bool):
            raise InvalidSweepError(
                f"{what}: couples_batch is {self.couples_batch!r}; it must be True or False"
            )
        if self.couples_batch and self.hparams.accumulate > 1 and not self.in_micro_batches:
            raise InvalidSweepError(
                f"{what}: accumulate={self.hparams.accumulate} cuts a batch whose samples are coupled "
                f"(couples_batch=True); take one of the two out, {AS_MICRO_BATCHES}"
            )

    def _check_own_step(self) -> None:
        what = f"job {self.name!r}"
        if not isinstance(self.own_step, bool):
            raise InvalidSweepError(f"{what}: own_step is {self.own_step!r}; it must be True or False")
        if not self.own_step:
            return
        for name, given, instead in (
            ("loss_function", self.loss_function, "compute the loss in training_step"),
            ("metrics", self.metrics, "return or log them in validation_step"),
            ("batch_dim", self.batch_dim, "give batches whose samples lie along the first dimension"),
        ):
            if given not in (None, {}):
                raise InvalidSweepError(f"{what}: own_step=True leaves nothing to {name}; {instead}")
        if self.hparams.accumulate > 1 or self.hparams.compile:
            name = "accumulate" if self.hparams.accumulate > 1 else "compile"
            raise InvalidSweepError(
                f"{what}: Saturn can't do {name} around a training step of the job's own; do it in "
                f"{'training_step' if name == 'accumulate' else 'load_model'}"
            )

    def _check_neutral(self) -> None:
        given = self.neutral
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise InvalidSweepError(
                f"job {self.name!r}: neutral is {given!r}; give a list of names, such as ['day']"
            )
        known = {*self.model_args, *self.data_args, *(f.name for f in dataclasses.fields(self.hparams))}
        if unknown := [name for name in given if name not in known]:
            raise InvalidSweepError(
                f"job {self.name!r}: neutral names {unknown[0]!r}, which is no hyper-parameter and no key of "
                "its model_args or data_args"
            )
        object.__setattr__(self, "neutral", tuple(given))

    @property
    def in_micro_batches(self) -> bool:
        """Whether what a plain loop makes of micro-batches is this job's result, not what it makes of whole
        batches: it accumulates, and trusts ``single`` with that."""
        return self.hparams.accumulate > 1 and "single" in self.trust

    def named_references(self) -> Iterator[tuple[str, str]]:
        """Each reference of this job, behind what messages call it."""
        for holder, names in (
            (self, _REFERENCES),
            (self.hparams, ("optimizer", "parameter_groups", "lr_scheduler")),
        ):
            for name in names:
                reference = getattr(holder, name)
                if reference:
                    yield f"job {self.name!r}: {name}", reference
        for name, reference in self.metrics.items():
            yield f"job {self.name!r}: metrics[{name!r}]", str(reference)

    def check_allowed(self) -> None:
        """Raise InvalidSweepError where this job refers to a module that jobs may not name."""
        for what, reference in self.named_references():
            references.check_allowed(reference, what)

    def check_references(self) -> None:
        """Check that what this job refers to exists, without importing it.

        :raises InvalidSweepError: naming the job, the reference and the fix.
        """
        for what, reference in self.named_references():
            references.check(reference, what)
        hparams = self.hparams
        wrong = hparams.of_no_effect() if self.own_step else None
        if wrong and references.is_class_with(str(self.load_model), "configure_optimizers"):
            raise InvalidSweepError(f"job {self.name!r}: {wrong}")
        if "lr" in hparams.optimizer_args:
            raise InvalidSweepError(f"job {self.name!r}: optimizer_args has 'lr'; give it as HParams(lr=...)")
        if hparams.lr_scheduler_args and hparams.lr_scheduler is None:
            example = EXAMPLES["lr_scheduler"]
            raise InvalidSweepError(
                f"job {self.name!r}: lr_scheduler_args are of no lr_scheduler; name one, such as {example!r}"
            )
        size = ["batch_size"] if hparams.batch_size is not None else []
        for named, name, given, also in (
            (self.load_model, "model_args", self.model_args, []),
            (self.load_dataloader, "data_args", self.data_args, size),
            (self.load_eval_dataloader, "data_args", self.data_args, size),
            (hparams.optimizer, "optimizer_args", hparams.optimizer_args, ["params", "lr"]),
            (hparams.lr_scheduler, "lr_scheduler_args", hparams.lr_scheduler_args, _TO_SCHEDULERS),
        ):
            what = f"job {self.name!r}: {name} of {named!r}"
            references.check_arguments(str(named or ""), what, given, also)

    def to_dict(self) -> dict[str, Any]:
        """This job as JSON-ready data, for XCom and files; fields at their default are left out.

        Those that XComs would hand on otherwise are in ``as_json``, as text.
        """
        return exact_json.packed(self.fields(), _ARGUMENTS)

    def fields(self) -> dict[str, Any]:
        """All fields that are not at their default, JSON-ready; :meth:`from_dict` takes them, too."""
        return _changed_fields(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Job:
        """The job that :meth:`to_dict` described.

        :raises InvalidSweepError: for an unknown or a missing field, or a wrong value.
        """
        if not isinstance(data, Mapping):
            raise InvalidSweepError(f"a job is a Job or what its to_dict() returned, not {data!r:.80}")
        what = f"job {data.get('name')!r}"
        try:
            fields = exact_json.unpacked(data)
        except ValueError as error:
            raise InvalidSweepError(f"{what}: {error}, which no Job.to_dict() wrote") from None
        hparams = fields.pop("hparams", {})
        if not isinstance(hparams, Mapping):
            raise InvalidSweepError(f"{what}: hparams is {hparams!r}; give a mapping of hyper-parameters")
        hparams = fields_of(HParams, hparams, f"{what}: hparams")
        fields = fields_of(cls, fields, what)
        try:
            own = HParams(**hparams)
        except InvalidSweepError as error:
            raise InvalidSweepError(f"{what}: {error}") from None
        try:
            return cls(hparams=own, **fields)
        except TypeError as error:
            raise InvalidSweepError(f"{what}: {error}") from None


def check_jobs(jobs: Sequence[Job]) -> None:
    """Check what can only be seen of all jobs of a sweep together.

    :raises InvalidSweepError: when there are no jobs, something is no job, or two share a name.
    """
    if not jobs:
        raise InvalidSweepError("the sweep has no jobs; give at least one Job")
    for job in jobs:
        if not isinstance(job, Job):
            raise InvalidSweepError(
                f"jobs holds {job!r:.60} of type {type(job).__name__}; give Job objects, or grid(...)"
            )
    fields = {f.name for f in dataclasses.fields(HParams)}
    for job in jobs:
        if kept := fields & set(re.findall(r"{([a-z_]+)[:}]", job.name)):
            raise InvalidSweepError(
                f"job {job.name!r}: grid(...) fills {{{sorted(kept)[0]}}} in a name; this job is in none"
            )
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidSweepError(
            f"two jobs are named {twice[0]!r}; every job of a sweep needs a name of its own"
        )


def check_metric(metric: object, jobs: Sequence[Job], what: str) -> None:
    """Check that every one of ``jobs`` has ``metric``, by which they are to be compared.

    :param what: who names it, such as ``"metric"``.
    :raises InvalidSweepError: naming the job that has it not.
    """
    if metric == "eval_loss":
        if without := [job.name for job in jobs if job.load_eval_dataloader is None and not job.trainer]:
            raise InvalidSweepError(
                f"{what} is 'eval_loss', but job {without[0]!r} has no load_eval_dataloader; give it one, "
                "or compare by 'epoch_loss'"
            )
    elif metric is not None and metric not in metrics.LOSSES:
        for job in jobs:
            if isinstance(metric, str) and (job.trainer or (job.own_step and job.load_eval_dataloader)):
                continue  # only its validation_step, or its compute_metrics, knows what it measures
            if not isinstance(metric, str) or metric.partition(metrics.PART)[0] not in job.metrics:
                raise InvalidSweepError(f"{what} is {metric!r}, which {_lacks(job, metric)}")


def _lacks(job: Job, metric: object) -> str:
    known = [*job.metrics, *metrics.LOSSES]
    meant = hint(metric, known, "add it to the job's metrics")
    return f"job {job.name!r} does not have (it has {', '.join(known)}); {meant}"


def _changed_fields(value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for f in dataclasses.fields(value):
        item = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if item != default:
            item = _changed_fields(item) if dataclasses.is_dataclass(item) else item
            changed[f.name] = list(item) if isinstance(item, tuple) else item
    return changed
