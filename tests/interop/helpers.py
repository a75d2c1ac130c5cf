"""Networks of the kinds that PEFT adapts, and how an adapter folder is compared."""

import json

import pytest
import torch
from torch import nn

LORA = {"init": "lora", "allow_larger": True}


def peft():
    return pytest.importorskip("peft", reason="PEFT is not installed")


def perturbed(module):
    """Give everything that is trained, and batch norms' statistics, values that it did not have."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if value.is_floating_point() and (value.requires_grad or name.endswith("running_var")):
                value.add_(0.3 * torch.rand(value.shape, generator=draws, dtype=value.dtype))
    return module


class Images(nn.Module):
    """Convolutions of all three dimensions' kinds, batch norms and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.block = nn.Sequential(nn.Conv2d(6, 8, (3, 1), padding="same", bias=False), nn.ReLU(), nn.Conv2d(8, 5, 1))
        self.line = nn.Conv1d(5, 4, 3, padding=1)
        self.volume = nn.Conv3d(1, 3, 3, padding=1)
        self.head = nn.Linear(12, 3)

    def forward(self, images):
        found = self.block(torch.relu(self.norm(self.stem(images))))
        line = self.line(found.flatten(2))
        volume = self.volume(line[:, None, :, :, None])
        return self.head(volume.mean(dim=(3, 4)).flatten(1))


class Tokens(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh())
        self.out = nn.Linear(6, 11)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(self.body(self.table(tokens)))


class Gpt(nn.Module):
    """Conv1D layers, square and not, beside a linear one."""

    def __init__(self):
        super().__init__()
        Conv1D = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.square, self.wide, self.last = Conv1D(6, 6), Conv1D(9, 6), nn.Linear(9, 4)

    def forward(self, inputs):
        return self.last(torch.tanh(self.wide(torch.tanh(self.square(inputs)))))


INPUTS = {
    Images: lambda: torch.randn(4, 3, 8, 8),
    Tokens: lambda: torch.randint(11, (4, 7)),
    Gpt: lambda: torch.randn(5, 6),
}


def same_function(first, second, inputs):
    with torch.no_grad():
        outputs, others = first.eval()(inputs), second.eval()(inputs)
    torch.testing.assert_close(outputs, others, rtol=1e-5, atol=1e-5)
    return outputs


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first


def conv(**settings):
    return nn.Sequential(nn.Conv2d(4, 4, 3, **settings))
