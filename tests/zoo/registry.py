"""The zoo's exhibits: LightningModules as people write them, each with the loader that it is trained on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import lightning.pytorch as pl
from torch.utils.data import DataLoader

__all__ = ["GALLERIES", "Exhibit", "Gallery", "MissingExtra", "load", "load_all"]

GALLERIES = (
    "images_timm",
    "images_torchvision",
    "language",
    "graphs",
    "generative",
    "self_supervised",
    "forecasting",
    "applications",
    "layers",
    "steps",
)
"""Names of the files beside this one that hold exhibits, in the order of the table."""

SIZES = (10, 7, 6)
"""Numbers of samples of the three clients: in batches of four, three steps for one of them and two for the others."""

Made = tuple[pl.LightningModule, DataLoader]


class MissingExtra(RuntimeError):
    """A package is not installed that some exhibits are made of."""


@dataclass(frozen=True)
class Exhibit:
    """A module of the zoo.

    Args:
        name: Its name in the table.
        kind: What the table groups it under.
        about: What is particular about it, in a few words.
        make: Makes a new module and its training loader. Under one seed every call makes the same.
        sizes: Number of samples of each client.
        double: Whether it computes in float64. Otherwise it is compared in float32.
        ema: Patterns of its parameters for ``FederatedLoop(ema_parameters=...)``.
        warned: A word of the warning by which the package says that such a module trains otherwise in rounds. With it a
            difference is no fault.
        own_loss: Why its loss after training is not that of a module with the recovered weights, such as what it keeps
            outside of its tensors; empty: it is.
    """

    name: str
    kind: str
    about: str
    make: Callable[[], Made]
    sizes: tuple[int, ...] = SIZES
    double: bool = True
    warned: str = ""
    ema: tuple[str, ...] = ()
    own_loss: str = ""


class Gallery(list[Exhibit]):
    """The exhibits of one file.

    Args:
        kind: What the table groups them under.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def exhibit(
        self,
        name: str,
        about: str,
        *,
        sizes: tuple[int, ...] = SIZES,
        double: bool = True,
        warned: str = "",
        ema: tuple[str, ...] = (),
        own_loss: str = "",
    ) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
        """Return a decorator that adds what makes a module and its loader."""

        def add(make: Callable[[], Made]) -> Callable[[], Made]:
            self.append(Exhibit(name, self.kind, about, make, sizes, double, warned, ema, own_loss))
            return make

        return add


def load(name: str) -> Gallery:
    """Return the exhibits of one of `GALLERIES`.

    Raises:
        MissingExtra: If a package that it needs is not installed; it says how to install it.
    """
    try:
        return importlib.import_module(f"tests.zoo.{name}").gallery
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tests"):
            raise
        raise MissingExtra(
            f"tests/zoo/{name}.py needs the package {error.name!r}, which is not installed: pip install -e '.[zoo]'"
        ) from error


def load_all(names: Iterable[str] = GALLERIES) -> list[Exhibit]:
    """Return the exhibits of several galleries, in order.

    Raises:
        MissingExtra: If a package that they need is not installed.
        ValueError: If two exhibits have one name.
    """
    exhibits = [exhibit for name in names for exhibit in load(name)]
    if len({exhibit.name for exhibit in exhibits}) < len(exhibits):
        raise ValueError("two exhibits of the zoo have the same name")
    return exhibits
