import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank.algorithms._capacity import PartAveraging, copy_blocks_into
from lightning_lowrank.federated.capacities import refuse_kept_moments
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server


class Parts(PartAveraging):
    whole = 1.0

    def part(self, model, client):
        return dict(model)

    def variant(self, server, level):
        return server.model


def client(number, round_number=0, seed=0):
    return ClientInfo(number, samples=1, round=round_number, seed=seed)


def test_kept_moments_are_refused():
    context = ClientContext(**vars(client(0)), base=Base(nn.Linear(1, 1), seed=0), model={})
    refuse_kept_moments(context, "why")
    context.state["optimizers"] = {}
    with pytest.raises(MisconfigurationException, match="optimizer_state='keep'"):
        refuse_kept_moments(context, "why")


def test_blocks_are_copied_among_zeros():
    whole, scalar = torch.ones(3, 4), torch.tensor(5.0)
    copy_blocks_into(
        {"whole": whole, "scalar": scalar}, {"whole": torch.full((2, 3), 7.0), "scalar": torch.tensor(2.0)}
    )
    assert whole.tolist() == [[7, 7, 7, 0], [7, 7, 7, 0], [0, 0, 0, 0]]
    assert scalar == 2


def test_each_number_is_averaged_over_those_who_sent_it():
    old = {"w": torch.full((3, 2), 10.0), "never": torch.tensor([0.1, 0.2]), "batches": torch.tensor(9)}
    party = Server(Base(nn.Linear(1, 1), seed=0), model=dict(old))
    whole, part = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[4.0]])
    Parts().receive(party, client(0), Message({"w": whole, "batches": torch.tensor(5)}), 1.0)
    Parts().receive(party, client(1), Message({"w": part, "batches": torch.tensor(6)}), 2.0)
    Parts().aggregate(party)
    torch.testing.assert_close(party.model["w"], torch.tensor([[3.0, 2.0], [3.0, 4.0], [10.0, 10.0]]))
    assert torch.equal(party.model["never"], old["never"])
    assert torch.equal(party.model["batches"], torch.tensor(6))
    assert [value.dtype for value in party.model.values()] == [value.dtype for value in old.values()]
