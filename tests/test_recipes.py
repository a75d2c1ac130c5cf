"""Every YAML file under ``recipes/`` runs, alone or on the bases it is an overlay of."""

import hashlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from lightning_lowrank import CP, FederatedLoop, LowRank
from lightning_lowrank.cli import main, parser
from lightning_lowrank.cli.parser import LowRankCLI
from lightning_lowrank.cli.runs import read_run
from lightning_lowrank.data import CIFAR10, CIFAR100, MNIST, SVHN, FashionMNIST, TinyImageNet, VisionDataModule
from lightning_lowrank.layers import low_rank_layers
from tests import texts
from tests.cli.run_folders import rounds_of
from tests.helpers import SHARED_DATA, needs_shared_data

ROOT = Path(__file__).parents[1]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
RECIPES = ROOT / "recipes"

DATA_SETS = ("fmnist", "svhn", "cifar10", "cifar100")
BASELINES = {"fedlmt": True, "fedpara": True, "ef21p": False, "fedbat": False}
"""FedMUD's baselines that run on all of its data sets, and whether they have a budget."""
CEILINGS = {"fmnist": "central", "svhn": "central", "cifar10": "central_cifar", "cifar100": "central_cifar"}
RESNET34 = ("_resnet34", "_resnet34_dynamic")
OTHER_BASES: dict[tuple[str, str], Callable[[str], bool]] = {
    ("fedslop", "mnist"): lambda overlay: True,
    ("tdpfed", "mnist"): lambda overlay: not overlay.endswith("_cifar10") and overlay != "jpeg",
    ("tdpfed", "cifar10"): lambda overlay: (
        overlay.endswith("_cifar10") or overlay in ("local", "jpeg", "random_upload_1_5", "random_upload_2")
    ),
    ("fedhm", "cifar10"): lambda overlay: not overlay.endswith((*RESNET34, "_cifar100", "_tiny_imagenet")),
    ("fedhm", "cifar100"): lambda overlay: overlay.endswith((*RESNET34, "_cifar100", "central", "local")),
    ("fedhm", "tiny_imagenet"): lambda overlay: overlay.endswith((*RESNET34, "_tiny_imagenet", "central", "local")),
    ("finetuning", "sst2"): lambda overlay: True,
    ("lora_aggregation", "mnist"): lambda overlay: True,
    ("fedsa", "mnli"): lambda overlay: True,
    ("fedsvd", "mnli"): lambda overlay: True,
    ("fedex", "cola"): lambda overlay: True,
    ("flowertune", "general"): lambda overlay: True,
    ("privacy", "digits"): lambda overlay: True,
    ("privacy", "clients"): lambda overlay: False,
    ("equal_bytes", "fmnist"): lambda overlay: True,
}
FEDMUD_SETTINGS = {
    "mud": ("reset_interval_2", "reset_interval_4", "init_scale_0_1", "init_scale_1", "init_scale_10"),
    "bkd_aad": ("compression_8", "compression_16"),
    "fedlmt": ("compression_8", "compression_16"),
}
"""Overlays of FedMUD's figures, which come after a method's."""
ON_FASHION_MNIST = ("fedmud/fmnist", "equal_bytes/fmnist")
OF_BOTH = ("mixing_1_4", "mixing_1_8", "personal_steps_2")
TDPFED_SETTINGS = {
    ("mnist", "afm"): (
        *OF_BOTH,
        *("regularization_8", "regularization_10", "personal_steps_8", "factor_steps_12", "factor_steps_22"),
    ),
    ("cifar10", "afm_cifar10"): (
        *OF_BOTH,
        *("regularization_10", "regularization_18", "personal_steps_6", "factor_steps_10", "factor_steps_20"),
    ),
}
"""Overlays of TDPFed's Table IV, which come after a method's, by data set."""
VARIANTS = ("mud", "bkd", "aad", "bkd_aad", "frozen", "bkd_frozen")
PARTITIONS = {"iid": DATA_SETS, "non_iid_2": ("fmnist", "svhn", "cifar10"), "non_iid_2_cifar100": ("cifar100",)}


@cache
def content_of(file: Path) -> Any:
    return yaml.load(file.read_text(), Loader=LOADER)


def is_base(file: Path) -> bool:
    return {"seed_everything", "federated", "model", "data", "trainer"} <= set(content_of(file))


def last_said(names: tuple[str, ...], *path: str) -> Any:
    """Return what the last of the recipes that says it says at a place, of a class its name."""
    found = None
    for name in names:
        content = content_of(RECIPES / f"{name}.yaml")
        for key in path[:-1]:
            content = (content or {}).get(key, {})
        if content is None:
            found = None
        elif path[-1] in content:
            said = content[path[-1]]
            found = said.get("class_path", found) if isinstance(said, dict) else said
    return found


def combinations() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [
        ("quickstart",),
        *(("quickstart", f"quickstart_{kind}") for kind in ("8bit", "dense", "phones", "rank", "topk")),
    ]
    overlays_of_quickstart = sorted(file.stem for file in (RECIPES / "robust").glob("*.yaml"))
    found += [
        ("quickstart", *(["robust/trimmed_mean"] if name == "mixing" else []), f"robust/{name}")
        for name in overlays_of_quickstart
    ]
    for base in DATA_SETS:
        floor = ("svhn_floor",) if base == "svhn" else ()
        overlays = [(), *((variant, *floor) for variant in VARIANTS)]
        overlays += [(partition,) for partition, bases in PARTITIONS.items() if base in bases]
        overlays += [(name, *floor) if budget else (name,) for name, budget in BASELINES.items()]
        overlays += [(CEILINGS[base],), ("local",)]
        found += [tuple(f"fedmud/{name}" for name in (base, *overlay)) for overlay in overlays]
    found += [("fedmud/fmnist", "fedmud/fedhm"), ("fedmud/cifar10", "fedmud/jpeg")]
    for method, settings in FEDMUD_SETTINGS.items():
        found += [("fedmud/fmnist", f"fedmud/{method}", f"fedmud/{setting}") for setting in settings]
    for base in ("cifar10_resnet18", "tiny_imagenet_resnet18"):
        chains = [(), ("bkd_aad",), ("fedlmt",)]
        if base == "cifar10_resnet18":
            chains += [("bkd_aad", "compression_16"), ("fedlmt", "compression_16")]
        found += [tuple(f"fedmud/{name}" for name in (base, *chain)) for chain in chains]
    for (base, method), settings in TDPFED_SETTINGS.items():
        found += [tuple(f"tdpfed/{name}" for name in (base, method, setting)) for setting in settings]
    for method, channel in (("fedmud_bkd_aad", "bits_8"), ("fedlmt", "bits_8"), ("fedlmt", "top_k_up")):
        found.append(("equal_bytes/fmnist", f"equal_bytes/{method}", f"equal_bytes/{channel}"))
    placed = {setting for settings in TDPFED_SETTINGS.values() for setting in settings}
    for (folder, base), chosen in OTHER_BASES.items():
        files = sorted((RECIPES / folder).glob("*.yaml"))
        overlays = [file.stem for file in files if not is_base(file) and file.stem not in placed]
        found.append((f"{folder}/{base}",))
        found += [(f"{folder}/{base}", f"{folder}/{overlay}") for overlay in overlays if chosen(overlay)]
    return found


COMBINATIONS = combinations()


@cache
def made_up_images(classes: int, shape: tuple[int, ...], samples: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(classes)
    images = torch.randint(256, (samples, *shape), dtype=torch.uint8, generator=draws)
    return images, torch.arange(samples) % classes


@cache
def real_fashion_mnist(train: bool) -> tuple[Tensor, Tensor]:
    return FashionMNIST(str(SHARED_DATA), download=False).load_images(train)


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LowRankCLI]:
    """Run commands in an empty folder; data sets that are not at hand give made-up images of their shape."""
    made: list[LowRankCLI] = []

    class Recorded(LowRankCLI):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **keywords)

    def load_images(self: VisionDataModule, train: bool) -> tuple[Tensor, Tensor]:
        # A ResNet takes longer for an image in evaluation than for a step of a small network.
        samples = 10_000 if train else 5 if isinstance(self, TinyImageNet) else 20
        return made_up_images(self.num_classes, self.image_shape, samples)

    for data_set in (MNIST, SVHN, CIFAR10, CIFAR100, TinyImageNet):
        monkeypatch.setattr(data_set, "prepare_data", lambda self: None)
        monkeypatch.setattr(data_set, "load_images", load_images)
    monkeypatch.setattr(parser, "LowRankCLI", Recorded)
    monkeypatch.setattr(sys, "argv", ["lightning-lowrank"])
    # seed_everything sets it for the whole process, where FederatedLoop in other tests would find it.
    monkeypatch.setenv("PL_GLOBAL_SEED", "99")
    monkeypatch.chdir(folder)

    def execute(*words: object) -> LowRankCLI:
        made.clear()
        main([str(word) for word in words])
        return made[0]

    return execute


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., LowRankCLI]:
    return commands(tmp_path, monkeypatch)


def configs(names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in ("--config", str(RECIPES / f"{name}.yaml"))]


def marks(names: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    return [needs_shared_data("FashionMNIST")] if names[0] in ON_FASHION_MNIST else []


def made_up_files() -> None:
    """Write JPEG files of ten classes to where the overlays `jpeg` look for CIFAR-10's."""
    for split, samples in (("train", 3_000), ("test", 20)):
        images, targets = made_up_images(10, (32, 32, 3), samples)
        for number, (image, target) in enumerate(zip(images, targets.tolist(), strict=True)):
            file = Path("cifar", split, str(target), f"{number}.jpg")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.numpy()).save(file)


def tiny_text_model() -> list[str]:
    """Make sentences and a tiny transformer in the working folder, and return the options that name them."""
    pytest.importorskip("transformers")
    texts.save_files(Path("data/SST2"), train=800)
    texts.save_tokenizer(texts.save_model(Path("tiny")))
    return ["--model.init_args.model", "tiny", "--data.init_args.tokenizer", "tiny"]


def tiny_roberta(base: str) -> list[str]:
    """Make a RoBERTa of random weights and files of a task of GLUE, and return the options that name them."""
    pytest.importorskip("transformers")
    columns, labels = {
        "mnli": ("sentence1\tsentence2\tgold_label", ("entailment", "neutral", "contradiction")),
        "cola": (None, ("0", "1")),
    }[content_of(RECIPES / f"{base}.yaml")["data"]["init_args"]["task"]]
    Path("data").mkdir()
    for seed, name in enumerate(("train", "dev")):
        rows = []
        for index, (text, _) in enumerate(texts.sentences(90, seed)):
            label = labels[index % len(labels)]
            rows.append(f"{text}\ta film\t{label}" if columns else f"ab\t{label}\t\t{text}")
        Path("data", f"{name}.tsv").write_text("\n".join([columns, *rows] if columns else rows) + "\n")
    texts.save_tokenizer(texts.save_roberta(Path("tiny")))
    return [*("--model.init_args.model", "tiny"), *of_files("tiny")]


def tiny_language_model(base: str) -> list[str]:
    """Make a Mistral of random weights and a file of instructions, and return the options that name them."""
    pytest.importorskip("transformers")
    Path("data").mkdir()
    rows = [{"instruction": text, "input": "", "output": "a good film"} for text, _ in texts.sentences(100, 0)]
    Path("data", "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts.save_language_model(Path("tiny"), "mistral", hidden_size=128, num_key_value_heads=2)
    return [*("--model.init_args.model", "tiny"), *of_files("tiny")]


def of_files(tokenizer: str) -> list[str]:
    return ["--data.init_args.tokenizer", tokenizer, "--data.init_args.dataset", "null"]


PUBLISHED = {"fedsa": tiny_roberta, "fedsvd": tiny_roberta, "fedex": tiny_roberta, "flowertune": tiny_language_model}
"""Recipes of published settings, and what makes a tiny model of their architecture and its data."""


def static_batch_norm_from_the_start() -> list[str]:
    """Write an overlay with what the recipes begin at a round that a test does not come to."""
    static = {"class_path": "StaticBatchNorm", "init_args": {"from_round": 0}}
    Path("static.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [static]}}))
    return ["--config", "static.yaml"]


_DECOMPOSED: dict[tuple[bytes, int], dict[str, Tensor]] = {}
_DECOMPOSE = CP.decompose


def decompose_once(self: CP, weight: Tensor, rank: int) -> dict[str, Tensor]:
    """Return what `CP.decompose` does. Many recipes begin with the same weights, which takes seconds each."""
    key = hashlib.sha256(weight.detach().numpy().tobytes()).digest(), rank
    if key not in _DECOMPOSED:
        _DECOMPOSED[key] = _DECOMPOSE(self, weight, rank)
    return {name: factor.clone() for name, factor in _DECOMPOSED[key].items()}


def some_factors(self: CP, weight: Tensor, rank: int) -> dict[str, Tensor]:
    """Return factors of the shapes that `CP.decompose` returns."""
    return {name: weight.new_ones(shape) for name, shape in self.factor_shapes(weight.shape, rank).items()}


def methods_of(names: tuple[str, ...]) -> set[tuple[str, str]]:
    """The base of a combination, its method, its factorization and its codecs, as far as its files name them."""
    found = {("base", names[0])}
    for name in names:
        content = content_of(RECIPES / f"{name}.yaml")
        federated, low_rank = content.get("federated") or {}, content.get("lowrank") or {}
        said = [("algorithm", federated.get("algorithm")), ("factorization", low_rank.get("factorization"))]
        said += [("uplink", codec) for codec in federated.get("uplink") or ()]
        for kind, value in said:
            value = value.get("class_path") if isinstance(value, dict) else value
            if value is not None:
                found.add((kind, value))
    return found


def first_with(each: Callable[[tuple[str, ...]], set[Any]]) -> list[tuple[str, ...]]:
    """The combinations that have something for the first time."""
    seen: set[Any] = set()
    chosen = []
    for names in COMBINATIONS:
        if not each(names) <= seen:
            chosen.append(names)
            seen |= each(names)
    return chosen


# A fit builds what it fits. Fits of the largest networks are nightly.
LARGE = (("fedmud/tiny_imagenet_resnet18",), ("tdpfed/cifar10", "tdpfed/afm_cifar10", "tdpfed/mixing_1_4"))
FITTED = [names for names in first_with(methods_of) if names not in LARGE]


def each_recipe(slow: list[tuple[str, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test by the names of files: those of ``slow`` are slow, and all other combinations nightly."""
    cases = []
    for names in COMBINATIONS:
        mark = pytest.mark.slow if names in slow else pytest.mark.nightly
        cases.append(pytest.param(names, id="+".join(names), marks=[mark, *marks(names)]))
    return pytest.mark.parametrize("names", cases)


def files_of(names: tuple[str, ...]) -> list[str]:
    """Write what a recipe reads before it trains, tiny, and return the options that name it."""
    if names[-1].endswith("/jpeg"):
        made_up_files()
    folder = names[0].partition("/")[0]
    if folder == "finetuning":
        return tiny_text_model()
    return PUBLISHED[folder](names[0]) if folder in PUBLISHED else []


def made_small(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have small data and networks in the working folder, and return the options that name them."""
    if names[0] in ON_FASHION_MNIST:
        images = {train: real_fashion_mnist(train) for train in (True, False)}
        monkeypatch.setattr(FashionMNIST, "prepare_data", lambda self: None)
        monkeypatch.setattr(FashionMNIST, "load_images", lambda self, train: images[train])
    options = ["--data.eval_batch_size", "100", *files_of(names)]
    if names[0].startswith(("fedhm/", "tdpfed/cifar10", "fedmud/cifar", "fedmud/tiny_imagenet")):
        options += ["--data.batch_size", "4"]
    if names[-1].startswith(("fedhm/fedhm", "fedhm/heterofl", "fedhm/local", "fedhm/cifar100", "fedhm/tiny")):
        # CIFAR-10's base and its other overlays have the network of the paper's width.
        options += ["--model.init_args.network.init_args.width", "16"]
    if names[-1].startswith("fedhm/split_mix"):
        options += ["--model.init_args.network.init_args.base.init_args.width", "4"]
    if names[-1] == "fedmud/local":
        # Each client's model is judged.
        options += ["--federated.clients", "10"]
    if names[0].startswith("fedhm/") and names[-1] != "fedhm/local":
        options += static_batch_norm_from_the_start()
    return options


def check_what_it_says(names: tuple[str, ...], made: LowRankCLI) -> None:
    """Compare what a command has built with the text of the recipe."""
    loop = next(callback for callback in made.trainer.callbacks if isinstance(callback, FederatedLoop))
    assert type(loop.algorithm).__name__ == last_said(names, "federated", "algorithm")
    assert type(loop.partition).__name__ == last_said(names, "federated", "partition")
    overlay = content_of(RECIPES / f"{names[-1]}.yaml")
    algorithm = overlay.get("federated", {}).get("algorithm", {})
    if isinstance(algorithm, dict) and "class_path" not in algorithm:
        settings = algorithm.get("init_args", {})
        assert {name: getattr(loop.algorithm, name) for name in settings} == settings
    if names[-1].startswith(("fedmud/init_scale", "fedmud/compression")):
        low_rank = next(callback for callback in made.trainer.callbacks if isinstance(callback, LowRank))
        assert {name: getattr(low_rank.settings, name) for name in overlay["lowrank"]} == overlay["lowrank"]
    layers = dict(low_rank_layers(made.model))
    factorization = last_said(names, "lowrank", "factorization")
    assert {type(layer.factorization).__name__ for layer in layers.values()} == ({factorization} - {None})
    variant = next((name for name in names if name.removeprefix("fedmud/") in VARIANTS), None)
    if variant is not None:
        for layer in layers.values():
            assert layer.decouple == variant.endswith("aad")
            assert layer.half_frozen == variant.endswith("frozen")


def form_of(content: Any) -> Any:
    """What an overlay names, without its numbers and texts: keys, and classes."""
    if not isinstance(content, dict):
        return type(content).__name__
    return tuple((key, value if key == "class_path" else form_of(value)) for key, value in sorted(content.items()))


def alike() -> list[list[tuple[str, ...]]]:
    """Combinations that no fit builds, of the same files but for the last, which names the same, if it is new."""
    groups: dict[Any, list[tuple[str, ...]]] = {}
    for names in first_with(set):
        if len(names) > 1 and names not in FITTED:
            groups.setdefault((names[:-1], form_of(content_of(RECIPES / f"{names[-1]}.yaml"))), []).append(names)
    return [group for group in groups.values() if len(group) > 1]


ALIKE = alike()
LATER = {names for group in ALIKE for names in group}


@each_recipe([names for names in (*LARGE, *first_with(set)) if names not in FITTED and names not in LATER])
@pytest.mark.filterwarnings("ignore")
def test_recipe_is_built(run, names, monkeypatch):
    # Only the factors' shapes are looked at, and the nearest ones take seconds to find.
    monkeypatch.setattr(CP, "decompose", some_factors)
    check_what_it_says(names, run("inspect", *configs(names), *made_small(names, monkeypatch)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", [pytest.param(each, id="+".join(each[-1]), marks=marks(each[-1])) for each in ALIKE])
def test_overlays_alike_are_read_one_after_another(run, group, monkeypatch):
    """Each takes the place of the one before; the last one's values are those that are built."""
    monkeypatch.setattr(CP, "decompose", some_factors)
    names = (*group[0][:-1], *(each[-1] for each in group))
    check_what_it_says(group[-1], run("inspect", *configs(names), *made_small(group[-1], monkeypatch)))


@each_recipe(FITTED)
@pytest.mark.filterwarnings("ignore")
def test_recipe_runs(run, names, monkeypatch):
    monkeypatch.setattr(CP, "decompose", decompose_once)
    quick = made_small(names, monkeypatch)
    done = run("fit", *configs(names), "--trainer.fast_dev_run", "2", *quick)
    assert done.trainer.global_step == 2
    assert set(done.trainer.callback_metrics) >= {"train_loss", "val_loss", "val_acc", "comm/ratio"}
    for name in ("train_loss", "val_loss"):
        assert torch.isfinite(done.trainer.callback_metrics[name])
    check_what_it_says(names, done)
    if names[0].startswith("privacy/") and names[-1] != "privacy/none":
        assert 0 < float(done.trainer.callback_metrics["privacy/epsilon"]) <= 8
    ratio = float(done.trainer.callback_metrics["comm/ratio"])
    if "fedmud/ef21p" in names:
        # A top-k's positions cost bytes beside the numbers.
        assert ratio < 0.05
    elif last_said(names, "lowrank", "factorization") and names[0].startswith(("fedmud", "fedslop")):
        assert ratio < {"fedslop/fedlora_m": 0.16, "fedmud/compression_8": 0.15}.get(names[-1], 0.08)


@pytest.mark.parametrize("base", [base for folder, base in OTHER_BASES if folder == "fedhm"])
def test_batch_norm_is_static_from_the_first_milestone_on(base):
    recipe = content_of(RECIPES / "fedhm" / f"{base}.yaml")
    static = [each for each in recipe["trainer"]["callbacks"] if each["class_path"] == "StaticBatchNorm"]
    milestones = recipe["model"]["init_args"]["scheduler"]["init_args"]["milestones"]
    assert [each["init_args"]["from_round"] for each in static] == milestones[:1]


def test_no_recipe_is_left_out():
    run_here = {RECIPES / f"{name}.yaml" for names in COMBINATIONS for name in names}
    assert run_here == set(RECIPES.rglob("*.yaml")) - {RECIPES / "RESULTS.yaml"}


def test_a_bases_overlays_say_less_than_it_does():
    bases = {names[0] for names in COMBINATIONS}
    for names in COMBINATIONS:
        for name in names:
            assert is_base(RECIPES / f"{name}.yaml") == (name in bases)


def test_variants_differ_from_one_another_in_what_they_are_named_for():
    contents = [content_of(RECIPES / "fedmud" / f"{name}.yaml") for name in VARIANTS]
    for content in contents:
        assert set(content) == {"federated", "lowrank", "model"}
        assert content["lowrank"].keys() == contents[0]["lowrank"].keys()
    descriptions = {str(content["lowrank"]) for content in contents}
    assert len(descriptions) == len(VARIANTS)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_quickstart_is_accurate_at_a_fraction_of_the_traffic(run):
    quiet = ("--trainer.enable_progress_bar", "false")
    recipe = configs(("quickstart",))
    fitted = run("fit", *recipe, *quiet)
    rounds = fitted.trainer.max_epochs
    low = read_run(Path("runs/quickstart/version_0"))
    logged = rounds_of(low)
    assert sorted(logged) == list(range(rounds))
    assert logged[rounds - 1]["comm/ratio"] <= 1 / 8

    checkpoints = Path("runs/quickstart/version_0/checkpoints")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best.ckpt", "last.ckpt"]
    tested = run("test", *recipe, "--ckpt_path", checkpoints / "last.ckpt")
    assert float(tested.trainer.callback_metrics["test_acc"]) > 0.95
    epochs = {name: torch.load(checkpoints / f"{name}.ckpt", weights_only=True)["epoch"] for name in ("best", "last")}
    assert epochs["last"] == rounds - 1
    best = max(figures["val_acc"] for figures in logged.values())
    assert logged[epochs["best"]]["val_acc"] == best

    # Dense layers are no better, and move at least eight times as much.
    run("fit", *configs(("quickstart", "quickstart_dense")), *quiet)
    dense = read_run(Path("runs/quickstart_dense/version_0"))
    assert 8 * (low.last("comm/total_bytes") or 0) <= (dense.last("comm/total_bytes") or 0)
    assert dense.last("comm/ratio") == 1
    assert best > max(accuracy for _, accuracy in dense.series("val_acc")) - 0.02


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_quickstart_withstands_attackers(run):
    quiet = ("--trainer.enable_progress_bar", "false", "--federated.execution", "vectorized")

    def accuracy(*overlays: str) -> float:
        name = "_".join(overlays) or "honest"
        words = configs(("quickstart", *(f"robust/{overlay}" for overlay in overlays)))
        run("fit", *words, *quiet, "--trainer.logger.init_args.name", name)
        last = [value for _, value in read_run(Path(f"runs/{name}/version_0")).series("val_acc")][-5:]
        return sum(last) / len(last)

    honest = accuracy()
    for attack in ("sign_flip", "scaled"):
        assert accuracy("centered_clipping", "mixing", attack) > honest - 0.03
    assert accuracy("scaled") < honest - 0.3
    # Updates of four times the opposite take the model away, and then no client's update is finite.
    with pytest.raises(SystemExit, match=r"network\.hidden\.0.*2"):
        accuracy("sign_flip")
