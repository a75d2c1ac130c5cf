"""What `internals.flower` takes from Flower is there, and what happens where it is not."""

import pytest

pytest.importorskip("flwr", reason='needs pip install ".[flower]"')

import httpx
from flwr.app import Array, Error
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, ErrorCode

from lightning_lowrank.internals import flower


def test_codes_for_what_a_sites_own_code_raised(monkeypatch):
    for code in (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.INVALID_FAB):
        assert not flower.is_temporary(Error(code, "it failed"))
    for code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
        assert flower.is_temporary(Error(code, "it has gone"))
    monkeypatch.setattr(flower, "_constant", None)
    assert flower.is_temporary(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it failed"))


def deflated(array):
    """Return what Flower sends for an array, and the chunks that it names."""
    return array.deflate(), dict(array.children)


def test_arrays_have_no_more_bytes_than_are_expected():
    # Equal chunks are sent once, and named twice.
    size = 2 * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    content, chunks = deflated(Array("uint8", (size,), "x", bytes(size)))
    assert len(chunks) == 1
    with flower.bounded_arrays(size):
        assert Array.inflate(content, chunks).data == bytes(size)
        with pytest.raises(ValueError, match="bytes, and at most"):
            Array.inflate(content, chunks)
    with flower.bounded_arrays(size - 1), pytest.raises(ValueError, match="its arrays have 10,485,760 bytes"):
        Array.inflate(content, chunks)
    assert Array.inflate(content, chunks).data == bytes(size)


def test_errors_of_the_connection(monkeypatch):
    for error in (ConnectionResetError(), httpx.ConnectError("refused"), TimeoutError()):
        assert flower.is_connection_error(error)
    for error in (KeyError("object"), ValueError("its arrays"), RecursionError(), MemoryError()):
        assert not flower.is_connection_error(error)


def test_without_flowers_objects_nothing_is_bounded(monkeypatch):
    content, chunks = deflated(Array("uint8", (9,), "x", bytes(9)))
    monkeypatch.setattr(flower, "get_object_body", None)
    with flower.bounded_arrays(1):
        assert Array.inflate(content, chunks).data == bytes(9)
