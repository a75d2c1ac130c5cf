"""Groups of texts by length and by embedding."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import Dirichlet
from lightning_lowrank.data import EmbeddingGroups, LengthGroups, TokenizedTexts
from lightning_lowrank.federated.fingerprint import describe
from tests import texts


def of_lengths(*lengths: int) -> TokenizedTexts:
    return TokenizedTexts([[7] * length for length in lengths])


def test_groups_of_length_are_of_one_size_and_the_shortest_is_first():
    lengths = torch.randperm(60, generator=torch.Generator().manual_seed(0)) + 1
    groups = torch.from_numpy(LengthGroups(6)(of_lengths(*lengths.tolist())))
    assert groups.tolist() == ((lengths - 1) // 10).tolist()
    assert LengthGroups(2)(of_lengths(4, 4, 4, 9)).tolist() == [0, 0, 0, 1]
    lists = [{"words": ["a"] * length} for length in lengths.tolist()]
    assert LengthGroups(6, field="words")(lists).tolist() == groups.tolist()
    with pytest.raises(MisconfigurationException, match=r"samples.*'input_ids'.*\['words'\]"):
        LengthGroups()(lists)
    with pytest.raises(MisconfigurationException, match=r"groups.*1"):
        LengthGroups(1)


def test_clients_differ_in_length_without_labels():
    dataset = of_lengths(*(1 + index % 50 for index in range(500)))
    indices = Dirichlet(0.1, min_samples=5, groups=LengthGroups(5)).split(dataset, clients=5, seed=0)
    assert int(indices.sizes.sum()) == 500
    means = [dataset.lengths[part].double().mean().item() for part in indices]
    assert max(means) - min(means) > 10
    described = describe(Dirichlet(0.1, groups=LengthGroups(5)))
    assert described["groups"] == {"class": "LengthGroups", "groups": 5, "field": "input_ids"}


@pytest.mark.slow
def test_embeddings_are_means_of_the_encoders_states(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = str(texts.save_model(tmp_path))
    written = [[1, 4, 5, 2], [1, 9, 2], [1, 12, 13, 14, 15, 2]]
    dataset = TokenizedTexts([written[place] for place in (1, 0, 0, 2, 1, 2, 0)])
    before = torch.get_rng_state()
    groups = EmbeddingGroups(folder, groups=3, batch_size=3)
    found = groups.embed(dataset)
    assert groups(dataset).tolist() == [0, 1, 1, 2, 0, 2, 1]
    assert torch.equal(before, torch.get_rng_state())
    encoder = transformers.BertModel.from_pretrained(folder).eval()
    for row, text in zip(found[[1, 0, 3]], written, strict=True):
        with torch.no_grad():
            mean = encoder(torch.tensor([text])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(row, mean / mean.norm())
    with pytest.raises(MisconfigurationException, match=r"groups=8.*there.*7"):
        EmbeddingGroups(folder, groups=8)(dataset)
    with pytest.raises(MisconfigurationException, match=r"'repo_name'.*'namespace/repo_name'"):
        EmbeddingGroups(str(tmp_path / "nothing"), groups=3)(dataset)
