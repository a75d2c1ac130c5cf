"""What low-rank layers and projected optimizers cost, beside dense layers, hand-written code and other libraries.

    python tests/benchmarks/layers.py [--json FILE] [--only WORD] [--failures]

Every row runs all its contenders in this process, with two threads, in single precision. A layer's time is that of a
forward and a backward pass on an input that requires a gradient; an optimizer's that of a step. Each repetition runs
every contender of the row once, several iterations each, and a ratio is the median over the repetitions of the
contender's time to the baseline's, which is the row's first line. The limit is on our own line. The exit status is 1
if one is not met.

The machine must have nothing else to do: where other processes take turns on the cores, torch's two threads wait for
each other and small operations take tens of times as long. A row whose baseline varies as they do then says so.

Where there is a hand-written reference, it is built from our layer's factors, and both must give the same outputs.

The other libraries are those of `pip install ".[bench]"`; one that is not installed is skipped.

With `--failures` nothing is timed: settings in which the other libraries fail are run, in them and in ours, and the
table says what happens. Ours must agree with the dense layer of the recovered weight. The exit status is 1 if it does
not, or if a library does not fail as the table is there to show.
"""

from __future__ import annotations

import argparse
import copy
import io
import logging
import re
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from json_option import add_json_option, write_json
from torch import Tensor, nn

THREADS = 2
SECONDS_PER_MEASUREMENT = 0.05
LARGEST_SPREAD = 1.3
PEERS = ("peft", "lycoris-lora", "tensorly-torch", "tensorly", "galore-torch")
CONVOLUTION_INPUT = (8, 256, 16, 16)
LINEAR_INPUT = (64, 1024)
OURS = "lightning_lowrank"
HAND_WRITTEN = "hand-written"

Step = Callable[[], object]


def not_installed(error: Exception) -> str:
    """Say which library is missing, if that is what the error is about and the library is not ours."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(OURS):
        return f"skipped, {error.name} is not installed"
    return ""


# Layers


def dense_convolution() -> nn.Module:
    return nn.Conv2d(256, 256, 3, padding=1)


def dense_linear() -> nn.Module:
    return nn.Linear(1024, 1024)


def ours(layer: nn.Module, factorization: str, rank: int, **settings: Any) -> nn.Sequential:
    from lightning_lowrank import layers

    model = nn.Sequential(layer)
    if settings["role"] == "weight":
        settings["init"] = "uniform"
    layers.convert(model, getattr(layers, factorization)(), rank=rank, allow_larger=True, **settings)
    return model


class KroneckerLinear(nn.Module):
    """A linear layer whose weight is the Kronecker product of U and V: each input, as a matrix X, becomes U X Vᵀ."""

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.left, self.right, self.bias = (nn.Parameter(value.detach().clone()) for value in (left, right, bias))

    def forward(self, inputs: Tensor) -> Tensor:
        matrices = inputs.unflatten(1, (self.left.shape[1], self.right.shape[1]))
        return (self.left @ nn.functional.linear(matrices, self.right)).flatten(1) + self.bias


def two_convolutions(converted: nn.Module) -> nn.Module:
    factors, rank = converted[0].factors, converted[0].rank
    across = nn.Conv2d(256, rank, (1, 3), padding=(0, 1), bias=False)
    down = nn.Conv2d(rank, 256, (3, 1), padding=(1, 0))
    with torch.no_grad():
        across.weight.copy_(factors["V"].reshape(256, 1, 3, rank).permute(3, 0, 1, 2))
        down.weight.copy_(factors["U"].reshape(256, 3, 1, rank).permute(0, 3, 1, 2))
        down.bias.copy_(converted[0].bias)
    return nn.Sequential(across, down)


def two_linears(converted: nn.Module) -> nn.Module:
    factors, rank = converted[0].factors, converted[0].rank
    first, second = nn.Linear(1024, rank, bias=False), nn.Linear(rank, 1024)
    with torch.no_grad():
        first.weight.copy_(factors["V"].T)
        second.weight.copy_(factors["U"])
        second.bias.copy_(converted[0].bias)
    return nn.Sequential(first, second)


def kronecker(converted: nn.Module) -> nn.Module:
    factors = converted[0].factors
    return KroneckerLinear(factors["U"][0], factors["V"][0], converted[0].bias)


def tensorly_cp(rank: int) -> nn.Module:
    import tltorch

    dense = dense_convolution()
    return tltorch.FactorizedConv.from_conv(
        dense, rank=rank, factorization="cp", implementation="factorized", decompose_weights=False
    )


def peft_adapter(kind: str, layer: nn.Module, rank: int, alpha: str, **settings: Any) -> nn.Module:
    import peft

    config = getattr(peft, kind)(r=rank, target_modules=["0"], **{alpha: rank}, **settings)
    return peft.get_peft_model(nn.Sequential(layer), config)


def lycoris_adapter(kind: str, layer: nn.Module, rank: int, **settings: Any) -> nn.Module:
    from lycoris.modules.locon import LoConModule
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    kinds = {"LoCon": LoConModule, "LoHa": LohaModule, "LoKr": LokrModule}
    layer.requires_grad_(False)
    adapter = kinds[kind]("adapter", layer, lora_dim=rank, alpha=rank, **settings)
    adapter.apply_to()
    # The layer calls the adapter but does not hold it as a submodule, so its parameters would not be found.
    return nn.ModuleDict({"layer": layer, "adapter": adapter})


def training_pass(module: nn.Module, shape: Sequence[int]) -> Step:
    """Return what runs the module forward and backward once."""
    call = module["layer"] if isinstance(module, nn.ModuleDict) else module
    inputs = torch.randn(shape, requires_grad=True)
    trained = [inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    gradient = torch.randn_like(call(inputs))

    def run() -> None:
        for tensor in trained:
            tensor.grad = None
        call(inputs).backward(gradient)

    return run


# Optimizers


def weight_with_gradient() -> nn.Parameter:
    weight = nn.Parameter(torch.randn(1024, 1024))
    weight.grad = torch.randn(1024, 1024)
    return weight


def adamw_step() -> Step:
    return torch.optim.AdamW([weight_with_gradient()], lr=1e-3).step


def projected_adamw() -> Any:
    from lightning_lowrank.optim import ProjectedAdamW

    return ProjectedAdamW([weight_with_gradient()], lr=1e-3, rank=128, refresh_interval=None)


def galore_adamw_step() -> Step:
    from galore_torch import GaLoreAdamW

    groups = galore_groups([weight_with_gradient()])
    return GaLoreAdamW(groups, lr=1e-3, weight_decay=1e-2, no_deprecation_warning=True).step


def two_products() -> Step:
    weight, projection = weight_with_gradient(), torch.linalg.qr(torch.randn(1024, 128)).Q.contiguous()

    @torch.no_grad()
    def run() -> None:
        weight.addmm_(weight.grad @ projection, projection.T, alpha=-1e-3)

    return run


class AfterBackward:
    """Steps of eight weights, each timed right after a backward pass, which is when optimizers step.

    In a loop of nothing but steps, one weight's moments stay in the processor's cache; in training they do not.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        self.optimizer = make(list(self.layers.parameters()))
        self.inputs = torch.randn(LINEAR_INPUT)

    def prepare(self) -> None:
        self.optimizer.zero_grad()
        self.layers(self.inputs).square().mean().backward()

    def __call__(self) -> None:
        self.optimizer.step()


def galore_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    settings = {"rank": 128, "update_proj_gap": sys.maxsize, "scale": 1.0, "proj_type": "std"}
    return [{"params": parameters, **settings}]


def adamw_after_backward() -> Step:
    return AfterBackward(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def projected_after_backward() -> Step:
    from lightning_lowrank.optim import ProjectedAdamW

    return AfterBackward(lambda parameters: ProjectedAdamW(parameters, lr=1e-3, rank=128, refresh_interval=None))


def galore_after_backward() -> Step:
    from galore_torch import GaLoreAdamW

    return AfterBackward(
        lambda parameters: GaLoreAdamW(
            galore_groups(parameters), lr=1e-3, weight_decay=1e-2, no_deprecation_warning=True
        )
    )


def projected_refresh() -> Step:
    optimizer = projected_adamw()
    optimizer.step()

    def run() -> None:
        # The step is counted in, should the new subspace only be drawn when it is first needed.
        optimizer.refresh()
        optimizer.step()

    return run


def galore_refresh() -> Step:
    from galore_torch.galore_projector import GaLoreProjector

    gradient = torch.randn(1024, 1024)
    projector = GaLoreProjector(rank=128)
    return lambda: projector.get_orthogonal_matrix(gradient, 128, type="right")


def svd_refresh() -> Step:
    gradient = torch.randn(1024, 1024)
    return lambda: torch.linalg.svd(gradient, full_matrices=False)


# Timing


@dataclass
class Row:
    """One comparison; of the contenders, the first that is installed is the baseline.

    Attributes:
        name: What is compared.
        limit: The most that our time may be of the baseline's.
        contenders: For each by name, what makes the step that is timed.
    """

    name: str
    limit: float
    contenders: dict[str, Callable[[], Step]]


def layer_row(
    name: str,
    limit: float,
    shape: Sequence[int],
    dense: Callable[[], nn.Module],
    converted: Callable[[], nn.Sequential],
    by_hand: Callable[[nn.Module], nn.Module] | None = None,
    **peers: Callable[[], nn.Module],
) -> Row:
    def hand_written() -> nn.Module:
        assert by_hand is not None
        layer = converted()
        reference = by_hand(layer)
        inputs = torch.randn(shape)
        torch.testing.assert_close(layer(inputs), reference(inputs), rtol=1e-3, atol=1e-4)
        return reference

    modules = {"dense": dense, OURS: converted}
    if by_hand is not None:
        modules[HAND_WRITTEN] = hand_written
    modules.update({peer.replace("_", " "): make for peer, make in peers.items()})
    return Row(name, limit, {key: lambda make=make: training_pass(make(), shape) for key, make in modules.items()})


def rows() -> list[Row]:
    update = {"role": "update"}
    weight = {"role": "weight"}
    return [
        layer_row(
            "Conv2d 256→256 3×3, 8×256×16×16, matrix product rank 32",
            0.20,
            CONVOLUTION_INPUT,
            dense_convolution,
            lambda: ours(dense_convolution(), "MatrixProduct", 32, **weight),
            two_convolutions,
        ),
        layer_row(
            "Conv2d 256→256 3×3, 8×256×16×16, CP rank 32",
            0.28,
            CONVOLUTION_INPUT,
            dense_convolution,
            lambda: ours(dense_convolution(), "CP", 32, **weight),
            TensorLy_CP=lambda: tensorly_cp(32),
        ),
        layer_row(
            "Linear 1024→1024, batch 64, matrix product rank 64",
            0.38,
            LINEAR_INPUT,
            dense_linear,
            lambda: ours(dense_linear(), "MatrixProduct", 64, **weight),
            two_linears,
        ),
        layer_row(
            "Linear 1024→1024, batch 64, one Kronecker block",
            0.42,
            LINEAR_INPUT,
            dense_linear,
            lambda: ours(dense_linear(), "BlockKronecker", 1, **weight),
            kronecker,
        ),
        layer_row(
            "Linear 1024→1024, batch 64, one Kronecker block as update",
            1.35,
            LINEAR_INPUT,
            dense_linear,
            lambda: ours(dense_linear(), "BlockKronecker", 1, **update),
            PEFT_LoKr=lambda: peft_adapter("LoKrConfig", dense_linear(), 32, "alpha", decompose_factor=32),
            LyCORIS_LoKr=lambda: lycoris_adapter("LoKr", dense_linear(), 32, factor=32),
            LyCORIS_LoKr_bypass=lambda: lycoris_adapter("LoKr", dense_linear(), 32, factor=32, bypass_mode=True),
        ),
        layer_row(
            "Linear 1024→1024, batch 64, LoRA rank 64",
            1.2,
            LINEAR_INPUT,
            dense_linear,
            lambda: ours(dense_linear(), "MatrixProduct", 64, init="lora", **update),
            PEFT_LoRA=lambda: peft_adapter("LoraConfig", dense_linear(), 64, "lora_alpha"),
            LyCORIS_LoCon_bypass=lambda: lycoris_adapter("LoCon", dense_linear(), 64, bypass_mode=True),
        ),
        layer_row(
            "Linear 1024→1024, batch 64, Hadamard rank 32 as update",
            3.0,
            LINEAR_INPUT,
            dense_linear,
            lambda: ours(dense_linear(), "Hadamard", 32, **update),
            PEFT_LoHa=lambda: peft_adapter("LoHaConfig", dense_linear(), 32, "alpha"),
            LyCORIS_LoHa=lambda: lycoris_adapter("LoHa", dense_linear(), 32),
        ),
        Row(
            "AdamW step, 1024×1024, projected to rank 128",
            3.0,
            {
                "torch AdamW": adamw_step,
                OURS: lambda: projected_adamw().step,
                "its two products alone": two_products,
                "GaLoreAdamW": galore_adamw_step,
            },
        ),
        Row(
            "AdamW step of eight such weights after each backward pass",
            3.0,
            {
                "torch AdamW": adamw_after_backward,
                OURS: projected_after_backward,
                "GaLoreAdamW": galore_after_backward,
            },
        ),
        Row(
            "new subspace, 1024×1024, rank 128",
            0.25,
            {"GaLore's SVD": galore_refresh, "torch SVD": svd_refresh, OURS: projected_refresh},
        ),
    ]


@dataclass
class Result:
    """The times of one row's contenders, in milliseconds per repetition, and what kept others out of it."""

    row: Row
    times: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return next(name for name in self.row.contenders if name in self.times)

    def ratio(self, name: str) -> float:
        pairs = zip(self.times[name], self.times[self.baseline], strict=True)
        return statistics.median(time / baseline for time, baseline in pairs)

    @property
    def spread(self) -> float:
        """The baseline's upper quartile over its lower one."""
        lower, _, upper = statistics.quantiles(self.times[self.baseline], n=4)
        return upper / lower

    @property
    def met(self) -> bool:
        return OURS in self.times and self.ratio(OURS) <= self.row.limit


def seconds(step: Step, iterations: int) -> float:
    if isinstance(step, AfterBackward):
        total = 0.0
        for _ in range(iterations):
            step.prepare()
            begin = time.perf_counter()
            step()
            total += time.perf_counter() - begin
        return total
    begin = time.perf_counter()
    for _ in range(iterations):
        step()
    return time.perf_counter() - begin


def measure(row: Row, repetitions: int) -> Result:
    result = Result(row)
    steps: dict[str, tuple[Step, int]] = {}
    for name, make in row.contenders.items():
        try:
            step = make()
        except Exception as error:
            result.missing[name] = not_installed(error) or f"FAILS: {first_line(error)}"
        else:
            seconds(step, 2)
            steps[name] = (step, max(3, round(SECONDS_PER_MEASUREMENT / seconds(step, 1))))
            result.times[name] = []
    for _ in range(repetitions):
        for name, (step, iterations) in steps.items():
            result.times[name].append(1000 * seconds(step, iterations) / iterations)
    return result


def print_result(result: Result) -> None:
    print(f"\n{result.row.name}")
    for name in result.row.contenders:
        if name in result.missing:
            print(f"  {name:<24}{result.missing[name]}")
            continue
        line = f"  {name:<24}{statistics.median(result.times[name]):>10.3f} ms{result.ratio(name):>9.3f}"
        if name == OURS:
            line += f"   limit {result.row.limit:.2f}: {'met' if result.met else 'NOT met'}"
        print(line)
    if result.spread > LARGEST_SPREAD:
        print(f"  not to be relied on: the baseline's quartiles are a factor of {result.spread:.1f} apart")


def compare(chosen: list[Row], repetitions: int, file: Path | None) -> int:
    versions = {name: installed_version(name) for name in ("torch", *PEERS)}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"{torch.get_num_threads()} threads, {repetitions} repetitions; medians, and medians of paired ratios")
    results = []
    for row in chosen:
        torch.manual_seed(0)
        results.append(measure(row, repetitions))
        print_result(results[-1])
    met = sum(result.met for result in results)
    print(f"\n{met} of {len(results)} limits met")
    table = [
        {
            "row": result.row.name,
            "limit": result.row.limit,
            "met": result.met,
            "baseline": result.baseline,
            "spread": result.spread,
            "milliseconds": {name: statistics.median(times) for name, times in result.times.items()},
            "ratio": {name: result.ratio(name) for name in result.times},
            "missing": result.missing,
        }
        for result in results
    ]
    head = {"versions": versions, "threads": torch.get_num_threads(), "repetitions": repetitions}
    write_json(file, {**head, "rows": table})
    return 0 if met == len(results) else 1


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def first_line(error: Exception) -> str:
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().split("\n")[0]
    return textwrap.shorten(f"{type(error).__name__}: {said}".rstrip(": "), 110, placeholder=" …")


# Where others fail


@dataclass
class Failure:
    """A setting in which another library fails.

    Attributes:
        peer: The library and its class.
        case: The setting.
        peer_run: Runs the peer; raises, or returns what went wrong without an error.
        ours_run: Runs ours; raises if anything goes wrong, and may return what shows that nothing does.
    """

    peer: str
    case: str
    peer_run: Callable[[], str | None]
    ours_run: Callable[[], str | None]


IMAGES = (2, 8, 12, 12)


def randomise(parameters: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.normal_(std=0.5)


def ours_against_dense(
    layer: nn.Module, shape: Sequence[int], factorization: str, rank: int, role: str, rank_of_update: int | None = None
) -> str:
    """Compare our layer with random factors to the dense layer of its recovered weight, gradients included."""
    from lightning_lowrank.layers import recover

    before = layer.weight.detach().clone()
    model = ours(copy.deepcopy(layer), factorization, rank, role=role)
    randomise([factor for name, factor in model.named_parameters() if "factors." in name])
    inputs, dense_inputs = (torch.randn(shape, generator=torch.manual_seed(1)).requires_grad_() for _ in range(2))
    outputs = model(inputs)
    outputs.square().mean().backward()
    recovered = recover(copy.deepcopy(model))[0]
    # The reference is a layer of torch's own with all the settings of the one that was given.
    dense = copy.deepcopy(layer)
    dense.load_state_dict(recovered.state_dict())
    dense_outputs = dense(dense_inputs)
    dense_outputs.square().mean().backward()
    assert outputs.shape == dense_outputs.shape, (outputs.shape, dense_outputs.shape)
    difference = max(
        ((found - wanted).abs().max() / wanted.abs().max()).item()
        for found, wanted in ((outputs, dense_outputs), (inputs.grad, dense_inputs.grad))
    )
    assert difference < 1e-4, f"differs from the dense layer by {difference:.2g} of its largest output or gradient"
    said = f"the dense layer's output {f'to {difference:.0e}' if difference else 'exactly'}"
    if rank_of_update is not None:
        found = matrix_rank(dense.weight.detach() - before)
        assert found == rank_of_update, f"the update has rank {found}"
        said += f", update of rank {found}"
    return said


def matrix_rank(weight: Tensor) -> int:
    return int(torch.linalg.matrix_rank(weight.double().flatten(1), rtol=1e-5))


def difference_of(found: Tensor, wanted: Tensor, what: str) -> str:
    """Describe a difference well beyond rounding; empty if there is none."""
    if found.shape != wanted.shape:
        return f"{what}: output {tuple(found.shape)}, dense layer {tuple(wanted.shape)}"
    share = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return f"{what}: off by {share:.0%} of the largest output" if share > 0.01 else ""


def peft_merge(kind: str, layer: nn.Module, **settings: Any) -> str:
    import peft

    config = getattr(peft, kind)(r=4, target_modules=["0"], **settings)
    model = peft.get_peft_model(nn.Sequential(layer), config)
    randomise([factor for factor in model.parameters() if factor.requires_grad])
    inputs = torch.randn(IMAGES)
    before = model(inputs)
    return difference_of(model.merge_and_unload()(inputs), before, "merging changes the layer")


def lycoris_bypass(kind: str, layer: nn.Module) -> str:
    model = lycoris_adapter(kind, layer, 4, bypass_mode=True)
    adapter = model["adapter"]
    randomise(list(adapter.parameters()))
    inputs = torch.randn(IMAGES)
    before = layer(inputs)
    merged = adapter.get_merged_weight()[0].detach()
    adapter.restore()
    layer.weight.data = merged.reshape(layer.weight.shape)
    return difference_of(before, layer(inputs), "not the layer of the merged weight")


def lycoris_parametrize(layer: nn.Module) -> str:
    from lycoris.modules.locon import LoConModule

    before = layer.weight.detach().clone()
    adapter = LoConModule.parametrize(layer, "weight", lora_dim=2, alpha=2)
    randomise(list(adapter.parameters()))
    rank = matrix_rank(layer.weight.detach() - before)
    return f"the update of rank 2 has rank {rank}" if rank != 2 else ""


def tensorly_convolution(layer: nn.Module) -> str:
    import tltorch

    factorized = tltorch.FactorizedConv.from_conv(
        layer, rank=16, factorization="cp", implementation="factorized", decompose_weights=False
    )
    randomise(list(factorized.parameters()))
    dense = copy.deepcopy(layer)
    dense.weight.data = factorized.weight.to_tensor().detach()
    dense.bias.data = factorized.bias.detach()
    inputs = torch.randn(IMAGES)
    return difference_of(factorized(inputs), dense(inputs), "not the layer it was made from")


def tensorly_linear(layer: nn.Module) -> str:
    import tltorch

    factorized = tltorch.FactorizedLinear.from_linear(layer, rank=8, factorization="cp", n_tensorized_modes=2)
    if layer.bias is not None or factorized.bias is None:
        return ""
    return f"adds a bias of its own, up to {factorized.bias.abs().max().item():.2f}"


def galore_optimizer(weight: nn.Parameter) -> torch.optim.Optimizer:
    from galore_torch import GaLoreAdamW

    group = {"params": [weight], "rank": 4, "update_proj_gap": 10, "scale": 1.0, "proj_type": "std"}
    return GaLoreAdamW([group], lr=1e-3, no_deprecation_warning=True)


def our_optimizer(weight: nn.Parameter) -> torch.optim.Optimizer:
    from lightning_lowrank.optim import ProjectedAdamW

    return ProjectedAdamW([weight], lr=1e-3, rank=4, refresh_interval=None, weight_decay=0.0)


Optimizer = Callable[[nn.Parameter], torch.optim.Optimizer]


def step_of_a_kernel(make: Optimizer) -> None:
    """Step a convolution's kernel; the change must lie in a subspace of the rank that was asked for."""
    # From zero, so that the change is not rounded to the weight's precision.
    weight = nn.Parameter(torch.zeros(16, 8, 3, 3))
    weight.grad = torch.randn_like(weight)
    make(weight).step()
    rank = matrix_rank(weight.detach())
    assert rank == 4, f"the step has rank {rank}, not 4"


def resume_with_weights_only(make: Optimizer) -> None:
    """Save the state, load it with `weights_only=True` into another optimizer, and step both."""
    weights = [nn.Parameter(torch.ones(12, 8)) for _ in range(2)]
    first, second = (make(weight) for weight in weights)
    gradients = torch.randn(2, 12, 8)
    weights[0].grad = gradients[0]
    first.step()
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    weights[1].data.copy_(weights[0].data)
    for optimizer, weight in zip((first, second), weights, strict=True):
        weight.grad = gradients[1]
        optimizer.step()
    assert torch.equal(*weights), "the resumed optimizer steps differently"


def failures() -> list[Failure]:
    def convolution(**settings: Any) -> Callable[[], nn.Module]:
        return lambda: nn.Conv2d(8, 8, 3, **settings)

    def case(
        peer: str,
        name: str,
        make: Callable[[], nn.Module],
        peer_run: Callable[[nn.Module], str],
        shape: Sequence[int] = IMAGES,
        factorization: str = "MatrixProduct",
        rank: int = 4,
        role: str = "update",
        rank_of_update: int | None = None,
    ) -> Failure:
        return Failure(
            peer,
            name,
            lambda: peer_run(make()),
            lambda: ours_against_dense(make(), shape, factorization, rank, role, rank_of_update),
        )

    def peft_lora(layer: nn.Module) -> str:
        return peft_merge("LoraConfig", layer, init_lora_weights=False)

    def locon(layer: nn.Module) -> str:
        return lycoris_bypass("LoCon", layer)

    circular = convolution(padding=1, padding_mode="circular")
    dilated, dilated_same = convolution(padding=2, dilation=2), convolution(padding="same", dilation=2)
    grouped, uneven = convolution(padding=1, groups=2), convolution(padding=1, stride=(2, 1))
    cp: dict[str, Any] = {"factorization": "CP", "rank": 16, "role": "weight"}
    return [
        case("PEFT LoRA", "Conv2d, dilation 2, padding 2", dilated, peft_lora),
        case("PEFT LoRA", 'Conv2d, dilation 2, padding "same"', dilated_same, peft_lora),
        case("PEFT LoRA", "Conv2d, circular padding", circular, peft_lora),
        case("PEFT LoRA", "Conv2d, 2 groups, merged", grouped, peft_lora),
        case(
            "PEFT LoHa",
            "Conv2d, circular padding",
            circular,
            lambda layer: peft_merge("LoHaConfig", layer, init_weights=False),
            factorization="Hadamard",
            rank=2,
        ),
        case(
            "PEFT LoKr",
            "Conv2d, circular padding",
            circular,
            lambda layer: peft_merge("LoKrConfig", layer, init_weights=False),
            factorization="BlockKronecker",
            rank=1,
        ),
        case("LyCORIS LoCon, bypass", "Conv2d, dilation 2, padding 2", dilated, locon),
        case("LyCORIS LoCon, bypass", "Conv2d, circular padding", circular, locon),
        case(
            "LyCORIS LoKr, bypass",
            "Conv2d, 2 groups",
            grouped,
            lambda layer: lycoris_bypass("LoKr", layer),
            factorization="BlockKronecker",
            rank=1,
        ),
        case(
            "LyCORIS parametrize",
            "Linear 12→16, rank 2",
            lambda: nn.Linear(12, 16),
            lycoris_parametrize,
            shape=(5, 12),
            rank=2,
            rank_of_update=2,
        ),
        case("LyCORIS parametrize", "Conv2d, kernel 3×1", lambda: nn.Conv2d(8, 8, (3, 1)), lycoris_parametrize, rank=2),
        case("TensorLy FactorizedConv", "2 groups", grouped, tensorly_convolution, **cp),
        case("TensorLy FactorizedConv", "stride (2, 1)", uneven, tensorly_convolution, **cp),
        case("TensorLy FactorizedConv", 'padding "same"', convolution(padding="same"), tensorly_convolution, **cp),
        case("TensorLy FactorizedConv", "circular padding", circular, tensorly_convolution, **cp),
        case(
            "TensorLy FactorizedLinear",
            "without bias",
            lambda: nn.Linear(16, 16, bias=False),
            tensorly_linear,
            shape=(5, 16),
            role="weight",
        ),
        Failure(
            "GaLoreAdamW",
            "step on a convolution's kernel",
            lambda: step_of_a_kernel(galore_optimizer),
            lambda: step_of_a_kernel(our_optimizer),
        ),
        Failure(
            "GaLoreAdamW",
            "resume, torch.load(weights_only=True)",
            lambda: resume_with_weights_only(galore_optimizer),
            lambda: resume_with_weights_only(our_optimizer),
        ),
    ]


def show_failures(chosen: list[Failure], file: Path | None) -> int:
    heads = ("peer", "case", "what happens", "ours")
    lines = []
    as_claimed = True
    for failure in chosen:
        torch.manual_seed(0)
        try:
            happens = failure.peer_run() or "NO FAILURE"
            as_claimed &= happens != "NO FAILURE"
        except Exception as error:
            happens = not_installed(error) or first_line(error)
        try:
            right = failure.ours_run() or "works"
        except Exception as error:
            as_claimed, right = False, f"FAILS: {first_line(error)}"
        lines.append((failure.peer, failure.case, happens, right))
    versions = {name: installed_version(name) for name in ("torch", *PEERS)}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    for line in [heads, ("---",) * 4, *lines]:
        print(f"| {' | '.join(line)} |")
    write_json(file, {"versions": versions, "rows": [dict(zip(heads, line, strict=True)) for line in lines]})
    return 0 if as_claimed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9, help="at least 2; 9 by default")
    parser.add_argument("--only", default="", help="run the rows whose name has this in it")
    parser.add_argument("--failures", action="store_true", help="show where others fail; nothing is timed")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.failures:
        chosen = [failure for failure in failures() if options.only in f"{failure.peer} {failure.case}"]
        return show_failures(chosen, options.json)
    return compare([row for row in rows() if options.only in row.name], options.repetitions, options.json)


if __name__ == "__main__":
    sys.exit(main())
