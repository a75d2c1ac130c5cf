"""A site runs the recipes that it has approved, byte by byte, and tells the server nothing else."""

import http.server
import io
import json
import pickle
import re
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from flwr.app import Message
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FromIndices, MatrixProduct, convert, export_adapter, import_adapter
from lightning_lowrank.cli import main
from lightning_lowrank.data import Arrays, TextClassification
from lightning_lowrank.flower import write_project
from lightning_lowrank.flower.approval import (
    check_reads_nothing,
    fill_placeholders,
    insert_placeholders,
    read_plain,
    sentences,
    state_folder,
)
from lightning_lowrank.flower.audit import AuditLog
from lightning_lowrank.flower.client import client_app
from lightning_lowrank.flower.messages import JOIN, LISTEN, TRAIN, pack
from lightning_lowrank.flower.policy import Policy, PolicyViolation
from lightning_lowrank.flower.privacy_account import PrivacyAccount
from lightning_lowrank.flower.recipe import resolve
from lightning_lowrank.flower.site import Site
from tests import texts
from tests.flower.attacks import hostile_recipes
from tests.flower.helpers import SMALL, approve, entries_of, merged, method, reasons, run_on_sites, write_recipe
from tests.flower.local_grid import LocalGrid


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def web(tmp_path):
    """A server within the site's network, and what it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"SECRET")

        do_HEAD = do_GET

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


ATTACKS = tuple(hostile_recipes(Path("/tmp"), Path("/tmp/m"), Path("/tmp/s"), "http://x", write=False))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_recipe_that_is_not_approved_is_not_even_parsed(tmp_path, web, attack):
    address, asked = web
    app, state, secret = tmp_path / "app", tmp_path / "state", tmp_path / "secret.txt"
    secret.write_text("SECRET")
    state.mkdir(mode=0o700)
    (state / "privacy_client_0.json").write_text("[]")
    recipe = hostile_recipes(app, tmp_path / "marker", secret, address)[attack]
    (app / "recipe.yaml").write_bytes(recipe)
    file = approve(tmp_path / "site", write_recipe(tmp_path, {}, "honest.yaml"))
    before = tree(tmp_path)
    site = Site(app / "recipe.yaml", 0, state / "study.safetensors", policy=Policy.load(file))
    for ask in (site.join, lambda: site.train(0, {}, "[]"), lambda: site.listen({0: b"x"})):
        with pytest.raises(PolicyViolation, match="not approved") as told:
            ask()
        assert len(str(told.value)) < 4000
        assert str(told.value).isprintable()
    assert not (tmp_path / "marker").exists()
    assert asked == []
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_a_recipe_that_is_changed_by_one_character_is_refused_by_all(tmp_path):
    recipe = write_recipe(tmp_path, SMALL)
    files = [approve(tmp_path / f"site{client}", recipe) for client in range(3)]
    served, _ = run_on_sites(recipe, tmp_path / "honest", node_config=lambda client: {"policy": files[client]})
    assert served.callback_metrics["federated/failed"] == 0
    changed = tmp_path / "changed.yaml"
    changed.write_text(recipe.read_text().replace("lr: 0.1", "lr: 0.2"))
    with pytest.raises(MisconfigurationException, match="sites of 0 have joined") as told:
        run_on_sites(changed, tmp_path / "changed", node_config=lambda client: {"policy": files[client]})
    assert str(told.value).count("NotApproved") == 3
    assert "lr" not in str(told.value).replace("lightning_lowrank", "")
    found = reasons(tmp_path / "changed")
    assert len(found) == 3
    for reason in found:
        assert "-        lr: 0.1" in reason
        assert "+        lr: 0.2" in reason


def test_the_sites_copy_is_what_runs(tmp_path):
    recipe = write_recipe(tmp_path, SMALL)
    policy = Policy.load(approve(tmp_path / "site", recipe))
    (copy,) = (tmp_path / "site" / "approved").iterdir()
    assert policy.approved(recipe.read_bytes()) == copy.read_bytes()
    # Others could approve recipes.
    for mode in (0o777, 0o775):
        copy.parent.chmod(mode)
        with pytest.raises(MisconfigurationException, match="approved is writable by others"):
            policy.approved(recipe.read_bytes())
    copy.parent.chmod(0o500)
    assert policy.approved(recipe.read_bytes()) == copy.read_bytes()
    copy.parent.chmod(0o700)
    # A copy that was changed under its name is no approval.
    copy.write_bytes(copy.read_bytes() + b" ")
    for data in (recipe.read_bytes(), copy.read_bytes()):
        with pytest.raises(PolicyViolation, match="not approved"):
            policy.approved(data)
    copy.unlink()
    with pytest.raises(PolicyViolation, match="nothing is approved"):
        policy.approved(recipe.read_bytes())
    assert Policy().approved(b"anything") == b"anything"


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [touch]",
        "a: &x 1\nb: *x",
        "a: 1\na: 2",
        "[1]",
        "text",
        "a: [",
        "[" * 2**20,
        "- " * 2**19,
        "a: !t 1",
    ],
)
def test_plain_yaml_alone_is_read(text):
    with pytest.raises(MisconfigurationException, match=r"^it cannot be read as plain YAML"):
        read_plain(text.encode(), "it")


@pytest.mark.parametrize("nested", [lambda n: "a: " + "[" * n + "]" * n, lambda n: "a:\n  " + "- " * n + "1"])
def test_nesting_is_limited_to_fifty_levels(nested):
    # The mapping is a level itself.
    assert list(read_plain(nested(49).encode(), "it")) == ["a"]
    with pytest.raises(MisconfigurationException, match="nested more than 50 levels"):
        read_plain(nested(50).encode(), "it")


def test_text_alone_is_read():
    for data in (b"\xff\xfe", b"a: \x00", b"a: 1\n" + b"#" * 2**21):
        with pytest.raises(MisconfigurationException, match="plain YAML"):
            read_plain(data, "it")


@pytest.mark.slow
def test_resolve_leaves_to_sites_what_is_theirs(tmp_path):
    logger = method("lightning.pytorch.loggers.CSVLogger", save_dir="runs/here")
    trainer = {
        "logger": logger,
        "precision": "bf16-mixed",
        "enable_checkpointing": True,
        "callbacks": [method("ModelCheckpoint", dirpath="kept")],
    }
    data = {"class_path": "MNIST", "init_args": {"root": "/data/mnist", "num_workers": 3}}
    text, own = resolve([write_recipe(tmp_path, merged(SMALL, {"trainer": trainer, "data": data}))])
    content = read_plain(text.encode(), "it")
    assert content["data"]["init_args"]["root"] == {"site": "root"}
    assert content["data"]["init_args"]["num_workers"] == {"site": "num_workers", "default": 3}
    assert content["trainer"]["precision"] == {"site": "precision", "default": "bf16-mixed"}
    assert not {"logger", "default_root_dir", "strategy", "plugins", "profiler"} & content["trainer"].keys()
    assert content["trainer"]["callbacks"] == []
    assert own["site"] == {"root": "/data/mnist", "num_workers": 3}
    assert own["trainer"]["logger"]["init_args"]["save_dir"] == "runs/here"
    assert [each["init_args"]["dirpath"] for each in own["callbacks"]] == ["kept"]
    assert "/data" not in text
    said = "\n".join(sentences(content))
    for part in ("MNIST(root=this site's root", "FedAvg", "3 clients", "2 rounds", "torch.optim.SGD", "no noise"):
        assert part in said
    assert "divided by IID()" in sentences({"federated": {"partition": None}})[0]
    with pytest.raises(MisconfigurationException, match="root"):
        fill_placeholders(content, {})
    assert fill_placeholders(content, {}, str(tmp_path))["data"]["init_args"]["root"] == str(tmp_path)


@pytest.mark.parametrize(
    "value", ["/etc/passwd", "~/x", "../secret.txt", "./x", "http://a/b", "file://x", "here.txt", "C:\\x"]
)
def test_resolve_refuses_files_and_addresses(tmp_path, value):
    Path("here.txt").touch()
    with pytest.raises(MisconfigurationException, match=r"data\.prompt="):
        check_reads_nothing({"data": {"prompt": value}})
    check_reads_nothing({"data": {"prompt": "A question/an answer: {text}", "pattern": "network.*"}})


def test_what_a_site_fills_in_stays_below_its_data_root(tmp_path):
    root = tmp_path / "data"
    (root / "model").mkdir(parents=True)
    (root / "train.csv").touch()
    (tmp_path / "secret.txt").touch()
    (root / "link").symlink_to(tmp_path)
    content = {"train": {"site": "train", "default": "train.csv"}, "model": {"site": "model"}}
    assert fill_placeholders(content, {"model": "model"}, str(root)) == {
        "train": str(root / "train.csv"),
        "model": str(root / "model"),
    }
    for value in ("../secret.txt", str(tmp_path / "secret.txt"), "link/secret.txt", "link", "/etc/passwd"):
        for name in ("train", "model"):
            with pytest.raises(MisconfigurationException, match="data-root"):
                fill_placeholders(content, {"model": "model", name: value}, str(root))


def test_a_missing_file_is_not_read_from_the_working_folder(tmp_path, monkeypatch):
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (root / "saved", elsewhere / "train", elsewhere / "glue"):
        folder.mkdir(parents=True)
    (elsewhere / "patients.csv").touch()
    monkeypatch.chdir(elsewhere)

    def filled(name, value):
        return fill_placeholders({"site": name}, {name: value}, str(root))

    for name, value in (("train", "patients.csv"), ("dataset", "patients.csv"), ("dataset", "glue")):
        with pytest.raises(MisconfigurationException, match=f"{name}='{value}'.*elsewhere/{value}.*data-root"):
            filled(name, value)
    assert filled("dataset", "saved") == str(root / "saved")
    # Names of a split and of a data set on the hub.
    assert (filled("train", "train"), filled("dataset", "nyu-mll/glue")) == ("train", "nyu-mll/glue")


def test_a_file_of_the_author_is_no_default_for_sites(tmp_path):
    (tmp_path / "a.csv").touch()
    own = {}
    left = insert_placeholders({"data": {"train": "a.csv", "validation": "b.csv"}}, own)["data"]
    assert left == {"train": {"site": "train"}, "validation": {"site": "validation", "default": "b.csv"}}
    assert own["train"] == "a.csv"
    check_reads_nothing(left)


def test_approval_without_a_terminal_names_the_option(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, {})
    (tmp_path / "policy.yaml").write_text("min_clients: 2\n")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit, match="--yes"):
        main(["flower", "approve", str(recipe), "--policy", "policy.yaml", "--state-dir", "state"])


def test_approve_shows_and_keeps(tmp_path, monkeypatch, capsys):
    policy = tmp_path / "site" / "policy.yaml"
    policy.parent.mkdir()
    policy.write_text("min_clients: 2\n")
    recipe = write_recipe(tmp_path, {"data": {"init_args": {"note": "\x1b[2J\u202e evil\nApproved"}}})
    words = ["flower", "approve", str(recipe), "--policy", str(policy), "--state-dir", str(tmp_path / "state")]
    monkeypatch.setattr("builtins.input", lambda *prompt: "n")
    with pytest.raises(SystemExit, match="nothing was approved"):
        main(words)
    assert not (tmp_path / "site" / "approved").exists()
    main([*words, "--yes"])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert Policy.load(policy).approved(recipe.read_bytes()) == recipe.read_bytes()
    account = tmp_path / "state" / "privacy_client_0.json"
    assert account.read_text() == "[]"
    for path, mode in ((account, 0o600), (account.parent, 0o700), (policy.parent / "approved", 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    with pytest.raises(SystemExit, match="no such file"):
        main([*words[:2], "none.yaml", *words[3:], "--yes"])


HIDDEN = {
    "beside a site's own": {"model": {"site": "a", "class_path": "evil.Hidden"}},
    "a site's default": {"model": {"site": "a", "default": {"class_path": "evil.Hidden"}}},
    "further arguments": {"model": {"class_path": "Good", "dict_kwargs": {"of": {"class_path": "evil.Hidden"}}}},
    "a text": {"trainer": {"callbacks": '[{"class_path": "evil.Hidden"}]'}},
    "a dotted key": {"model.class_path": "evil.Hidden"},
    "an escape in a list": {"trainer": {"callbacks": r'["evil\x2eHidden"]'}},
    "an escape of another": {"trainer": {"callbacks": r"""['"evil\x2eHidden"']"""}},
    "an escape behind a bad date": {"data": r'{class_path: "evil\u002eHidden", init_args: {a: 2001-99-99}}'},
    "an escape behind an anchor": {"data": r'--- &a {class_path: &b !!str "evil\x2eHidden"}'},
    "an escape in dict_kwargs": {"model": {"class_path": "Good", "dict_kwargs": {"x": r'"evil\x2eHidden"'}}},
    "a key": {"model": {"class_path": "Good", "init_args": {"of": {"evil.Hidden": 1}}}},
    "behind many": {"a": [{"class_path": f"a.Long{'x' * 90}{number}"} for number in range(99)], "b": "evil.Hidden"},
}


@pytest.mark.parametrize("place", HIDDEN)
def test_no_code_is_hidden_from_whoever_approves(place):
    assert "  evil.Hidden" in sentences(read_plain(yaml.safe_dump(HIDDEN[place]).encode(), "it"))


def test_a_name_is_shown_with_letters_that_re_does_not_know():
    assert r"  evil\u0301torch.nn.Linear" in sentences({"trainer": {"callbacks": "evil\u0301torch.nn.Linear"}})


ESCAPED = r'{"class_path": "evil\u002eHidden"}'


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"model": ESCAPED}, "model"),
        ({"model": r'{"class\x5fpath": Short}'}, "model"),
        ({"trainer": {"callbacks": [f"\n {ESCAPED}"]}}, r"trainer\.callbacks\.0"),
        ({"model": {"class_path": "Good", "init_args": "{of: 1}"}}, r"model\.init_args"),
        ({"model": {"site": "model", "default": ESCAPED}}, r"model\.default"),
        ({"data": {"of": json.dumps([ESCAPED])}}, r"data\.of"),
        ({"data": {"of": "!!binary L3RtcC94"}}, r"data\.of"),
        ({"trainer": "callbacks: [Short]"}, "trainer"),
    ],
)
def test_no_part_of_a_recipe_is_a_text(content, place):
    with pytest.raises(MisconfigurationException, match=rf"^{place}=.*write it as YAML, not as text"):
        check_reads_nothing(content)


@pytest.mark.parametrize(
    "value",
    [
        "[here.yaml]",
        "- here.yaml",
        "{train: /etc/x}",
        '"\\x2fetc\\x2fx"',
        " /etc/x",
        "['[here.yaml]']",
        "simplecache::file:///etc/x",
    ],
)
def test_no_text_holds_a_file(tmp_path, value):
    Path("here.yaml").touch()
    with pytest.raises(MisconfigurationException, match=r"data\.of=.*(here\.yaml|/etc/x)"):
        check_reads_nothing({"data": {"of": value}})


def test_texts_that_only_look_like_yaml_are_texts():
    Path("train.csv").touch()
    texts = [
        "[a-z]+",
        "[0-9]",
        "{name}",
        "Question: {question}\nAnswer:",
        "### Input:\n{a}\n# Output",
        "a: [b",
        "'",
        "[0.1]",
    ]
    check_reads_nothing({"a": {"b": texts, "train": {"site": "train", "default": "train.csv"}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"trainer": {"max_epochs": 3}, "trainer.max_epochs": 99}, "the recipe has the argument 'trainer.max_epochs'"),
        ({"federated": {"algorithm.class_path": "Good"}}, "federated has the argument 'algorithm.class_path'"),
        ({"model": {"class_path": "Good", "init_args.a": 1}}, "model has the argument 'init_args.a'"),
        (
            {"trainer": {"callbacks": [{"class_path": "Good", "init_args": {"a.b": 1}}]}},
            "trainer.callbacks.0.init_args has the argument 'a.b'",
        ),
        ({"data": {"site": "d", "default": {"class_path": "A", "init_args": {"a.b": 1}}}}, "data.default.init_args"),
    ],
)
def test_no_argument_has_a_dot(content, message):
    with pytest.raises(MisconfigurationException, match=re.escape(message)):
        check_reads_nothing(content)


def test_names_of_layers_have_dots():
    check_reads_nothing({"lowrank": {"init_args": {"ranks": {"network.0": 1}}, "of": {"layers.*": 1}}})


def test_a_site_checks_recipes_that_were_approved_earlier(tmp_path):
    Path("data.yaml").touch()
    for number, (data, told) in enumerate({ESCAPED: "not as text", "data.yaml": "a file or an address"}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        recipe = write_recipe(folder, {"data": data})
        policy = Policy.load(approve(folder, recipe))
        with pytest.raises(MisconfigurationException, match=f"^data=.*{told}"):
            Site(recipe, 0, tmp_path / "state" / "study.safetensors", policy=policy).join()


def test_a_file_by_hand_may_name_no_files(tmp_path):
    (tmp_path / "policy.yaml").write_text("min_clients: 1\n")
    for text in ("trainer: /etc/x.yaml", "a: {site: train, default: ../x}", "data: ['http://a/b.yaml']"):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(SystemExit, match="file or an address"):
            main(["flower", "approve", "recipe.yaml", "--policy", "policy.yaml", "--state-dir", "state", "--yes"])
    assert not (tmp_path / "approved").exists()


@pytest.mark.slow
def test_approve_imports_nothing_of_a_recipe(tmp_path):
    import subprocess
    import sys

    (tmp_path / "policy.yaml").touch()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {class_path: antigravity.Model}\ntrainer: {callbacks: [{class_path: this.Zen}]}\n")
    words = ["flower", "approve", str(recipe), "--policy", "policy.yaml", "--state-dir", "state", "--yes"]
    code = (
        f"import sys; from lightning_lowrank.cli import main; main({words!r});"
        "assert not {'this', 'antigravity', 'flwr', 'jsonargparse'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "antigravity.Model" in done.stdout


def asked(fields, kind=JOIN, payloads=None):
    return kind, pack({"study": "0" * 16, "min_sites": 2, "rounds": 2, "cohort": 2, "seed": 3, **fields}, payloads)


def answer(app, kind, content, config, run_config=None):
    """Return a site's answer to a message, and the error that the server hears of it."""
    grid = LocalGrid()
    node = grid.start(app, **config)
    grid.nodes[node][1].run_config.update(run_config or {})
    (number,) = grid.push_messages([Message(content, dst_node_id=node, message_type=kind)])
    (reply,) = grid.pull_messages([number])
    return reply, reply.error.reason if reply.has_error() else ""


MESSAGES = {
    "a study that is a path": {"study": "../../../../tmp/x"},
    "a study with a line": {"study": "0" * 15 + "\n"},
    "rounds without end": {"rounds": 2**40},
    "rounds as a text": {"rounds": "2"},
    "a seed as a text": {"seed": "3; touch"},
    "a cohort of one": {"cohort": 1},
    "a promise of one": {"min_sites": 1},
    "no seed": {"seed": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_none_is_refused_and_tells_nothing(tmp_path, name):
    recipe = write_recipe(tmp_path, SMALL)
    policy = approve(tmp_path / "site", recipe, "min_clients: 2\nmax_rounds: 10\n")
    before = tree(tmp_path)
    config = {"partition_id": 0, "state_dir": str(tmp_path / "state"), "policy": policy}
    _, told = answer(client_app(recipe), *asked(MESSAGES[name]), config)
    assert re.search("this site did not do it, and entry [0-9a-f]{12} of its log says why", told)
    assert str(next(iter(MESSAGES[name].values()))) not in re.sub("entry [0-9a-f]{12} of", "", told)
    after = tree(tmp_path)
    assert after.keys() - before.keys() == {"state/audit_client_0.jsonl"}


def test_paths_of_a_sites_configuration_may_begin_with_its_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "policy.yaml").write_text("min_clients: 2\n")
    assert state_folder({"state-dir": "~/state"}) == tmp_path / "state"
    assert Policy.load("~/policy.yaml").min_clients == 2
    root = fill_placeholders({"root": {"site": "root"}}, {"root": "images"}, "~/data")["root"]
    assert root == str((tmp_path / "data" / "images").resolve())


@pytest.mark.slow
def test_a_run_configuration_changes_nothing_at_a_site(tmp_path):
    recipe = write_recipe(tmp_path, SMALL)
    changed = tmp_path / "changed.yaml"
    changed.write_text(recipe.read_text() + " ")
    policy = approve(tmp_path / "site", recipe)
    config = {"partition_id": 0, "state_dir": str(tmp_path / "state"), "policy": policy}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "policy.yaml").write_text("min_clients: 1\n")
    for name, value in {
        "policy": str(tmp_path / "other" / "policy.yaml"),
        "data-root": "/",
        "state-dir": str(tmp_path / "other"),
        "audit-log": str(tmp_path / "other" / "log.jsonl"),
        "partition-id": 1,
        "site": str(tmp_path / "changed.yaml"),
        "own-data": True,
    }.items():
        _, told = answer(client_app(changed), *asked({}), config, {name: value})
        assert "NotApproved" in told
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["policy.yaml"]
    assert len(entries_of(tmp_path / "state" / "audit_client_0.jsonl")) == 7 * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TRAIN, LISTEN])
def test_rounds_of_no_study_are_refused(tmp_path, kind):
    recipe = write_recipe(tmp_path, SMALL)
    policy = approve(tmp_path / "site", recipe)
    config = {"partition_id": 0, "state_dir": str(tmp_path / "state"), "policy": policy}
    app = client_app(recipe)
    for fields, payloads in (
        ({"round": 2, "options": "[]", "last_broadcast": -1, "lost": False}, {2: b"x"}),
        ({"round": -1, "options": "[]", "last_broadcast": -1, "lost": False}, None),
        ({"round": 0, "options": "[" * 10**5, "last_broadcast": -1, "lost": False}, {0: b""}),
        ({"round": 0, "options": "[[{}]]", "last_broadcast": -1, "lost": False}, {0: b"\x80\x04cos\nsystem\n"}),
        ({"round": 0, "options": "[]", "last_broadcast": "x", "lost": False}, None),
    ):
        _, told = answer(app, *asked(fields, kind, payloads), config)
        assert told or kind == LISTEN
        assert "options" not in told
    if kind == TRAIN:
        assert all(entry["direction"] != "sent" or entry["bytes"] < 300 for entry in log_of(tmp_path))


def log_of(folder):
    return entries_of(folder / "state" / "audit_client_0.jsonl")


class LeakyData(torch.utils.data.Dataset):
    """Fails with a patient's line in its error."""


@pytest.mark.slow
def test_an_error_says_nothing_of_the_data(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, SMALL)
    policy = approve(tmp_path / "site", recipe, "max_upload: 10\n")
    config = {"partition_id": 0, "state_dir": str(tmp_path / "state"), "policy": policy}

    def fails(site):
        raise ValueError("Jane Doe, 1971, HIV positive. " * 30_000)

    monkeypatch.setattr(Site, "join", fails)
    _, told = answer(client_app(recipe), *asked({}), config)
    assert "Jane" not in told
    assert told == "ValueError"
    received, failed, sent = log_of(tmp_path)
    assert (received["direction"], failed["direction"], sent["direction"]) == ("received", "failed", "sent")
    assert failed["reason"].startswith("Jane Doe")
    assert sent["bytes"] == len(told)
    assert len(sent["digest"]) == 64


def test_a_site_without_a_policy_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Site, "join", lambda site: {})
    recipe = write_recipe(tmp_path, SMALL)
    with pytest.warns(UserWarning, match="runs whatever recipe the server sends"):
        answer(client_app(recipe), *asked({}), {"partition_id": 0, "state_dir": str(tmp_path / "state")})


@pytest.mark.slow
def test_what_a_site_and_a_server_keep_is_theirs_alone(tmp_path):
    private = method("DifferentialPrivacy", noise_multiplier=1.0, delta=1e-6, secure=True)
    recipe = write_recipe(tmp_path, merged(SMALL, {"trainer": {"callbacks": [private], "enable_checkpointing": True}}))
    seen: dict[str, int] = {}

    def look(node, message):
        for path in [*(tmp_path / "state").rglob("*"), *(tmp_path / "server").rglob("*")]:
            seen[str(path)] = stat.S_IMODE(path.stat().st_mode)

    run_on_sites(
        recipe, tmp_path, prepare=lambda grid: setattr(grid, "before", look), state=tmp_path / "server" / "s.ckpt"
    )
    assert {Path(name).suffix for name in seen} >= {".json", ".jsonl", ".safetensors", ".lock", ".ckpt"}
    wrong = {name: oct(mode) for name, mode in seen.items() if mode not in (0o600, 0o700)}
    assert not wrong
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_the_generated_project_works_under_the_policy_of_the_page(tmp_path):
    pytest.importorskip("dp_accounting")
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    (policy,) = re.findall(r'```yaml title="policy.yaml"\n(.*?)```', page, re.DOTALL)
    private = method("DifferentialPrivacy", noise_multiplier=4.0, delta=1e-6, secure=True)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "server"}}
    trainer = {"callbacks": [private], "logger": logger, "max_epochs": 1}
    write_project([write_recipe(tmp_path, merged(SMALL, {"trainer": trainer}))], tmp_path / "app")
    recipe = tmp_path / "app" / "recipe.yaml"
    files = []
    for client in range(3):
        folder = tmp_path / f"policy{client}"
        folder.mkdir()
        (folder / "policy.yaml").write_text(policy)
        files.append(str(folder / "policy.yaml"))
        state = ["--state-dir", str(tmp_path / "state"), "--client", str(client)]
        main(["flower", "approve", str(recipe), "--policy", files[-1], *state, "--yes"])
    served, _ = run_on_sites(recipe, tmp_path, min_sites=3, node_config=lambda client: {"policy": files[client]})
    assert served.callback_metrics["federated/clients"] == 3
    assert list(tmp_path.glob("runs/server/version_0/metrics.csv"))
    assert not list(tmp_path.glob("runs/server/version_1"))


def test_links_are_not_followed(tmp_path):
    target, state = tmp_path / "target", tmp_path / "state"
    target.write_text("theirs")
    state.mkdir()
    recipe = write_recipe(tmp_path, SMALL)
    for name in ("audit.jsonl", "study.safetensors", "privacy_client_0.json"):
        (state / name).symlink_to(target)
    with pytest.raises(OSError, match="audit"):
        AuditLog(state / "audit.jsonl").append(direction="received")
    with pytest.raises(MisconfigurationException, match="is a link"):
        Site(recipe, 0, state / "study.safetensors")
    with (
        pytest.raises(MisconfigurationException, match="is a link"),
        PrivacyAccount(state / "privacy_client_0.json").locked(),
    ):
        """Not reached."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(MisconfigurationException, match="writable by others"):
        Site(recipe, 0, shared / "a.safetensors").listen({0: b"x"})
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777
    (tmp_path / "other").symlink_to(state)
    with pytest.raises(MisconfigurationException, match="link"):
        Site(recipe, 0, tmp_path / "other" / "a.safetensors").listen({0: b"x"})
    with pytest.raises(MisconfigurationException, match=r"\*\.safetensors"):
        Site(recipe, 0, state / "privacy_client_1.json")
    assert target.read_text() == "theirs"


CHECKPOINTS = {
    "a pickle": b"\x80\x04cposix\nsystem\n(S'touch marker'\ntR.",
    "cut": b"\x08\x00\x00\x00\x00\x00\x00\x00{}",
    "a length of exabytes": b"\xff" * 8 + b"{}",
    "no bytes": b"",
    "a structure of another kind": None,
    "nested without end": None,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_study_file_that_was_exchanged_makes_a_new_client(tmp_path, name):
    import safetensors.torch

    file = tmp_path / "study.safetensors"
    data = CHECKPOINTS[name]
    if data is None:
        structure = '["plain", {"__reduce__": "os.system"}]' if "kind" in name else "[" * 10**5
        data = safetensors.torch.save({"0": torch.zeros(1)}, metadata={"structure": structure, "devices": '["cpu"]'})
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="continues as a new client"):
        site = Site(write_recipe(tmp_path, SMALL), 0, file)
    assert site.last_broadcast == -1
    assert not (tmp_path / "marker").exists()


@pytest.mark.slow
def test_a_study_has_the_seed_with_which_it_began(tmp_path):
    recipe = write_recipe(tmp_path, SMALL)
    Site(recipe, 0, tmp_path / "study.safetensors", seed=3).join()
    Site(recipe, 0, tmp_path / "study.safetensors", seed=3).join()
    with pytest.raises(MisconfigurationException, match="seed=3"):
        Site(recipe, 0, tmp_path / "study.safetensors", seed=4)


@pytest.mark.slow
def test_rounds_cohort_and_seed_travel_beside_the_recipe(tmp_path):
    recipe = write_recipe(tmp_path, SMALL)
    files = [approve(tmp_path / f"site{client}", recipe, "max_rounds: 3\nmin_clients: 2\n") for client in range(3)]
    config = {"node_config": lambda client: {"policy": files[client]}, "min_sites": 2}
    served, _ = run_on_sites(recipe, tmp_path, rounds=3, cohort=2, seed=8, **config)
    same, _ = run_on_sites(
        write_recipe(
            tmp_path,
            merged(SMALL, {"seed_everything": 8, "federated": {"clients_per_round": 2}, "trainer": {"max_epochs": 3}}),
            "same.yaml",
        ),
        tmp_path / "same",
        min_sites=2,
    )
    assert served.current_epoch == same.current_epoch == 3
    for name, value in same.lightning_module.state_dict().items():
        assert torch.equal(served.lightning_module.state_dict()[name], value)
    with pytest.raises(MisconfigurationException, match="PolicyViolation"):
        run_on_sites(recipe, tmp_path / "long", rounds=4, cohort=2, **config)
    with pytest.raises(MisconfigurationException, match="cohort"):
        run_on_sites(recipe, tmp_path, cohort=2.5, **config)


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def write_npz(file, evil):
    with file.open("wb") as opened:
        np.savez(opened, x=np.array([evil], dtype=object), y=np.zeros(1, dtype=np.int64))


def write_npy(file, evil):
    with file.open("wb") as opened:
        np.save(opened, np.array([evil], dtype=object))


def write_pickle(file, evil):
    file.write_bytes(pickle.dumps(evil))


def write_torch(file, evil):
    torch.save(evil, file)


DATA_FILES = {
    "arrays of objects": ("data.npz", write_npz, lambda file: Arrays(train=file).setup("fit")),
    "indices in npz": ("data.npz", write_npz, FromIndices),
    "indices in a pickle": ("data.json", write_pickle, FromIndices),
    "indices of torch's": ("data.pt", write_torch, FromIndices),
    "owners of objects": ("data.npy", write_npy, FromIndices),
    "texts in a pickle": ("train.csv", write_pickle, lambda file: read_texts(Path(file))),
}


def read_texts(file):
    tokenizer = texts.save_tokenizer(file.parent / "tiny")
    TextClassification(str(file.parent), tokenizer=str(tokenizer), train=file.name).setup("fit")


@pytest.mark.parametrize("name", DATA_FILES)
def test_a_data_file_with_a_pickle_runs_nothing(tmp_path, name):
    file_name, write, read = DATA_FILES[name]
    file = tmp_path / file_name
    write(file, Touches(tmp_path / "marker"))
    with pytest.raises((MisconfigurationException, ValueError, TypeError)):
        read(str(file))
    assert not (tmp_path / "marker").exists()


def with_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def pickled(folder, marker):
    (folder / "adapter_model.safetensors").unlink()
    torch.save(Touches(marker), folder / "adapter_model.bin")


def pickled_under_the_others_name(folder, marker):
    (folder / "adapter_model.safetensors").write_bytes(pickle.dumps(Touches(marker)))


def of_a_module(folder, marker):
    Path("evil_adapter.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    with_config(folder, auto_mapping={"base_model_class": "Evil", "parent_library": "evil_adapter"}, peft_type="EVIL")


def of_exabytes(folder, marker):
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 8 + b"{}")


def nested_without_end(folder, marker):
    (folder / "adapter_config.json").write_text("[" * 10**5)


@pytest.mark.parametrize(
    "change", [pickled, pickled_under_the_others_name, of_a_module, of_exabytes, nested_without_end]
)
def test_an_adapter_runs_nothing(tmp_path, monkeypatch, change):
    monkeypatch.syspath_prepend(tmp_path)
    networks = [nn.Sequential(nn.Linear(6, 8), nn.ReLU()) for _ in range(2)]
    convert(networks[0], MatrixProduct(), rank=2, alpha=4)
    folder = tmp_path / "adapter"
    export_adapter(networks[0], folder)
    change(folder, tmp_path / "marker")
    with pytest.raises(MisconfigurationException):
        import_adapter(folder, networks[1])
    assert not (tmp_path / "marker").exists()
