"""The checks see what they are for: each invariant, broken on purpose, is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phloem.runtime.scheduler import audit
from phloem.runtime.scheduler.scheduler import Scheduler
from tests.runtime.scheduler.test_scheduler import add, make, step


def busy() -> Scheduler:
    s = make(max_running=2)
    for i in range(3):
        add(s, 10, i, max_tokens=20)
    step(s)
    step(s)
    audit.check(s)
    assert audit.balanced(s)
    return s


def drop_pin(s: Scheduler) -> None:
    s.running[0].grant.lease.pins += 1  # type: ignore[union-attr]


def swap_page(s: Scheduler) -> None:
    s.running[0].grant.table[0] += 1  # type: ignore[union-attr]


def swap_tokens(s: Scheduler) -> None:
    s.running[0].key[0] ^= 1


def double_page(s: Scheduler) -> None:
    s.cache.pool.free.append(s.cache.pool.free[0])


def lose_page(s: Scheduler) -> None:
    s.cache.pool.free.pop()


def lose_slot(s: Scheduler) -> None:
    s.slots.append(0)


def lose_place(s: Scheduler) -> None:
    s.queue.discard(next(iter(s.waiting)))


def run_ahead(s: Scheduler) -> None:
    s.running[1].computed = 999


def miscount(s: Scheduler) -> None:
    s.cache.tree.num_nodes += 1


@pytest.mark.parametrize(
    "damage", [drop_pin, swap_page, swap_tokens, double_page, lose_page, lose_slot, lose_place, run_ahead, miscount]
)
def test_damage_is_seen(damage: Callable[[Scheduler], None]) -> None:
    s = busy()
    damage(s)
    with pytest.raises(AssertionError):
        audit.check(s)


@pytest.mark.parametrize("damage", [double_page, lose_page])
def test_the_cheap_check_sees_pages_that_do_not_add_up(damage: Callable[[Scheduler], None]) -> None:
    s = busy()
    damage(s)
    assert not audit.balanced(s)


def test_after_a_rebuild_everything_is_sound_again() -> None:
    s = busy()
    double_page(s)
    failed = audit.rebuild(s)
    assert len(failed) == 2 and {q.finish for q in failed} == {"error"}
    audit.check(s)
    assert len(s.cache.pool.free) == 64
    while s.waiting or s.running:
        step(s)
    assert s.counters.finished == {"error": 2, "length": 1}
