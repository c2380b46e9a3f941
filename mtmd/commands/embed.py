"""`mtmd embed`: vectors of pictures and texts, from dual encoders and embedding models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtmd.base.text import for_terminal, one_line, plural
from mtmd.commands.arguments import add_options
from mtmd.commands.shared import (
    add_list_argument,
    add_output_arguments,
    add_remote_argument,
    loading,
    piped_picture,
    settle_threads,
)
from mtmd.options.load import EMBEDDER_OPTIONS, LoadOptions

HELP = "Embed images and texts in one vector space, find images by a text, label them."
EXAMPLES = """\
mtmd embed photos/ -m openai/clip-vit-base-patch32 --out photos.npz
mtmd embed --index photos.npz -m openai/clip-vit-base-patch32 --query "a dog on a beach"
mtmd embed cat.jpg -m openai/clip-vit-base-patch32 --labels "a cat,a dog,a bird"
"""
READ_AT_ONCE = 16  # pictures, so that progress shows and a bad one is known by its name

SHORT = (
    *("--model", "--text", "--query", "--labels", "--index", "--top", "--out", "--list"),
    *("--json", "--quiet", "--allow-remote-media", "--device", "--threads"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="picture files, folders (all pictures in them, at any depth), patterns and data URLs; "
        "- reads one picture from standard input",
    )
    add_remote_argument(sub)
    sub.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        help="a dual encoder or an embedding model: folder, or org/name on the Hugging Face hub",
    )
    add_list_argument(sub)
    sub.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text to turn into a vector, after the images; may be repeated",
    )
    sub.add_argument(
        "--instruction",
        metavar="TEXT",
        help="what the vectors are for, in words, for a model that reads it (default: the model's "
        "own)",
    )
    sub.add_argument(
        "--out", type=Path, metavar="FILE", help="output file: .npy, or .npz with the names"
    )
    sub.add_argument(
        "--index", type=Path, metavar="FILE", help="images from an earlier --out FILE.npz"
    )
    sub.add_argument(
        "--query",
        action="append",
        default=[],
        metavar="TEXT",
        help="show the images nearest to TEXT, by cosine; may be repeated",
    )
    sub.add_argument(
        "--top",
        type=int,
        default=10,
        metavar="N",
        help="number of images for a query (default: %(default)s)",
    )
    sub.add_argument(
        "--labels", metavar="A,B,...", help="show the probability of each label for each image"
    )
    add_output_arguments(sub)
    group = sub.add_argument_group("model and device")
    add_options(group, LoadOptions, EMBEDDER_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """0 where every image has its vector, 1 where some failed."""
    labels = _labels(args)
    _check(args, labels)
    from mtmd.batch.inputs import Input, check_urls, find_inputs
    from mtmd.embedding import vectors_file

    if args.out:
        vectors_file.check_path(args.out)
    given = args.images or args.list
    inputs: tuple[Input, ...] = ()
    if given:
        piped = piped_picture(args.images, args.list)
        inputs = find_inputs(args.images, args.list, piped=piped).inputs
        check_urls(inputs, args.allow_remote_media)
    from mtmd.embedding.embedder import load_embedder

    chosen = {
        name: getattr(args, name)
        for name in EMBEDDER_OPTIONS
        if getattr(args, name) not in (None, [])
    }
    with loading(args.model) as status:
        if not Path(args.model).exists():
            status.clear()  # the hub's own bars come in its place
        model: Any = load_embedder(args.model, progress=sys.stderr.isatty(), **chosen)
    settle_threads(args.threads, [model])
    import numpy as np

    from mtmd.base.errors import OptionError
    from mtmd.embedding.token_embedder import TokenEmbedder

    per_token = isinstance(model, TokenEmbedder)
    instruction = _instruction(args.instruction, model)
    names, vectors, receipts, failed = _embed(model, inputs, instruction)
    if args.index:
        indexed, stored = vectors_file.read(args.index, model.width, per_token)
        names, vectors = indexed + names, stored + vectors
    images = len(names)
    if args.text:
        result = model.embeddings(texts=args.text, **instruction)
        names, vectors = names + args.text, [*vectors, *result.vectors]
        receipts.append(result.receipt)
    if args.out:
        vectors_file.write(args.out, names, vectors, model.width)
    shown: dict[str, Any] = {"images": names[:images], "failed": failed, "width": model.width}
    if args.query:
        shown["queries"] = [
            _result(model, q, names[:images], vectors[:images], args.top, instruction)
            for q in args.query
        ]
    if labels:
        if per_token:
            raise OptionError(f"--labels: {model.name} gives no probabilities; use --query")
        pictures = np.array(vectors[:images]).reshape(-1, model.width)
        table = model.probabilities(pictures @ model.embed(texts=labels).T)
        shown["labels"] = [
            {"image": name, "probabilities": dict(zip(labels, map(float, row), strict=True))}
            for name, row in zip(names, table, strict=False)
        ]
    if args.json:
        print(json.dumps(shown | {"receipts": [r.asdict() for r in receipts]}))
    else:
        _show(shown, args.out, len(names))
    if not (args.json or args.quiet):
        for receipt in receipts:
            print(for_terminal(str(receipt)), file=sys.stderr)
    return 1 if failed else 0


def _instruction(instruction: str | None, model: Any) -> dict[str, Any]:
    """Return the keyword that says it. Raises OptionError for a model that reads none."""
    from mtmd.base.errors import OptionError
    from mtmd.embedding.decoder_embedder import DecoderEmbedder

    if instruction is None:
        return {}
    if not isinstance(model, DecoderEmbedder):
        raise OptionError(f"--instruction: {model.name} reads none; leave it out")
    return {"instruction": instruction}


def _labels(args: argparse.Namespace) -> list[str]:
    if args.labels is None:
        return []
    return [label.strip() for label in args.labels.split(",") if label.strip()]


def _check(args: argparse.Namespace, labels: list[str]) -> None:
    """Raises OptionError, before torch is imported."""
    from mtmd.base.errors import OptionError

    images = bool(args.images or args.list or args.index)
    if args.labels is not None and not labels:
        raise OptionError("--labels: found no label, expected some, with commas between them")
    if not images and not args.text:
        raise OptionError("found nothing to embed, expected IMAGE..., --index FILE or --text TEXT")
    if (args.query or labels) and not images:
        raise OptionError("--query and --labels are about images; give some, or --index FILE")
    if not (args.out or args.query or labels):
        raise OptionError("expected something to do with the vectors: --out, --query or --labels")
    if args.top < 1:
        raise OptionError(f"--top: found {args.top}, expected 1 or more")


def _embed(
    model: Any, inputs: Sequence[Any], instruction: dict[str, Any]
) -> tuple[list[str], list[Any], list[Any], dict[str, str]]:
    """Names, vectors [D], or matrices [T, D], and receipts of the pictures that could be read, and
    why others could not.
    """
    from tqdm import tqdm

    from mtmd.base.errors import ImageError
    from mtmd.prompt.load_image import load_image, read_url

    names: list[str] = []
    failed: dict[str, str] = {}
    vectors: list[Any] = []
    receipts: list[Any] = []
    bar = tqdm(total=len(inputs), unit="image", disable=None, dynamic_ncols=True, leave=False)
    for start in range(0, len(inputs), READ_AT_ONCE):
        pictures = []
        for one in inputs[start : start + READ_AT_ONCE]:
            try:
                stored = one.path if one.data is None else one.data
                source = read_url(one.path) if one.is_url else stored
                pictures.append(load_image(source, unnamed=one.name))
                names.append(one.name)
            except ImageError as error:
                failed[one.name] = str(error)
                print(for_terminal(f"mtmd embed: {error}"), file=sys.stderr)
        if pictures:
            result = model.embeddings(pictures, **instruction)
            vectors.extend(result.vectors)
            receipts.append(result.receipt)
        bar.update(len(inputs[start : start + READ_AT_ONCE]))
    bar.close()
    return names, vectors, _joined(receipts), failed


def _joined(receipts: list[Any]) -> list[Any]:
    """One receipt of all batches."""
    from dataclasses import replace

    if not receipts:
        return []
    return [
        replace(
            receipts[0],
            images=tuple(i for r in receipts for i in r.images),
            preprocess_ms=sum(r.preprocess_ms for r in receipts),
            encode_ms=sum(r.encode_ms for r in receipts),
        )
    ]


def _result(
    model: Any,
    query: str,
    names: list[str],
    vectors: list[Any],
    top: int,
    instruction: dict[str, Any],
) -> dict[str, Any]:
    import numpy as np

    from mtmd.embedding.token_embedder import TokenEmbedder, similarity

    (vector,) = model.embed(texts=[query], **instruction)
    if isinstance(model, TokenEmbedder):
        word, scores = "score", np.array([similarity(vector, page) for page in vectors])
    else:
        word, scores = "cosine", np.array([one @ vector for one in vectors])
    best = scores.argsort()[::-1][:top]
    return {"query": query, "images": [{"image": names[i], word: float(scores[i])} for i in best]}


def _show(shown: dict[str, Any], out: Path | None, count: int) -> None:
    for result in shown.get("queries", []):
        print(for_terminal(one_line(result["query"])))
        for rank, hit in enumerate(result["images"], 1):
            score = hit.get("cosine", hit.get("score"))
            hit_line = f"{rank:4}  {score:7.4f}  {one_line(hit['image'])}"
            print(for_terminal(hit_line))
    for row in shown.get("labels", []):
        best = sorted(row["probabilities"].items(), key=lambda pair: -pair[1])
        words = ", ".join(f"{one_line(label)} {p:.1%}" for label, p in best)
        print(for_terminal(f"{one_line(row['image'])}: {words}"))
    if out:
        print(f"{out}: {plural(count, 'vector')} of {shown['width']} numbers", file=sys.stderr)
