"""Seeds of torch's global generators in tests."""

import torch


def seed_torch(seed: int) -> None:
    """Seed the CPU's generator, and those of other devices if there are any.

    `torch.manual_seed` formats a stack trace for each kind of device that is not there.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
