"""The verbs of the command line and their options, one frozen dataclass for each verb.

::

    class Inspect     -->  streampack inspect PATH --pack 2048 ...       typer reads the fields
    docstring         -->  the help page; its first line is the summary
    Inspect(...)      -->  streampack.cli.inspect.run_inspect(options)   imported when it is called

Only this module is imported for a help page.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Config = Annotated[Path, Argument(help="A run's YAML, such as run.yaml.")]
Tokens = Annotated[
    str,
    Option(help="Column of the token ids, by default input_ids too; of bytes: NAME:uint16."),
]
CheckDtypes = Annotated[
    bool, Option(help="Whether to refuse a type that values in a column of bytes contradict.")
]
Verify = Annotated[
    bool, Option("--verify", help="Read the shards again, and compare their hashes.")
]
StateFile = Annotated[Path | None, Option(help="A state of the run, as JSON, to compare with.")]
RanksPerNode = Annotated[
    int | None, Option(min=1, help="Ranks on each node; by default all are on one.")
]
Decoder = Annotated[
    Path | None, Option(help="tokenizer.json to decode with; without it, token ids.")
]
JsonAtEnd = Annotated[bool, Option("--json", help="Print one JSON line at the end.")]
JsonOnly = Annotated[bool, Option("--json", help="Print one JSON line, and no table.")]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options of the verbs that tokenize rows."""

    tokenizer: Annotated[
        Path | None,
        Option(help="A tokenizer.json, or a tokenizer's folder; without it, rows hold token ids."),
    ] = None
    backend: Annotated[
        str, Option(help="huggingface, or gigatoken: faster, and compared with it.")
    ] = "huggingface"
    text: Annotated[str, Option(help="Column of the text.")] = "text"
    chat: Annotated[
        str | None,
        Option(help="Column of conversations, or prompt or instruction; needs a chat template."),
    ] = None
    train_on: Annotated[
        str,
        Option(help="Targets of conversations: responses, last_response, each_response or all."),
    ] = "responses"
    chat_template: Annotated[
        Path | None, Option(help="File of a chat template to use instead of the tokenizer's.")
    ] = None
    template_kwargs: Annotated[
        str | None, Option(help="More arguments of the chat template, as a JSON object.")
    ] = None
    context_roles: Annotated[
        list[str] | None, Option(help="One more role of conversations that is not learned.")
    ] = None
    ignore_fields: Annotated[
        list[str] | None, Option(help="Field of conversations that is as if it was not there.")
    ] = None
    special_tokens: Annotated[
        str, Option(help="Texts that spell a special token, such as </s>, get its ids, or text.")
    ] = "ids"
    on_bad_row: Annotated[str, Option(help="error, or skip: count it and skip it.")] = "error"


@dataclass(frozen=True, kw_only=True)
class Write(RowOptions):
    """Turn text, rows or token ids into a stream: MDS shards and a length file.

    The same command resumes an interrupted one: parts that are done are kept.
    """

    inputs: Annotated[
        list[str],
        Argument(
            help="Files (.jsonl, .txt, .md, .csv, .parquet, .arrow; plain, .gz or .zst), folders, "
            "globs, or URLs of them."
        ),
    ]
    out: Annotated[
        str | None, Option(help="The stream's folder or s3:// URL: new, or of the same job.")
    ] = None
    warm: Annotated[
        bool, Option("--warm", help="Tokenize the texts of a run ahead; the input is its YAML.")
    ] = False
    tokens: Tokens = "tokens"
    max_seq_len: Annotated[
        int | None,
        Option(help="Cut conversations to so many tokens; omit those without a target then."),
    ] = None
    columns: Annotated[
        list[str] | None,
        Option(help="Column to keep: url, hash:uint64, or a mask with an integer per token."),
    ] = None
    tokens_dtype: Annotated[
        str | None,
        Option(help="Integer type of the ids; by default the smallest that fits the tokenizer."),
    ] = None
    compression: Annotated[str, Option(help="Such as zstd or zstd:7, or none.")] = "zstd"
    size_limit: Annotated[str, Option(help="Shard size before compression.")] = "64mb"
    part_bytes: Annotated[str, Option(help="Bytes of input in a part.")] = "256mb"
    engine: Annotated[str, Option(help="processes of this machine, or ray.")] = "processes"
    num_workers: Annotated[
        int | None,
        Option(help="Tokenizing processes; by default one per core, or one for small inputs."),
    ] = None
    part: Annotated[
        str | None, Option(help="K/N: this machine's share of the parts; then: streampack merge.")
    ] = None
    append: Annotated[
        bool, Option("--append", help="Add inputs that the stream does not have yet.")
    ] = False
    max_bad_rows: Annotated[int, Option(help="Bad rows that may be skipped.")] = 1000
    verify: Verify = False
    as_json: JsonAtEnd = False


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Finish a stream that several machines wrote parts of."""

    path: Annotated[str, Argument(help="The stream's folder or s3:// URL.")]
    max_bad_rows: Annotated[
        int | None, Option(help="Bad rows that may have been skipped; by default any number.")
    ] = None
    verify: Verify = False
    as_json: JsonAtEnd = False


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Options of the verbs that read streams."""

    tokens: Tokens = "tokens"
    check_dtypes: CheckDtypes = True


@dataclass(frozen=True, kw_only=True)
class Index(ColumnOptions, RowOptions):
    """Write what streams lack: length files, with hashes where index.json has none, and indexes.

    With --tokenizer, the lengths of texts or conversations, for a run that tokenizes them.
    """

    paths: Annotated[
        list[str],
        Argument(help="Folders that hold streams, URLs of remote streams, token files, or texts."),
    ]
    local: Annotated[
        Path | None,
        Option(help="Folder to keep the shards of a remote stream in, or those of texts."),
    ] = None
    out: Annotated[
        str | None,
        Option(help="Folder for an index of token files, documents, JSON lines, CSV or texts."),
    ] = None
    transform: Annotated[
        str | None, Option(help="Function of rows of texts, as of Texts: module:function.")
    ] = None
    version: Annotated[str, Option(help="The version of --transform.")] = "1"
    format: Annotated[str | None, Option(help="Format of token files, as of TokenFiles.")] = None
    dtype: Annotated[
        str | None, Option(help="Integer type of the ids of raw token files, such as uint16.")
    ] = None
    trailing: Annotated[
        str | None,
        Option(help="What of tokens after the last document of a table, as of TokenFiles: ignore."),
    ] = None
    part: Annotated[
        str, Option(help="Of token files: every n-th file from the i-th on, as i/n.")
    ] = "1/1"
    resume: Annotated[
        bool, Option("--resume", help="Keep token files that an interrupted command indexed.")
    ] = False
    num_workers: Annotated[
        int | None,
        Option(min=1, help="Processes for token files or texts; by default one per core."),
    ] = None
    eos_id: Annotated[int | None, Option(help="With --out: the token that ends each document.")] = (
        None
    )
    bos_id: Annotated[int | None, Option(help="With --eos-id: the token that must follow it.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Inspect(ColumnOptions):
    """Show a stream: its parts, its shards, its lengths, one of its packs."""

    path: Annotated[str, Argument(help="The stream's folder, or the URL of a remote one.")]
    split: Annotated[str | None, Option(help="Subfolder of the stream.")] = None
    pack: Annotated[int, Option(min=1, help="Tokens in the pack that is drawn.")] = 2048
    tokenizer: Decoder = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Mix and pack as a config says, and show the statistics.

    Without --steps it takes one epoch.
    """

    config: Config
    steps: Annotated[
        int | None, Option(min=1, help="Batches to take, over as many epochs as that needs.")
    ] = None
    num_workers: Annotated[
        int | None, Option(min=0, help="Reading processes, in place of the config's num_workers.")
    ] = None
    as_json: JsonOnly = False


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """Options of the verbs that plan for all ranks."""

    config: Config
    num_ranks: Annotated[int, Option(min=1, help="Ranks that train together.")] = 1
    ranks_per_node: RanksPerNode = None
    replication: Annotated[
        int | None, Option(min=1, help="Ranks that share rows, in place of the config's.")
    ] = None
    context_parallel: Annotated[
        int | None, Option(min=1, help="Ranks that divide each row, in place of the config's.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Simulate(WorldOptions):
    """Plan a run as a config says, and show the statistics; no token is read.

    Without --steps it plans one epoch. Numbers are those of all ranks together.
    """

    steps: Annotated[
        int | None, Option(min=1, help="Batches of each rank, over as many epochs as that needs.")
    ] = None
    as_json: JsonOnly = False


@dataclass(frozen=True, kw_only=True)
class Report(WorldOptions):
    """Write a run as one HTML file: mixture, lengths, packs, nodes, and what was delivered.

    Without --steps it plans an epoch or the run, or the first steps of a long one.
    """

    steps: Annotated[
        int | None, Option(min=1, help="Batches of each rank to plan, at most an epoch.")
    ] = None
    state: StateFile = None
    stats: Annotated[
        Path | None, Option(help="The loader's stats(), as JSON: what was measured.")
    ] = None
    out: Annotated[Path, Option(help="The file to write.")] = Path("report.html")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show the chapters of a run before it runs: steps, shares, and passes through each stream."""

    config: Config
    state: StateFile = None
    as_json: JsonOnly = False


@dataclass(frozen=True, kw_only=True)
class LookBack:
    """Options of the verbs that look back at a run."""

    config: Config
    state: Annotated[
        Path | None, Option(help="A state of the run, as JSON: its worlds, amendments and skips.")
    ] = None
    devices: Annotated[
        int | None, Option(min=1, help="Without a state: ranks that got rows of their own.")
    ] = None
    ranks_per_node: RanksPerNode = None
    batch_size: Annotated[
        int | None, Option(min=1, help="Packs per batch and rank, in place of the config's.")
    ] = None
    as_json: JsonOnly = False


@dataclass(frozen=True, kw_only=True)
class At(LookBack):
    """Show which data was in a step of a run: packs, segments, texts.

    A step is a global batch, counted from 0 over all epochs or chapters. The run is planned from
    its start, or from a state before the step.
    """

    step: Annotated[int, Option(min=0, help="The step.")]
    rank: Annotated[int | None, Option(min=0, help="Show the rows of this rank only.")] = None
    text: Annotated[
        bool, Option("--text", help="Show the other columns and the text of each segment.")
    ] = False
    tokenizer: Decoder = None


@dataclass(frozen=True, kw_only=True)
class Where(LookBack):
    """Show in which steps of a run a sample was, and in which rows."""

    sample: Annotated[str, Argument(help="Stream and number of the sample, such as web/123456.")]
    upto: Annotated[int | None, Option(min=0, help="The last step to look at.")] = None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two runs: what differs, and from which step on the packs do."""

    config: Annotated[Path, Argument(help="The YAML of a run.")]
    other: Annotated[Path, Argument(help="The YAML of another.")]
    devices: Annotated[int, Option(min=1, help="Ranks that get rows of their own.")] = 1
    ranks_per_node: RanksPerNode = None
    upto: Annotated[
        int | None, Option(min=0, help="The last step to compare; by default that of an epoch.")
    ] = None
    as_json: JsonOnly = False


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Write real text as streams, show its packs, and write a report; offline."""

    out: Annotated[Path, Option(help="Folder for everything.")] = Path("demo-output")


VERBS: dict[str, type] = {
    "write": Write,
    "merge": Merge,
    "index": Index,
    "inspect": Inspect,
    "run": Run,
    "simulate": Simulate,
    "plan": Plan,
    "report": Report,
    "at": At,
    "where": Where,
    "diff": Diff,
    "demo": Demo,
}
