"""The one door: what a model can be called, and every way in which a checkpoint can fail to be one, before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phloem.runtime.backends import create_backend
from phloem.runtime.backends.base import Packed, Weight
from phloem.runtime.backends.blocks import quantise
from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.models.loader import load_model, open_model
from phloem.runtime.models.registry import ARCHITECTURES, architecture_named
from tests.tiny_models import tiny_config, tiny_tensors, write_gguf, write_hf


class Recorder:
    """A backend that keeps what it is given."""

    name = "recorder"
    kv_dtypes: tuple[str, ...] = ("f32",)

    def __init__(self) -> None:
        self.packed: list[tuple[list[Weight], bool]] = []
        self.vectors: list[Tensor] = []

    def pack(self, parts: Sequence[Weight], *, gated: bool = False) -> Packed:
        self.packed.append((list(parts), gated))
        return create_backend("reference").pack(parts, gated=gated)

    def vector(self, values: Tensor) -> Tensor:
        self.vectors.append(values)
        return values

    def bind(self, *_: Any) -> Any:
        raise AssertionError("the loader binds nothing")

    def close(self) -> None: ...


class Untouchable(Recorder):
    """Fails as soon as anything is packed: to show that a checkpoint is refused before that."""

    def pack(self, parts: Sequence[Weight], *, gated: bool = False) -> Packed:
        raise AssertionError("memory was taken before the checkpoint was verified")

    def vector(self, values: Tensor) -> Tensor:
        raise AssertionError("memory was taken before the checkpoint was verified")


def refused(path: Path | str, kind: type[ModelLoadError] = ModelLoadError) -> str:
    with pytest.raises(kind) as caught:
        load_model(str(path), Untouchable())
    return str(caught.value)


def test_a_directory(tmp_path: Path) -> None:
    config = tiny_config("qwen2", tie_word_embeddings=True, eos_token_id=2)
    write_hf(tmp_path / "tiny", config)
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2], "temperature": 0.6}))
    (tmp_path / "tiny" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    recorder, seen = Recorder(), []
    loaded = load_model(str(tmp_path / "tiny"), recorder, progress=lambda done, total: seen.append((done, total)))
    assert (loaded.name, loaded.path, loaded.metadata) == ("tiny", tmp_path / "tiny", None)
    assert loaded.eos_ids == (2, 3) and loaded.generation_config["temperature"] == 0.6
    assert loaded.chat_template == "from config"
    (tmp_path / "tiny" / "chat_template.jinja").write_text("from file")
    assert open_model(str(tmp_path / "tiny")).chat_template == "from file"
    total = sum(t.numel() * 4 for t in tiny_tensors(config).values())
    assert loaded.weight_bytes == total and seen[-1] == (total, total) and seen == sorted(seen)
    assert [gated for _, gated in recorder.packed].count(True) == 2
    qkv = next(parts for parts, _ in recorder.packed if len(parts) == 3)
    assert [p.shape for p in qkv] == [(64, 64), (32, 64), (32, 64)]
    assert loaded.model.num_layers == 2 and loaded.model.width == 96


def test_of_several_chat_templates_the_default_one(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_model(str(tmp_path)).chat_template == "yes"


def test_a_gguf_file_keeps_its_blocks_and_gives_metadata(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    write_gguf(
        tmp_path / "m.gguf",
        config,
        tensors,
        kinds={"*": "q4_0", "token_embd": "q8_0"},
        metadata={"tokenizer.chat_template": "hello"},
    )
    recorder = Recorder()
    loaded = load_model(str(tmp_path / "m.gguf"), recorder)
    assert loaded.metadata is not None and loaded.metadata["tokenizer.ggml.tokens"][3] == "t3"
    assert loaded.chat_template == "hello" and loaded.eos_ids == (2,) and loaded.name == "m" and loaded.config.tied
    assert {p.kind for parts, _ in recorder.packed for p in parts} == {"q4_0", "q8_0"}
    # Rows of q and k are put back while they are blocks: the same bytes as quantising transformers' rows.
    q, k, v = next(parts for parts, _ in recorder.packed if len(parts) == 3)
    for weight, name in ((q, "q"), (k, "k"), (v, "v")):
        assert torch.equal(weight.data, quantise("q4_0", tensors[f"model.layers.0.self_attn.{name}_proj.weight"]))


def test_none_is_the_embedded_model() -> None:
    opened = open_model(None)
    assert opened.name == "SmolLM2-135M-Instruct" and opened.config.vocabulary == 49152 and opened.config.tied
    assert opened.eos_ids == (2,) and opened.chat_template is not None and "im_start" in opened.chat_template


@pytest.mark.parametrize("dtype, kinds", [("f32", {"f32"}), ("bf16", {"bf16"}), ("q8", {"q8_0"}), ("q4", {"q4_0", "q8_0"})])
def test_dtype_reaches_every_matrix(tmp_path: Path, dtype: Any, kinds: set[str]) -> None:
    write_hf(tmp_path, tiny_config())
    recorder = Recorder()
    loaded = load_model(str(tmp_path), recorder, dtype)
    assert {p.kind for parts, _ in recorder.packed for p in parts} == kinds
    tables = [parts[0].kind for parts, _ in recorder.packed if parts[0].shape == (96, 64) and len(parts) == 1]
    assert tables == (["q8_0"] * 2 if dtype == "q4" else [*kinds] * 2)
    assert loaded.opened.weight_bytes(dtype) == loaded.weight_bytes
    norms = sum(v.numel() * 4 for v in recorder.vectors)
    assert loaded.weight_bytes == norms + sum(p.data.nbytes for parts, _ in recorder.packed for p in parts)


@pytest.mark.parametrize("dtype", ["auto", "f32", "bf16", "q8", "q4"])
def test_the_size_is_known_from_the_headers(tmp_path: Path, dtype: Any) -> None:
    kinds = {"attn_q": "q4_0", "attn_k": "q4_1", "attn_v": "q8_0", "ffn_up": "f16", "ffn_gate": "bf16", "ffn_down": "q4_1"}
    write_gguf(tmp_path / "m.gguf", tiny_config("qwen2"), kinds=kinds)
    loaded = load_model(str(tmp_path / "m.gguf"), Recorder(), dtype)
    assert loaded.opened.weight_bytes(dtype) == loaded.weight_bytes


def test_a_dtype_that_a_matrix_cannot_have_is_refused_before_any_is_read(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config(intermediate_size=80))
    with pytest.raises(UnsupportedModelError, match=r"down_proj.weight has rows of 80"):
        load_model(str(tmp_path), Untouchable(), "q8")
    load_model(str(tmp_path), Recorder(), "bf16")


def test_max_context_shortens_the_rotary_table(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config())
    backend = create_backend("reference")
    for asked, positions in ((None, 2048), (100, 100), (10**6, 2048)):
        model: Any = load_model(str(tmp_path), backend, max_context=asked).model
        assert model.layers[0].spec.rope.cos.shape == (positions, 8)


def test_what_is_no_model_says_what_a_model_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "x.gguf").touch()
    (tmp_path / "notes.txt").write_text("hi")
    assert "no such file or directory" in refused("no such thing")
    assert "no such file or directory" in refused("models/absent.gguf")
    assert "no config.json. Expected a transformers directory" in refused(tmp_path / "empty")
    assert "name that file" in refused(tmp_path / "gguf")
    assert "or a .gguf file" in refused(tmp_path / "notes.txt")
    write_hf(tmp_path / "bin", tiny_config())
    (tmp_path / "bin" / "model.safetensors").rename(tmp_path / "bin" / "pytorch_model.bin")
    assert "found pytorch_model.bin" in refused(tmp_path / "bin", UnsupportedModelError)


@pytest.mark.case("C-LOAD-05")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["minus one byte", "half", "7 bytes", "empty", "pointer", "not json"])
def test_damaged_files_are_one_line_with_their_name(tmp_path: Path, name: str, damage: str) -> None:
    write_hf(tmp_path, tiny_config())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    data = (tmp_path / name).read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    broken = {
        "minus one byte": data[:-1],
        "half": data[: len(data) // 2],
        "7 bytes": data[:7],
        "empty": b"",
        "pointer": pointer,
        "not json": b"\xff" + data,
    }
    (tmp_path / name).write_bytes(broken[damage])
    message = refused(tmp_path)
    assert name in message and "\n" not in message


@pytest.mark.case("C-LOAD-03")
def test_every_offender_is_listed_at_once(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_projection.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(65)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64, dtype=torch.int8)
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    lines = refused(tmp_path).splitlines()
    assert "7 of its tensors do not fit LlamaForCausalLM" in lines[0]
    assert sorted(line.strip() for line in lines[1:]) == [
        "missing     model.layers.0.mlp.up_proj.weight [96, 64]",
        "missing     model.layers.1.mlp.down_proj.weight [64, 96]",
        "missing     model.norm.weight [64]",
        "unexpected  model.layers.0.mlp.up_projection.weight [96, 64]",
        "unexpected  model.layers.2.mlp.down_proj.weight [2]",
        "wrong dtype model.layers.0.self_attn.q_proj.weight: I8, expected f32, f16, bf16",
        "wrong shape model.layers.0.input_layernorm.weight: [65], expected [64]",
    ]


@pytest.mark.case("C-LOAD-03")
@pytest.mark.parametrize("name", sorted(tiny_tensors(tiny_config())))
def test_each_tensor_is_missed(tmp_path: Path, name: str) -> None:
    tensors = tiny_tensors(tiny_config())
    del tensors[name]
    write_hf(tmp_path, tiny_config(), tensors)
    assert f"missing     {name}" in refused(tmp_path)


@pytest.mark.case("C-LOAD-03")
def test_a_gguf_file_is_verified_alike(tmp_path: Path) -> None:
    config, path = tiny_config("qwen3"), tmp_path / "m.gguf"
    tensors = tiny_tensors(config)
    del tensors["model.layers.0.self_attn.k_norm.weight"]
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16)
    write_gguf(path, config, tensors, extra={"mystery": torch.ones(3).numpy()})
    message = refused(path)
    for line in (
        "missing     blk.0.attn_k_norm.weight [32]",
        "wrong shape blk.1.attn_q_norm.weight: [16]",
        "unexpected  mystery [3]",
    ):
        assert line in message
    del tensors["model.embed_tokens.weight"]
    assert "token_embd.weight" in refused(write_gguf(path, config, tensors))


@pytest.mark.case("C-LOAD-02")
def test_tied_and_untied_heads(tmp_path: Path) -> None:
    untied = tiny_tensors(tiny_config())
    head = untied.pop("lm_head.weight")
    write_hf(tmp_path / "headless", tiny_config(), untied)
    assert "missing     lm_head.weight" in refused(tmp_path / "headless")
    write_hf(tmp_path / "liar", tiny_config(tie_word_embeddings=True), {**untied, "lm_head.weight": head})
    assert "lm_head.weight: differs from model.embed_tokens.weight" in refused(tmp_path / "liar")
    copy = {**untied, "lm_head.weight": untied["model.embed_tokens.weight"].clone()}
    write_hf(tmp_path / "copy", tiny_config(tie_word_embeddings=True), copy)
    recorder = Recorder()
    load_model(str(tmp_path / "copy"), recorder)
    assert sum(parts[0].shape == (96, 64) and len(parts) == 1 for parts, _ in recorder.packed) == 1


def test_rotary_buffers_of_old_exports_do_no_harm(tmp_path: Path) -> None:
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    write_hf(tmp_path, tiny_config(), {**tiny_tensors(tiny_config()), **buffers})
    open_model(str(tmp_path))
    buffers["model.layers.2.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    write_hf(tmp_path, tiny_config(), {**tiny_tensors(tiny_config()), **buffers})
    assert "unexpected  model.layers.2" in refused(tmp_path)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_line_of_the_registry_leads_to_a_class(name: str) -> None:
    kind = architecture_named(name, "here")
    assert kind.WEIGHTS and {r.shard for r in kind.WEIGHTS} <= {0, 1, None}
    assert len({r.param for r in kind.WEIGHTS}) == len(kind.WEIGHTS)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="here: architecture 'Nope'"):
        architecture_named("Nope", "here")
