"""A round of README's example, every day; `tests.docs` follows the whole page."""

import pytest

from tests.docs.page import README, blocks


@pytest.mark.filterwarnings("ignore")
def test_a_round_of_the_python_example_runs(tmp_path, monkeypatch, capsys):
    import lightning as L

    monkeypatch.chdir(tmp_path)
    trainer = L.Trainer
    monkeypatch.setattr(L, "Trainer", lambda max_epochs, **arguments: trainer(max_epochs=1, **arguments))
    namespace: dict = {}
    exec(next(block.text for block in blocks(README) if block.language == "python"), namespace)
    assert namespace["trainer"].callback_metrics["val_acc"] > 0.1
    assert namespace["trainer"].callback_metrics["comm/ratio"] < 1 / 8
