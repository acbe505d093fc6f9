"""RL control over HTTP, in SGLang's names, behind the admin key (rl §9; W4, W6, Z1, Z2 through the server)."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save, save_file

from phloem.runtime.config import make_config
from phloem.runtime.engine.build import build
from phloem.runtime.engine.client import InprocClient
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.host import Served
from tests.rl.tiny import text_tokenizer
from tests.serve.serving import Server
from tests.tiny_models import tiny_config, tiny_tensors, write_hf

ADMIN = {"authorization": "Bearer admin-secret-0"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    write_hf(folder, tiny_config())
    text_tokenizer(folder)
    parts = build(make_config(str(folder), kv_tokens=4096, threads=1, max_running=4))
    client = InprocClient(parts.core, on_close=parts.on_close)
    thread = threading.Thread(target=client.serve, daemon=True)
    thread.start()
    server = Server(
        client,
        Served.of(parts.tokenizer, parts.resolved, model_type="llama"),
        ServerConfig(admin_key="admin-secret-0", api_key=("k",)),
        close=client.close,
    )
    server.headers = ADMIN
    yield server
    server.assert_idle()
    server.close()
    thread.join(10)


def greedy(server: Server, length: int = 8) -> list[int]:
    reply = server.post(
        "/generate", input_ids=[1, 5, 6, 7], sampling_params={"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    )
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["output_ids"]
    return ids


def test_every_route_wants_the_admin_key(trained: Server) -> None:
    for path in ("pause_generation", "continue_generation", "begin_weight_update", "end_weight_update", "update_weights_from_disk", "update_weights_from_tensor",
                 "update_weight_version", "release_memory_occupation", "resume_memory_occupation", "weights_checker"):  # fmt: skip
        assert trained.post(f"/{path}", headers={"authorization": "Bearer k"}).status_code in (401, 403), path
    assert trained.get("/get_weights_by_name?name=x", headers={"authorization": "Bearer k"}).status_code in (401, 403)


def test_W4_an_update_from_disk_or_from_the_body_is_what_is_served(trained: Server, tmp_path: Path) -> None:
    before = greedy(trained)
    digest = trained.post("/weights_checker").json()["checksum"]
    new = tiny_tensors(tiny_config(), seed=5)
    save_file(new, tmp_path / "model.safetensors")
    reply = trained.post("/update_weights_from_disk", model_path=str(tmp_path), flush_cache=True, weight_version="step-1")
    assert reply.status_code == 200 and reply.json()["success"] is True and reply.json()["version"] == 1
    assert trained.get("/model_info").json()["weight_version"] == "step-1"
    after = greedy(trained)
    assert after != before and trained.post("/weights_checker").json()["checksum"] != digest
    values = trained.get("/get_weights_by_name?name=model.norm.weight&truncate_size=3").json()["values"]
    assert values == new["model.norm.weight"][:3].tolist()
    old = list(tiny_tensors(tiny_config()).items())
    assert trained.post("/begin_weight_update").json()["success"]
    for at in range(0, len(old), 7):
        blob = base64.b64encode(save(dict(old[at : at + 7]))).decode()
        reply = trained.post("/update_weights_from_tensor", serialized_named_tensors=[blob], load_format="safetensors")
        assert reply.status_code == 200, reply.text
        assert greedy(trained) == after  # nothing of it is served before the end
    assert trained.post("/end_weight_update").status_code == 200
    assert greedy(trained) == before and trained.post("/weights_checker").json()["checksum"] == digest


def test_no_pickle_and_no_guessing(trained: Server, tmp_path: Path) -> None:
    before = greedy(trained)
    blob = base64.b64encode(b"\x80\x04K\x01.").decode()
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("update_weights_from_tensor", {"serialized_named_tensors": [blob]}, "never read"),
        ("update_weights_from_tensor", {"serialized_named_tensors": [blob], "load_format": "safetensors"}, "no safetensors"),
        ("update_weights_from_tensor", {"serialized_named_tensors": ["*"], "load_format": "safetensors"}, "base64"),
        ("update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")}, "cannot be read"),
        ("update_weights_from_disk", {}, "model_path"),
        ("pause_generation", {"mode": "stop"}, "retract"),
        ("pause_generation", {"mood": "abort"}, "no field"),
        ("end_weight_update", {}, "begin_weight_update"),
        ("release_memory_occupation", {"tags": ["disk"]}, "kv_cache"),
    ]
    for path, body, words in bad:
        reply = trained.post(f"/{path}", body)
        assert reply.status_code >= 400 and words in reply.text, (path, body, reply.text)
    assert greedy(trained) == before


@pytest.mark.case("C-RL-04")
def test_a_label_aborts_nothing(trained: Server) -> None:
    whole = greedy(trained, 200)
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(greedy(trained, 200)))
    thread.start()
    assert trained.post("/update_weight_version", new_version="v2").json()["success"]
    thread.join(60)
    assert found == [whole]


@pytest.mark.case("C-RL-06")
@pytest.mark.parametrize("mode", ["retract", "in_place", "finish"])
def test_W6_paused_requests_wait_and_go_on(trained: Server, mode: str) -> None:
    whole = greedy(trained, 100)
    assert trained.post("/pause_generation", mode=mode).json()["success"]
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(greedy(trained, 100)))
    thread.start()
    time.sleep(0.05)
    assert not found
    assert trained.post("/continue_generation").json()["success"]
    thread.join(60)
    assert found == [whole]


@pytest.mark.case("C-RL-06")
def test_Z1_asleep_it_refuses_and_awake_it_is_as_before(trained: Server) -> None:
    before = greedy(trained)
    assert trained.post("/release_memory_occupation", tags=["kv_cache"]).json()["freed_bytes"] > 0
    assert trained.post("/release_memory_occupation", tags=["kv_cache"]).json()["success"]  # idempotent
    reply = trained.post("/generate", input_ids=[1, 5], sampling_params={"max_new_tokens": 2})
    assert reply.status_code == 503 and "sleeping" in reply.text
    assert trained.post("/resume_memory_occupation").json()["success"]
    assert trained.post("/resume_memory_occupation").json()["success"]
    assert greedy(trained) == before
