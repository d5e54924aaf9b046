"""A tiny model in a folder, a trace recorded with it, and results: made once a test session."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import tiny

if TYPE_CHECKING:
    from pathlib import Path

# How long an example takes depends on what else the machine does. Examples are the same in every run,
# so that a failure is of the code and can be repeated; others by --hypothesis-profile=search.
settings.register_profile("search", deadline=None)
settings.register_profile("tracekit", deadline=None, derandomize=True)
settings.load_profile("tracekit")

PROMPTS = [
    {"id": "plain", "domain": "story", "prompt": "Once there was <script>alert(1)</script>"},
    {"id": "emoji", "domain": "dialogue", "prompt": "the sun \U0001f31e and 你好"},
    {
        "id": "asked",
        "domain": "retrieval",
        "context": "The code of the door is seven. The rest of the note is about the garden.",
        "question": "What is the code of the door?",
    },
    {"id": "turns", "domain": "dialogue", "turns": ["in the morning", "and then?"]},
    {"id": "raw", "domain": "story", "text": "on and on the river"},
]
NEW_TOKENS = 9


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trace_folder(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, prompt_file: Path
) -> Path:
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record

    out = tmp_path_factory.mktemp("traces") / "trace"
    options = RecordOptions(max_new_tokens=NEW_TOKENS)
    assert not record(str(model_folder), str(prompt_file), out, options).skipped
    return out


@pytest.fixture(scope="session")
def results_folder(tmp_path_factory: pytest.TempPathFactory, trace_folder: Path) -> Path:
    from tracekit.simulate.plan import make_plan
    from tracekit.simulate.run import simulate

    out = tmp_path_factory.mktemp("results") / "results"
    assert not simulate(trace_folder, out, make_plan(sizes=(16, 64, 4096))).failed
    return out
