from urllib.error import URLError

import pytest
import torchvision


@pytest.fixture
def no_network(monkeypatch):
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise URLError("no route to host")

    for name in ("_get_redirect_url", "_urlretrieve"):
        monkeypatch.setattr(torchvision.datasets.utils, name, refuse)
    return attempts
