"""What every codec must keep. A codec takes part by being exported from ``lightning_lowrank.compression``."""

import pytest
import torch

from lightning_lowrank import compression

CODECS = [getattr(compression, name) for name in compression.__all__]
DRAWS = torch.Generator().manual_seed(0)
CASES = {
    "float32": {"weight": torch.randn(3, 4, generator=DRAWS), "bias": torch.randn(4, generator=DRAWS)},
    "bfloat16": {"weight": torch.randn(3, 4, generator=DRAWS).bfloat16()},
    "float64": {"weight": torch.randn(2, 2, generator=DRAWS).double()},
    "integers": {"seed": torch.tensor(2**62 + 1), "mask": torch.tensor([True, False])},
    "mixed": {
        "b": torch.zeros(1, dtype=torch.int64),
        "a": torch.randn(7, generator=DRAWS).half(),
        "c": torch.zeros(0, 3),
    },
    "one number": {"weight": torch.tensor(1.5)},
    "nothing": {},
    "not contiguous": {"weight": torch.randn(3, 4, generator=DRAWS).T},
    "parameter": {"weight": torch.nn.Parameter(torch.ones(2))},
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", CASES)
def test_the_other_side_decodes_what_was_encoded(codec, case):
    tensors = CASES[case]
    encoded = codec().encode(tensors)
    decoded = codec().decode(encoded)
    assert decoded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert decoded[name].dtype == tensor.dtype
        assert torch.equal(decoded[name], tensor)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", CASES)
def test_size_is_the_length_of_the_encoding(codec, case):
    assert codec().nbytes(CASES[case]) == len(codec().encode(CASES[case]))


def test_dense_size_needs_no_values():
    tensors = {"weight": torch.empty(1000, 1000, device="meta")}
    assert 4_000_000 < compression.DenseCodec().nbytes(tensors) < 4_000_200
