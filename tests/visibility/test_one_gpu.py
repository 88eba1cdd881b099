"""What CUDA makes of its variable on a host with one GPU, as seen on an H100."""

import pytest

from gpurt.visibility import Candidate, resolve

ONE = Candidate(device_id="nvml:0", vendor="nvidia", uuid="GPU-1a1a1a1a-0000-1111-2222-333333333333")


@pytest.mark.parametrize(
    ("value", "shown"), [("GPU-", ()), ("GPU-1", ("nvml:0",)), ("0,1,1", ("nvml:0",)), ("0,0", ()), ("1", ())]
)
def test_forms(value: str, shown: tuple[str, ...]) -> None:
    assert resolve({"CUDA_VISIBLE_DEVICES": value}, [ONE]).visible == shown
