from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tracekit.trace import layout
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def damaged(trace_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trace_folder, tmp_path / "trace")


def change(trace: Path, name: str, column: str, values: pa.Array | pa.ChunkedArray) -> None:
    """Rewrite a column of a table, and the checksums as if that had been recorded."""
    import json

    shard = trace / "shards" / "00000"
    path = shard / f"{name}.parquet"
    rows = pq.read_table(path)
    at = rows.schema.get_field_index(column)
    rows = rows.set_column(at, rows.schema.field(at), values.cast(rows.schema.field(at).type))
    listing = shard / "sequences.parquet"
    pq.write_table(rows, path)
    sequences = rows if name == "sequences" else pq.read_table(listing)
    files = (
        json.loads(pq.read_schema(listing).metadata[layout.FILES_KEY])
        if name != "sequences"
        else None
    )
    if files is not None:
        files[path.name] = {"bytes": path.stat().st_size, "sha256": layout.sha256(path)}
        sequences = sequences.replace_schema_metadata({layout.FILES_KEY: json.dumps(files)})
        pq.write_table(sequences, listing)


def words(trace: Path) -> str:
    return " | ".join(f"{one.where}: {one.what}" for one in validate(trace).problems)


def test_a_whole_trace_has_no_problems(trace_folder: Path) -> None:
    done = validate(trace_folder)
    assert done.problems == ()
    assert done.num_sequences == 5
    assert done.num_steps > 100


def test_a_flipped_byte_is_found(damaged: Path) -> None:
    path = damaged / "shards" / "00000" / "tensors.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "tensors.parquet: has another SHA-256" in words(damaged)


def test_a_truncated_or_missing_file_is_found(damaged: Path) -> None:
    path = damaged / "shards" / "00000" / "steps.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    assert "steps.parquet: has" in words(damaged)
    path.unlink()
    assert "steps.parquet: is missing" in words(damaged)


@pytest.mark.parametrize("name", ["weights.safetensors", "vocab.parquet"])
def test_what_all_sequences_share_is_checked_too(damaged: Path, name: str) -> None:
    path = damaged / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"{name}: has another SHA-256" in words(damaged)
    path.unlink()
    assert f"{name}: is missing" in words(damaged)


def test_a_broken_free_energy_is_found(damaged: Path) -> None:
    path = damaged / "shards" / "00000" / "steps.parquet"
    energy = pq.read_table(path)["free_energy"]
    change(damaged, "steps", "free_energy", pc.add(energy, 0.1))
    assert "break F = U - T S" in words(damaged)


def test_ids_outside_the_vocabulary_and_another_text_are_found(damaged: Path) -> None:
    path = damaged / "shards" / "00000" / "tokens.parquet"
    ids = pq.read_table(path)["token_id"]
    change(damaged, "tokens", "token_id", pc.add(ids, 1))
    assert "do not spell the recorded text" in words(damaged)
    change(damaged, "tokens", "token_id", pc.add(ids, 100_000))
    assert "outside the vocabulary" in words(damaged)


def test_missing_rows_are_found(damaged: Path) -> None:
    path = damaged / "shards" / "00000" / "tokens.parquet"
    positions = pq.read_table(path)["position"]
    change(damaged, "tokens", "position", pc.add(positions, 1))
    assert "positions are not 0 .." in words(damaged)
