import pytest


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch):
    """seed_everything leaves its seed in the environment, where the next test's callbacks would find it."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.delenv("PL_GLOBAL_SEED")
