import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.data import Digits, VisionDataModule
from tests.data.helpers import all_samples


def test_digits_splits_are_disjoint_complete_and_stratified():
    data = Digits(seed=3)
    data.setup()
    sets = [data.train_set, data.validation_set, data.test_set]
    assert sum(len(dataset) for dataset in sets) == 1797
    shares = torch.stack([dataset.targets.bincount(minlength=10) / len(dataset) for dataset in sets])
    assert (shares - shares.mean(0)).abs().max() < 0.005
    assert len(data.test_set) == pytest.approx(0.2 * 1797, abs=5)
    assert len(data.validation_set) == pytest.approx(0.15 * 0.8 * 1797, abs=5)

    from sklearn.datasets import load_digits

    original = torch.from_numpy(load_digits().images).flatten(1)
    merged = torch.cat([dataset.images for dataset in sets]).flatten(1).double()
    assert torch.equal(original.unique(dim=0), merged.unique(dim=0))
    assert torch.equal(original.sum(0), merged.sum(0))


@pytest.mark.slow
def test_splits_depend_on_the_seed_and_nothing_else():
    first, second, other = Digits(seed=1), Digits(seed=1, batch_size=10), Digits(seed=2)
    for number, data in enumerate((first, second, other)):
        torch.manual_seed(number)
        data.setup()
    for name in ("train_set", "validation_set", "test_set"):
        assert torch.equal(getattr(first, name).images, getattr(second, name).images)
        assert not torch.equal(getattr(first, name).images, getattr(other, name).images)


def test_without_normalisation_pixels_are_from_0_to_1():
    data = Digits(normalize=False)
    data.setup()
    images = data.train_set.__getitems__(range(len(data.train_set))).images
    assert images.min() == 0
    assert images.max() == 1


def test_loaders_of_digits():
    data = Digits(batch_size=50, eval_batch_size=100, augment=True)
    data.setup()
    torch.manual_seed(0)
    train_batches = [targets for _, targets in data.train_dataloader()]
    assert {len(targets) for targets in train_batches[:-1]} == {50}
    assert not torch.equal(torch.cat(train_batches), data.train_set.targets)
    assert torch.equal(torch.cat(train_batches).bincount(), data.train_set.targets.bincount())
    for loader, dataset in (
        (data.val_dataloader(), data.validation_set),
        (data.test_dataloader(), data.test_set),
        (data.predict_dataloader(), data.test_set),
    ):
        images, targets = all_samples(loader)
        assert torch.equal(images, dataset.__getitems__(range(len(dataset))).images)
        assert torch.equal(targets, dataset.targets)
        assert loader.batch_size == 100
        assert not dataset.crop_padding
    assert data.train_set.crop_padding == 1
    assert not data.train_set.mirror


@pytest.mark.slow
def test_worker_processes_serve_the_same_batches():
    here, workers = Digits(eval_batch_size=100), Digits(eval_batch_size=100, num_workers=2)
    for data in (here, workers):
        data.setup("test")
    expected, found = all_samples(here.test_dataloader()), all_samples(workers.test_dataloader())
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])


class CountingDigits(Digits):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loaded = []

    def load_images(self, train):
        self.loaded.append(train)
        return super().load_images(train)


@pytest.mark.parametrize(
    ("validation", "stage", "loaded"),
    [
        ("test", "fit", {True, False}),
        ("test", "validate", {False}),
        ("test", "test", {False}),
        ("test", None, {True, False}),
        (0.1, "fit", {True}),
        (0.1, "validate", {True}),
        (0.1, "predict", {False}),
        (0.1, None, {True, False}),
    ],
)
def test_setup_loads_what_the_stage_reads_once(validation, stage, loaded):
    data = CountingDigits(validation=validation)
    for _ in range(2):
        data.setup(stage)
    assert sorted(data.loaded) == sorted(loaded)
    loaders = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"], "predict": ["predict"]}
    for name in loaders.get(stage, ["train", "val", "test", "predict"]):
        assert len(getattr(data, f"{name}_dataloader")()) > 0
    assert (data.validation_set is data.test_set) == (validation == "test")


def test_loader_before_setup_is_refused():
    with pytest.raises(MisconfigurationException, match=r"setup\('fit'\)"):
        Digits().train_dataloader()


@pytest.mark.slow
def test_limit_samples_keeps_a_random_part_of_each_split():
    whole, part, again = Digits(), Digits(limit_samples=100), Digits(limit_samples=100)
    for data in (whole, part, again):
        data.setup()
    for name in ("train_set", "validation_set", "test_set"):
        kept = getattr(part, name)
        assert len(kept) == 100
        assert torch.equal(kept.images, getattr(again, name).images)
        assert len(kept.targets.unique()) == 10
        originals = {image.numpy().tobytes() for image in getattr(whole, name).images}
        assert all(image.numpy().tobytes() in originals for image in kept.images)
        assert not torch.equal(kept.images, getattr(whole, name).images[:100])
    unlimited = Digits(limit_samples=10_000)
    unlimited.setup("test")
    assert len(unlimited.test_set) == len(whole.test_set)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch_size", 0),
        ("eval_batch_size", -1),
        ("num_workers", -1),
        ("limit_samples", 0),
        ("validation", 0.0),
        ("validation", 1.0),
        ("validation", True),
        ("validation", "train"),
        ("validation", float("nan")),
        ("test_share", 1.5),
    ],
)
def test_arguments_out_of_range_are_refused(argument, value):
    with pytest.raises(MisconfigurationException, match=f"{argument} must be.*{value}"):
        Digits(**{argument: value})


@pytest.mark.parametrize("share", [1e-4, 1 - 1e-4])
def test_empty_splits_are_refused(share):
    with pytest.raises(MisconfigurationException, match="validation="):
        Digits(validation=share).setup("fit")
    with pytest.raises(MisconfigurationException, match="test_share="):
        Digits(test_share=share).setup("test" if share < 0.5 else "fit")


def test_constants_of_digits():
    data = Digits()
    pixels = torch.cat([data.load_images(train)[0] for train in (True, False)]).double() / 16
    assert pixels.mean() == pytest.approx(data.mean[0], abs=1e-4)
    assert pixels.std() == pytest.approx(data.std[0], abs=1e-4)


def test_a_new_data_set_needs_only_its_images():
    class Stripes(VisionDataModule):
        num_classes = 2
        image_shape = (1, 4, 4)
        mean = (0.5,)
        std = (0.5,)

        def load_images(self, train):
            targets = torch.arange(12 if train else 6) % 2
            return (targets * 255).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4), targets

    data = Stripes(validation=0.5, batch_size=6)
    data.setup()
    images, targets = next(iter(data.train_dataloader()))
    assert torch.equal(images.mean((1, 2, 3)), targets * 2.0 - 1)
    assert data.validation_set.targets.bincount().tolist() == [3, 3]
