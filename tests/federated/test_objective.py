"""What clients are trained for beside the module's own loss: by a method, and by an objective beside any method."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import MOON, FedAvg, FedDyn, FederatedLoop, FedNTD, FromIndices, MaskAbsentClasses, Objective
from lightning_lowrank.federated.objective import Call, add_to_loss, loss_of, part_of, recorded, with_weights
from lightning_lowrank.federated.state import Base, ClientContext
from lightning_lowrank.models import Classifier
from tests.algorithms.written_out import assert_close, bare, federated, initial, resumed_ends
from tests.federated.execution.runs import Manual
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights

EXECUTIONS = ["sequential", "vectorized"]
SHORT = {"participants": [[0]] * 3, "partition": FromIndices([range(16)])}
MASK = partial(MaskAbsentClasses, "net", classes=4)


def few_classes() -> list[list[int]]:
    """Return clients of which each has some of the four classes."""
    targets = blobs().tensors[1]
    of_class = [torch.nonzero(targets == label).flatten().tolist() for label in range(4)]
    return [of_class[0] + of_class[1][:7], of_class[1][7:], of_class[2] + of_class[3]]


def run(tmp_path, execution, algorithm=FedAvg, module=Module, double=True, **arguments):
    inputs, targets = blobs().tensors
    data = Data(TensorDataset(inputs.double() if double else inputs, targets), shuffle=False)
    settings = {"partition": FromIndices(few_classes()), "participants": [[0, 1, 2], [0, 2], [1, 2]]}
    loop = FederatedLoop(algorithm(), execution=execution, summary=False, **{**settings, **arguments})
    made = module().double() if double else module()
    fit(trainer(tmp_path, loop, max_epochs=3, limit_val_batches=0), made, data)
    return made, loop


def masked_rounds(double: bool, absent: float = -torch.inf) -> dict[str, torch.Tensor]:
    """FedAvg in plain PyTorch, with the logits of the classes that a client lacks at another value."""
    net, parts, (inputs, targets) = network(), few_classes(), blobs().tensors
    net, inputs = (net.double(), inputs.double()) if double else (net, inputs)
    for clients in [[0, 1, 2], [0, 2], [1, 2]]:
        start = weights(net)
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        for client in clients:
            net.load_state_dict(start)
            present = torch.isin(torch.arange(4), targets[parts[client]])
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for rows in torch.tensor(parts[client]).split(8):
                optimizer.zero_grad()
                logits = net(inputs[rows]).masked_fill(~present, absent)
                nn.functional.cross_entropy(logits, targets[rows]).backward()
                optimizer.step()
            for name, value in net.state_dict().items():
                sums[name] += len(parts[client]) * value.double()
        total = sum(len(parts[client]) for client in clients)
        net.load_state_dict({name: (value / total).to(start[name].dtype) for name, value in sums.items()})
    return weights(net)


@pytest.mark.slow
def test_masked_clients_are_those_of_a_plain_loop(tmp_path):
    module, _ = run(tmp_path, "sequential", objective=MASK(), double=False)
    assert_same(bare(weights(module)), masked_rounds(double=False))
    stacked, _ = run(tmp_path, "vectorized", objective=MASK())
    assert_close(bare(weights(stacked)), masked_rounds(double=True))
    # As the code released with FedHM and HeteroFL has it.
    module, _ = run(tmp_path, "sequential", objective=MASK(masking="zero"), double=False)
    assert_same(bare(weights(module)), masked_rounds(double=False, absent=0.0))
    with pytest.raises(MisconfigurationException, match="masking"):
        MASK(masking="none")


class WithNames(nn.Module):
    """Returns its logits by name."""

    def __init__(self):
        super().__init__()
        self.inner = network().double()

    def forward(self, inputs):
        return {"logits": self.inner(inputs)}


class OfNamed(Module):
    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0])["logits"], batch[1])


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    ("algorithm", "objective", "argument"),
    [
        (FedAvg(), MaskAbsentClasses("net", classes=4), "MaskAbsentClasses.*layer"),
        (FedNTD("net"), None, "FedNTD.*logits"),
        (MOON("net"), None, "MOON.*features"),
    ],
)
def test_outputs_that_are_no_tensors_are_refused(tmp_path, algorithm, objective, argument, execution):
    with pytest.raises(MisconfigurationException, match=rf"{argument}='net'.*dict.*'net\.inner'"):
        federated(tmp_path, algorithm, execution, net=WithNames(), make_module=OfNamed, objective=objective)


@pytest.mark.parametrize("algorithm", [FedDyn(), FedNTD("net"), MOON("net.2")])
def test_a_step_without_a_loss_is_left_out(tmp_path, algorithm):
    class LeavesOut(Module):
        def training_step(self, batch, batch_idx):
            return None

    ended, _ = federated(tmp_path, algorithm, make_module=LeavesOut, rounds=[[3]])
    assert_close(ended, initial())


@pytest.mark.slow
def test_a_class_that_no_client_has_is_never_trained(tmp_path):
    def classifier():
        torch.manual_seed(1)
        return Classifier(nn.Linear(6, 5))

    for execution in EXECUTIONS:
        start = classifier().network.bias
        # The number of classes is the module's.
        masked, _ = run(tmp_path, execution, module=classifier, objective=MaskAbsentClasses(), double=False)
        free, _ = run(tmp_path, execution, module=classifier, double=False)
        assert (masked.network.bias == start).tolist() == [False, False, False, False, True]
        assert not (free.network.bias == start).any()
        assert not masked.network._forward_hooks


def test_validation_sees_all_classes(tmp_path):
    module, seen = Module(), []
    module.net.register_forward_hook(lambda net, inputs, logits: seen.append((net.training, logits.isinf().any())))
    loop = FederatedLoop(FedAvg(), partition=FromIndices(few_classes()), objective=MASK(), summary=False)
    fit(trainer(tmp_path, loop, max_epochs=2, val_check_interval=3), module, Data())
    assert not any(infinite for training, infinite in seen if not training)
    assert "training_step" not in vars(module)


@pytest.mark.parametrize(
    ("objective", "module", "message"),
    [
        (MaskAbsentClasses(), Module, "'network'"),
        (MaskAbsentClasses("net"), Module, r"'net'.*num_classes"),
        (MaskAbsentClasses(), lambda: Classifier(network(), label_smoothing=0.1), r"label_smoothing=0\.1 spreads"),
    ],
)
def test_what_cannot_be_masked_is_refused(tmp_path, objective, module, message):
    with pytest.raises(MisconfigurationException, match=message):
        run(tmp_path, "sequential", module=module, objective=objective)


def test_masking_needs_labels(tmp_path):
    class Unlabelled(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return {"inputs": blobs()[index][0], "wanted": torch.zeros(4)}

    class Regression(Module):
        def loss(self, batch):
            return nn.functional.mse_loss(self.net(batch["inputs"]), batch["wanted"])

    loop = FederatedLoop(FedAvg(), clients=2, objective=MASK(), summary=False)
    with pytest.raises(MisconfigurationException, match="MaskAbsentClasses"):
        fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), Regression(), Data(Unlabelled()))


def test_classes_that_are_strings_need_their_numbers(tmp_path):
    class Named(torch.utils.data.Dataset):
        targets = ("up", "down", "left", "right") * 5

        def __len__(self):
            return 20

        def __getitem__(self, index):
            return blobs()[index][0], torch.tensor(index % 4)

    def loop(labels=None):
        return FederatedLoop(FedAvg(), clients=2, objective=MASK(), labels=labels, summary=False)

    settings = {"max_epochs": 1, "limit_val_batches": 0}
    with pytest.raises(MisconfigurationException, match=r"FederatedLoop.*labels"):
        fit(trainer(tmp_path, loop(), **settings), Module(), Data(Named()))
    numbers = loop(lambda dataset: [dataset[index][1] for index in range(20)])
    fit(trainer(tmp_path, numbers, **settings), Module(), Data(Named()))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([4, 0, 7, 4], r"0.*classes=4.*2"),
        ([-1, 0], r"classes=4.*2.*\[-1\]"),
        ([0.5, 1.0], r"classes=4.*2.*\[0\.5, 1\.0\]"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, message):
    client = ClientContext(2, 3, 0, 0, Base(Module(), seed=0), {}, find_labels=lambda: torch.tensor(labels))
    with pytest.raises(MisconfigurationException, match=message):
        MASK().begin(client)


def test_an_objective_must_be_one():
    with pytest.raises(MisconfigurationException, match=r"objective.*FedDyn\(\)"):
        FederatedLoop(FedAvg(), clients=2, objective=FedDyn())


def one_of(client):
    """Return the number 1 where the client's model is."""
    return torch.ones_like(next(iter(client.model.values())), dtype=torch.float64).mean()


class Pulled(FedAvg):
    """Adds to each batch's loss what depends on the client, the batch, and the present parameters and step."""

    def begin(self, client, message):
        super().begin(client, message)
        client.round_state["strength"] = one_of(client) * 0.1 * (1 + client.id)

    def loss(self, step, batch, training_step):
        assert not step.stacked
        assert step.parameters["net.0.weight"].shape == (16, 6)
        squares = sum(value.square().sum() for value in step.parameters.values())
        return add_to_loss(training_step(), step.round_state["strength"] * squares * batch[0].abs().mean())


class Scaled(Objective):
    """Puts a factor before the module's loss, another one for each client."""

    def begin(self, client):
        client.round_state["factor"] = one_of(client) * (1.0 + client.id)

    def loss(self, step, batch, training_step):
        return training_step() * step.round_state["factor"]


@pytest.mark.slow
def test_an_objective_and_a_methods_own_loss_go_together(tmp_path):
    ends = [run(tmp_path, execution, Pulled, objective=Scaled(), local_epochs=2)[0] for execution in EXECUTIONS]
    assert_close(weights(ends[0]), weights(ends[1]))

    net, parts, (inputs, targets) = network().double(), few_classes(), blobs().tensors
    for clients in [[0, 1, 2], [0, 2], [1, 2]]:
        start, sums, total = weights(net), {}, 0
        for client in clients:
            net.load_state_dict(start)
            for rows in 2 * torch.tensor(parts[client]).split(8):
                batch = inputs[rows].double()
                loss = (1 + client) * nn.functional.cross_entropy(net(batch), targets[rows])
                squares = sum(value.square().sum() for value in net.parameters())
                loss = loss + 0.1 * (1 + client) * squares * batch.abs().mean()
                slopes = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for value, slope in zip(net.parameters(), slopes, strict=True):
                        value -= 0.1 * slope
            size = len(parts[client])
            total += size
            sums = {name: sums.get(name, 0) + size * value for name, value in weights(net).items()}
        net.load_state_dict({name: value / total for name, value in sums.items()})
    assert_close(bare(weights(ends[0])), weights(net))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"algorithm": Pulled}, "Pulled"),
        ({"algorithm": lambda: FedDyn(0.1)}, "FedDyn"),
        ({"objective": Scaled()}, r"objective=Scaled\(\)"),
    ],
)
def test_a_loss_that_manual_optimization_does_not_see_is_refused(tmp_path, settings, names):
    with pytest.raises(MisconfigurationException, match=f"{names} changes the loss that training_step returns"):
        run(tmp_path, "sequential", module=Manual, double=False, **settings)


@pytest.mark.slow
def test_masked_logits_are_those_of_manual_optimization_too(tmp_path):
    module, _ = run(tmp_path, "sequential", module=Manual, objective=MASK(), double=False)
    assert_same(bare(weights(module)), masked_rounds(double=False))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.nightly
def test_an_objective_is_resumed_inside_a_round(tmp_path, execution):
    resumed_ends(tmp_path, FedAvg, execution, objective=MASK())
    resumed_ends(tmp_path / "own", Pulled, execution, objective=Scaled())


@pytest.mark.slow
def test_the_training_step_is_given_back_after_an_error(tmp_path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if self.global_step == 5:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    for execution in EXECUTIONS:
        module = Failing()
        with pytest.raises(KeyError, match="mine"):
            run(tmp_path, execution, Pulled, lambda module=module: module, on_client_error="raise")
        assert "training_step" not in vars(module)


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_step_may_return_more_than_its_loss(tmp_path, execution):
    class Extras(Module):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "more": batch[1]}

    plain, _ = run(tmp_path, execution, Pulled)
    extra, _ = run(tmp_path, execution, Pulled, Extras)
    assert_same(weights(plain), weights(extra))


def test_calls_are_recorded_and_repeated_with_other_weights():
    module = nn.Module()
    module.net = network(norm=nn.BatchNorm1d)
    inputs = torch.randn(5, 6)
    with recorded(module, "net.1") as calls:
        output = module.net(inputs)
    module.net(inputs)
    (call,) = calls
    assert torch.equal(call.output, nn.functional.batch_norm(call.inputs[0], None, None, training=True))
    before = weights(module)
    last = list(module.net)[-1]
    name = f"net.{len(module.net) - 1}"
    zeros = {f"{name}.weight": torch.zeros_like(last.weight), f"{name}.bias": torch.arange(4.0)}
    other = with_weights(module, "net", zeros, Call((inputs,), {}, output))
    assert torch.equal(other, torch.arange(4.0).expand(5, 4))
    assert not other.requires_grad
    assert_same(before, weights(module))
    with pytest.raises(MisconfigurationException, match=r"'head'.*\['net'\]"):
        part_of(module, "head")


class Twice(nn.Module):
    """Calls one layer twice, under one name or two."""

    def __init__(self, names: int):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.layers = [self.layer] * 2 if names == 1 else nn.ModuleList([self.layer] * 2)

    def forward(self, inputs):
        features = self.first(inputs)
        for layer in self.layers:
            features = layer(features.tanh())
        return self.head(features)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("algorithm", [partial(FedNTD, "net"), partial(MOON, "net.head")])
def test_a_layer_under_two_names_is_trained_as_under_one(tmp_path, algorithm, execution):
    ends = [run(tmp_path, execution, algorithm, lambda n=n: Module(Twice(n)), **SHORT)[0] for n in (1, 2)]
    one, two = (dict(module.named_parameters()) for module in ends)
    assert_close(one, two)
    assert all(type(value) is nn.Parameter for value in two.values())
    assert not torch.equal(two["net.layer.weight"], Twice(2).double().layer.weight)


def test_other_weights_of_a_tensor_that_has_its_name_from_elsewhere():
    module = nn.Module()
    module.tokens, module.net = nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)
    module.net.weight = module.tokens.weight
    other = with_weights(module, "net", {"tokens.weight": torch.ones(4, 6)}, Call((torch.ones(1, 6),), {}, None))
    assert other.tolist() == [[6.0] * 4]


class SummedLoss(FedAvg):
    """Sums each client's losses in its round state, from inside the objective."""

    def begin(self, client, message):
        super().begin(client, message)
        client.round_state["sums"] = {"loss": one_of(client) * 0}

    def loss(self, step, batch, training_step):
        output = training_step()
        step.round_state["sums"]["loss"].add_(loss_of(output).detach())
        return output

    def end(self, client):
        client.state["sum"] = client.round_state["sums"]["loss"].clone()
        return super().end(client)


@pytest.mark.slow
def test_an_objective_writes_to_round_states_wherever_clients_stand_in_the_stack(tmp_path):
    """The clients of one batch size are not neighbours: 24, 20 and 12 samples in batches of 8, twice."""
    partition = FromIndices([range(24), range(24, 44), range(44, 56)])
    settings = {"partition": partition, "participants": [[0, 1, 2]] * 3, "local_epochs": 2}
    ends = [run(tmp_path, execution, SummedLoss, **settings)[1] for execution in EXECUTIONS]
    sums = [[loop.coordinator.states[client]["sum"] for client in range(3)] for loop in ends]
    torch.testing.assert_close(torch.stack(sums[0]), torch.stack(sums[1]), rtol=1e-9, atol=1e-9)
