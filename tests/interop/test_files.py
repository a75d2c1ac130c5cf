"""Files are there whole or not at all."""

import pytest
import safetensors.torch
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import MatrixProduct, convert, export_adapter
from lightning_lowrank.files import replacing


def test_a_file_takes_its_place_when_it_is_whole(tmp_path):
    target, link = tmp_path / "new" / "file", tmp_path / "link"
    link.symlink_to(target)
    with replacing(link) as part:
        part.write_text("first")
        assert not target.exists()
    assert link.is_symlink()
    assert target.read_text() == "first"


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt(), ValueError("mine")])
def test_after_an_error_all_is_as_it_was(tmp_path, error):
    target = tmp_path / "file"
    target.write_text("before")
    wanted = MisconfigurationException if isinstance(error, OSError) else type(error)

    def write():
        with replacing(target) as part:
            part.write_text("half of i")
            raise error

    with pytest.raises(wanted):
        write()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize("fails", ["weights", "rename"])
def test_an_adapter_folder_is_never_half_written(tmp_path, monkeypatch, fails):
    module = nn.Sequential(nn.Linear(6, 5))
    convert(module, MatrixProduct(), rank=1, init="lora", freeze_rest=True)
    folder = export_adapter(module, tmp_path / "adapter")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        module[0].factors["U"].add_(1)

    def fail(*arguments, **keywords):
        raise OSError("no space left on device")

    if fails == "weights":
        monkeypatch.setattr(safetensors.torch, "save_file", fail)
    else:
        monkeypatch.setattr(type(tmp_path), "replace", fail)
    with pytest.raises(MisconfigurationException, match=r"adapter_model\.safetensors.*unchanged"):
        export_adapter(module, folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after == (before if fails == "weights" else {name: before[name] for name in ("adapter_model.safetensors",)})
