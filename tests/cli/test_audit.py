"""The audit log: what is written is read, and whatever was done to it since shows."""

import json
import multiprocessing
import re
import subprocess
import sys

import pytest

from lightning_lowrank.cli import main
from lightning_lowrank.cli.audit import FIRST, AuditLog, read_audit


def written(folder, count=4):
    log = AuditLog(folder / "audit.jsonl")
    for number in range(count):
        log.append(direction="received", kind="train.round", round=number, bytes=10 * number)
    return log.file


def test_entries_are_numbered_and_chained(tmp_path):
    audit = read_audit(written(tmp_path))
    assert [entry["number"] for entry in audit.entries] == [0, 1, 2, 3]
    assert audit.entries[0]["previous"] == FIRST
    assert [entry["previous"] for entry in audit.entries[1:]] == [entry["hash"] for entry in audit.entries[:-1]]
    assert audit.faults == []
    assert audit.last == audit.entries[-1]["hash"]


def changed(lines):
    entry = json.loads(lines[1])
    return [lines[0], json.dumps({**entry, "bytes": 1}).encode() + b"\n", *lines[2:]]


def rewritten(lines):
    """Change a line and make its own hash fit."""
    from lightning_lowrank.cli.audit import _hash

    content = {**json.loads(lines[1]), "bytes": 1}
    del content["hash"]
    return [lines[0], json.dumps({**content, "hash": _hash(content)}).encode() + b"\n", *lines[2:]]


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (changed, "line 2 is torn or changed"),
        (rewritten, "line 3 does not follow the line before it"),
        (lambda lines: [lines[0], *lines[2:]], "line 2 does not follow"),
        (lambda lines: lines[1:], "line 1 does not follow"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "line 2 does not follow"),
        (lambda lines: [*lines, lines[3]], "line 5 does not follow"),
        (lambda lines: [*lines[:3], lines[3][:20]], "line 4 is torn"),
        (lambda lines: [*lines[:3], lines[3][:-1]], "line 4 is torn"),
        (lambda lines: [b"[" * 100_000 + b"\n", *lines], "lines 1 to 2 are torn"),
        (lambda lines: [b'{"number": [], "hash": 1}\n', b"\xff\n", *lines], "lines 1 to 2 are torn or changed"),
        (lambda lines: lines[:2], "the line with the hash .* is gone"),
    ],
)
def test_what_was_done_to_a_log_shows(tmp_path, harm, told):
    file = written(tmp_path)
    last = read_audit(file).last
    file.write_bytes(b"".join(harm(file.read_bytes().splitlines(keepends=True))))
    faults = read_audit(file, after=last).faults
    assert any(re.search(told, fault) for fault in faults), faults


def test_a_log_goes_on_after_a_torn_line(tmp_path):
    file = written(tmp_path, 2)
    with file.open("ab") as log:
        log.write(b'{"number": 2, "ti')
    AuditLog(file).append(direction="sent")
    audit = read_audit(file)
    assert audit.faults == ["line 3 is torn or changed"]
    assert [entry["number"] for entry in audit.entries] == [0, 1, 2]


def _append(file):
    for _ in range(20):
        AuditLog(file).append(direction="sent")


@pytest.mark.slow
def test_processes_append_to_one_log(tmp_path):
    workers = [multiprocessing.get_context("spawn").Process(target=_append, args=(tmp_path / "log",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    audit = read_audit(tmp_path / "log")
    assert (len(audit.entries), audit.faults) == (60, [])


def test_the_command(tmp_path, capsys):
    file = written(tmp_path)
    AuditLog(file).append(direction="refused", reason="\x1b[2J[bold]no", epsilon=0.5)
    main(["audit", str(file)])
    printed = capsys.readouterr().out
    assert f"5 lines, whole; the last one's hash is {read_audit(file).last}" in printed
    assert "[bold]no" in printed
    assert "0.5000" in printed
    assert "\x1b" not in printed
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(SystemExit, match=r"line.*5"):
        main(["audit", str(file)])
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["audit", str(tmp_path / "none")])
    file.write_text("no log\n" * 3)
    with pytest.raises(SystemExit, match=r"lines.*1"):
        main(["audit", str(file)])


@pytest.mark.slow
def test_the_command_needs_neither_torch_nor_flower(tmp_path):
    code = (
        f"import sys; from lightning_lowrank.cli import main; main(['audit', {str(written(tmp_path))!r}]);"
        "print('slow', 'torch' in sys.modules, 'flwr' in sys.modules, 'lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "slow False False False" in done.stdout
