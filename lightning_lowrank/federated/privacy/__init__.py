"""Differential privacy: mechanisms, their noise, and their cost.

Accounting is dp-accounting's (the extra ``[privacy]``). `ClientPrivacy` protects whole clients. The callback
`DifferentialPrivacy`, which protects single samples, uses ``samples.py``.
"""

from lightning_lowrank.federated.privacy.accounting import Mechanism
from lightning_lowrank.federated.privacy.clients import ClientPrivacy

__all__ = ["ClientPrivacy", "Mechanism"]
