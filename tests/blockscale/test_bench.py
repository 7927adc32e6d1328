"""`blockscale bench` without a GPU: what decides, what is refused, what is written. On a GPU see test_sm90_gpu.py."""

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import blockscale.bench.run as running
import blockscale.cli.bench as command
from blockscale.bench import ceilings, plots, record, rivals, timing
from blockscale.bench.record import Measured
from blockscale.bench.timing import Candidate, Truth, Wrong
from blockscale.cli.app import app

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)


def _measured(us, m=8, n=8192, k=8192, read_us=9.7):
    return Measured(m, n, k, "bf16", 37_748_740, us, dict.fromkeys(us, (1.0, 2.0)), read_us, {})


def _candidate(*results, name="ours", tolerance=1.0):
    return Candidate(name, [lambda: None] * len(results), results, 1, tolerance)


def _document(measured):
    of = {"gpu": "GPU", "date": "2026-01-01", "versions": {}}
    return record.as_json(measured, {"bf16_tflop_per_s": 760.0, "copy_gb_per_s": 4300.0}, of)


def test_copies_are_colder_than_a_cache():
    assert timing.copies(37_748_736) * 37_748_736 >= timing.COLD_BYTES
    assert timing.copies(9 << 20) == 29
    assert timing.copies(10**10) == 2


def test_truth_is_exact_and_its_tolerance_the_contracts():
    x, w = torch.rand(3, 512), torch.rand(5, 512)
    right = timing.truth(x, w, torch.bfloat16)
    exact = x.double() @ w.double().T
    assert torch.equal(right.exact, exact)
    slack = 4.5 * 2.0**-20 * exact  # all products are positive
    expected = slack + 2.0**-8 * (exact + slack)
    torch.testing.assert_close(right.allowed, expected, rtol=1e-12, atol=1e-40)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 4.001 * 1.01])
def test_a_wrong_element_ends_the_run(wrong):
    right = Truth(X.double(), torch.full((2, 2), 0.01, dtype=torch.float64))
    timing.compare(_candidate(X, X.clone()), right)
    bad = X.clone()
    bad[1, 1] = wrong
    with pytest.raises(Wrong, match=r"ours: 1 of 4 elements are wrong; the first at \(1, 1\): got "):
        timing.compare(_candidate(bad, bad.clone()), right)
    with pytest.raises(Wrong, match=r"ours: copy 1 is not copy 0 at \(1, 1\)"):
        timing.compare(_candidate(X, bad), right)


def test_a_rival_that_promises_less_is_held_to_that():
    right = Truth(X.double(), torch.full((2, 2), 0.01, dtype=torch.float64))
    timing.compare(_candidate(X + 0.0625, tolerance=7.0), right)
    with pytest.raises(Wrong):
        timing.compare(_candidate(X + 0.0625, tolerance=6.0), right)


def test_a_rival_that_is_not_repeatable_has_every_result_compared():
    right = Truth(X.double(), torch.full((2, 2), 0.1, dtype=torch.float64))
    near, far = X + 0.0625, X.clone()
    far[1, 0] = 3.5
    timing.compare(replace(_candidate(X, near), repeatable=False), right)
    with pytest.raises(Wrong, match=r"at \(1, 0\): got 3.5"):
        timing.compare(replace(_candidate(X, far), repeatable=False), right)


def test_what_stays_in_a_cache_is_not_timed():
    with pytest.raises(ValueError, match="ours: 2 copies of 1048576 bytes, expected 256"):
        timing.race([Candidate("ours", [print] * 2, [X, X], 1 << 20)], None)
    with pytest.raises(ValueError, match="ours: 1 launches, but 2 results"):
        timing.race([Candidate("ours", [print], [X, X], 1 << 20)], None)
    with pytest.raises(ValueError, match="expected distinct names"):
        timing.race([_candidate(X), _candidate(X)], None)


def test_candidates_take_turns_and_are_checked_before_and_after(monkeypatch):
    events = []

    class Fake:
        def __init__(self, candidate):
            self.name = candidate.name

        def check(self, right):
            events.append(f"check {self.name}")

        def start(self):
            events.append(self.name)

        def microseconds(self):
            return float(len(events))

    monkeypatch.setattr(timing, "_Timer", Fake)
    monkeypatch.setattr(timing, "COLD_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    three = [_candidate(X, X.clone(), name=name) for name in "abc"]
    times = timing.race(three, Truth(X, X), rounds=3)
    checks = ["check a", "check b", "check c"]
    assert events == [*checks, *"abc", *"bca", *"cab", *"abc", *checks]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert timing.medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


def test_who_is_behind():
    one = _measured({"ours": [10.0, 10.4, 10.2], "ours, tile 8": [9.0, 9.0, 9.0], "humming": [9.8, 10.0, 10.1]})
    assert one.best(["ours", "humming"]) == "humming"
    assert one.behind("ours", "humming") == pytest.approx(10.0 / 9.8)
    assert not record.lost(one, ["humming"])
    assert record.lost(_measured({"ours": [10.4], "ours, ahead": [9.0], "humming": [10.0]}), ["humming"])
    assert not record.lost(_measured({"ours": [99.0]}), ["humming"])


@pytest.mark.parametrize(
    ("slow_ones", "lost"), [((), False), ((1,), False), ((1, 2), False), ((1, 4, 5), True), ((2, 3, 4), False)]
)
def test_a_loss_is_measured_five_times(monkeypatch, slow_ones, lost):
    """All five, whatever the second says: noise must not choose when to stop."""
    rounds = []

    def race(candidates, right, count):
        rounds.append(count)
        slow = 2.0 if len(rounds) in slow_ones else 1.0
        return {"ours": [slow * 10.0] * count, "humming": [10.0] * count}

    monkeypatch.setattr(running, "race", race)
    monkeypatch.setattr(running, "_own", lambda asked, product: [_candidate(X)])
    monkeypatch.setitem(running.RIVALS, "humming", lambda product: _candidate(X, name="humming"))
    product = running.Product(torch.zeros(8, 64), _weight())
    asked = running.Asked([(8, 16, 64)], ["humming"], rounds=7)
    one = running._measure(asked, product, Truth(X, X), ["humming"], 1.0, {})
    assert rounds == [7] * (5 if 1 in slow_ones else 1)
    assert one.us["ours"] == [20.0 if i + 1 in slow_ones else 10.0 for i in range(len(rounds))]
    assert record.lost(one, ["humming"]) == lost


def _weight():
    import blockscale as bs

    return bs.quantize(torch.randn(16, 64))


def test_a_record_is_read_back():
    measured = [_measured({"ours": [10.0], "humming": [11.0]}), _measured({"ours": [12.0]}, m=16)]
    document = json.loads(json.dumps(_document(measured)))
    back = record.from_json(document)
    assert [(one.m, one.us, one.read_us) for one in back] == [(one.m, one.us, one.read_us) for one in measured]
    with pytest.raises(ValueError, match="not a record of `blockscale bench`"):
        record.from_json({"products": [{"m": 1}]})
    with pytest.raises(ValueError, match="not a record of `blockscale bench`"):
        record.from_json({})


def test_the_suites():
    table, grid = running.SUITES["table"], running.SUITES["grid"]
    assert len(table) == len(set(table)) == 30
    assert len(grid) == len(set(grid)) == 490
    assert (64, 28672, 8192) in table
    assert {k for _, _, k in grid} == {4096, 5120, 7168, 8192, 11008, 14336, 28672}


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    products = [_measured({"ours": [10.0 + m], "humming": [20.0]}, m=m) for m in (1, 8, 64)]
    plots.draw(_document(products), tmp_path / "roof.svg")
    text = (tmp_path / "roof.svg").read_text()
    assert "N = 8192, K = 8192" in text
    assert "<svg" in text
    again = tmp_path / "again.svg"
    plots.draw(_document(products[:1]), again)  # one point is a plot too
    assert again.stat().st_size > 1000


def test_the_plots_roof_is_memorys_and_then_the_tensor_cores():
    assert plots._tflops(_measured({}, m=1), 10.0) == pytest.approx(2 * 8192**2 / 10e6)


def _run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "M N K: none, expected three sizes, or else --suite"),
        (("1", "2"), "M N K: 1 2, expected three sizes, or else --suite"),
        (("1", "2", "3", "--suite", "table"), "M N K: 1 2 3, expected three sizes, or else --suite"),
        (("0", "2", "3"), "M = 0, must be at least 1"),
        (("1", "2", "3", "--rival", "marlin"), "--rival: 'marlin', expected 'cublas', 'expand + cublas', 'humming'"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    run = _run(*arguments)
    assert (run.exit_code, message in run.stderr) == (2, True), run.stderr


def _without(monkeypatch, *names):
    reasons = {name: f"{name} is not installed" for name in names}
    monkeypatch.setattr(rivals, "why_not", reasons.get)


def test_a_rival_that_is_not_there(monkeypatch):
    _without(monkeypatch, "humming")
    run = _run("1", "64", "64", "--rival", "humming")
    assert run.exit_code == 2
    assert "--rival: 'humming' cannot be measured: humming is not installed" in run.stderr
    _measures(monkeypatch)
    run = _run("8", "8192", "8192")
    assert run.exit_code == 0, run.stderr
    assert "without humming: humming is not installed; no product can be lost to it" in run.stderr
    assert "humming" not in _run("8", "8192", "8192", "--rival", "cublas").stderr


def _measures(monkeypatch):
    """A GPU's work, done."""
    monkeypatch.setattr(command, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(running, "measure", lambda *arguments: [_measured({"ours": [10.0], "cublas": [20.0]})])
    monkeypatch.setattr(ceilings, "copying", lambda *arguments: 4300.0)
    monkeypatch.setattr(ceilings, "multiplying", lambda *arguments: {"bf16": 760.0})
    of = {"gpu": "GPU", "date": "2026-01-01", "versions": {}}
    monkeypatch.setattr(record, "circumstances", lambda *arguments: of)


@pytest.mark.parametrize("option", ["--record", "--plot"])
def test_where_nothing_can_be_written_nothing_is_measured(option, tmp_path, monkeypatch):
    _measures(monkeypatch)
    monkeypatch.setattr(running, "measure", lambda *arguments: pytest.fail("measured"))
    for path in (tmp_path, tmp_path / "none" / "a.svg"):
        run = _run("1", "64", "64", option, str(path))
        assert (run.exit_code, f"{option}: {path} cannot be written: " in run.stderr) == (2, True), run.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_record_is_there_whatever_becomes_of_the_plot(tmp_path, monkeypatch):
    _measures(monkeypatch)
    monkeypatch.setattr(plots, "check_matplotlib", lambda: None)

    def fail(document, path):
        raise OSError("disk full")

    monkeypatch.setattr(plots, "draw", fail)
    files = tmp_path / "a.json", tmp_path / "a.svg"
    run = _run("8", "8192", "8192", "--record", str(files[0]), "--plot", str(files[1]))
    assert (run.exit_code, "disk full" in run.stderr) == (2, True)
    assert record.from_json(json.loads(files[0].read_text()))[0].us["ours"] == [10.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu():
    run = _run("1", "64", "64", "--json")
    assert run.exit_code == 2
    assert json.loads(run.stdout)["error"].startswith("bench: needs an NVIDIA GPU, and torch sees none")
