"""What a library says, on its way from a probe."""

from __future__ import annotations

from gpurt.discovery.line import ProbeLine
from gpurt.errors import ReasonCode


def test_any_text_of_a_library_can_be_sent() -> None:
    line = ProbeLine(stage="failed", reason=ReasonCode.ERROR, message="bad \udcff byte", hint="x" * 3_000_000)
    told = ProbeLine.model_validate_json(line.model_dump_json())
    assert told.message == "bad ? byte"
    assert len(told.hint or "") == 10_000
