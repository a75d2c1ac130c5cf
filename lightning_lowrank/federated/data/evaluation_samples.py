"""Selection of the samples on which each client's personal model is evaluated."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.seeding import generator


def matched_labels(clients: ClientIndices, train_labels: Tensor, test_labels: Tensor) -> list[Tensor]:
    """Give each client all evaluation samples of the labels that it trains on.

    A client with two labels is tested on the samples of both. Clients may share test samples. Clients with the same
    labels share one tensor. The release of pFedMe (arXiv:2006.08848) tests on a quarter of each client's own samples
    instead, as `hold_out` with a share of 0.25 does; TDPFed does not say which samples it tests on.

    Args:
        clients: The training samples of each client.
        train_labels: Label of each training sample, integers of shape ``[clients.size]``.
        test_labels: Label of each evaluation sample, integers of shape ``[test samples]``, numbered as those of the
            training set are; `renumber_like` does that for strings.

    Returns:
        For each client its evaluation samples, ascending, int64; there may be none.

    Example:
        >>> clients = ClientIndices([[0, 1, 2], [3]], size=4)
        >>> matched_labels(clients, torch.tensor([7, 9, 7, 5]), torch.tensor([9, 5, 7, 8, 9]))
        [tensor([0, 2, 4]), tensor([1])]
    """
    test = test_labels.numpy()
    labels, codes = np.unique(train_labels.numpy(), return_inverse=True)
    by_label = np.argsort(test, kind="stable")
    starts = np.searchsorted(test[by_label], labels, side="left")
    stops = np.searchsorted(test[by_label], labels, side="right")
    found: dict[bytes, Tensor] = {}
    matched = []
    for indices in clients:
        client_codes = np.unique(codes[indices.numpy()])
        key = client_codes.tobytes()
        if key not in found:
            groups = [by_label[starts[code] : stops[code]] for code in client_codes]
            found[key] = torch.from_numpy(np.sort(np.concatenate([np.zeros(0, np.int64), *groups])))
        matched.append(found[key])
    return matched


def hold_out(indices: ClientIndices, share: float, seed: int) -> tuple[ClientIndices, list[Tensor]]:
    """Split each client's samples at random into a training part and a test part.

    Args:
        indices: The samples of each client.
        share: Share of each client's samples that becomes its test part, above 0 and below 1. The number is rounded
            (halves to the even one), and a client that has samples keeps at least one for training.
        seed: Seed of the experiment; a client's draw depends on it, the client's number and its number of samples.

    Returns:
        The training parts, and each client's test part; both keep the order of the client's samples.

    Example:
        >>> train, test = hold_out(ClientIndices([[0, 2, 4, 6], [1]], size=8), share=0.25, seed=0)
        >>> train.sizes, [len(part) for part in test]
        (tensor([3, 1]), [1, 0])
    """
    training, test = [], []
    for client, samples in enumerate(indices):
        count = max(0, min(round(share * len(samples)), len(samples) - 1))
        chosen = torch.zeros(len(samples), dtype=torch.bool)
        chosen[torch.randperm(len(samples), generator=generator(seed, "hold-out", client))[:count]] = True
        training.append(samples[~chosen])
        test.append(samples[chosen])
    sizes = torch.tensor([len(part) for part in training])
    return ClientIndices(torch.cat(training), indices.size, indices.names, sizes), test
