"""What a hostile server may send in place of the recipe that a site has approved.

Each recipe tries to leave a marker file, to read a secret, or to change what the site keeps, when it is read or built.
The files beside it are those of the server's app, on the path of modules; ``evil.py`` leaves the marker.

On 49ac3b5, under the policy that its page recommended, these succeeded: torch's own starter of processes, a file that a
file names, all three addresses and a checkpoint's class left the marker; a file's and a page's text stood in the error;
the account was moved; aliases of a billion parts filled the memory; a large recipe was read. Others failed there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.flower.helpers import BASE, merged, method


def hostile_recipes(folder: Path, marker: Path, secret: Path, address: str, write: bool = True) -> dict[str, bytes]:
    """Return recipes by name; their further files are written to ``folder``.

    Args:
        write: Whether the files are written; for the names alone they need not be.
        folder: Where the server's app lies.
        marker: A file that none may make.
        secret: A text that none may read.
        address: Of an HTTP server within the site's network, with a page that none may read.
    """
    touch = ["touch", str(marker)]
    command = f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
    popen = {"class_path": "lightning_lowrank.run_metadata.subprocess.Popen", "dict_kwargs": {"args": touch}}
    images = {"class_path": "HuggingFaceImages", "init_args": {"dataset": popen}}
    evil = {"class_path": "evil.Evil"}
    handler = method(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        entrypoint="touch",
        args=[str(marker)],
        env={},
        stdout=None,
        stderr=None,
        local_rank_id=0,
    )
    graph = method("torch.fx.graph_module.reduce_graph_module", body={"_code": command}, import_block=command)
    if write:
        inner = folder / "parts"
        inner.mkdir(parents=True, exist_ok=True)
        (inner / "callbacks.yaml").write_text(yaml.safe_dump([evil]))
        (inner / "trainer.yaml").write_text("callbacks: callbacks.yaml\n")
        (folder / "data.yaml").write_text(yaml.safe_dump(evil))
        (folder / "evil.py").write_text(f"{command}\n\nclass Evil:\n    pass\n")
        hyper_parameters = {"hyper_parameters": {"_class_path": "evil.Evil"}, "state_dict": {}}
        torch.save({**hyper_parameters, "pytorch-lightning_version": "2.6.0"}, folder / "evil.ckpt")
        torch.save(_Touches(str(marker)), folder / "pickle.pt")
    nested = BASE["model"]["init_args"]["network"]

    def changed(**sections: Any) -> bytes:
        return yaml.safe_dump(merged(BASE, sections)).encode()

    def with_network(network: Any) -> bytes:
        return changed(model={"init_args": {"network": network}})

    aliases = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    whole = yaml.safe_dump(BASE)
    return {
        # Code.
        "a module that a permitted one imports": changed(data=images),
        "torch's own starter of processes": changed(data=merged(images, {"init_args": {"dataset": handler}})),
        "torch's own runner of code": changed(data=merged(images, {"init_args": {"dataset": graph}})),
        "a network of the app's": with_network(evil),
        "a file that a file names": changed(trainer="parts/trainer.yaml"),
        "an fsspec address": changed(data=f"simplecache::file://{folder}/data.yaml"),
        "a file's address": changed(data=f"file://{folder}/data.yaml"),
        "an address": changed(data=f"{address}/data.yaml"),
        "a checkpoint's class": changed(ckpt_path=str(folder / "evil.ckpt")),
        "a pickle": with_network(method("torch.load", f=str(folder / "pickle.pt"), weights_only=False)),
        # Files.
        "a file in an error": changed(trainer={"callbacks": str(secret)}),
        "a page in an error": changed(trainer={"callbacks": f"{address}/secret"}),
        "a file beside the data": changed(data={"class_path": "Arrays", "init_args": {"train": f"../{secret.name}"}}),
        # State.
        "the site's own account as a study": changed(
            data=merged(
                images,
                {
                    "init_args": {
                        "dataset": method(
                            "lightning_lowrank.flower.Site",
                            recipe="recipe.yaml",
                            client=0,
                            state="state/privacy_client_0.json",
                        )
                    }
                },
            )
        ),
        # What a reader may stumble over.
        "a tag": f"{whole}evil: !!python/object/apply:os.system ['touch {marker}']\n".encode(),
        "aliases of a billion parts": "\n".join(aliases).encode(),
        "a key twice": f"{whole}data: {json.dumps(evil)}\n".encode(),
        "a deep one": b"[" * 100_000,
        "a large one": whole.encode() + b"#" * 2**23,
        "no text": b"\xff\xfe\x00" + whole.encode("utf-16"),
        "one more space": whole.replace("seed_everything: 3", "seed_everything:  3").encode(),
        "one other digit": whole.replace("seed_everything: 3", "seed_everything: 4").encode(),
        "a callback": changed(trainer={"callbacks": [evil]}),
        "a plugin": changed(trainer={"plugins": [evil]}),
        "a logger": changed(trainer={"logger": evil}),
        "another network": with_network(merged(nested, {"init_args": {"hidden": [8]}})),
    }


class _Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)
