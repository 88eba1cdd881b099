"""Records that are made without pydantic's help are what pydantic would have made."""

from __future__ import annotations

import copy
import pickle

import pytest
from pydantic import ValidationError

from gpurt.cluster.record_changes import available, changed, record_of
from gpurt.cluster.records import DeviceRecord, NodeRecord, NodeState
from gpurt.cluster.state import device_keys
from tests.cluster.support import E1, device, snapshot


def _record() -> NodeRecord:
    told = snapshot(device(), epoch=E1, seq=3)
    return record_of(told, device_keys(told.gpu_devices).items(), state=NodeState.HEALTHY, since=1.5)


def test_a_changed_record_is_what_a_copy_would_be() -> None:
    record = _record()
    after, wanted = changed(record, seq=4, draining=True), record.model_copy(update={"seq": 4, "draining": True})
    assert after == wanted
    assert after.model_dump_json() == wanted.model_dump_json()
    assert record.seq == 3
    assert not after.offers_devices
    assert pickle.loads(pickle.dumps(after)) == copy.deepcopy(after) == after
    with pytest.raises(ValidationError, match="frozen"):
        after.seq = 5


def test_a_device_is_available_when_its_node_offers_it_and_it_can_be_used() -> None:
    for offered in (True, False):
        for usable in (True, False):
            one = device().model_copy(update={"usable": usable})
            made = available(one, offered=offered)
            assert made == DeviceRecord(device=one, available=offered and usable)
            assert DeviceRecord.model_validate_json(made.model_dump_json()) == made
