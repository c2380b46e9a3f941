"""How tokens are chosen, as options: checked here and nowhere else. Loads without torch, so that a
wrong one is told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtmd.base.options import as_float, integer, integer_or_none, number, refuse

SEED_MAX = (1 << 63) - 1  # torch.Generator takes a signed 64-bit integer
TOP_K_MAX = (1 << 31) - 1
# below this, float32 logits over the temperature are all -inf but the first: taken as 0, as clients
# send such a one where they know no 0
TEMPERATURE_MIN = 1e-5
TEMPERATURE_MAX = 100.0
BIASES_MAX = 1024
BIAS_MAX = 100.0
PENALTY_RANGE = (0.01, 100.0)  # keeps penalised float32 logits finite


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The defaults are greedy: `temperature` 0 takes the most probable token
    and ignores all but the penalty; so does any below 1e-5, which is 0 then.

    `top_k`: keep this many tokens (0: all). `top_p`: keep the smallest set of tokens with this
    probability. `min_p`: keep tokens with at least this share of the best token's probability.
    `repetition_penalty`: above 1 makes tokens seen before less likely, in prompt and answer.
    `frequency_penalty` is taken off the logit of a token of the answer as often as it came,
    `presence_penalty` once; `logit_bias` is added to those of its tokens, by id. `seed`: equal
    seeds give equal answers; None draws one.

    Raises OptionError naming the field, what was found and what is expected.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int | str, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        checked = {
            "temperature": _temperature(self.temperature),
            "top_k": integer("top_k", self.top_k, 0, TOP_K_MAX),
            "top_p": _top_p(self.top_p),
            "min_p": number("min_p", self.min_p, 0, 1),
            "repetition_penalty": number(
                "repetition_penalty", self.repetition_penalty, *PENALTY_RANGE
            ),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -2, 2),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -2, 2),
            "logit_bias": _biases(self.logit_bias),
            "seed": integer_or_none("seed", self.seed, 0, SEED_MAX),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

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
    """How the publisher of a model recommends to choose its tokens.

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
    """What became of `AnswerOptions.sampling` for one model: the fields in `names` have the values
    of `settings`, as no other was given; those in `preset` were given by a preset.
    """

    way: str
    settings: ModelSampling
    names: tuple[str, ...] = ()
    preset: tuple[str, ...] = ()


def _temperature(value: object) -> float:
    result = as_float(value)
    if not 0 <= result <= TEMPERATURE_MAX:
        refuse("temperature", value, f"a number from 0 (greedy) to {TEMPERATURE_MAX:g}")
    return result if result >= TEMPERATURE_MIN else 0.0


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """(token, bias) of each; tokens may come as text, as they do in JSON."""
    items = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(items, (list, tuple)) or len(items) > BIASES_MAX:
        refuse("logit_bias", value, f"at most {BIASES_MAX} biases by tokens' ids")
    result = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            refuse("logit_bias", item, "a token's id and its bias")
        token, bias = item
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 12:
            token = int(token)
        token = integer("logit_bias", token, 0, TOP_K_MAX)
        result.append((token, number("logit_bias", bias, -BIAS_MAX, BIAS_MAX)))
    return tuple(result)


def _top_p(value: object) -> float:
    result = as_float(value)
    if not 0 <= result <= 1:
        refuse("top_p", value, "a number from 0 (the best token alone) to 1 (off)")
    return result
