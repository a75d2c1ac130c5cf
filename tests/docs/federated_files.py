"""The files that "Your federated files" reads, small, each as its project writes it."""

import json
import pickle
from pathlib import Path

import numpy as np

from tests import texts
from tests.data.federated_files import write_csv, write_jsonl, write_parquet


def write_files() -> None:
    import h5py

    draws = np.random.default_rng(0)

    def samples(count: int, features: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        return draws.random((count, features), np.float32), np.arange(count) % classes

    for split, count in (("train", 6), ("test", 3)):
        for root, name in (("femnist", "f0001_41"), ("shakespeare", "THE_TRAGEDY_OF_KING_LEAR_LEAR")):
            Path(root, split).mkdir(parents=True)
            users = {}
            for number in range(3):
                x, y = samples(count, 784, 62)
                lines = ["".join(chr(97 + int(each)) for each in draws.integers(0, 26, 80)) for _ in range(count)]
                users[f"{name}{number}"] = (
                    {"x": lines, "y": list("ab" * count)[:count]}
                    if root == "shakespeare"
                    else {"x": x.tolist(), "y": y.tolist()}
                )
            content = {"users": list(users), "num_samples": [count] * 3, "user_data": users}
            Path(root, split, f"all_data_0_niid_0_keep_0_{split}_9.json").write_text(json.dumps(content))
        Path("Cifar10", split).mkdir(parents=True)
        for number in range(3):
            x, y = samples(count, 3072, 10)
            data = np.array({"x": x.reshape(-1, 3, 32, 32), "y": y}, dtype=object)
            np.savez_compressed(Path("Cifar10", split, f"{number}.npz"), data=data)
        with h5py.File(f"fed_emnist_{split}.h5", "w") as file:
            for number in range(3):
                group = file.create_group(f"examples/f{number}")
                x, y = samples(count, 784, 62)
                group["pixels"], group["label"] = x.reshape(-1, 28, 28), y
    patients = [
        {
            "hospital": "ab"[row % 2],
            "fold": "test" if row % 5 == 0 else "train",
            "age": 40 + row,
            "pressure": 90.5,
            "ill": row % 2,
        }
        for row in range(40)
    ]
    write_csv(Path("patients.csv"), patients)
    write_parquet(Path("patients.parquet"), patients)
    Path("wards").mkdir()
    for ward in ("north", "south"):
        write_csv(
            Path("wards", f"{ward}.csv"), [{name: row[name] for name in ("age", "pressure", "ill")} for row in patients]
        )
    x, y = samples(40, 3, 2)
    np.savez("sensors.npz", x=x, y=y, client=np.arange(40) % 4)
    Path("instructions").mkdir()
    rows = [{"client_id": f"site {row % 3}", "instruction": "say", "output": "a good film"} for row in range(30)]
    write_jsonl(Path("instructions", "train.jsonl"), rows)
    texts.save_tokenizer(Path("my_model"), eos_token="[SEP]")

    # Who has which of the 1,437 images of digits that are left to train on.
    owners = np.arange(1797) % 5
    parts = {client: np.flatnonzero(owners == client) for client in range(5)}
    Path("mnist_noniid.pkl").write_bytes(pickle.dumps(parts, 2))
    lines = ",\n".join(f"{client}: [\n{', '.join(map(str, part))}]" for client, part in parts.items())
    Path("net_dataidx_map.txt").write_text("{\n" + lines + "\n}\n")
    write_csv(
        Path("mapping.csv"),
        [{"client_id": owner, "data_path": f"{row}.png", "label_id": 0} for row, owner in enumerate(owners)],
    )
    header = f"client,{','.join(f'class{label}' for label in range(10))},Amount"
    shares = [f"Client {client:3d},{','.join(['0.100'] * 10)},{100 + client}" for client in range(5)]
    Path("report.csv").write_text("\n".join(["Class frequencies:", header, *shares]) + "\n")
    counts = [[[label, 10 + client] for label in range(10)] for client in range(5)]
    Path("config.json").write_text(json.dumps({"num_clients": 5, "Size of samples for labels in clients": counts}))
    images = {
        f"{split}_images": draws.integers(0, 256, (40, 28, 28, 3), np.uint8) for split in ("train", "val", "test")
    }
    labels = {f"{split}_labels": (np.arange(40) % 9)[:, None].astype(np.uint8) for split in ("train", "val", "test")}
    np.savez("pathmnist.npz", **images, **labels)
    Path("client_device_capacity").write_bytes(
        pickle.dumps({device: {"computation": 40.0 + device, "communication": 8000.0} for device in range(3)}, 2)
    )
    times = {"active": [0, 500], "inactive": [300, 900], "finish_time": 1000, "duration": 700, "model": "phone"}
    Path("client_behave_trace").write_bytes(pickle.dumps(dict.fromkeys(range(3), times), 2))
