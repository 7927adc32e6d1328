"""The store: whole or absent, for any number of processes, whatever happens to its files."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from blockscale import plan, store
from blockscale.config import Config
from blockscale.families.sm100 import CODE_FIELDS, KERNEL
from blockscale.problem import Problem, target_named
from blockscale.store import Store

SRC = Path(__file__).parents[3] / "src"
B200 = target_named("b200")
PROBLEM, CONFIG = Problem(128, 256, 512), Config()
STRINGS = {f.name for f in fields(Config) if "str" in str(f.type)}
ORIGIN = store.origin(B200, CONFIG, PROBLEM)
PARTS = {"object": b"\x7fELF host", "library": b"\x7fELF so", "ptx": b".entry k", "cubin": b"\x7fELF" + bytes(500)}


def key(problem=PROBLEM, config=CONFIG, target=B200):
    return store.key_of(store.origin(target, config, problem))


def test_what_is_put_is_got(tmp_path):
    kept = Store(tmp_path / "new" / "store")
    assert kept.get(key()) is None
    put = kept.put(ORIGIN, PARTS)
    got = kept.get(key())
    assert got == put
    assert {part: path.read_bytes() for part, path in got.parts.items()} == PARTS
    assert got.origin == ORIGIN
    assert got.parts["library"].suffix == ".so"  # by which it is loaded


def test_equal_parts_are_kept_once(tmp_path):
    kept = Store(tmp_path)
    kept.put({"name": "a"}, PARTS)
    kept.put({"name": "b"}, PARTS | {"ptx": b"another"})
    assert len(list((tmp_path / "parts").iterdir())) == len(PARTS) + 1


@pytest.mark.parametrize("harm", ["empty", "cut", "longer", "flipped", "gone", "folder"])
@pytest.mark.parametrize("which", ["entry", *PARTS])
def test_a_damaged_artefact_is_a_miss_and_is_mended(tmp_path, which, harm):
    kept = Store(tmp_path)
    artefact = kept.put(ORIGIN, PARTS)
    path = tmp_path / "kernels" / f"{key()}.json" if which == "entry" else artefact.parts[which]
    data = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm != "gone":
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        path.write_bytes({"empty": b"", "cut": data[:-3], "longer": data + b"x", "flipped": flipped}[harm])
    assert kept.get(key()) is None
    if harm == "folder":
        path.rmdir()
    kept.put(ORIGIN, PARTS)
    assert kept.get(key()) is not None


FORMS = [b"[]", b"{}", b'{"parts": 1, "origin": {}}', b'{"parts": {"ptx": 7}, "origin": {}}', b"[" * 100_000]


@pytest.mark.parametrize("entry", FORMS, ids=range(len(FORMS)))
def test_an_entry_of_another_form_is_a_miss(tmp_path, entry):
    kept = Store(tmp_path)
    kept.put(ORIGIN, PARTS)
    (tmp_path / "kernels" / f"{key()}.json").write_bytes(entry)
    assert kept.get(key()) is None


def other_key(entry):
    entry["origin"]["out_dtype"] = "fp32"


def other_arch(entry):
    entry["origin"]["arch"] = "sm_103a"


def swapped(entry):
    entry["parts"]["ptx"], entry["parts"]["object"] = entry["parts"]["object"], entry["parts"]["ptx"]


def other_part(entry):
    entry["parts"]["ptx"] = entry["other"]


def no_parts(entry):
    entry["parts"] = {}


def no_ptx(entry):
    del entry["parts"]["ptx"]


@pytest.mark.parametrize("change", [other_key, other_arch, swapped, other_part, no_parts, no_ptx])
@pytest.mark.parametrize("signed", [False, True], ids=["", "with a digest of its own"])
def test_an_entry_in_anothers_place_is_a_miss(tmp_path, change, signed):
    """Whole files all: what does not fit is which kernel the entry says it is, or which part a file."""
    kept = Store(tmp_path)
    kept.put(ORIGIN, PARTS)
    other = kept.put({"name": "other"}, PARTS | {"ptx": b".entry other"})
    path = tmp_path / "kernels" / f"{key()}.json"
    entry = json.loads(path.read_text()) | {"other": other.parts["ptx"].name}
    change(entry)
    if signed and change is not other_part:
        entry["digest"] = store._digest_of(entry["origin"], entry["parts"])
    path.write_text(json.dumps(entry))
    assert kept.get(key()) is None
    kept.put(ORIGIN, PARTS)
    assert kept.get(key()) is not None


def test_a_key_holds_what_decides_code_and_nothing_else():
    keys = {key(), *(key(config=replace(CONFIG, **{name: "another"})) for name in CODE_FIELDS if name in STRINGS)}
    keys |= {key(config=replace(CONFIG, **{name: (4, 4)})) for name in ("tile", "cluster", "fallback_cluster")}
    keys |= {key(config=replace(CONFIG, **{name: True})) for name in ("swap", "pdl")}
    integers = ("stages", "accumulators", "group", "prefetch", "read", "store_slots")
    keys |= {key(config=replace(CONFIG, **{name: 7})) for name in integers}
    assert len(keys) == 1 + len(CODE_FIELDS)
    keys |= {key(replace(PROBLEM, out_dtype=dtype)) for dtype in ("fp16", "fp32", "nvfp4")}
    keys |= {key(replace(PROBLEM, bias="fp16")), key(replace(PROBLEM, activation="silu"))}
    keys |= {key(target=replace(B200, arch="sm_103a"))}
    assert len(keys) == 1 + len(CODE_FIELDS) + 6
    assert {key(replace(PROBLEM, **{name: 77})) for name in ("m", "n", "k")} == {key()}
    assert key(replace(PROBLEM, batch=3, batch_a=3, invariant=True)) == key()
    assert key(config=replace(CONFIG, ctas=3, persist_mb=8)) == key()
    assert key(target=replace(B200, sms=4)) == key()


def test_a_key_is_the_same_in_another_process():
    """No address, no hash seed, nothing of the process: or every process would compile again."""
    source = (
        "from blockscale import store; from blockscale.config import Config; from blockscale.problem import *;"
        "print(store.key_of(store.origin(target_named('b200'), Config(), Problem(1, 2, 3))))"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(SRC)}
        run = subprocess.run(
            [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == key()
    made_from = store.origin(B200, CONFIG, PROBLEM)
    assert "0x" not in json.dumps(made_from)


def test_a_source_of_the_kernels_is_in_the_key(monkeypatch, tmp_path):
    before = store.sources(KERNEL)
    for path in (SRC / "blockscale").rglob("*"):
        if path.suffix in (".py", ".c"):
            copy = tmp_path / "blockscale" / path.relative_to(SRC / "blockscale")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(store, "__file__", str(tmp_path / "blockscale" / "store.py"))
    store.sources.cache_clear()
    assert store.sources(KERNEL) == before
    changed = tmp_path / "blockscale" / "kernels" / "parts" / "geometry.py"
    changed.write_text(changed.read_text() + "# changed\n")
    store.sources.cache_clear()
    assert store.sources(KERNEL) != before
    store.sources.cache_clear()


def test_what_a_dead_process_left_is_swept(tmp_path):
    kept = Store(tmp_path)
    kept.put({"name": "a"}, PARTS)
    old, new = tmp_path / "parts" / ".old.part", tmp_path / "parts" / ".new.part"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (0, 0))
    kept.put({"name": "b"}, PARTS)
    assert not old.exists()
    assert new.exists()  # its process may be alive


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Store(tmp_path / "file").put({"name": "a"}, PARTS)


def test_where_the_store_is(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "own"))
    assert store.default_store().root == tmp_path / "own"
    monkeypatch.delenv("BLOCKSCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_store().root == tmp_path / "blockscale"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.default_store().root == Path.home() / ".cache" / "blockscale"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BLOCKSCALE_CACHE", "~/mine")
    assert store.default_store().root == tmp_path / "mine"
    monkeypatch.delenv("BLOCKSCALE_CACHE")
    monkeypatch.setenv("HOME", "")
    assert store.default_store() is store.private_store()


def compiled(monkeypatch, counted):
    from blockscale import compile as compiler

    monkeypatch.setattr(compiler, "check_compiler", lambda: None)
    monkeypatch.setattr(compiler, "compile_kernel", lambda *asked: counted.append(asked) or PARTS)


@pytest.mark.parametrize("where", ["a file", "/proc/nowhere", "a folder in a part's place"])
def test_a_kernel_is_not_lost_where_the_store_cannot_keep_it(monkeypatch, tmp_path, where):
    (tmp_path / "a file").write_text("")
    kept = Store(tmp_path / "a file" if where == "a file" else where if where[0] == "/" else tmp_path)
    if where.startswith("a folder"):
        (tmp_path / "parts" / (hashlib.sha256(PARTS["ptx"]).hexdigest() + ".ptx")).mkdir(parents=True)
    counted = []
    compiled(monkeypatch, counted)
    store._store_of.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"cannot be written.* BLOCKSCALE_CACHE names another directory"):
        made = plan.artefact(PROBLEM, B200, CONFIG, kept)
    assert made.parts["ptx"].read_bytes() == PARTS["ptx"]
    assert plan.artefact(PROBLEM, B200, CONFIG, kept) == made
    assert len(counted) == 1
    store._store_of.cache_clear()


def test_an_artefact_without_a_library_is_linked_where_there_is_a_compiler(monkeypatch, tmp_path):
    from blockscale import compile as compiler

    kept = Store(tmp_path)
    kept.put(ORIGIN, {part: data for part, data in PARTS.items() if part != "library"})
    monkeypatch.setattr(compiler, "link", lambda path: None)
    assert "library" not in plan.artefact(PROBLEM, B200, CONFIG, kept).parts
    monkeypatch.setattr(compiler, "link", lambda path: {"library": b"from " + path.read_bytes()})
    made = plan.artefact(PROBLEM, B200, CONFIG, kept)
    assert made.parts["library"].read_bytes() == b"from " + PARTS["object"]
    assert kept.get(key()) == made


def test_a_hit_asks_no_compiler(tmp_path):
    kept = Store(tmp_path)
    put = kept.put(ORIGIN, PARTS)
    assert plan.artefact(PROBLEM, B200, CONFIG, kept) == put


WORKERS = """
import os, signal, sys, time
from blockscale import compile, plan
from blockscale.config import Config
from blockscale.problem import Problem, target_named
from blockscale.store import Store

root = sys.argv[1]
compile.check_compiler = lambda: None

def start(seconds):
    child = os.fork()
    if child:
        return child
    def compile_kernel(target, config, problem):
        with open(root + "/compiled", "a") as log:
            log.write("x")
        time.sleep(seconds)
        return {"object": b"host" * 100000, "ptx": b"p", "cubin": b"c", "library": b"l"}
    compile.compile_kernel = compile_kernel
    made = plan.artefact(Problem(1, 2, 3), target_named("b200"), Config(), Store(root))
    os._exit(0 if made.parts["object"].read_bytes() == b"host" * 100000 else 1)

def exits(children):
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
KILLED = """
victim = start(60)
while not os.path.exists(root + "/compiled"):
    time.sleep(0.01)
others = [start(0.2) for _ in range(7)]
time.sleep(0.5)  # they wait for the lock by now
os.kill(victim, signal.SIGKILL)
exits([victim, *others])
"""


def exit_codes(root, scenario):
    """Of the processes that a scenario forks off one that has imported everything."""
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKERS + scenario, str(root)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return [int(code) for code in run.stdout.split()]


def test_eight_processes_on_a_cold_store_one_of_them_killed(tmp_path):
    """The one that compiles is killed in the middle; another takes over, once, and all the rest have its artefact."""
    assert exit_codes(tmp_path, KILLED) == [-signal.SIGKILL, *[0] * 7]
    assert (tmp_path / "compiled").read_text() == "xx"  # the victim's, and one more
    assert Store(tmp_path).get(key()) is not None
    assert not list(tmp_path.rglob("*.part"))


def test_eight_processes_without_locks(tmp_path):
    """Where the file system has none everybody may compile, and everybody's result is right."""
    (tmp_path / "locks").write_text("no folder, so no locks")
    assert exit_codes(tmp_path, "exits([start(0.2) for _ in range(8)])") == [0] * 8
    assert len((tmp_path / "compiled").read_text()) > 1
    assert Store(tmp_path).get(key()) is not None


REAL = """
compile.check_compiler = checked
def start(seconds):
    child = os.fork()
    if child:
        return child
    made = plan.artefact(Problem(1, 2, 3), target_named("b200"), Config(), Store(root))
    os._exit(0 if made.parts["object"].read_bytes().startswith(b"\\x7fELF") else 1)

victim = start(0)
while not os.path.exists(root + "/locks"):
    time.sleep(0.01)
time.sleep(1)
others = [start(0) for _ in range(7)]
time.sleep(0.5)
os.kill(victim, signal.SIGKILL)
exits([victim, *others])
"""


@pytest.mark.prove
def test_eight_processes_that_really_compile(tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    remember = "from blockscale import compile\nchecked = compile.check_compiler\n"
    source = WORKERS.replace("compile.check_compiler = lambda: None", "")
    run = subprocess.run(
        [sys.executable, "-c", remember + source + REAL, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.stdout.split() == [str(-signal.SIGKILL), *["0"] * 7], run.stderr
    artefact = Store(tmp_path).get(key())
    assert set(artefact.parts) == {"object", "library", "ptx", "cubin"}
    artefact.parts["cubin"].write_bytes(b"")  # truncated: compiled again
    assert Store(tmp_path).get(key()) is None
    assert plan.artefact(PROBLEM, B200, CONFIG, Store(tmp_path)).parts["cubin"].read_bytes()
