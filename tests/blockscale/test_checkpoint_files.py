"""Files that are broken, lie, or point elsewhere; and writes that fail half-way."""

import gc
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from checkpoint_files import FIXTURES, matrix, modelopt, modelopt_config, write
from operands import same_bits, same_tensor
from safetensors.torch import load_file, save_file

import blockscale as bs
from blockscale.checkpoints import CheckpointError
from blockscale.checkpoints.files import DTYPES, TensorFile
from blockscale.checkpoints.writer import FileWriter, Spec


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "x.safetensors", modelopt("fc.", matrix(), 1.0))


def split(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class TestBrokenFiles:
    @pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
    def test_truncated(self, file, keep):
        data = file.read_bytes()
        file.write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=r"x\.safetensors: not a sound safetensors file"):
            bs.load_checkpoint(file)

    def test_too_long(self, file):
        file.write_bytes(file.read_bytes() + b"more")
        with pytest.raises(CheckpointError, match=r"x\.safetensors: not a sound safetensors file"):
            bs.load_checkpoint(file)

    @pytest.mark.parametrize(
        "lie",
        [
            {"dtype": "F64"},
            {"dtype": "NVFP4"},
            {"shape": [32, 33]},
            {"shape": [-32, -32]},
            {"shape": [2**63, 2**63]},
            {"data_offsets": [0, 2**40]},
            {"data_offsets": [8, 1032]},
            {"data_offsets": [-4, 1020]},
        ],
    )
    def test_lying_headers(self, file, lie):
        header, data = split(file)
        header["fc.weight"] |= lie
        join(file, header, data)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: not a sound safetensors file"):
            bs.load_checkpoint(file)

    def test_a_name_that_stands_twice(self, file):
        header, data = split(file)
        text = json.dumps(header)
        join(file, (text[:-1] + ', "fc.weight": ' + json.dumps(header["fc.weight"]) + "}").encode(), data)
        with pytest.raises(CheckpointError, match="a name stands twice"):
            bs.load_checkpoint(file)

    def test_the_right_bytes_under_the_wrong_shape(self, file):
        header, data = split(file)
        header["fc.weight"]["shape"] = [16, 64]
        join(file, header, data)
        with pytest.raises(CheckpointError, match=r"fc\.weight_scale: shape \(32, 4\), expected \(16, 8\) for codes"):
            bs.load_checkpoint(file)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle", b"\x80\x02}q\x00.", b"\xff" * 64])
    def test_other_files(self, tmp_path, content):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: not a sound safetensors file"):
            bs.load_checkpoint(tmp_path / "x.safetensors")

    def test_no_file_and_no_tensors(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            bs.load_checkpoint(tmp_path / "nothing")
        with pytest.raises(CheckpointError, match=r"a directory without any \.safetensors file"):
            bs.load_checkpoint(tmp_path)
        os.mkfifo(tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="not a regular file"):
            bs.load_checkpoint(tmp_path)

    def test_a_file_cut_after_it_was_opened(self, file):
        checkpoint = bs.load_checkpoint(file)
        os.truncate(file, 500)
        with pytest.raises(CheckpointError, match=r"fc\.\w+: the file has become shorter since it was opened"):
            checkpoint["fc.weight"]

    def test_parts_without_their_codes(self, file):
        header, data = split(file)
        header["fc.wait"] = header.pop("fc.weight")
        join(file, header, data)
        with pytest.raises(CheckpointError, match=r"fc\.weight_scale: there is no fc\.weight that it belongs to"):
            bs.load_checkpoint(file)

    def test_dtypes_that_torch_does_not_have(self, tmp_path):
        join(tmp_path / "x.safetensors", {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"abc")
        checkpoint = bs.load_checkpoint(tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match="a: dtype F6_E2M3, which torch does not have"):
            checkpoint["a"]
        bs.save_checkpoint(checkpoint, tmp_path / "y", to="blockscale")
        assert bs.load_checkpoint(tmp_path / "y").plain["a"].bytes().tolist() == list(b"abc")


class TestBrokenDirectories:
    @pytest.fixture
    def folder(self, tmp_path):
        return Path(shutil.copytree(FIXTURES / "llmcompressor-llama-NVFP4", tmp_path / "m"))

    def change(self, path, change):
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    @pytest.mark.parametrize(
        "name",
        [
            "../model-00001-of-00002.safetensors",
            "/etc/passwd",
            "/abs/model.safetensors",
            "sub/../../x.safetensors",
            "..\\x.safetensors",
            "C:\\x.safetensors",
            "C:x.safetensors",
            "\\\\host\\x.safetensors",
            "model.safetensors\0",
            "",
            ".",
            "config.json",
            7,
            None,
        ],
    )
    def test_names_that_leave_the_directory(self, folder, name):
        (folder.parent / "model-00001-of-00002.safetensors").write_bytes(b"")
        self.change(folder / "model.safetensors.index.json", lambda d: d["weight_map"].update({"lm_head.weight": name}))
        with pytest.raises(
            CheckpointError, match=r"index\.json: lm_head\.weight: file .* is not the name of a file in"
        ):
            bs.load_checkpoint(folder)

    def test_a_lying_index(self, folder):
        index = folder / "model.safetensors.index.json"
        self.change(index, lambda d: d["weight_map"].update({"ghost.weight": "model-00002-of-00002.safetensors"}))
        with pytest.raises(CheckpointError, match=r"00002\.safetensors: ghost\.weight: not in this file, though model"):
            bs.load_checkpoint(folder)
        self.change(index, lambda d: d["weight_map"].update({"ghost.weight": "model-00009.safetensors"}))
        with pytest.raises(CheckpointError, match=r"ghost\.weight: file 'model-00009\.safetensors' does not exist"):
            bs.load_checkpoint(folder)

    @pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "[" * 100_000, '{"weight_map": 3}', "\xff"])
    def test_an_index_that_is_none(self, folder, text):
        (folder / "model.safetensors.index.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: "):
            bs.load_checkpoint(folder)

    def test_two_files_with_the_same_tensor_and_no_index(self, folder):
        (folder / "model.safetensors.index.json").unlink()
        bs.load_checkpoint(folder)
        shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "other.safetensors")
        with pytest.raises(CheckpointError, match=r"other\.safetensors: .*: stands in .* too, and there is no index"):
            bs.load_checkpoint(folder)

    def test_shards_through_symbolic_links(self, folder, tmp_path):
        shutil.move(folder / "model-00001-of-00002.safetensors", tmp_path / "blob")
        (folder / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "blob")
        assert len(bs.load_checkpoint(folder).layers) == 7

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"quantization_config": 3}, "quantization_config: int, expected an object"),
            (
                {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": "x"}},
                "group_size",
            ),
            (
                {"quantization_config": {"quant_method": "modelopt", "ignore": 3, "config_groups": {}}},
                "ignore: expected",
            ),
            (
                {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
                "config_groups: list",
            ),
            ({"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:("]}}, "not a regular expr"),
        ],
    )
    def test_configurations_that_are_none(self, folder, change, message):
        self.change(folder / "config.json", lambda d: d.update(change))
        with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
            bs.load_checkpoint(folder)

    def test_configurations_of_other_methods_say_nothing(self, folder):
        self.change(folder / "config.json", lambda d: d.update(quantization_config={"quant_method": "bitsandbytes"}))
        assert not bs.load_checkpoint(folder).problems

    def test_files_that_contradict_each_other(self, tmp_path):
        other = {"quantization": {"quant_algo": "FP8", "exclude_modules": []}}
        path = write(tmp_path / "m", modelopt("fc.", matrix(), 1.0), modelopt_config(), hf_quant_config=other)
        with pytest.warns(UserWarning, match=r"config\.json says NVFP4, but hf_quant_config\.json says FP8"):
            bs.load_checkpoint(path)

    def test_mixed_precision_names_its_layers(self, tmp_path):
        layers = {"fc": {"quant_algo": "NVFP4", "group_size": 16}, "other": {"quant_algo": "FP8"}}
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        tensors = modelopt("fc.", matrix(), 1.0) | {"free.weight": torch.zeros(8, 8)}
        assert not bs.load_checkpoint(write(tmp_path / "m", tensors, config)).problems


class TestFailingWrites:
    """The old checkpoint stays whole, and nothing else is left behind."""

    class Broken(dict):
        def __getitem__(self, name):
            if name == "z.weight" and (looked := getattr(self, "looked", 0)) > 2:
                raise KeyboardInterrupt
            self.looked = looked + 1 if name == "z.weight" else getattr(self, "looked", 0)
            return super().__getitem__(name)

    @pytest.mark.parametrize("target", ["m", "m.safetensors"])
    def test_an_interrupted_write(self, tmp_path, target):
        old = {"a.weight": matrix(seed=1), "z.weight": matrix(seed=2)}
        bs.save_checkpoint(old, tmp_path / target)
        before = sorted(path for path in tmp_path.rglob("*"))
        with pytest.raises(KeyboardInterrupt):
            bs.save_checkpoint(self.Broken({"a.weight": matrix(seed=3), "z.weight": matrix(seed=4)}), tmp_path / target)
        assert sorted(path for path in tmp_path.rglob("*")) == before
        found = bs.load_checkpoint(tmp_path / target)
        assert all(same_tensor(found[name], old[name]) for name in old)

    def test_a_source_that_turns_out_broken(self, tmp_path):
        tensors = modelopt("a.", matrix(), 1.0) | modelopt("b.", matrix(), 1.0)
        tensors["b.weight_scale"].view(torch.uint8)[0, 0] = 0xFF
        source = bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        with pytest.raises(CheckpointError, match=r"b\.weight_scale: scales: byte 0xFF"):
            bs.save_checkpoint(source, tmp_path / "new", to="compressed-tensors")
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("before", [1, 3])
    def test_a_new_checkpoint_replaces_the_old_one_and_its_files(self, tmp_path, before, count):
        folder = tmp_path / "m"
        for seed, parts in ((0, before), (10, count)):
            tensors = {f"{i}.weight": matrix(seed=seed + i) for i in range(6)}
            tensors["fc.bias"] = torch.ones(seed + 1)
            bs.save_checkpoint(tensors, folder, shard_bytes=10**9 if parts == 1 else 2000)
            (folder / "tokenizer.json").write_text("{}")
            kept = bs.load_checkpoint(folder)
        assert all(same_tensor(kept[f"{i}.weight"], tensors[f"{i}.weight"]) for i in range(6))
        assert len(kept.source.files) == count or count > 1
        assert len(list(folder.glob("*.safetensors"))) == len(kept.source.files)
        assert len(list(folder.glob("*.index.json"))) == (kept.source.index is not None)
        assert (folder / "tokenizer.json").exists()

    def test_every_moment_of_a_replacement_is_a_whole_checkpoint(self, tmp_path, monkeypatch):
        """A process that dies between any two steps on the disk leaves the old tensors or the new ones."""
        folder = tmp_path / "m"
        first, second = ({f"{i}.weight": matrix(seed=s + i) for i in range(4)} for s in (0, 10))
        for sizes in [(10**9, 10**9), (2000, 10**9), (10**9, 2000), (2000, 2000)]:
            shutil.rmtree(folder, ignore_errors=True)
            bs.save_checkpoint(first, folder, shard_bytes=sizes[0])
            seen = []

            def look(found=seen):
                checkpoint = bs.load_checkpoint(folder)
                found.append([all(same_tensor(checkpoint[n], t[n]) for n in t) for t in (first, second)])

            for name in ("replace", "unlink"):
                real = getattr(os, name)
                monkeypatch.setattr(os, name, lambda *a, real=real, **k: (look(), real(*a, **k), look())[1])
            bs.save_checkpoint(second, folder, shard_bytes=sizes[1])
            monkeypatch.undo()
            assert len(seen) > 3
            assert all(sum(which) == 1 for which in seen)
            assert seen == sorted(seen, reverse=True)
            assert seen[-1] == [False, True]

    def test_converting_a_directory_in_place(self, tmp_path):
        folder = Path(shutil.copytree(FIXTURES / "llmcompressor-llama-NVFP4", tmp_path / "m"))
        source = bs.load_checkpoint(FIXTURES / "llmcompressor-llama-NVFP4")
        bs.save_checkpoint(bs.load_checkpoint(folder), folder, to="modelopt")
        found = bs.load_checkpoint(folder)
        assert {layer.convention for layer in found.layers.values()} == {"modelopt"}
        assert not found.problems
        assert all(same_bits(found[name].codes, source[name].codes) for name in source.layers)
        bs.save_checkpoint(found, folder, to="compressed-tensors")
        assert not (folder / "hf_quant_config.json").exists()

    def test_what_a_convention_has_no_place_for_changes_nothing(self, tmp_path):
        bs.save_checkpoint({"a.weight": matrix()}, tmp_path / "m")
        before = (tmp_path / "m" / "model.safetensors").read_bytes()
        grouped = bs.quantize(torch.randn(8, 64), layout="128x4-grouped", group_sizes=torch.tensor([3, 5]))
        for tensors, error, message in [
            ({"a.weight": matrix(k=40)}, ValueError, "a.weight: K = 40; modelopt stores multiples of 16"),
            ({"a.weight": grouped}, ValueError, "a.weight: layout '128x4-grouped' is not stored"),
            ({"a[3]": matrix()}, ValueError, r"a\[3\]: a part of a weight"),
            ({"a": [1]}, TypeError, "a: list, expected an NVFP4Tensor or a dense torch.Tensor"),
            ({"a": torch.zeros(2, dtype=torch.complex128)}, TypeError, "a: dtype torch.complex128, which safetensors"),
            ({"__metadata__": torch.zeros(2)}, ValueError, "cannot be the name of a tensor"),
            ({"a.weight": matrix(), "a.weight_scale": torch.ones(2)}, ValueError, "a.weight_scale: two tensors"),
        ]:
            with pytest.raises(error, match=message):
                bs.save_checkpoint(tensors, tmp_path / "m", to="modelopt")
        with pytest.raises(
            ValueError, match="to: 'gguf', expected one of 'modelopt', 'compressed-tensors', 'blockscale'"
        ):
            bs.save_checkpoint({}, tmp_path / "m", to="gguf")
        assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
        assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
            "config.json",
            "hf_quant_config.json",
            "model.safetensors",
        ]


class TestOurOwnMetadata:
    """What the header of a file of ours says of the layers is not believed either."""

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            ({"shape": []}, r"fc\.weight_codes: U8 with the logical shape \(\)"),
            ({"shape": [32, 0]}, r"fc\.weight_codes: U8 with the logical shape \(32, 0\)"),
            ({"shape": [31, 64]}, r"fc\.weight_codes: shape \(32, 32\), expected \(31, 32\)"),
            ({"shape": [32, 65]}, r"fc\.weight_codes: shape \(32, 32\), expected \(32, 64\)"),
            ({"shape": [32.0, 64]}, "metadata do not list the layers: fc.weight_codes: shape"),
            ({"shape": [2**64, 64]}, "fc.weight_codes: shape"),
            ({"layout": "128x4"}, r"fc\.weight_scales: shape \(32, 4\), expected \(128, 4\)"),
            ({"layout": "128x4-grouped"}, "metadata do not list the layers: fc.weight_codes: layout '128x4-grouped'"),
            ({"transposed": True}, r"fc\.weight_codes: U8 with the logical shape \(32, 64\)"),
        ],
    )
    def test_shapes_and_layouts(self, tmp_path, layer, message):
        path = tmp_path / "x.safetensors"
        bs.save_checkpoint({"fc.weight": matrix()}, path, to="blockscale")
        header, data = split(path)
        layers = json.loads(header["__metadata__"]["layers"])
        layers["fc.weight_codes"] |= layer
        header["__metadata__"]["layers"] = json.dumps(layers)
        join(path, header, data)
        with pytest.raises(CheckpointError, match=rf"x\.safetensors: {message}"):
            bs.load_checkpoint(path)

    @pytest.mark.parametrize(("key", "value"), [("version", "2"), ("layers", "{}"), ("layers", "["), ("format", "pt")])
    def test_what_it_is(self, tmp_path, key, value):
        path = tmp_path / "x.safetensors"
        bs.save_checkpoint({"fc.weight": matrix()}, path, to="blockscale")
        header, data = split(path)
        header["__metadata__"][key] = value
        join(path, header, data)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: .*(version '2'|metadata do not)"):
            bs.load_checkpoint(path)


class TestTensors:
    def test_our_own_format_holds_every_shape_and_layout(self, tmp_path):
        tensors = {
            "odd.weight": bs.quantize(torch.randn(7, 37)),
            "tall.weight": bs.quantize(torch.randn(130, 100), layout="linear"),
            "stack": bs.quantize(torch.randn(3, 5, 48)),
            "one.weight": bs.quantize(torch.randn(1, 1)),
            "empty.weight": bs.quantize(torch.randn(0, 64)),
            "fc.bias": torch.randn(5).bfloat16(),
            "scalar": torch.tensor(3),
        }
        for target in ("m", "m.safetensors"):
            bs.save_checkpoint(tensors, tmp_path / target, to="blockscale")
            found = bs.load_checkpoint(tmp_path / target)
            assert set(found) == set(tensors)
            for name, t in tensors.items():
                same = same_tensor if isinstance(t, bs.NVFP4Tensor) else same_bits
                assert same(found[name], t), name

    def test_a_divisor_travels_with_its_tensor(self, tmp_path):
        source = bs.load_checkpoint(FIXTURES / "llmcompressor-llama-NVFP4")
        t = source["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(t.global_scale, 1 / t.divisor)
        for other in (t.with_layout("128x4"), t[:16], t[:, 16:], t.to("cpu")):
            assert torch.equal(other.divisor, t.divisor)
        t.save(tmp_path / "t")
        assert torch.equal(bs.NVFP4Tensor.load(tmp_path / "t").divisor, t.divisor)
        with pytest.raises(ValueError, match=r"divisor: 3\.0, but the global scale is"):
            t.with_divisor(torch.tensor(3.0))

    def test_large_tensors_are_mapped_and_writing_into_them_changes_nothing_else(self, tmp_path):
        x = torch.randn(1 << 19)
        path = tmp_path / "x.safetensors"
        for aligned in (True, False):
            size = 8 + len(json.dumps({"x": {"dtype": "F32", "shape": [1 << 19], "data_offsets": [0, 1 << 21]}}))
            header = {"x": {"dtype": "F32", "shape": [1 << 19], "data_offsets": [0, 1 << 21]}}
            padding = -size % 16 + (0 if aligned else 2)
            join(path, json.dumps(header).encode() + b" " * padding, x.numpy().tobytes())
            checkpoint = bs.load_checkpoint(path)

            def mapped():
                gc.collect()
                return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())

            t = checkpoint["x"]
            assert mapped() == aligned
            t.zero_()
            assert torch.equal(checkpoint["x"], x)
            part = t[5:]
            del t
            assert mapped() == aligned
            del part
            assert mapped() == 0
        assert torch.equal(load_file(path)["x"], x)

    def test_thousands_of_tensors_take_no_file_descriptors(self, tmp_path):
        save_file({str(i): torch.zeros(1 << 20, dtype=torch.uint8) for i in range(40)}, tmp_path / "x.safetensors")
        checkpoint = bs.load_checkpoint(tmp_path / "x.safetensors")
        before = len(os.listdir("/proc/self/fd"))
        loaded = [checkpoint[name] for _ in range(5) for name in checkpoint]
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(loaded) == 200

    def test_files_are_those_the_library_writes(self, tmp_path):
        numbers = torch.arange(48, dtype=torch.uint8)
        tensors = {f'{i} "é\\\n': (numbers + i).view(d) for i, d in enumerate(DTYPES.values()) if d != torch.bool}
        tensors |= {"no": torch.zeros(0, 3), "yes": torch.tensor([True, False]), "é": torch.tensor(2.0)}
        save_file(tensors, tmp_path / "theirs", {"format": "pt"})
        bs.save_checkpoint(tensors, tmp_path / "ours.safetensors")
        assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()

    def test_a_writer_notices_what_is_missing(self, tmp_path):
        specs = [Spec("a", "F32", (2,)), Spec("b", "F32", (2,))]
        with FileWriter(tmp_path / "x", specs, {}) as writer:
            writer.write("a", torch.ones(2))
            writer.write("b", torch.ones(2))
        assert TensorFile(tmp_path / "x").entries.keys() == {"a", "b"}
        with pytest.raises(ValueError, match="b: was never written"), FileWriter(tmp_path / "y", specs, {}) as writer:
            writer.write("a", torch.ones(2))
        with pytest.raises(ValueError, match="a: 4 bytes, expected 8"), FileWriter(tmp_path / "z", specs, {}) as writer:
            writer.write("a", torch.ones(1))
