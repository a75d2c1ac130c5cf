"""`HuggingFaceImages`: a datamodule for image datasets of Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor

from lightning_lowrank.arguments import join_names
from lightning_lowrank.data.images import TensorImages
from lightning_lowrank.data.own_images import OwnImages, Pictures, choose_splits
from lightning_lowrank.data.tables import check_stored, load_splits, split_of
from lightning_lowrank.extras import import_extra
from lightning_lowrank.federated.data.columns import is_blank

_LABELS = ("label", "labels", "target")


class HuggingFaceImages(OwnImages):
    """Images of a data set of Hugging Face `datasets`, with a column of images and a column of classes.

    Labels are a ``ClassLabel``, whose names are the ``classes``, or integers, strings or booleans, whose different
    values in the training split are the classes, in ascending order. Needs the extra ``datasets``.

    ``ByKey("writer")`` finds clients in any other column.

    Args:
        dataset: Name of a data set on the Hugging Face hub, or a local folder of files or of ``save_to_disk``; a list
            of the name and its configuration; or the data set itself: a `datasets.DatasetDict`, or a
            `datasets.Dataset`, which is the split ``train``. Formats are not applied.
        image: Name of the column of images. ``None``: the only one that there is.
        label: Name of the column of classes. ``None``: the only ``ClassLabel``, or else ``label``, ``labels`` or
            ``target``.
        train: Name of the split to train on.
        test: Name of the split to test on. ``None``: the first of ``test``, ``testing``, ``val``, ``valid`` and
            ``validation`` that exists and that ``validation`` does not name; or else ``test_share`` of the training
            images is held out.
        validation: ``"test"``: validation on the test images. Or the share of the training images that is held out, or
            the name of a split. ``None``: ``val``, ``valid`` or ``validation`` if there is another split to test on,
            or else ``"test"``.
        root: Folder in which downloads are kept. ``None``: that of `datasets`.
        **kwargs: Arguments of `OwnImages`: ``size``, ``channels``, ``test_share``, ``mean``, ``std``, ``memory_limit``,
            ``mirror``; and of `VisionDataModule`: ``batch_size``, ``eval_batch_size``, ``num_workers``, ``augment``,
            ``limit_samples``, ``seed``, ``normalize``.

    Raises:
        MisconfigurationException: If an argument is out of range or `datasets` is not installed; if the data set cannot
            be loaded, a split or column is missing or holds something else, a label is missing, or the test images have
            classes that the training images do not have (at once, or for a name when the data are prepared); and, when
            images are read, if one cannot be, or they differ in size and ``size`` is not given.

    Example:
        >>> import datasets
        >>> columns = {"image": [Image.new("L", (28, 28), shade) for shade in range(10)], "label": ["cat", "dog"] * 5}
        >>> data = HuggingFaceImages(datasets.Dataset.from_dict(columns), channels=1, test_share=0.2)
        >>> data.setup()
        >>> data.classes, data.image_shape, len(data.train_set), len(data.test_set)
        (['cat', 'dog'], (1, 28, 28), 8, 2)
    """

    def __init__(
        self,
        dataset: Any,
        image: str | None = None,
        label: str | None = None,
        train: str = "train",
        test: str | None = None,
        validation: float | str | None = None,
        root: str | None = None,
        **kwargs: Any,
    ) -> None:
        named = validation is None or isinstance(validation, str)
        super().__init__(validation="test" if named else validation, **kwargs)
        # The splits' names are unknown until the data set is loaded.
        self.validation, self._validation = "test" if validation is None else validation, validation
        self.dataset, self.image, self.label, self.root = dataset, image, label, root
        self.train, self.test = train, test
        self._columns = image, label
        self._datasets = import_extra("datasets", type(self).__name__)
        self._found: tuple[_Rows, _Rows | None, _Rows | None] | None = None
        names = dataset if isinstance(dataset, (list, tuple)) else [dataset]
        if not all(isinstance(name, str) for name in names):
            self.find_splits()

    def prepare_data(self) -> None:
        """Download the data set, if it is not in the cache."""
        self.find_splits()

    def find_splits(self) -> tuple[Pictures, Pictures | None, Pictures | None]:
        """Load the data set and read its labels; images are not decoded."""
        if self._found is None:
            splits = load_splits(self.dataset, self.root, type(self).__name__)
            others = [name for name in splits if name != self.train]
            test, validation = choose_splits(others, self._validation, self.test)
            if self._validation is None:
                self.validation = validation or "test"
            self._found = (
                self._rows(splits, self.train, "train"),
                None if test is None else self._rows(splits, test, "test"),
                None if validation is None else self._rows(splits, validation, "validation"),
            )
        return self._found

    def _rows(self, splits: Mapping[str, Any], split: str, argument: str) -> _Rows:
        dataset, source = split_of(splits, split, argument), f"dataset[{split!r}]"
        check_stored(dataset, source)
        image, label = self._image_column(dataset.features, source), self._label_column(dataset.features, source)
        names = self._class_names(dataset, label, source)
        if argument == "train":
            # Fixed here, because the other splits must have the same columns and classes.
            self._columns = image, label
            kind, found = dataset.features[label], set(names)
            if isinstance(kind, self._datasets.ClassLabel):
                self.classes = kind.names
            else:
                self.classes = sorted(found, key=int if kind.dtype.lstrip("u").startswith("int") else None)
            vars(self)["num_classes"] = len(self.classes)
        numbers = {name: number for number, name in enumerate(self.classes)}
        unknown = sorted(set(names) - numbers.keys())
        if unknown:
            raise MisconfigurationException(
                f"{source} has classes in {label!r} that dataset[{self.train!r}] does not have: {join_names(unknown)}"
            )
        return _Rows(dataset, image, torch.tensor([numbers[name] for name in names]), source)

    def _image_column(self, features: Mapping[str, Any], source: str) -> str:
        image = self._columns[0]
        fitting = [name for name, kind in features.items() if isinstance(kind, self._datasets.Image)]
        if image is None and len(fitting) == 1:
            return fitting[0]
        advice = (
            f"image= may be {join_names(fitting, ' or ')}"
            if fitting
            else "dataset.cast_column(name, datasets.Image()) makes images of a column of paths or of files' bytes"
        )
        return _checked(image, fitting, features, f"{source} (image)", "images", advice)

    def _label_column(self, features: Mapping[str, Any], source: str) -> str:
        label = self._columns[1]
        fitting = [name for name, kind in features.items() if _may_label(getattr(kind, "dtype", None))]
        usual = [name for name, kind in features.items() if isinstance(kind, self._datasets.ClassLabel)]
        if len(usual) != 1:
            usual = [name for name in _LABELS if name in fitting][:1]
        if label is None and usual:
            return usual[0]
        advice = f"label= may be {join_names(fitting, ' or ')}" if fitting else "no column holds any"
        return _checked(label, fitting, features, f"{source} (label)", "classes, integers or strings", advice)

    def _class_names(self, dataset: Any, label: str, source: str) -> list[str]:
        values, kind = dataset.with_format(None)[label][:], dataset.features[label]
        named = isinstance(kind, self._datasets.ClassLabel)
        for row, value in enumerate(values):
            # Label -1 marks hidden labels on the hub.
            if value is None or is_blank(value) or (named and value < 0):
                raise MisconfigurationException(
                    f"{source}, row {row}: {label!r} has {value!r} in place of a label; name another split, or leave"
                    " such rows out by dataset.filter"
                )
        return kind.int2str(values) if named else [str(value) for value in values]


def _may_label(dtype: str | None) -> bool:
    return dtype in ("bool", "string", "large_string") or (dtype or "").lstrip("u").startswith("int")


def _checked(
    name: str | None, fitting: Sequence[str], features: Mapping[str, Any], source: str, what: str, advice: str
) -> str:
    if name is None:
        found = f"{len(fitting)} columns" if fitting else "no column"
        raise MisconfigurationException(
            f"{source} has {found} of {what}, and needs one, or an argument that names it: {advice}"
        )
    if name not in features:
        raise MisconfigurationException(
            f"{source} has no column {name!r}; it has {join_names(list(features))}; {advice}"
        )
    if name not in fitting:
        raise MisconfigurationException(f"{source}: the column {name!r} holds {features[name]}, not {what}: {advice}")
    return name


class _Rows(Pictures):
    """Rows of a `datasets.Dataset`, each with its class index."""

    def __init__(
        self, dataset: Any, image: str, targets: Tensor, source: str, rows: Sequence[int] | None = None
    ) -> None:
        self._dataset, self._image, self.targets, self._source = dataset, image, targets, source
        self._rows = range(len(dataset)) if rows is None else rows
        kind = dataset.features[image]
        # Also decodes a column that holds undecoded paths or bytes.
        self._images = dataset.with_format(None).select_columns([image]).cast_column(image, type(kind)(mode=kind.mode))

    def open(self, row: int) -> Image.Image:
        found = self._images[self._rows[row]][self._image]
        if found is None:
            raise OSError("it is missing")
        return found

    def place(self, row: int) -> str:
        return f"{self._source}, row {self._rows[row]}"

    def select(self, rows: Sequence[int]) -> _Rows:
        kept = [self._rows[row] for row in rows]
        return _Rows(self._dataset, self._image, self.targets[list(rows)], self._source, kept)

    def describe(self, images: TensorImages) -> None:
        images.columns = self._dataset.remove_columns([self._image]).select(self._rows)
