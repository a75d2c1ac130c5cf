"""A few singular vectors of each matrix: PowerSGD (Vogels et al., NeurIPS 2019), and the truncated decomposition."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_lowrank import seeding
from lightning_lowrank.arguments import check_choice, check_integer, check_number
from lightning_lowrank.compression.base import Memory, RandomCodec
from lightning_lowrank.compression.wire import DecodingError, Entry, Layout, entry_bytes, join, split
from lightning_lowrank.layers.factorization import MatrixProduct

MOST_NUMBERS_OF_A_MATRIX = 2**28

Method = Literal["power", "svd"]

_PRODUCT = MatrixProduct()


@dataclass(frozen=True)
class Factors:
    """The codes of a `LowRankCodec`: ranks, singular values, and right vectors for the sender's next message.

    Args:
        ranks: The rank of each floating-point tensor, 0 for one that is sent dense.
        scales: The singular values of each matrix.
        right: The right vectors of each matrix, one a row, before another codec changes them.
    """

    ranks: Mapping[str, int]
    scales: Mapping[str, Tensor]
    right: Mapping[str, Tensor]


class LowRankCodec(RandomCodec[Factors]):
    r"""Send each matrix as a few left and right singular vectors with their singular values.

    ``method="power"`` is PowerSGD's subspace iteration (Vogels et al., NeurIPS 2019, Algorithm 1) without its sum over
    workers. From a matrix :math:`M` and the right vectors :math:`Q` of the sender's last message it makes

    .. math:: P = \operatorname{orth}(M Q), \qquad Q \leftarrow M^\top P, \qquad C(M) = P Q^\top,

    and the columns of :math:`Q` travel as unit vectors with their lengths. ``method="svd"`` sends the largest singular
    values with their vectors, which is the nearest matrix of that rank and takes several times as long.

    A weight is read as the matrix of `MatrixProduct`: a linear weight is its own, and (cout, cin, kh, kw) of a
    convolution has cout·kh rows and cin·kw columns. Tensors of fewer than two dimensions, and matrices that the factors
    would not make smaller, are sent dense. A matrix with a number that is not finite arrives as NaN throughout.
    Integers and booleans travel exactly. Singular vectors have the tensor's type, and the singular values are of
    float32, or float64 for tensors of float64.
    The values that a following codec, such as `Half` or `Quantize`, compresses are the unit vectors and the dense
    tensors. The singular values travel exactly: each is the scale of its two vectors.

    The sender of a `Channel` keeps :math:`Q` for its next message: columns × rank numbers for each matrix, of float32
    (float64 for tensors of float64), with each client's state for the uplink and with the server's for the downlink.
    Before the first message, and if a column of :math:`Q` is zero, it is drawn from the codec's seed. The decoder
    keeps nothing, since both factors travel. By itself, as in `encode`, the codec begins with drawn vectors. A single
    iteration from these is far from the largest vectors, so that a sender without state should use ``method="svd"``.

    The codec is for changes. Give it ``error_feedback=True`` if the sender has a next message: the part of a
    change that is orthogonal to the vectors is lost otherwise.

    Args:
        rank: The rank of each matrix.
        budget: In place of a rank, the share of all floating-point numbers of a message that may be sent, above 0 and
            at most 1. Tensors sent dense count, singular values do not. All matrices have the same share of their
            numbers, and each has rank 1 at least.
        energy: In place of a rank, the share of each matrix's squared norm that is kept, above 0 and at most 1. The
            rank depends on the numbers, and so does the length of the message (`adaptive`). It needs ``method="svd"``.
        method: ``"power"`` or ``"svd"``. Default ``"power"``, but ``"svd"`` with ``energy``.
        seed: Seed of the first right vectors, from -2**63 to 2**63 - 1. Default 0.
        error_feedback: Whether a `Channel` adds the compression error to the next message. Default False.

    Raises:
        TypeError: If ``rank`` is not an integer, or ``budget`` or ``energy`` not a number.
        ValueError: If not exactly one of ``rank``, ``budget`` and ``energy`` is given, an argument is out of its range,
            or ``energy`` comes with ``method="power"``. When encoding, if a matrix has more than 2²⁸ numbers: the
            length of the bytes would not bound the memory that a decoder takes.

    Example:
        >>> codec = LowRankCodec(rank=1, method="svd")
        >>> weight = torch.outer(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([3.0, 0.0, 4.0]))
        >>> torch.allclose(codec.transmit({"weight": weight})["weight"], weight)
        True
    """

    sparse = True

    def __init__(
        self,
        rank: int | None = None,
        *,
        budget: float | None = None,
        energy: float | None = None,
        method: Method | None = None,
        seed: int = 0,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(seed)
        if sum(given is not None for given in (rank, budget, energy)) != 1:
            raise ValueError(
                f"{type(self).__name__}: exactly one of rank, budget and energy must be given, but they are {rank!r},"
                f" {budget!r} and {energy!r}: give LowRankCodec(rank=4), for one."
            )
        if rank is not None:
            check_integer("rank", rank)
        for name, share in (("budget", budget), ("energy", energy)):
            if share is not None:
                check_number(name, share, above=0, most=1)
        if method is not None:
            check_choice("method", method, Method)
        if energy is not None and method == "power":
            raise ValueError(f'energy={energy!r} needs all singular values: use method="svd", but it is {method!r}.')
        self.rank, self.budget, self.energy, self.method = rank, budget, energy, method
        self.error_feedback = error_feedback
        self.adaptive = energy is not None
        self._memory: Memory = {}

    @property
    def _iterates(self) -> bool:
        return self.method != "svd" and self.energy is None

    def started(self, memory: Memory) -> Self:
        other = copy.copy(self)
        other._memory = memory
        return other

    def kept(self, codes: Factors) -> Memory:
        return dict(codes.right) if self._iterates else {}

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """Types and shapes of the left and right vectors of each matrix, and of the tensors that are sent dense.

        Without the ``parts`` of an adaptive codec, all tensors are dense, which is the largest encoding.
        """
        ranks, entries = self._ranks(layout, parts), dict[str, Entry]()
        for name, (dtype, shape) in layout.floating.items():
            if ranks[name]:
                rows, columns = _PRODUCT.matrix_shape(shape)
                entries[f"left {name}"] = dtype, (ranks[name], rows)
                entries[f"right {name}"] = dtype, (ranks[name], columns)
            else:
                entries[f"dense {name}"] = dtype, shape
        return entries

    def compress(self, tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], Factors]:
        ranks = {**self._ranks(layout), **({} if self.energy is None else _largest(layout))}
        values, scales, right = {}, {}, {}
        for name, (dtype, _) in layout.floating.items():
            if ranks[name]:
                matrix = _PRODUCT.as_matrix(tensors[name]).to(_wide(dtype))
                vectors, scale, others = self._factors(name, matrix, ranks[name])
                ranks[name] = len(scale)
            if not ranks[name]:
                values[f"dense {name}"] = tensors[name]
                continue
            values[f"left {name}"], values[f"right {name}"] = vectors.to(dtype), others.to(dtype)
            scales[name], right[name] = scale, others
        return values, Factors(ranks, scales, right)

    def restore(self, values: Mapping[str, Tensor], codes: Factors, layout: Layout) -> dict[str, Tensor]:
        restored = {}
        for name, (dtype, shape) in layout.floating.items():
            if not codes.ranks[name]:
                restored[name] = values[f"dense {name}"]
                continue
            left, right = (values[f"{end} {name}"].to(_wide(dtype)) for end in ("left", "right"))
            matrix = _product(left * codes.scales[name].to(left.device)[:, None], right)
            restored[name] = _PRODUCT.as_weight(matrix, shape).to(dtype)
        return restored

    @override
    @classmethod
    def transmit_together(
        cls, senders: Sequence[Self], messages: Sequence[Mapping[str, Tensor]]
    ) -> list[tuple[dict[str, Tensor], Memory]]:
        """Decompose the matrices of equal shapes as one stack, and sum the outer products by a matrix product."""
        layout = Layout.of(messages[0])
        alike = all(Layout.of(tensors) == layout for tensors in messages[1:])
        if len(senders) == 1 or not senders[0]._iterates or not alike:
            return super().transmit_together(senders, messages)
        arrived = [{name: tensor.detach() for name, tensor in tensors.items()} for tensors in messages]
        kept: list[dict[str, Tensor]] = [{} for _ in messages]
        for name, rank in senders[0]._ranks(layout).items():
            if not rank:
                continue
            dtype, shape = layout.floating[name]
            matrices = [_PRODUCT.as_matrix(tensors[name]).to(_wide(dtype)) for tensors in arrived]
            left, scales, right = _iterated(matrices, _starts(senders, name, matrices, rank))
            first, second = (vectors.to(dtype).to(_wide(dtype)) for vectors in (left, right))
            for place, (one, other) in enumerate(zip(first * scales[..., None], second, strict=True)):
                arrived[place][name] = _PRODUCT.as_weight(one.mT @ other, shape).to(dtype)
                kept[place][name] = right[place].clone()
        return list(zip(arrived, kept, strict=True))

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        ranks = self._ranks(layout, parts)
        lengths = {"scales": entry_bytes(_scale_entries(layout, ranks))}
        return lengths if self.energy is None else {**lengths, "ranks": 4 * len(ranks)}

    def pack(self, codes: Factors, layout: Layout) -> dict[str, Tensor]:
        """The singular values and, if the codec is adaptive, the ranks as 32-bit integers."""
        packed = {"scales": join([codes.scales[name] for name in _scale_entries(layout, codes.ranks)])}
        if self.energy is not None:
            ranks = [codes.ranks[name] for name in layout.floating]
            packed["ranks"] = join([torch.tensor(ranks, dtype=torch.int32)])
        return packed

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> Factors:
        ranks = self._ranks(layout, parts)
        return Factors(ranks, split(parts["scales"], _scale_entries(layout, ranks)), {})

    def _ranks(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        """Each tensor's rank, 0 for dense, from the layout or from the parts that an adaptive codec received.

        Raises:
            DecodingError: If a received rank is out of range.
            ValueError: If a matrix has too many numbers.
        """
        largest = _largest(layout)
        for (name, (_, shape)), count in zip(layout.floating.items(), layout.numbers, strict=True):
            if largest[name] and count > MOST_NUMBERS_OF_A_MATRIX:
                raise ValueError(
                    f"the matrix {name[:80]!r} of shape {shape} has {count:,} numbers, and a {type(self).__name__}"
                    f" takes matrices of at most {MOST_NUMBERS_OF_A_MATRIX:,}: send it through another codec, by Split."
                )
        if self.rank is not None:
            return {name: self.rank if self.rank <= most else 0 for name, most in largest.items()}
        if self.budget is not None:
            return _ranks_by_budget(self.budget, layout, largest)
        if parts is None or parts["ranks"].numel() != 4 * len(largest):
            return dict.fromkeys(largest, 0)
        ranks = dict(zip(largest, parts["ranks"].clone().view(torch.int32).tolist(), strict=True))
        for name, rank in ranks.items():
            if not 0 <= rank <= largest[name]:
                raise DecodingError(f"the rank of tensor {name[:80]!r} is {rank}, but can be at most {largest[name]}.")
        return ranks

    def _factors(self, name: str, matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """At most ``rank`` left vectors, singular values and right vectors of a matrix; vectors are rows.

        The result is empty if the energy needs more than ``rank``.
        """
        if self._iterates:
            left, scales, right = _iterated([matrix], _starts([self], name, [matrix], rank))
            return left[0], scales[0], right[0]
        finite = matrix.isfinite().all()
        left, scale, right = torch.linalg.svd(torch.where(finite, matrix, 0.0), full_matrices=False)
        if self.energy is not None:
            # Values are divided by the largest, so that squares neither overflow nor vanish in float32.
            total = (scale / scale[0].clamp_min(torch.finfo(scale.dtype).tiny)).square().cumsum(0)
            needed = int((total < self.energy * total[-1]).sum()) + 1
            rank = needed if needed <= rank else 0
        scale = torch.where(finite, scale[:rank], math.nan)
        return left[:, :rank].mT.contiguous(), scale, right[:rank].contiguous()


def _starts(senders: Sequence[LowRankCodec], name: str, matrices: Sequence[Tensor], rank: int) -> Tensor:
    """The right vectors that each sender's iteration starts from, as rows."""
    shape = rank, matrices[0].shape[1]
    known = [sender._memory.get(name) for sender in senders]
    kept = [
        each.to(matrix) if isinstance(each, Tensor) and each.shape == shape else matrix.new_zeros(shape)
        for each, matrix in zip(known, matrices, strict=True)
    ]
    starts = torch.stack(kept)
    empty = ~starts.any(-1, keepdim=True)
    if not empty.any():
        return starts
    drawn = [torch.randn(shape, generator=seeding.generator(sender.seed, "low-rank", name)) for sender in senders]
    return torch.where(empty, torch.stack(drawn).to(starts), starts)


def _iterated(matrices: Sequence[Tensor], starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors, lengths and right vectors after one subspace iteration of each matrix; vectors are rows."""
    left = torch.linalg.qr(torch.stack([each @ start.mT for each, start in zip(matrices, starts, strict=True)])).Q
    right = torch.stack([vectors.mT @ each for vectors, each in zip(left, matrices, strict=True)])
    # Numbers are divided by the largest, so that squares neither overflow nor vanish. NaN and infinity spread to all.
    largest = right.abs().amax((-2, -1))[..., None]
    shares = right / torch.where(largest > 0, largest, 1.0)[..., None]
    lengths = torch.linalg.vector_norm(shares, dim=-1)
    # A right vector of rounding noise becomes zero: the next message then starts from a newly drawn vector.
    noise = torch.finfo(right.dtype).eps * max(matrices[0].shape) * lengths.amax(-1, keepdim=True)
    right = torch.where((lengths > noise)[..., None], shares / lengths[..., None], 0.0)
    return left.mT.contiguous(), lengths * largest, right


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The sum of the rows' outer products, added in order, so that every device gives the same bits."""
    total = left[0][:, None] * right[0]
    term = torch.empty_like(total)
    for one, other in zip(left[1:], right[1:], strict=True):
        total += torch.mul(one[:, None], other, out=term)
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _largest(layout: Layout) -> dict[str, int]:
    """Each tensor's largest rank at which its factors and singular values take fewer bytes; 0 if no rank does."""
    ranks = {}
    for (name, (dtype, shape)), count in zip(layout.floating.items(), layout.numbers, strict=True):
        ranks[name] = 0
        if len(shape) > 1 and count:
            one = sum(_PRODUCT.matrix_shape(shape)) * dtype.itemsize + _wide(dtype).itemsize
            ranks[name] = (count * dtype.itemsize - 1) // one
    return ranks


def _ranks_by_budget(budget: float, layout: Layout, largest: Mapping[str, int]) -> dict[str, int]:
    """Each matrix's rank within a budget: all send the same share of their numbers, but at least rank 1."""
    counts = dict(zip(layout.floating, layout.numbers, strict=True))
    costs = {name: sum(_PRODUCT.matrix_shape(shape)) for name, (_, shape) in layout.floating.items() if largest[name]}
    allowed = budget * sum(counts.values()) - sum(counts[name] for name in counts if name not in costs)
    ranks, others = dict.fromkeys(counts, 0), set(costs)
    while others:
        share = allowed / sum(counts[name] for name in others)
        if share >= 1:
            break
        small = {name for name in others if share * counts[name] < 2 * costs[name]}
        for name in small or others:
            ranks[name] = min(largest[name], max(1, math.floor(share * counts[name] / costs[name])))
        allowed -= sum(costs[name] for name in small)
        others = others - small if small else set()
    return ranks


def _scale_entries(layout: Layout, ranks: Mapping[str, int]) -> dict[str, Entry]:
    return {name: (_wide(dtype), (ranks[name],)) for name, (dtype, _) in layout.floating.items() if ranks[name]}
