"""The sample indices of each client, with a summary table and a plot."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from lightning_lowrank.arguments import printable
from lightning_lowrank.federated.data.labels import check_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_SUMMARY_CLIENTS = 20
_MAX_SUMMARY_LABELS = 20


class ClientIndices:
    """The sample indices of each client, a partition of a training set.

    No sample has two clients; a sample may have none, and a client may have no samples. ``indices[client]`` is that
    client's indices, a view of one flat tensor.

    Args:
        clients: The sample indices of each client, in the order in which an unshuffled loader would visit them; with
            ``sizes`` one tensor of all of them, client after client.
        size: Number of samples in the training set.
        names: The clients' names, if they have any.
        sizes: Number of samples of each client, int64, if ``clients`` is one tensor.

    Attributes:
        indices: All clients' sample indices one after another, int64.
        offsets: Where each client's part of ``indices`` begins, with the end as last entry: int64, clients + 1.
        size: Number of samples in the training set.
        names: Names of the clients, or ``None``.

    Raises:
        MisconfigurationException: If an index is not an integer, is out of range, or occurs twice, or if there are no
            clients or another number of names.

    Example:
        >>> indices = ClientIndices([[0, 3], [1]], size=4)
        >>> indices
        ClientIndices(clients=2, samples=3 of 4)
        >>> indices[0]
        tensor([0, 3])
        >>> indices.sizes
        tensor([2, 1])
    """

    def __init__(
        self,
        clients: Sequence[Tensor | Sequence[int]] | Tensor,
        size: int,
        names: Sequence[str | int] | None = None,
        sizes: Tensor | None = None,
    ) -> None:
        if sizes is None:
            parts = [index_tensor(part, client) for client, part in enumerate(clients)]
            if not parts:
                raise MisconfigurationException("clients is empty: give the sample indices of at least one client.")
            clients, sizes = torch.cat(parts), torch.tensor([len(part) for part in parts])
        if names is not None and len(names) != len(sizes):
            raise MisconfigurationException(f"names has {len(names)} entries for {len(sizes)} clients.")
        self.indices = cast(Tensor, clients)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        if len(self.indices) != self.offsets[-1]:
            raise MisconfigurationException(
                f"sizes sum to {self.offsets[-1]}, and there are {len(self.indices)} indices."
            )
        self.size = size
        self.names = None if names is None else tuple(names)
        outside = self.indices[(self.indices < 0) | (self.indices >= size)]
        if len(outside):
            raise MisconfigurationException(
                f"clients holds the sample index {int(outside[0])}, but the training set has {size} samples,"
                f" 0 to {size - 1}."
            )
        repeated = (torch.bincount(self.indices, minlength=size) > 1).nonzero().flatten()
        if len(repeated):
            holders = self._owners()[self.indices == repeated[0]].tolist()
            raise MisconfigurationException(
                f"{len(repeated)} sample indices occur more than once in clients; index {int(repeated[0])}"
                f" belongs to client {holders[0]} and client {holders[1]}: give each sample to one client."
            )

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        """The sample indices of one client, a view, int64."""
        if not 0 <= client < len(self):
            raise IndexError(f"there is no client {client}: clients are numbered 0 to {len(self) - 1}")
        return self.indices[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client] for client in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(clients={len(self)}, samples={len(self.indices)} of {self.size})"

    @property
    def sizes(self) -> Tensor:
        """Number of samples of each client: int64, shape ``[clients]``."""
        return self.offsets.diff()

    def _owners(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def digest(self) -> str:
        """A hash of the partition, the same in every process and on every machine.

        Two divisions have the same digest exactly if each client holds the same samples in the same order and the
        training set is equally large.

        Example:
            >>> ClientIndices([[0, 3], [1]], size=4).digest()
            '7d40794c76f85aeb781616f71463085d'
        """
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (torch.tensor([self.size, len(self)]), self.offsets, self.indices):
            digest.update(tensor.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def label_counts(self, labels: Tensor, num_classes: int | None = None) -> Tensor:
        """Count each client's samples of each label.

        Args:
            labels: Label of each sample of the training set: non-negative integers, shape ``[size]``.
            num_classes: Number of columns; by default one more than the largest label.

        Returns:
            Counts, int64, shape ``[clients, num_classes]``.

        Raises:
            MisconfigurationException: If ``labels`` does not fit the training set or ``num_classes``.

        Example:
            >>> ClientIndices([[0, 3], [1]], size=4).label_counts(torch.tensor([0, 2, 1, 0]))
            tensor([[2, 0, 0],
                    [0, 0, 1]])
        """
        labels = check_labels(labels, self.size)
        smallest, largest = (int(labels.min()), int(labels.max())) if len(labels) else (0, -1)
        columns = largest + 1 if num_classes is None else num_classes
        if smallest < 0 or largest >= columns:
            raise MisconfigurationException(
                f"labels run from {smallest} to {largest}, which does not fit num_classes={columns}: give"
                f" labels in 0 to num_classes - 1."
            )
        cells = self._owners() * columns + labels[self.indices]
        return torch.bincount(cells, minlength=len(self) * columns).reshape(len(self), columns)

    def summary(self, labels: Tensor | None = None) -> Table:
        """Build a table of the samples, and labels, of each client.

        Up to 20 clients have a row each. For more, the rows are the minimum, median and maximum of each column over all
        clients, then the first clients.

        Args:
            labels: Label of each sample of the training set, shape ``[size]``. Up to 20 different labels have a column
                each; for more, one column gives the number of different labels that a client holds.

        Returns:
            A table for ``rich.print`` or `rich.console.Console.print`.

        Example:
            >>> from rich.console import Console
            >>> table = ClientIndices([[0, 3], [1]], size=4).summary(torch.tensor([0, 2, 1, 0]))
            >>> [column.header for column in table.columns]
            ['client', 'samples', '0', '1', '2']
        """
        headers, columns = ["samples"], [self.sizes]
        if labels is not None:
            present, codes = torch.unique(check_labels(labels, self.size), return_inverse=True)
            if len(present) <= _MAX_SUMMARY_LABELS:
                headers += [str(label) for label in present.tolist()]
                columns += list(self.label_counts(codes, len(present)).T)
            else:
                # With many labels most counts are zero, so count each client's different labels.
                pairs = torch.unique(self._owners() * len(present) + codes[self.indices])
                headers.append("labels held")
                columns.append(torch.bincount(pairs // len(present), minlength=len(self)))
                labels_held = len(torch.unique(pairs % len(present)))
        values = torch.stack(columns, 1)

        table = Table(
            title=f"{len(self):,} clients, {len(self.indices):,} of {self.size:,} samples",
            title_justify="left",
        )
        for header in ["client", *headers]:
            table.add_column(header, justify="right")
        names = [escape(printable(str(name))) for name in (range(len(self)) if self.names is None else self.names)]
        shown = len(self)
        if len(self) > _MAX_SUMMARY_CLIENTS:
            shown = _MAX_SUMMARY_CLIENTS // 2
            points = torch.tensor([0, 0.5, 1], dtype=torch.float64)
            quantiles = torch.quantile(values.double(), points, dim=0).tolist()
            for name, row in zip(("min", "median", "max"), quantiles, strict=True):
                table.add_row(name, *(f"{value:,.10g}" for value in row))
            table.add_section()
        for name, row in zip(names[:shown], values[:shown].tolist(), strict=True):
            table.add_row(name, *(f"{value:,}" for value in row))
        if shown < len(self):
            table.add_row(*(["..."] + [""] * len(headers)))
        if "labels held" in headers:
            totals = [len(self.indices), labels_held]
        else:
            totals = values.sum(0).tolist()
        table.add_section()
        table.add_row("total", *(f"{total:,}" for total in totals))
        return table

    def plot(self, labels: Tensor, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the label counts: a disc for each client and label, with an area proportional to the number of samples.

        Args:
            labels: Label of each sample of the training set, shape ``[size]``.
            path: Where to save the figure, in the format of its suffix. ``None``: it is not saved.

        Returns:
            The figure; pyplot does not know it, so that it need not be closed.

        Example:
            >>> figure = ClientIndices([[0, 3], [1]], size=4).plot(torch.tensor([0, 2, 1, 0]))
            >>> figure.axes[0].get_xlabel()
            'client'
        """
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        counts = self.label_counts(labels)
        columns = counts.shape[1]
        width, height = min(max(0.15 * len(self), 4.0), 16.0), min(max(0.3 * columns, 2.0), 10.0)
        figure = Figure(figsize=(width + 1, height + 1), layout="constrained")
        axes = figure.add_subplot()
        cells = counts.nonzero()
        sizes = counts[cells[:, 0], cells[:, 1]]
        points_per_cell = 72 * min(width / (len(self) + 1), height / (columns + 1))
        largest = int(sizes.max()) if len(sizes) else 1
        areas = max(1.5 * points_per_cell, 4.0) ** 2 * sizes / largest
        axes.scatter(cells[:, 0].numpy(), cells[:, 1].numpy(), s=areas.numpy(), alpha=0.7, linewidths=0, clip_on=False)
        # The largest disc has a radius of 0.75 cells, so leave that much space at the borders.
        axes.set_xlim(-0.9, len(self) - 0.1)
        axes.set_ylim(-0.9, columns - 0.1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("client")
        axes.set_ylabel("label")
        axes.set_title(f"{len(self.indices):,} samples; largest disc: {largest:,}")
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        return figure


def index_tensor(part: Tensor | Sequence[int], client: int) -> Tensor:
    """A client's sample indices as a flat int64 tensor on the CPU.

    Raises:
        MisconfigurationException: If they are not a flat list of integers.
    """
    expected = f"the sample indices of client {client} must be a flat list of integers, got"
    try:
        tensor = torch.as_tensor(part).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise MisconfigurationException(f"{expected} {str(part)[:100]}.") from error
    integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.ndim != 1 or not (integers or len(tensor) == 0):
        raise MisconfigurationException(f"{expected} {tensor.dtype} of shape {list(tensor.shape)}.")
    return tensor.to(torch.int64)
