"""Train the demo model: the tower on dense labels first, then everything on questions.

    python tools/demo_model/train.py OUT --vision-minutes 8 --minutes 80 --grow-tokenizer 128

Writes a Gemma 3 checkpoint in the Hugging Face layout to OUT, every five minutes and at the end.
Muon for the hidden matrices, AdamW for the rest; bf16 compute on fp32 parameters. The dense labels
stay on as a small second loss until the last third.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from lessons import CHARACTERS, SPECIAL, TEXT_SHARE, TEXTS, Teacher, grow_tokenizer, train_tokenizer
from model import IMAGE_TOKENS, VISION, Gemma3, angles, config, pooled
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from world import COLORS, SHAPES, SIZES

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
LABELS = {
    "shape": len(SHAPES) + 1,
    "color": len(COLORS),
    "size": len(SIZES) + 1,
    "character": len(CHARACTERS) + 1,
    "cell": 9,
}
EMBEDDINGS = "language_model.model.embed_tokens.weight"
PICTURES = 96  # of a batch while the tower alone is trained
LABEL_WEIGHT = {"shape": 2.0, "color": 1.0, "size": 0.5, "character": 1.0, "cell": 0.1}


class DenseLabels(nn.Module):
    """What each patch shows, and what is written: heads that exist in training only."""

    def __init__(self, width: int):
        super().__init__()
        self.patch = nn.Linear(width, sum(LABELS.values()))
        self.text = nn.Linear(width, len(TEXTS) + 1)
        self.box = nn.Linear(width, 4)

    def forward(self, features: Tensor, labels: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """features [B, P, C], labels: patches [B, 5, P], text [B], boxes [B, 9, 4] -> the loss, and
        [shape, character, text] accuracies, then the mean error of boxes in half cells
        """
        patches, text = labels["patches"], labels["text"]
        guesses = self.patch(features.float()).split(list(LABELS.values()), -1)
        loss = torch.zeros(())
        for guess, label, weight in zip(
            guesses, patches.unbind(1), LABEL_WEIGHT.values(), strict=True
        ):
            loss = loss + weight * F.cross_entropy(guess.flatten(0, 1), label.flatten())
        stated = self.text(features.float().amax(1))
        loss = loss + 0.5 * F.cross_entropy(stated, text)
        real = ~labels["boxes"].isnan()
        away = (self.box(pooled(features.float())) - labels["boxes"].nan_to_num()).abs() * real
        error = away.sum() / real.sum().clamp(min=1)
        loss = loss + 2 * error
        thing, letter, written = (
            patches[:, 0] < len(SHAPES),
            patches[:, 3] < len(CHARACTERS),
            text < len(TEXTS),
        )
        right = [
            ((guesses[0].argmax(-1) == patches[:, 0]) & thing).sum() / thing.sum().clamp(min=1),
            ((guesses[3].argmax(-1) == patches[:, 3]) & letter).sum() / letter.sum().clamp(min=1),
            ((stated.argmax(-1) == text) & written).sum() / written.sum().clamp(min=1),
            error.detach(),
        ]
        return loss, torch.stack(right)


class Optimizer:
    """Muon on hidden matrices, AdamW on everything else, one cosine schedule over wall time."""

    def __init__(self, modules: nn.Module, lr: float, minutes: float):
        hidden, rest = [], []
        for name, p in modules.named_parameters():
            (
                hidden
                if p.ndim == 2 and "embed" not in name and not name.startswith("dense")
                else rest
            ).append(p)
        self.parameters = hidden + rest
        self.parts = [
            torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
        ]
        self.lr, self.seconds, self.start, self.steps = lr, minutes * 60, time.time(), 0

    @property
    def progress(self) -> float:
        return (time.time() - self.start) / self.seconds

    def step(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.steps += 1
        rate = (
            self.lr
            * min(1.0, self.steps / 100)
            * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress))))
        )
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Batches made in a second process."""

    def __init__(self, make: Callable[[], Iterator[dict[str, Tensor]]]):
        self.make = make

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.make()


class Pictures:
    def __init__(self, teacher: Teacher):
        self.teacher = teacher

    def __call__(self) -> Iterator[dict[str, Tensor]]:
        rng = random.Random(self.teacher.seed)
        while True:
            yield self.teacher.pictures(PICTURES, rng)


def scaled(pixels: Tensor) -> Tensor:
    """uint8 [B, 96, 96, 3] -> float [B, 3, 96, 96] in -1..1"""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vision(
    model: Gemma3,
    dense: DenseLabels,
    batches: Iterator[dict[str, Tensor]],
    minutes: float,
    lr: float,
) -> None:
    both = nn.ModuleDict({"tower": model.vision_tower, "dense": dense})
    optimizer = Optimizer(both, lr, minutes)

    @torch.compile
    def forward(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            features = model.see(scaled(batch["pixels"]))
        return dense(features, batch)  # type: ignore[no-any-return]

    right = torch.zeros(4)
    for batch in batches:
        loss, now = forward(batch)
        optimizer.step(loss)
        right = right.lerp(now.detach(), 0.02)
        if optimizer.steps % 200 == 0:
            print(
                f"vision {time.time() - optimizer.start:5.0f} s  step {optimizer.steps}  loss "
                f"{loss.item():.3f}  {_labels_known(right)}",
                flush=True,
            )
        if optimizer.progress >= 1:
            return


def train_labels(
    model: Gemma3, dense: DenseLabels, batches: Iterator[dict[str, Tensor]], steps: int
) -> None:
    """The heads of the dense labels for a tower that is trained already: heads that know nothing
    would pull it away from what it knows.
    """
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-2)
    for _ in range(steps):
        batch = next(batches)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            features = model.see(scaled(batch["pixels"]))
        loss, known = dense(features, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"labels {steps} steps  {_labels_known(known)}", flush=True)


def train_all(
    model: Gemma3,
    dense: DenseLabels,
    batches: Iterator[dict[str, Tensor]],
    minutes: float,
    lr: float,
    save: Callable[[], None],
) -> None:
    optimizer = Optimizer(nn.ModuleDict({"model": model, "dense": dense}), lr, minutes)

    @torch.compile
    def forward(
        batch: dict[str, Tensor], turns: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            features = model.see(scaled(batch["pixels"]))
            loss = model.loss(features, batch, turns)
        return loss, *dense(features, batch)

    average, right, saved = 0.0, torch.zeros(4), time.time()
    for batch in batches:
        loss, dense_loss, now = forward(batch, angles(batch.pop("positions")))
        weight = 0.3 * max(0.0, 1 - optimizer.progress / 0.7)
        optimizer.step(loss + weight * dense_loss)
        average += (loss.item() - average) * max(0.02, 1 / optimizer.steps)
        right = right.lerp(now.detach(), max(0.02, 1 / optimizer.steps))
        if optimizer.steps % 50 == 0:
            print(
                f"all {time.time() - optimizer.start:5.0f} s  step {optimizer.steps}  loss "
                f"{average:.4f}  {_labels_known(right)}",
                flush=True,
            )
        if time.time() - saved > 240:
            save()
            saved = time.time()
        if optimizer.progress >= 1:
            return


def _labels_known(right: Tensor) -> str:
    return (
        f"shape patches {right[0]:.3f}  character patches {right[1]:.3f}  text {right[2]:.3f}  "
        f"boxes off by {right[3]:.3f}"
    )


def grown_embeddings(embeddings: Tensor, old: Tokenizer, new: Tokenizer) -> Tensor:
    """[V, D] -> [V', D]: a new token begins as the mean of those that it is made of."""
    ids = new.get_vocab()
    rows = [*embeddings]
    for text, number in sorted(ids.items(), key=lambda entry: entry[1])[len(rows) :]:
        made_of = [t.id for t in old.model.tokenize(text)]
        assert number == len(rows)
        rows.append(embeddings[made_of].mean(0))
    return torch.stack(rows)


def write_checkpoint(model: Gemma3, tokenizer: Tokenizer, out: Path) -> None:
    """The published layout: bf16 weights, config, tokenizer, processor and generation settings,
    chat template.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = out / "model.safetensors.part"
    save_file(
        {
            name: p.detach().to(torch.bfloat16).contiguous()
            for name, p in model.state_dict().items()
        },
        written,
        metadata={"format": "pt"},
    )
    written.replace(out / "model.safetensors")  # a reader never sees half a file
    token = {s: tokenizer.token_to_id(s) for s in SPECIAL}
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "config.json": config(tokenizer.get_vocab_size(), token),
        "generation_config.json": {
            "bos_token_id": token["<bos>"],
            "eos_token_id": [token["<end_of_turn>"], token["<eos>"]],
            "pad_token_id": token["<pad>"],
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "size": {"height": VISION["image_size"], "width": VISION["image_size"]},
            "resample": 2,
            "rescale_factor": 1 / 255,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_seq_length": IMAGE_TOKENS,
        },
        "processor_config.json": {
            "processor_class": "Gemma3Processor",
            "image_seq_length": IMAGE_TOKENS,
        },
    }
    for name, content in settings.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--vision-minutes", type=float, default=8)
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument(
        "--rows",
        type=int,
        nargs=3,
        default=(6, 3, 5),
        metavar="N",
        help="rows of a batch about one picture, several, a video",
    )
    parser.add_argument(
        "--pictures", type=int, default=0, help="least pictures of a batch, for their dense labels"
    )
    parser.add_argument(
        "--text-share",
        type=float,
        default=TEXT_SHARE,
        help="of single pictures (default: %(default)s)",
    )
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--vision-lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--grow-tokenizer",
        type=int,
        default=0,
        metavar="N",
        help="add so many tokens for the words of boxes, several pictures and videos",
    )
    parser.add_argument("--start-from", type=Path, help="a checkpoint written by this program")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    if args.start_from:
        tokenizer = Tokenizer.from_file(str(args.start_from / "tokenizer.json"))
        weights = {
            k: v.float() for k, v in load_file(args.start_from / "model.safetensors").items()
        }
        if args.grow_tokenizer:
            old, tokenizer = tokenizer, grow_tokenizer(tokenizer, args.grow_tokenizer)
            weights[EMBEDDINGS] = grown_embeddings(weights[EMBEDDINGS], old, tokenizer)
    else:
        tokenizer, weights = grow_tokenizer(train_tokenizer(), args.grow_tokenizer), {}
    model, dense = Gemma3(tokenizer.get_vocab_size()), DenseLabels(VISION["hidden_size"])
    if weights:
        model.load_state_dict(weights)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{tokenizer.get_vocab_size()} tokens",
        flush=True,
    )

    def stream(make: Callable[[], Iterator[dict[str, Tensor]]]) -> Iterator[dict[str, Tensor]]:
        return iter(DataLoader(Stream(make), batch_size=None, num_workers=1, prefetch_factor=4))

    if args.vision_minutes > 0:
        teacher = Teacher(tokenizer, tuple(args.rows), args.length, args.seed)
        train_vision(model, dense, stream(Pictures(teacher)), args.vision_minutes, args.vision_lr)
        write_checkpoint(model, tokenizer, args.out)
    teacher = Teacher(
        tokenizer, tuple(args.rows), args.length, args.seed + 1, args.pictures, args.text_share
    )
    batches = stream(teacher.__iter__)
    if args.start_from:
        train_labels(model, dense, batches, 50)
    train_all(
        model,
        dense,
        batches,
        args.minutes,
        args.lr,
        lambda: write_checkpoint(model, tokenizer, args.out),
    )
    write_checkpoint(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
