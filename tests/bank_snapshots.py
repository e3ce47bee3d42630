"""Rows in the snapshots of a bank, read without raycl's reader."""

import io

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from raycl.storage import Place


def rows_in_snapshot(output: Place, step: int) -> dict[str, np.ndarray]:
    """Return ``sample_id`` and ``step`` of the rows of all shards, shard by shard, in the order of slots."""
    folder = output / "bank" / f"step-{step:08d}"
    names = sorted(path for path, _ in folder.files() if path.endswith(".parquet"))
    held = pd.concat([_rows_of_shard(output, step, name) for name in names])
    return {name: held[name].to_numpy() for name in ("sample_id", "step")}


def _rows_of_shard(output: Place, step: int, name: str) -> pd.DataFrame:
    """Return the rows of a file, and those before them that it continues."""
    table = pq.read_table(io.BytesIO((output / "bank" / f"step-{step:08d}" / name).read_bytes()))
    rows, facts = table.select(["sample_id", "step"]).to_pandas(), table.schema.metadata
    if b"after_step" not in facts:
        return rows
    earlier = _rows_of_shard(output, int(facts[b"after_step"]), name)
    return pd.concat([earlier, rows]).drop_duplicates("sample_id", keep="last").sort_values("sample_id")
