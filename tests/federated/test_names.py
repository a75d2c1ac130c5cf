"""Clients by their names: in which order they are numbered, and where a setting takes a name for an id."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import TensorDataset

from lightning_lowrank import ByKey, FedAvg, FederatedLoop, FedPer, FromIndices, SystemModel, Trace, load_dense
from lightning_lowrank.federated.clock import Clock
from lightning_lowrank.interop.checkpoints import dense_checkpoint
from tests.helpers import Data, Module, assert_same, blobs, fit, trainer, weights

NAMES = ("u1", "u2", "u10")
OWNERS = [NAMES[(row * 5) % 3] for row in range(30)]


class Named(TensorDataset):
    """Samples of three users."""

    def __init__(self):
        super().__init__(*(tensor[:30] for tensor in blobs().tensors))
        self.user = OWNERS


def run(tmp_path, *callbacks, algorithm=None, **settings):
    torch.manual_seed(0)
    loop = FederatedLoop(algorithm or FedAvg(), partition=ByKey("user"), summary=False, seed=0, **settings)
    module = Module()
    fit(trainer(tmp_path, loop, *callbacks, max_epochs=2, limit_val_batches=0), module, Data(Named()))
    return module, loop


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["u10", "u2", "u1"], ("u1", "u2", "u10")),
        (["ward 12 b", "ward 3", "ward 12 a"], ("ward 3", "ward 12 a", "ward 12 b")),
        (["007", "7", "10"], ("007", "7", "10")),
        ([10, 2], (2, 10)),
        (["10", "2"], (2, 10)),
        (["x", 10, 2], (2, 10, "x")),
        (["②", "5²", "①"], ("5²", "①", "②")),
    ],
)
def test_names_are_numbered_as_people_do(names, expected):
    held = {name: [number] for number, name in enumerate(names)}
    indices = FromIndices(held).split(9, clients=None, seed=0)
    assert indices.names == expected
    assert [part.tolist() for part in indices] == [held[str(name) if str(name) in held else name] for name in expected]
    if all(isinstance(name, str) for name in names):
        keys = [names[row % len(names)] for row in range(12)]
        indices = ByKey("user").split(12, clients=None, seed=0, keys=keys)
        assert [{keys[row] for row in part.tolist()} for part in indices] == [{name} for name in indices.names]
        assert indices.names == tuple(map(str, expected))


@pytest.mark.parametrize("names", [{1: [0], "1": [1]}, {True: [0]}, {None: [0]}])
def test_names_that_cannot_be(names):
    with pytest.raises(MisconfigurationException, match=str(next(iter(names)))):
        FromIndices(names)


@pytest.mark.parametrize(
    ("by_name", "by_id"),
    [
        ({"participants": [["u10"], ["u1", "u2"]]}, {"participants": [[2], [0, 1]]}),
        (
            {"sampling_weights": {"u10": 0.0, "u1": 1.0, "u2": 2.0}, "clients_per_round": 1},
            {"sampling_weights": [1.0, 2.0, 0.0], "clients_per_round": 1},
        ),
        (
            {"availability": {"u10": 0.0, "u1": 1.0, "u2": 1.0}, "clients_per_round": 2},
            {"availability": [1.0, 1.0, 0.0], "clients_per_round": 2},
        ),
        ({"client_settings": {"u10": {"local_epochs": 3}}}, {"client_settings": {2: {"local_epochs": 3}}}),
    ],
    ids=["participants", "sampling_weights", "availability", "client_settings"],
)
def test_a_name_is_its_clients_id(tmp_path, by_name, by_id):
    named, loop = run(tmp_path, **by_name)
    numbered, other = run(tmp_path, **by_id)
    assert loop.indices.names == NAMES
    assert_same(weights(named), weights(numbered))
    assert loop.ledger.state_dict() == other.ledger.state_dict()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"participants": [["u3"]]}, r"participants.*'u3'"),
        ({"participants": [["u1", 0]]}, r"participants\[0\].*\['u1', 0\]"),
        ({"sampling_weights": {"u1": 1.0, "u2": 1.0}, "clients_per_round": 1}, r"sampling_weights.*\['u10'\]"),
        ({"availability": {"u1": 1.0, "u2": 1.0, "u10": 1.0, "u11": 1.0}}, r"availability.*'u11'"),
        ({"availability": {0: 0.5}}, r"availability.*\['u2', 'u10'\]"),
        ({"availability": {0: 0.5, 1: 0.5, "u10": 0.5, 3: 0.5}}, r"availability.*\[3\]"),
        ({"client_settings": {"u1": {"lr": 0.1}, 0: {"lr": 0.2}}}, r"client_settings.*\['u1', 0\]"),
    ],
)
def test_names_of_no_client_are_refused(tmp_path, settings, said):
    with pytest.raises(MisconfigurationException, match=said):
        run(tmp_path, **settings)


def test_another_fit_has_its_own_names(tmp_path):
    """The same settings with other data, in which the names are other clients'."""
    loop = FederatedLoop(FedAvg(), partition=ByKey("user"), summary=False, seed=0, participants=[["u2"]] * 2)
    data = [Named(), Named()]
    data[1].user = [{"u1": "u5"}.get(name, name) for name in OWNERS]
    for dataset, client in zip(data, (1, 0), strict=True):
        fit(trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0), Module(), Data(dataset))
        assert loop.participants == [[client]] * 2


def test_clients_without_names_have_ids_alone(tmp_path):
    loop = FederatedLoop(FedAvg(), clients=3, participants=[["0"]], summary=False)
    with pytest.raises(MisconfigurationException, match=r"participants.*'0'"):
        fit(trainer(tmp_path, loop, max_epochs=1), Module(), Data())


def test_a_checkpoint_knows_the_names(tmp_path):
    saver = ModelCheckpoint(tmp_path, "last")
    run(tmp_path, saver, algorithm=FedPer(["net.0.bias"]))
    by_name = load_dense(tmp_path / "last.ckpt", Module(), client="u10")
    by_id = load_dense(tmp_path / "last.ckpt", Module(), client=2)
    assert_same(weights(by_name), weights(by_id))
    other = dense_checkpoint(tmp_path / "last.ckpt", "u1")
    assert not torch.equal(other["net.0.bias"], weights(by_id)["net.0.bias"])
    for unknown in ("u3", "²"):
        with pytest.raises(MisconfigurationException, match=f"client='{unknown}'"):
            dense_checkpoint(tmp_path / "last.ckpt", unknown)


def devices(folder, rows):
    file = folder / "devices.csv"
    file.write_text("device,kbps\n" + "".join(f"{name},{value}\n" for name, value in rows))
    return str(file)


def test_a_trace_is_joined_by_name(tmp_path):
    file = devices(tmp_path, [("u10", 10), ("u2", 2), ("other", 99), ("u1", 1)])
    system = SystemModel(bandwidth=Trace(file, "kbps", client="device"))
    assert system.draw(3, 0, NAMES)["up"] == [1.0, 2.0, 10.0]
    _, loop = run(tmp_path, system=system)
    assert [each.up for each in loop.coordinator.find(Clock)._clients] == [1.0, 2.0, 10.0]


def test_a_trace_by_row_is_refused_where_a_column_has_the_names(tmp_path):
    other = Trace(devices(tmp_path, [("u10", 10), ("u2", 2), ("u1", 1)]), "kbps")
    with pytest.raises(MisconfigurationException, match="client='device'"):
        run(tmp_path, system=SystemModel(bandwidth=other))
    # In the clients' own order, and for clients without names, rows are what they were.
    assert Trace(devices(tmp_path, [("u1", 1), ("u2", 2), ("u10", 10)]), "kbps").draw_named(3, None, NAMES).tolist()
    assert other.draw_named(3, None, None).tolist() == [10.0, 2.0, 1.0]


def test_numbers_of_devices_are_no_names(tmp_path):
    (tmp_path / "devices.csv").write_text("device,tier,up\n1,2,2\n2,2,1\n3,1,9\n")
    assert Trace(str(tmp_path / "devices.csv"), "up").draw_named(2, None, [1, 2]).tolist() == [2.0, 1.0]
    (tmp_path / "devices.csv").write_text("tier,up\n2,2\n2,1\n1,9\n")
    assert Trace(str(tmp_path / "devices.csv"), "up").draw_named(2, None, [1, 2]).tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "names", "said"),
    [
        ([("u1", 1), ("u2", 2)], NAMES, r"'device'.*\['u10'\]"),
        ([("u1", 1), ("u2", 2), ("u10", 10)], None, "client='device'"),
        ([("u1", 1), ("u1", 2)], ("u1",), "'device'.*'u1'"),
    ],
)
def test_a_trace_without_a_row_for_each_name_is_refused(tmp_path, rows, names, said):
    with pytest.raises(MisconfigurationException, match=said):
        SystemModel(speed=Trace(devices(tmp_path, rows), "kbps", client="device")).draw(3, 0, names)


def test_a_client_without_samples_keeps_its_name_and_place(tmp_path):
    indices = FromIndices({"a": [0, 1], "b": [], "c": [2]}).split(9, clients=None, seed=0)
    assert indices.names == ("a", "b", "c")
    assert indices.sizes.tolist() == [2, 0, 1]
