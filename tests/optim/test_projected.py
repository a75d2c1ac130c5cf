"""The projected optimizers against the papers' formulas in plain torch, and against torch's own optimizers."""

import copy
import io
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_lowrank.optim import ProjectedAdamW, ProjectedSGD
from lightning_lowrank.optim.deferred import DeferredSteps
from lightning_lowrank.seeding import generator
from tests.grids import all_pairs, daily, pairwise
from tests.helpers import blobs

MATRICES = [(6, 9), (9, 6), (2, 7), (4, 2, 3, 3), (5, 3, 3), (4, 2, 2, 2, 2)]
RANK = 4

every_optimizer = pytest.mark.parametrize("kind", [ProjectedSGD, ProjectedAdamW])
every_subspace = pytest.mark.parametrize("subspace", ["random", "gradient"])
every_choice_of_moments = pytest.mark.parametrize("moments", ["keep", "zero", "rotate"])


def parameters(*shapes, dtype=torch.float64, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_gradients(params, step):
    draws = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=draws, dtype=torch.float64) + 0.5
        parameter.grad = gradient.to(parameter.dtype)


def train(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def optimizer_of(kind, params, **options):
    defaults = {"momentum": 0.9} if kind is ProjectedSGD else {}
    return kind(params, **{"lr": 0.05, "rank": RANK, "refresh_interval": 3, "seed": 5, **defaults, **options})


def saved_and_loaded(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def assert_unchanged(model, optimizer, before):
    weights, state_dict = before
    assert_same(model.state_dict(), weights)
    assert_same(optimizer.state_dict()["state"], state_dict["state"])
    assert optimizer.state_dict()["param_groups"] == state_dict["param_groups"]


# The formulas


@pairwise()
@every_choice_of_moments
@every_subspace
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dampening": 0.3, "weight_decay": 0.1},
        {"nesterov": True, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.0, "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("foreach", [False, True])
def test_sgd_is_momentum_of_projected_gradients(options, subspace, moments, foreach):
    """Line 18 and 19 of FedSLoP's Algorithm 1, which hold the momentum at full size: v ← μv + ΠG, W ← W − ηv."""
    params = parameters(*MATRICES)
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = optimizer_of(ProjectedSGD, groups, subspace=subspace, moments=moments, foreach=foreach, **options)
    momentum, dampening = options.get("momentum", 0.9), options.get("dampening", 0.0)
    expected = [p.detach().flatten(1).clone() for p in params]
    velocities, bases = [None] * len(params), [None] * len(params)
    for step in range(8):
        train(optimizer, params, [step])
        for i, parameter in enumerate(params):
            basis = optimizer.projection(parameter)
            assert (bases[i] is None or not torch.equal(basis, bases[i])) == (step % 3 == 0)
            if step % 3 == 0 and velocities[i] is not None:
                velocities[i] = {
                    "keep": lambda v, old, new: v @ old @ new.T,
                    "rotate": lambda v, old, new: v @ new @ new.T,
                    "zero": lambda v, old, new: None,
                }[moments](velocities[i], bases[i], basis)
            sign = -1 if options.get("maximize") else 1
            gradient = sign * parameter.grad.flatten(1) + options.get("weight_decay", 0) * expected[i]
            gradient = gradient @ basis @ basis.T
            first = velocities[i] is None
            velocities[i] = gradient if first else momentum * velocities[i] + (1 - dampening) * gradient
            direction = gradient + momentum * velocities[i] if options.get("nesterov") else velocities[i]
            expected[i] = expected[i] - 0.05 * (direction if momentum else gradient)
            bases[i] = basis
            torch.testing.assert_close(parameter.detach().flatten(1), expected[i], rtol=1e-10, atol=1e-10)
            if momentum:
                torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], velocities[i] @ basis)
            else:
                assert set(optimizer.state.get(parameter, {})) == ({"projection"} if subspace == "gradient" else set())
    assert momentum or subspace == "gradient" or not optimizer.state


@pairwise()
@every_choice_of_moments
@every_subspace
@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.0, "betas": (0.5, 0.9)}], ids=str)
@pytest.mark.parametrize("foreach", [False, True])
def test_adamw_is_adam_of_the_coefficients(options, subspace, moments, foreach):
    params = parameters(*MATRICES)
    optimizer = optimizer_of(ProjectedAdamW, params, subspace=subspace, moments=moments, foreach=foreach, **options)
    (beta1, beta2), decay = options.get("betas", (0.9, 0.999)), options.get("weight_decay", 0.01)
    expected = [p.detach().flatten(1).clone() for p in params]
    # The bias-corrected moments, and the number of gradients in them.
    firsts, seconds, counts, bases = [0.0] * len(params), [0.0] * len(params), [0] * len(params), [None] * len(params)
    for step in range(8):
        train(optimizer, params, [step])
        for i, parameter in enumerate(params):
            basis = optimizer.projection(parameter)
            if step in (3, 6) and moments == "zero":
                counts[i] = 0
            if step in (3, 6) and moments == "rotate":
                rotation = bases[i].T @ basis
                covariance = torch.diag_embed((seconds[i] - firsts[i] ** 2).clamp(min=0))
                firsts[i] = firsts[i] @ rotation
                variances = (rotation.T @ covariance @ rotation).diagonal(dim1=1, dim2=2)
                seconds[i] = variances + firsts[i] ** 2
            gradient = (-1 if options.get("maximize") else 1) * parameter.grad.flatten(1) @ basis
            counts[i] += 1
            weights = [(1 - beta) / (1 - beta ** counts[i]) for beta in (beta1, beta2)]
            firsts[i] = (1 - weights[0]) * firsts[i] + weights[0] * gradient
            seconds[i] = (1 - weights[1]) * seconds[i] + weights[1] * gradient**2
            change = firsts[i] / (seconds[i].sqrt() + 1e-8) @ basis.T
            expected[i] = (1 - 0.05 * decay) * expected[i] - 0.05 * change
            bases[i] = basis
            torch.testing.assert_close(parameter.detach().flatten(1), expected[i], rtol=1e-9, atol=1e-9)
            assert optimizer.state[parameter]["step"] == counts[i]
            assert optimizer.state[parameter]["exp_avg_sq"].shape == (len(parameter), RANK)


def test_adamw_update_stays_bounded_where_gradients_grow():
    """v̂ − m̂² is negative there; without care √v̂ could be 0 under a mean that is not."""
    (parameter,) = params = parameters((40, 12))
    optimizer = optimizer_of(ProjectedAdamW, params, refresh_interval=5, lr=1.0, weight_decay=0.0, rank=6)
    for step in range(20):
        before = parameter.detach().clone()
        parameter.grad = torch.full_like(parameter, 10.0**step) * torch.sign(before)
        optimizer.step()
        assert ((parameter - before) @ optimizer.projection(parameter)).abs().max() < 7.3


def test_gradient_subspace_is_that_of_the_leading_singular_vectors():
    params = parameters((6, 9), (9, 6), (4, 2, 3, 3))
    optimizer = optimizer_of(ProjectedSGD, params, subspace="gradient", rank=3)
    train(optimizer, params, [0])
    for parameter in params:
        matrix, basis = parameter.grad.flatten(1), optimizer.projection(parameter)
        _, vectors = torch.linalg.eigh(matrix.T @ matrix)
        leading = vectors[:, -3:]
        torch.testing.assert_close(basis @ basis.T, leading @ leading.T)
        assert optimizer.state[parameter]["projection"] is basis


@pytest.mark.parametrize("gradient", ["zero", "rank 1", "few rows"])
def test_gradient_subspace_is_completed_where_the_gradient_has_too_few_directions(gradient):
    (parameter,) = params = parameters((2 if gradient == "few rows" else 6, 9), dtype=torch.float32)
    optimizer = optimizer_of(ProjectedSGD, params, subspace="gradient")
    row = torch.arange(9.0)
    parameter.grad = {
        "zero": torch.zeros(6, 9),
        "rank 1": torch.outer(torch.arange(6.0), row),
        "few rows": torch.stack([row, row.flip(0)]),
    }[gradient]
    optimizer.step()
    basis = optimizer.projection(parameter)
    torch.testing.assert_close(basis.T @ basis, torch.eye(RANK), atol=1e-6, rtol=0)
    torch.testing.assert_close(parameter.grad @ basis @ basis.T, parameter.grad, atol=1e-4, rtol=1e-5)
    optimizer.refresh(seed=6)
    optimizer.step()
    other = optimizer.projection(parameter)
    assert torch.linalg.matrix_norm(other.T @ basis, ord="nuc") < RANK - 0.1


# No projection at all


@pairwise()
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ProjectedSGD, {}),
        (ProjectedSGD, {"momentum": 0.9}),
        (ProjectedSGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5}),
        (ProjectedSGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
        (ProjectedAdamW, {}),
        (ProjectedAdamW, {"weight_decay": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "maximize": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [18, 100, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_rank_is_torch_bit_for_bit(kind, options, rank, foreach, dtype):
    shapes = [*MATRICES, (5,), (), (3, 1)]
    ours, theirs = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    optimizer = kind(ours, lr=0.05, rank=rank, refresh_interval=2, moments="zero", foreach=foreach, **options)
    reference = {ProjectedSGD: torch.optim.SGD, ProjectedAdamW: torch.optim.AdamW}[kind](
        theirs, lr=0.05, foreach=foreach, **options
    )
    train(optimizer, ours, range(5))
    train(reference, theirs, range(5))
    assert_same(ours, theirs)
    assert all(optimizer.projection(p) is None for p in ours)
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    for own, their in zip(optimizer.state.values(), reference.state.values(), strict=True):
        assert own.keys() == their.keys()
        assert_same(dict(own), dict(their))


@every_optimizer
def test_biases_and_groups_without_rank_are_dense_beside_a_projected_matrix(kind):
    weight, bias, scale, other = params = parameters((6, 9), (6,), (), (6, 9))
    references = [copy.deepcopy(p) for p in params]
    groups = [{"params": [bias, weight, scale]}, {"params": [other], "rank": None, "lr": 0.2}]
    optimizer = optimizer_of(kind, groups)
    dense = {ProjectedSGD: torch.optim.SGD, ProjectedAdamW: torch.optim.AdamW}[kind]
    options = {"momentum": 0.9} if kind is ProjectedSGD else {}
    reference = dense([{"params": references[:3]}, {"params": references[3:], "lr": 0.2}], lr=0.05, **options)
    train(optimizer, params, range(5))
    train(reference, references, range(5))
    for index in (1, 2, 3):
        assert_same(params[index], references[index])
    assert optimizer.projection(weight).shape == (9, RANK)
    assert not torch.equal(weight, references[0])


@every_optimizer
def test_learning_rate_may_be_a_tensor(kind):
    ours, theirs = parameters((6, 9), (6,)), parameters((6, 9), (6,))
    train(optimizer_of(kind, ours, lr=torch.tensor(0.05, dtype=torch.float64)), ours, range(5))
    train(optimizer_of(kind, theirs), theirs, range(5))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# Memory


# Random subspaces


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)]
)
def test_random_projection_is_orthonormal(dtype, tolerance):
    (parameter,) = params = parameters((3, 60), dtype=dtype)
    basis = optimizer_of(ProjectedSGD, params, rank=20).projection(parameter)
    assert basis.dtype == dtype
    assert (basis.double().T @ basis.double() - torch.eye(20)).abs().max() < tolerance


def test_random_projection_depends_on_seed_parameter_and_refresh_only():
    params = parameters((3, 9), (3, 9), (7, 9))
    optimizer = optimizer_of(ProjectedSGD, params)
    first = [optimizer.projection(p) for p in params]
    assert not torch.equal(first[0], first[1])
    split = optimizer_of(ProjectedAdamW, [{"params": [p]} for p in params])
    assert_same([split.projection(p) for p in params], first)
    other = optimizer_of(ProjectedSGD, params, seed=6)
    assert not torch.equal(other.projection(params[0]), first[0])
    train(optimizer, params, range(3))
    assert_same([optimizer.projection(p) for p in params], first)
    train(optimizer, params, [3])
    assert not any(torch.equal(optimizer.projection(p), old) for p, old in zip(params, first, strict=True))
    optimizer.refresh(seed=6)
    assert_same([optimizer.projection(p) for p in params], [other.projection(p) for p in params])
    other.refresh()
    optimizer.refresh()
    assert_same([optimizer.projection(p) for p in params], [other.projection(p) for p in params])
    optimizer.refresh(seed=5)
    assert_same([optimizer.projection(p) for p in params], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_projection_is_the_orthonormalised_draw_of_its_named_stream(dtype):
    """By Cholesky instead of Householder: the factor with a positive diagonal is unique."""
    params = parameters((3, 9), (7, 12), dtype=dtype)
    optimizer = optimizer_of(ProjectedSGD, params)
    train(optimizer, params, range(4))
    gaussian = torch.randn(12, RANK, generator=generator(5, "projection", 1, 1), dtype=dtype)
    triangle = torch.linalg.cholesky(gaussian.T @ gaussian).T
    torch.testing.assert_close(optimizer.projection(params[1]), gaussian @ triangle.inverse())


def test_global_generator_is_left_alone():
    params = parameters((6, 9), (9, 3))
    before = torch.get_rng_state()
    for subspace in ("random", "gradient"):
        train(optimizer_of(ProjectedSGD, params, subspace=subspace, rank=7), params, range(4))
    assert_same(torch.get_rng_state(), before)


# Refreshes


def test_refreshes_come_by_steps_or_on_demand_only():
    (parameter,) = params = parameters((6, 9))
    optimizer = optimizer_of(ProjectedSGD, params, refresh_interval=None)
    train(optimizer, params, range(250))
    first = optimizer.projection(parameter)
    optimizer.refresh()
    assert not torch.equal(optimizer.projection(parameter), first)
    default = ProjectedSGD(params, rank=RANK)
    train(default, params, range(200))
    first = default.projection(parameter)
    train(default, params, [200])
    assert not torch.equal(default.projection(parameter), first)


@every_subspace
def test_interval_counts_from_the_last_refresh(subspace):
    (parameter,) = params = parameters((6, 9))
    optimizer = optimizer_of(ProjectedSGD, params, subspace=subspace)
    bases = []
    for step in range(8):
        if step == 2:
            optimizer.refresh()
        train(optimizer, params, [step])
        bases.append(optimizer.projection(parameter).clone())
    changes = [step for step in range(1, 8) if not torch.equal(bases[step], bases[step - 1])]
    assert changes == [2, 5]


@every_choice_of_moments
@every_optimizer
def test_asking_for_the_projection_changes_nothing(kind, moments):
    ours, theirs = parameters(*MATRICES), parameters(*MATRICES)
    asked, unasked = optimizer_of(kind, ours, moments=moments), optimizer_of(kind, theirs, moments=moments)
    for step in range(6):
        if step == 4:
            asked.refresh(9)
            unasked.refresh(9)
        assert all(asked.projection(p) is not None for p in ours)
        train(asked, ours, [step])
        train(unasked, theirs, [step])
    assert_same(ours, theirs)


def test_same_seed_again_restarts_the_moments():
    """As a round's second client does that gets the round's seed."""
    (parameter,) = params = parameters((6, 9))
    optimizer = optimizer_of(ProjectedSGD, params, moments="zero", refresh_interval=None)
    optimizer.refresh(11)
    train(optimizer, params, range(3))
    start = parameter.detach().clone()
    basis = optimizer.projection(parameter)
    optimizer.refresh(11)
    train(optimizer, params, [0])
    assert_same(optimizer.projection(parameter), basis)
    torch.testing.assert_close(parameter.detach(), start - 0.05 * parameter.grad @ basis @ basis.T)


@every_choice_of_moments
@pytest.mark.parametrize("seed", [None, 12])
def test_moments_that_are_taken_up_again_come_from_a_subspace_left_meanwhile(moments, seed):
    """As those of a client whose entries in ``subspaces`` were kept while others saw a refresh."""
    (parameter,) = params = parameters((6, 9))
    optimizer = optimizer_of(ProjectedSGD, params, moments=moments, refresh_interval=None)
    train(optimizer, params, range(3))
    old, kept = optimizer.projection(parameter), optimizer.state[parameter]["momentum_buffer"].clone()
    (group,) = optimizer.param_groups
    subspaces = group["subspaces"]
    optimizer.refresh(seed)
    group["subspaces"] = subspaces
    train(optimizer, params, [3])
    new = optimizer.projection(parameter)
    assert not torch.equal(old, new)
    carried = {"keep": kept, "zero": torch.zeros_like(kept), "rotate": kept @ old.T @ new}[moments]
    momentum = optimizer.state[parameter]["momentum_buffer"].clone()
    torch.testing.assert_close(momentum, 0.9 * carried + parameter.grad @ new)
    train(optimizer, params, [4])
    torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], 0.9 * momentum + parameter.grad @ new)


@every_optimizer
def test_gradient_subspace_can_be_asked_for_after_the_step_that_makes_it(kind):
    (parameter,) = params = parameters((6, 9))
    optimizer = optimizer_of(kind, params, subspace="gradient")
    with pytest.raises(RuntimeError, match=r"projection\(\).*step\(\)"):
        optimizer.projection(parameter)
    train(optimizer, params, [0])
    optimizer.refresh()
    with pytest.raises(RuntimeError, match=r"projection\(\).*step\(\)"):
        optimizer.projection(parameter)


@every_choice_of_moments
@every_subspace
@every_optimizer
def test_parameters_without_gradients_stay_and_change_subspace_later(kind, subspace, moments):
    """The momentum of one that misses refreshes goes straight from the last subspace it had to the present one."""
    busy, idle = params = parameters((6, 9), (5, 8))
    optimizer = optimizer_of(kind, params, subspace=subspace, moments=moments)
    train(optimizer, params, range(2))
    untouched, state = idle.detach().clone(), copy.deepcopy(dict(optimizer.state[idle]))
    old = optimizer.projection(idle)
    for step in range(2, 8):
        set_gradients([busy], step)
        idle.grad = None
        optimizer.step()
    assert_same(idle.detach(), untouched)
    assert_same(dict(optimizer.state[idle]), state)
    train(optimizer, params, [8])
    new = optimizer.projection(idle)
    assert not torch.equal(old, new)
    name, weight, scale = ("momentum_buffer", 0.9, 1.0) if kind is ProjectedSGD else ("exp_avg", 0.9, 0.1)
    carried = {"keep": state[name], "zero": 0 * state[name], "rotate": state[name] @ old.T @ new}[moments]
    torch.testing.assert_close(optimizer.state[idle][name], weight * carried + scale * idle.grad @ new)


# Saving, copying, clearing


@pairwise()
@every_choice_of_moments
@every_subspace
@every_optimizer
@pytest.mark.parametrize("stop", [2, 3, 7])
@pytest.mark.parametrize("refresh", [False, True])
def test_resumed_training_goes_on_bit_for_bit(kind, subspace, moments, stop, refresh):
    params = parameters(*MATRICES, (6,), dtype=torch.float32)
    optimizer = optimizer_of(kind, params, subspace=subspace, moments=moments)
    train(optimizer, params, range(stop))
    if refresh:
        optimizer.refresh(17)
    resumed = [nn.Parameter(p.detach().clone()) for p in params]
    fresh = optimizer_of(kind, resumed, subspace=subspace, moments=moments)
    fresh.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(optimizer, params, range(stop, 12))
    train(fresh, resumed, range(stop, 12))
    assert_same(params, resumed)
    names = {"projection"} if subspace == "gradient" else set()
    names |= {"momentum_buffer"} if kind is ProjectedSGD else {"step", "exp_avg", "exp_avg_sq"}
    for parameter, again in zip(params, resumed, strict=True):
        assert_same(dict(optimizer.state[parameter]), dict(fresh.state[again]))
        assert set(fresh.state[again]) == names - ({"projection"} if parameter.ndim < 2 else set())


def test_saved_state_does_not_follow_the_optimizer():
    params = parameters((6, 9))
    optimizer = optimizer_of(ProjectedSGD, params)
    train(optimizer, params, range(2))
    groups = optimizer.state_dict()["param_groups"]
    before = copy.deepcopy(groups)
    train(optimizer, params, range(2, 8))
    assert groups == before


@every_subspace
@every_optimizer
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_alike(kind, subspace, duplicate):
    params = parameters((6, 9), (6,))
    optimizer = optimizer_of(kind, params, subspace=subspace)
    train(optimizer, params, range(2))
    copied, copied_params = duplicate((optimizer, params))
    train(optimizer, params, range(2, 8))
    train(copied, copied_params, range(2, 8))
    assert_same(params, copied_params)


@every_subspace
@every_optimizer
def test_clearing_the_state_starts_the_moments_anew_in_the_same_subspace(kind, subspace):
    """A federated loop clears it for each client and leaves the parameter groups alone."""
    (parameter,) = params = parameters((6, 9))
    optimizer = optimizer_of(kind, params, subspace=subspace, refresh_interval=None)
    train(optimizer, params, range(4))
    basis, start = optimizer.projection(parameter), parameter.detach().clone()
    optimizer.state.clear()
    train(optimizer, params, [4])
    if subspace == "random":
        assert_same(optimizer.projection(parameter), basis)
    else:
        basis = optimizer.projection(parameter)
    coefficients = parameter.grad @ basis
    if kind is ProjectedSGD:
        torch.testing.assert_close(parameter.detach(), start - 0.05 * coefficients @ basis.T)
    else:
        change = 0.05 * coefficients / (coefficients.abs() + 1e-8) @ basis.T
        torch.testing.assert_close(parameter.detach(), (1 - 0.05 * 0.01) * start - change)


def test_parameter_moved_to_another_dtype_gets_its_projection_there():
    model = nn.Linear(9, 6)
    optimizer = optimizer_of(ProjectedSGD, model.parameters())
    assert optimizer.projection(model.weight).dtype == torch.float32
    model.double()
    assert optimizer.projection(model.weight).dtype == torch.float64


def test_state_of_a_dense_optimizer_is_refused():
    params = parameters((6, 9))
    reference = torch.optim.AdamW(params)
    train(reference, params, [0])
    with pytest.raises(ValueError, match="state_dict"):
        optimizer_of(ProjectedAdamW, params).load_state_dict(reference.state_dict())


@pytest.mark.parametrize(("own", "other"), [(ProjectedSGD, ProjectedAdamW), (ProjectedAdamW, ProjectedSGD)])
def test_state_of_the_other_optimizer_is_refused(own, other):
    params = parameters((6, 9))
    optimizer, before = optimizer_of(own, params), optimizer_of(own, params).state_dict()
    with pytest.raises(ValueError, match=rf"state_dict lacks .*, which each group of a {own.__name__} has"):
        optimizer.load_state_dict(optimizer_of(other, params).state_dict())
    assert optimizer.state_dict() == before


# In the company of the rest of torch and Lightning


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_state_in_the_dtype(kind, dtype):
    ours, precise = parameters((6, 9), (4, 2, 3, 3), dtype=dtype), parameters((6, 9), (4, 2, 3, 3))
    optimizer = optimizer_of(kind, ours, eps=1e-4) if kind is ProjectedAdamW else optimizer_of(kind, ours)
    train(optimizer, ours, range(8))
    for parameter in ours:
        assert optimizer.projection(parameter).dtype == dtype
        assert all(v.dtype == dtype for name, v in optimizer.state[parameter].items() if name != "step")
    changes = [(p.detach().double() - q.detach()) for p, q in zip(ours, precise, strict=True)]
    assert all(torch.isfinite(change).all() and change.norm() > 0.1 for change in changes)


def test_channels_last_weights_are_trained():
    model = nn.Conv2d(3, 4, 3)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for layer in (model, last):
        optimizer = optimizer_of(ProjectedAdamW, layer.parameters())
        train(optimizer, list(layer.parameters()), range(4))
    assert last.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last.weight, model.weight)


@every_optimizer
def test_step_inside_autocast_is_as_precise_as_outside(kind):
    ours, theirs = parameters((6, 9), dtype=torch.float32), parameters((6, 9), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        train(optimizer_of(kind, ours, weight_decay=0.1), ours, range(5))
    train(optimizer_of(kind, theirs, weight_decay=0.1), theirs, range(5))
    assert_same(ours, theirs)


@every_optimizer
def test_closure_is_called_once_with_gradients_enabled(kind):
    model = nn.Linear(9, 6)
    optimizer = optimizer_of(kind, model.parameters())
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 9)).square().sum()
        loss.backward()
        losses.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert optimizer.step(closure) < losses[0]


@every_optimizer
def test_schedulers_set_learning_rate_and_momentum(kind):
    (parameter,) = params = parameters((6, 9))
    optimizer = optimizer_of(kind, params, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    train(optimizer, params, [0])
    scheduler.step()
    before = parameter.detach().clone()
    train(optimizer, params, [1])
    assert_same(parameter.detach(), before)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer_of(kind, params), max_lr=0.1, total_steps=6)
    values = set()
    for step in range(5):
        train(cycle.optimizer, params, [step])
        cycle.step()
        group = cycle.optimizer.param_groups[0]
        values.add(group["momentum"] if kind is ProjectedSGD else group["betas"][0])
    assert len(values) > 2


class SmallModule(pl.LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        return DataLoader(blobs(64), batch_size=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ProjectedAdamW", {"lr": 0.02, "rank": 3, "betas": [0.8, 0.99], "moments": "zero", "refresh_interval": None}),
        ("ProjectedSGD", {"lr": 0.1, "momentum": 0.9, "rank": 3, "subspace": "gradient", "refresh_interval": 5}),
    ],
)
def test_lightning_cli_builds_and_trains(name, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train"])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 3}
    cli = LightningCLI(
        SmallModule,
        run=False,
        save_config_callback=None,
        trainer_defaults={**quiet, "default_root_dir": tmp_path, "accelerator": "cpu", "enable_model_summary": False},
        args={"optimizer": {"class_path": f"lightning_lowrank.optim.{name}", "init_args": arguments}},
    )
    inputs, targets = blobs(64).tensors
    before = nn.functional.cross_entropy(cli.model.net(inputs), targets).item()
    cli.trainer.fit(cli.model)
    optimizer = cli.trainer.optimizers[0]
    assert type(optimizer).__name__ == name
    assert {key: optimizer.param_groups[0][key] for key in arguments} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    weight = cli.model.net[0].weight
    moment = optimizer.state[weight]["exp_avg" if name == "ProjectedAdamW" else "momentum_buffer"]
    assert moment.shape == (16, 3)
    assert nn.functional.cross_entropy(cli.model.net(inputs), targets).item() < 0.8 * before


# Stacked clients


CLIENTS = 3


class Alone:
    """Clients with an optimizer each, whose stacks are what a stacked optimizer must come to."""

    def __init__(self, kind, *, clients=CLIENTS, dtype=torch.float64, **options):
        shapes = [*MATRICES, (5,), (), (6, 9), (3, 1)]
        if kind is ProjectedAdamW:
            # In a direction that a gradient has nothing of, its coefficient is rounding, which differs between one
            # matrix and a stack, and which Adam's own eps of 1e-8 would make as large as any other step.
            options = {"eps": 0.05, **options}
        self.clients = [parameters(*shapes, dtype=dtype, seed=10 + client) for client in range(clients)]
        self.optimizers = [self.optimizer_on(kind, params, options) for params in self.clients]
        self.stacks = [nn.Parameter(torch.stack(list(same)).detach()) for same in zip(*self.clients, strict=True)]
        self.stacked = self.optimizer_on(kind, self.stacks, options)
        for group in self.stacked.param_groups:
            group["stacked"] = True

    @staticmethod
    def optimizer_on(kind, params, options):
        groups = [{"params": params[:2]}, {"params": params[6:], "rank": None}, {"params": params[2:6], "lr": 0.1}]
        return optimizer_of(kind, groups, **options)

    def set_gradients(self, step, active=CLIENTS):
        for client, params in enumerate(self.clients[:active]):
            set_gradients(params, 100 * client + step)
            if client == 1 and step in (0, 3):
                # Ranks 0 and 1, where the others' gradients have all: each is completed by a number of its own.
                for parameter in params[: len(MATRICES)]:
                    matrix = parameter.grad.flatten(1)
                    matrix[1:] = 0
                    matrix.mul_(step)
        for index, stack in enumerate(self.stacks):
            stack.grad = torch.stack([params[index].grad for params in self.clients[:active]])

    def step(self, step, active=CLIENTS):
        self.set_gradients(step, active)
        for optimizer in self.optimizers[:active]:
            optimizer.step()
        self.stacked.step()

    def refresh(self, seed):
        for optimizer in [*self.optimizers, self.stacked]:
            optimizer.refresh(seed)

    def assert_equal(self, active=CLIENTS, tolerance=1e-12):
        for index, stack in enumerate(self.stacks):
            alone = [
                (params[index], optimizer) for params, optimizer in zip(self.clients, self.optimizers, strict=True)
            ]
            alone = alone[:active]
            torch.testing.assert_close(
                stack.detach(), torch.stack([p.detach() for p, _ in alone]), rtol=tolerance, atol=tolerance
            )
            states = [optimizer.state.get(p, {}) for p, optimizer in alone]
            own = self.stacked.state.get(stack, {})
            assert all(state.keys() == own.keys() for state in states)
            for name, value in own.items():
                theirs = torch.stack([state[name] for state in states])
                torch.testing.assert_close(
                    value, theirs[0] if name == "step" else theirs, rtol=tolerance, atol=tolerance
                )
            bases = [optimizer.projection(p) for p, optimizer in alone]
            basis = self.stacked.projection(stack)
            if bases[0] is None:
                assert basis is None
            elif self.stacked.param_groups[0]["subspace"] == "random":
                assert_same(basis, bases[0])
            else:
                torch.testing.assert_close(basis, torch.stack(bases), rtol=tolerance, atol=tolerance)

    def narrow(self, active):
        """As the federated loop does it: new leaves, and the clients that go on of all that has dimensions."""
        for index, stack in enumerate(self.stacks):
            leaf = stack.detach()[:active].requires_grad_()
            state = self.stacked.state.pop(stack, None)
            if state is not None:
                assert all(len(value) == len(stack) for value in state.values() if value.ndim)
                self.stacked.state[leaf] = {
                    name: value[:active] if value.ndim else value for name, value in state.items()
                }
            for group in self.stacked.param_groups:
                group["params"] = [leaf if parameter is stack else parameter for parameter in group["params"]]
            self.stacks[index] = leaf


stacked_options = pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ProjectedSGD, {}),
        (ProjectedSGD, {"momentum": 0.0, "weight_decay": 0.1}),
        (ProjectedSGD, {"dampening": 0.3, "weight_decay": 0.1, "foreach": True}),
        (ProjectedSGD, {"nesterov": True, "weight_decay": 0.1, "maximize": True}),
        (ProjectedAdamW, {}),
        (ProjectedAdamW, {"weight_decay": 0.3, "betas": (0.5, 0.9), "maximize": True, "foreach": True}),
    ],
    ids=str,
)


@pairwise()
@every_choice_of_moments
@every_subspace
@stacked_options
def test_stacked_clients_step_as_each_would_alone(kind, options, subspace, moments):
    alone = Alone(kind, subspace=subspace, moments=moments, **options)
    for step in range(8):
        if step == 5:
            alone.refresh(17)
        alone.step(step)
        alone.assert_equal()


@every_choice_of_moments
@every_subspace
@every_optimizer
def test_stacked_clients_leave_the_stack(kind, subspace, moments):
    """They have made 8, 4 and 2 steps; the rest of the stack changes subspace at steps 3 and 6."""
    alone = Alone(kind, subspace=subspace, moments=moments)
    for step in range(8):
        active = 3 if step < 2 else 2 if step < 4 else 1
        if active < len(alone.stacks[0]):
            alone.narrow(active)
        alone.step(step, active)
        alone.assert_equal(active)


def test_a_stack_that_clients_leave_goes_on_with_the_projection_it_has():
    alone = Alone(ProjectedSGD)
    alone.step(0)
    before = [alone.stacked.projection(stack) for stack in alone.stacks]
    alone.narrow(2)
    assert all(alone.stacked.projection(stack) is basis for stack, basis in zip(alone.stacks, before, strict=True))


@every_subspace
@every_optimizer
def test_one_stacked_client_and_none(kind, subspace):
    one = Alone(kind, subspace=subspace, clients=1)
    for step in range(5):
        one.step(step, 1)
        one.assert_equal(1)
    none = parameters((0, 6, 9), (0, 6))
    optimizer = optimizer_of(kind, [{"params": none, "stacked": True}], subspace=subspace)
    train(optimizer, none, range(5))
    assert [p.shape for p in none] == [(0, 6, 9), (0, 6)]


@pairwise(strength=1)
@every_subspace
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_optimizer
def test_stacked_clients_in_lower_precision(kind, subspace, dtype):
    alone = Alone(kind, subspace=subspace, dtype=dtype)
    for step in range(8):
        alone.step(step)
        for stack in alone.stacks:
            assert stack.dtype == dtype
            assert all(v.dtype == dtype for name, v in alone.stacked.state[stack].items() if name != "step")
    alone.assert_equal(tolerance=0.05 if dtype == torch.bfloat16 else 1e-4)


@every_subspace
@every_optimizer
def test_stacks_and_gradients_may_lie_in_memory_in_any_order(kind, subspace):
    alone = Alone(kind, subspace=subspace, weight_decay=0.1)
    for index, stack in enumerate(alone.stacks):
        axes = range(stack.ndim)
        turned = stack.detach().permute(*reversed(axes)).contiguous().permute(*reversed(axes))
        alone.stacks[index] = nn.Parameter(turned)
        for group in alone.stacked.param_groups:
            group["params"] = [alone.stacks[index] if p is stack else p for p in group["params"]]
    assert not alone.stacks[0].is_contiguous()
    assert not alone.stacks[3].is_contiguous()
    for step in range(5):
        alone.set_gradients(step)
        for stack in alone.stacks:
            stack.grad = torch.empty_like(stack).copy_(stack.grad)
        for optimizer in [*alone.optimizers, alone.stacked]:
            optimizer.step()
        alone.assert_equal()


def test_each_stacked_client_has_the_directions_that_its_own_gradient_has():
    """Neither another's larger gradient nor the number of clients makes a direction negligible."""
    (stack,) = stacks = parameters((200, 6, 9))
    optimizer = optimizer_of(ProjectedSGD, [{"params": stacks, "stacked": True}], subspace="gradient", rank=2)
    stack.grad = torch.zeros_like(stack)
    stack.grad[:, 0, 0] = 1.0
    stack.grad[:, 1, 1] = 1e-14
    stack.grad[0] *= 1e20
    optimizer.step()
    assert_same(optimizer.projection(stack).abs(), torch.eye(9, 2, dtype=torch.float64).expand(200, 9, 2))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += 1
        return function(*arguments, **(keywords or {}))


@every_subspace
@every_optimizer
def test_a_stacked_step_takes_as_many_operations_for_any_number_of_clients(kind, subspace):
    counts = []
    for clients in (2, 9):
        stacks = parameters((clients, 6, 9), (clients, 4, 2, 3, 3), (clients, 6))
        optimizer = optimizer_of(kind, [{"params": stacks, "stacked": True}], subspace=subspace, weight_decay=0.1)
        train(optimizer, stacks, range(3))
        set_gradients(stacks, 3)
        with Operations() as operations:
            optimizer.step()
        counts.append(operations.count)
    assert counts[0] == counts[1] > 10


@pytest.mark.slow
@pairwise()
@every_choice_of_moments
@every_subspace
@every_optimizer
@pytest.mark.parametrize("stop", [2, 3])
def test_stacked_training_is_resumed_bit_for_bit(kind, subspace, moments, stop):
    whole, halved = (Alone(kind, subspace=subspace, moments=moments) for _ in range(2))
    for step in range(stop):
        whole.step(step)
        halved.step(step)
    fresh = Alone(kind, subspace=subspace, moments=moments)
    for group in fresh.stacked.param_groups:
        group["stacked"] = False
    fresh.stacked.load_state_dict(saved_and_loaded(halved.stacked.state_dict()))
    with torch.no_grad():
        for stack, other in zip(fresh.stacks, halved.stacks, strict=True):
            stack.copy_(other)
    fresh.clients, fresh.optimizers = halved.clients, halved.optimizers
    for step in range(stop, 8):
        whole.step(step)
        fresh.step(step)
    assert_same(whole.stacks, fresh.stacks)
    for stack, other in zip(whole.stacks, fresh.stacks, strict=True):
        assert_same(dict(whole.stacked.state[stack]), dict(fresh.stacked.state[other]))


def test_projection_follows_the_parameters_and_rank_that_a_group_has_now():
    first, wider = parameters((3, 6, 9), (3, 6, 12))
    optimizer = optimizer_of(ProjectedSGD, [{"params": [first], "stacked": True}])
    assert optimizer.projection(first).shape == (9, RANK)
    (group,) = optimizer.param_groups
    group["params"] = [wider]
    assert optimizer.projection(wider).shape == (12, RANK)
    group["rank"] = 2
    assert optimizer.projection(wider).shape == (12, 2)


@every_optimizer
def test_groups_may_be_stacked_one_by_one_and_no_longer(kind):
    """A loop stacks clients for a round and gives the optimizer its own parameters back."""
    weight, other, stack = parameters((6, 9), (6, 9), (2, 6, 9))
    optimizer = optimizer_of(kind, [{"params": [weight]}, {"params": [stack], "stacked": True}])
    train(optimizer, [weight, stack], range(2))
    basis = optimizer.projection(stack)
    assert optimizer.projection(weight).shape == basis.shape == (9, RANK)
    group = optimizer.param_groups[1]
    group.update(params=[other], stacked=False)
    assert_same(optimizer.projection(other), basis)
    train(optimizer, [weight, other], range(2, 5))
    name = "momentum_buffer" if kind is ProjectedSGD else "exp_avg"
    assert optimizer.state[other][name].shape == (6, RANK)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 6, 9), (2, 6)], r"shapes are \(3, 6, 9\), \(2, 6\)"),
        ([(3, 6, 9), ()], r"shapes are \(3, 6, 9\), \(\)"),
        ([()], r"shapes are \(\)"),
    ],
    ids=str,
)
@every_optimizer
def test_stacks_of_different_numbers_of_clients_are_refused_before_any_change(kind, shapes, message):
    params = nn.ParameterList(parameters((6, 9), *shapes, (7, 2)))
    optimizer = optimizer_of(kind, [{"params": [params[0]]}, {"params": list(params[1:]), "stacked": True}])
    set_gradients(params, 0)
    # Without a gradient a parameter is not stepped, so it may be no stack, as what is frozen is none.
    params[-1].grad = None
    before = copy.deepcopy((params.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_unchanged(params, optimizer, before)
    for parameter in params[2:]:
        parameter.grad = None
    if shapes[0]:
        optimizer.step()
        assert optimizer.projection(params[1]).shape == (9, RANK)


def test_stacked_is_true_or_false():
    with pytest.raises(TypeError, match=r"stacked.*3"):
        optimizer_of(ProjectedSGD, [{"params": parameters((3, 6, 9)), "stacked": 3}])


# Wrong input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, r"rank.*0"),
        ({"rank": 2.0}, TypeError, "rank must be an integer"),
        ({"rank": True}, TypeError, "rank must be an integer"),
        ({"refresh_interval": 0}, ValueError, r"refresh_interval.*0"),
        ({"refresh_interval": "10"}, TypeError, r"refresh_interval.*'10'"),
        ({"subspace": "svd"}, ValueError, r"subspace.*'gradient'.*'svd'"),
        ({"moments": "reset"}, ValueError, r"moments.*'zero'.*'rotate'"),
        ({"seed": None}, TypeError, "seed must be an integer"),
        ({"lr": -0.1}, ValueError, "lr must be at least 0"),
        ({"lr": float("nan")}, ValueError, "lr must be at least 0"),
        ({"lr": "0.1"}, TypeError, r"'0\.1'"),
        ({"lr": torch.ones(2)}, ValueError, "lr must be a number or a tensor with one element"),
        ({"weight_decay": -1}, ValueError, r"weight_decay.*-1"),
        ({"foreach": "yes"}, TypeError, r"foreach.*'yes'"),
    ],
    ids=str,
)
@every_optimizer
def test_options_are_checked_in_the_constructor_and_in_groups(kind, options, error, message):
    (parameter,) = parameters((6, 9))
    with pytest.raises(error, match=message):
        kind([parameter], **{"rank": RANK, **options})
    optimizer = kind(parameters((6, 9)), rank=RANK)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [parameter], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (ProjectedSGD, {"momentum": -0.1}, ValueError, r"momentum.*-0\.1"),
        (ProjectedSGD, {"nesterov": True}, ValueError, r"nesterov.*dampening=0"),
        (ProjectedSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "dampening=0.1"),
        (ProjectedAdamW, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\].*1\.0"),
        (ProjectedAdamW, {"betas": 0.9}, ValueError, r"betas.*0\.9"),
        (ProjectedAdamW, {"eps": -1e-8}, ValueError, "eps must be at least 0"),
        (ProjectedAdamW, {"lr": torch.tensor(0.1), "foreach": True}, ValueError, "foreach=True"),
    ],
    ids=str,
)
def test_options_of_one_optimizer_are_checked(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(parameters((6, 9)), rank=RANK, **options)


@every_optimizer
def test_complex_parameters_and_sparse_gradients_are_refused_before_any_change(kind):
    embedding, linear = nn.Embedding(5, 6, sparse=True), nn.Linear(6, 3)
    optimizer = optimizer_of(kind, [*linear.parameters(), *embedding.parameters()])
    with pytest.raises(RuntimeError, match="does not support complex"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = copy.deepcopy((linear.state_dict(), optimizer.state_dict()))
    with pytest.raises(RuntimeError, match=r"sparse=False.*torch\.optim\.SparseAdam"):
        optimizer.step()
    assert_unchanged(linear, optimizer, before)


def test_projection_of_a_stranger_and_a_seed_of_a_wrong_kind_are_refused():
    optimizer = optimizer_of(ProjectedSGD, parameters((6, 9)))
    with pytest.raises(ValueError, match="ProjectedSGD"):
        optimizer.projection(torch.ones(6, 9))
    with pytest.raises(TypeError, match="seed must be an integer"):
        optimizer.refresh(seed="round 3")


def deferring_run(kind, defers, steps=8, stop=None, rows=2, **options):
    """Train two linear layers, the second of which a penalty takes as well; return their values and the optimizer."""
    torch.manual_seed(0)
    first, second = nn.Linear(24, 12).double(), nn.Linear(12, 9, bias=False).double()
    params = [*first.parameters(), *second.parameters()]
    optimizer = optimizer_of(kind, params, **options)
    kept = []
    for step in range(steps):
        if step == stop:
            # The weights without the last changes, which are in the state.
            optimizer, old = optimizer_of(kind, params, **options), optimizer
            optimizer.load_state_dict(saved_and_loaded(old.state_dict()))
        inputs = torch.randn(rows, 24, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        found = dict(optimizer.defer([first.weight, second.weight])) if defers else {}
        kept.append(len(found))
        with DeferredSteps({id(weight): each for weight, each in found.items()}):
            loss = second(first(inputs).relu()).square().mean() + 0.1 * second.weight.sin().sum()
        loss.backward()
        assert not any(weight.grad is not None for weight in found)
        optimizer.step()
    optimizer.fold()
    return [param.detach() for param in params], optimizer.state_dict(), kept


@daily()
@pytest.mark.parametrize(
    ("kind", "moments", "rows"), all_pairs([ProjectedSGD, ProjectedAdamW], ["keep", "zero", "rotate"], [2, 100])
)
def test_deferred_steps_are_the_steps(kind, moments, rows):
    options = {"moments": moments, "weight_decay": 0.0, "rows": rows}
    values, state, _ = deferring_run(kind, False, **options)
    deferred, twin, kept = deferring_run(kind, True, **options)
    torch.testing.assert_close(deferred, values, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(twin["state"], state["state"], rtol=1e-9, atol=1e-12)
    # All but the steps that enter a new subspace.
    assert kept == [2, 2, 2, 0, 2, 2, 0, 2]
    for stop in (2, 4):
        torch.testing.assert_close(deferring_run(kind, True, stop=stop, **options)[0], deferred, rtol=0, atol=0)


def test_steps_that_depend_on_the_weight_are_not_deferred():
    for options in ({"weight_decay": 0.1}, {"subspace": "gradient"}, {"rank": None}, {"rank": 30}):
        _, _, kept = deferring_run(ProjectedSGD, True, steps=1, **options)
        assert kept == [0]


def test_a_new_seed_takes_deferred_steps_along():
    layer, inputs = nn.Linear(24, 12).double(), torch.ones(2, 24, dtype=torch.float64)
    optimizer = optimizer_of(ProjectedSGD, layer.parameters(), refresh_interval=None)
    start, basis = layer.weight.detach().clone(), optimizer.projection(layer.weight)
    ((weight, deferred),) = optimizer.defer(layer.parameters())
    with DeferredSteps({id(weight): deferred}):
        layer(inputs).sum().backward()
    optimizer.step()
    assert_same(layer.weight.detach(), start)
    optimizer.refresh(seed=8)
    expected = start - 0.05 * torch.ones(12, 2, dtype=torch.float64) @ inputs @ basis @ basis.T
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.data.add_(1),
        lambda weight: weight.add_(1),
        lambda weight: torch.autograd.grad(weight.sum(), weight),
    ],
)
def test_a_step_that_needs_the_weight_itself_is_refused_where_steps_are_deferred(use):
    layer = nn.Linear(24, 12)
    ((weight, deferred),) = optimizer_of(ProjectedSGD, layer.parameters()).defer(layer.parameters())
    with DeferredSteps({id(weight): deferred}), pytest.raises(NotImplementedError, match="deferred while"):
        use(weight)
    assert weight.shape == (12, 24)


def test_a_gradient_beside_that_of_a_deferred_change_is_refused():
    layer = nn.Linear(24, 12)
    optimizer = optimizer_of(ProjectedSGD, layer.parameters())
    optimizer.defer(layer.parameters())
    layer(torch.ones(2, 24)).sum().backward()
    with pytest.raises(RuntimeError, match="has a gradient of its own"):
        optimizer.step()
