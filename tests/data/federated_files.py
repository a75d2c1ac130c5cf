"""Small files of federated data, each written as its project writes it, and what each client has in them."""

import csv
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_lowrank.data import LEAF, ClientDatasets, ClientFiles, ClientTable, FederatedHDF5

NAMES = ["w10", "w2", "w7"]
"""Neither in the order of letters nor in that of numbers."""
SIZES = {"w10": (6, 2), "w2": (9, 3), "w7": (5, 4)}


def samples_of(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's inputs, which nobody else has, and its targets."""
    draws = np.random.default_rng([len(name), int(name[1:]), split == "test"])
    count = SIZES[name][split == "test"]
    # Whole eighths are the same in text and in 32 bits.
    return (draws.integers(0, 2**16, (count, 4)) / 8).astype(np.float32), draws.integers(0, 3, count)


Owned = dict[Any, list[bytes]]


def written() -> dict[str, Owned]:
    """Return the bytes of each client's samples in each split, sorted."""
    return {split: {name: _bytes(*samples_of(name, split)) for name in NAMES} for split in ("train", "test")}


def _bytes(x: Any, y: Any) -> list[bytes]:
    return sorted(np.float32(a).tobytes() + np.int64(b).tobytes() for a, b in zip(x, y, strict=True))


def read(dataset: Any) -> Owned:
    """Return the bytes of each client's samples as a dataset and its column have them, sorted."""
    names = dataset.client.names
    found: Owned = {name: [] for name in names}
    for number, place in enumerate(dataset.client.places.tolist()):
        x, y = dataset[number]
        found[names[place]] += _bytes(np.asarray(x).reshape(1, -1), [y])
    return {name: sorted(parts) for name, parts in found.items()}


def joined(*parts: Owned) -> Owned:
    return {name: sorted(each for part in parts for each in part[name]) for name in parts[0]}


def pair(x: Any, y: Any) -> dict[str, Any]:
    return {"x": x, "y": y}


def leaf(folder: Path) -> Callable[..., ClientDatasets]:
    for split in ("train", "test"):
        (folder / split).mkdir()
        # Users are in several files, of which each names its own.
        for part, names in enumerate((NAMES[:2], NAMES[2:])):
            data = {name: pair(*(each.tolist() for each in samples_of(name, split))) for name in names}
            content = {"users": names, "num_samples": [len(data[name]["y"]) for name in names], "user_data": data}
            (folder / split / f"all_data_{part}_niid_keep_0_{split}_9.json").write_text(json.dumps(content))
    return lambda **keywords: LEAF(str(folder), **keywords)


def pfllib(folder: Path) -> Callable[..., ClientDatasets]:
    for split in ("train", "test"):
        (folder / split).mkdir()
        for name in NAMES:
            x, y = samples_of(name, split)
            np.savez_compressed(folder / split / f"{name}.npz", data=np.array({"x": x, "y": y}, dtype=object))
    return lambda **keywords: ClientFiles(str(folder), **keywords)


def hdf5(folder: Path) -> Callable[..., ClientDatasets]:
    import h5py

    for split in ("train", "test"):
        with h5py.File(folder / f"{split}.h5", "w") as file:
            for name in NAMES:
                group = file.create_group(f"examples/{name}")
                group["pixels"], group["label"] = samples_of(name, split)
    return lambda **keywords: FederatedHDF5(str(folder / "train.h5"), str(folder / "test.h5"), **keywords)


def npz(folder: Path) -> Callable[..., ClientDatasets]:
    for name in NAMES:
        (folder / name).mkdir()
        for split in ("train", "test"):
            np.savez(folder / name / f"{split}.npz", **pair(*samples_of(name, split)))
    return lambda **keywords: ClientFiles(str(folder), **keywords)


def rows(name: str, split: str) -> list[dict[str, Any]]:
    inputs, targets = samples_of(name, split)
    return [
        {**dict(zip("abcd", map(float, x), strict=True)), "label": int(y)} for x, y in zip(inputs, targets, strict=True)
    ]


def write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_jsonl(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


def write_parquet(path: Path, lines: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), path)


def table_of_each(suffix: str, write: Callable[[Path, Any], None]) -> Callable[[Path], Callable[..., ClientDatasets]]:
    def make(folder: Path) -> Callable[..., ClientDatasets]:
        for split in ("train", "test"):
            (folder / split).mkdir()
            for name in NAMES:
                write(folder / split / f"{name}{suffix}", rows(name, split))
        return lambda **keywords: ClientFiles(str(folder), **keywords)

    return make


def mixed(split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of all clients in turns."""
    queues = {name: rows(name, split) for name in NAMES}
    while any(queues.values()):
        for name, left in queues.items():
            if left:
                yield {"hospital": name, **left.pop(0)}


def one_table(suffix: str, write: Callable[[Path, Any], None]) -> Callable[[Path], Callable[..., ClientDatasets]]:
    def make(folder: Path) -> Callable[..., ClientDatasets]:
        for split in ("train", "test"):
            write(folder / f"{split}{suffix}", list(mixed(split)))
        paths = [str(folder / f"{split}{suffix}") for split in ("train", "test")]
        return lambda **keywords: ClientTable(paths[0], client="hospital", test=paths[1], **keywords)

    return make


def table_with_splits(folder: Path) -> Callable[..., ClientDatasets]:
    lines = [{"fold": split, **row} for split in ("Train", "test", "unused") for row in mixed(split)]
    write_csv(folder / "all.csv", lines)
    return lambda **keywords: ClientTable(str(folder / "all.csv"), client="hospital", split="fold", **keywords)


def mapping(folder: Path) -> Callable[..., ClientDatasets]:
    parts = [{name: samples_of(name, split) for name in NAMES} for split in ("train", "test")]
    return lambda **keywords: ClientDatasets(*parts, **keywords)


def opened_late(folder: Path) -> Callable[..., ClientDatasets]:
    def opener(name: str, split: str) -> Callable[[], Any]:
        return lambda: list(zip(*samples_of(name, split), strict=True))

    parts = [{name: opener(name, split) for name in NAMES} for split in ("train", "test")]
    return lambda **keywords: ClientDatasets(*parts, **keywords)


@dataclass(frozen=True)
class Form:
    """A form of files: what writes it and returns its reader, and the order in which the clients come."""

    make: Callable[[Path], Callable[..., ClientDatasets]]
    order: tuple[str, ...] = ("w2", "w7", "w10")


FORMS = {
    "LEAF": Form(leaf, tuple(NAMES)),
    "PFLlib": Form(pfllib),
    # HDF5 keeps the order of letters.
    "HDF5": Form(hdf5, ("w10", "w2", "w7")),
    "npz": Form(npz),
    "csv": Form(table_of_each(".csv", write_csv)),
    "jsonl": Form(table_of_each(".jsonl", write_jsonl)),
    "parquet": Form(table_of_each(".parquet", write_parquet)),
    "one csv": Form(one_table(".csv", write_csv)),
    "one parquet": Form(one_table(".parquet", write_parquet)),
    "column of splits": Form(table_with_splits),
    "mapping": Form(mapping, tuple(NAMES)),
    "opened late": Form(opened_late, tuple(NAMES)),
}


def dump(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path
