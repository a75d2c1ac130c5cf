"""Division of samples among clients: checks, digest, counts, table and plot."""

import hashlib
import io
import struct

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_lowrank.federated.data import IID, ClientIndices, Dirichlet

LABELS = torch.arange(1003) % 10


def test_client_indices_hold_views_of_one_tensor():
    indices = ClientIndices([[4, 0], torch.tensor([], dtype=torch.int64), torch.tensor([2], dtype=torch.int32)], 5)
    assert len(indices) == 3
    assert indices.indices.tolist() == [4, 0, 2]
    assert indices.indices.dtype == torch.int64
    assert indices.offsets.tolist() == [0, 2, 2, 3]
    assert indices.sizes.tolist() == [2, 0, 1]
    assert [part.tolist() for part in indices] == [[4, 0], [], [2]]
    assert indices[2].data_ptr() == indices.indices[2:].data_ptr()


@pytest.mark.parametrize("client", [-1, 3])
def test_client_indices_refuse_unknown_clients(client):
    with pytest.raises(IndexError, match=rf"no client {client}.*0 to 2"):
        ClientIndices([[0], [1], [2]], 3)[client]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([[0, 5]], r"index.*5.*5"),
        ([[0, -1]], "sample index -1"),
        ([[0, 1], [3, 1]], r"index.*1.*0"),
        ([[0], [2, 2]], r"index.*2.*1"),
        ([], "at least one client"),
        ([[0], [1.0]], r"1.*torch\.float32"),
        ([[True, False]], "got torch.bool"),
        ([[[0, 1]]], r"shape \[1, 2\]"),
        ([0, 1], r"0.*torch\.int64"),
        ([["a"]], r"0.*\['a'\]"),
    ],
)
def test_client_indices_refuse_wrong_indices(clients, message):
    with pytest.raises(MisconfigurationException, match=message):
        ClientIndices(clients, 5)


def test_client_indices_refuse_another_number_of_names():
    with pytest.raises(MisconfigurationException, match="names has 1 entries for 2 clients"):
        ClientIndices([[0], [1]], 2, names=["a"])


def test_digest_is_a_hash_of_size_offsets_and_indices():
    expected = hashlib.blake2b(struct.pack("<8q", 4, 2, 0, 2, 3, 0, 3, 1), digest_size=16).hexdigest()
    assert ClientIndices([[0, 3], [1]], 4).digest() == expected


@pytest.mark.parametrize(
    "other",
    [
        ClientIndices([[0, 3], [1]], 5),
        ClientIndices([[3, 0], [1]], 4),
        ClientIndices([[0], [3, 1]], 4),
        ClientIndices([[0, 3], [1], []], 4),
        ClientIndices([[1], [0, 3]], 4),
    ],
)
def test_digest_tells_divisions_apart(other):
    assert other.digest() != ClientIndices([[0, 3], [1]], 4).digest()


def test_label_counts_equal_a_count_client_by_client():
    indices = Dirichlet(0.5).split(1003, 7, 0, LABELS)
    counts = indices.label_counts(LABELS, num_classes=12)
    assert counts.shape == (7, 12)
    for client in range(7):
        assert counts[client].tolist() == [int((LABELS[indices[client]] == label).sum()) for label in range(12)]


@pytest.mark.parametrize(
    ("labels", "num_classes", "message"),
    [
        (torch.tensor([0, 1, 5]), 3, r"0.*num_classes=3"),
        (torch.tensor([0, -1, 2]), None, r"labels.*-1"),
        (torch.tensor([0, 1]), None, r"\[3\].*torch\.int64.*\[2\]"),
        (torch.tensor([0.0, 1.0, 2.0]), None, "got torch.float32"),
        ([0, 1, 2], None, "got list"),
    ],
)
def test_label_counts_refuse_wrong_labels(labels, num_classes, message):
    with pytest.raises(MisconfigurationException, match=message):
        ClientIndices([[0, 1, 2]], 3).label_counts(labels, num_classes)


def printed(table):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    rows = [line for line in console.export_text().splitlines() if "│" in line]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_summary_has_a_row_for_each_of_few_clients():
    labels = torch.tensor([5, 2, 5, 2, 5])
    table = ClientIndices([[0, 2, 1], [4]], 5, names=["ada", "ben"]).summary(labels)
    assert [column.header for column in table.columns] == ["client", "samples", "2", "5"]
    assert printed(table) == [["ada", "3", "1", "2"], ["ben", "1", "0", "1"], ["total", "4", "1", "3"]]
    assert table.title == "2 clients, 4 of 5 samples"


def test_summary_shows_names_as_text():
    table = ClientIndices([[0], [1, 2], [3]], 4, names=["\x1b[31mred", "[red]", "[/x]"]).summary()
    assert [row[0] for row in printed(table)] == ["\\x1b[31mred", "[red]", "[/x]", "total"]


def test_summary_without_labels_counts_samples():
    assert printed(ClientIndices([[0], [1, 2]], 3).summary()) == [["0", "1"], ["1", "2"], ["total", "3"]]


def test_summary_of_many_clients_begins_with_minimum_median_maximum():
    offsets = torch.arange(1, 31).cumsum(0)
    indices = ClientIndices(torch.arange(int(offsets[-1])).tensor_split(offsets[:-1]), int(offsets[-1]))
    rows = printed(indices.summary(torch.arange(465) % 50))
    assert rows[:3] == [["min", "1", "1"], ["median", "15.5", "15.5"], ["max", "30", "30"]]
    assert rows[3:13] == [[str(client), str(client + 1), str(client + 1)] for client in range(10)]
    assert rows[13:] == [["...", "", ""], ["total", "465", "50"]]


@pytest.mark.slow
def test_plot_draws_a_disc_for_each_pair_that_occurs(tmp_path):
    labels = torch.tensor([0, 2, 0, 1, 1])
    indices = ClientIndices([[0, 2, 1], [4]], 5)
    figure = indices.plot(labels, tmp_path / "new" / "partition.png")
    discs = figure.axes[0].collections[0]
    assert discs.get_offsets().tolist() == [[0, 0], [0, 2], [1, 1]]
    areas = discs.get_sizes()
    assert areas[0] / areas[1] == pytest.approx(2) == areas[0] / areas[2]
    assert (tmp_path / "new" / "partition.png").stat().st_size > 1000


@pytest.mark.parametrize(("clients", "labels"), [(2, 2), (20, 10), (200, 3)])
def test_plot_shows_whole_discs(clients, labels):
    indices = ClientIndices([[client] for client in range(clients)], clients)
    figure = indices.plot(torch.arange(clients) % labels)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    discs = axes.collections[0]
    centres = axes.transData.transform(discs.get_offsets()) * 72 / figure.dpi
    radii = discs.get_sizes()[:, None] ** 0.5 / 2
    corners = axes.get_window_extent().get_points() * 72 / figure.dpi
    assert ((centres - radii >= corners[0] - 1) & (centres + radii <= corners[1] + 1)).all()


def test_plot_leaves_pyplot_alone():
    import matplotlib.pyplot as plt

    IID().split(1003, 30, 0).plot(LABELS)
    assert plt.get_fignums() == []
