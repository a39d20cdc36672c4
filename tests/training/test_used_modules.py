"""Of an installed package that a job names, the modules count that its code can come to."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from saturn_airflow.model import references
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.optim import own_classes
from saturn_airflow.training.used_modules import python_modules

FILES = {
    "__init__": """
        from zoo.making import make
        from zoo import lions, tigers, counts, bears, chains, tops, whales, seals
    """,
    "making": "from zoo import lions\nimport zoo\n\ndef make(): return lions.Lion()\n",
    "lions": """
        import zoo
        from torch import nn
        from zoo.counts import count
        from zoo import tops
        from zoo.registers import REGISTER, small
        made = tops.maker()

        class Lion(nn.Module):
            def forward(self, x):
                zoo.chains.Chain()
                REGISTER["whale"]()
                small.known["seal"]()
                return count(x)
    """,
    "counts": "calls = []\n\ndef count(x):\n    calls.append(x)\n    return x\n",
    "chains": "class Chain: pass\n",
    "tops": "def maker(): return 1\n",
    "registers": """
        class Register:
            def __init__(self): self.known = {}

        REGISTER, small = {}, Register()
    """,
    "whales": """
        from zoo.registers import REGISTER
        swum = []
        def swim(): swum.append(1)
        REGISTER["whale"] = swim
    """,
    "seals": "from zoo.registers import small\nclass Seal: pass\nsmall.known['seal'] = Seal\n",
    "tigers": "from torch import nn\nclass Tiger(nn.Module): pass\n",
    "bears": "from zoo.counts import count\nall_bears = {}\n",
}
USED = {
    "zoo",
    *(
        f"zoo.{name}"
        for name in ("making", "lions", "counts", "chains", "tops", "registers", "whales", "seals")
    ),
}
JOB: dict[str, Any] = {"load_model": "zoo:make", "load_dataloader": "zoo:make", "loss_function": "zoo:make"}


def write(folder: Path) -> None:
    (folder / "zoo").mkdir(parents=True)
    for name, text in FILES.items():
        lines = [line.removeprefix(" " * 8) for line in text.splitlines()]
        (folder / "zoo" / f"{name}.py").write_text("\n".join(lines))


@pytest.fixture
def model(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """Of the package, in a folder that is called as asked for."""
    folder = tmp_path / request.param
    write(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(references, "packages", {"zoo"})
    own_classes.is_installed.cache_clear()
    importlib.import_module("zoo")
    yield sys.modules["zoo"].make()
    for name in [name for name in sys.modules if name.partition(".")[0] == "zoo"]:
        del sys.modules[name]
    own_classes.is_installed.cache_clear()


@pytest.mark.parametrize("model", ["site-packages"], indirect=True)
def test_modules_of_an_installed_package_that_nothing_uses_are_left_out(model: nn.Module) -> None:
    assert python_modules(Job("zoo", **JOB), model) == USED


@pytest.mark.parametrize("model", ["dags"], indirect=True)
def test_all_that_own_files_import_counts(model: nn.Module) -> None:
    assert python_modules(Job("zoo", **JOB), model) == {*USED, "zoo.tigers", "zoo.bears"}


@pytest.mark.parametrize("model", ["site-packages"], indirect=True)
def test_all_counts_where_there_is_no_bytecode(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["zoo.lions"], "__spec__", None)
    assert python_modules(Job("zoo", **JOB), model) == {*USED, "zoo.tigers", "zoo.bears"}


@pytest.mark.parametrize("model", ["site-packages"], indirect=True)
def test_what_a_used_module_keeps_is_put_back(model: nn.Module) -> None:
    users = UsersState(Job("zoo", **JOB), model)
    model(3)
    assert sys.modules["zoo.counts"].calls == [3]
    assert sys.modules["zoo.whales"].swum == [1]
    users.restore()
    assert sys.modules["zoo.counts"].calls == sys.modules["zoo.whales"].swum == []
