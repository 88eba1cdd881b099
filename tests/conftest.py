"""Event-loop matrix and a watch for blocking calls, for every test."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx

from gpurt.testing.loops import loop_factories

WIDE = (
    "cases/",
    "cli/test_bench",
    "cli/test_top.py",
    "cluster/security/",
    "cluster/test_metrics.py",
    "conformance/test_cupy.py",
    "conformance/test_directml.py",
    "conformance/test_metal.py",
    "conformance/test_opencl.py",
    "conformance/test_tflite.py",
    "conformance/test_vulkan.py",
    "discovery/test_remembered.py",
    "drivers/test_directml",
    "drivers/test_metal",
    "drivers/test_opencl",
    "drivers/test_rocm",
    "drivers/test_tflite",
    "drivers/test_vulkan",
    "examples/",
    "integrations/test_exo_placement.py",
    "memory/test_soak.py",
    "placement/",
    "problems/",
    "recording/",
    "regressions/",
)
"""What a change in the core seldom touches, and takes half of the time of all tests: run by `-m wide`, by name, and by
`.ci/run`."""
SAMPLED = frozenset({"HostileTests", "EndingTests"})
"""Groups of the conformance kit with many generated cases. Everyday they are run over one driver that has everything,
on one loop."""
LOOP_MATRIX = {"conformance"}
"""Folders whose async tests run on every loop. Others ask with ``@pytest.mark.asyncio(loop_factories=[…])``."""
OWN_LOOPS = {"test_model", "test_process_ends_while_a_driver_hangs", "test_forked_child_is_told"}
"""Tests that make their own loops, in a thread or in a child process: the outer one makes no difference."""


pytest_plugins = ["tests.support.conformance_results"]


def pytest_configure(config: pytest.Config) -> None:
    # Whatever a test starts and however it ends, the registry of whoever runs it is not a test's.
    state = tempfile.TemporaryDirectory(prefix="gpurt-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
    # Tables are as wide as the terminal that pytest runs in says, also in its workers: tests look at whole ones.
    os.environ.pop("COLUMNS", None)
    # An installed gpurt brings its plugin by entry point; a source tree on PYTHONPATH does not.
    if not config.pluginmanager.has_plugin("gpurt"):
        config.pluginmanager.import_plugin("gpurt.testing.plugin")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_name = config.args_source is pytest.Config.ArgsSource.ARGS
    if by_name and "wide" not in config.option.markexpr.replace("not wide", ""):
        return  # they were asked for
    folder = Path(__file__).parent
    for item in items:
        if item.path.relative_to(folder).as_posix().startswith(WIDE) or not _in_sample(item):
            item.add_marker("wide")


def _in_sample(item: pytest.Item) -> bool:
    """Whether a test is run everyday, as far as its group in the kit goes."""
    cls = getattr(item, "cls", None)
    if not getattr(cls, "gpurt_conformance", False):
        return True
    name = getattr(item, "originalname", "")
    group = next((base.__name__ for base in cls.__mro__ if name in vars(base)), "")
    if group not in SAMPLED:
        # The checking driver is there for those; the rest has been run over four others.
        return cls.__name__ != "TestChecking"
    return cls.__name__ == "TestChecking" and not (name == "test_loop_ends_in_the_middle" and "queued" in item.name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes ``-n auto`` means: for a few tests, starting them costs more than they save, and tests of a
    device must have it for themselves."""
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    alone = "gpu" in config.option.markexpr.replace("not gpu", "")
    return 0 if chosen or alone else min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 2, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    marker = item.get_closest_marker("asyncio")
    asked = marker is not None and "loop_factories" in marker.kwargs
    # A class says `one_loop` when another class runs the same driver on every loop.
    in_matrix = item.path.parent.name in LOOP_MATRIX and getattr(item, "originalname", "") not in OWN_LOOPS
    if asked or (in_matrix and not getattr(item.cls, "one_loop", False)):
        return loop_factories()
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call from gpurt that blocks the loop (sleep, file, socket, contended lock) fails the test."""
    if not inspect.iscoroutinefunction(getattr(request, "function", None)):
        yield
        return
    # The kit stops the loop on purpose, to catch a task between its result and its resumption.
    with blockbuster_ctx("gpurt", excluded_modules=["gpurt.testing"]):
        yield
