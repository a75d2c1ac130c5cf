"""The networks of the reproduced papers.

They are plain modules with dense weights, which `LowRank` converts.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowrank.arguments import check_integer, check_number


class Network(nn.Module):
    """A classifier that knows its input's shape and its number of classes.

    `Classifier` takes any ``nn.Module``. With this base class, shape and number need not be stated, and a YAML file's
    short name of a network (``MLP``) is not mistaken for a module of the same name elsewhere (``torchvision.ops.MLP``).

    Attributes:
        example_input_shape: Shape of one input, without the batch dimension.
        num_classes: Number of logits.
    """

    example_input_shape: tuple[int, ...]
    num_classes: int


class ImageNetwork(Network):
    """Base class of the networks for square images.

    Args:
        in_channels: Channels of an image.
        num_classes: Number of classes.
        image_size: Height and width of an image, in pixels; at least ``2 ** poolings``.
        poolings: How often the network halves height and width, rounding down, before layers that need one pixel.

    Attributes:
        feature_size: Height and width after the poolings.

    Raises:
        ValueError: If an argument is not positive, or the image is too small for the poolings.
    """

    def __init__(self, in_channels: int, num_classes: int, image_size: int, poolings: int = 0) -> None:
        super().__init__()
        check_integer("in_channels", in_channels)
        check_integer("num_classes", num_classes)
        check_integer(f"image_size of {type(self).__name__}", image_size, least=2**poolings)
        self.feature_size = image_size // 2**poolings
        self.example_input_shape = (in_channels, image_size, image_size)
        self.num_classes = num_classes


class MLP(Network):
    """Fully connected network with ReLU between its layers; images are flattened.

    The hidden layers are ``hidden.0``, ``hidden.1``, …, the last layer is ``classifier``. Weights start as
    PyTorch's ``nn.Linear`` does.

    Args:
        in_features: Values of one input. Default 784: an image of 28×28 pixels.
        hidden: Width of each hidden layer. Empty: a linear classifier.
        out_features: Number of classes.
        bias: Whether the layers have biases.

    Raises:
        ValueError: If a width is not positive.

    Example:
        >>> import torch
        >>> network = MLP(hidden=(200, 200))
        >>> sum(parameter.numel() for parameter in network.parameters())
        199210
        >>> network(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (200,),
        out_features: int = 10,
        bias: bool = True,
    ) -> None:
        super().__init__()
        widths = (in_features, *hidden, out_features)
        check_integer("in_features", in_features)
        for index, width in enumerate(hidden):
            check_integer(f"hidden[{index}]", width)
        check_integer("out_features", out_features)
        self.example_input_shape = (in_features,)
        self.num_classes = out_features
        self.hidden = nn.ModuleList(nn.Linear(n_in, n_out, bias) for n_in, n_out in pairwise(widths[:-1]))
        self.classifier = nn.Linear(widths[-2], out_features, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs ``(batch, ...)`` of ``in_features`` values each to logits ``(batch, out_features)``."""
        features = inputs.flatten(1)
        for layer in self.hidden:
            features = F.relu(layer(features))
        return self.classifier(features)


class ConvBlock(nn.Module):
    """A bias-free 3×3 convolution that keeps the size, batch normalisation, ReLU, and optionally max-pooling.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        pool: Whether the output is max-pooled to half its height and width (rounded down).

    Example:
        >>> import torch
        >>> ConvBlock(3, 16, pool=True)(torch.zeros(2, 3, 9, 9)).shape
        torch.Size([2, 16, 4, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, pool: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(batch, in_channels, height, width)`` to feature maps."""
        return self.pool(F.relu(self.norm(self.conv(images))))


class _BlockCNN(ImageNetwork):
    """Convolution blocks ``blocks.0``, ``blocks.1``, … and one bias-free linear layer ``classifier``."""

    def __init__(
        self,
        channels: Sequence[int],
        blocks_per_pool: int,
        in_channels: int,
        num_classes: int,
        image_size: int,
        init_std: float | None,
    ) -> None:
        super().__init__(in_channels, num_classes, image_size, poolings=len(channels) // blocks_per_pool)
        if init_std is not None:
            check_number("init_std", init_std, above=0, hint="None for PyTorch's default")
        self.blocks = nn.Sequential(
            *(
                ConvBlock(n_in, n_out, pool=index % blocks_per_pool == 0)
                for index, (n_in, n_out) in enumerate(pairwise((in_channels, *channels)), start=1)
            )
        )
        self.classifier = nn.Linear(channels[-1] * self.feature_size**2, num_classes, bias=False)
        if init_std is not None:
            for module in self.modules():
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    nn.init.normal_(module.weight, std=init_std)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(batch, in_channels, image_size, image_size)`` to logits ``(batch, num_classes)``."""
        return self.classifier(self.blocks(images).flatten(1))


class CNN4(_BlockCNN):
    """FedMUD's network for Fashion-MNIST and SVHN: four convolutions and a linear layer.

    Convolutions of 32, 64, 128 and 256 channels (3×3, padding 1, no bias), each followed by batch
    normalisation, ReLU and max-pooling; a bias-free linear layer on the flattened features. 390,880 parameters for
    1×28×28 images and ten classes. Layer names: ``blocks.0.conv``, ``blocks.0.norm``, …, ``classifier``.

    Paper: "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated Learning"
    (FedMUD), section 5.1.

    Arguments that are not named here are those of `ImageNetwork`. Images have at least 16×16 pixels.

    Args:
        init_std: Standard deviation of the normal distribution from which convolution and linear weights are drawn.
            The default is that of the paper's experiments; ``None`` is PyTorch's initialisation.

    Example:
        >>> import torch
        >>> network = CNN4()
        >>> sum(parameter.numel() for parameter in network.parameters())
        390880
        >>> network(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, in_channels: int = 1, num_classes: int = 10, image_size: int = 28, init_std: float | None = 0.01
    ) -> None:
        super().__init__((32, 64, 128, 256), 1, in_channels, num_classes, image_size, init_std)


class CNN8(_BlockCNN):
    """FedMUD's network for CIFAR: convolutions in pairs and a linear layer.

    The paper names eight convolutions. Its authors' network, and this one, has *ten*: 32, 32, 64, 64, 128, 128, 256,
    256, 512 and 512 channels (3×3, padding 1, no bias), each followed by batch normalisation and ReLU, with max-pooling
    after every pair; a bias-free linear layer on the flattened features. 4,719,328 parameters for 3×32×32 images and
    ten classes, 4,765,408 for a hundred. Layer names: ``blocks.0.conv``, ``blocks.0.norm``, …, ``classifier``.

    The paper is that of `CNN4`. Arguments that are not named here are those of `ImageNetwork`. Images have at least
    32×32 pixels.

    Args:
        init_std: As for `CNN4`.

    Example:
        >>> network = CNN8(num_classes=100)
        >>> sum(parameter.numel() for parameter in network.parameters())
        4765408
        >>> sum(isinstance(module, nn.Conv2d) for module in network.modules())
        10
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, image_size: int = 32, init_std: float | None = 0.01
    ) -> None:
        channels = (32, 32, 64, 64, 128, 128, 256, 256, 512, 512)
        super().__init__(channels, 2, in_channels, num_classes, image_size, init_std)


class VGG8(ImageNetwork):
    """TDPFed's network for CIFAR-10: five convolutions and three linear layers.

    Convolutions of 32, 64, 128, 256 and 256 channels (3×3, padding 1), each followed by ReLU and max-pooling; then
    linear layers of 256 and 256 values with ReLU, and one to the classes. Their shapes are those of the paper's
    Table I, which does not mention biases (all layers have them here) or normalisation (there is none here).
    1,112,650 parameters for 3×32×32 images and ten classes, of which 1,111,392 are in weights. Layer names:
    ``convolutions.0``, …, ``hidden.0``, ``hidden.1``, ``classifier``. Weights start as PyTorch's layers do.

    Paper: "Tensor Decomposition based Personalized Federated Learning" (TDPFed), section VII and Table I.

    Arguments are those of `ImageNetwork`; images have at least 32×32 pixels.

    Example:
        >>> import torch
        >>> network = VGG8()
        >>> sum(parameter.numel() for parameter in network.parameters())
        1112650
        >>> network(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> None:
        super().__init__(in_channels, num_classes, image_size, poolings=5)
        channels = (in_channels, 32, 64, 128, 256, 256)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(n_in, n_out, kernel_size=3, padding=1) for n_in, n_out in pairwise(channels)
        )
        widths = (channels[-1] * self.feature_size**2, 256, 256)
        self.hidden = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairwise(widths))
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(batch, in_channels, image_size, image_size)`` to logits ``(batch, num_classes)``."""
        features = images
        for convolution in self.convolutions:
            features = F.max_pool2d(F.relu(convolution(features)), 2)
        features = features.flatten(1)
        for layer in self.hidden:
            features = F.relu(layer(features))
        return self.classifier(features)
