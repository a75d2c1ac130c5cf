"""Ravan: clients train the cores and scales of several heads between fixed factors."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.algorithms._cores import CoreMethod
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext
from lightning_lowrank.layers import CoreProduct
from lightning_lowrank.optim.orthonormal import haar_basis
from lightning_lowrank.seeding import generator


class Ravan(CoreMethod):
    r"""Ravan: multi-head low-rank adaptation (Raje et al., NeurIPS 2025).

    The change of a weight is a sum over heads, :math:`\sum_i s_i B_i H_i A_i`. :math:`B_i` and :math:`A_i` are drawn
    and fixed; clients train the cores :math:`H_i`, from zero, and their scales :math:`s_i`, from one. They upload the
    products :math:`s_i H_i`, of which the server takes the mean: all clients have the same :math:`B_i` and :math:`A_i`,
    so that the mean of the changes is exact. Clients start the next round from the means, with :math:`s_i = 1`. For the
    numbers of a LoRA of rank :math:`r`, :math:`r (m + n)`, the change's rank is up to
    :math:`h \sqrt{r (m + n) / h}`, more the more heads there are.

    Put ``LowRank(CoreProduct(heads=4), rank=32, freeze_rest=True)`` before the loop; the rank is that of a head. The
    columns of all heads' :math:`B_i` are orthonormal, and so are the rows of all :math:`A_i`, if ``heads · rank`` is
    at most the weight's side; else those of each head. Both are drawn from the experiment's seed. Of these layers the
    cores alone are sent, ``heads · rank²`` numbers in each direction. Other trained parameters are averaged as in
    `FedAvg`.

    We had the paper's abstract and not its text. The sum over heads, the trained and the uploaded parts are the
    abstract's. That the bases are orthonormal, that the mean is of the products, and that scales begin each round at
    one are our reading. The abstract's treatment of clients of unequal computational capacity is not included.

    Raises:
        MisconfigurationException: If the module has no such layers, or low-rank layers of another kind.

    Example:
        >>> from lightning_lowrank import CoreProduct, Dirichlet, FederatedLoop, LowRank, Ravan
        >>> callbacks = [
        ...     LowRank(CoreProduct(heads=4), rank=16, freeze_rest=True),
        ...     FederatedLoop(Ravan(), clients=10, partition=Dirichlet(0.5), local_steps=10),
        ... ]
    """

    heads = "CoreProduct(heads=4)"

    @override
    def suits(self, factorization: CoreProduct) -> bool:
        return factorization.heads > 1

    @override
    def fixed_in_round(self, round_number: int) -> frozenset[str]:
        return frozenset(self.name(layer, factor) for layer in self.layers for factor in ("U", "V"))

    @override
    def start(self, base: Base) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            for factor in ("U", "V"):
                like = layer.factors[factor]
                draws = torch.randn(
                    like.shape, generator=generator(base.seed, "heads", name, factor), dtype=torch.float64, device="cpu"
                )
                together = draws.shape[0] >= draws.shape[1]
                parts = [draws] if together else draws.split(layer.rank, dim=1)
                basis = torch.cat([haar_basis(part) for part in parts], dim=1)
                values[self.name(name, factor)] = layer.without_padding(factor, basis).to(like)
            values[self.name(name, "S")] = torch.ones_like(layer.factors["S"])
        return values

    @torch.no_grad()
    @override
    def end(self, client: ClientContext) -> Message:
        """The cores times their scales, all other trained parameters, and the buffers."""
        sent = dict(super().end(client).tensors)
        for name in self.layers:
            scale, core = sent.pop(self.name(name, "S")), self.name(name, "H")
            sent[core] = scale[:, None, None] * sent[core]
        return Message(sent)
