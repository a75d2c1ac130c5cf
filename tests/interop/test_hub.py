"""Push and pull against a local server that answers as the hub's API does, through huggingface_hub's own client."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from markdown_it import MarkdownIt
from torch import nn

from lightning_lowrank import MatrixProduct, cli, convert, export_adapter, import_adapter, pull_adapter, push_adapter
from lightning_lowrank.interop.hub import model_card
from tests.cli.run_folders import configured, rows_of
from tests.helpers import assert_same

pytestmark = pytest.mark.slow


class Hub(BaseHTTPRequestHandler):
    """Repositories of models in memory, each with one branch; files are committed as they are."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[tuple[str, str]]

    def log_message(self, *arguments):
        pass

    def answer(self, content, status=200, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self):
        self.answer(
            {"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound", X_Error_Message="no repository"
        )

    def sha(self, name):
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, self.headers.get("Authorization", "")))
        if self.path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            self.repositories.setdefault(name, {})
            return self.answer({"url": f"http://{self.headers['Host']}/{name}"})
        _, _, _, owner, name, what, *_ = self.path.split("/")
        files = self.repositories[f"{owner}/{name}"]
        if what == "preupload":
            named = [each["path"] for each in json.loads(body)["files"]]
            return self.answer(
                {"files": [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in named]}
            )
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        sha = self.sha(f"{owner}/{name}")
        self.answer(
            {
                "success": True,
                "commitOid": sha,
                "commitUrl": f"http://{self.headers['Host']}/{owner}/{name}/commit/{sha}",
            }
        )

    def do_GET(self):
        path = unquote(self.path.split("?")[0])
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in self.repositories:
            return self.missing()
        files, sha = self.repositories[name], self.sha(name)
        if parts[0] == "api" and "tree" in parts:
            return self.answer(
                [{"type": "file", "path": each, "size": len(data), "oid": "0"} for each, data in files.items()]
            )
        if parts[0] == "api":
            siblings = [{"rfilename": each} for each in files]
            return self.answer(
                {"id": name, "sha": sha, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            )
        data = files["/".join(parts[4:])]
        self.answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=sha)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    Hub.repositories, Hub.asked = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def adapter(folder):
    module = network()
    convert(module, MatrixProduct(), rank=1, alpha=2, init="uniform", freeze_rest=True)
    return module, export_adapter(module, folder)


def test_what_is_pushed_is_what_is_pulled(tmp_path, hub):
    module, folder = adapter(tmp_path / "adapter")
    (folder / "optimizer.pt").write_bytes(b"not of the adapter")
    address = push_adapter(folder, "me/mood", figures={"val_acc": 0.853219}, token="hf_secret", endpoint=hub)
    assert address.startswith(f"{hub}/me/mood/commit/")
    assert set(Hub.repositories["me/mood"]) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert all(token == "Bearer hf_secret" for path, token in Hub.asked if "me/mood" in path)
    Hub.repositories["me/mood"]["adapter_model.bin"] = b"a pickle"
    found = pull_adapter("me/mood", tmp_path / "found", endpoint=hub)
    assert {each.name for each in found.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    again = import_adapter(found, network())
    factors = {name: value for name, value in module.state_dict().items() if "factors" in name}
    assert_same({name: again.state_dict()[name] for name in factors}, factors)
    card = (found / "README.md").read_text()
    about = yaml.safe_load(card.split("---")[1])
    assert about == {"library_name": "peft", "tags": ["lightning_lowrank", "federated-learning", "lora"]}
    assert "| val_acc | 0.853219 |" in card
    # A card of its own gets new figures, a pulled one too.
    push_adapter(folder, "me/mood", figures={"val_acc": 0.9}, endpoint=hub)
    push_adapter(found, "me/mood", figures={"val_acc": 0.95}, endpoint=hub)
    assert b"| val_acc | 0.95 |" in Hub.repositories["me/mood"]["README.md"]


@pytest.mark.parametrize("change", ["mine", "{}\nmore", "é"])
def test_a_card_of_somebody_else_stays(tmp_path, hub, change):
    _, folder = adapter(tmp_path / "adapter")
    card = folder / "README.md"
    push_adapter(folder, "me/mood", figures={"val_acc": 0.5}, endpoint=hub)
    card.write_text(change.format(card.read_text()), encoding="latin-1" if change == "é" else "utf-8")
    before = card.read_bytes()
    Hub.asked.clear()
    with pytest.raises(MisconfigurationException, match=r"figures=\{'val_acc': 0\.25\}.*README\.md.*leave `figures`"):
        push_adapter(folder, "me/mood", figures={"val_acc": 0.25}, endpoint=hub)
    assert card.read_bytes() == before
    assert not Hub.asked
    if change != "é":
        # The hub's client reads it too, as UTF-8.
        push_adapter(folder, "me/mood", endpoint=hub)
        assert Hub.repositories["me/mood"]["README.md"] == before


def test_the_card_has_neither_tags_nor_links_of_strangers():
    evil = "<script>alert(1)</script> [here](javascript:alert(2)) <javascript:alert(3)> `a|b` a\\|b & ![x](data:,)"
    evil = f"\x1b[31m\u202e{evil}"
    config = {"base_model_name_or_path": evil, "target_modules": [evil], "peft_type": evil, "r": evil}
    card = model_card(f"me/{evil}", config, {evil: evil, "link": "javascript:alert(4)"})
    assert all(letter.isprintable() or letter == "\n" for letter in card)
    about, body = card.split("---\n", 2)[1:]
    assert "base_model" not in yaml.safe_load(about)
    for line in body.splitlines():
        # The only cells are the table's own.
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) in (0, 3)
    page = MarkdownIt("commonmark").enable("table").render(body)
    assert page.count("<table>") == 1
    assert not re.search(r"<(script|a|img|code)\b|href|src=", page)
    address = model_card("me/x", {"base_model_name_or_path": "javascript:1"}, {})
    assert "base_model" not in yaml.safe_load(address.split("---")[1])


def test_the_command_writes_the_runs_figures(tmp_path, hub, capsys):
    _, folder = adapter(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "meta/some-model"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    run = configured(tmp_path / "runs" / "version_0", 0, rows_of([0.5, 0.75], up=100, down=200))
    (run / "run_metadata.json").write_text(
        json.dumps({"samples": [3, 5, 9], "software": {"torch": "2.9.0", "commit": "ab12"}})
    )
    cli.main(["push", str(folder), "me/mood", "--run", str(run), "--endpoint", hub])
    assert "/me/mood/commit/" in capsys.readouterr().out
    card = Hub.repositories["me/mood"]["README.md"].decode()
    for row in (
        "| base model | meta/some-model |",
        "| rounds | 2 |",
        "| val_acc | 0.75 |",
        "| comm/total_bytes | 600 |",
        "| comm/ratio | 0.0625 |",
        "| samples of a client (least, median, most) | 3, 5, 9 |",
        "| made with | torch 2.9.0, commit ab12 |",
    ):
        assert row in card
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "meta/some-model"


def test_what_is_no_adapter_is_refused(tmp_path, hub):
    with pytest.raises(MisconfigurationException, match=r"adapter_config\.json"):
        push_adapter(tmp_path, "me/mood", endpoint=hub)
    with pytest.raises(MisconfigurationException, match=r"no folder .*none"):
        push_adapter(tmp_path / "none", "me/mood", endpoint=hub)
    (file := tmp_path / "file").write_text("kept")
    for call in (lambda: push_adapter(file, "me/mood", endpoint=hub), lambda: pull_adapter("me/x", file, endpoint=hub)):
        with pytest.raises(MisconfigurationException, match=r"file is a file.*folder"):
            call()
    assert not Hub.asked
    Hub.repositories["me/other"] = {"adapter_config.json": b"{}", "adapter_model.bin": b""}
    kept = adapter(tmp_path / "kept")[1]
    before = (kept / "adapter_config.json").read_bytes()
    with pytest.raises(MisconfigurationException, match=r"adapter_model\.safetensors"):
        pull_adapter("me/other", kept, endpoint=hub)
    assert (kept / "adapter_config.json").read_bytes() == before
    from huggingface_hub.errors import RepositoryNotFoundError

    with pytest.raises(RepositoryNotFoundError):
        pull_adapter("me/none", tmp_path / "none", endpoint=hub)


def test_the_card_has_the_ranks_of_all_layers_and_no_local_folder_as_a_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    config = {"r": 8, "lora_alpha": 16, "rank_pattern": {"a": 2, "b": 4}, "alpha_pattern": {"a": 16}}
    card = model_card("me/mood", {**config, "base_model_name_or_path": "models/tiny"}, {})
    assert "| rank | 2 to 8 |" in card
    assert "| alpha | 16 |" in card
    assert "base_model" not in yaml.safe_load(card.split("---")[1])
    assert "| base model | models/tiny |" in card
    assert "| rank | 8 |" in model_card("me/mood", {"r": 8, "rank_pattern": {"a": "many", "b": 8}}, {})
    elsewhere = model_card("me/mood", {"base_model_name_or_path": "models/other"}, {})
    assert yaml.safe_load(elsewhere.split("---")[1])["base_model"] == "models/other"
