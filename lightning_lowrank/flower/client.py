"""The ``ClientApp`` of a recipe, which passes Flower's messages to the `Site` of their study and client."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.compression import DecodingError, Dense
from lightning_lowrank.files import private_files
from lightning_lowrank.flower.approval import read_site_values, state_folder
from lightning_lowrank.flower.audit import AuditLog
from lightning_lowrank.flower.messages import JOIN, LISTEN, TRAIN, Fields, field_of, pack, unpack
from lightning_lowrank.flower.policy import Policy, PolicyViolation
from lightning_lowrank.flower.secure import read_request, write_answer
from lightning_lowrank.flower.site import Site
from lightning_lowrank.internals.flower import configuration_of, error_reply, is_secure, secaggplus_mod

__all__ = ["client_app"]

_NO_POLICY = (
    "this site has no policy: it runs whatever recipe the server sends. --node-config 'policy=\"FILE\"' ends that."
)
_LOST = "client {} has lost its state of earlier rounds, and continues as a new one."


def client_app(recipe: str | Path) -> ClientApp:
    """Build the ``ClientApp`` of a recipe.

    The site's own settings are given when its SuperNode is started, as in
    ``flower-supernode --node-config 'partition-id=0 own-data=true data-root="/data"'``:

    - ``partition-id`` (needed): number of the site's client, from 0.
    - ``num-partitions``: number of clients, which is then compared with the recipe's.
    - ``own-data``: whether the recipe's data set, as read here, is this site's alone. Default false: every site has the
      whole data set, and uses its client's part of the recipe's partition.
    - ``site``: a YAML file of this site's values: a value for each name that the recipe leaves to sites, such as
      ``train: patients.csv``, entries of the trainer such as ``accelerator: gpu``, and ``rank``, the rank of the site's
      client for methods of clients of different rank.
    - ``data-root``: the folder that contains all files and folders of ``site``; ``root`` is this folder by default.
    - ``state-dir``: folder of the site's state, by default ``$FLWR_HOME/lightning_lowrank``. It has a file for each
      study and client, for a restarted site and for a study that continues in another run of Flower. A site whose file
      is missing or damaged continues as a new client, and both site and server say so.
    - ``policy``: the file of the site's `Policy`, YAML or TOML. It is read before each message. Next to it is the
      folder of the recipes that the site has approved; it runs no others. Without a policy the site runs any recipe.
    - ``audit-log``: the site's audit log, by default ``audit_client_<partition-id>.jsonl`` in ``state-dir``. It gets a
      line of JSON for each message that was received, sent or refused.

    The server receives the class of an error at this site, and the identifier of the log's entry with its text.

    Args:
        recipe: The recipe's file.
    """
    sites: dict[tuple[str, int, int, int], Site] = {}
    last: Site | None = None

    def guard(message: Message, context: Context, answer: ClientAppCallable) -> Message:
        """Answer a message within the site's policy, and record message and answer in the audit log."""
        nonlocal last
        last, config, most = None, context.node_config, None
        about = {"kind": message.metadata.message_type, "run": str(context.run_id)}
        default = state_folder(config) / f"audit_client_{config.get('partition-id', 'unknown')}.jsonl"
        log = AuditLog(Path(str(config.get("audit-log", default))).expanduser())
        with private_files():
            try:
                received, entry = _measured(message)
                log.append(direction="received", **about, **entry)
                policy = _policy_of(context)
                most = policy.max_upload
                policy.check_download(received)
                if is_secure(message.content):
                    policy.check_protocol(configuration_of(message.content))
                reply = answer(message, context)
                sent, entry = _measured(reply)
                policy.check_upload(sent)
                log.append(direction="sent", **about, **entry, epsilon=None if last is None else last.epsilon)
                return reply
            except Exception as error:
                logging.getLogger(__name__).exception("this site did not do what a message asks for")
                explanation = f"{type(error).__name__[:40]}: this site did not do it, and its log cannot be written"
                with contextlib.suppress(OSError):
                    direction = "refused" if isinstance(error, PolicyViolation) else "failed"
                    identifier = log.append(direction=direction, **about, reason=str(error))
                    explanation = f"{explanation.partition(',')[0]}, and entry {identifier} of its log says why"[:most]
                    entry = {
                        "bytes": len(explanation.encode()),
                        "digest": hashlib.sha256(explanation.encode()).hexdigest(),
                    }
                    log.append(direction="sent", **about, **entry)
                return error_reply(message, explanation[:most])

    app = ClientApp(mods=[guard])

    def site_of(fields: Fields, context: Context) -> Site:
        config = context.node_config
        client = config.get("partition-id")
        if type(client) is not int:
            raise MisconfigurationException(
                "this site has no client number: start its SuperNode with --node-config 'partition-id=0' or"
                f" the like, got {dict(config)}."
            )
        study = field_of(fields, "study", str)
        if not re.fullmatch("[0-9a-f]{16}", study):
            raise DecodingError(f"the study's name is {study[:40]!r}, and should be 16 hexadecimal digits.")
        policy = _policy_of(context)
        policy.check_request(fields)
        seed, rounds = field_of(fields, "seed", int), field_of(fields, "rounds", int)
        key = study, client, seed, rounds
        if key not in sites:
            sites[key] = Site(
                recipe,
                client,
                state_folder(config) / f"study_{study}_client_{client}.safetensors",
                clients=_setting(config, "num-partitions", int),
                own_data=_setting(config, "own-data", bool) or False,
                data_root=_setting(config, "data-root", str),
                policy=policy,
                site_values=read_site_values(_setting(config, "site", str)),
                seed=None if seed < 0 else seed,
                rounds=rounds,
            )
        nonlocal last
        last = sites[key]
        last.policy = policy
        return last

    @app.query(JOIN.split(".")[1])
    def join(message: Message, context: Context) -> Message:
        fields, _ = unpack(message)
        if "policy" not in context.node_config:
            rank_zero_warn(_NO_POLICY)
        return Message(pack(site_of(fields, context).join()), reply_to=message)

    @app.query(LISTEN.split(".")[1])
    def listen(message: Message, context: Context) -> Message:
        fields, broadcasts = unpack(message)
        site = site_of(fields, context)
        if site.last_broadcast < field_of(fields, "last_broadcast", int):
            return Message(pack({"lost": True, "last_broadcast": site.last_broadcast}), reply_to=message)
        site.listen(broadcasts)
        return Message(pack({}), reply_to=message)

    @app.train(TRAIN.split(".")[1])
    def train(message: Message, context: Context) -> Message:
        fields, broadcasts = unpack(message)
        _policy_of(context).check_plain()
        number, options = field_of(fields, "round", int), field_of(fields, "options", str)
        site = site_of(fields, context)
        # The site lacks broadcasts that it once received: its state file is missing, or an older one.
        if site.last_broadcast < field_of(fields, "last_broadcast", int):
            return Message(
                pack({"round": number, "lost": True, "last_broadcast": site.last_broadcast}), reply_to=message
            )
        if field_of(fields, "lost", bool):
            rank_zero_warn(_LOST.format(site.client))
        upload = site.train(number, broadcasts, options)
        return Message(pack({"round": number}, {number: upload} if upload else None), reply_to=message)

    if secaggplus_mod is not None:

        @app.train(mods=[_repeatable, secaggplus_mod])
        def train_for_sum(message: Message, context: Context) -> Message:
            fields, broadcasts = read_request(message)
            number, options = field_of(fields, "round", int), field_of(fields, "options", str)
            site = site_of(fields, context)
            # An error, because Flower's mod sends only numbers; the server asks failed sites whether they lost their
            # state.
            if site.last_broadcast < field_of(fields, "last_broadcast", int):
                raise MisconfigurationException(f"client {site.client} has lost its state of earlier rounds.")
            if field_of(fields, "lost", bool):
                rank_zero_warn(_LOST.format(site.client))
            changes = Dense().decode(site.train(number, broadcasts, options, secure=True))
            return write_answer(message, context, changes, field_of(fields, "weight", int))

    return app


def _repeatable(message: Message, context: Context, answer: ClientAppCallable) -> Message:
    """Seed NumPy's generator, by which Flower's mod rounds numbers but draws no keys, and restore it afterwards."""
    state = np.random.get_state()
    np.random.seed(zlib.crc32(message.metadata.message_type.encode()))
    try:
        return answer(message, context)
    finally:
        np.random.set_state(state)


def _setting(config: Mapping[str, Any], name: str, kind: type) -> Any:
    """An entry of the site's configuration; ``None`` if it is missing.

    Raises:
        MisconfigurationException: If it is of another type, such as the text "false".
    """
    value = config.get(name)
    if value is not None and type(value) is not kind:
        written = {int: "3", bool: "true", str: '"/data"'}[kind]
        raise MisconfigurationException(
            f"{name} of this site's --node-config must be written like {name}={written}, got {value!r}."
        )
    return value


def _policy_of(context: Context) -> Policy:
    file = context.node_config.get("policy")
    return Policy() if file is None else Policy.load(str(file))


def _measured(message: Message) -> tuple[int, dict[str, Any]]:
    """The size of a message's content in bytes, and its description for the audit log."""
    content: RecordDict = message.content
    digest, nbytes, number = hashlib.sha256(), 0, None
    for name, record in sorted(content.items()):
        if isinstance(record, ArrayRecord):
            for key, array in sorted(record.items()):
                digest.update(json.dumps([name, key, array.dtype, list(array.shape), array.stype]).encode())
                digest.update(array.data)
                nbytes += len(array.data)
            continue
        plain = json.dumps([name, dict(record)], sort_keys=True, default=bytes.hex).encode()
        digest.update(plain)
        values = [each for value in record.values() for each in (value if isinstance(value, list) else [value])]
        # Bytes, such as masked numbers of a secure sum, are sent as they are: their text has twice their length.
        nbytes += len(plain) - sum(len(value) for value in values if isinstance(value, bytes))
        found = record.get("round")
        number = found if type(found) is int else number
    return nbytes, {"round": number, "bytes": nbytes, "digest": digest.hexdigest()}
