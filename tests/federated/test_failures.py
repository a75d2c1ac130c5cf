"""Clients that fail are left out of their round, as if they had not been drawn, and keep what they had."""

import math
import signal
import traceback
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lightning_lowrank import SCAFFOLD, FedAvg, FederatedLoop, FromIndices, Half, Objective, TopK
from lightning_lowrank.aggregation import WeightedMean
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.federated.client_states import flatten_state
from lightning_lowrank.federated.failures import DeferredSignals, describe_error
from lightning_lowrank.federated.protocols import UnequalClients, inherits
from tests.algorithms.methods import LOW_RANK, METHODS, each_method
from tests.grids import daily, nightly_except
from tests.helpers import Data, Module, SaveEachStep, assert_same, blobs, lightnings_own, network, trainer, weights

PARTS = [list(range(5)), list(range(5, 30)), list(range(30, 52)), list(range(52, 75))]
BAD, ROUND = 2, 1


class Figures(pl.Callback):
    def __init__(self):
        self.rounds = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def where(module):
    """Return the round and the clients that train."""
    loop = next(each for each in module.trainer.callbacks if isinstance(each, FederatedLoop))
    return module.trainer.current_epoch, [client.id for client in loop.rounds.execution.clients], loop


def run(tmp_path, module=None, algorithm=None, data=None, callbacks=(), before=(), fit=None, **arguments):
    loop = FederatedLoop(
        algorithm or FedAvg(), **{"partition": FromIndices(PARTS), "seed": 0, "summary": False, **arguments}
    )
    module, figures = module or Module(), Figures()
    fitted = trainer(tmp_path, *before, loop, figures, *callbacks, limit_val_batches=0, max_epochs=3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted.fit(module, data or Data(TensorDataset(*(t[:75] for t in blobs().tensors))), **(fit or {}))
    said = [str(each.message) for each in told if "continues without" in str(each.message)]
    return module, loop, figures.rounds, said


def without(tmp_path, **arguments):
    """Make the run in which the bad client is not drawn."""
    everyone = list(range(len(PARTS)))
    drawn = [[client for client in everyone if (client, number) != (BAD, ROUND)] for number in range(3)]
    return run(tmp_path, participants=drawn, **arguments)


def assert_left_out(failed, expected, tolerance=0.0):
    for (name, value), other in zip(weights(failed[0]).items(), weights(expected[0]).values(), strict=True):
        assert value.isfinite().all()
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance, msg=name)
    for client in range(len(PARTS)):
        (one, values), (two, others) = (
            flatten_state(each[1].coordinator.states[client]) for each in (failed, expected)
        )
        assert one == two
        for value, other in zip(values, others, strict=True):
            torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
    logged = failed[2][ROUND]
    assert logged["federated/failed"] == 1
    assert logged["federated/clients"] == 3
    assert logged["federated/samples"] == expected[2][ROUND]["federated/samples"]
    assert logged["comm/up_bytes"] == expected[2][ROUND]["comm/up_bytes"]
    (said,) = failed[3]
    assert f"round {ROUND} continues without client {BAD}: " in said


class Poisoned(Module):
    """Gives the bad client a bad number."""

    value = math.nan

    def on_before_zero_grad(self, optimizer):
        number, clients, loop = where(self)
        if number == ROUND and BAD in clients:
            with torch.no_grad():
                loop.rounds.execution.clients[clients.index(BAD)].model["net.4.bias"][1] = self.value


class FailsInTheStep(Module):
    def training_step(self, batch, batch_idx):
        number, clients, loop = where(self)
        if (number, clients) == (ROUND, [BAD]) and loop.rounds.execution.number == 1:
            raise ValueError("no luck")
        return super().training_step(batch, batch_idx)


def method_of(name, module=Module, dtype=torch.float32):
    method = METHODS[name]
    low_rank = LOW_RANK[method.forms[0]]
    return {
        "module": module(method.network(), optimizer=method.optimizer).to(dtype),
        "algorithm": method.make(),
        "before": [] if low_rank is None else [low_rank()],
        **method.settings,
    }


def fail_at_the_end(algorithm: Algorithm):
    """Let a client's half fail when it has kept what it keeps."""
    own = algorithm.end

    def end(client):
        message = own(client)
        if (client.round, client.id) == (ROUND, BAD):
            raise ValueError("no luck")
        return message

    algorithm.end = end
    return algorithm


@nightly_except(
    "FedAvg-vectorized",
    "FedDyn-vectorized",
    "FedLoRA-FedSA-vectorized",
    "FedLoRA-RBLA-vectorized",
    "FedSB-vectorized",
    "GradientMask-vectorized",
    "SCAFFOLD-vectorized",
    "TDPFed-vectorized",
)
@pytest.mark.parametrize("execution", [pytest.param("sequential", marks=pytest.mark.nightly), "vectorized"])
@each_method()
def test_a_client_that_fails_is_as_if_not_drawn(tmp_path, name, execution):
    # Clients that step together round otherwise than one alone, and some methods amplify that.
    dtype = torch.float64 if execution == "vectorized" else torch.float32
    inputs, targets = blobs(75).tensors
    data = Data(TensorDataset(inputs.to(dtype), targets))
    expected = without(tmp_path, **method_of(name, dtype=dtype), data=data, execution=execution)
    # Of methods that average models, stacks are added up without a call of `end` for each client.
    averages = execution == "vectorized" and inherits(METHODS[name].make(), "end", "receive")
    settings = {**method_of(name, Poisoned if averages else Module, dtype), "data": data}
    fail_at_the_end(settings["algorithm"])
    if execution == "vectorized":
        settings["chunk_size"] = 3
    failed = run(tmp_path, **settings, execution=execution)
    assert ("not finite" if averages else "ValueError: no luck (test_failures.py:") in failed[3][0]
    assert_left_out(failed, expected, tolerance=1e-9 if execution == "vectorized" else 0.0)


class Limited(Half):
    """Cannot send what the bad client has."""

    def transmit_and_keep(self, tensors):
        if not tensors["net.4.bias"].isfinite().all():
            raise RuntimeError("no code for it")
        return super().transmit_and_keep(tensors)


def test_a_message_that_cannot_be_sent_leaves_out_its_client_alone(tmp_path):
    settings = {"uplink": [Limited()], "execution": "vectorized", "chunk_size": 4}
    failed = run(tmp_path, Poisoned(), **settings)
    assert "no code for it" in failed[3][0]
    assert_left_out(failed, without(tmp_path, **settings), tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"optimizer_state": "keep", "buffers": "local"},
        {"uplink": [TopK(0.3, error_feedback=True), Half()]},
        {"execution": "vectorized"},
        {"execution": "vectorized", "optimizer_state": "keep", "uplink": [Half()]},
    ],
    ids=["plain", "kept", "codecs", "together", "together with codecs"],
)
def test_an_update_that_is_not_finite_is_dropped(tmp_path, arguments):
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    class Adrift(Poisoned):
        value = math.inf

    failed = run(tmp_path, Adrift(optimizer=momentum), **arguments)
    expected = without(tmp_path, module=Module(optimizer=momentum), **arguments)
    assert_left_out(failed, expected, tolerance=1e-5 if "execution" in arguments else 0.0)
    assert "its net.0.weight holds numbers that are not finite" in failed[3][0]


class Logged(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class LogsNumber(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_figures_are_those_of_clients_that_are_not_left_out(tmp_path, execution):
    inputs, targets = (each[:75].clone() for each in blobs().tensors)
    inputs[PARTS[BAD]] = math.nan
    settings = {"data": Data(TensorDataset(inputs, targets)), "execution": execution}
    # Clients that step together have one call of the hook.
    settings["callbacks"], names = ([LogsNumber()], ["number_epoch"]) if execution == "sequential" else ([], [])
    others = [client for client in range(len(PARTS)) if client != BAD]
    _, _, logged, said = run(tmp_path, Logged(), **settings)
    _, _, expected, _ = run(tmp_path, Logged(), participants=[others] * 3, **settings)
    assert "client 2" in said[0]
    for name in ("loss", *names):
        assert [each[name] for each in logged] == pytest.approx([each[name] for each in expected], rel=1e-6)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_where_all_clients_diverge_the_round_says_so(tmp_path, execution):
    module = Module(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30))
    with pytest.raises(MisconfigurationException, match=r"holds numbers that are not finite.*smaller learning rate"):
        run(tmp_path, module, execution=execution)


@pytest.mark.slow
def test_what_a_codec_makes_infinite_is_dropped(tmp_path):
    class Large(Poisoned):
        value = 1e30

    _, _, figures, (said,) = run(tmp_path, Large(), uplink=[Half()])
    assert "net.4.bias as" in said
    assert [each["federated/failed"] for each in figures] == [0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
def test_an_error_in_a_step_ends_its_client_alone(tmp_path, own, optimizer_state):
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    settings = {"optimizer_state": optimizer_state}
    with lightnings_own(own):
        failed = run(tmp_path, FailsInTheStep(optimizer=momentum), **settings)
        assert_left_out(failed, without(tmp_path, module=Module(optimizer=momentum), **settings))
    assert failed[2][ROUND]["federated/client_steps"] < 2 * failed[2][0]["federated/client_steps"]


class Unreadable(Dataset):
    """Cannot read a sample of the bad client's, in one epoch."""

    def __init__(self, broken=True):
        self.tensors = blobs().tensors
        self.broken = broken
        self.reads = 0

    def __len__(self):
        return 75

    def __getitem__(self, index):
        self.reads += index == PARTS[BAD][0]
        if self.broken and index == PARTS[BAD][0] and self.reads == ROUND + 1:
            raise OSError("cannot identify image file")
        return tuple(tensor[index] for tensor in self.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sample_that_cannot_be_read_ends_its_client_alone(tmp_path, shuffle):
    failed = run(tmp_path, data=Data(Unreadable(), shuffle=shuffle))
    assert "OSError: cannot identify image file" in failed[3][0]
    assert_left_out(failed, without(tmp_path, data=Data(Unreadable(False), shuffle=shuffle)))
    assert failed[2][ROUND]["comm/down_bytes"] == failed[2][0]["comm/down_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.nightly
def test_workers_go_on_after_a_sample_that_cannot_be_read(tmp_path, workers):
    class Always(Unreadable):
        def __getitem__(self, index):
            if self.broken and index == PARTS[BAD][0]:
                raise OSError("cannot identify image file")
            return tuple(tensor[index] for tensor in self.tensors)

    failed = run(tmp_path, data=Data(Always(), **workers))
    assert len(failed[3]) == 3
    others = [client for client in range(len(PARTS)) if client != BAD]
    expected = run(tmp_path, data=Data(Always(False), **workers), participants=[others] * 3)
    assert_same(weights(failed[0]), weights(expected[0]))


@pytest.mark.slow
def test_clients_that_step_together_fail_together(tmp_path):
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            number, clients, _ = where(self)
            if number == ROUND and BAD in clients:
                raise LookupError("no luck")
            return super().training_step(batch, batch_idx)

    module, _, figures, (said,) = run(tmp_path, Fails(), execution="vectorized", chunk_size=2)
    assert "which step together: LookupError: no luck" in said
    assert figures[ROUND]["federated/failed"] == figures[ROUND]["federated/clients"] == 2
    assert all(value.isfinite().all() for value in weights(module).values())
    with pytest.raises(MisconfigurationException, match=r"0.*4.*min_clients=1") as error:
        run(tmp_path, Fails(), execution="vectorized")
    assert isinstance(error.value.__cause__, LookupError)


class FailsToBegin(SCAFFOLD, UnequalClients):
    """Has the bad client fail in one of the hooks with which it begins, when it has changed what it keeps."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def configure(self, base, client):
        super().configure(base, client)
        self._fail("configure", client)

    def begin(self, client, message):
        super().begin(client, message)
        client.state["kept"] = torch.zeros(1)
        self._fail("begin", client)

    def _fail(self, hook, client):
        if client is not None and hook == self.hook and (client.round, client.id) == (ROUND, BAD):
            raise ValueError("no luck")


class ObjectiveFails(Objective):
    fails = True

    def begin(self, client):
        if self.fails and (client.round, client.id) == (ROUND, BAD):
            raise ValueError("no luck")

    def loss(self, step, batch, training_step):
        return training_step()


class ObjectiveBegins(ObjectiveFails):
    fails = False


@daily("begin-True-sequential", "loss-False-sequential", "begin-True-vectorized")
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize(("hook", "longest"), [("begin", True), ("begin", False), ("configure", True), ("loss", False)])
def test_a_client_that_fails_to_begin_leaves_its_chunk(tmp_path, execution, hook, longest):
    # Of clients that step together, the one with most batches is asked for the configuration.
    ends = (5, 27, 52, 75) if longest else (5, 30, 40, 75)
    inputs, targets = blobs(75).tensors
    settings = {
        "data": Data(TensorDataset(inputs.double(), targets)),
        "partition": FromIndices([list(range(*pair)) for pair in zip((0, *ends), ends, strict=False)]),
        "execution": execution,
    }
    fails, works = {"algorithm": FailsToBegin(hook)}, {"algorithm": FailsToBegin("never")}
    if hook == "loss":
        fails, works = {"objective": ObjectiveFails()}, {"objective": ObjectiveBegins()}
    else:
        settings["uplink"] = [TopK(0.3, error_feedback=True)]
    kept = {}

    class Keeps(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            kept[trainer.current_epoch] = flatten_state(dict(where(pl_module)[2].coordinator.states[BAD]))

    failed = run(tmp_path, Module().double(), callbacks=[Keeps()], **settings, **fails)
    expected = without(tmp_path, module=Module().double(), **settings, **works)
    assert_left_out(failed, expected, tolerance=1e-9 if execution == "vectorized" else 0.0)
    (names, values), (names_before, values_before) = kept[ROUND], kept[ROUND - 1]
    assert names == names_before
    assert all(map(torch.equal, values, values_before))
    assert f"without client {BAD}: ValueError: no luck" in failed[3][0]
    with pytest.raises(ValueError, match="no luck"):
        run(tmp_path, Module().double(), on_client_error="raise", **settings, **fails)


def test_a_chunk_of_which_all_fail_to_begin_is_left_out(tmp_path):
    class Fails(FedAvg):
        def begin(self, client, message):
            super().begin(client, message)
            if client.round == ROUND and client.id in (1, 3):
                raise ValueError(f"no luck with {client.id}")

    module, _, figures, said = run(tmp_path, algorithm=Fails(), execution="vectorized", chunk_size=2)
    assert [each["federated/failed"] for each in figures] == [0, 2, 0]
    assert [f"no luck with {client}" in each for client, each in zip((1, 3), said, strict=True)] == [True, True]
    drawn = [[0, 2] if number == ROUND else list(range(4)) for number in range(3)]
    expected = run(tmp_path, participants=drawn, execution="vectorized", chunk_size=2)
    assert_same(weights(module), weights(expected[0]))


def test_a_bug_in_the_step_shows_its_own_traceback(tmp_path):
    class Bug(Module):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == ROUND:
                return self.net(batch[0], "too many")
            return super().training_step(batch, batch_idx)

    module, kept = Bug(), {}

    class Kept(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            kept.update(weights(pl_module))

    with pytest.raises(MisconfigurationException, match=r"round 1 .* 0 of 4 .*: TypeError") as error:
        run(tmp_path, module, callbacks=[Kept()])
    assert str(error.value).count("TypeError") == 1
    assert isinstance(error.value.__cause__, TypeError)
    assert "training_step" in [frame.name for frame in traceback.extract_tb(error.value.__cause__.__traceback__)]
    assert_same(kept, weights(module))


class NamesAKey(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step({"inputs": batch[0]}["images"], batch_idx)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("on_client_error", ["drop", "raise"])
def test_a_fault_of_all_clients_is_said_once(tmp_path, execution, on_client_error):
    parts = FromIndices([[3 * number, 3 * number + 1, 3 * number + 2] for number in range(25)])
    settings = {"execution": execution, "on_client_error": on_client_error, "partition": parts}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop = FederatedLoop(FedAvg(), summary=False, **settings)
        data = Data(TensorDataset(*(tensors[:75] for tensors in blobs().tensors)))
        with pytest.raises(Exception, match="images") as caught:
            trainer(tmp_path, loop, limit_val_batches=0).fit(NamesAKey(), data)
    error = caught.value
    if on_client_error == "drop":
        assert isinstance(error, MisconfigurationException)
        assert "0 of 25" in str(error)
        assert str(error).count("images") == 1
        assert "learning rate" not in str(error)
        error = error.__cause__
    assert isinstance(error, KeyError)
    assert "training_step" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert sum("images" in str(each.message) for each in told) == (on_client_error == "drop")


def test_an_error_of_torch_is_placed_at_the_users_line():
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 3)(torch.ones(1, 5))
    assert f"({Path(__file__).name}:" in describe_error(caught.value)


def test_clients_that_fail_alike_are_warned_of_together(tmp_path):
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            number, (client,), _ = where(self)
            if number == ROUND and client:
                raise LookupError("no luck")
            return super().training_step(batch, batch_idx)

    _, _, figures, said = run(tmp_path, Fails())
    assert figures[ROUND]["federated/failed"] == 3
    first, others = said
    assert "without client 1: LookupError: no luck" in first
    assert "without clients [2, 3], " in others
    assert "LookupError: no luck" in others
    with pytest.raises(MisconfigurationException, match=r"(?s)2 of 4 .*min_clients=3.*clients \[1, 2\]: LookupError"):
        run(tmp_path, Fails(), min_clients=3)


@pytest.mark.parametrize("module", [FailsInTheStep, Poisoned])
def test_errors_may_end_the_fit(tmp_path, module):
    with pytest.raises(ValueError, match=r"no luck|net\.0\.weight holds numbers that are not finite"):
        run(tmp_path, module(), on_client_error="raise")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), MisconfigurationException("no luck"), MemoryError("no luck")]
)
def test_what_is_not_one_clients_ends_the_fit(tmp_path, error):
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            if where(self)[1] == [BAD]:
                raise error
            return super().training_step(batch, batch_idx)

    with pytest.raises((type(error), SystemExit)):
        run(tmp_path, Fails())


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_an_error_of_a_callback_ends_the_fit(tmp_path, hook):
    class Full(pl.Callback):
        pass

    def fails(*arguments):
        raise OSError("no space left on device")

    setattr(Full, hook, fails)
    with pytest.raises(OSError, match="no space left"):
        run(tmp_path, callbacks=[Full()])


def test_a_servers_error_ends_the_fit(tmp_path):
    class Fails(FedAvg):
        def receive(self, server, client, message, weight):
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        run(tmp_path, algorithm=Fails())


@pytest.mark.slow
def test_a_round_needs_its_least_number_of_answers(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"3.*4.*min_clients=4"):
        run(tmp_path, FailsInTheStep(), min_clients=4)
    run(tmp_path, FailsInTheStep(), min_clients=3)
    with pytest.raises(MisconfigurationException, match=r"min_clients=5.*4"):
        run(tmp_path, min_clients=5)
    with pytest.raises(MisconfigurationException, match=r"min_clients.*1.*0"):
        FederatedLoop(FedAvg(), min_clients=0)
    with pytest.raises(MisconfigurationException, match=r"on_client_error.*'ignore'"):
        FederatedLoop(FedAvg(), on_client_error="ignore")


def test_a_model_that_overflows_is_an_error(tmp_path):
    class Doubles(FedAvg):
        def aggregate(self, server):
            super().aggregate(server)
            server.model = {name: value * 1e38 * 1e38 for name, value in server.model.items()}

    module = Module()
    start = weights(module)
    with pytest.raises(MisconfigurationException, match=r"0.*'net\.0\.weight'.*4"):
        run(tmp_path, module, algorithm=Doubles())
    assert_same(start, weights(module))


def test_weights_that_are_all_zero_are_refused():
    mean = WeightedMean()
    mean.add({"w": torch.zeros(2)}, 0.0)
    mean.add({"w": torch.ones(2)}, 0.0)
    with pytest.raises(ValueError, match=r"2.*arrivals.*0"):
        mean.result()


def assert_same_round(resumed, whole):
    """Compare what `run` returns of a run that is resumed inside the round of the failure with the whole run."""
    (again, loop_again, more, _), (module, loop, figures, _) = resumed, whole
    assert_same(weights(module), weights(again))
    assert loop.ledger.state_dict() == loop_again.ledger.state_dict()
    for name in ("federated/failed", "federated/clients", "federated/client_steps"):
        assert more[0][name] == figures[ROUND][name]
    for client in range(len(PARTS)):
        (one, values), (two, others) = (flatten_state(each.coordinator.states[client]) for each in (loop, loop_again))
        assert one == two
        assert all(map(torch.equal, values, others))


@nightly_except("steps0-end")
@pytest.mark.slow
@pytest.mark.parametrize("failing", ["step", "end"])
@pytest.mark.parametrize("steps", [(13, 14, 15, 17), (12, 16, 18)], ids=["steps0", "steps1"])
def test_a_run_that_is_resumed_has_the_same_failures(tmp_path, steps, failing):
    def settings(resume=None):
        method = method_of("SCAFFOLD", FailsInTheStep if failing == "step" else Module)
        if failing == "end":
            fail_at_the_end(method["algorithm"])
        saving = SaveEachStep(tmp_path)
        more = {"uplink": [TopK(0.3, error_feedback=True)], "optimizer_state": "keep"}
        return {**method, **more, **({"fit": {"ckpt_path": resume}} if resume else {"callbacks": [saving]})}

    whole = run(tmp_path, **settings())
    for step in steps:
        assert_same_round(run(tmp_path, **settings(tmp_path / f"step={step}.ckpt")), whole)


@pytest.mark.slow
def test_a_chunk_that_lost_a_client_is_resumed_as_it_was_planned(tmp_path):
    settings = {"execution": "vectorized", "chunk_size": 3, "uplink": [TopK(0.3, error_feedback=True)]}
    saving = [SaveEachStep(tmp_path)]
    whole = run(tmp_path, algorithm=FailsToBegin("begin"), callbacks=saving, **settings)
    (said,) = whole[3]
    # The round has steps 6 to 10: 4 of clients 1 and 3 together, then one of client 0.
    for step in (6, 8, 9, 10):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["callbacks"]["FederatedLoop"]
        inside = step < 10
        assert saved["chunks"][0] == ([1, 3, 2] if inside else [1, 3])
        resumed = run(
            tmp_path, algorithm=FailsToBegin("begin"), fit={"ckpt_path": tmp_path / f"step={step}.ckpt"}, **settings
        )
        assert resumed[3] == ([said] if inside else [])
        assert_same_round(resumed, whole)


def said_of_lost_clients(fitted, module):
    """The fit's warnings that name the clients without which a round goes on."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted.fit(module, Data())
    return [str(each.message) for each in told if " without " in str(each.message)]


@pytest.mark.parametrize("execution", ["sequential", "auto"])
def test_clients_whose_last_batch_has_one_sample_before_batch_norm_are_named_once(tmp_path, execution):
    parts = FromIndices([list(range(9)), list(range(9, 25)), list(range(25, 26)), list(range(26, 74))])
    loop = FederatedLoop(FedAvg(), partition=parts, seed=0, summary=False, execution=execution)
    fitted = trainer(tmp_path, loop, limit_val_batches=0, max_epochs=3)
    said = said_of_lost_clients(fitted, Module(network(norm=nn.BatchNorm1d)))
    assert len(said) == 1
    assert "2 of 4 clients, whose last batch has one sample: 0, 2." in said[0]
    assert "drop_last=True" in said[0]
    assert fitted.callback_metrics["federated/failed"] == 2


def test_batch_norm_of_a_batch_that_the_module_cuts_is_reported_as_any_error(tmp_path):
    class Cutting(Module):
        def loss(self, batch):
            return super().loss((batch[0][:1], batch[1][:1]))

    with pytest.raises(MisconfigurationException, match="all of them failed alike: ValueError: Expected more than 1"):
        run(
            tmp_path, Cutting(network(norm=nn.BatchNorm1d)), partition=FromIndices([list(range(8)), list(range(8, 16))])
        )


def test_another_client_of_the_same_error_is_named_with_its_reason(tmp_path):
    class CutsFours(Module):
        def loss(self, batch):
            return super().loss((batch[0][:1], batch[1][:1]) if len(batch[0]) == 4 else batch)

    parts = FromIndices([list(range(9)), list(range(9, 13)), list(range(13, 29))])
    loop = FederatedLoop(FedAvg(), partition=parts, seed=0, summary=False)
    fitted = trainer(tmp_path, loop, limit_val_batches=0, max_epochs=1)
    said = said_of_lost_clients(fitted, CutsFours(network(norm=nn.BatchNorm1d)))
    assert len(said) == 2
    assert "a client, whose last batch has one sample: 0." in said[0]
    assert "without client 1: ValueError: Expected more than 1" in said[1]


def test_a_signal_that_arrives_while_signals_are_delivered_is_not_lost(monkeypatch):
    own, kinds = signal.signal, []

    def arriving(kind, handler):
        kinds.append(kind)
        # The first restored handler is that of the interrupt, and the second not yet.
        if len(kinds) == 2:
            signal.raise_signal(signal.SIGUSR1)
        return own(kind, handler)

    received = []
    before = own(signal.SIGUSR1, lambda kind, frame: received.append(kind))
    interrupt = own(signal.SIGINT, signal.default_int_handler)
    try:
        with DeferredSignals():
            monkeypatch.setattr(signal, "signal", arriving)
        assert received == [signal.SIGUSR1]
    finally:
        own(signal.SIGUSR1, before)
        own(signal.SIGINT, interrupt)
