"""The guard refuses what trains otherwise than one device does, says how, and refuses nothing else."""

from __future__ import annotations

import pytest
from checking import Cell, job, verdicts

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

DECAY = {"optimizer_args": {"weight_decay": 0.1}}
SGD = {"optimizer": "torch.optim:SGD"}

# What differs, and words of what the guard must say of it.
WRONG: dict[str, tuple[Cell, str]] = {
    "a loss": (Cell(job(), "LossOff"), "(1% off)"),
    "a loss by little": (Cell(job(), "LossOff", 1, {"off": 1e-6}), "the loss of step 1 is"),
    "a loss in float32": (
        Cell(job(hparams={"precision": "float32"}), "LossOff", 1, {"off": 1e-3}),
        "the loss of step 1 is",
    ),
    "a loss in bf16": (
        Cell(job(hparams={"precision": "bf16"}), "LossOff", 1, {"off": 1e-3}),
        "the loss of step 1 is",
    ),
    "gradients": (Cell(job(hparams=SGD), "GradientsScaled"), "in step 1 is off by 1e+02%"),
    "gradients of a model that is loaded once": (
        Cell(job(load_model="held_models:one_and_the_same", hparams=SGD), "GradientsScaled"),
        "in step 1 is off by 1e+02%",
    ),
    "gradients of 16-bit weights beside others": (
        Cell(
            job(load_model="narrow_weights:adapted", hparams={"precision": "bf16", **SGD}),
            "GradientsScaled",
            1,
            {"by": 1.3},
        ),
        "in step 1 is off by 30%",
    ),
    "gradients in float32": (
        Cell(job(hparams={"precision": "float32"}), "GradientsScaled", 1, {"by": 1.01}),
        "in step 1 is off by 1%",
    ),
    "a gradient that is gone": (Cell(job(), "OneDropped"), "'blocks.1.bias' in step 1 is missing here"),
    "a gradient that is zero": (
        Cell(job(), "OneDropped", 1, {"zeros": True}),
        "'blocks.1.bias' in step 1 is off by 1e+02%",
    ),
    "zeros for a missing gradient": (
        Cell(job(model_args={"extra": "unused"}, hparams=DECAY), "ZerosForMissing"),
        "'extra.weight' in step 1 is missing on one device and of zeros here",
    ),
    "a buffer": (
        Cell(job(model_args={"extra": "norm"}), "ForwardTwice"),
        "the buffer 'extra.running_mean' after step 1 is off by",
    ),
    "a counter": (
        Cell(job(model_args={"extra": "counts passes"}), "ForwardTwice"),
        "the attribute 'extra.passes' is 3 on one device and 6 here",
    ),
    "what begins at zero, after a batch without labels": (
        Cell(
            job(
                model_args={"extra": "coupled from zero"},
                load_dataloader="odd_models:partly_labelled",
                loss_function="odd_models:labelled_loss",
            ),
            "ddp",
            2,
        ),
        "the loss of step 2",
    ),
    "data of an unseeded generator": (
        Cell(job(load_dataloader="odd_models:unseeded"), "ddp", 2),
        "load_dataloader 'odd_models:unseeded' gave different samples on different ranks; draw them from",
    ),
    "noise in samples by an unseeded generator": (
        Cell(
            job(load_model="late_jobs:row", load_dataloader="drawing_models:noisy_by_chance"), "pipeline", 2
        ),
        "gave different samples on different ranks",
    ),
    "means of means": (Cell(job(), "MeanOfMeans", 2), "MeanOfMeans x 2 changes the result"),
    "an evaluation": (
        Cell(job(load_eval_dataloader="odd_models:vectors"), "EvaluatesOldWeights"),
        "the loss of an evaluation is",
    ),
    "what is counted": (
        Cell(job(loss_function="odd_models:sum_loss"), "CountsOtherwise"),
        "is taken over is 2 on one device and 4 here",
    ),
    "a parameter left behind": (Cell(job(), "StaleParameter"), "'leave.bias' after step 1 is off by"),
    "a hook that is lost": (Cell(job(model_args={"extra": "halved gradient"}), "fsdp", 2), "'extra.weight'"),
    **{
        f"batches by their size, with {extra}": (
            Cell(
                job(
                    model_args={"extra": extra},
                    data_args={"samples": 32},
                    hparams={**SGD, "batch_size": 16},
                ),
                "ddp",
                2,
            ),
            "the loss of step 4 is",
        )
        for extra in ("small batches", "small batches after a norm")
    },
    "what begins at zero": (Cell(job(model_args={"extra": "coupled from zero"}), "ddp", 2), "in step 3"),
    "noise by a generator of one's own": (
        Cell(job(model_args={"extra": "own noise"}), "ddp", 2),
        "the loss of step 1 is",
    ),
    "a loss by a generator of one's own": (
        Cell(job(loss_function="odd_models:loss_by_draw"), "fsdp", 2),
        "the loss of step",
    ),
    **{
        f"what is remembered of samples under {technique}": (
            Cell(
                job(model_args={"extra": "remembers samples"}, hparams={"precision": "float32"}), technique, 2
            ),
            "what 'extra.before' remembers of samples is that of its own share alone",
        )
        for technique in ("ddp", "fsdp")
    },
    "a sample that comes again to another rank": (
        Cell(job(model_args={"extra": "counts samples"}), "ddp", 2),
        "the loss of step 3",
    ),
    **{
        f"masks that the job seeds itself under {technique}": (
            Cell(job(load_model="drawing_models:reseeds"), technique, 2),
            "the job seeds random numbers itself",
        )
        for technique in ("ddp", "fsdp")
    },
    "masks that the job seeds by its passes, of which a batch makes two": (
        Cell(job(load_model="drawing_models:seeds_by_pass", hparams={"accumulate": 2}), "single"),
        "the job seeds random numbers itself",
    ),
    "passes counted in a class": (
        Cell(job(model_args={"extra": "counts in its class"}), "ForwardTwice"),
        "the loss of step",
    ),
    "weights": (Cell(job(), "OtherSchedule"), "'leave.weight' after step 1 is off by"),
}

COUPLED = {
    "samples that see each other in training alone": Cell(
        job(model_args={"extra": "coupled in training"}), "ddp", 2
    ),
    "other samples in the loss": Cell(job(loss_function="odd_models:contrastive_loss"), "ddp", 2),
    "pieces of coupled samples": Cell(
        job(loss_function="odd_models:contrastive_loss", hparams={"accumulate": 2}), "single"
    ),
}

RIGHT: dict[str, tuple[Cell, str]] = {
    "early stopping by a metric of the job's own": (
        Cell(
            job(
                hparams={"early_stopping": {"metric": "error", "mode": "min"}},
                load_eval_dataloader="odd_models:vectors",
                metrics={"error": "odd_models:mean_loss"},
            ),
            "single",
        ),
        "exact",
    ),
    **{
        f"{technique} x {devices}": (Cell(job(), technique, devices), "exact")
        for technique, devices in [("single", 1), ("spill", 1), ("Right", 1), ("ddp", 2), ("fsdp", 2)]
    },
    **{
        f"an evaluation under {technique}": (
            Cell(job(load_eval_dataloader="odd_models:vectors", loss_function=loss), technique, devices),
            "exact",
        )
        for technique, devices, loss in [
            ("single", 1, "odd_models:mean_loss"),
            ("spill", 1, "odd_models:mean_loss"),
            ("ddp", 2, "odd_models:sum_loss"),
            ("fsdp", 2, "odd_models:mean_loss"),
        ]
    },
    "a norm that is evaluated": (
        Cell(job(model_args={"extra": "norm"}, load_eval_dataloader="odd_models:vectors"), "ddp", 2),
        "exact",
    ),
    "masks that are not evaluated": (
        Cell(job(model_args={"extra": "drops"}, load_eval_dataloader="odd_models:vectors"), "ddp", 2),
        "distribution",
    ),
    **{
        f"a counter under {technique}": (
            Cell(job(model_args={"extra": "counts passes"}), technique, devices),
            "exact",
        )
        for technique, devices in [("single", 1), ("spill", 1), ("ddp", 2), ("fsdp", 2)]
    },
    "a batch without labels": (
        Cell(
            job(load_dataloader="odd_models:partly_labelled", loss_function="odd_models:labelled_loss"),
            "ddp",
            2,
        ),
        "exact",
    ),
    **{
        f"what asks for ranks: {what} under {technique}": (Cell(job(**changes), technique, 2), "exact")  # type: ignore[arg-type]
        for technique in ("ddp", "fsdp")
        for what, changes in {
            "a model": {"model_args": {"extra": "reduces"}},
            "data": {"load_dataloader": "odd_models:sharded"},
            "a stream": {"load_dataloader": "odd_models:sharded_stream"},
            "samples": {"load_dataloader": "odd_models:moved_by_rank"},
        }.items()
    },
    "what is kept of samples on one device": (
        Cell(job(model_args={"extra": "remembers samples"}), "single"),
        "exact",
    ),
    "a cache": (Cell(job(model_args={"extra": "caches"}), "ddp", 2), "exact"),
    **{
        f"a layer that takes turns under {technique}": (
            Cell(job(model_args={"extra": "takes turns"}), technique, devices),
            "exact",
        )
        for technique, devices in [("single", 1), ("fsdp", 2)]
    },
    "a layer that is frozen later": (
        Cell(job(model_args={"extra": "freezes later"}), "ddp", 2),
        "distribution",
    ),
    **{
        f"a loss by the number of ranks under {technique}": (
            Cell(
                job(load_model="late_jobs:row", loss_function="odd_models:by_world_size"), technique, devices
            ),
            "exact" if devices == 1 else "distribution",
        )
        for technique, devices in [("single", 1), ("ddp", 2), ("pipeline", 2)]
    },
    **{
        f"a loss that asks for ranks under {technique}": (
            Cell(job(load_model="late_jobs:row", loss_function="odd_models:gathered_loss"), technique, 2),
            "distribution",
        )
        for technique in ("ddp", "fsdp", "pipeline")
    },
    "a hook": (Cell(job(model_args={"extra": "halved gradient"}), "ddp", 2), "exact"),
    "pairs": (Cell(job(loss_function="odd_models:sum_loss"), "ddp", 2), "exact"),
    "zeros that change nothing": (
        Cell(job(model_args={"extra": "unused"}, hparams=SGD), "ZerosForMissing"),
        "exact",
    ),
    **{
        f"{what} of one device under {technique}": (Cell(job(**changes), technique), "exact")  # type: ignore[arg-type]
        for technique in ("single", "spill")
        for what, changes in {
            "noise": {"model_args": {"extra": "own noise"}},
            "draws of the loss": {"loss_function": "odd_models:loss_by_draw"},
            "passes in the class": {"model_args": {"extra": "counts in its class"}},
        }.items()
    },
    **{
        f"{what} under {technique}": (Cell(job(**changes), technique), "exact")
        for technique in ("single", "spill")
        for what, changes in {
            "a part that is compiled": {"model_args": {"extra": "compiled"}},
            "a step that changes gradients": {"hparams": {"optimizer": "odd_models:HalvesWhatItSteps"}},
            "a hook of the optimizer that does": {"hparams": {"optimizer": "odd_optimizers:ClipsInAHook"}},
            "counts under names": {"hparams": {"optimizer": "odd_optimizers:CountsUnderNames"}},
            "a step that is compiled": {"hparams": {"optimizer": "odd_optimizers:CompilesItsStep"}},
        }.items()
    },
    "masks of one device": (Cell(job(model_args={"extra": "drops"}), "single"), "exact"),
    "masks of two": (Cell(job(model_args={"extra": "drops"}), "ddp", 2), "distribution"),
    "masks that the job seeds by its passes": (
        Cell(job(load_model="drawing_models:seeds_by_pass"), "single"),
        "exact",
    ),
    "masks of two micro-batches": (
        Cell(job(model_args={"extra": "drops"}, hparams={"accumulate": 2}), "single"),
        "exact",
    ),
    "masks that the job seeds itself on one device": (
        Cell(job(load_model="drawing_models:reseeds"), "spill"),
        "exact",
    ),
    **{
        f"a model that the loss finds in a variable under {technique}": (
            Cell(
                job(load_model="held_models:held", loss_function="held_models:penalized"), technique, devices
            ),
            "exact",
        )
        for technique, devices in [("single", 1), ("ddp", 2)]
    },
    "a model that is loaded once": (Cell(job(load_model="held_models:one_and_the_same"), "single"), "exact"),
    "a complex parameter": (Cell(job(model_args={"extra": "turns"}), "ddp", 2), "exact"),
    "masks before an adapter that adds little yet": (
        Cell(job(load_model="drawing_models:adapted"), "ddp", 2),
        "distribution",
    ),
    "masks before an adapter that adds nothing yet": (
        Cell(job(load_model="drawing_models:adapted", model_args={"begun": False}), "ddp", 2),
        "distribution",
    ),
    "masks that change nothing": (Cell(job(load_model="drawing_models:draws_in_vain"), "ddp", 2), "exact"),
    **{
        f"a layer left out by name under {technique}": (
            Cell(
                job(load_model="drawing_models:skips_by_name", hparams={"accumulate": accumulate}),
                technique,
                devices,
            ),
            verdict,
        )
        for technique, devices, accumulate, verdict in [
            ("spill", 1, 1, "exact"),
            ("single", 1, 2, "exact"),
            ("ddp", 2, 1, "distribution"),
        ]
    },
    **{
        f"what functions of torch draw by name under {technique}": (
            Cell(job(load_model="drawing_models:torchs_by_name"), technique, devices),
            verdict,
        )
        for technique, devices, verdict in [("spill", 1, "exact"), ("ddp", 2, "distribution")]
    },
    "samples left out": (Cell(job(model_args={"extra": "drop path"}), "ddp", 2), "distribution"),
    **{
        f"what is drawn and shows little under {technique}": (
            Cell(
                job(model_args={"extra": "draws little"}, hparams={"precision": "float32"}),
                technique,
                devices,
            ),
            verdict,
        )
        for technique, devices, verdict in [("single", 1, "exact"), ("ddp", 2, "distribution")]
    },
    **{
        f"a cast to a lower format under {technique}": (
            Cell(job(model_args={"extra": "casts"}), technique, 2),
            "exact",
        )
        for technique in ("ddp", "fsdp")
    },
    **{
        f"16-bit weights beside others under {technique}": (
            Cell(
                job(
                    load_model="narrow_weights:adapted",
                    load_eval_dataloader="odd_models:vectors",
                    hparams={"precision": "bf16"},
                ),
                technique,
                devices,
            ),
            "exact",
        )
        for technique, devices in [("single", 1), ("spill", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2)]
    },
    "a norm": (Cell(job(model_args={"extra": "norm"}), "single"), "exact"),
    **{
        f"a model that comes as it is evaluated, with {extra}": (
            Cell(job(load_model="odd_models:as_it_is_evaluated", model_args={"extra": extra}), "single"),
            "exact",
        )
        for extra in ("norm", "drops")
    },
    **{
        f"a small count under {technique}": (
            Cell(job(loss_function="odd_models:weighted_loss"), technique, devices),
            "exact",
        )
        for technique, devices in (("single", 1), ("ddp", 2))
    },
    "noise that Adam makes large": (
        Cell(job(model_args={"extra": "norm"}, hparams={"precision": "float32"}), "ddp", 2),
        "exact",
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    coupled = {what: (cell, "") for what, cell in COUPLED.items()}
    cells = {**WRONG, **RIGHT, **coupled, "blamed": (Cell(job(), "Blames"), "")}
    for use_cache in (True, False):
        packed = job(
            load_model="odd_models:packed_llama",
            load_dataloader="odd_models:packed_rows",
            loss_function=None,
            model_args={"use_cache": use_cache},
            hparams={"batch_size": None},
        )
        cells[f"caches: {use_cache}"] = Cell(packed, "single"), ""
    cells["a metric for a count"] = Cell(job(loss_function="odd_models:loss_and_metric"), "single"), ""
    cells["thaws"] = Cell(job(model_args={"extra": "thaws"}), "single"), ""
    cells["broken"] = Cell(job(load_model="odd_models:broken"), "single"), ""
    return dict(zip(cells, verdicts([cell for cell, _ in cells.values()]), strict=True))


@pytest.mark.parametrize("what", WRONG)
def test_what_differs_is_refused_with_how_much(what: str, found: dict[str, str]) -> None:
    cell, words = WRONG[what]
    assert found[what].startswith(f"refused: {cell.technique} x {cell.devices} changes the result: ")
    assert words in found[what]
    assert f"Job(trust=['{cell.technique}'])" in found[what], "the way out is said"


@pytest.mark.parametrize("what", COUPLED)
def test_coupled_samples_are_told_how_to_stay_together(what: str, found: dict[str, str]) -> None:
    assert found[what].startswith("can't: ")
    assert "Job(couples_batch=True)" in found[what]


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_is_not_refused(what: str, found: dict[str, str]) -> None:
    assert found[what] == RIGHT[what][1]


def test_what_one_device_can_do_is_not_blamed_on_the_job(found: dict[str, str]) -> None:
    assert found["blamed"].startswith("can't: Blames x 1 can't train what one device can: the model raised")


def test_caches_that_change_the_loss_are_refused_with_how_to_say_what_is_meant(found: dict[str, str]) -> None:
    assert found["caches: True"].startswith("job: the model's loss is another with the use_cache=True")
    assert "set use_cache=False" in found["caches: True"]
    assert found["caches: False"] == "exact"


def test_what_one_device_can_not_do_is_the_jobs_fault(found: dict[str, str]) -> None:
    assert found["broken"].startswith("job: the model raised RuntimeError: mat1 and mat2")


def test_a_metric_in_the_place_of_a_count_is_refused_on_one_device_too(found: dict[str, str]) -> None:
    assert found["a metric for a count"].startswith(
        "job: loss_function 'odd_models:loss_and_metric' returned a pair of means"
    )
    assert "name the metric in Job(metrics=...)" in found["a metric for a count"]


def test_what_no_optimizer_has_is_not_left_untrained_silently(found: dict[str, str]) -> None:
    assert found["thaws"].startswith("job: the model asks for gradients of 'extra.layer.weight' by now")
