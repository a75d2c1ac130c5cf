import os

import pytest
import torch

# cuBLAS reads it when a process first uses it; without it, ``deterministic=True`` refuses products of matrices.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from tests.gpu.places import places

NOWHERE = pytest.mark.skip(reason="there is no GPU (LOWRANK_TEST_DEVICE=cpu runs the same tests on the CPU)")


@pytest.fixture(params=places() or [pytest.param("cuda", marks=NOWHERE)])
def place(request):
    """Where a test runs."""
    return request.param


@pytest.fixture(autouse=True)
def no_tf32():
    """Compute float32 products in float32, whatever the session's setting."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
