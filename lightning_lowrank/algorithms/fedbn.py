"""Methods in which a part of the model stays with each client: FedBN's normalization layers, FedPer's own layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.arguments import join_names
from lightning_lowrank.buffers import names_that_match
from lightning_lowrank.configuration import check_choice
from lightning_lowrank.federated.algorithm import Algorithm, Claims, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into, trained_tensors
from lightning_lowrank.internals.torch import BATCH_NORMS, INSTANCE_NORMS

Layers = Literal["batch", "all"]


class LocalPart(Algorithm, ABC):
    """Federated averaging of a part of the model; the other part never leaves its client.

    A client's own part starts with the module's initial values, is kept from round to round and never sent. In the
    global model it keeps its initial values, so evaluate the clients' own models:
    ``FederatedLoop(..., personal_test=...)``.

    Raises:
        MisconfigurationException: If all of the model is the client's own, or ``buffers="reset"`` would reset buffers
            of the client's own part in each round.
    """

    def __init__(self) -> None:
        self._own: set[str] = set()

    @abstractmethod
    def own_names(self, base: Base) -> set[str]:
        """Names of the trained parameters and persistent buffers that stay with the clients."""

    def setup(self, base: Base) -> None:
        """Find the part of the model that stays with the clients."""
        self._own = self.own_names(base)
        method, module = type(self).__name__, base.module
        shared = {name for name, value in module.named_parameters() if value.requires_grad} - self._own
        if not shared:
            raise MisconfigurationException(
                f"{method} would keep all trained parameters with the clients and share none: choose fewer, or use"
                " LocalTraining()."
            )
        buffers = sorted(self._own - dict(module.named_parameters()).keys())
        if base.buffer_policy == "reset" and buffers:
            raise MisconfigurationException(
                f"{method} keeps buffers such as {buffers[0]} with the clients, and buffers='reset' would reset them in"
                " each round: use buffers='average' or 'local'."
            )
        self.claims = Claims(local_part=join_names(sorted(self._own)) if self._own else "")
        if "initial" not in base.state:
            values = trained_tensors(module)
            base.state["initial"] = detached({name: values[name] for name in sorted(self._own)})

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        return Message(self._shared(server.sent_down()))

    def begin(self, client: ClientContext, message: Message) -> None:
        super().begin(client, message)
        copy_into(client.model, client.state.get("personal") or client.base.state["initial"])

    def end(self, client: ClientContext) -> Message:
        client.state["personal"] = detached({name: client.model[name] for name in sorted(self._own)})
        return Message(self._shared(client.base.sent_up(client.model)))

    def _shared(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if name not in self._own}


class FedBN(LocalPart):
    """Federated learning with local batch normalization (Li et al., ICLR 2021, Algorithm 1).

    Parameters and statistics of the normalization layers stay with each client; the rest is sent and averaged; see
    `LocalPart`. In the global model these layers keep their initial values, so its own validation means little.

    Args:
        layers: ``"batch"`` (default, the paper's): BatchNorm in all its forms. ``"all"``: instance, layer, group and
            root mean square normalization of ``torch.nn`` too. For layers of other classes, use `FedPer`.

    Raises:
        MisconfigurationException: If ``layers`` is neither, or as `LocalPart` says.

    Example:
        >>> from lightning_lowrank import ByKey, FedBN, FederatedLoop
        >>> loop = FederatedLoop(FedBN(), partition=ByKey("domain"), local_epochs=1)
    """

    def __init__(self, layers: Layers = "batch") -> None:
        super().__init__()
        check_choice("layers", layers, Layers)
        self.layers = layers

    def own_names(self, base: Base) -> set[str]:
        """Names of the normalization layers' tensors; warn if the module has no such layer."""
        others = (*INSTANCE_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
        kinds = BATCH_NORMS if self.layers == "batch" else (*BATCH_NORMS, *others)
        norms = [name for name, layer in base.module.named_modules() if isinstance(layer, kinds)]
        if not norms:
            rank_zero_warn(
                f"FedBN(layers={self.layers!r}) found no such normalization layer: without one it is FedAvg."
            )
        return {name for name in trained_tensors(base.module) if name.rpartition(".")[0] in norms}


class FedPer(LocalPart):
    """Federated learning with personalization layers (Arivazhagan et al., 2019, arXiv:1912.00818, Section 3).

    Each client keeps its own values of the parameters and buffers that ``patterns`` match, in the paper the last
    layers; the rest is sent and averaged; see `LocalPart`. Both parts are trained at once. In the paper each client
    draws its own layers; here all start with the module's.

    Args:
        patterns: Which tensors stay with the clients, by their names or any run of a name's parts, with the wildcards
            of `fnmatch`: ``["classifier"]`` is the whole submodule ``classifier``. A tensor that is part of two
            layers, such as a tied embedding, stays if either of its names matches.

    Raises:
        MisconfigurationException: If ``patterns`` is no list of at least one name, a pattern matches no trained
            parameter or persistent buffer, or as `LocalPart` says.

    Example:
        >>> from lightning_lowrank import FederatedLoop, FedPer, LabelCount
        >>> loop = FederatedLoop(FedPer(["classifier"]), clients=20, partition=LabelCount(2), local_epochs=4)
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        super().__init__()
        if isinstance(patterns, str) or not patterns:
            raise MisconfigurationException(f"patterns must be a list of at least one name, got {patterns!r}")
        self.patterns = list(patterns)

    def own_names(self, base: Base) -> set[str]:
        """Names of the tensors that match ``patterns``."""
        names, what = trained_tensors(base.module), "trained parameter or persistent buffer"
        return set(names_that_match(base.module, "FedPer's patterns", self.patterns, names, what))
