"""The audit log: each line is whole, on the disk, and a record of the logger."""

import json
import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr.app", reason="Flower needs Python 3.11")

from flwr.app import ConfigRecord, RecordDict

from lightning_lowrank.flower.audit import AuditLog
from lightning_lowrank.flower.client import _measured
from tests.flower.helpers import entries_of


def test_lines_have_what_was_appended_and_an_identifier(tmp_path):
    log = AuditLog(tmp_path / "state" / "audit.jsonl")
    identifiers = [log.append(direction="received", round=number, reason="x" * 3000 + "\n") for number in range(3)]
    entries = entries_of(log.file)
    assert [entry["entry"] for entry in entries] == identifiers
    assert len(set(identifiers)) == 3
    assert [entry["round"] for entry in entries] == [0, 1, 2]
    assert all(entry["reason"] == "x" * 2000 for entry in entries)
    assert log.file.stat().st_mode & 0o777 == 0o600


def test_handlers_of_the_logger_have_the_lines_too(tmp_path):
    lines: list[str] = []

    class Remote(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, remote = logging.getLogger("lightning_lowrank.audit"), Remote()
    logger.addHandler(remote)
    try:
        AuditLog(tmp_path / "audit.jsonl").append(direction="sent")
    finally:
        logger.removeHandler(remote)
    assert [json.loads(line) for line in lines] == entries_of(tmp_path / "audit.jsonl")


def test_bytes_of_a_secure_sum_count_once_in_a_message():
    def measured(**fields):
        return _measured(SimpleNamespace(content=RecordDict({"config": ConfigRecord(fields)})))

    (plain, _), (single, entry), (listed, other) = (
        measured(a=b""),
        measured(a=b"x" * 1000),
        measured(a=[b"x" * 500] * 2),
    )
    assert (single - plain, entry["bytes"]) == (1000, single)
    # The brackets, and two quotes, a comma and a space between the two.
    assert listed - plain == 1000 + 2 + 4
    assert entry["digest"] != other["digest"] != measured(a=[b"y" * 500] * 2)[1]["digest"]


def test_a_torn_line_is_the_only_one_lost(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.append(direction="received")
    with log.file.open("ab") as file:
        file.write(b'{"entry": 2, "ti')
    log.append(direction="sent")
    first, torn, last = log.file.read_text().splitlines()
    assert (json.loads(first)["direction"], torn, json.loads(last)["direction"]) == (
        "received",
        '{"entry": 2, "ti',
        "sent",
    )


def test_a_line_waits_for_the_end_of_another_processs(tmp_path):
    fcntl = pytest.importorskip("fcntl", reason="Windows has no locks of this kind")
    log = AuditLog(tmp_path / "audit.jsonl")
    log.append(direction="received")
    with log.file.open("ab", buffering=0) as other, ThreadPoolExecutor() as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"direction":')
        appended = pool.submit(log.append, direction="sent")
        with pytest.raises(TimeoutError):
            appended.result(timeout=0.2)
        other.write(b' "refused"}\n')
        fcntl.flock(other, fcntl.LOCK_UN)
        appended.result()
    assert [entry["direction"] for entry in entries_of(log.file)] == ["received", "refused", "sent"]


def test_a_log_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        AuditLog(tmp_path / "folder").append(direction="sent")


def _append(file):
    for _ in range(60):
        AuditLog(file).append(direction="sent", reason="x" * 2000)


@pytest.mark.slow
def test_processes_append_to_one_log(tmp_path):
    workers = [multiprocessing.get_context("fork").Process(target=_append, args=(tmp_path / "log",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(entries_of(tmp_path / "log")) == 180
