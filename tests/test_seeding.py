import hashlib

import pytest
import torch

from lightning_lowrank.seeding import derive_seed, generator


def test_seed_is_the_documented_hash():
    digest = hashlib.blake2b(b"i1:7" + b"s6:client" + b"i2:-3", digest_size=8).digest()
    assert derive_seed(7, "client", -3) == int.from_bytes(digest, "big") // 2


def test_seeds_fit_a_generator_and_differ_by_every_part():
    parts = [
        (1, 23),
        (12, 3),
        (123,),
        ("1", 23),
        ("1", "23"),
        ("123",),
        (1, "", 23),
        ("i1:1i2:23",),
        (23, 1),
        (-1, 23),
        ("é",),
        (10**40,),
    ]
    seeds = [derive_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generator_is_independent_of_the_global_state():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = torch.rand(4, generator=generator(0, "a"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first, torch.rand(4, generator=generator(0, "a")))
    assert not torch.equal(first, torch.rand(4, generator=generator(0, "b")))


@pytest.mark.parametrize("part", [True, 1.0, None, b"x", (1,)])
def test_other_types_are_refused(part):
    with pytest.raises(TypeError, match=r"int or str"):
        derive_seed(0, part)


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="derive_seed"):
        derive_seed()
