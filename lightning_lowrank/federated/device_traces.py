"""Traces of real devices from files: numbers for a `SystemModel`, and times of availability."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import Configured, first_ten
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.clock import Distribution
from lightning_lowrank.federated.data.plain_files import read_columns, read_plain

__all__ = ["AvailabilityTrace", "Trace"]


class Trace(Distribution):
    r"""Measured numbers of devices: a column of a CSV file with a header, or of FedScale's device capacities.

    Client ``i`` has row ``i``; if there are more clients than rows, the rows are used again from the first. So
    several columns of one file are of the same device. With ``client`` a client has the row of its own name.

    Args:
        path: The file: CSV; or FedScale's ``client_device_capacity``, a pickle of a dictionary from devices to their
            ``computation`` (milliseconds for the forward pass of a sample) and ``communication`` (kilobits a second).
        column: The column's name in the header.
        client: Name of a column with the clients' names, as `ByKey`, `FromIndices` or the data call them. ``None``:
            rows are those of the clients in the order of their ids. In FedScale's file the devices' ids are the column
            ``device``.
        scale: A factor for the numbers: 125 makes bytes a second of FedScale's ``communication``, and 0.003
            seconds a sample of its ``computation``, with a backward pass that takes twice the forward one.

    Raises:
        MisconfigurationException: If there is no such file or column, a value is no number above 0, or a client's name
            occurs twice. When a fit begins: if clients have no names, or one has no row; or if ``client`` is not given
            and another column, of different values, holds the names of all clients in another order.

    Example:
        >>> import tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "phones.csv"
        >>> _ = file.write_text("upload,download\n1e6,8e6\n2e6,5e6\n")
        >>> Trace(str(file), "upload").draw(3, torch.Generator()).tolist()
        [1000000.0, 2000000.0, 1000000.0]
    """

    def __init__(self, path: str, column: str, client: str | None = None, scale: float = 1.0) -> None:
        check_number("scale", scale, above=0)
        self.path, self.column, self.client, self.scale = path, column, client, scale
        columns = _device_columns(Path(path))
        for name in (column, *(() if client is None else (client,))):
            if name not in columns:
                raise MisconfigurationException(f"path={path!r} has no column {name!r}, and has {list(columns)}.")
        self._columns = {name: [str(value) for value in values] for name, values in columns.items()}
        counts = Counter(self._columns[client]) if client is not None else Counter()
        if counts and counts.most_common(1)[0][1] > 1:
            raise MisconfigurationException(
                f"{path} has several rows of client={client!r} {counts.most_common(1)[0][0]!r}: keep one row for each"
            )
        self._values = []
        for row, given in enumerate(columns[column]):
            try:
                value = float(given) * scale
            except (TypeError, ValueError):
                value = math.nan
            if not 0 < value < math.inf:
                raise MisconfigurationException(
                    f"{column!r} must be a finite number above 0, and in row {row} of {path} it is {given!r}"
                )
            self._values.append(value)
        if not self._values:
            raise MisconfigurationException(f"path={path!r} holds no row.")

    @override
    def draw(self, clients: int, generator: torch.Generator) -> Tensor:
        values = [self._values[client % len(self._values)] for client in range(clients)]
        return torch.tensor(values, dtype=torch.float64)

    @override
    def draw_named(self, clients: int, generator: torch.Generator, names: Sequence[str | int] | None) -> Tensor:
        wanted = None if names is None else [str(name) for name in names]
        if self.client is None:
            others = {name: values for name, values in self._columns.items() if name != self.column}
            holding = [
                name
                for name, values in others.items()
                # Values that repeat are no names of devices.
                if wanted and set(wanted) <= set(values) and len(set(values)) == len(values)
            ]
            if holding and not any(others[name][:clients] == wanted for name in holding):
                raise MisconfigurationException(
                    f"{self.path} has the clients' names in its column {holding[0]!r}, but without client= row i is"
                    f" assigned to client i, whatever its name: give Trace(..., client={holding[0]!r})"
                )
            return self.draw(clients, generator)
        if wanted is None:
            raise MisconfigurationException(
                f"Trace(client={self.client!r}) looks up clients by name, but they have no names: leave out client, or"
                " use a partition that names them, such as ByKey"
            )
        rows = dict(zip(self._columns[self.client], self._values, strict=True))
        missing = [name for name in wanted if name not in rows]
        if missing:
            raise MisconfigurationException(
                f"{self.path} has no row of {len(missing)} clients in its column {self.client!r}: {first_ten(missing)}"
            )
        return torch.tensor([rows[name] for name in wanted], dtype=torch.float64)

    @override
    def result_arguments(self) -> dict[str, Any]:
        # Without the path: the file may have moved when a run is resumed.
        names = {} if self.client is None else {"names": self._columns[self.client]}
        return {"column": self.column, "values": self._values, **names}


class AvailabilityTrace(Configured):
    """Device availability by FedScale's traces, for ``FederatedLoop(availability=...)``.

    The file is ``client_behave_trace``: a pickle of a dictionary from devices to dictionaries with ``active`` and
    ``inactive``, the seconds at which a device becomes available and unavailable, and ``finish_time``, the period. A
    JSON file of the same form works too. Client ``i`` has device ``i``; if there are more clients than devices, the
    devices are used again from the first.

    Args:
        path: The file.
        round_seconds: Seconds from the beginning of a round to that of the next. Availability is a function of the
            round's number, independent of a `SystemModel`.

    Raises:
        MisconfigurationException: If the file cannot be read, or a device has no trace of this form.

    Example:
        >>> import json, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "devices.json"
        >>> _ = file.write_text(json.dumps({"phone": {"active": [0, 50], "inactive": [10, 90], "finish_time": 100}}))
        >>> there = AvailabilityTrace(str(file), round_seconds=20)
        >>> [there(0, number) for number in range(6)]
        [True, False, False, True, True, True]
    """

    def __init__(self, path: str, round_seconds: float) -> None:
        check_number("round_seconds", round_seconds, above=0)
        self.path, self.round_seconds = path, round_seconds
        found = read_plain(Path(path), "path")
        devices = list(found.values()) if isinstance(found, Mapping) else found
        if not isinstance(devices, list) or not devices:
            raise MisconfigurationException(f"path={path!r} must hold a dictionary from devices to their traces.")
        self._devices = [_times(device, number, path) for number, device in enumerate(devices)]

    def __call__(self, client: int, round_number: int) -> bool:
        """Whether a client's device is available when a round begins."""
        comes, goes, end = self._devices[client % len(self._devices)]
        now = round_number * self.round_seconds % end
        place = bisect_right(comes, now) - 1
        return place >= 0 and now <= goes[place]

    @override
    def result_arguments(self) -> dict[str, Any]:
        # Without the path: the file may have moved when a run is resumed.
        return {"devices": self._devices, "round_seconds": self.round_seconds}


def _times(device: Any, number: int, path: str) -> tuple[list[float], list[float], float]:
    """The times at which a device becomes available and unavailable, both ascending, and their period."""
    try:
        comes = [float(value) for value in device["active"]]
        goes = [float(value) for value in device["inactive"]]
        end = float(device["finish_time"])
        if not (len(comes) == len(goes) and all(map(float.__le__, comes, goes)) and end > 0 and end < math.inf):
            raise ValueError("inactive needs an equal or later time for each in active, and finish_time is above 0")
    except (KeyError, TypeError, ValueError) as error:
        raise MisconfigurationException(
            f"path={path!r}: device {number} must have lists of seconds, active and inactive, and finish_time:"
            f" {type(error).__name__}: {error}"
        ) from error
    spans: list[tuple[float, float]] = []
    for come, gone in sorted(zip(comes, goes, strict=True)):
        if spans and come <= spans[-1][1]:
            # It overlaps the one before.
            spans[-1] = spans[-1][0], max(gone, spans[-1][1])
        else:
            spans.append((come, gone))
    return [come for come, _ in spans], [gone for _, gone in spans], end


def _device_columns(path: Path) -> Mapping[str, Sequence[Any]]:
    """The columns of a CSV file, or of a dictionary from devices to dictionaries of numbers."""
    if path.suffix.lower() == ".csv":
        return read_columns(path, "path")
    found = read_plain(path, "path")
    if not (isinstance(found, Mapping) and found and all(isinstance(each, Mapping) for each in found.values())):
        raise MisconfigurationException(
            f"path={str(path)!r} must be a .csv, or hold a dictionary from devices to dictionaries of numbers."
        )
    names = dict.fromkeys(name for each in found.values() for name in each)
    return {"device": list(found), **{str(name): [each.get(name) for each in found.values()] for name in names}}
