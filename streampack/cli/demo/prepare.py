"""The demo's data: text --> tokenizer --> streams, by the same door as ``streampack write``.

::

    demo-output/text/code.jsonl           demo-output/streams/code/index.json, lengths.bin,
                manuals.jsonl    ----->                       shard.00000.mds.zstd ...
                docstrings.jsonl
                      '--> demo-output/tokenizer.json

What is there already is kept, so that a second run starts training at once.

Cost: about ten seconds on two cores for 12 MB of text, 3.2 million tokens.
"""

from __future__ import annotations
