"""A run on loopback, over TLS, with Flower's own processes: slow, for every message starts a Python process."""

from __future__ import annotations

import contextlib
import csv
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lightning_lowrank.cli import main
from lightning_lowrank.flower import write_project
from tests.flower.helpers import LORA, MUD, entries_of, simulate, write_recipe

pytestmark = pytest.mark.slow

ROUNDS = 2
LIMIT = 900.0
BIN = Path(sys.executable).parent


def certificates(folder: Path) -> dict[str, Path]:
    """Make a certificate authority, and a certificate of this machine."""
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(name, key, issuer, signer, authority):
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
                ),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
            .sign(signer, hashes.SHA256())
        )

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = certificate("test authority", authority, None, authority, True)
    leaf = certificate("localhost", own, root.subject, authority, False)
    paths = {name: folder / f"{name}.pem" for name in ("ca", "server", "key")}
    paths["ca"].write_bytes(root.public_bytes(serialization.Encoding.PEM))
    paths["server"].write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    paths["key"].write_bytes(
        own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Network:
    """A SuperLink and SuperNodes, each with all that it starts in a session of its own, to be ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pem = certificates(folder)
        self.port = free_port()
        self.home = folder / "flwr"
        self.home.mkdir()
        self.processes: list[subprocess.Popen] = []
        (self.home / "config.toml").write_text(
            "[superlink]\ndefault = 'test'\n[superlink.test]\n"
            f"address = '127.0.0.1:{self.port}'\nroot-certificates = '{self.pem['ca']}'\n"
        )
        # A proxy that nobody serves: whatever would leave this machine fails at once, and is seen.
        self.environment = {
            **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "HTTP_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, name: str, *command: str) -> subprocess.Popen:
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def start_superlink(self, *options: str) -> subprocess.Popen:
        process = self.start(
            "superlink",
            *("flower-superlink", "--disable-runtime-dependency-installation", "--port", str(self.port)),
            *("--ssl-ca-certfile", str(self.pem["ca"]), "--ssl-certfile", str(self.pem["server"])),
            *("--ssl-keyfile", str(self.pem["key"]), *options),
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.2)
        raise AssertionError(self.told("superlink"))

    def start_node(self, client: int, *options: str, config: str = "") -> subprocess.Popen:
        return self.start(
            f"node{client}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(self.pem["ca"])),
            *("--port", str(free_port()), "--node-config", f"partition-id={client} num-partitions=3 {config}"),
            *options,
        )

    def register(self, names: list[str]) -> None:
        """Make keys by which SuperNodes authenticate themselves, and register them."""
        ssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        registering = []
        for name in names:
            key, file = ec.generate_private_key(ec.SECP384R1()), self.folder / name
            file.touch(mode=0o600)
            file.write_bytes(key.private_bytes(serialization.Encoding.PEM, ssh, plain))
            public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            file.with_suffix(".pub").write_bytes(public)
            command = ("flwr", "supernode", "register", str(file.with_suffix(".pub")), "test")
            registering.append(self.start(name, *command))
        for name, process in zip(names, registering, strict=True):
            assert process.wait(120) == 0, self.told(name)

    @staticmethod
    def kill(process: subprocess.Popen) -> None:
        # A SuperLink starts what runs apps in a session of its own.
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(30)

    def close(self) -> None:
        for process in reversed(self.processes):
            self.kill(process)

    def told(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-6000:]


@pytest.fixture
def network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Network(tmp_path)
    try:
        yield made
    finally:
        made.close()


ALGORITHMS = {"FedLoRA": {"class_path": "FedLoRA", "init_args": {"operator": "FedEx"}}}


def recipe(folder: Path, algorithm: str, **federated) -> Path:
    return write_recipe(
        folder,
        {
            "federated": {"algorithm": ALGORITHMS.get(algorithm, algorithm), **federated},
            "lowrank": {"FedMUD": MUD, "FedLoRA": LORA}.get(algorithm),
            "trainer": {
                "max_epochs": ROUNDS,
                "enable_checkpointing": True,
                "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "sites"}},
            },
        },
    )


def wait_for(network: Network, done, limit: float = LIMIT) -> None:
    deadline = time.monotonic() + limit
    while not done():
        logs = "\n".join(network.told(name) for name in ("superlink", "node0", "flwr"))
        assert time.monotonic() < deadline, logs
        assert "raised an exception" not in logs, logs
        time.sleep(0.2)


def rounds_made(folder: Path) -> list[dict[str, str]]:
    """Return the logged rows of all runs of a study's server."""
    rows = []
    for file in sorted(folder.glob("runs/sites/*/metrics.csv")):
        with file.open() as lines:
            rows += [row for row in csv.DictReader(lines) if row.get("comm/up_bytes")]
    return rows


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = max(folder.glob("runs/sites/*/checkpoints/*.ckpt"), key=lambda file: file.stat().st_mtime)
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def approved(folder: Path, recipe: Path, client: int, policy: str) -> str:
    """Let a site's administrator write a policy and approve a recipe, and return what its SuperNode is told."""
    file = folder / f"policy{client}" / "policy.yaml"
    file.parent.mkdir()
    file.write_text(policy)
    state = ("--state-dir", str(folder / "flwr" / "lightning_lowrank"))
    main(["flower", "approve", str(recipe), "--policy", str(file), "--client", str(client), *state, "--yes"])
    return f'policy="{file}"'


def test_run_over_tls_is_the_simulation(network, tmp_path):
    """Resolve, approve, start, finish, audit."""
    written = recipe(tmp_path, "FedLoRA")
    write_project([written], tmp_path / "app")
    network.start_superlink()
    for client in range(3):
        policy = f"max_rounds: {ROUNDS}\nmax_upload: 1_000_000\nmax_download: 1_000_000\n"
        network.start_node(client, config=approved(tmp_path, tmp_path / "app" / "recipe.yaml", client, policy))
    run = network.start("flwr", "flwr", "run", str(tmp_path / "app"), "--stream")
    wait_for(network, lambda: len(rounds_made(tmp_path)) == ROUNDS)
    # A row is written before the round's checkpoint, which takes the place of the round before's.
    last = f"runs/sites/version_0/checkpoints/epoch={ROUNDS - 1}-*.ckpt"
    wait_for(network, lambda: list(tmp_path.glob(last)), limit=60)
    network.kill(run)
    served = rounds_made(tmp_path)
    state = final_state(tmp_path)
    simulated = simulate(written)
    for name, value in simulated.lightning_module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    for name in (
        "comm/total_up_bytes",
        "comm/total_down_bytes",
        "comm/total_idle_down_bytes",
        "federated/client_steps",
    ):
        assert float(served[-1][name]) == float(simulated.callback_metrics[name])
    assert all(float(row["federated/failed"]) == 0 for row in served)
    for client in range(3):
        entries = entries_of(network.home / "lightning_lowrank" / f"audit_client_{client}.jsonl")
        assert {entry["direction"] for entry in entries} == {"received", "sent"}


@pytest.mark.nightly
def test_a_recipe_of_one_other_character_is_refused_by_all(network, tmp_path):
    written = recipe(tmp_path, "FedLoRA")
    write_project([written], tmp_path / "app")
    configs = [approved(tmp_path, tmp_path / "app" / "recipe.yaml", client, "max_rounds: 9\n") for client in range(3)]
    sent = tmp_path / "app" / "recipe.yaml"
    sent.write_text(sent.read_text().replace("lr: 0.1", "lr: 0.2"))
    network.start_superlink()
    for client in range(3):
        network.start_node(client, config=configs[client])
    config = "start-timeout=60.0"
    network.start("flwr", "flwr", "run", str(tmp_path / "app"), "--stream", "--run-config", config)
    logs = [network.home / "lightning_lowrank" / f"audit_client_{client}.jsonl" for client in range(3)]

    def refused(log: Path) -> list[str]:
        entries = entries_of(log) if log.exists() else []
        return [entry["reason"] for entry in entries if entry["direction"] == "refused"]

    deadline = time.monotonic() + LIMIT
    while not all(map(refused, logs)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert all("lr: 0.2" in refused(log)[0] for log in logs)
    assert not rounds_made(tmp_path)


# The site of client 2 answers as it likes; otherwise the app is the one that `write_project` writes.
HOSTILE_APP = """
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord

from lightning_lowrank.compression import Dense
from lightning_lowrank.flower import client_app, server_app

recipe = Path(__file__).parent / "recipe.yaml"
server = server_app(recipe)
client = client_app(recipe)


def lie(message, context, answer):
    reply = answer(message, context)
    if context.node_config.get("hostile"):
        ((number, array),) = reply.content.array_records["payloads"].items()
        tensors = Dense().decode(array.data)
        first = next(iter(tensors))
        data = [
            Dense().encode({**tensors, first: torch.zeros([1] * 65)}),
            Dense().encode({name: -100 * value for name, value in tensors.items()}),
        ][int(number) % 2]
        reply.content["payloads"] = ArrayRecord({number: Array("uint8", (len(data),), array.stype, data)})
    return reply


own = client._registered_funcs["train.round"]
client._registered_funcs["train.round"] = lambda message, context: lie(message, context, own)
"""


@pytest.mark.nightly
def test_hostile_and_killed_sites_and_a_killed_server(network, tmp_path):
    """One site lies throughout, one is killed and comes back, and the server is killed twice."""
    written = recipe(tmp_path, "FedMUD", clients_per_round=3)
    write_project([written], tmp_path / "app")
    (tmp_path / "app" / "flower_app.py").write_text(HOSTILE_APP)
    policy = "min_clients: 2\nmodules: [network]\nmax_upload: 100_000\n"
    configs = [approved(tmp_path, tmp_path / "app" / "recipe.yaml", client, policy) for client in range(2)]
    kept = network.home / "lightning_lowrank"
    nodes: list[subprocess.Popen] = []

    def start_server() -> subprocess.Popen:
        options = ("--enable-supernode-auth", "--database", str(tmp_path / "superlink.db"))
        superlink = network.start_superlink(*options)
        if not nodes:
            network.register([f"site{client}" for client in range(3)])
        config = "min-sites=2 round-timeout=300.0"
        network.start("flwr", "flwr", "run", str(tmp_path / "app"), "--stream", "--run-config", config)
        return superlink

    def start_node(client: int) -> subprocess.Popen:
        config = "hostile=true" if client == 2 else configs[client]
        return network.start_node(
            client, "--auth-supernode-private-key", str(tmp_path / f"site{client}"), config=config
        )

    def log_of(client: int) -> Path:
        return kept / f"audit_client_{client}.jsonl"

    def asked(client: int, number: int) -> bool:
        entries = entries_of(log_of(client)) if log_of(client).exists() else []
        return ("received", number) in [(entry["direction"], entry.get("round")) for entry in entries]

    def ended() -> bool:
        # Flower refuses a node until it has noticed that the killed one is gone; whoever runs it starts it again.
        if nodes[1].poll() is not None:
            nodes[1] = start_node(1)
        return len(rounds_made(tmp_path)) == ROUNDS and not list(kept.glob("server_*.ckpt"))

    superlink = start_server()
    nodes += [start_node(client) for client in range(3)]
    wait_for(network, lambda: asked(1, 1))
    network.kill(superlink)
    network.kill(nodes[1])
    superlink = start_server()
    wait_for(network, lambda: "the study continues from" in network.told("flwr"))
    network.kill(superlink)
    start_server()
    wait_for(network, ended)

    made = rounds_made(tmp_path)
    assert [float(row["federated/failed"]) for row in made] == [1] * ROUNDS
    told = (tmp_path / "flwr.log").read_text(errors="replace")
    assert "round 0 continues without the site of client 2: it sent a bad payload" in told
    for client in range(3):
        assert entries_of(log_of(client))
    honest = simulate(recipe(tmp_path, "FedMUD", clients_per_round=None, participants=[[0, 1]] * ROUNDS))
    state = final_state(tmp_path)
    for name, value in honest.lightning_module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
