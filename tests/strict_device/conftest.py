import torch

from tests.strict_device.device import NAME

# These tests need the device; `tests/test_strict_device.py` runs them.
collect_ignore_glob = [] if hasattr(torch, NAME) else ["test_*.py"]
