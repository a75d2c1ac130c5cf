"""What `internals.flower` takes from Flower is there, and what happens where it is not."""

import pytest

pytest.importorskip("flwr", reason='needs pip install "lightning_lowrank[flower]"')

from flwr.app import Error
from flwr.common.constant import ErrorCode

from lightning_lowrank.internals import flower


def test_codes_for_what_a_sites_own_code_raised(monkeypatch):
    for code in (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.INVALID_FAB):
        assert not flower.is_passing(Error(code, "it failed"))
    for code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
        assert flower.is_passing(Error(code, "it has gone"))
    monkeypatch.setattr(flower, "_constant", None)
    assert flower.is_passing(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it failed"))
