"""Sources of text with something wrong in them: read as a naive reader reads them, or refused in one line."""

import gzip
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets

from looped_recipes.data import shards, sources
from looped_recipes.settings.recipe import DataConfig
from tests.faults.campaign import Trial


WORDS = "loop depth state norm exit gate größer 日本 🙂 “quoted” a\\b {brace} <|bos|> 1.5 2020-01-01 null".split()
NAMES = """a[1] a[!b] [] a{1,2} a* a? b** a#b a%20b a&b a+b a=b a,b a;b 'a' "a" $HOME -a --help ~a .hidden __a__ größer
    日本 🙂 a..b a::b con {a} (a) a@b a^b !a a\\b a|b http:x README""".split()
NAMES += ["a b", " a", "a ", "a\nb", "x" * 200, "train-0001", "state", "a.b.c"]
BRACKETS = "brackets beside the file that they would stand for"


class Naive(Exception):
    """What a naive reader cannot read."""


def naive_lines(content: bytes, field: str = "text") -> list[str]:
    """Texts of lines of JSON that are not blank; two that lost the end of line between them are two as before."""
    texts = []
    for line in map(str.strip, content.decode("utf-8-sig").split("\n")):
        while line:
            row, end = json.JSONDecoder().raw_decode(line)
            row = {} if row is None else row  # an empty document
            if not isinstance(row, dict) or not isinstance(row.get(field), (str, type(None))):
                raise Naive(f"no text in {line[:50]!r}")
            texts.append(row.get(field))
            line = line[end:].strip()
    return kept(texts)


def naive_text(content: bytes) -> list[str]:
    text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    return kept([text])


def kept(texts: list[str | None]) -> list[str]:
    return [text for text in texts if text and not text.isspace()]


def naive(path: Path) -> list[str]:
    content = path.read_bytes()
    if path.name.endswith(".gz"):
        content = gzip.decompress(content)
    return naive_text(content) if ".txt" in path.name else naive_lines(content)


# Faults


def documents(draw: random.Random) -> list[str]:
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(draw.randint(1, 30))]


def lines_of(texts: list) -> list[bytes]:
    return [json.dumps({"text": text, "n": i}, ensure_ascii=i % 2 == 0).encode() for i, text in enumerate(texts)]


ODD_LINES = [
    b"junk",
    b"{",
    b"[1",
    b'{"text": }',
    b"null",
    b"3",
    b'"a"',
    b"{}",
    b"[]",
    b'{"body": "x"}',
    b"\xff",
    b"\x00",
    b'{"text": "a", "text": "b"}',
    b'{"text": "a"} x',
    b'{"text": "a\\ud800"}',
    b'{"text": NaN}',
    b'{"text": "a',
    b"{'text': 'a'}",
    b'{"text": "a",}',
    b'{"Text": "a"}',
    b'{"text": "a", "n": "word"}',
    b'{"text": "a", "n": {}}',
    b"true",
    b"null {}",
    b"-1",
    b"[null]",
    b"   ",
    b"\t",
    b"// note",
    b'{"text": "tab\there"}',
]
ODD_TEXTS = [
    None,
    "",
    "  \n",
    3,
    1.5,
    True,
    ["a"],
    {"a": "b"},
    "2020-01-01",
    "2020-01-01T00:00:00Z",
    "12",
    "true",
    "a\0b",
    "a\u2028b",
    "a\x85b",
    "a\x1cb\x0c",
    "a\r\nb",
    "\ufeff",
    "x" * 200_000,
    "\\",
    '"',
    "<|eos|>",
]


def odd_line(draw: random.Random, lines: list[bytes]) -> tuple[str, bytes]:
    line = draw.choice(ODD_LINES)
    lines.insert(draw.randint(0, len(lines)), line)
    return f"a line {line!r}", b"\n".join(lines) + b"\n"


def odd_text(draw: random.Random, lines: list[bytes]) -> tuple[str, bytes]:
    text, count = draw.choice(ODD_TEXTS), draw.choice([1, 1, 40])
    at = draw.randint(0, len(lines))
    lines[at:at] = lines_of([text] * count)
    return f"{count} texts {text!r:.40} at {at}", b"\n".join(lines) + b"\n"


def odd_bytes(draw: random.Random, lines: list[bytes]) -> tuple[str, bytes]:
    whole = b"\n".join(lines) + b"\n"
    at = draw.randrange(len(whole))
    words, content = draw.choice(
        [
            ("nothing", whole),
            (f"cut at {at}", whole[:at]),
            (f"a wrong byte at {at}", whole[:at] + b"\xff" + whole[at:]),
            (f"a lost byte at {at}", whole[:at] + whole[at + 1 :]),
            (f"a flipped bit at {at}", whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]),
            ("empty", b""),
            ("line ends alone", b"\n\n\n"),
            ("CRLF", whole.replace(b"\n", b"\r\n")),
            ("BOM", b"\xef\xbb\xbf" + whole),
            ("BOM within", whole + b"\xef\xbb\xbf" + whole),
            ("UTF-16", whole.decode().encode("utf-16")),
            ("no last line end", whole[:-1]),
            ("blank lines", whole.replace(b"\n", b"\n\n")),
            ("twice", whole + whole),
            ("zeros at the end", whole + b"\0" * 64),
            ("a page of zeros", whole[:at] + b"\0" * 4096 + whole[at:]),
        ]
    )
    return words, content


def odd_gzip(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    packed = gzip.compress(content)
    at = draw.randrange(len(packed))
    return draw.choice(
        [
            ("gzip", packed),
            (f"gzip cut at {at}", packed[:at]),
            ("gzip in two members", packed + gzip.compress(b"")),
            ("no gzip", content),
            ("gzip and junk", packed + b"junk"),
            ("gzip of nothing", gzip.compress(b"")),
            (f"gzip with a flipped bit at {at}", packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]),
        ]
    )


# Trials


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    datasets.disable_progress_bars()
    draw = random.Random(seed)
    number = 0
    while True:
        deck = [one_file] * 8 + [odd_name] * 4 + [two_files] * 4 + [no_file] * 2 + [prepared]
        draw.shuffle(deck)
        for trial in deck:
            number += 1
            here = folder / str(number)
            here.mkdir()
            yield trial(draw, here)


def made_file(draw: random.Random, folder: Path, stem: str = "file") -> tuple[str, Path]:
    kind = draw.choice(["jsonl", "jsonl", "jsonl", "jsonl.gz", "txt", "txt.gz", "ndjson"])
    if "txt" in kind:
        words, content = odd_bytes(draw, [text.encode() for text in documents(draw)])
    else:
        words, content = draw.choice([odd_line, odd_text, odd_bytes])(draw, lines_of(documents(draw)))
    if kind.endswith("gz"):
        more, content = odd_gzip(draw, content)
        words = f"{words}, {more}"
    path = folder / f"{stem}.{kind}"
    path.write_bytes(content)
    return f"{path.name}: {words}", path


def one_file(draw: random.Random, folder: Path) -> Trial:
    words, path = made_file(draw, folder)
    return compared(words, str(path), [path], streaming=draw.random() < 0.3)


def odd_name(draw: random.Random, folder: Path) -> Trial:
    """A file of a strange name beside others, of which a pattern might take one for it."""
    stem, kind = draw.choice(NAMES), draw.choice(["jsonl", "txt"])
    for other in ("a1", "ab", "b", "aXb", "a", "a 1"):
        (folder / f"{other}.{kind}").write_bytes(b"\n".join(lines_of(["another file"])))
    path = folder / f"{stem}.{kind}"
    if draw.random() < 0.2:
        path = folder / stem.replace("/", "") / f"file.{kind}"
        path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\n".join(lines_of(documents(draw))) + b"\n")
    how = draw.choice(["file", "file", "folder"])
    if how == "folder":
        path = folder / "alone" / path.name
        path.parent.mkdir()
        path.write_bytes(b"\n".join(lines_of(documents(draw))) + b"\n")
    name = str(path.parent if how == "folder" else path)
    fault, streaming = f"{how} {path.name!r} in {path.parent.name!r}", draw.random() < 0.3
    if how == "folder" or draw.random() < 0.5:
        return compared(fault, name, [path], streaming)
    with inside(path.parent):
        return compared(f"{fault}, from there", path.name, [path], streaming)


@contextmanager
def inside(folder: Path):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def two_files(draw: random.Random, folder: Path) -> Trial:
    """The second file has other values than the first; as a folder and as a pattern."""
    first = draw.choice([lines_of(documents(draw)), lines_of([None, None]), lines_of(["2020-01-01"]), lines_of([3])])
    (folder / "1.jsonl").write_bytes(b"\n".join(first) + b"\n")
    words, content = draw.choice([odd_line, odd_text, odd_bytes])(draw, lines_of(documents(draw)))
    (folder / "2.jsonl").write_bytes(content)
    name = draw.choice([str(folder), str(folder / "*.jsonl"), str(folder / "?.jsonl")])
    files = [folder / "1.jsonl", folder / "2.jsonl"]
    return compared(
        f"{name[len(str(folder)) :] or 'folder'}: {first[0]!r:.40} and {words}", name, files, draw.random() < 0.3
    )


def no_file(draw: random.Random, folder: Path) -> Trial:
    path = folder / draw.choice(["x.jsonl", "x.txt"])
    words, make = draw.choice(
        [
            ("nothing there", lambda: None),
            ("a folder", path.mkdir),
            ("a dead link", lambda: path.symlink_to("nowhere")),
            ("a link to itself", lambda: path.symlink_to(path)),
            ("a pipe", lambda: os.mkfifo(path)),
            ("a name too long", lambda: None),
            (BRACKETS, lambda: (folder / "a1.jsonl").write_text('{"text": "a"}')),
            ("somebody's home", lambda: None),
            ("a kind nobody knows", lambda: (folder / "a.xyz").write_text("text")),
            ("a file that nobody may read", lambda: (path.write_bytes(b"\xff"), path.chmod(0))),
        ]
    )
    make()
    name = {
        "a name too long": "x" * 5000 + ".jsonl",
        BRACKETS: str(folder / "a[1].jsonl"),
        "somebody's home": "~nobody-of-this-name/x.jsonl",
        "a kind nobody knows": str(folder / "a.xyz"),
    }.get(words, str(path))
    return compared(words, name, None, streaming=draw.random() < 0.3)


def prepared(draw: random.Random, folder: Path) -> Trial:
    """All the way to shards: the documents are counted, none is lost unheard."""
    texts = [f"{i} {text}" for i, text in enumerate(documents(draw) * 4)] + [None, "", " "] * draw.randint(0, 3)
    draw.shuffle(texts)
    path = folder / "file.jsonl"
    path.write_bytes(b"\n".join(lines_of(texts)) + b"\n")
    fields = {"sequence_length": 8, "validation_fraction": 0.3, "cache_dir": str(folder / "shards")}
    data = DataConfig(source=str(path), tokenizer_vocab_size=300, **fields)
    fault = f"{len(texts)} documents to shards"
    try:
        manifest = shards.prepare(data).manifest
    except Exception as error:
        return refusal(fault, error)
    counts = [manifest["counts"][split] for split in ("train", "validation")]
    found = [sum(count["documents"] for count in counts), sum(count["bytes"] for count in counts)]
    expected = [len(kept(texts)), sum(len(text.encode()) for text in kept(texts))]
    empty = manifest["empty_documents"]
    good = found == expected and empty == len(texts) - len(kept(texts))
    return Trial(fault, "right" if good else "silent", "" if good else f"{found} and {empty} empty, not {expected}")


def compared(fault: str, name: str, files: list[Path] | None, streaming: bool) -> Trial:
    """files: what the source stands for; None for nothing that could be read."""
    fault = f"{fault}{' streamed' if streaming else ''}"
    try:
        source = sources.training_source(DataConfig(source=name, streaming=streaming))
        with sources.readable(source):
            found = [row["text"] for row in source.load()]
    except Exception as error:
        return refusal(fault, error)
    try:
        if files is None:
            raise Naive("there is nothing to read")
        expected = [text for file in files for text in naive(file)]
    except Exception as error:
        return Trial(fault, "silent", f"read {found!r:.200}, where a naive reader says {error!r:.100}")
    texts = files[0].name.split(".")[-1] == "txt" or files[0].name.endswith(".txt.gz")
    same = "".join(found) == "".join(expected) if texts and expected else kept(found) == expected
    return Trial(fault, "right" if same else "silent", "" if same else f"read {found!r:.200}, not {expected!r:.200}")


def refusal(fault: str, error: Exception) -> Trial:
    said = str(error)
    good = isinstance(error, ValueError) and said and "\n" not in said and len(said) < 3000
    return Trial(fault, "refused" if good else "traceback", "" if good else f"{type(error).__name__}: {said[:300]!r}")
