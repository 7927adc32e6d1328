"""The sm_100a kernel in pairs and clusters of CTAs, with tiles on request, overlapping sums and early starts."""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from cutlass import cute
from emulated_kernel import SCHEDULES, Call, aligned, compiled, mistakes, operand, run

import ptxemu
from blockscale.kernels.parts.grid import Memory
from blockscale.kernels.waits import before_the_wait
from ptxemu.host import installed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers

SCHEDULE_NAMES = [f"{name}{seed}" for name, seed in SCHEDULES]
SHAPES = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
PAIRED = [shape for shape in SHAPES if shape[0] > 1]


def check(tile, m, columns, k, *, call=None, batch=(1, 1), **config):
    a, b = operand(m, k, batch=batch[0], seed=1), operand(columns, k, batch=batch[1], seed=2)
    call = call or Call()
    result = run(compiled(tile[1], rows=tile[0], **config), a, b, call)
    assert mistakes(result, a, b, call, k) is None
    return result


@pytest.mark.parametrize("n", [16, 48, 64, 176, 192, 256])
def test_widths_of_a_pairs_tile(n):
    """Two rows of tiles, and two columns where tiles may be repeated; the second CTA of the last pair has no rows."""
    check((256, n), 300, 2 * n + 5 if n % 32 == 0 else n - 3, 329)


@pytest.mark.prove
@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("n", range(16, 257, 16))
def test_every_width_of_a_pairs_tile_under_every_schedule(n, schedule):
    check((256, n), 300, 3 * n + 5 if n % 32 == 0 else n, 1329, call=Call(schedule=schedule, ctas=4))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
def test_pairs_under_every_schedule(schedule):
    """Six tiles for two pairs, more k tiles than stages."""
    result = check((256, 32), 500, 75, 1100, call=Call(ctas=4, schedule=schedule), accumulators=2, stages=3)
    assert result.report.counters["ctas"] == 4


@pytest.mark.parametrize("cluster", SHAPES, ids=str)
def test_clusters_of_single_ctas(cluster):
    """Two clusters, whose last tiles lie beyond the result; what each CTA fetches arrives where it is needed."""
    size = 128 * cluster[0] + 5, 32 * cluster[1]
    check((128, 32), *size, 700, cluster=cluster, stages=2, call=Call(schedule=("random", 1)))


@pytest.mark.parametrize("cluster", PAIRED, ids=str)
def test_clusters_of_pairs(cluster):
    size = 128 * cluster[0] + 5, 64 * cluster[1]
    check((256, 64), *size, 700, cluster=cluster, stages=2, call=Call(schedule=("random", 2)))


@pytest.mark.parametrize(
    ("rows", "fallback"), [(128, (1, 1)), (128, (2, 1)), (256, (2, 1)), (256, (2, 2)), (256, (4, 1))], ids=str
)
def test_clusters_of_two_shapes(rows, fallback):
    """The emulator splits a seeded half of the clusters."""
    call = Call(schedule=("random", 3), ctas=16)
    check((rows, 64), 1100, 200, 400, cluster=(4, 2), fallback_cluster=fallback, stages=2, call=call)


def test_operands_of_a_cluster_are_fetched_once():
    """One k tile: a goes to both columns of CTAs, b to both pairs, scales of b, an atom a column, to all rows."""
    result = check((256, 64), 512, 128, 256, cluster=(4, 2))
    fetched = 512 * 128 + 128 * 128 + (4 + 2) * 2048
    assert result.report.counters["bytes"]["TMA load, global memory"] == fetched


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
def test_tiles_on_request_under_every_schedule(schedule):
    """Two multiprocessors and twelve tiles: two CTAs start, and take the tiles of the others one by one."""
    call = Call(schedule=schedule, sms=2)
    result = check((128, 32), 300, 120, 300, schedule="clc", call=call)
    assert result.report.counters["ctas"] == 2


@pytest.mark.parametrize(
    ("tile", "cluster", "fallback", "sms"),
    [
        ((256, 64), None, None, 4),
        ((128, 32), (2, 2), None, 4),
        ((256, 64), (4, 2), None, 8),
        ((256, 64), (4, 2), (2, 1), 10),
        ((128, 32), (2, 2), (1, 1), 5),
    ],
    ids=str,
)
def test_clusters_request_tiles(tile, cluster, fallback, sms):
    call = Call(schedule=("random", 1), sms=sms)
    config = {"cluster": cluster, "fallback_cluster": fallback, "schedule": "clc"}
    result = check(tile, 1100, 4 * tile[1], 300, call=call, **config)
    assert result.report.counters["ctas"] < 20  # of 40 or more


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
def test_overlapping_sums_under_every_schedule(schedule):
    """Three tiles a CTA: the second accumulator's first columns are the first one's last."""
    check((128, 256), 120, 700, 1300, accumulators=2, release="early", call=Call(ctas=1, schedule=schedule))


@pytest.mark.parametrize(("tile", "release"), [((256, 256), "late"), ((256, 224), "early"), ((128, 248), "early")])
def test_overlapping_sums(tile, release):
    check(tile, 600, min(500, 2 * tile[1]) if tile[1] % 32 == 0 else 248, 600, accumulators=2, release=release,
          call=Call(ctas=2, schedule=("random", 3)))  # fmt: skip


@pytest.mark.parametrize("raster", ["m", "n"])
def test_groups_of_tiles(raster):
    check((128, 32), 600, 150, 80, raster=raster, group=3, batch=(2, 2), call=Call(ctas=7))


@pytest.mark.parametrize("batch", [(3, 3), (1, 3), (3, 1)], ids=str)
def test_batches_and_broadcast_in_clusters(batch):
    check((256, 32), 300, 40, 130, batch=batch, cluster=(2, 2), call=Call(ctas=4, schedule=("random", 5)))


@pytest.mark.parametrize("config", [{}, {"rows": 256, "cluster": (2, 2), "schedule": "clc"}], ids=str)
def test_swapped_operands(config):
    check((config.get("rows", 128), 32), 20, 300, 330, swap=True, **{k: v for k, v in config.items() if k != "rows"})


@pytest.mark.parametrize("pdl", [False, True])
def test_prefetch_brings_the_same_result(pdl):
    result = check((256, 64), 300, 100, 900, cluster=(2, 2), prefetch=3, pdl=pdl)
    text = compiled(64, rows=256, cluster=(2, 2), prefetch=3, pdl=pdl).__ptx__
    assert text.count("cp.async.bulk.prefetch.tensor") == 4
    assert result.report.counters["ctas"] == 8


def test_hints_for_l2_reach_every_load():
    function = compiled(64, l2_a="evict_last", l2_b="evict_first", l2_scales="evict_last")
    loads = [line for line in function.__ptx__.splitlines() if "cp.async.bulk.tensor" in line and "mbarrier" in line]
    assert len(loads) == 4
    assert all("L2::cache_hint" in line for line in loads)
    for policy in (0x12F0000000000000, 0x14F0000000000000):
        assert str(policy) in function.__ptx__
    a, b = operand(9, 300), operand(40, 300, seed=1)
    assert mistakes(run(function, a, b), a, b, Call(), 300) is None


@pytest.mark.parametrize("config", [{}, {"rows": 256, "schedule": "clc", "cluster": (4, 2), "prefetch": 2}], ids=str)
def test_a_kernel_that_may_start_early_waits(config):
    text = compiled(64, pdl=True, **config).__ptx__
    assert before_the_wait(text) == []
    assert text.count("griddepcontrol.launch_dependents") == 1
    assert "griddepcontrol" not in compiled(64, **config).__ptx__


def test_a_role_that_does_not_wait_is_seen(monkeypatch):
    monkeypatch.setattr(cute.arch, "griddepcontrol_wait", lambda: None)
    text = compiled.__wrapped__(64, pdl=True).__ptx__
    early = before_the_wait(text)
    assert any("cp.async.bulk.tensor" in line for line in early)
    assert any("st.global" in line for line in early)


def test_memory_is_reached_by_waiting_alone():
    memory = Memory(False, [], operands=(1, 2))
    assert not hasattr(memory, "operands")
    assert memory.after_grids_before().operands == (1, 2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
def test_products_that_follow_each_other_closely(schedule):
    """The second product's alpha is an element that the first one writes; both may start early."""
    a, b = operand(130, 300, seed=1, positive=True), operand(40, 300, seed=2, positive=True)
    function = compiled(32, "fp32", pdl=True)
    first, second = aligned(4 * 130 * 40), aligned(4 * 130 * 40)
    units = aligned(16)
    units.view(np.float32)[:] = 2.0**-20, 1, 1, 1
    memory = [*a.memory(), *b.memory(), first, second, units]
    at = [array.ctypes.data for array in memory]
    sizes = 130, 40, a.codes.shape[2], 40, 1, 1, 1, 2**31 - 1, 0
    device = ptxemu.Device("sm_100a", schedule=schedule[0], seed=schedule[1], checks="strict")
    with installed(device, memory) as emulator:
        one = at[6] + 4
        codes = at[0], at[2], at[1], at[3]
        emulator.call(function, *codes, at[4], at[6], one, one, one, one, one, 1.0, *sizes)
        emulator.call(function, *codes, at[5], at[6], one, at[4], one, one, one, 1.0, *sizes)
    exact = a.values()[0] @ b.values()[0].T * 2.0**-20
    assert np.allclose(first.view(np.float32).reshape(130, 40), exact, rtol=1e-5)
    assert np.allclose(second.view(np.float32).reshape(130, 40), exact * exact[0, 0], rtol=1e-5)
