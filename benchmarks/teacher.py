"""The embeddings of sentences by a model of Hugging Face, as a teacher or a guide of ``raycl train``.

    python benchmarks/teacher.py --data FILE --model FOLDER --output FOLDER [--column text] [--rows-per-file 65536]

FOLDER of the model holds a tokenizer too, such as all-MiniLM-L6-v2. The embedding of a sentence is the mean over its
tokens, computed in bfloat16. Sentences have the ids of the column ``sample_id``, or the numbers of their rows, as in a
run. The output is read by ``negatives.guide.query``.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from measuring import make_parser
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

BATCH, MAX_TOKENS = 256, 128


@torch.inference_mode()
def embed(model: torch.nn.Module, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the mean over tokens of each text, of unit length, [num_texts, dim]."""
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    values, mask = model(**tokens).last_hidden_state.float(), tokens["attention_mask"][..., None]
    return F.normalize((values * mask).sum(1) / mask.sum(1), dim=1)


def main() -> None:
    parser = make_parser(__doc__, data=Path, model=Path, output=Path, column="text", rows_per_file=65_536)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model).eval().to(torch.bfloat16)
    rows_of_data = pq.read_table(options.data)
    texts = [text or "" for text in rows_of_data[options.column].to_pylist()]
    if not all(isinstance(text, str) for text in texts):
        sys.exit(
            f"{options.column} must hold one text in each row; give the file from before the texts were grouped"
        )
    ids = np.arange(len(texts)) if "sample_id" not in rows_of_data.column_names else rows_of_data["sample_id"]
    options.output.mkdir(parents=True)
    began = time.monotonic()
    for first in range(0, len(texts), options.rows_per_file):
        rows = texts[first : first + options.rows_per_file]
        order = np.argsort([len(row) for row in rows], kind="stable")  # texts of one length need no padding
        found = np.empty((len(rows), model.config.hidden_size), np.float16)
        for at in range(0, len(rows), BATCH):
            chosen = order[at : at + BATCH]
            found[chosen] = embed(model, tokenizer, [rows[place] for place in chosen])
        own_ids = ids[first : first + len(rows)]
        table = pa.table({"sample_id": own_ids, "representation": list(found)})
        pq.write_table(table, options.output / f"{first:09d}.parquet")
        print(f"{first + len(rows):,} of {len(texts):,} texts, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
