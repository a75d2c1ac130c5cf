"""A site's policy: the limits within which the site trains and sends, whatever the recipe says.

The site's administrator writes it to a file that the SuperNode is started with. `Site` and the ``ClientApp`` check
every request against it before they build, train or send anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomllib
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.callbacks import DifferentialPrivacy
from lightning_lowrank.federated.failures import first_non_finite
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy import ClientPrivacy
from lightning_lowrank.federated.state import changed_integers, difference
from lightning_lowrank.flower.approval import Approvals, EachOnce
from lightning_lowrank.flower.messages import Fields, field_of
from lightning_lowrank.patterns import matches

# A tolerance for codecs: rounding to 16 bits enlarges a norm by less.
_ROUNDING = 1.01
_FEWEST_IN_SUM = 2


class PolicyViolation(MisconfigurationException):
    """A request violates the site's policy."""


class NotApproved(PolicyViolation):
    """The site has not approved the server's recipe."""


@dataclass(frozen=True)
class Policy:
    """A site's limits. An entry that is ``None`` or left out permits everything.

    A site whose policy is in a file runs only recipes that its administrator has approved; see `approved`.

    Args:
        min_clients: Least number of sites in a mean: the server must promise no round of fewer. With secure
            aggregation the site also refuses the protocol's steps that would unmask a sum of fewer.
        secure_aggregation: Whether the site answers only by secure aggregation, of two sites or more. A server that
            follows the protocol then sees no single answer; docs/security.md says what a dishonest server can do.
        clip: Largest L2 norm, above 0, of the change that leaves the site, over all tensors together. A larger change
            is scaled down to it before it is encoded. Refused are recipes whose ``federated.privacy`` states a larger
            clipping norm, methods that send values whose change is not known, such as `FedLoRA` with ``RoLoRA``, and
            tensors of changed integers; a single integer, such as BatchNorm's number of batches, is sent as it is.
        max_epsilon: Largest ε, above 0, that all rounds of all studies together may cost the site's samples. It needs
            recipes with the callback `DifferentialPrivacy`, by which the site counts in a file of its own
            (``privacy_client_<partition-id>.json`` in ``state-dir``); a round that would cost more is refused before
            it is trained.
        max_delta: Largest δ of that ε, in (0, 1). Default 1e-5. Use less than 1 over the site's number of samples.
        max_download: Largest message from the server, in bytes.
        max_upload: Largest message to the server, in bytes.
        tensors: Names that may be sent in either direction, as patterns with the wildcards of `fnmatch`, each with the
            largest shape. A tensor of fewer dimensions fits if its last ones do.
        modules: Which parts of the model may be trained: patterns of which one must match each trained parameter or
            buffer, as in `LowRank`'s ``include``: names, runs of their parts between dots, wildcards. A tensor that is
            part of two layers, such as a tied embedding, must be matched under both names.
        max_rounds: Largest number of rounds that the server may announce for a study; the site trains in no more.
            Default: the number that the server announces.

    Raises:
        MisconfigurationException: If an entry is of another type or out of range.

    Example:
        >>> Policy(max_upload=1000).check_upload(1001)
        Traceback (most recent call last):
        ...
        lightning_lowrank.flower.policy.PolicyViolation: the site's policy has max_upload=1,000, and its answer has \
1,001 bytes.
    """

    min_clients: int | None = None
    secure_aggregation: bool = False
    clip: float | None = None
    max_epsilon: float | None = None
    max_delta: float = 1e-5
    max_download: int | None = None
    max_upload: int | None = None
    tensors: Mapping[str, Sequence[int]] | None = None
    modules: Sequence[str] | None = None
    max_rounds: int | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("min_clients", "max_download", "max_upload", "max_rounds"):
            value = getattr(self, name)
            _check(value is None or (type(value) is int and value >= 1), name, "a whole number, 1 or more", value)
        for name in ("clip", "max_epsilon", "max_delta"):
            value = getattr(self, name)
            optional = value is None and name != "max_delta"
            above = type(value) in (int, float) and math.isfinite(value) and value > 0
            _check(optional or above, name, "a number above 0", value)
        _check(self.max_delta < 1, "max_delta", "below 1", self.max_delta)
        _check(type(self.secure_aggregation) is bool, "secure_aggregation", "true or false", self.secure_aggregation)
        _check(self.modules is None or _are_texts(self.modules), "modules", "a list of patterns", self.modules)
        wanted = "patterns with the largest shape of each, such as {'network.*': [512, 512]}"
        are_shapes = isinstance(self.tensors, Mapping) and all(
            isinstance(pattern, str)
            and isinstance(shape, (list, tuple))
            and all(type(size) is int and size >= 0 for size in shape)
            for pattern, shape in self.tensors.items()
        )
        _check(self.tensors is None or are_shapes, "tensors", wanted, self.tensors)

    @classmethod
    def load(cls, file: str | Path) -> Policy:
        """Read a policy from a YAML file, or from one whose name ends in ``.toml``.

        Raises:
            MisconfigurationException: If it cannot be read, has an entry of another name, or one out of range.
        """
        path = Path(file).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
            found = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, EachOnce)
        except Exception as error:  # a date out of range is a ValueError, deep nesting a RecursionError
            raise MisconfigurationException(f"the site's policy {path} cannot be read: {error}") from error
        known = [each.name for each in fields(cls) if each.name != "source"]
        if not isinstance(found, dict) or not found or not found.keys() <= set(known):
            unknown = sorted(map(str, found.keys() - set(known))) if isinstance(found, dict) else found
            raise MisconfigurationException(
                f"the site's policy {path} may only have the entries {', '.join(known)}; it has {unknown}."
            )
        try:
            return replace(cls(**found), source=str(path))
        except MisconfigurationException as error:
            raise MisconfigurationException(f"{path}: {error}") from error

    def check_download(self, nbytes: int) -> None:
        """Refuse a message from the server that is too large.

        Raises:
            PolicyViolation: If it is.
        """
        if self.max_download is not None and nbytes > self.max_download:
            raise self._violation(
                "max_download", f"{self.max_download:,}", f"the server's message has {nbytes:,} bytes"
            )

    def check_upload(self, nbytes: int) -> None:
        """Refuse to send a message that is too large.

        Raises:
            PolicyViolation: If it is.
        """
        if self.max_upload is not None and nbytes > self.max_upload:
            raise self._violation("max_upload", f"{self.max_upload:,}", f"its answer has {nbytes:,} bytes")

    def check_request(self, request: Fields) -> None:
        """Refuse the request of a server that averages too few sites, or makes too many rounds.

        Raises:
            PolicyViolation: If it does.
            DecodingError: If the request lacks one of these numbers.
        """
        promised, rounds, cohort = (field_of(request, name, int) for name in ("min_sites", "rounds", "cohort"))
        if self.min_clients is not None and min(promised, cohort) < self.min_clients:
            reason = f"the server makes a round of as few as {min(promised, cohort)} (min-sites, or the cohort)"
            raise self._violation("min_clients", self.min_clients, reason)
        if self.max_rounds is not None and rounds > self.max_rounds:
            raise self._violation("max_rounds", self.max_rounds, f"the server says that there are {rounds:,} rounds")

    def check_plain(self) -> None:
        """Refuse to show the server a single answer if the policy demands secure aggregation.

        Raises:
            PolicyViolation: If the policy asks for secure aggregation.
        """
        if self.secure_aggregation:
            raise self._violation("secure_aggregation", "true", "the server would see the single answer of this site")

    def check_protocol(self, configuration: Mapping[str, Any]) -> None:
        """Refuse secure aggregation of too few sites, or shares by which a single answer could be unmasked.

        Args:
            configuration: The server's, of one stage of the protocol.

        Raises:
            PolicyViolation: If there are fewer sites than ``min_clients``, or fewer than two with
                ``secure_aggregation``; or if the server asks for both shares of one site, or twice for a site.
        """
        stage = configuration.get("stage")
        active, dead = ([*configuration.get(name, ())] for name in ("active_nids", "dead_nids"))
        if stage == "unmask" and len({*active, *dead}) < len(active) + len(dead):
            raise PolicyViolation("the server asks twice for the shares of one site, which would unmask its answer.")
        least = self.min_clients or 1
        entry: tuple[str, object] = "min_clients", self.min_clients
        if self.secure_aggregation and least < _FEWEST_IN_SUM:
            least, entry = _FEWEST_IN_SUM, ("secure_aggregation", "true")
        keys = [value for name, value in configuration.items() if name.isdigit()]
        for count, reason in (
            (configuration.get("threshold"), "the answers could be unmasked with {} sites"),
            (len(keys) if stage == "share_keys" else None, "the server names the keys of {} sites"),
            (len(active) if stage == "unmask" else None, "the server asks for the sum of {} sites"),
        ):
            if count is not None and not (type(count) is int and count >= least):
                raise self._violation(*entry, reason.format(count))

    def approved(self, recipe: bytes) -> bytes:
        """The site's own copy of a recipe that it has approved; without a policy file, the recipe itself.

        Raises:
            NotApproved: If the site has not approved it. The message is for the site alone: it shows the difference.
        """
        if not self.source:
            return recipe
        approvals = Approvals(Path(self.source).parent / "approved")
        copy = approvals.own_copy(recipe)
        if copy is None:
            raise NotApproved(f"the recipe is not approved; {approvals.difference(recipe)}.")
        return copy

    def check_privacy(self, clients: ClientPrivacy | None, samples: DifferentialPrivacy | None) -> None:
        """Refuse a recipe with less privacy than the policy demands.

        Args:
            clients: The recipe's ``federated.privacy``.
            samples: The recipe's callback, if it has one.

        Raises:
            PolicyViolation: If it is.
        """
        if self.clip is not None and clients is not None and clients.clip > self.clip:
            raise self._violation("clip", self.clip, f"the recipe's federated.privacy has clip={clients.clip}")
        if self.max_epsilon is None:
            return
        if samples is None:
            reason = "the recipe has no DifferentialPrivacy, by which the site counts the privacy cost of its rounds"
            raise self._violation("max_epsilon", self.max_epsilon, reason)
        if samples.delta > self.max_delta:
            reason = f"the recipe's DifferentialPrivacy has delta={samples.delta}"
            raise self._violation("max_delta", self.max_delta, reason)

    def check_cost(self, epsilon: float, delta: float, steps: int) -> None:
        """Refuse a round of ``steps`` steps after which the samples' ε would exceed ``max_epsilon``.

        Raises:
            PolicyViolation: If it would.
        """
        if self.max_epsilon is not None and not epsilon <= self.max_epsilon:
            reason = f"{steps} more steps would make it {epsilon:.4g} at δ = {delta:g}, other studies included"
            raise self._violation("max_epsilon", self.max_epsilon, reason)

    def check_trained(self, names: Iterable[str]) -> None:
        """Refuse to train parameters outside of the permitted modules.

        Raises:
            PolicyViolation: If there are any.
        """
        if self.modules is None:
            return
        for name in names:
            if not any(matches(pattern, name) for pattern in self.modules):
                raise self._violation("modules", list(self.modules), f"{name!r} would be trained")

    def check_tensors(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Refuse tensors with a name or shape that the policy does not permit; ``what`` names their message.

        Raises:
            PolicyViolation: If there are any.
        """
        if self.tensors is None:
            return
        for name, tensor in tensors.items():
            limits = [shape for pattern, shape in self.tensors.items() if fnmatchcase(name, pattern)]
            if not any(_fits(tensor.shape, limit) for limit in limits):
                shape = f" of shape {list(tensor.shape)}" if limits else ""
                allowed: list[Any] = [list(limit) for limit in limits] or list(self.tensors)
                raise self._violation("tensors", allowed, f"{what} has {name[:100]!r}{shape}")

    def check_reference(self, method: str, without: str) -> None:
        """Refuse a method that sends values of which the change is not known, if changes are clipped.

        Args:
            method: The method's name.
            without: Its `Claims.without_reference`.

        Raises:
            PolicyViolation: If it does.
        """
        if self.clip is not None and without:
            raise self._violation("clip", self.clip, f"{method} {without}, so that their change is not known")

    @torch.no_grad()
    def clipped(
        self,
        message: Message,
        reference: Mapping[str, Tensor],
        exact: Iterable[str],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Message:
        """A client's message with its change from ``reference`` scaled down to a norm of at most ``clip``.

        A tensor without a reference of its shape is a change itself. Tensors of ``exact`` and single integers stay as
        they are.

        Args:
            message: The message.
            reference: The values that the server sent, of which it may have left some out.
            exact: `Claims.exact` of the method.
            buffers: The module's initial buffers. Integers of those that the server left out are compared with them.

        Raises:
            PolicyViolation: If integers have changed, a change is not finite, or the method has a codec of its own,
                whose numbers cannot be scaled.
        """
        if self.clip is None:
            return message
        integers = {**(buffers or {}), **reference}
        for name in changed_integers(message.tensors, integers):
            if message.tensors[name].ndim and name in integers:
                reason = (
                    f"the answer changes the integers of {name!r}, which no norm bounds: buffers='local' keeps them"
                )
                raise self._violation("clip", self.clip, reason)
        changes = _changes(message.tensors, reference, exact)
        norm = _norm(changes)
        if norm <= self.clip:
            return message
        infinite = first_non_finite(changes)
        if infinite is not None:
            raise self._violation("clip", self.clip, f"the change of {infinite!r} is not finite")
        if message.codec is not None:
            reason = f"the change has the norm {norm:.4g} in {type(message.codec).__name__}, which cannot be scaled"
            raise self._violation("clip", self.clip, reason)
        scaled = {
            name: _rounded_toward(message.tensors[name], self.clip / norm, change) for name, change in changes.items()
        }
        return replace(message, tensors={**message.tensors, **scaled})

    def check_change(
        self, received: Mapping[str, Tensor], reference: Mapping[str, Tensor], exact: Iterable[str]
    ) -> None:
        """Refuse to send a message whose decoded change has a norm above ``clip``, because some codecs enlarge it.

        Raises:
            PolicyViolation: If it does.
        """
        if self.clip is None:
            return
        norm = _norm(_changes(received, reference, exact))
        if not norm <= _ROUNDING * self.clip:
            reason = f"the uplink's codecs enlarge the change to the norm {norm:.4g}"
            raise self._violation("clip", self.clip, reason)

    def _violation(self, name: str, value: object, reason: str) -> PolicyViolation:
        return PolicyViolation(f"the site's policy has {name}={value}, and {reason}.")


def _check(holds: bool, name: str, wanted: str, value: object) -> None:
    if not holds:
        raise MisconfigurationException(f"the policy's {name} must be {wanted}, got {value!r}")


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


def _fits(shape: Sequence[int], limit: Sequence[int]) -> bool:
    last = limit[len(limit) - len(shape) :]
    return len(shape) <= len(limit) and all(size <= most for size, most in zip(shape, last, strict=True))


def _changes(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], exact: Iterable[str]) -> dict[str, Tensor]:
    left_out, changes = set(exact), {}
    for name, value in tensors.items():
        if name in left_out or not value.is_floating_point():
            continue
        known = reference.get(name)
        changes[name] = value.double()
        if known is not None and known.shape == value.shape:
            changes[name] = difference(changes[name], known.to(value.device).double())
    return changes


def _rounded_toward(value: Tensor, scale: float, change: Tensor) -> Tensor:
    """A tensor with its change scaled down, in its own type, in which no element's change is larger than scaled.

    To the nearest number of 16 bits, rounding may enlarge a change many times.
    """
    reference = value.double() - change
    wanted = scale * change
    found = (reference + wanted).to(value.dtype)
    too_far = (found.double() - reference).abs() > wanted.abs()
    return torch.where(too_far, torch.nextafter(found, reference.to(value.dtype)), found)


def _norm(changes: Mapping[str, Tensor]) -> float:
    if not changes:
        return 0.0
    return float(torch.stack([change.norm() for change in changes.values()]).norm())
