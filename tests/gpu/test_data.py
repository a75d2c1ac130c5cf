"""Where samples and what clients keep lie, and what leaves an accelerator: checkpoints and adapters."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_lowrank as ll
from lightning_lowrank import FedAvg, FederatedLoop, LowRank, MatrixProduct, export_adapter
from lightning_lowrank.data import Digits, TensorImages, collate_images
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.testing.experiment import quiet
from tests.gpu.places import Quiet, apart, device_of, experiment, of_network, on, run
from tests.helpers import network, trainer, weights

pytestmark = pytest.mark.slow

PIXELS = torch.randint(256, (120, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(120) % 4


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4))


def fitted(place, tmp_path, execution, loader, **settings):
    images = TensorImages(PIXELS, LABELS, [0.1, 0.4, 0.7], [0.2, 0.3, 0.5], crop_padding=1, mirror=True)
    plain = TensorImages(PIXELS, LABELS, [0.1, 0.4, 0.7], [0.2, 0.3, 0.5])
    loop = FederatedLoop(
        FedAvg(), clients=5, clients_per_round=3, local_epochs=2, execution=execution, seed=0, summary=False, **settings
    )
    with quiet():
        torch.manual_seed(0)
        fit = trainer(tmp_path, loop, **on(place))
        module = Quiet(net())
        train = DataLoader(images, 8, shuffle=True, collate_fn=collate_images, **loader)
        fit.fit(module, train, DataLoader(plain, 50, collate_fn=collate_images, **loader))
    return weights(module), {name: value.cpu() for name, value in fit.callback_metrics.items()}


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_batches_are_the_same_wherever_samples_are(place, tmp_path, execution):
    """Also bit for bit: products of the same numbers in the same places."""
    pinned = {"pin_memory": place == "cuda"}
    workers = {"num_workers": 1, "persistent_workers": True, **pinned}
    (expected, logged), *found = [
        fitted(place, tmp_path, execution, loader, data_on_device=wanted)
        for wanted, loader in (
            (False, {}),
            (False, pinned),
            (False, workers),
            (True, {}),
            (True, workers),
            ("auto", pinned),
        )
    ]
    for values, also in found:
        assert apart(values, expected) == 0
        assert apart(also, logged) == 0


def test_images_are_normalised_on_the_device_as_on_the_host(place):
    images = TensorImages(PIXELS, LABELS, [0.1, 0.4, 0.7], [0.2, 0.3, 0.5], pixel_max=253, crop_padding=2, mirror=True)
    rows, device = images.by_rows(), device_of(place)
    draws = rows.draw(120, torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    expected = images.__getitems__(range(120))
    made = rows.make([tensor.to(device) for tensor in rows.tensors], draws.to(device))
    assert made[0].device.type == device.type
    assert torch.equal(made[0].cpu(), expected.images)
    assert torch.equal(made[1].cpu(), expected.targets)


def test_digits_live_on_the_device(place, tmp_path):
    asked = []

    class Asked(DeviceData):
        def copy_of(self, tensor):
            asked.append(tensor.dtype)
            return super().copy_of(tensor)

    with pytest.MonkeyPatch.context() as patched, quiet():
        patched.setattr("lightning_lowrank.federated.loop.DeviceData", Asked)
        loop = FederatedLoop(FedAvg(), clients=5, data_on_device=True if place == "cpu" else "auto", summary=False)
        module = ll.models.Classifier(ll.models.MLP(64, [16], 10), num_classes=10)
        trainer(tmp_path, loop, max_epochs=1, limit_train_batches=2, **on(place)).fit(module, Digits(batch_size=16))
    assert torch.uint8 in asked


def test_what_clients_keep_is_the_same_on_disk(place):
    of = experiment("Ditto")
    kept, spilt = (
        run(place, of, client_memory_limit=limit, clients_per_round=2, trainer={"max_epochs": 3}) for limit in (None, 1)
    )
    assert apart(kept.weights, spilt.weights) == 0


def test_checkpoints_and_adapters_are_read_without_the_device(place, tmp_path):
    of = of_network(network)
    of.lowrank = lambda: LowRank(MatrixProduct(), rank=2, alpha=2, init="lora", freeze_rest=True, summary=False)
    found = run(place, of)
    found.trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True, map_location="cpu")
    assert apart(saved["state_dict"], found.weights) == 0
    dense = ll.load_dense(tmp_path / "run.ckpt", Quiet(network()))
    inputs = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.allclose(dense(inputs), found.module.cpu()(inputs), atol=1e-5)
    export_adapter(found.module, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 0
