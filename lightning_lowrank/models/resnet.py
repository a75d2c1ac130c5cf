"""ResNets for small images: torchvision's residual blocks behind a stem that keeps the image's size."""

from typing import ClassVar

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from lightning_lowrank.arguments import check_integer
from lightning_lowrank.models.networks import ImageNetwork


class _ResNet(ImageNetwork):
    """A stem, four stages of basic blocks, global average pooling and a linear layer, named as in torchvision."""

    blocks: ClassVar[tuple[int, int, int, int]]

    def __init__(self, in_channels: int = 3, num_classes: int = 10, width: int = 64, image_size: int = 32) -> None:
        super().__init__(in_channels, num_classes, image_size)
        check_integer("width", width)
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(width, width, self.blocks[0], stride=1)
        self.layer2 = _stage(width, 2 * width, self.blocks[1], stride=2)
        self.layer3 = _stage(2 * width, 4 * width, self.blocks[2], stride=2)
        self.layer4 = _stage(4 * width, 8 * width, self.blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(batch, in_channels, height, width)``, of any size, to logits ``(batch, num_classes)``."""
        features = self.relu(self.bn1(self.conv1(images)))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(self.avgpool(features).flatten(1))


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    shortcut = None
    if stride != 1:
        shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
            nn.BatchNorm2d(out_channels),
        )
    first = BasicBlock(in_channels, out_channels, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels) for _ in range(blocks - 1)))


class ResNet18(_ResNet):
    """ResNet-18 for small images, as FedHM trains it on CIFAR-10.

    The stem is a 3×3 convolution of stride 1, without max-pooling, so that 32×32 pixels reach the first block.
    Four stages of two basic blocks follow, of ``width``, 2, 4 and 8 × ``width`` channels; each but the first halves
    height and width (rounded up). Convolutions have no bias and start as in torchvision (He normal, fan-out).
    11,173,962 parameters for three channels and ten classes. Layer names are torchvision's: ``conv1``, ``bn1``,
    ``layer1.0.conv1``, …, ``layer2.0.downsample.0``, …, ``fc``.

    Papers: "Deep Residual Learning for Image Recognition" (He et al., CVPR 2016), table 1; "FedHM: Efficient
    Federated Learning for Heterogeneous Models via Low-rank Factorization", table 5.

    Arguments that are not named here are those of `ImageNetwork`. The network takes images of any size; ``image_size``
    is that of ``example_input_shape``.

    Args:
        width: Channels of the stem and the first stage.

    Example:
        >>> import torch
        >>> network = ResNet18()
        >>> sum(parameter.numel() for parameter in network.parameters())
        11173962
        >>> network(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    blocks = (2, 2, 2, 2)


class ResNet34(_ResNet):
    """ResNet-34 for small images, as FedHM trains it on CIFAR-100 and Tiny-ImageNet.

    As `ResNet18`, with the same arguments and 3, 4, 6 and 3 blocks in its stages. 21,328,292 parameters for three
    channels and a hundred classes, 21,379,592 for two hundred.

    Papers: as for `ResNet18`; FedHM's table 6.

    Args:
        width: As for `ResNet18`.

    Example:
        >>> network = ResNet34(num_classes=200, image_size=64)
        >>> sum(parameter.numel() for parameter in network.parameters())
        21379592
    """

    blocks = (3, 4, 6, 3)
