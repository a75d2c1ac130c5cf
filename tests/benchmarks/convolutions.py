"""What makes a cohort of small convolutional networks step together on a CPU, beside its clients one after another.

    python tests/benchmarks/convolutions.py [--threads 2] [--repetitions 5] [--cohorts 5 10 20] [--json FILE]

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
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from json_option import add_json_option, write_json
from torch import Tensor, nn
from torch.func import functional_call, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_lowrank.federated.execution import stacked_products
from lightning_lowrank.federated.execution.stacked_products import StackedProducts
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
            shipped = stacked_products._StackedConvolution
            stacked_products._StackedConvolution = Replaced(self.convolve)
            try:
                return super().__torch_function__(function, types, arguments, keywords)
            finally:
                stacked_products._StackedConvolution = shipped
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5, help="at least 2; 5 by default")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", default="", help="run the forms whose name has this in it")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
