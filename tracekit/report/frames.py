"""Tables of a results folder as pandas frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tracekit.simulate.folder import read_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from tracekit.schema import Table


def read_frame(
    folder: Path, table: Table, columns: Sequence[str] | None = None, where: Any = None
) -> pd.DataFrame:
    """Return what ``read_table`` reads as a frame whose dictionary columns are strings.

    Categories would sort by code.
    """
    rows = read_table(folder, table, columns, where)
    plain = [
        one.with_type(pa.string()) if pa.types.is_dictionary(one.type) else one
        for one in rows.schema
    ]
    frame: pd.DataFrame = rows.cast(pa.schema(plain)).to_pandas()
    return frame
