"""index: write what is missing next to streams: length files, and indexes of token files."""

from streampack.index.lengths import Indexed, write_lengths

__all__ = ["Indexed", "write_lengths"]
