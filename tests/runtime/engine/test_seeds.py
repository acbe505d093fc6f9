"""M2: a seed of one's own counts; one that is drawn is drawn in order, and once a group."""

from __future__ import annotations

from array import array

from phloem.runtime.engine.seeds import Seeds
from phloem.runtime.request import Request, SamplingParams
from phloem.runtime.scheduler.sequence import Sequence
from tests.runtime.scheduler.test_sequence import Ends


def sequence(group: str | None = None, seed: int | None = None) -> Sequence:
    request = Request(id="q", token_ids=(1,), group=group, sampling=SamplingParams(seed=seed))
    return Sequence(request, array("i", (1,)), 4, 0, Ends())


def test_the_same_engine_seed_draws_the_same_seeds() -> None:
    a, b, c = Seeds(1), Seeds(1), Seeds(2)
    drawn = [[s.seed_of(sequence()) for _ in range(5)] for s in (a, b, c)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 5
    assert all(0 <= seed < 2**63 for seed in drawn[0])


def test_a_seed_of_ones_own_draws_nothing() -> None:
    a, b = Seeds(1), Seeds(1)
    assert a.seed_of(sequence(seed=-5)) == -5 and a.seed_of(sequence("g", seed=7)) == 7
    assert a.seed_of(sequence()) == b.seed_of(sequence()) and not a.groups


def test_a_group_shares_one_while_any_of_it_lives() -> None:
    seeds = Seeds(1)
    members = [sequence("g") for _ in range(3)]
    drawn = {seeds.seed_of(q) for q in members}
    assert len(drawn) == 1 and seeds.seed_of(sequence("other")) not in drawn
    for q in members:
        assert "g" in seeds.groups
        seeds.forget(q)
    assert "g" not in seeds.groups
    seeds.forget(members[0])
    assert seeds.seed_of(sequence("g")) not in drawn
