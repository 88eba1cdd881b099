"""The chaos program for about a minute; by hand it runs for hours (see its first lines)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stories.chaos import Chaos, options_of

pytest.importorskip("zenoh")

WHOLE_S = "20"
"""Other tests run beside it, perhaps on few cores. A fault of ours would last until the next regular check of
its node, up to a minute."""


@pytest.mark.wide
@pytest.mark.parametrize("words", ["--seed 11 --hostile", "--seed 12 --hostile --tls", "--seed 13 --nats"])
async def test_views_are_true_again_after_every_fault(words: str, tmp_path: Path) -> None:
    if "--tls" in words:
        pytest.importorskip("cryptography")
    if "--nats" in words:
        pytest.importorskip("nats")
    report = await Chaos(options_of([*words.split(), "--seconds", "20", "--whole", WHOLE_S]), tmp_path).run()
    assert not report.violations, report.text()
    assert report.faults.total() >= 2
    assert report.applied > 0
