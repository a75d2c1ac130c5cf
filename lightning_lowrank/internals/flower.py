"""Flower's private parts that the bridge uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Array, Context, Error, Message, RecordDict

try:
    from flwr.common import constant as _constant
except ImportError:
    _constant = None  # type: ignore[assignment]

try:
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_body,
        get_object_children_ids_from_object_content,
    )
except ImportError:
    get_object_body = None  # type: ignore[assignment]

try:
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE
    from flwr.compat.common import recorddict_compat as _compat
    from flwr.server import LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs
except ImportError:
    secaggplus_mod = None  # type: ignore[assignment]

_LINKS = ("httpx", "httpcore", "grpc")
_RAISED_BY_SITE = ("CLIENT_APP_RAISED_EXCEPTION", "LOAD_CLIENT_APP_EXCEPTION", "INVALID_FAB")


def is_temporary(error: Error) -> bool:
    """Whether a node's error may be temporary; an error that the site's own code raised is not.

    The names of the codes are not public. If Flower has them elsewhere, every error counts as temporary, and a site is
    asked again until the server's ``start_timeout``.
    """
    codes = getattr(_constant, "ErrorCode", None)
    return error.code not in [getattr(codes, name, None) for name in _RAISED_BY_SITE]


def error_reply(message: Message, reason: str) -> Message:
    """The reply of a site whose code failed; ``reason`` is its only text."""
    codes = getattr(_constant, "ErrorCode", None)
    return Message(Error(getattr(codes, _RAISED_BY_SITE[0], 2), reason), reply_to=message)


def is_connection_error(error: Exception) -> bool:
    """Whether an error of a Flower grid concerns the connection rather than a message's content."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or not kinds.isdisjoint(_LINKS)


@contextmanager
def bounded_arrays(most: int) -> Iterator[None]:
    """A context in which reading a message raises an error if its arrays exceed a total size.

    Flower joins an array of the chunks that its list of numbers names, and the list may name one any number of times: a
    megabyte then becomes terabytes before anybody sees the message. If Flower has no such lists, nothing is refused.

    Args:
        most: How many bytes all arrays may have.

    Raises:
        ValueError: From where the message is read.
    """
    own = vars(Array).get("inflate")
    if get_object_body is None or not isinstance(own, classmethod):
        yield
        return
    joined = 0

    def inflate(cls: type[Array], object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        nonlocal joined
        names = get_object_children_ids_from_object_content(object_content)
        chunks = json.loads(get_object_body(object_content, cls))["arraychunk_ids"]
        lengths = [len((children or {})[name].data) for name in names]
        joined += sum(lengths[place] for place in chunks)
        if joined > most:
            raise ValueError(f"its arrays have {joined:,} bytes, and at most {most:,} are expected.")
        return own.__func__(cls, object_content, children)

    Array.inflate = classmethod(inflate)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Array.inflate = own  # type: ignore[method-assign, assignment]


def has_secure_aggregation() -> bool:
    """Whether this version of Flower has SecAgg+ at the place where version 1.41 has it."""
    return secaggplus_mod is not None


def run_secure_aggregation(
    grid: Any,
    instructions: Mapping[int, tuple[list[bytes], dict[str, Any]]],
    number: int,
    threshold: float,
    **settings: Any,
) -> tuple[list[np.ndarray], list[int]]:
    """Run Flower's SecAgg+ protocol once.

    Args:
        grid: Has ``send_and_receive``.
        instructions: The content that each node is sent with the request for its numbers.
        number: The round.
        threshold: Share of the nodes that are needed to unmask the sum.
        settings: Further arguments of ``SecAggPlusWorkflow``.

    Returns:
        The weighted mean and the nodes that are in it; two empty lists if the workflow has given up.
    """
    strategy = _SumOnly(instructions)
    state = RecordDict()
    context = Context(run_id=0, node_id=0, node_config={}, state=state, run_config={})
    legacy = LegacyContext(context, strategy=strategy, client_manager=strategy)  # type: ignore[arg-type]
    state["config"] = _config({"current_round": number})
    state["parameters"] = _compat.parameters_to_arrayrecord(Parameters([], "numpy.ndarray"), True)
    SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=threshold, **settings)(grid, legacy)
    return strategy.mean, strategy.nodes


class _SumOnly:
    """A minimal strategy and client manager for Flower's SecAgg+ workflow."""

    def __init__(self, instructions: Mapping[int, tuple[list[bytes], dict[str, Any]]]) -> None:
        self._instructions = instructions
        self.mean: list[np.ndarray] = []
        self.nodes: list[int] = []

    def num_available(self) -> int:
        return len(self._instructions)

    def configure_fit(self, *_: Any) -> list[tuple[_Node, FitIns]]:
        return [
            (_Node(node), FitIns(Parameters(payloads, "bytes"), dict(fields)))
            for node, (payloads, fields) in self._instructions.items()
        ]

    def aggregate_fit(
        self, number: int, results: Sequence[tuple[_Node, FitRes]], _: Any
    ) -> tuple[None, dict[str, Any]]:
        self.mean = parameters_to_ndarrays(results[0][1].parameters)
        self.nodes = [node.node_id for node, _ in results]
        return None, {}


class _Node:
    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


def _config(values: dict[str, Any]) -> Any:
    from flwr.app import ConfigRecord

    return ConfigRecord(values)


def read_instructions(content: RecordDict) -> tuple[list[bytes], dict[str, Any]]:
    """The instructions that `run_secure_aggregation` sent a node."""
    instructions = _compat.recorddict_to_fitins(content, keep_input=True)
    return list(instructions.parameters.tensors), dict(instructions.config)


def write_result(arrays: Sequence[np.ndarray], weight: int) -> RecordDict:
    """The reply that Flower's SecAgg+ mod expects from the wrapped app."""
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(arrays)), weight, {})
    return _compat.fitres_to_recorddict(result, keep_input=False)


def configuration_of(content: RecordDict) -> Mapping[str, Any]:
    """A message's configuration of the SecAgg+ protocol."""
    return content.config_records[RECORD_KEY_CONFIGS]


def is_secure(content: RecordDict) -> bool:
    """Whether a message belongs to the SecAgg+ protocol."""
    return secaggplus_mod is not None and RECORD_KEY_CONFIGS in content.config_records


def stage_of(content: RecordDict) -> str:
    """The protocol stage of a message."""
    return str(configuration_of(content)["stage"])


def is_public_key(data: bytes) -> bool:
    """Whether bytes are a public key with which other sites can derive a shared key."""
    try:
        generate_shared_key(generate_key_pairs()[0], bytes_to_public_key(data))
    except Exception:
        return False
    return True


def weight_of(content: RecordDict) -> int:
    """The client's weight in a reply."""
    return content.metric_records["fitres.num_examples"]["num_examples"]  # type: ignore[return-value]


def limits_of(context: Context) -> tuple[float, float]:
    """The largest maskable number and the largest weight, as configured by the server."""
    state = context.state.config_records[RECORD_KEY_STATE]
    return float(state["clipping_range"]), float(state["max_weight"])  # type: ignore[arg-type]
