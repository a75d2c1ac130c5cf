"""Rules that aggregate a round's messages: means and robust rules."""

from lightning_lowrank.aggregation.aggregator import Aggregator, KeepsArrivals, Peers
from lightning_lowrank.aggregation.mean import WeightedMean
from lightning_lowrank.aggregation.preaggregation import Bucketing, NearestNeighborMixing, PreAggregation
from lightning_lowrank.aggregation.robust import (
    CenteredClipping,
    CoordinateMedian,
    CoordinateRule,
    DistanceRule,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
)

__all__ = [
    "Aggregator",
    "Bucketing",
    "CenteredClipping",
    "CoordinateMedian",
    "CoordinateRule",
    "DistanceRule",
    "GeometricMedian",
    "KeepsArrivals",
    "Krum",
    "MultiKrum",
    "NearestNeighborMixing",
    "NormBound",
    "Peers",
    "PreAggregation",
    "RobustRule",
    "TrimmedMean",
    "WeightedMean",
]
