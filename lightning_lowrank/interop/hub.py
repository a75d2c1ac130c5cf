"""`push_adapter` and `pull_adapter`: adapter folders on the Hugging Face hub, or another server of its API.

They are for sharing a run's adapter, from Python or by ``lightning-lowrank push``.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_lowrank.arguments import printable
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.extras import import_extra
from lightning_lowrank.files import replacing
from lightning_lowrank.interop.peft_layout import CONFIG_FILE, WEIGHTS_FILE, check_folder

CARD_FILE = "README.md"
_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
_MARK = "<!-- written by lightning_lowrank {} -->"
# The form of names on the hub; anything else, such as a path, is not linked as a base model.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def push_adapter(
    folder: str | Path,
    repository: str,
    *,
    figures: Mapping[str, str | float] | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Upload an adapter folder with a model card, in one commit.

    The card (``README.md``) names the base model, the adapter's rank and target modules, and the figures. Without
    figures, an existing ``README.md`` is uploaded as it is. With figures, a card that this function wrote is replaced.

    Args:
        folder: A folder that `export_adapter` wrote: ``adapter_config.json`` and ``adapter_model.safetensors``. Other
            files are not uploaded.
        repository: Name on the hub, ``user/name``; made if needed.
        figures: The run's figures for the card, by name, such as ``{"val_acc": 0.85}``.
        private: Whether a repository that is made is private. ``None``: the user's or organisation's default.
        revision: The branch to commit to. Default: the main one.
        token: An access token. ``None``: the one that ``hf auth login`` has kept.
        endpoint: The server's address. ``None``: that of the hub, or of ``HF_ENDPOINT``.

    Returns:
        The address of the commit.

    Raises:
        MisconfigurationException: If the folder holds no adapter, ``figures`` are given and its ``README.md`` is not as
            this function wrote it, or huggingface_hub is not installed.
        huggingface_hub.errors.HfHubHTTPError: If the server refuses it.
    """
    hub = import_extra("huggingface_hub", "push_adapter")
    folder = Path(folder)
    check_folder(folder, "export_adapter(module, folder) writes one")
    config = _config_of(folder)
    card = folder / CARD_FILE
    if figures or not card.exists():
        if card.exists() and not _is_own(card):
            raise misconfigured(
                f"figures={figures!r} would replace {card}, which push_adapter has not written, or somebody has changed"
                " since: write the figures into it and leave `figures` (--run) out, or move the file away."
            )
        with replacing(card) as part:
            part.write_text(model_card(repository, config, figures or {}), encoding="utf-8")
    api = hub.HfApi(endpoint=endpoint, token=token)
    name = api.create_repo(repository, private=private, exist_ok=True).repo_id
    done = api.upload_folder(
        repo_id=name,
        folder_path=folder,
        allow_patterns=list(_FILES),
        revision=revision,
        commit_message="Upload adapter with lightning_lowrank",
    )
    return str(done.commit_url)


def pull_adapter(
    repository: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """Download an adapter folder, for `import_adapter` or PEFT. Pickles in the repository are not downloaded.

    Args:
        repository: Name on the hub, ``user/name``.
        folder: Where to put it; made if needed. Files of the same names are replaced once all are downloaded.
        revision: A branch, tag or commit. Default: the main branch.
        token: As for `push_adapter`.
        endpoint: As for `push_adapter`.

    Returns:
        The folder.

    Raises:
        MisconfigurationException: If the repository holds no adapter in safetensors, or huggingface_hub is not
            installed.
        huggingface_hub.errors.HfHubHTTPError: If there is no such repository, or no access to it.
    """
    hub = import_extra("huggingface_hub", "pull_adapter")
    folder = Path(folder)
    check_folder(folder)
    found = Path(
        hub.snapshot_download(
            repository, revision=revision, token=token, endpoint=endpoint, allow_patterns=list(_FILES)
        )
    )
    _config_of(found, repository)
    folder.mkdir(parents=True, exist_ok=True)
    # A folder without configuration is refused, so that new weights are never read with an old configuration.
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    for name in (WEIGHTS_FILE, CARD_FILE, CONFIG_FILE):
        if (found / name).is_file():
            shutil.copyfile(found / name, folder / name)
    return folder


def _config_of(folder: Path, where: str | None = None) -> dict[str, Any]:
    """The configuration of an adapter folder; ``where`` names the folder in messages."""
    place = where or str(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise misconfigured(f"{place} holds no adapter: it has no {name}, as export_adapter writes it.")
    try:
        found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise misconfigured(f"{place} holds no adapter: {CONFIG_FILE} is no JSON ({error}).") from error
    if not isinstance(found, dict):
        raise misconfigured(f"{place} holds no adapter: {CONFIG_FILE} is no JSON object.")
    return found


def model_card(name: str, config: Mapping[str, Any], figures: Mapping[str, str | float]) -> str:
    """The text of a model card: Markdown with the hub's metadata at the top.

    Example:
        >>> card = model_card("me/mood", {"peft_type": "LORA", "r": 8}, {"val_acc": 0.85})
        >>> print(card[card.index("# mood"):])
        # mood
        <BLANKLINE>
        An adapter for PEFT, trained with lightning_lowrank.
        <BLANKLINE>
        | | |
        |---|---|
        | method | LORA |
        | rank | 8 |
        | val_acc | 0.85 |
        <BLANKLINE>
        <!-- written by lightning_lowrank ... -->
        <BLANKLINE>
    """
    from huggingface_hub import ModelCardData

    base = config.get("base_model_name_or_path")
    named = isinstance(base, str) and _HUB_NAME.fullmatch(base) and base[0] != "." and not Path(base).exists()
    about = ModelCardData(
        base_model=base if named else None,
        library_name="peft",
        tags=["lightning_lowrank", "federated-learning", printable(str(config.get("peft_type", "lora"))).lower()],
    )
    targets = config.get("target_modules")
    rows: dict[str, Any] = {
        "base model": base,
        "method": config.get("peft_type"),
        "rank": _over_layers(config, "r", "rank_pattern"),
        "alpha": _over_layers(config, "lora_alpha", "alpha_pattern"),
        "target modules": ", ".join(sorted(map(str, targets))) if isinstance(targets, list) else targets,
        **figures,
    }
    lines = [
        f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items() if value not in (None, "") and value != {}
    ]
    title = f"# {_cell(name.rpartition('/')[2])}\n\nAn adapter for PEFT, trained with lightning_lowrank."
    text = "\n".join([f"---\n{about.to_yaml()}\n---\n\n{title}\n\n| | |\n|---|---|", *lines, ""])
    return f"{text}\n{_mark(text)}\n"


def _mark(text: str) -> str:
    """The last line of a card, by which `push_adapter` recognises a card that it wrote and nobody changed."""
    return _MARK.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def _is_own(card: Path) -> bool:
    try:
        text, _, mark = card.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")
    except (OSError, ValueError):
        return False
    return mark == _mark(text)


def _over_layers(config: Mapping[str, Any], default: str, pattern: str) -> Any:
    """A number of an adapter; a range as text if its layers differ."""
    own = config.get(pattern)
    values = [config.get(default), *(own.values() if isinstance(own, Mapping) else ())]
    numbers = [each for each in values if isinstance(each, (int, float))]
    if not numbers or min(numbers) == max(numbers):
        return numbers[0] if numbers else values[0]
    return f"{min(numbers):g} to {max(numbers):g}"


def _cell(value: object) -> str:
    """A value escaped for a Markdown table cell, so that it contains no working tag or link."""
    text = " ".join((f"{value:g}" if isinstance(value, float) else str(value)).split())
    return re.sub(r"([\\`|\[\]])", r"\\\1", html.escape(printable(text), quote=False))
