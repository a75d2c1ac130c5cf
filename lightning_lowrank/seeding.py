"""Named random streams: the seed of a draw is derived from its purpose.

Two parties that agree on one number (the seed of a run, or of a round) agree on every random tensor that is derived
from it, in any order and on any machine, without touching the global generators. Secret draws of privacy have no seed
or a secret one.
"""

from __future__ import annotations

import hashlib
import os
from numbers import Integral

import torch


def default_seed() -> int:
    """The seed given to Lightning's ``seed_everything``, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def derive_seed(*parts: int | str) -> int:
    """Hash a sequence of integers and strings into a seed.

    The encoding is unambiguous: ``(1, 23)``, ``(12, 3)``, ``("1", 23)`` and ``("1", "23")`` all differ. The result
    depends only on the parts, so it is the same in every process, Python version and machine.

    Args:
        *parts: The purpose of the seed, from the general to the particular: a base seed first, then, for
            example, a purpose, a round and a layer's name.

    Returns:
        A non-negative integer below 2**63, as :meth:`torch.Generator.manual_seed` accepts.

    Raises:
        TypeError: If a part is neither an ``int`` nor a ``str`` (a ``bool`` counts as neither).
        ValueError: If there are no parts.

    Example:
        >>> derive_seed(0, "client", 7) == derive_seed(0, "client", 7)
        True
        >>> derive_seed(0, "client", 7) == derive_seed(0, "client7")
        False
    """
    if not parts:
        raise ValueError("derive_seed needs at least one part, such as a base seed; none was given.")
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        # A fast check that most parts pass; `isinstance` with Integral takes several times as long.
        usual = type(part) is int or type(part) is str
        if not usual and (isinstance(part, bool) or not isinstance(part, (Integral, str))):
            raise TypeError(
                f"the parts of a seed must be int or str, but one is {part!r} of type {type(part).__name__}; "
                "convert it with int() or str()."
            )
        kind, text = ("s" if isinstance(part, str) else "i"), str(part).encode()
        digest.update(f"{kind}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "big") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Build a generator seeded with :func:`derive_seed` of the parts.

    Args:
        *parts: As for :func:`derive_seed`.
        device: Where it draws. On the CPU, the default, drawing and moving the result gives the same numbers whatever
            device they are for; another device draws other numbers, without a copy from the CPU.

    Returns:
        A fresh generator.

    Example:
        >>> first = torch.rand(3, generator=generator(0, "order", 1))
        >>> torch.equal(first, torch.rand(3, generator=generator(0, "order", 1)))
        True
    """
    return torch.Generator(device).manual_seed(derive_seed(*parts))
