"""A process that reads a run of chapters, and saves its state as it goes.

::

    state.json --> loader         if there is one
    batch --> report              one line of JSON per batch, for the parent
          '-> every third batch: state.json, written under another name, then renamed

Started by ``streampack demo --chapters`` as ``python -m streampack.cli.demo.read CONFIG STATE``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.demo.processes import Report, replaced, send
from streampack.cli.demo.train import batch_digest
from streampack.loader.loader import PackedDataLoader

SAVE_EVERY = 3  # inside global batches of four, too


def read(config: Path, state: Path | None = None) -> Iterator[Report]:
    """Read the batches that follow a saved state, and save it as they come; yield their reports.

    The file of the state need not exist yet. None: the run begins, and saves no state.
    """
    dataset = build_dataset(read_config(config), config)
    loader, number = PackedDataLoader(dataset), 0
    if state is not None and state.exists():
        saved = json.loads(state.read_text(encoding="utf-8"))
        loader.load_state_dict(saved["loader"])
        number = saved["step"]
    names = dataset.stream_names
    for batch in loader:
        number += 1
        tokens: Counter[str] = Counter()
        begun = []
        for _, stream, _, sample, start, length in batch["segments"].tolist():
            tokens[names[stream]] += length
            if start == 0:
                begun.append([names[stream], sample])
        yield {
            "step": number,
            "chapter": batch["epoch"],
            "batch": batch_digest(batch),
            "tokens": tokens,
            "begun": begun,
        }
        # After its report, so that no state is ahead of what the parent was told.
        if state is not None and number % SAVE_EVERY == 0:
            with replaced(state) as part:
                part.write_text(json.dumps({"step": number, "loader": loader.state_dict()}))


if __name__ == "__main__":
    send(read(Path(sys.argv[1]), Path(sys.argv[2])))
