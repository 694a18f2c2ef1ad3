"""The next command to type after a mistake.

::

    $ streampack inspect rows.parquet
    error: rows.parquet/index.json: does not exist; ...
    try: streampack write rows.parquet --text body --tokenizer tokenizer.json --out rows

It follows from the verb, its arguments, the message in the words of the command line, and the files
that the arguments name. Without a proposal there is none: a wrong one is worse.

Cost: for a file of rows, one read of its first row; at most one listing of a folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from streampack._paths import is_url
from streampack.cli.write_command import name_for, tokenizer_near, write_arguments
from streampack.errors import StreampackError
from streampack.write.inputs.listing import format_of

INDEX, JOB = "index.json", "job.json"
CONFIG_VERBS = ("run", "plan", "simulate", "demo")
PATH_OPTIONS = ("--config", "--state", "--stream", "--tokenizer")
VALUE = r"'?([\w./:-]+)'?"
# "--tokens idz ... did you mean 'ids'?", "set --tokens to 'ids'", "set --on-bad-row skip"
MEANT = re.compile(rf"^(--[\w-]+) .*did you mean {VALUE}\?")
SET_TO = re.compile(rf"set (--[\w-]+) to {VALUE}(?=$|[;,. ])")
SET = re.compile(rf"set (--[\w-]+) {VALUE}(?= to |$|[;,.])")
LEFT_OUT = re.compile(r"leave out (--[\w-]+)|(--[\w-]+) has nothing[^;]*; leave it out")
OTHER_VERB = re.compile(r"use `streampack (\w+)`")
CHOICES = re.compile(r"^(--[\w-]+) \S+ is not one of ")
WRONG = re.compile(r"(--[\w-]+) \S+(?: \(bytes\))?(?= (?:must be|is not|leaves no room)|$|[;,.])")
NEAR = 0.75  # "a.txt" is not near "nope.txt"
WORDS_OF_SET = ("a", "another", "it", "one", "the", "to", "what")


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command that failed, and its message."""

    verb: str
    arguments: Sequence[str]
    """Its arguments after the verb."""
    flags: frozenset[str]
    """Options of the verb that take no value."""
    message: str

    def command(self, arguments: Sequence[str]) -> str:
        """Return a command line of the verb."""
        return shlex.join(["streampack", self.verb, *arguments])

    def is_same(self, command: str) -> bool:
        """Return whether a command has the same arguments, in any order."""
        return sorted(shlex.split(command)) == sorted(["streampack", self.verb, *self.arguments])

    def paths(self) -> list[str]:
        """Return the arguments that name files: positional ones, and those of some options."""
        found, option = [], None
        for argument in self.arguments:
            if option is None and argument.startswith("--"):
                option = None if argument in self.flags or "=" in argument else argument
                continue
            if option in (None, *PATH_OPTIONS):
                found.append(argument)
            option = None
        return found

    def value_of(self, option: str) -> str | None:
        """Return the value that an option was given, or None."""
        given = list(self.arguments)
        return given[given.index(option) + 1] if option in given else None

    def with_option(self, option: str, value: str) -> str:
        """Return the command with an option set."""
        kept = list(self.arguments)
        if option in kept:
            kept[kept.index(option) + 1 : kept.index(option) + 2] = [value]
        else:
            kept += [option, value]
        return self.command(kept)

    def without_option(self, option: str) -> str:
        """Return the command without an option."""
        kept = list(self.arguments)
        place = kept.index(option)
        del kept[place : place + (1 if option in self.flags else 2)]
        return self.command(kept)

    def with_input(self, arguments: Sequence[str]) -> str:
        """Return the command with other arguments of its input."""
        kept, arguments = list(self.arguments), list(arguments)
        for option in ("--text", "--tokens", "--chat", "--tokenizer"):
            if option in kept:
                del kept[kept.index(option) : kept.index(option) + 2]
        tokenizer = self.value_of("--tokenizer")
        if tokenizer is not None and "--tokenizer" in arguments:
            arguments[arguments.index("--tokenizer") + 1] = tokenizer
        place = kept.index(arguments[0])
        return self.command([*kept[:place], *arguments, *kept[place + 1 :]])


def proposal_for(mistake: Mistake) -> str | None:
    """Return a line with the command to try next, or None.

    >>> message = "--kind webb is not one of web|sft - did you mean 'web'?"
    >>> proposal_for(Mistake("compare-packers", ["--kind", "webb"], frozenset(), message))
    'try: streampack compare-packers --kind web'
    """
    for rule in (_by_path, _by_option, _by_output, _by_config):
        with suppress(StreampackError, OSError):
            command = rule(mistake)
            if rule is _by_config and command is not None:
                return command
            if command is not None and not mistake.is_same(command):
                return f"try: {command}"
    return None


def _by_path(mistake: Mistake) -> str | None:
    """Propose a verb that fits the kind of a file, or a file that exists."""
    for path in mistake.paths():
        if is_url(path):
            continue
        file = Path(path)
        if not file.exists():
            magic = re.search(r"[*?[]", path)
            if magic is None or mistake.verb != "write":
                return _by_missing_path(mistake, path)
            folder = Path(path[: magic.start()]).parent
            return _list_of(folder) if "0 files" in mistake.message else None
        if mistake.verb in CONFIG_VERBS and (format_of(path) or file.is_dir()):
            return _for_data(path)
        if mistake.verb == "write":
            return _for_input(mistake, path)
        if mistake.verb not in CONFIG_VERBS:
            if not (file / (JOB if mistake.verb == "merge" else INDEX)).exists():
                return _for_data(path)
            if "does not exist" not in mistake.message:
                return None
    return None


def _for_input(mistake: Mistake, path: str) -> str | None:
    """Propose the columns that a file has, or what else can be done with it."""
    message = mistake.message
    if path in mistake.arguments and (Path(path) / INDEX).exists():
        return f"streampack inspect {shlex.quote(path)}"
    lines = re.search(r"make lines of it: (datasets\..*)$", message)
    if lines:
        return f"python -c {shlex.quote(f'import datasets; {lines[1]}')}"
    if "is not a supported file" in message or "0 files" in message:
        return _list_of(Path(path).parent)
    if re.search(r"row \d+: (?:no )?column '", message):
        return mistake.with_input(write_arguments(path))
    return None


def _by_missing_path(mistake: Mistake, path: str) -> str:
    folder = Path(path).parent
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    near = get_close_matches(Path(path).name, names, n=1, cutoff=NEAR)
    if near:
        found = str(folder / near[0])
        return mistake.command([found if each == path else each for each in mistake.arguments])
    return _list_of(folder)


def _list_of(folder: Path) -> str:
    while not folder.is_dir():
        folder = folder.parent
    return f"ls {shlex.quote(str(folder))}"


def _for_data(path: str) -> str | None:
    """Propose what can be done with a file or a folder that exists."""
    file = Path(path)
    if file.is_dir():
        for name, verb in ((INDEX, "inspect"), (JOB, "merge")):
            if (file / name).exists():
                return f"streampack {verb} {shlex.quote(path)}"
        below = sorted(file.glob(f"*/{INDEX}"))
        if below:
            return f"streampack inspect {shlex.quote(str(below[0].parent))}"
        if not any(file.iterdir()):
            return _list_of(file.parent)
    arguments = ["write", *write_arguments(path), "--out", name_for(path)]
    return shlex.join(["streampack", *arguments])


def _by_option(mistake: Mistake) -> str | None:
    """Propose the option and value that the message names."""
    message, given = mistake.message, mistake.arguments
    if meant := MEANT.search(message):
        return mistake.with_option(meant[1], meant[2])
    if "set --tokenizer" in message or message.startswith("--tokenizer "):
        tokenizer = tokenizer_near(".", is_for_chat="--chat" in given)
        path = Path(mistake.value_of("--tokenizer") or ".")
        is_model = not path.suffix and not path.exists()  # another one would have other ids
        if tokenizer in given or is_model:
            return None
        return mistake.with_option("--tokenizer", tokenizer)
    if (left_out := LEFT_OUT.search(message)) and (left_out[1] or left_out[2]) in given:
        return mistake.without_option(left_out[1] or left_out[2])
    found = SET_TO.search(message) or SET.search(message)
    if found and found[2] not in WORDS_OF_SET and found[1] not in mistake.flags:
        return mistake.with_option(found[1], found[2])
    if (choices := CHOICES.search(message)) and choices[1] in given:
        return mistake.without_option(choices[1])
    wrong = [option for option in WRONG.findall(message) if option in given]
    if WRONG.match(message) and wrong and wrong[0] != "--out":
        return mistake.without_option(wrong[-1])
    if "--split" in given and f"/{INDEX}: does not exist" in message:
        return mistake.without_option("--split")
    return None


def _by_output(mistake: Mistake) -> str | None:
    """Propose another name for an output that is taken, or a folder for one that is not a place."""
    out = mistake.value_of("--out")
    if out is None or not mistake.message.startswith("--out "):
        return None
    return mistake.with_option("--out", name_for(out, "" if is_url(out) else str(Path(out).parent)))


def _by_config(mistake: Mistake) -> str | None:
    """Propose to make the stream that a config lacks, or to check the edited config."""
    if mistake.verb not in CONFIG_VERBS:
        return None
    files = [path for path in mistake.paths() if path.endswith((".yaml", ".yml"))]
    if files and (verb := OTHER_VERB.search(mistake.message)):
        return f"try: streampack {verb[1]} {shlex.quote(files[0])}"
    stream = re.match(rf"(\S+)/{INDEX}: does not exist", mistake.message)
    if stream and Path(stream[1]).exists():
        return f"try: {_for_data(stream[1])}"
    check = "plan" if mistake.verb == "plan" else "simulate"
    return f"after the edit, try: streampack {check} {shlex.quote(files[0])}" if files else None
