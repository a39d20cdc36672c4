"""The Python in README and docs: all of it names what there is, and what needs no sweep around it runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import saturn_airflow
from saturn_airflow import HParams, Job

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: With other names for some arguments, and with those of a TaskGroup.
ALIASES = {"Job": Job._aliases, "HParams": HParams._aliases, "SaturnSweepOperator": ["tooltip", "doc_md"]}  # type: ignore[attr-defined]


def blocks(page: Path) -> list[str]:
    found = re.findall(r"^( *)```python[^\n]*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def block(page: str, of: str) -> str:
    (found,) = (one for one in blocks(ROOT / "docs" / page) if of in one)
    return found


def wrong_in(text: str) -> Iterator[str]:
    """What of this package an example names that is not there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saturn_airflow"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    try:
                        importlib.import_module(f"{node.module}.{alias.name}")
                    except ModuleNotFoundError:
                        yield f"{node.module}.{alias.name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = node.func.id
            if called not in saturn_airflow.__all__ or called in ("grid", "sample") or not node.keywords:
                continue  # exceptions have no signature, and no keywords
            taken = {*inspect.signature(getattr(saturn_airflow, called)).parameters, *ALIASES.get(called, ())}
            yield from (f"{called}({key.arg}=)" for key in node.keywords if key.arg and key.arg not in taken)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_name_what_there_is(page: Path) -> None:
    assert [wrong for text in blocks(page) for wrong in wrong_in(text)] == []


def test_what_is_not_there_is_found() -> None:
    text = "from saturn_airflow.model import jobs, nothing\nJob('a', load_modell='m:f')\nRounds(most=2)"
    assert list(wrong_in(text)) == ["saturn_airflow.model.nothing", "Job(load_modell=)"]


def run(text: str, **names: Any) -> dict[str, Any]:
    code: dict[str, Any] = {**vars(saturn_airflow), **names}
    exec(text, code)
    return code


def test_metrics_of_the_page() -> None:
    torch = pytest.importorskip("torch")
    code = run(block("metrics.md", "class MedianError"))
    median = code["MedianError"]()
    for predicted, wanted in (([1.0, 5.0], [1.0, 2.0]), ([4.0], [2.0])):
        median.update(torch.tensor(predicted), torch.tensor(wanted))
    assert median.compute() == 2
    f1 = code["f1"]()
    f1.update(torch.tensor([0.35, 0.2, 0.9]), torch.tensor([1, 0, 0]))
    assert f1.compute() == pytest.approx(2 / 3)


def test_samples_of_the_page() -> None:
    jobs = run(block("selection.md", "jobs = sample("))["jobs"]
    assert len({job.name for job in jobs}) == 16
    assert all(2 <= job.model_args["num_hidden_layers"] < 5 for job in jobs)


def test_the_rule_of_the_page() -> None:
    rule = run(block("selection.md", "def worse_than_last_year"))["worse_than_last_year"]
    assert rule({"a": {1.0: 0.9}, "b": {1.0: 0.9, 2.0: 0.7}, "c": {}}) == ["a"]


def test_adapters_of_the_page(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    tiny = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    transformers.GPT2LMHeadModel(tiny).save_pretrained(tmp_path)
    code = run(block("fine_tuning.md", "def pretrained") + block("fine_tuning.md", "def adapted"))
    trained = [name for name, weight in code["adapted"](tmp_path).named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
