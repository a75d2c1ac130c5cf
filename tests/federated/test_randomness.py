"""Generators that a data set holds itself are seeded with each batch, as the process's are."""

import pickle
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, StaticBatchNorm
from lightning_lowrank.federated.data.batches import Request, SeededBatches
from lightning_lowrank.federated.randomness import OwnGenerators
from tests.federated.execution.runs import UNEVEN
from tests.grids import nightly_except
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights

GENERATORS = {
    "numpy": lambda: np.random.default_rng(3),
    "numpy, another algorithm": lambda: np.random.Generator(np.random.Philox(3)),
    "numpy, legacy": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random_sample() if isinstance(generator, np.random.RandomState) else generator.random())


class Noise:
    """A transform with a generator."""

    def __init__(self, generator):
        self.rng = generator

    def __call__(self, sample):
        inputs, target = sample
        return inputs + draw(self.rng), target


def closed_over(generator):
    return lambda sample: (sample[0] + draw(generator), sample[1])


def bound(generator, sample):
    return sample[0] + draw(generator), sample[1]


class OfMonai(Noise):
    """Makes a new generator when it is seeded."""

    def __init__(self, generator=None):
        super().__init__(np.random.RandomState(3))

    def set_random_state(self, seed=None, state=None):
        self.rng = np.random.RandomState(seed) if state is None else state
        return self


class OfAlbumentations(Noise):
    """Its first method takes generators, as the transforms' in albumentations do."""

    def __init__(self, generator=None):
        super().__init__(random.Random(3))

    def set_random_state(self, random_generator, py_random):
        raise AssertionError

    def set_random_seed(self, seed):
        self.rng = random.Random(seed)


class Noisy(Dataset):
    def __init__(self, transform):
        self.samples = blobs()
        self.transforms = [{"noise": transform}]
        self.uniform = random.uniform

    def __len__(self):
        return 103

    def __getitem__(self, index):
        return self.transforms[0]["noise"](self.samples[index])

    def set_random_state(self, seed=None):
        raise AssertionError("a data set may draw other things than transforms by it")


DATASETS = {
    **{name: partial(lambda make: Noisy(Noise(make())), make) for name, make in GENERATORS.items()},
    "closure": lambda: Noisy(closed_over(np.random.default_rng(3))),
    "partial": lambda: Noisy(partial(bound, random.Random(3))),
    "monai": lambda: Noisy(OfMonai()),
    "albumentations": lambda: Noisy(OfAlbumentations()),
    "subset": lambda: Subset(Noisy(Noise(np.random.default_rng(3))), range(103)),
    "concatenation": lambda: ConcatDataset([Subset(Noisy(Noise(random.Random(3))), range(50)), Noisy(OfMonai())]),
}


def first(batches, seed):
    return batches.__getitems__(Request(np.array([4, 60]), seed))[0]


@pytest.mark.parametrize("name", DATASETS)
def test_a_batch_is_that_of_its_seed(name):
    batches = SeededBatches(DATASETS[name](), default_collate)
    expected = first(batches, 5)
    assert not torch.equal(first(batches, 6), expected)
    assert torch.equal(first(batches, 5), expected)
    if name != "closure":
        copy = pickle.loads(pickle.dumps(batches))
        first(batches, 6)
        for _ in range(2):
            assert torch.equal(first(copy, 5), expected)


def test_a_collate_function_draws_by_the_seed():
    def noisy(samples, generator=np.random.default_rng(3)):  # noqa: B008
        inputs, targets = default_collate(samples)
        return inputs + generator.random(), targets

    batches = SeededBatches(blobs(), noisy)
    expected = first(batches, 5)
    assert not torch.equal(first(batches, 6), expected)
    assert torch.equal(first(batches, 5), expected)


def test_generators_draw_apart_and_those_of_the_process_are_left_to_it():
    transforms = [np.random.default_rng(3), np.random.default_rng(3), random.uniform, np.random.mtrand._rand]
    before = np.random.get_state()[1].tolist(), random.getstate()
    OwnGenerators(transforms).seed(0)
    assert transforms[0].random() != transforms[1].random()
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before


class Composition:
    """Hands seeds on to its parts, as compositions of MONAI and albumentations do."""

    def __init__(self, *parts):
        self.parts, self.seeds = parts, []

    def set_random_seed(self, seed):
        self.seeds.append(seed)
        for part in self.parts:
            part.set_random_seed(seed + 1)


class OfGenerators:
    """Is not seeded by its method of this name."""

    def __init__(self):
        self.rng = random.Random(3)

    def set_random_state(self, random_generator, py_random):
        raise AssertionError


def test_what_hands_seeds_on_is_seeded_alone():
    inner = Composition()
    outer = Composition(inner)
    OwnGenerators([outer]).seed(0)
    (seed,) = outer.seeds
    assert inner.seeds == [seed + 1]


def test_a_method_without_a_seed_is_not_called():
    held = OfGenerators()
    OwnGenerators(held).seed(0)
    first = held.rng.random()
    OwnGenerators(held).seed(0)
    assert held.rng.random() == first


@nightly_except("albumentations")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["numpy", "monai", "albumentations"])
def test_rounds_are_the_same_again_together_and_with_workers(tmp_path, name):
    ends, dataset = [], DATASETS[name]()
    for execution, workers in (("sequential", 0), ("sequential", 0), ("vectorized", 0), ("sequential", 1)):
        loop = FederatedLoop(FedAvg(), partition=FromIndices(UNEVEN), execution=execution, summary=False)
        module = Module()
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
        fit(trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0), module, loader)
        ends.append(weights(module))
    for number, end in enumerate(ends[1:]):
        for key, value in ends[0].items():
            torch.testing.assert_close(end[key], value, rtol=0, atol=1e-5 if number == 1 else 0)


class Shifts:
    """Shifts inputs by draws of a generator, and notes them."""

    def __init__(self, generator, drawn):
        self.generator, self.shifts = generator, []
        for _ in range(drawn):
            draw(generator)

    def __call__(self, batch):
        self.shifts.append(draw(self.generator))
        return [batch[0] + self.shifts[-1], *batch[1:]]


class ShiftsInSteps(Module):
    shift = staticmethod(lambda batch: batch)

    def training_step(self, batch, batch_idx):
        return super().training_step(self.shift(batch), batch_idx)


class ShiftsTransfers(Data):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.shift(batch)


class ShiftsBatches(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0].copy_(self.shift(batch)[0])


@pytest.mark.parametrize(
    ("holder", "name"), [*(("module", name) for name in GENERATORS), ("datamodule", "numpy"), ("callback", "numpy")]
)
def test_generators_around_a_step_are_seeded_with_it_and_given_back(tmp_path, holder, name):
    ends = []
    for drawn in (0, 3):
        module, kind, callback = ShiftsInSteps(), ShiftsTransfers if holder == "datamodule" else Data, ShiftsBatches()
        data = kind()
        shift = {"module": module, "datamodule": data, "callback": callback}[holder].shift = Shifts(
            GENERATORS[name](), drawn
        )
        callbacks = [callback] if holder == "callback" else []
        loop = FederatedLoop(FedAvg(), partition=FromIndices(UNEVEN), summary=False)
        fit(trainer(tmp_path, loop, *callbacks, max_epochs=1, limit_val_batches=0), module, data)
        assert len({*shift.shifts}) == len(shift.shifts) == 16
        assert draw(shift.generator) == Shifts(GENERATORS[name](), drawn)([0.0])[0]
        ends.append(weights(module))
    assert_same(*ends)


def test_what_is_no_generator_of_the_users_is_left_alone():
    class Seeding(Module):
        def set_random_seed(self, seed):
            raise AssertionError("a module may seed other things by it")

    module = Module()
    module.part, module.data = Seeding(), Noisy(Noise(random.Random(3)))
    # The operating system's draws have no state.
    module.system = random.SystemRandom()
    fitted = SimpleNamespace(lightning_module=module, datamodule=None, callbacks=[])
    found = OwnGenerators.of_fit(fitted)
    assert found.save() == []
    found.seed(0)
    assert draw(module.data.transforms[0]["noise"].rng) == random.Random(3).random()


class Callable(Module):
    def forward(self, inputs):
        return self.net(inputs)


@pytest.mark.slow
def test_statistics_are_those_of_clients_that_step_together(tmp_path):
    ends, dataset = [], DATASETS["numpy"]()
    for execution in ("sequential", "vectorized"):
        settings = {"partition": FromIndices(UNEVEN), "summary": False, "on_client_error": "raise"}
        loop = FederatedLoop(FedAvg(), execution=execution, **settings)
        module = Callable(network(norm=nn.BatchNorm1d))
        loader = DataLoader(dataset, batch_size=5, shuffle=True, drop_last=True)
        fit(trainer(tmp_path, loop, StaticBatchNorm(), max_epochs=2, limit_val_batches=0), module, loader)
        ends.append(module.state_dict())
    assert any("running_mean" in name for name in ends[0])
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-4)
