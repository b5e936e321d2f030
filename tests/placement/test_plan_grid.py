"""Six models of full size on 17 machines: what every plan holds to, whichever way it takes.

Each model is planned for each machine. Plans with an option changed are compared on two or three
machines of each model; `-m full` compares them on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.needs import need_cpu
from tests.samples import sampled
from tools.make_plan_table import MACHINES, MODELS, Machine, opened, plan_of
from vkmoe.errors import VkmoeError
from vkmoe.models import ModelFile
from vkmoe.models.program_sizes import SURE_CTX_SIZE
from vkmoe.modes import Resident
from vkmoe.placement.decide import LEAST_GAIN, Decision
from vkmoe.placement.memory import device_budget, host_budget

GIB, MIB = 1 << 30, 1 << 20
CARD_12 = next(machine for machine in MACHINES if machine[:2] == (12, 32))
# Card and RAM just hold some model, or just do not.
TIGHT = [CARD_12._replace(free=n * GIB) for n in (8, 9, 10, 18, 19, 20, 21, 22)]
# Lines of experts, and of places that some plans have for moving them.
OPTIONAL = ("expert", "host pool", "landing", "gathered", "brought")


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, ModelFile]]:
    need_cpu()
    with opened() as found:
        yield found


ROUNDING = 1e-3  # of the time, which slots may gain that are there by the rounding of sizes
Plan = Callable[[str, Machine], Decision]


@pytest.fixture(scope="module")
def best(models: dict[str, ModelFile]) -> Plan:
    """Plans with no option; each is made once."""
    kept = cache(lambda name, index: plan_of(models[name], MACHINES[index]))
    return lambda name, machine: kept(name, MACHINES.index(machine))


def expert_bytes(made: Decision) -> int:
    return made.weights.experts


def name_of(machine: Machine) -> str:
    return f"{machine.card or 'shared'}-{machine.ram}-{machine.free >> 30}"


def check_the_file(made: Decision, machine: Machine) -> bool:
    """Check that a plan reads nothing of it, if card and RAM hold the model; say if they do."""
    plan, room = made.plan, host_budget(machine.free)
    if machine.card:
        room += device_budget(machine.info, machine.free)
    others = sum(
        line.n_bytes
        for line in plan.lines
        if line.place != "file" and not line.item.startswith(OPTIONAL)
    )
    # Of the context that there must be room for, some begin with a part.
    cache = sum(line.n_bytes for line in plan.lines if line.name == "KV cache")
    others += cache * min(plan.ctx_size, SURE_CTX_SIZE) // plan.first_positions - cache
    margin = 2 * max(made.weights.spans) + 64 * MIB
    if expert_bytes(made) + others + margin > room:
        return False
    assert made.candidates[0].prediction.file_share == 0, machine[:2]
    assert plan.executor == "fused" and (not plan.host_slots or plan.exchanges)
    return True


# Two models each time: the same in all tests, which share their plans.
each_model = pytest.mark.parametrize("name", sampled(MODELS, [*MODELS][::4].__contains__))


def each_of(machines: Sequence[Machine]) -> pytest.MarkDecorator:
    """Each model on each machine; the sample has every seventh pair, so that all models occur."""
    pairs = [*product(MODELS, machines)]
    return pytest.mark.parametrize(
        ("name", "machine"),
        sampled(pairs, lambda pair: pairs.index(pair) % 7 == 0),
        ids=[f"{name}-{name_of(machine)}" for name, machine in pairs],
    )


@each_model
def test_no_byte_is_read_from_the_file_where_card_and_ram_hold_the_model(
    name: str, best: Plan
) -> None:
    """Card and RAM less what is left to others, and less what no plan is without."""
    assert sum(check_the_file(best(name, machine), machine) for machine in MACHINES)


@each_model
def test_nor_where_the_cpu_computes_none_and_they_just_hold_it(
    name: str, models: dict[str, ModelFile]
) -> None:
    for machine in TIGHT:
        check_the_file(plan_of(models[name], machine, cpu_moe=False), machine)


@each_model
def test_the_card_is_used_wherever_not_all_experts_fit(name: str, best: Plan) -> None:
    for machine in MACHINES:
        made = best(name, machine).plan
        if machine.card and not isinstance(made.mode, Resident):
            budget = device_budget(machine.info, machine.free)
            assert made.total("device") >= 0.95 * budget, (machine[:2], made.mode)


@each_model
def test_no_plan_takes_more_than_there_is(name: str, best: Plan) -> None:
    for machine in MACHINES:
        for each in best(name, machine).candidates:
            made, shared = each.plan, machine.info.is_uma
            assert made.total("device") <= device_budget(machine.info, machine.free)
            assert made.total("host") + made.total("device") * shared <= host_budget(machine.free)


def changes(made: Decision) -> Iterator[dict[str, Any]]:
    """Single options, some of which are what the plan has, or cannot be had."""
    plan, n_layers = made.plan, len(made.weights.spans)
    slots = plan.expert_slots or (4,)
    for n_slots in {1, min(slots), max(slots), (min(slots) + 1) // 2, min(slots) + 2} - {0}:
        yield {"expert_slots": n_slots}
    for pool in ("2GiB", "9GiB"):
        yield {"host_pool": pool}
    for promotes in (False, True):
        yield {"promote_on_read": promotes}
    for miss in ("read", "gather"):
        yield {"miss": miss}
    for mode in ("resident", "cache", "hybrid", "cpu"):
        yield {"expert_mode": mode}
    for n_cpu in {1, n_layers // 2, plan.cpu_layers + 1, n_layers}:
        yield {"n_cpu_moe": n_cpu}
    for n_rows in (64, 256, 1024):
        yield {"ubatch_size": n_rows}
    yield {"gpu_layers": n_layers - 2}


def changes_of_host_memory(made: Decision) -> Iterator[dict[str, Any]]:
    """Smaller pools than the plan's, and the executors that go with them or do not."""
    taken = sum(line.n_bytes for line in made.plan.lines if line.item.startswith("host pool"))
    for percent in (80, 90, 98) if taken else ():
        yield {"host_pool": str(taken * percent // 100)}
    for executor in ("fused", "stepped"):
        yield {"executor": executor}


def count_of_slower(
    model: ModelFile, machine: Machine, best: Decision, changed: Sequence[dict[str, Any]]
) -> int:
    """Check that none of the changed plans is faster; count those that can be had.

    One that guesses tokens, where `best` does not, may be so by the gain that is asked of guesses.
    Where layers are in host memory, sizes are rounded elsewhere: that is worth a slot or two of
    thousands (one of 3,840 with 0.06 % of the time was seen).
    """
    found = 0
    for asked in changed:
        try:
            other = plan_of(model, machine, **asked)
        except VkmoeError:
            continue
        found += 1
        seconds = other.candidates[0].prediction.seconds
        least = best.candidates[0].prediction.seconds
        if other.plan.n_guesses and not best.plan.n_guesses:
            seconds *= 1 + LEAST_GAIN
        elif "gpu_layers" in asked:
            seconds *= 1 + ROUNDING
        assert seconds >= least * (1 - 1e-9), (name_of(machine), asked, least, seconds)
    return found


@each_of(MACHINES)
@pytest.mark.sample(3)
def test_no_plan_is_slower_than_the_same_with_any_single_option_changed(
    name: str, machine: Machine, models: dict[str, ModelFile], best: Plan
) -> None:
    """By what is predicted: no rule stands beside that."""
    made = best(name, machine)
    assert count_of_slower(models[name], machine, made, [*changes(made)]) > 3


@each_of(TIGHT)
@pytest.mark.sample(2)
def test_nor_with_less_host_memory_where_the_cpu_computes_none(
    name: str, machine: Machine, models: dict[str, ModelFile]
) -> None:
    made = plan_of(models[name], machine, cpu_moe=False)
    changed = [{"cpu_moe": False, **asked} for asked in changes_of_host_memory(made)]
    assert count_of_slower(models[name], machine, made, changed) > 0
