"""Memory that is free, also within a container."""

import pytest
import torch

from lightning_lowrank.federated import free_memory


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_free_within_the_containers_limit(tmp_path, version):
    """A group of the process, in one that has no limit, in one that has a lower one."""
    groups, base = tmp_path / "groups", tmp_path / ("memory" if version == 1 else ".")
    groups.write_text("4:memory:/outer/middle/own\n3:cpu:/\n" if version == 1 else "0::/outer/middle/own\n")
    limit, used, cached = free_memory._CONTROL_FILES["memory" if version == 1 else ""]
    sizes = {"outer": (1000, 300, 50), "outer/middle": ("max", 300, 50), "outer/middle/own": (5000, 200, 20)}
    for path, (most, now, files) in sizes.items():
        (base / path).mkdir(parents=True, exist_ok=True)
        (base / path / limit).write_text(f"{most}\n")
        (base / path / used).write_text(f"{now}\n")
        (base / path / "memory.stat").write_text(f"anon 12\n{cached} {files}\n")
    assert list(free_memory._free_in_containers(tmp_path, groups)) == [5000 - 200 + 20, 1000 - 300 + 50]
    assert list(free_memory._free_in_containers(tmp_path, tmp_path / "nowhere")) == []
    assert 0 < free_memory.free_memory(torch.device("cpu")) < 2**50
