"""Eight bits a number, and the largest magnitude of each tensor (template).

A codec is one file in ``lightning_lowrank/compression``. `FloatingCodec` writes and reads the bytes; a codec says what
it leaves of the floating-point tensors, the *values* (of the tensors' types) and the *codes* (bytes), and what these
stand for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_lowrank.compression import FloatingCodec
from lightning_lowrank.compression.wire import Entry, Layout

_LEVELS = 127


class Linear8(FloatingCodec[dict[str, Tensor]]):
    r"""Round every number of a tensor to one of 255 multiples of :math:`\max |x| / 127`.

    It is deterministic, so that it is biased (``unbiased`` stays false). A codec that draws derives from `RandomCodec`.
    """

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """Return types and shapes of the values: a magnitude for each tensor."""
        return {name: (dtype, (1,)) for name, (dtype, _) in layout.floating.items()}

    def compress(self, tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return each tensor's largest magnitude, and its numbers as multiples."""
        values, codes = {}, {}
        for name, tensor in tensors.items():
            numbers = tensor.flatten()
            largest = numbers.abs().max().view(1) if numbers.numel() else numbers.new_zeros(1)
            values[name] = largest
            # What is not finite makes the magnitude not finite, and by it all that arrives.
            shares = (numbers.double() / largest.double()).nan_to_num(0.0, 0.0, 0.0)
            codes[name] = (shares * _LEVELS).round().to(torch.int8)
        return values, codes

    def restore(self, values: Mapping[str, Tensor], codes: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """Return the tensors, on the device of the values."""
        restored = {}
        for name, (dtype, shape) in layout.floating.items():
            shares = codes[name].to(values[name].device).double() / _LEVELS
            restored[name] = (shares * values[name].double()).to(dtype).reshape(shape)
        return restored

    # With codes: how long they are, and how they become bytes and come back.

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        """Return the codes' length: a byte for each number."""
        return {"codes": sum(layout.numbers)}

    def pack(self, codes: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """Return the codes as bytes on the CPU."""
        rows = [code.cpu().view(torch.uint8) for code in codes.values()]
        return {"codes": torch.cat([torch.empty(0, dtype=torch.uint8), *rows])}

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """Return the codes of bytes whose length has been checked."""
        return dict(zip(layout.floating, parts["codes"].view(torch.int8).split(layout.numbers), strict=True))
