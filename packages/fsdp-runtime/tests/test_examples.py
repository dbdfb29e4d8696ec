"""Every public function and class has an example in its docstring, and the examples run as they are written."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest

import fsdp_runtime
import fsdp_runtime.batching
import fsdp_runtime.dry_run
import fsdp_runtime.mesh
import fsdp_runtime.model
import fsdp_runtime.monitor
import fsdp_runtime.optim
import fsdp_runtime.steps
import fsdp_runtime.sync
import fsdp_runtime.weights

#: The package and its rooms with names that are in no other table.
ROOMS = (
    fsdp_runtime,
    fsdp_runtime.batching,
    fsdp_runtime.dry_run,
    fsdp_runtime.mesh,
    fsdp_runtime.model,
    fsdp_runtime.monitor,
    fsdp_runtime.optim,
    fsdp_runtime.steps,
    fsdp_runtime.sync,
    fsdp_runtime.weights,
)
PUBLIC = {name: getattr(room, name) for room in ROOMS for name in room.__all__}

#: Results of functions, whose examples are those of the functions.
RESULTS = {
    "Advice",
    "Assumption",
    "AttentionHeads",
    "Candidate",
    "GroupMember",
    "MicroBatches",
    "Estimate",
    "LoadReport",
    "Memory",
    "MemoryBreakdown",
    "ModelStructure",
    "Parallelism",
    "Peak",
    "RankInfo",
    "RankMonitor",
    "ReplicatedParameters",
    "Settings",
    "Sweep",
    "SyncReport",
    "Traffic",
    "TrainingState",
    "WeightInfo",
}


#: Steps that the examples of ``parallelize`` give by their keywords, or that other steps add.
BY_KEYWORD = {"CheckInputs", "ContextParallel", "ExpertParallel", "PackedSequences", "SharedPrefixes", "TensorParallel"}


def _needs_example(name: str) -> bool:
    value = PUBLIC[name]
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    return callable(value) and not is_error and name not in RESULTS | BY_KEYWORD


NAMES = sorted(filter(_needs_example, PUBLIC))


def _examples(value: Any) -> list[doctest.DocTest]:
    """The examples of a function, or of a class and its methods."""
    if inspect.isclass(value):
        module = inspect.getmodule(value)
        found = doctest.DocTestFinder(exclude_empty=True).find(value, module=module, globs={})
    else:  # a context manager's docstring is that of the function inside
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", {}, value.__name__, None, 0)
        found = [test]
    return [test for test in found if test.examples]


def test_every_public_function_and_class_has_an_example() -> None:
    assert [name for name in NAMES if not _examples(PUBLIC[name])] == []


@pytest.mark.parametrize("name", NAMES)
def test_examples_print_what_they_say(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in _examples(PUBLIC[name]):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
