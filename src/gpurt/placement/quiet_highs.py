"""HiGHS without its banner: its constructor writes two lines to stdout, which belongs to the process that solves."""

from __future__ import annotations

from typing import Any


def quiet_highs() -> Any:
    """A new ``highspy.Highs`` that has written nothing and writes nothing.

    The banner comes with the first call that the constructor makes, which is ``enableCallbacks``: later is too late
    to turn the output off.
    """
    import highspy

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Quiet()
