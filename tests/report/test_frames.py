from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import pytest

from tests.report.fake import make_results
from tracekit.errors import InputError
from tracekit.report import frames
from tracekit.report.frames import read_frame, read_part
from tracekit.schema import ALL, ANY, KV_RESULTS

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_read_in_pieces_is_what_is_read_whole_and_picked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_results(tmp_path / "r", num_sequences=4)
    monkeypatch.setattr(frames, "_PIECE_ROWS", 7)
    whole = read_frame(folder, KV_RESULTS)
    picked = whole[(whole["layer"] == ALL) & (whole["steps"] == ANY)].reset_index(drop=True)
    assert len(picked) == 4 * 5 * 4
    pd.testing.assert_frame_equal(read_part(folder, KV_RESULTS, layer=ALL, steps=ANY), picked)
    names = ["policy", "output_error"]
    pd.testing.assert_frame_equal(
        read_part(folder, KV_RESULTS, names, layer=ALL, steps=ANY), picked[names]
    )


def test_a_part_of_no_file_has_no_rows_and_one_of_a_damaged_file_is_refused(tmp_path: Path) -> None:
    assert read_part(tmp_path, KV_RESULTS, ["policy"], layer=ALL).columns.to_list() == ["policy"]
    (tmp_path / "kv.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(InputError, match=r"kv\.parquet is damaged"):
        read_part(tmp_path, KV_RESULTS, layer=ALL)
