"""pytest plug-in, loaded by entry point: markers, the unavailable-backend rule, expectations of the kit.

Every pytest run of an environment with gpurt installed imports this module, so it imports nothing but pytest.

``GPURT_TEST_REQUIRE`` is a comma-separated list of backend names, e.g. ``cuda``. Without it a fixture named
``backend`` or ``driver`` that raises :class:`gpurt.errors.BackendUnavailable` skips its test. A backend in the
list must be there: the same exception fails the test, so that a broken GPU machine cannot look green.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Generator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NoReturn, cast

import pytest

# The kit's assertions should explain themselves as those of a test module do.
pytest.register_assert_rewrite("gpurt.testing.kit", "gpurt.testing.driver_conformance", "gpurt.testing.model")

_TOLD: Final = pytest.StashKey[set[type]]()

REQUIRE_VARIABLE = "GPURT_TEST_REQUIRE"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a real accelerator")
    config.addinivalue_line("markers", "slow: heavy variant, run before a release")


def required_backends() -> frozenset[str]:
    """Names in ``GPURT_TEST_REQUIRE``."""
    return frozenset(name.strip() for name in os.environ.get(REQUIRE_VARIABLE, "").split(",") if name.strip())


def skip_unless_required(exc: Any) -> NoReturn:
    """Skip the running test because of a ``BackendUnavailable``; fail it where the backend must be there."""
    required = required_backends()
    # An exception that does not name its backend is taken as the one that is required.
    if required and (exc.backend is None or exc.backend in required):
        pytest.fail(f"{REQUIRE_VARIABLE} asks for this backend: [{exc.reason}] {exc}", pytrace=False)
    pytest.skip(f"[{exc.reason}] {exc}")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    cls = _class_of(request)
    try:
        value = yield
    except pytest.fail.Exception as failure:
        # A failure within the fixture itself is another matter; pytest's own says this.
        if cls is not None and "async fixture" in str(failure.msg):
            _say_that_nothing_runs(fixturedef.argname, cls, request.config)
        raise
    except RuntimeError as failure:
        exc: Any = failure
        # The module is loaded if the exception is ours; importing it here would load pydantic into every run.
        errors = sys.modules.get("gpurt.errors")
        if errors is None or fixturedef.argname not in ("backend", "driver"):
            raise
        if not isinstance(exc, errors.BackendUnavailable):
            raise
        skip_unless_required(exc)
    # Before pytest 9 an async fixture that nobody runs is a warning, and its coroutine the test's argument.
    if cls is not None and (inspect.isasyncgen(value) or inspect.iscoroutine(value)):
        _say_that_nothing_runs(fixturedef.argname, cls, request.config)
    return value


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    cls = _class_of(item)
    if cls in item.config.stash.get(_TOLD, ()):
        pytest.skip(f"nothing runs its async fixture: see the error of the first test of {cls.__name__}")


def _class_of(item: object) -> Any:
    """The conformance class that a test or a request for a fixture belongs to; None for any other test."""
    cls: Any = getattr(item, "cls", None)
    return cls if getattr(cls, "gpurt_conformance", False) else None


def _say_that_nothing_runs(name: str, cls: type, config: pytest.Config) -> NoReturn:
    """Fail the first test of a class with what to do; the others, which would say it 300 times, are skipped."""
    config.stash.setdefault(_TOLD, set()).add(cls)
    if config.pluginmanager.hasplugin("asyncio"):
        remedy = 'decorate it with @pytest_asyncio.fixture, or set asyncio_mode = "auto" in pytest\'s configuration'
    else:
        remedy = "the conformance kit needs pytest-asyncio: pip install pytest-asyncio"
    message = f"{cls.__name__}: nothing runs the async fixture `{name}`: {remedy}"
    raise pytest.fail.Exception(message, pytrace=False) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = [item for item in items if _needs_kernels(item) and not getattr(_class_of(item), "runs_kernels", True)]
    if without:
        config.hook.pytest_deselected(items=without)
        dropped = set(without)
        items[:] = [item for item in items if item not in dropped]
    for item in items:
        cls = _class_of(item)
        if cls is None:
            continue
        unsupported = _expectations(cls, "unsupported")
        expected_failures = _expectations(cls, "expected_failures")
        if (why := _match(item, unsupported)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"unsupported: {why}"))
        elif (why := _match(item, expected_failures)) is not None:
            item.add_marker(pytest.mark.xfail(reason=why, strict=True))


def _needs_kernels(item: pytest.Item) -> bool:
    return "kernel" in getattr(item, "fixturenames", ())


def _expectations(cls: type, attribute: str) -> Mapping[str, str]:
    patterns = cast("Mapping[str, str]", getattr(cls, attribute))
    names = [name for name in dir(cls) if name.startswith("test_")]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.partition("[")[0]) for name in names):
            # A pattern that matches nothing would silently stop excusing a test that was renamed.
            raise pytest.UsageError(f"{cls.__name__}.{attribute}: no test matches {pattern!r}")
    return patterns


def _match(item: pytest.Item, patterns: Mapping[str, str]) -> str | None:
    name = str(getattr(item, "originalname", item.name))
    for pattern, why in patterns.items():
        # A pattern with brackets names one parametrised case exactly.
        if item.name == pattern or ("[" not in pattern and fnmatchcase(name, pattern)):
            return why
    return None
