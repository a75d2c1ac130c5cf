"""What federated rounds cost beside `Trainer.fit` for a large pretrained model whose adapters alone are trained.

    python tests/benchmarks/pretrained.py [--models 110m 1b] [--repetitions N] [--threads N] [--json FILE]
    python tests/benchmarks/pretrained.py --models 1b --ways plain --json runs.json
    python tests/benchmarks/pretrained.py --recipe
    python tests/benchmarks/pretrained.py --models 1b --ways sequential --more runs.json --json runs.json

The models are Llamas with random weights in bfloat16 (``--dtype float32`` where the processor has no
arithmetic of it, which is then hundreds of times slower), wrapped by PEFT (LoRA of rank 8 on the query and value
projections), trained with AdamW: by a plain `Trainer.fit`, and by `FederatedLoop` with Product-Sum and four clients,
one after another and together. ``small`` has 4 layers of width 256 in float32, and eight clients with batches of 4
sequences of 32 tokens; there a round of clients together must take at most 1/2.5 of one of clients one after another.
Shown beside it is what the products with frozen weights take by themselves, forward and of the gradient of the input:
no execution makes fewer of them. Each run is a process of its own. Shown are

- start: seconds from the call of `fit` to the first training step,
- memory: the largest resident memory during `fit`, over that of the loaded model, in MB; for the plain run also without
  that of writing its checkpoint, which holds the whole model,
- the seconds of a round, which is an epoch of the plain run,
- the size of a checkpoint in MB, with `TrainedCheckpoints` for the rounds,

as medians over the repetitions, and limits for both kinds of rounds: peak memory (the loaded model's with it) at most
5 % and three adapters above the plain run's, and a start at most one second later. With ``--more`` runs of an earlier
call are taken over, so that a machine that others use is needed in short pieces only.

What rounds would cost at 7 billion parameters comes from a formula of the numbers of parameters alone, which is printed
beside what was measured at the sizes that were run. Nothing in it is fitted:

- A checkpoint holds the adapter once (the server's values are the module's), AdamW's two moments of it where clients
  step one after another, and for each frozen tensor its name and a digest.
- A step of one client needs, over the loaded model, what autograd keeps for its backward pass, which torch tells of a
  model on the device "meta", without any memory; the gradient of the logits in their own type and in single precision;
  the adapter's gradient and AdamW's two moments of it. The server has the adapter once more, and each client's arrival.
  Clients that step together need a step's memory each.
- A round takes the multiply-adds of the products with frozen weights, forward and of the gradient of the input, at a
  rate that is measured at each size on its own.

What rounds add to the start does not grow with the numbers of the base, but with its layers.

``--recipe`` prints by the same formula what `recipes/flowertune/general.yaml` needs.

The exit status is 1 if a limit is not met. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from json_option import add_json_option, write_json

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "110m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
}
SEVEN = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
# Clients, batch, sequences in all, type of the weights, and rounds.
SMALL = {"clients": 8, "batch": 4, "sequences": 256, "dtype": "float32", "rounds": 3}
ROUNDS = {"clients": 4, "batch": 2, "sequences": 16, "dtype": "bfloat16", "rounds": 3}
MISTRAL = {
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": ROUNDS,
    "small": SMALL,
    "110m": ROUNDS,
    "1b": {**ROUNDS, "batch": 1, "sequences": 4, "rounds": 2},
    "7b": ROUNDS,
}
WAYS = ("plain", "sequential", "vectorized")
DIGEST = 32
VOCABULARY, LENGTH = 32_000, 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["110m", "1b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--more", type=Path, help="the --json FILE of an earlier call, whose runs are taken over")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="the weights' type, if not the model's own")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recipe", action="store_true", help="print what FlowerTune's recipe needs, no more")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.dtype:
        for settings in SETTINGS.values():
            settings["dtype"] = options.dtype
    if options.child:
        print(json.dumps(measure(*options.child)))
        return 0
    if options.recipe:
        return 0 if recipe_fits() else 1
    runs = json.loads(options.more.read_text()) if options.more else {}
    for model in options.models:
        own = runs.setdefault(model, {})
        for _ in range(options.repetitions):
            for way in options.ways:
                own.setdefault(way, []).append(in_process(model, way, options))
    write_json(options.json, runs)
    met = True
    for model, own in runs.items():
        met &= show(model, own)
    expect(runs)
    return 0 if met else 1


def show(model: str, runs: dict[str, list[dict[str, float]]]) -> bool:
    """Print one model's table, and return whether its limits are met."""
    found = medians(runs)
    first = next(iter(found.values()))
    print(f"\n{model}: {first['numbers'] / 1e6:,.0f} million parameters, {first['model']:,.0f} MB loaded")
    print(f"  {'':12}{'start':>9}{'memory':>10}{'round':>10}{'checkpoint':>13}")
    for way, own in found.items():
        print(
            f"  {way:12}{own['start']:7.2f} s{own['memory']:7,.0f} MB{own['round']:8.2f} s{own['checkpoint']:10,.1f} MB"
            + (f"   ({own['training']:,.0f} MB without the checkpoint)" if way == "plain" else "")
        )
    met = True
    for way in found.keys() - {"plain"} if "plain" in found else ():
        plain, own = found["plain"], found[way]
        more = 0.05 * (plain["model"] + plain["memory"]) + 3 * plain["adapter"]
        met &= limit(f"{way}: memory", own["memory"], plain["memory"] + more, "MB")
        met &= limit(f"{way}: start after plain's", own["start"] - plain["start"], 1.0, "s")
    if model == "small" and {"sequential", "vectorized"} <= found.keys():
        met &= limit("vectorized: round", found["vectorized"]["round"], found["sequential"]["round"] / 2.5, "s")
        for way in ("sequential", "vectorized"):
            own = found[way]
            print(
                f"  {way}: {own['products']:.2f} s of a round's {own['round']:.2f} s are products with frozen weights"
            )
    return met


def medians(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    ordered = {way: runs[way] for way in WAYS if way in runs}
    return {
        way: {key: statistics.median(run[key] for run in several) for key in several[0]}
        for way, several in ordered.items()
    }


def limit(name: str, value: float, most: float, unit: str) -> bool:
    met = value <= most
    print(f"  {name}: {value:.2f} {unit}, limit {most:.2f} {unit}: {'met' if met else 'NOT MET'}")
    return met


def expect(runs: dict[str, Any]) -> None:
    """Print what the formula says of each size that was run beside what was measured, and of 7 billion parameters."""
    print("\nby the formula (measured)")
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for model, own in runs.items():
        found, settings = medians(own), SETTINGS[model]
        shapes = parameters(MODELS[model], settings)
        print(f"  {model}: adapter {4e-6 * shapes['trained']:.2f} MB ({next(iter(found.values()))['adapter']:.2f})")
        for way, figures in found.items():
            expected = memory_bytes(shapes, way, settings) / 1e6
            line = f"    {way:12}memory {expected:,.0f} MB ({figures['training' if way == 'plain' else 'memory']:,.0f})"
            if way != "plain":
                size = checkpoint_bytes(shapes, way) / 1e6
                line += f", checkpoint {size:.2f} MB ({figures['checkpoint']:.2f})"
            rates[way].append(settings["sequences"] * shapes["operations"] / figures["round"])
            print(line + f", round {figures['round']:.2f} s: {rates[way][-1] / 1e9:.1f} billion multiply-adds a second")
    shapes = parameters(SEVEN, SETTINGS["7b"])
    print(
        f"  7b: {(shapes['frozen'] + shapes['trained']) / 1e9:.2f} billion parameters, {1e-9 * shapes['bytes']:.1f} GB;"
        f" adapter {4e-6 * shapes['trained']:.1f} MB"
    )
    for way in WAYS:
        line = f"    {way:12}memory {memory_bytes(shapes, way, SETTINGS['7b']) / 1e6:,.0f} MB over the loaded model"
        if way != "plain":
            line += f", checkpoint {checkpoint_bytes(shapes, way) / 1e6:.1f} MB"
        seconds = [SETTINGS["7b"]["sequences"] * shapes["operations"] / rate for rate in rates[way]]
        print(line + (f", round {min(seconds):.0f} to {max(seconds):.0f} s" if seconds else ""))


def memory_bytes(shapes: dict[str, int], way: str, settings: dict[str, Any]) -> int:
    together = settings["clients"] if way == "vectorized" else 1
    adapter = 4 * shapes["trained"]
    return together * (shapes["step"] + 3 * adapter) + (0 if way == "plain" else (1 + settings["clients"]) * adapter)


def checkpoint_bytes(shapes: dict[str, int], way: str) -> int:
    copies = 3 if way == "sequential" else 1
    return 4 * shapes["trained"] * copies + shapes["names"] + DIGEST * shapes["frozen_tensors"]


def parameters(sides: dict[str, int], settings: dict[str, Any]) -> dict[str, int]:
    """Return what the formula takes of a Llama with LoRA of rank 8, from its shapes alone.

    ``step``: Bytes of one client's step. ``operations``: Multiply-adds of one sequence with frozen weights.
    """
    import torch

    dtype = getattr(torch, settings["dtype"])
    with torch.device("meta"):
        network = model_of(sides, dtype)
        tokens = torch.zeros(settings["batch"], LENGTH, dtype=torch.long)
        # Without a mask transformers would read the positions.
        mask = torch.zeros(settings["batch"], 1, LENGTH, LENGTH, dtype=dtype)
    kept = kept_bytes(
        lambda: network(input_ids=tokens, labels=tokens, attention_mask=mask).loss, list(network.parameters())
    )
    logits = tokens.numel() * VOCABULARY * (4 + dtype.itemsize)
    named = list(network.named_parameters())
    frozen = [(name, value) for name, value in named if not value.requires_grad]
    # The embedding is a table, and as the head it is a product.
    products = sum(value.numel() for _, value in frozen if value.ndim == 2)
    return {
        "trained": sum(value.numel() for _, value in named if value.requires_grad),
        "frozen": sum(value.numel() for _, value in frozen),
        "bytes": sum(value.numel() * value.element_size() for _, value in frozen),
        "frozen_tensors": len(frozen),
        "names": sum(len(name) + len("network.") for name, _ in frozen),
        "step": kept + logits,
        "operations": 2 * products * LENGTH,
    }


def recipe_fits() -> bool:
    """Print what a step of `recipes/flowertune/general.yaml` needs by the formula, and whether its limit holds.

    Of layers that are computed again, one at a time holds what its backward pass needs.
    """
    import torch
    import yaml

    recipe = yaml.safe_load((REPOSITORY / "recipes" / "flowertune" / "general.yaml").read_text())
    found = {layers: recipe_bytes(recipe, layers, again=False) for layers in (1, 2)}
    whole = recipe_bytes(recipe, MISTRAL["num_hidden_layers"], again=True)
    tokens = recipe["data"]["init_args"]["batch_size"] * recipe["data"]["init_args"]["max_length"]
    dtype = getattr(torch, recipe["model"]["init_args"]["dtype"])
    parts = {
        "frozen weights": whole["frozen"],
        "adapter, its gradient and AdamW's moments, the server's values and arrivals": (
            4 * (5 + recipe["federated"]["clients_per_round"]) * whole["trained"]
        ),
        "kept for the backward pass": whole["kept"],
        "one layer computed again": found[2]["kept"] - found[1]["kept"],
        "gradients of the logits": tokens * MISTRAL["vocab_size"] * (4 + dtype.itemsize),
    }
    for name, size in parts.items():
        print(f"  {name}: {size / 1e9:.2f} GB")
    return limit("flowertune: memory", sum(parts.values()) / 1e9, 24.0, "GB")


def recipe_bytes(recipe: dict[str, Any], layers: int, again: bool) -> dict[str, int]:
    """Return what a step of so many layers of the recipe's model keeps, in bytes, and its numbers."""
    import torch
    from transformers import MistralConfig

    from lightning_lowrank import LowRank, MatrixProduct
    from lightning_lowrank.models import CausalLM

    settings, data = dict(recipe["lowrank"]), recipe["data"]["init_args"]
    settings.pop("factorization")
    with torch.device("meta"):
        config = MistralConfig(**{**MISTRAL, "num_hidden_layers": layers})
        module = CausalLM(config, dtype=recipe["model"]["init_args"]["dtype"], gradient_checkpointing=again)
        LowRank(MatrixProduct(), **settings, seed=0, summary=False).convert(module)
        tokens = torch.zeros(data["batch_size"], data["max_length"], dtype=torch.long)
        shape = (data["batch_size"], 1, data["max_length"], data["max_length"])
        mask = torch.zeros(shape, dtype=module.network.dtype)
    module.log = lambda *arguments, **keywords: None  # type: ignore[method-assign]
    parameters = list(module.parameters())
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    return {
        "kept": kept_bytes(lambda: module.training_step(batch, 0), parameters),
        "frozen": sum(value.numel() * value.element_size() for value in parameters if not value.requires_grad),
        "trained": sum(value.numel() for value in parameters if value.requires_grad),
    }


def kept_bytes(step: Callable[[], Any], parameters: Iterable[Any]) -> int:
    """Return the bytes that autograd keeps for the backward pass of a step, beside the parameters."""
    import torch

    held = {value.untyped_storage()._cdata for value in parameters}
    kept: dict[int, int] = {}

    def keep(value: Any) -> Any:
        storage = value.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        # The hooks see each tensor as it is kept, and all live until the loss is dropped.
        loss = step()
    del loss
    return sum(kept.values())


def model_of(sides: dict[str, int], dtype: Any) -> Any:
    """Return a Llama with weights of a type, and adapters in single precision, as PEFT gives them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sides, vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.set_default_dtype(dtype)
    try:
        return get_peft_model(LlamaForCausalLM(config), lora)
    finally:
        torch.set_default_dtype(torch.float32)


def in_process(model: str, way: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", model, way]
    command += ["--dtype", options.dtype] if options.dtype else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model} {way} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(model: str, way: str) -> dict[str, float]:
    import logging
    import warnings

    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_lowrank import FederatedLoop, FedLoRA, ProductSum, TrainedCheckpoints

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network: Any = model_of(MODELS[model], getattr(torch, settings["dtype"]))
            self.began = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.began = self.began or time.perf_counter()
            (tokens,) = batch
            return self.network(input_ids=tokens, labels=tokens).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad], lr=1e-4)

    class Rounds(pl.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.memory = 0

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.ends.append(time.perf_counter())

        def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
            self.memory = self.memory or peak.most

    settings = SETTINGS[model]
    module = Model()
    tokens = torch.randint(VOCABULARY, (settings["sequences"], LENGTH), generator=torch.Generator().manual_seed(1))
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[pl.Callback] = [rounds, ModelCheckpoint(folder, filename="last")]
        if way != "plain":
            federated = FederatedLoop(FedLoRA(ProductSum()), clients=settings["clients"], execution=way, summary=False)
            callbacks = [federated, *callbacks, TrainedCheckpoints()]
        trainer = pl.Trainer(
            max_epochs=settings["rounds"],
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        before, peak = resident(), Peak()
        began = time.perf_counter()
        trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=settings["batch"]))
        memory = peak.stop() - before
        size = (Path(folder) / "last.ckpt").stat().st_size
    trained = sum(value.numel() * value.element_size() for value in module.parameters() if value.requires_grad)
    together = settings["clients"] if way == "vectorized" else 1
    steps = settings["sequences"] // (settings["batch"] * together) if model == "small" else 0
    return {
        "products": steps * products_seconds(module, settings["batch"] * LENGTH * together) if steps else 0.0,
        "numbers": sum(value.numel() for value in module.parameters()),
        "model": before / 1e6,
        "adapter": trained / 1e6,
        "start": module.began - began,
        "memory": memory / 1e6,
        "training": (rounds.memory - before) / 1e6,
        "round": statistics.median(two - one for one, two in zip(rounds.ends, rounds.ends[1:], strict=False)),
        "checkpoint": size / 1e6,
    }


def products_seconds(module: Any, rows: int) -> float:
    """Return how long one step's products of so many rows with the frozen matrices take, both ways."""
    import torch

    found = 0.0
    with torch.no_grad():
        for weight in module.parameters():
            if weight.requires_grad or weight.ndim != 2:
                continue
            values = torch.randn(rows, weight.shape[1])
            times = []
            for _ in range(5):
                began = time.perf_counter()
                values @ weight.T @ weight
                times.append(time.perf_counter() - began)
            found += statistics.median(times)
    return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident memory from now on, looked at each two milliseconds."""

    def __init__(self) -> None:
        self._most, self._running = resident(), True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def most(self) -> int:
        return self._most

    def _watch(self) -> None:
        while self._running:
            self._most = max(self._most, resident())
            time.sleep(0.002)

    def stop(self) -> int:
        self._running = False
        self._thread.join()
        return self._most


if __name__ == "__main__":
    sys.exit(main())
