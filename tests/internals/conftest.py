"""The engines of the loop in which Lightning counts the clients' batches are tested in that loop."""

import pytest

from lightning_lowrank import FederatedLoop


@pytest.fixture(autouse=True)
def turns_are_batches(request, monkeypatch):
    """Let a turn of Lightning's loop be a batch, as it is for clients together and for processes."""
    if request.path.name.startswith("test_direct_"):
        monkeypatch.setattr(FederatedLoop, "_turns_of", lambda loop, trainer: None)
