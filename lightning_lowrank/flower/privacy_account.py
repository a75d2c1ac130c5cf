"""A site's privacy account: the steps spent on its samples, over all studies that it takes part in.

`Site` charges each private round here before it trains, and a round that fails stays counted, since servers can have
rounds fail. Servers name studies and sites keep a state for each, so that only a file of no study counts all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated.privacy.accounting import Accountant, Mechanism, total_epsilon
from lightning_lowrank.files import private_folder, replacing, without_link

__all__ = ["PrivacyAccount"]

_NUMBERS = {"noise_multiplier": float, "sampled": int, "population": int, "steps": int}


class PrivacyAccount:
    """A client's private steps so far, in a file.

    Args:
        file: The file; it need not exist yet, but `check` raises without it.

    Example:
        >>> import tempfile
        >>> account = PrivacyAccount(Path(tempfile.mkdtemp()) / "privacy.json")
        >>> mechanism = Mechanism(noise_multiplier=1.1, sampled=10, population=1000)
        >>> account.charge(mechanism, 100)
        >>> round(account.epsilon(1e-5), 3)
        0.956
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def epsilon(self, delta: float, accountant: Accountant = "rdp", more: tuple[Mechanism, int] | None = None) -> float:
        """ε at ``delta`` after all steps so far and the further steps ``more``.

        Raises:
            MisconfigurationException: If the file cannot be read.
        """
        return total_epsilon([*self._read().items(), *([] if more is None else [more])], delta, accountant)

    def charge(self, mechanism: Mechanism, steps: int) -> None:
        """Add steps to the account, 0 or more."""
        spent = self._read()
        spent[mechanism] = spent.get(mechanism, 0) + steps
        self._write(spent)

    def check(self) -> None:
        """Raise if the file cannot be read.

        Raises:
            MisconfigurationException: If the file is missing or damaged.
        """
        if not self._file.exists():
            raise MisconfigurationException(
                f"{self._file}, by which this site counts what its samples have cost, does not exist: restore it from"
                " a backup. `lightning-lowrank flower approve --new-account` begins one for samples that no study has"
                " used."
            )
        self._read()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the account against other processes of this site."""
        private_folder(self._file.parent)
        without_link(self._file)
        with FileLock(f"{self._file}.lock", mode=0o600):
            yield

    def _read(self) -> dict[Mechanism, int]:
        if not self._file.exists():
            return {}
        try:
            spent = {}
            for entry in json.loads(self._file.read_text(encoding="utf-8")):
                values = {name: kind(entry[name]) for name, kind in _NUMBERS.items()}
                steps = values.pop("steps")
                spent[Mechanism(**values)] = steps
            return spent
        except Exception as error:  # a file that was cut or changed fails in any way
            raise MisconfigurationException(
                f"{self._file}, by which this site counts what its samples have cost, cannot be read ({error!r}):"
                " restore it from a backup. Without it the site would count from 0."
            ) from error

    def _write(self, spent: dict[Mechanism, int]) -> None:
        entries = [
            {**{name: getattr(mechanism, name) for name in _NUMBERS if name != "steps"}, "steps": steps}
            for mechanism, steps in spent.items()
            if steps > 0
        ]
        with replacing(self._file) as part:
            part.write_text(json.dumps(entries, indent=1), encoding="utf-8")
