"""Describes how tokens are chosen, as options: checked here and nowhere else. Loads without torch,
so that a wrong one is told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtmd.base.options import (
    Kind,
    as_float,
    check_options,
    integer,
    number,
    option,
    real,
    refuse,
    whole,
)

SEED_MAX = (1 << 63) - 1  # torch.Generator takes a signed 64-bit integer
TOP_K_MAX = (1 << 31) - 1
# below this, float32 logits over the temperature are all -inf but the first: taken as 0, as clients
# send such a one where they know no 0
TEMPERATURE_MIN = 1e-5
TEMPERATURE_MAX = 100.0
BIASES_MAX = 1024
BIAS_MAX = 100.0
NGRAM_MAX = 1024  # tokens
PENALTY_RANGE = (0.01, 100.0)  # keeps penalised float32 logits finite


def _temperature(name: str, value: object) -> float:
    result = as_float(value)
    if not 0 <= result <= TEMPERATURE_MAX:
        refuse(name, value, f"a number from 0 (greedy) to {TEMPERATURE_MAX:g}")
    return result if result >= TEMPERATURE_MIN else 0.0


def _top_p(name: str, value: object) -> float:
    result = as_float(value)
    if not 0 <= result <= 1:
        refuse(name, value, "a number from 0 (the best token alone) to 1 (off)")
    return result


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """(token, bias) of each; tokens may come as text, as they do in JSON."""
    items = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(items, (list, tuple)) or len(items) > BIASES_MAX:
        refuse(name, value, f"at most {BIASES_MAX} biases by tokens' ids")
    result = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            refuse(name, item, "a token's id and its bias")
        token, bias = item
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 12:
            token = int(token)
        token = integer(name, token, 0, TOP_K_MAX)
        result.append((token, number(name, bias, -BIAS_MAX, BIAS_MAX)))
    return tuple(result)


def _tokens(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > BIASES_MAX:
        refuse(name, value, f"at most {BIASES_MAX} tokens' ids")
    return tuple(integer(name, token, 0, TOP_K_MAX) for token in value)


@dataclass(frozen=True)
class Sampling:
    """Describes how to choose tokens. The defaults are greedy. Raises OptionError naming the field,
    what was found and what is expected.
    """

    temperature: float = option(
        0.0,
        Kind(_temperature, parse=float, low=0, high=TEMPERATURE_MAX, metavar="T"),
        "0 takes the most probable token, 1 samples from the model's probabilities",
        preset=True,
    )
    top_k: int = option(
        0,
        whole(0, TOP_K_MAX, metavar="K"),
        "sample from the K most probable tokens",
        default="{}, off",
        preset=True,
    )
    top_p: float = option(
        1.0,
        Kind(_top_p, parse=float, low=0, high=1, metavar="P"),
        "sample from the smallest set of tokens with total probability P",
        default="{}, off",
        preset=True,
    )
    min_p: float = option(
        0.0,
        real(0, 1, metavar="P"),
        "sample from tokens at least P times as probable as the most probable one",
        preset=True,
    )
    repetition_penalty: float = option(
        1.0,
        real(*PENALTY_RANGE, metavar="R"),
        "above 1, tokens that already occur become less probable",
        default="{}, off",
        preset=True,
    )
    frequency_penalty: float = option(
        0.0,
        real(-2, 2),
        "subtracted from the logit of a token for each time it occurs in the answer",
        flag=None,
    )
    presence_penalty: float = option(
        0.0, real(-2, 2), "subtracted from the logits of tokens that occur in the answer", flag=None
    )
    logit_bias: Mapping[int | str, float] | tuple[tuple[int, float], ...] = option(
        (),
        Kind(_biases, "Mapping[int | str, float] | Mapping[int, float] | Mapping[str, float]"),
        "numbers added to the logits of tokens, by token id",
        flag=None,
    )
    no_repeat_ngram: int = option(
        0,
        whole(0, NGRAM_MAX, metavar="N"),
        "no N tokens in a row occur twice in prompt and answer",
        default="{}, off",
        preset=True,
    )
    no_repeat_window: int = option(
        0,
        whole(0, TOP_K_MAX, metavar="TOKENS"),
        "look for them among the last TOKENS alone",
        default="{}, all",
        preset=True,
    )
    no_repeat_except: tuple[int, ...] = option(
        (),
        Kind(_tokens, "Sequence[int]", parse=int, metavar="ID", repeated=True),
        "id of a token that may complete a repetition anyway, such as the mark of a table's cell",
    )
    seed: int | None = option(
        None,
        whole(0, SEED_MAX, metavar="S"),
        "random seed; equal seeds give equal answers",
        default="a random one, named in the receipt",
        preset=True,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The options that were given for drawing tokens, where none are drawn. A seed is not one:
        who gives it wants the same answer again, and gets it.
        """
        if self.temperature:
            return ()
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return tuple(name for name, value in off.items() if getattr(self, name) != value)


WAYS = ("model", "greedy", "off")  # which of a model's own settings hold
DRAWING = ("temperature", "top_k", "top_p", "min_p")  # of no effect where nothing is drawn


@dataclass(frozen=True)
class ModelSampling:
    """Describes how the publisher of a model recommends to choose its tokens.

    `values`: fields of `Sampling`, checked, those that are off left out. `source`: the file or the
    keys that hold them. `unused`: settings there that are not applied, each with the reason.
    `length`: settings of the answer's length, which are shown and not applied.
    """

    source: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    length: tuple[str, ...] = ()

    def defaults(self, way: str) -> dict[str, float]:
        """The fields of `Sampling` that hold where a request leaves them out. `way`: "model" for
        all; "greedy" for all but the temperature, so that the most probable token is taken, after
        the model's own penalties; "off" for none.
        """
        if way == "off":
            return {}
        return {n: v for n, v in self.values.items() if way == "model" or n != "temperature"}


NOTHING_RECOMMENDED = ModelSampling()


@dataclass(frozen=True)
class AppliedSampling:
    """Describes what became of `AnswerOptions.sampling` for one model: the fields in `names` have
    the values of `settings`, as no other was given; those in `preset` were given by a preset.
    """

    way: str
    settings: ModelSampling
    names: tuple[str, ...] = ()
    preset: tuple[str, ...] = ()
