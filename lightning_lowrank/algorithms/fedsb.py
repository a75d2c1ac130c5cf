"""Fed-SB: clients train an r × r core between two factors that the first rounds have found."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.aggregation.aggregator import to_float64, working_dtype
from lightning_lowrank.algorithms._cores import CoreMethod
from lightning_lowrank.configuration import check_integer
from lightning_lowrank.federated.state import Base, Server
from lightning_lowrank.layers import CoreProduct
from lightning_lowrank.optim.orthonormal import completed_basis, haar_basis, rank_above_noise
from lightning_lowrank.seeding import generator


class FedSB(CoreMethod):
    r"""Fed-SB: LoRA-SB of which only the core :math:`R` is trained and sent (Singhal et al., 2025).

    The weight of a layer is :math:`W_0 + s\, B R A`. :math:`B` and :math:`A` have orthonormal columns and rows and are
    fixed; clients train :math:`R`, of :math:`r \times r` numbers, and the server averages it. The mean is exact:
    :math:`\frac{1}{c} \sum_i B R_i A = B \left(\frac{1}{c} \sum_i R_i\right) A`.

    LoRA-SB (Ponkshe et al., 2024) starts where full fine-tuning would be after its first step: it takes the truncated
    singular value decomposition :math:`B \Sigma A` of that step's update, and :math:`R = \Sigma / s`. The authors'
    code computes the update's whole gradient in one place, of a sample of all clients' data, and takes its sign. Here
    no client sends anything of the size of a weight. The first rounds find the decomposition by subspace iteration
    (Halko et al., 2011): in round 0 clients train :math:`B` from zero with a random orthonormal :math:`A`, in round 1
    :math:`A` from zero with the orthonormal basis of the mean :math:`B`, and so on. The last such round's mean update
    is decomposed and kept. With one step of SGD in these rounds this is the decomposition, without the sign, of the
    mean gradient at :math:`W_0`, exact if its rank is at most :math:`r`. If its rank is below :math:`r`, as that of a
    softmax layer of :math:`r` classes, the further columns of :math:`B` and rows of :math:`A` are drawn from the seed.

    Put ``LowRank(CoreProduct(), rank=64, freeze_rest=True)`` before the loop; the factors are :math:`B` = ``U``,
    :math:`R` = ``H`` and :math:`A` = ``Vᵀ``. Other trained parameters, such as a head, are averaged as in `FedAvg`. In
    the rounds that find the subspaces clients send one factor, and every client, also outside the cohort, is sent the
    basis of its mean, then ``U`` and ``V`` once. In all further rounds the cores are all that is sent of these layers,
    whatever the number of clients. A robust rule as the loop's ``aggregator`` takes the place of the means.

    Args:
        subspace_rounds: Rounds that find :math:`B` and :math:`A`, 2 or more. More of them come nearer to the
            decomposition of a gradient of high rank. Default: 2.

    Raises:
        MisconfigurationException: If ``subspace_rounds`` is below 2, or the module has no such layers, or low-rank
            layers of another kind.

    Example:
        >>> from lightning_lowrank import CoreProduct, Dirichlet, FederatedLoop, FedSB, LowRank
        >>> callbacks = [
        ...     LowRank(CoreProduct(), rank=16, freeze_rest=True),
        ...     FederatedLoop(FedSB(), clients=10, partition=Dirichlet(0.5), local_steps=10),
        ... ]
    """

    heads = "CoreProduct()"

    def __init__(self, subspace_rounds: int = 2) -> None:
        super().__init__()
        check_integer("subspace_rounds", subspace_rounds, least=2)
        self.subspace_rounds = subspace_rounds
        self._bases: frozenset[str] = frozenset()

    @override
    def setup(self, base: Base) -> None:
        super().setup(base)
        self._bases = frozenset(self.name(layer, factor) for layer in self.layers for factor in "UV")

    @override
    def suits(self, factorization: CoreProduct) -> bool:
        return factorization.heads == 1

    def trained(self, round_number: int) -> str:
        """The factor that clients train in a round."""
        return "UV"[round_number % 2] if round_number < self.subspace_rounds else "H"

    @override
    def fixed_in_round(self, round_number: int) -> frozenset[str]:
        still = {"U", "H", "V"} - {self.trained(round_number)}
        return frozenset(self.name(layer, factor) for layer in self.layers for factor in still)

    @override
    def drawn_in(self, name: str, round_number: int) -> int:
        """For ``U`` and ``V``, the current round, but at most the first after the subspace search; otherwise 0."""
        return min(round_number, self.subspace_rounds) if name in self._bases else 0

    @override
    def start(self, base: Base) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            like = layer.factors["V"]
            draws = torch.randn(
                like.shape, generator=generator(base.seed, "subspace", name), dtype=torch.float64, device="cpu"
            )
            values |= self._with_basis(name, "V", haar_basis(draws).to(like))
        return values

    def _with_basis(self, name: str, factor: str, basis: Tensor) -> dict[str, Tensor]:
        """A layer's factors with ``factor`` set to the basis and the opposite factor zero."""
        layer = self.layers[name]
        other = "U" if factor == "V" else "V"
        identity = torch.eye(layer.rank, dtype=basis.dtype, device=basis.device)
        values = {factor: basis, other: torch.zeros_like(layer.factors[other]).to(basis), "H": identity}
        return {self.name(name, key): value for key, value in values.items()}

    @override
    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        """Install the bases that the server announced."""
        if not message:
            return
        bases: dict[str, Tensor] = {}
        for name in self.layers:
            found = {key: message[self.name(name, key)] for key in "UV" if self.name(name, key) in message}
            if len(found) == 1:
                ((factor, basis),) = found.items()
                bases |= self._with_basis(name, factor, basis)
            else:
                bases |= {self.name(name, key): value for key, value in found.items()}
        base.state["bases"] = bases

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Average the trained parameters; in the rounds that find the subspaces, announce the basis of the mean."""
        super().aggregate(server)
        left = self.subspace_rounds - 1 - server.round
        if left < 0:
            return
        trained = self.trained(server.round)
        other = "V" if trained == "U" else "U"
        announced: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            key = self.name(name, trained)
            mean = to_float64(server.model[key])
            # mean = X Σ Yᵀ, and the update is mean · otherᵀ (or its transpose): X Σ (other · Y)ᵀ.
            basis, values, rotation = torch.linalg.svd(mean, full_matrices=False)
            known = rank_above_noise(values, working_dtype(server.model[key].dtype))
            if known < layer.rank:
                draws = generator(server.base.seed, "completion", name, server.round)
                further, turn = (
                    torch.randn(len(side), layer.rank - known, generator=draws, dtype=mean.dtype, device="cpu").to(mean)
                    for side in (mean, rotation)
                )
                basis = completed_basis(basis[:, :known], layer.without_padding(trained, further))
                rotation = completed_basis(rotation[:known].mT, turn).mT
                values[known:] = 0
            if left:
                basis = basis if known < layer.rank else torch.linalg.qr(mean).Q
                announced[key] = layer.without_padding(trained, basis).to(server.model[key])
                continue
            # Libraries differ in the signs of the vectors.
            signs = basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()
            basis, rotation = basis * signs, rotation * signs.mT
            turned = to_float64(server.model[self.name(name, other)]) @ rotation.mT
            found = {trained: basis, other: turned, "H": values.diag()}
            for part, value in found.items():
                server.model[self.name(name, part)] = layer.without_padding(part, value).to(server.model[key])
            announced |= {self.name(name, part): server.model[self.name(name, part)] for part in ("U", "V")}
        self.announce(server, announced)
        server.model.update(server.base.state["bases"])
