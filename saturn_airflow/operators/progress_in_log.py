"""What an Airflow task's log says of the training that the task follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saturn_airflow.model import metrics
from saturn_airflow.model.printable import one_line
from saturn_airflow.model.status import Status

#: Seconds between lines of progress.
STEP_SECONDS = 10.0


class ProgressLog:
    """Writes into a task's log.

    :param node: the job's node.
    """

    def __init__(self, log: Any, node: str) -> None:
        self.log = log
        self.node = node
        self._said_at = 0.0

    def job_prints(self, line: str) -> None:
        """Say what the job's own code printed."""
        self.log.info("[job] %s", line)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Say what happened; of steps, no more than one in a while."""
        kind = event["event"]
        if kind == "waiting":
            self.log.info("Waiting for devices held by %s", "; ".join(event["for"]))
        elif kind == "leased":
            under = f" under {event['technique']}" if "technique" in event else ""
            self.log.info("Holding devices %s of %s%s", event["devices"], self.node, under)
        elif kind == "gave_way":
            self.log.info("Its devices go to another sweep; it goes on from its checkpoint in its turn")
        elif kind == "start":
            if event.get("checkpoint"):
                self.log.info("Resuming from step %d, checkpoint %s", event["step"], event["checkpoint"])
            self.log.info("Training for %s batches", event.get("total_batches") or "an unknown number of")
        elif kind == "guard":
            self.log.info("Compared with one device before training: %s", event["verdict"])
        elif kind == "looked" and event["checked"]:
            self.log.info("Compared with one device again at step %d: nothing differs", event["step"])
        elif kind == "step" and abs(event["time"] - self._said_at) >= STEP_SECONDS:  # clocks may be set back
            self._said_at = event["time"]
            left = f", {event['eta_seconds']:.0f} s left" if event.get("eta_seconds") is not None else ""
            speed = event.get("samples_per_second")
            fast = f", {speed:.1f} samples/s" if speed is not None else ""
            self.log.info(
                "Step %d (epoch %d): loss %.4f%s%s", event["step"], event["epoch"], event["loss"], fast, left
            )
        elif kind == "checkpoint":
            self.log.info("Checkpoint at step %d, written in %.1f s", event["step"], event["seconds"])
        elif kind == "warning":
            self.log.warning("%s", one_line(event["message"]))
        elif kind == "restarting":
            self.log.warning("%s; it is started again from the last checkpoint", event["reason"])
        elif kind == "eval":
            self.log.info("Epoch %d: %s", event["epoch"], metrics.in_words(event))
        elif kind == "end" and event.get("traceback"):
            self.log.error("%s", event["traceback"])
        elif kind == "end" and event.get("status") == Status.FINISHED and event.get("reason"):
            self.log.info("The job %s", event["reason"])
