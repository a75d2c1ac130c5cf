"""The bridge's tests need Flower: pip install ".[flower]", with Python 3.11 or later."""

from importlib.util import find_spec

if find_spec("flwr") is None:
    collect_ignore_glob = ["*.py"]
