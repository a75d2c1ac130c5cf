"""The low-rank form of transformers' own linear layer, ``Conv1D`` (GPT-2's).

Imported by :func:`~lightning_lowrank.layers.low_rank_class` only when a model holds such a layer, so
that transformers need not be installed otherwise.
"""

from __future__ import annotations

from transformers.pytorch_utils import Conv1D

from lightning_lowrank.layers.linear import LowRankProjection


class LowRankConv1D(LowRankProjection, Conv1D):
    """A ``transformers.pytorch_utils.Conv1D`` whose weight (in × out) is composed from factors.

    See :class:`~lightning_lowrank.layers.LowRankLayer`; ``U`` belongs to the input.
    """

    dense_classes = (Conv1D,)
    first_is_input = True
