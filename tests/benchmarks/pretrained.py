"""What federated rounds cost beside `Trainer.fit` for a large pretrained model whose adapters alone are trained.

    python tests/benchmarks/pretrained.py [--models 110m 1b] [--repetitions N] [--threads N] [--json FILE]

The models are Llamas with random weights in bfloat16, wrapped by PEFT (LoRA of rank 8 on the query and value
projections), trained with AdamW: by a plain `Trainer.fit`, and by `FederatedLoop` with Product-Sum and four clients,
one after another and together. Each run is a process of its own. Shown are

- start: seconds from the call of `fit` to the first training step,
- memory: the largest resident memory during `fit`, over that of the loaded model, in MB,
- the seconds of a round, which is an epoch of the plain run,
- the size of a checkpoint in MB, with `TrainedCheckpoints` for the rounds,

as medians over the repetitions, and two limits: peak memory (the loaded model's with it) of the sequential run at most
5 % and three adapters above the plain run's, and a start at most one second later. The line through the differences at
two sizes tells what they would be at 7 billion parameters.

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
from pathlib import Path
from typing import Any

from json_option import add_json_option, write_json

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "110m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
}
WAYS = ("plain", "sequential", "vectorized")
SEVEN_BILLION = 7_000_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["110m", "1b"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return 0
    found: dict[str, dict[str, Any]] = {}
    met = True
    for model in options.models:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.repetitions):
            for way in WAYS:
                runs[way].append(in_process(model, way, options.threads))
        medians = {
            way: {key: statistics.median(run[key] for run in several) for key in several[0]}
            for way, several in runs.items()
        }
        found[model] = medians
        plain = medians["plain"]
        print(f"\n{model}: {plain['numbers'] / 1e6:,.0f} million parameters, {plain['model']:,.0f} MB loaded")
        print(f"  {'':12}{'start':>9}{'memory':>10}{'round':>10}{'checkpoint':>13}")
        for way, own in medians.items():
            print(
                f"  {way:12}{own['start']:7.2f} s{own['memory']:7,.0f} MB{own['round']:8.2f} s"
                f"{own['checkpoint']:10,.1f} MB"
            )
        loop = medians["sequential"]
        most = 1.05 * (plain["model"] + plain["memory"]) + 3 * plain["adapter"] - plain["model"]
        met &= limit("sequential: memory", loop["memory"], most, "MB")
        met &= limit("sequential: start after plain's", loop["start"] - plain["start"], 1.0, "s")
    if len(found) > 1:
        extrapolate(*(found[model] for model in options.models[:2]))
    write_json(options.json, found)
    return 0 if met else 1


def limit(name: str, value: float, most: float, unit: str) -> bool:
    met = value <= most
    print(f"  {name}: {value:.2f} {unit}, limit {most:.2f} {unit}: {'met' if met else 'NOT MET'}")
    return met


def extrapolate(small: dict[str, Any], large: dict[str, Any]) -> None:
    """Print the line through two sizes at seven billion parameters, of what rounds add to a plain run."""
    between = large["plain"]["numbers"] - small["plain"]["numbers"]
    print(
        "\nwhat rounds one after another add to a plain run at 7 billion parameters, by the line through the two sizes"
    )
    for key, unit in (("start", "s"), ("memory", "MB"), ("checkpoint", "MB")):
        one, two = (each["sequential"][key] - each["plain"][key] for each in (small, large))
        slope = (two - one) / between
        at_seven = two + slope * (SEVEN_BILLION - large["plain"]["numbers"])
        print(f"  {key}: {one:.2f} {unit}, {two:.2f} {unit}, so {at_seven:.1f} {unit}")


def in_process(model: str, way: str, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", model, way]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPOSITORY)}
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
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_lowrank import FederatedLoop, FedLoRA, ProductSum, TrainedCheckpoints

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            torch.set_default_dtype(torch.bfloat16)
            config = LlamaConfig(**MODELS[model], vocab_size=32_000, tie_word_embeddings=True, use_cache=False)
            network = LlamaForCausalLM(config)
            torch.set_default_dtype(torch.float32)
            lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            self.network: Any = get_peft_model(network, lora)
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

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.ends.append(time.perf_counter())

    module = Model()
    tokens = torch.randint(32_000, (16, 32), generator=torch.Generator().manual_seed(1))
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[pl.Callback] = [rounds, ModelCheckpoint(folder, filename="last")]
        if way != "plain":
            federated = FederatedLoop(FedLoRA(ProductSum()), clients=4, execution=way, summary=False)
            callbacks = [federated, *callbacks, TrainedCheckpoints()]
        trainer = pl.Trainer(
            max_epochs=3,
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        before, peak = resident(), Peak()
        began = time.perf_counter()
        trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=2))
        memory = peak.stop() - before
        size = (Path(folder) / "last.ckpt").stat().st_size
    trained = sum(value.numel() * value.element_size() for value in module.parameters() if value.requires_grad)
    return {
        "numbers": sum(value.numel() for value in module.parameters()),
        "model": before / 1e6,
        "adapter": trained / 1e6,
        "start": module.began - began,
        "memory": memory / 1e6,
        "round": statistics.median(two - one for one, two in zip(rounds.ends, rounds.ends[1:], strict=False)),
        "checkpoint": size / 1e6,
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident memory from now on, looked at each two milliseconds."""

    def __init__(self) -> None:
        self._most, self._running = resident(), True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

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
