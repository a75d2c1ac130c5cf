"""Robust rules beside ByzFL's: their time, and how far float32 takes them from float64.

    pip install -e ".[bench]" && python tests/benchmarks/robust_rules.py [--clients N ...] [--numbers N] [--device NAME]
        [--threads N] [--json FILE]

Clients send a model of 20 tensors in single precision. Timed is what a server does when all have sent: ours from
their named tensors to the named result, ByzFL's from the same tensors, which are made into one vector each, to one
vector. Medians of 3. The error is the largest difference from the same rule in float64, over the spread of the honest
values. ByzFL's Krum counts one neighbour more than the paper, and so gets f + 1. Its iterations are set to ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from json_option import add_json_option, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_lowrank.aggregation import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighborMixing,
    RobustRule,
    TrimmedMean,
)

PARTS = 20
Tensors = dict[str, torch.Tensor]


def pairs(f: int, clients: int) -> dict[str, tuple[RobustRule, Callable[[torch.Tensor], Any]]]:
    from byzfl.aggregators import aggregators, preaggregators

    mixing = preaggregators.NNM(f)
    trimmed = aggregators.TrMean(f)
    return {
        "median": (CoordinateMedian(), aggregators.Median()),
        "trimmed mean": (TrimmedMean(f), trimmed),
        "Krum": (Krum(f), aggregators.Krum(f + 1)),
        "Multi-Krum": (MultiKrum(f, clients - f - 1), aggregators.MultiKrum(f + 1)),
        "geometric median, 32 iterations": (GeometricMedian(iterations=32), aggregators.GeometricMedian(nu=1e-6, T=32)),
        "centred clipping, 5 iterations": (CenteredClipping(10.0, 5), aggregators.CenteredClipping(L=5, tau=10.0)),
        "NNM, trimmed mean": (TrimmedMean(f, [NearestNeighborMixing(f)]), lambda x: trimmed(mixing(x))),
    }


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


def aggregated(rule: RobustRule, sent: list[Tensors], origin: Tensors, exact: bool = False) -> torch.Tensor:
    rule = rule.fresh()
    # A simulation's server holds them already.
    rule.kept = [({name: value.double() if exact else value for name, value in each.items()}, 1.0) for each in sent]
    rule.prepare(origin, 0)
    return flat(rule.result())


def by_byzfl(rule: Callable[[torch.Tensor], Any], sent: list[Tensors], origin: Tensors | None) -> torch.Tensor:
    vectors = torch.stack([flat(each) for each in sent])
    start = None if origin is None else flat(origin)
    found = rule(vectors if start is None else vectors - start)
    return found if start is None else found + start


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the median milliseconds, and the result."""
    found, result = [], work()
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 50])
    parser.add_argument("--numbers", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    add_json_option(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device, figures = torch.device(chosen.device), {}
    for clients in chosen.clients:
        f = clients // 5
        draws = torch.Generator().manual_seed(0)
        # Models, not changes: what the clients have in common is much larger than what tells them apart.
        common = torch.randn(chosen.numbers, generator=draws)
        x = common + 0.01 * torch.randn(clients, chosen.numbers, generator=draws)
        x[:f] -= 0.05
        sent = [{str(number): part.to(device) for number, part in enumerate(row.chunk(PARTS))} for row in x.clone()]
        origin = {str(number): part.to(device) for number, part in enumerate(common.chunk(PARTS))}
        print(f"\n{clients} clients, {chosen.numbers:,} numbers, f = {f}, {device}")
        print(f"{'':34}{'ours ms':>10}{'ByzFL ms':>10}{'ours error':>12}{'ByzFL error':>13}")
        for name, (rule, theirs) in pairs(f, clients).items():
            ours, exact = partial(aggregated, rule, sent, origin), partial(aggregated, rule, sent, origin, exact=True)
            byzfl = partial(by_byzfl, theirs, sent, origin if isinstance(rule, CenteredClipping) else None)
            own_time, own = timed(ours, device)
            their_time, their = timed(byzfl, device)
            errors = [float((each.double() - exact()).abs().max() / 0.01) for each in (own, their)]
            print(f"{name:34}{own_time:10.0f}{their_time:10.0f}{errors[0]:12.1e}{errors[1]:13.1e}", flush=True)
            figures[f"{clients} {name}"] = {"ours": own_time, "byzfl": their_time, "errors": errors}
    write_json(chosen.json, figures)


if __name__ == "__main__":
    main()
