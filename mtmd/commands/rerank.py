"""`mtmd rerank`: documents ordered by how relevant they are to a query, by a reranker."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtmd.base.text import for_terminal, one_line
from mtmd.commands.arguments import add_options
from mtmd.commands.shared import add_list_argument, add_output_arguments, loading, settle_threads
from mtmd.options.load import RERANKER_OPTIONS, LoadOptions

HELP = "Order documents, texts and pictures, by how relevant they are to a query."
EXAMPLES = """\
mtmd rerank "the invoice of May" pages/ notes.txt -m org/reranker
mtmd rerank --query-image dog.jpg photos/ -m org/reranker --top 5
grep -h beach diary/* | mtmd rerank "a walk with the dog" - -m org/reranker
"""
MAX_TEXT = 1 << 20  # bytes of a document
MAX_LINES = 64 << 20  # and of standard input
# Of files in folders; one that is named may have any that is not a picture's or a video's.
TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst")

SHORT = (
    *("--model", "--text", "--query-image", "--instruction", "--top", "--list", "--json"),
    *("--quiet", "--device", "--threads", "--context"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "words",
        nargs="*",
        metavar="QUERY DOCUMENT",
        help="the query, unless --query-image shows it, then documents: files of texts, pictures "
        "and videos, folders of pictures, patterns; - reads standard input, where each line is a "
        "document",
    )
    sub.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        help="a reranker: folder, GGUF file, or org/name on the Hugging Face hub",
    )
    add_list_argument(sub)
    sub.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="TEXT",
        help="a document, after those in files; may be repeated",
    )
    sub.add_argument("--query-image", metavar="IMAGE", help="a picture or video as the query")
    sub.add_argument(
        "--instruction",
        metavar="TEXT",
        help="what makes a document relevant, in words (default: the model's own)",
    )
    sub.add_argument(
        "--top", type=int, metavar="N", help="number of documents to show (default: all)"
    )
    add_output_arguments(sub)
    group = sub.add_argument_group("model and device")
    add_options(group, LoadOptions, RERANKER_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """0 where every document has its score, 1 where some failed."""
    query, words = _query(args)
    names, documents, failed = _documents(args, words)
    from mtmd.embedding.reranker import load_reranker

    chosen = {
        name: getattr(args, name)
        for name in RERANKER_OPTIONS
        if getattr(args, name) not in (None, [], False)
    }
    with loading(args.model) as status:
        if not Path(args.model).exists():
            status.clear()  # the hub's own bars come in its place
        model = load_reranker(args.model, progress=sys.stderr.isatty(), **chosen)
    settle_threads(args.threads, [model])
    result = model.rerank(
        query, documents, instruction=args.instruction, top_n=args.top, on_error="return"
    )
    failed |= {names[index]: reason for index, reason in result.failed.items()}
    for name, reason in failed.items():
        print(for_terminal(f"mtmd rerank: {one_line(name)}: {reason}"), file=sys.stderr)
    ranked = [
        {"document": names[one.index], "index": one.index, "score": one.score}
        for one in result.results
    ]
    if args.json:
        shown: dict[str, Any] = {"query": args.query_image or query, "results": ranked}
        print(json.dumps(shown | {"failed": failed, "receipt": result.receipt.asdict()}))
    else:
        for rank, one in enumerate(ranked, 1):
            shown_name = one_line(str(one["document"]), 200)
            print(for_terminal(f"{rank:4}  {one['score']:.4f}  {shown_name}"))
    if not (args.json or args.quiet):
        print(for_terminal(str(result.receipt)), file=sys.stderr)
    return 1 if failed else 0


def _query(args: argparse.Namespace) -> tuple[Any, list[str]]:
    """The query, and the words that name documents. Raises OptionError, before torch is
    imported.
    """
    from mtmd.base.errors import OptionError

    if args.top is not None and args.top < 1:
        raise OptionError(f"--top: found {args.top}, expected 1 or more")
    if args.query_image is not None:
        query: Any = {_kind(args.query_image): args.query_image}
        words = args.words
    elif args.words:
        query, words = args.words[0], args.words[1:]
    else:
        raise OptionError("found no query; give a text, or a picture with --query-image")
    if not (words or args.text or args.list):
        raise OptionError(
            "found no document to rank; give files, - for lines of standard input, or --text TEXT"
        )
    return query, words


def _documents(
    args: argparse.Namespace, words: Sequence[str]
) -> tuple[list[str], list[Any], dict[str, str]]:
    """Names of the documents, the documents, and why files could not be read."""
    from mtmd.base.errors import OptionError
    from mtmd.batch.inputs import SUFFIXES, check_urls, find_inputs

    names: list[str] = []
    documents: list[Any] = []
    failed: dict[str, str] = {}
    named = [word for word in words if word != "-"]
    if named or args.list:
        inputs = find_inputs(named, args.list, (*SUFFIXES, *TEXT_SUFFIXES)).inputs
        check_urls(inputs, args.allow_remote_media)
        for one in inputs:
            if (kind := _kind(one.path)) != "text" or one.is_url:
                documents.append({"image" if kind == "text" else kind: one.path})
            else:
                try:
                    documents.append(_text(Path(one.path)))
                except OptionError as error:
                    failed[one.name] = str(error)
                    continue
            names.append(one.name)
    if "-" in words:
        if "-" in args.list:
            raise OptionError("-: found twice, expected once: standard input is read once")
        text = _decoded(sys.stdin.buffer.read(MAX_LINES + 1), MAX_LINES)
        lines = [line for line in text.splitlines() if line.strip()]
        names, documents = names + lines, documents + lines
    names, documents = names + args.text, documents + args.text
    if not documents:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise OptionError(reasons or "standard input: found no line with a document")
    return names, documents, failed


def _kind(path: str) -> str:
    """Return what a file is, by its ending."""
    from mtmd.prompt.picture_paths import IMAGE_SUFFIXES, VIDEO_SUFFIXES

    if path.startswith("data:"):
        return "video" if path.startswith("data:video") else "image"
    ending = Path(path).suffix.lower()
    return "video" if ending in VIDEO_SUFFIXES else "image" if ending in IMAGE_SUFFIXES else "text"


def _text(path: Path) -> str:
    """A file of text. Raises OptionError."""
    from mtmd.base.errors import OptionError
    from mtmd.base.files import open_regular

    try:
        with open_regular(path) as file:
            data = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise OptionError(f"cannot be read: {error.strerror}") from error
    return _decoded(data, MAX_TEXT)


def _decoded(data: bytes, maximum: int) -> str:
    from mtmd.base.errors import OptionError

    if len(data) > maximum:
        raise OptionError(f"found more than {maximum >> 20} MiB; cut the text into documents")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise OptionError("found bytes that are no UTF-8, expected text or a picture") from error
