"""Settings, markers and fixtures of all tests; one pool of ranks of each size serves the whole session."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.junitxml import xml_key
from hypothesis import settings

from harness.environment import environment
from harness.interpreter import programs
from harness.processes import preloaded_context, server_address, server_output, share_server
from harness.ranks import RankPool
from harness.rewriting import rewrite_tests

pytest_plugins = ("harness.fake_vllm",)

# Ranks run one thread each; more threads in the process of the tests would compete with them for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("any machine", deadline=None, max_examples=50)  # a busy one exceeds 200 ms at times
settings.load_profile("any machine")

#: Fixtures whose tests run on several processes.
RANK_FIXTURES = frozenset({"ranks", "own_ranks", "two_ranks", "four_ranks", "eight_ranks"})


def pytest_sessionstart(session: pytest.Session) -> None:
    """Write the versions into the report of ``--junitxml``, for docs/generate/compatibility.py.

    The fixture ``record_testsuite_property`` would write them in pytest-xdist's workers, which have no report.
    """
    report = session.config.stash.get(xml_key, None)
    if report is not None:
        for name, value in environment(session.config).items():
            report.add_global_property(name, value)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (see nox -s slow)")


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Fork the test processes of ``-n`` from the preloaded server, so that they do not import torch each."""
    processes = getattr(config.option, "tx", None) or ()
    if processes and set(processes) == {"popen"}:
        preloaded_context()
        rewrite_tests(config)  # while the server imports torch
        config.option.tx = [f"popen//python={programs() / 'python'}"] * len(processes)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a test process of pytest-xdist the address of that server."""
    node.workerinput["fork_server"] = server_address()


def pytest_configure(config: pytest.Config) -> None:
    """Let the ranks of a test process be forked from the server that the process was forked from."""
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        share_server(address)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print the end of the output of forked processes if a test failed."""
    printed = server_output().read_text(errors="replace").splitlines()
    if exitstatus and printed:
        terminalreporter.section("output of forked processes")
        for line in printed[-100:]:
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that run on ranks, so that ``-m "not ranks"`` leaves them out; leave out slow ones by default."""
    for item in items:
        if RANK_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")
    if not config.option.slow:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish() -> None:
    """Let the garbage collector skip what was imported for the tests: it would search all of it again and again.

    The compiler writes its trace as soon as the trace's logger has a handler, and pytest gives one to each logger that
    does not propagate.
    """
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks, started on first use."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started on first use."""
    yield from _pool(4)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    """Eight gloo ranks, for slow tests; ended with the module, since they fill the memory of a small machine."""
    yield from _pool(8)


@pytest.fixture(autouse=True)
def no_world_left_behind() -> Iterator[None]:
    """End the world of one that a test made of pytest's own process, so that the next test may make its own."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
