"""What makes a cohort of small convolutional networks step together on a CPU, beside its clients one after another.

    python tests/benchmarks/convolutions.py [--threads 2] [--repetitions 5] [--cohorts 5 10 20] [--json FILE]
    python tests/benchmarks/convolutions.py --shapes [--device cuda] [--dtype bfloat16] [--tf32] [--cohorts 10 50] …

Every row is CNN4 in one form, on images of 28×28: a step is forward, backward and plain SGD for all clients of the
cohort. Each repetition runs every contender once. A contender's milliseconds are the least of the repetitions, per
client; its factor is how many times faster than the first line it is, the median over the repetitions.

The first line is plain PyTorch, one client after another. The second is the same with `channels_last` networks and
images, for information: what is gained by that is open to a loop over clients as well, if its user thinks of it. All
others step together under `vmap` and differ in their convolutions and batch normalisations only:

- as torch maps them: one grouped convolution; normalise, scale and shift in turn
- grouped, channels last: the same with channels last in memory
- unfold, products: `F.unfold` and batched products of matrices
- im2col, one product: windows with channels last, and one batched product, with a gradient written by hand
- loop: a convolution per client
- loop, channels last: `StackedProducts` with torch's own batch normalisation
- loop, own batch norm: a convolution per client as it comes, and the batch normalisation of `StackedProducts`
- StackedProducts: what this library does

All must have the losses of the first line. The exit status is 1 if `StackedProducts` is slower than the first line in
any row. The machine must have nothing else to do: where other processes take turns on the cores, torch's threads wait
for each other. A row whose first line varies as they do then says so.

With `--shapes` each row is one convolution, forward and backward, of CNN4, ResNet-18 or the network of pfl's benchmark,
on any device: as torch maps it (grouped), that with channels last, `F.unfold` and batched products, windows and one
batched product, a convolution per client (with channels last: what `StackedProducts` does on a CPU), and on a GPU a
convolution per client on eight streams. The last line says for how many shapes the way that this library takes on the
device is the fastest, and which ways are faster for the others: `mapped_layers.py` has the choice.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from json_option import add_json_option, write_json
from torch import Tensor, nn
from torch.func import functional_call, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_lowrank.federated.execution import mapped_layers
from lightning_lowrank.federated.execution.mapped_layers import StackedProducts
from lightning_lowrank.layers import BlockKronecker, MatrixProduct, convert
from lightning_lowrank.models import CNN4

OURS = "StackedProducts"
ALONE = "one after another"
LARGEST_SPREAD = 1.3
LEARNING_RATE = 0.01

Step = Callable[[], Tensor]
Convolve = Callable[..., Tensor]

FORMS: dict[str, tuple[Any, dict[str, Any]] | None] = {
    "dense": None,
    "matrix product, weight, 1/32": (MatrixProduct(), {"role": "weight"}),
    "matrix product, update, 1/32": (MatrixProduct(), {"role": "update"}),
    "block Kronecker, decoupled update, 1/32": (BlockKronecker(), {"role": "update", "decouple": True}),
}


# Convolutions of stacks [clients, batch, channels, height, width]


def grouped_channels_last(
    inputs: Tensor, weights: Tensor, biases: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    clients = len(weights)
    joined = inputs.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    bias = None if biases is None else biases.flatten()
    outputs = F.conv2d(joined, weights.flatten(0, 1), bias, stride, padding, dilation, groups * clients)
    return outputs.unflatten(1, (clients, -1)).transpose(0, 1)


def unfold_and_multiply(
    inputs: Tensor, weights: Tensor, biases: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    if groups > 1:
        return loop(inputs, weights, biases, stride, padding, dilation, groups)
    clients, batch = inputs.shape[:2]
    kernel = weights.shape[3:]
    columns = F.unfold(inputs.flatten(0, 1), kernel, dilation, padding, stride)
    outputs = weights.flatten(2).unsqueeze(1) @ columns.unflatten(0, (clients, batch))
    if biases is not None:
        outputs = outputs + biases[:, None, :, None]
    return outputs.unflatten(3, output_size(inputs.shape[3:], kernel, stride, padding, dilation))


def loop(
    inputs: Tensor, weights: Tensor, biases: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    own = [None] * len(weights) if biases is None else biases
    return torch.stack(
        [
            F.conv2d(images, weight, bias, stride, padding, dilation, groups)
            for images, weight, bias in zip(inputs, weights, own, strict=True)
        ]
    )


def windows_and_multiply(
    inputs: Tensor, weights: Tensor, biases: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    if groups > 1:
        return loop(inputs, weights, biases, stride, padding, dilation, groups)
    outputs = Windows.apply(inputs, weights, stride, padding, dilation)
    return outputs if biases is None else outputs + biases[:, None, :, None, None]


class Windows(torch.autograd.Function):
    """Every output's window of the image as a row, with the channels last; all clients' rows times their weights."""

    @staticmethod
    def forward(ctx, inputs, weights, stride, padding, dilation):
        clients, batch, channels, *size = inputs.shape
        kernel = weights.shape[3:]
        ctx.output_size = output_size(size, kernel, stride, padding, dilation)
        ctx.geometry = (kernel, stride, padding, dilation)
        padded = F.pad(inputs.movedim(2, -1), (0, 0, padding[1], padding[1], padding[0], padding[0]))
        rows = torch.stack(list(Windows.views(padded, ctx)), dim=4)
        rows = rows.reshape(clients, -1, kernel[0] * kernel[1] * channels)
        matrix = weights.permute(0, 3, 4, 2, 1).reshape(clients, rows.shape[2], -1)
        ctx.save_for_backward(rows, matrix)
        ctx.padded_shape, ctx.weight_shape = padded.shape, weights.shape
        return torch.bmm(rows, matrix).view(clients, batch, *ctx.output_size, -1).movedim(-1, 2)

    @staticmethod
    def views(padded, ctx):
        (height, width), stride, _, dilation = ctx.geometry
        rows, columns = ctx.output_size
        for down in range(height):
            for across in range(width):
                top, left = down * dilation[0], across * dilation[1]
                yield padded[
                    :,
                    :,
                    top : top + (rows - 1) * stride[0] + 1 : stride[0],
                    left : left + (columns - 1) * stride[1] + 1 : stride[1],
                ]

    @staticmethod
    def backward(ctx, gradient):
        rows, matrix = ctx.saved_tensors
        kernel, _, padding, _ = ctx.geometry
        clients, batch, outputs = gradient.shape[:3]
        gradient = gradient.movedim(2, -1).reshape(clients, -1, outputs)
        of_weights = torch.bmm(rows.mT, gradient).view(clients, *kernel, -1, outputs).permute(0, 4, 3, 1, 2)
        if not ctx.needs_input_grad[0]:
            return None, of_weights, None, None, None
        of_rows = torch.bmm(gradient, matrix.mT).view(clients, batch, *ctx.output_size, kernel[0] * kernel[1], -1)
        of_padded = gradient.new_zeros(ctx.padded_shape)
        for position, view in enumerate(Windows.views(of_padded, ctx)):
            view += of_rows[..., position, :]
        height, width = of_padded.shape[2:4]
        of_inputs = of_padded[:, :, padding[0] : height - padding[0], padding[1] : width - padding[1]]
        return of_inputs.movedim(-1, 2), of_weights, None, None, None


def output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    return [
        (length + 2 * pad - step * (width - 1) - 1) // stride_ + 1
        for length, width, stride_, pad, step in zip(size, kernel, stride, padding, dilation, strict=True)
    ]


class Alternative(StackedProducts):
    """`StackedProducts` with another convolution, or torch's own batch normalisation."""

    def __init__(self, convolve: Convolve | None = None, own_batch_norm: bool = False) -> None:
        super().__init__()
        self.convolve = convolve
        self.own_batch_norm = own_batch_norm

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if function is F.batch_norm and not self.own_batch_norm:
            return function(*arguments, **(keywords or {}))
        if function is F.conv2d and self.convolve is not None:
            # `StackedProducts` unwraps the stacks; only what it does with them is replaced.
            shipped = mapped_layers._StackedConvolution
            mapped_layers._StackedConvolution = Replaced(self.convolve)
            try:
                return super().__torch_function__(function, types, arguments, keywords)
            finally:
                mapped_layers._StackedConvolution = shipped
        return super().__torch_function__(function, types, arguments, keywords)


class Replaced:
    def __init__(self, convolve: Convolve) -> None:
        self.apply = convolve


class AsTorchMapsThem(Alternative):
    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if function is F.conv2d:
            return function(*arguments, **(keywords or {}))
        return super().__torch_function__(function, types, arguments, keywords)


TOGETHER: dict[str, Callable[[], StackedProducts]] = {
    "as torch maps them": AsTorchMapsThem,
    "grouped, channels last": lambda: Alternative(grouped_channels_last),
    "unfold, products": lambda: Alternative(unfold_and_multiply),
    "im2col, one product": lambda: Alternative(windows_and_multiply, own_batch_norm=True),
    "loop": lambda: Alternative(loop),
    "loop, channels last": Alternative,
    "loop, own batch norm": lambda: Alternative(loop, own_batch_norm=True),
    OURS: StackedProducts,
}


# Steps


def network(form: str) -> nn.Module:
    torch.manual_seed(0)
    model = CNN4()
    setting = FORMS[form]
    if setting is not None:
        factorization, options = setting
        convert(model, factorization, budget=1 / 32, **options)
    return model


def one_after_another(model: nn.Module, images: Tensor, targets: Tensor, channels_last: bool = False) -> Step:
    batches: Sequence[Tensor] = list(images)
    if channels_last:
        model = copy.deepcopy(model).to(memory_format=torch.channels_last)
        batches = [batch.to(memory_format=torch.channels_last) for batch in batches]
    models = [copy.deepcopy(model) for _ in batches]
    optimizers = [
        torch.optim.SGD([value for value in client.parameters() if value.requires_grad], lr=LEARNING_RATE)
        for client in models
    ]

    def step() -> Tensor:
        losses = []
        for client, optimizer, batch, labels in zip(models, optimizers, batches, targets, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(client(batch), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return step


def together(model: nn.Module, images: Tensor, targets: Tensor, mode: Callable[[], StackedProducts]) -> Step:
    model = copy.deepcopy(model)
    live = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    stacks = {name: value.detach().expand(len(images), *value.shape).clone().requires_grad_() for name, value in live}
    optimizer = torch.optim.SGD(list(stacks.values()), lr=LEARNING_RATE)
    stacks.update({name: value.expand(len(images), *value.shape).clone() for name, value in model.named_buffers()})

    def loss(values: dict[str, Tensor], batch: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (batch,)), labels)

    mapped = vmap(loss, randomness="different")

    def step() -> Tensor:
        optimizer.zero_grad()
        with mode():
            losses = mapped(stacks, images, targets)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return step


# Timing


def measure(form: str, cohort: int, batch: int, repetitions: int) -> dict[str, list[float]]:
    """Return seconds of a client's step in each repetition, by contender."""
    generator = torch.Generator().manual_seed(cohort)
    images = torch.randn(cohort, batch, 1, 28, 28, generator=generator)
    targets = torch.randint(10, (cohort, batch), generator=generator)
    model = network(form)
    steps = {
        ALONE: one_after_another(model, images, targets),
        "the same, channels last": one_after_another(model, images, targets, channels_last=True),
        **{name: together(model, images, targets, mode) for name, mode in TOGETHER.items()},
    }
    expected = [steps[ALONE]() for _ in range(2)]
    for name, step in steps.items():
        if name != ALONE:
            for losses in expected:
                torch.testing.assert_close(step(), losses, rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - begin) / cohort)
    return times


def factors(times: dict[str, list[float]]) -> dict[str, float]:
    return {
        name: statistics.median(alone / own for alone, own in zip(times[ALONE], values, strict=True))
        for name, values in times.items()
    }


# Single convolutions


class Shape(NamedTuple):
    """A convolution: channels in and out, width of the images and of the kernel, stride, padding, batch size."""

    channels: int
    outputs: int
    size: int
    kernel: int
    stride: int
    padding: int
    batch: int


SHAPES = {
    "cnn4 1": Shape(1, 32, 28, 3, 1, 1, 64),
    "cnn4 2": Shape(32, 64, 14, 3, 1, 1, 64),
    "cnn4 3": Shape(64, 128, 7, 3, 1, 1, 64),
    "cnn4 4": Shape(128, 256, 3, 3, 1, 1, 64),
    "resnet18 first": Shape(3, 64, 32, 3, 1, 1, 64),
    "resnet18 stage 1": Shape(64, 64, 32, 3, 1, 1, 64),
    "resnet18 into 2": Shape(64, 128, 32, 3, 2, 1, 64),
    "resnet18 shortcut": Shape(64, 128, 32, 1, 2, 0, 64),
    "resnet18 stage 2": Shape(128, 128, 16, 3, 1, 1, 64),
    "resnet18 stage 3": Shape(256, 256, 8, 3, 1, 1, 64),
    "resnet18 stage 4": Shape(512, 512, 4, 3, 1, 1, 64),
    "pfl 1": Shape(3, 32, 32, 3, 1, 0, 10),
    "pfl 2": Shape(32, 64, 30, 3, 1, 0, 10),
}


def grouped(
    inputs: Tensor, weights: Tensor, biases: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    joined, bias = inputs.transpose(0, 1).flatten(1, 2), None if biases is None else biases.flatten()
    outputs = F.conv2d(joined, weights.flatten(0, 1), bias, stride, padding, dilation, groups * len(weights))
    return outputs.unflatten(1, (len(weights), -1)).transpose(0, 1)


def on_streams(
    inputs: Tensor, weights: Tensor, biases: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    present, streams = torch.cuda.current_stream(inputs.device), side_streams(inputs.device)
    outputs = []
    for stream in streams:
        stream.wait_stream(present)
    for place, (images, weight) in enumerate(zip(inputs, weights, strict=True)):
        # Autograd makes the backward pass of each on its stream as well.
        with torch.cuda.stream(streams[place % len(streams)]):
            bias = None if biases is None else biases[place]
            outputs.append(F.conv2d(images, weight, bias, stride, padding, dilation, groups))
    for stream in streams:
        present.wait_stream(stream)
    return torch.stack(outputs)


@functools.cache
def side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(8)]


def loop_channels_last(
    inputs: Tensor, weights: Tensor, biases: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return mapped_layers._StackedConvolution.apply(inputs, weights, biases, stride, padding, dilation, groups)


OF_SHAPES: dict[str, Convolve] = {
    "grouped": grouped,
    "grouped, channels last": grouped_channels_last,
    "unfold, products": unfold_and_multiply,
    "windows, one product": windows_and_multiply,
    "loop": loop,
    "loop, channels last": loop_channels_last,
    "loop on streams": on_streams,
}
SHIPPED = {"cpu": "loop, channels last"}
"""The way of `StackedProducts` by device; elsewhere it leaves convolutions to torch, which groups them."""


def measure_shape(
    shape: Shape, clients: int, device: torch.device, dtype: torch.dtype, repetitions: int
) -> dict[str, list[float]]:
    """Return seconds of a client's forward and backward pass in each repetition, by way."""
    draws = torch.Generator().manual_seed(0)
    size = (clients, shape.batch, shape.channels, shape.size, shape.size)
    images = torch.randn(size, generator=draws).to(device, dtype)
    kernel = (clients, shape.outputs, shape.channels, shape.kernel, shape.kernel)
    weights = (torch.randn(kernel, generator=draws) / (shape.channels * shape.kernel**2) ** 0.5).to(device, dtype)
    geometry = [shape.stride] * 2, [shape.padding] * 2, [1, 1], 1
    # A network's first convolution needs no gradient of its images.
    asked = [each.requires_grad_(each is weights or shape.channels > 3) for each in (images, weights)]
    needed = [each for each in asked if each.requires_grad]
    times: dict[str, list[float]] = {}
    expected: list[Tensor] = []
    for name, convolve in OF_SHAPES.items():
        if convolve is on_streams and device.type != "cuda":
            continue
        times[name] = []
        for repetition in range(repetitions + 2):
            synchronize(device)
            begin = time.perf_counter()
            outputs = convolve(images, weights, None, *geometry)
            gradients = torch.autograd.grad(outputs, needed, outputs.detach())
            synchronize(device)
            if repetition > 1:
                times[name].append((time.perf_counter() - begin) / clients)
        found = [outputs.detach(), *gradients]
        expected = expected or found
        for one, two in zip(found, expected, strict=True):
            scale = float(two.abs().max())
            assert float((one - two).abs().max()) < (0.05 if dtype != torch.float32 else 0.01) * scale, name
        del outputs, gradients
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare_shapes(options: argparse.Namespace) -> int:
    """Print a table of `SHAPES`, and where another way is faster than the one that is shipped."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{options.threads} threads"
    print(f"torch {torch.__version__}, {name}, {options.dtype}{', TF32' if options.tf32 else ''}")
    shipped = SHIPPED.get(device.type, "grouped")
    rows: list[dict[str, Any]] = []
    for shape_name, shape in SHAPES.items():
        if options.only not in shape_name:
            continue
        for clients in options.cohorts:
            if options.batch:
                shape = shape._replace(batch=options.batch)
            times = measure_shape(shape, clients, device, dtype, options.repetitions)
            least = {way: 1000 * min(values) for way, values in times.items()}
            best = min(least, key=least.__getitem__)
            print(f"\n{shape_name}, {clients} clients, batches of {shape.batch}: {best}")
            for way, milliseconds in least.items():
                mark = "   shipped" if way == shipped else ""
                print(f"  {way:<26}{milliseconds:>9.4f} ms{least[shipped] / milliseconds:>8.2f}×{mark}", flush=True)
            rows.append(
                {"shape": shape_name, **shape._asdict(), "clients": clients, "milliseconds": least, "best": best}
            )
    # Less than this is noise.
    slower = [row for row in rows if row["milliseconds"][shipped] > 1.1 * row["milliseconds"][row["best"]]]
    print(f"\n{len(rows) - len(slower)} of {len(rows)} rows: {shipped} is the fastest, to a tenth")
    for row in slower:
        factor = row["milliseconds"][shipped] / row["milliseconds"][row["best"]]
        print(f"  {row['shape']}, {row['clients']} clients: {row['best']} is {factor:.2f} times as fast")
    head = {"torch": torch.__version__, "device": name, "dtype": options.dtype, "tf32": options.tf32}
    write_json(options.json, {**head, "shipped": shipped, "rows": rows})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5, help="at least 2; 5 by default")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--batch", type=int, default=0, help="32 by default, with --shapes each shape's own")
    parser.add_argument("--only", default="", help="run the forms, or shapes, whose name has this in it")
    parser.add_argument("--shapes", action="store_true", help="time single convolutions")
    parser.add_argument("--device", default="cpu", help="of the single convolutions")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tf32", action="store_true")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.shapes:
        return compare_shapes(options)
    options.batch = options.batch or 32
    print(f"torch {torch.__version__}, {options.threads} threads, batches of {options.batch}, CNN4")
    rows: list[dict[str, Any]] = []
    for form in (form for form in FORMS if options.only in form):
        for cohort in options.cohorts:
            times = measure(form, cohort, options.batch, options.repetitions)
            found = factors(times)
            lower, _, upper = statistics.quantiles(times[ALONE], n=4)
            print(f"\n{form}, {cohort} clients")
            for name, values in times.items():
                verdict = "" if name != OURS else "   met" if found[name] >= 1 else "   NOT met"
                print(f"  {name:<26}{1000 * min(values):>9.2f} ms{found[name]:>8.2f}×{verdict}")
            if upper > LARGEST_SPREAD * lower:
                print(f"  not to be relied on: the first line's quartiles are a factor of {upper / lower:.1f} apart")
            sys.stdout.flush()
            least = {name: 1000 * min(values) for name, values in times.items()}
            rows.append(
                {"form": form, "clients": cohort, "factor": found, "milliseconds": least, "spread": upper / lower}
            )
    met = sum(row["factor"][OURS] >= 1 for row in rows)
    print(f"\n{met} of {len(rows)} rows at least as fast together as one after another")
    head = {"torch": torch.__version__, "threads": options.threads, "batch": options.batch}
    write_json(options.json, {**head, "repetitions": options.repetitions, "rows": rows})
    return 0 if met == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
