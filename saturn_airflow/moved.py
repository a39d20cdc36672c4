"""Where modules of version 0.1 are now: old names are understood for one more release, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

#: From the old package and the new one to modules; ``old:new`` where a module got another name, too.
_MOVES = {
    ("", "model"): (
        "cluster deadlines definition errors estimates folders formats guards jobs plan problem references"
        " rounds selection"
    ),
    ("", "operators"): "graph round_graph:graph sweep",
    ("commands", "commands"): "shared:command_line",
    ("operators", "operators"): (
        "inside:airflow_internals plan:plan_task profile:profile_task report:report_task train:train_task"
        " trials:trials_task waves:wave_tasks"
    ),
    ("planning", "planning.exact_search"): "device_patterns exact:sharings node_packing proofs",
    ("planning", "planning.heuristics"): (
        "annealing draws:xorshift foresight listing:list_scheduling member:portfolio_member"
        " pool_search:ejection_pool search team:portfolio tree_packing"
    ),
    ("planning", "planning.instances"): "arrays instance schedule",
    ("planning", "planning.lower_bounds"): "bounds:area destructive dual_feasible relaxation",
    ("planning", "planning.online"): "adoption execution replanning simulation",
    ("planning", "model"): "learning",
    ("planning", "planning.presenting"): (
        "baselines explaining reading:plan_files showing:terminal upstream:paper_milp"
    ),
    ("plugin", "plugin"): "inside:web_internals reading:queries",
    ("tracking", "tracking"): "estimates:estimate_store runs:mlflow_runs sweeps:sweep_runs",
    ("training", "launch"): (
        "devices failures fork_server forked launching leases progress request restarting run_spec runs"
        " supervisor users_code warm warm_server"
    ),
    ("training", "parallelism"): (
        "adapting agreeing anatomy batch_norm blocks caches changing_buffers limits:unsupported"
        " missing:parallel module_state neighbours parallel pipelines recomputation replicating sharding"
        " sources spilling stages tensor_cuts"
    ),
    ("training", "training.guarding"): "differences guard guarded plain randomness samples",
    ("training", "training.losses"): "decompose means objective rules",
    (
        "training",
        "training.optim",
    ): "alike:broken_optimizers elementwise group_state mixing optimizers plain_values",
}

#: For an old module, the one name that went to another module than the rest did, and that module.
_MOVED_APART = {"saturn_airflow.jobs": ("grid", "saturn_airflow.model.grids")}


def _names() -> dict[str, str]:
    """The present name of each module that had another, by that one."""
    names = {}
    for (before, after), modules in _MOVES.items():
        for module in modules.split():
            old, _, new = module.partition(":")
            names[".".join(filter(None, ["saturn_airflow", before, old]))] = (
                f"saturn_airflow.{after}.{new or old}"
            )
    return names


class _OldNames:
    """A finder and loader (importlib.abc) of modules under the names they had."""

    def __init__(self) -> None:
        self.now = _names()
        #: The specs that modules had before the import system gave them those of this loader.
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in self.now else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        now = self.now[spec.name]
        warnings.warn(f"{spec.name} is now {now}; its old name goes in 0.3", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(now)
        if elsewhere := _MOVED_APART.get(spec.name):
            apart, holder = elsewhere
            setattr(module, apart, getattr(importlib.import_module(holder), apart))
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed; only what the import system has just said of it is put right."""
        assert module.__spec__ is not None
        module.__spec__ = self.specs[module.__spec__.name]

    def get_code(self, name: str) -> CodeType | None:
        """For ``python -m``, by which a service of the version before starts what it needs."""
        spec = importlib.util.find_spec(self.now[name])
        assert spec is not None
        assert spec.loader is not None
        code: CodeType | None = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
        return code


def understand_old_names() -> None:
    """Let old names of modules be imported."""
    sys.meta_path.append(_OldNames())
