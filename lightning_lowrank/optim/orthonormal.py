"""Orthonormal bases that are uniformly distributed."""

from __future__ import annotations

import torch
from torch import Tensor


def haar_basis(gaussian: Tensor) -> Tensor:
    """Orthonormal columns from the QR decomposition of a Gaussian matrix, with unique signs.

    The signs of a QR decomposition depend on the library. A positive diagonal of ``R`` makes the basis unique and Haar.

    Args:
        gaussian: Standard normal draws, ``[rows, columns]``, with at least as many rows as columns.

    Returns:
        The basis, of the same shape.

    Example:
        >>> basis = haar_basis(torch.randn(5, 2))
        >>> torch.allclose(basis.T @ basis, torch.eye(2), atol=1e-6)
        True
    """
    basis, triangle = torch.linalg.qr(gaussian)
    return basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(gaussian.dtype)
