"""The metadata of a GGUF file, read key by key: every value is checked, and an error names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpurt.placement.config_fields import LARGEST, is_count
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.gguf_header import GgufArray, GgufValue
from gpurt.weights.errors import shown

_PERIODS: Final[Mapping[str, int]] = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "olmo2": 4}
"""Of so many layers the last one sees everything, the others a window, where a file of that architecture has a window
and does not say which layers. Other architectures keep everything."""
_STATE_ELEMENT: Final = 4
"""Bytes: recurrent states are 32-bit floats."""
_NOT_UNDERSTOOD: Final = ("rwkv", "arwkv", "t5", "bert", "clip", "wavtokenizer")


class Metadata:
    """Keys without the architecture's name in front are looked up with it, unless they are of the file itself."""

    def __init__(self, values: Mapping[str, GgufValue]) -> None:
        self._values = values
        self._rows: dict[tuple[str, int], tuple[int, ...]] = {}

    def architecture(self) -> str:
        value = self._values.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise InvalidPlacementInput("is missing or no text", field="general.architecture")
        if any(word in value for word in _NOT_UNDERSTOOD):
            raise InvalidPlacementInput(
                f"what {shown(value)} keeps per token is not known here", field="general.architecture"
            )
        return value

    def title(self) -> str | None:
        value = self._values.get("general.name")
        return value if isinstance(value, str) and value.strip() else None

    def key(self, name: str) -> str:
        return name if name.startswith("split.") else f"{self.architecture()}.{name}"

    def wrong(self, name: str, message: str) -> InvalidPlacementInput:
        return InvalidPlacementInput(message, field=self.key(name))

    def count(self, name: str, *, default: int | None = None, least: int = 1) -> int:
        """An integer. Without a default it must be there."""
        value = self._values.get(self.key(name))
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(name, "is missing, and nothing else tells it")
        if not is_count(value) or not least <= value <= LARGEST:
            raise self.wrong(name, f"must be an integer from {least} to {LARGEST:,}, and is {shown(value)}")
        return value

    def per_layer(self, name: str, layers: int, *, default: int | None = None) -> tuple[int, ...]:
        """One integer for all layers, or one for each."""
        row = self._rows.get((name, layers))
        if row is None:
            row = self._rows[name, layers] = self._row(name, layers, default)
        return row

    def _row(self, name: str, layers: int, default: int | None) -> tuple[int, ...]:
        value = self._values.get(self.key(name))
        if not isinstance(value, GgufArray):
            return (self.count(name, default=default, least=0),) * layers
        values = value.values or ()
        # Layers that draft have theirs behind.
        if len(values) < layers or not all(is_count(item) and 0 <= item <= LARGEST for item in values):
            raise self.wrong(name, f"must be an integer for each of {layers} layers, and is {shown(value.values)}")
        return tuple(int(item) for item in values[:layers])

    def kv_heads(self, layers: int) -> tuple[int, ...]:
        if self.key("attention.head_count_kv") in self._values:
            return self.per_layer("attention.head_count_kv", layers)
        return self.per_layer("attention.head_count", layers)

    def latent(self) -> bool:
        """Whether keys and values are kept as one small vector. Files converted before that was known to llama.cpp
        have the rank, too, and are kept whole."""
        rank = self.count("attention.kv_lora_rank", default=0, least=0)
        return rank > 0 and self.count("attention.key_length_mla", default=0, least=0) > 0

    def window(self, index: int, layers: int) -> int | None:
        """Tokens that a layer keeps, or None for all."""
        value = self._values.get(self.key("attention.sliding_window"))
        # Zero, and in old files the largest number there is, say that there is none.
        if not is_count(value) or not 0 < value <= LARGEST:
            return None
        pattern = self._values.get(self.key("attention.sliding_window_pattern"))
        if isinstance(pattern, GgufArray):
            chosen = pattern.values or ()
            if len(chosen) < layers:
                raise self.wrong("attention.sliding_window_pattern", f"has {len(chosen)} entries for {layers} layers")
            return value if chosen[index] else None
        period = pattern if is_count(pattern) else _PERIODS.get(self.architecture(), 0)
        return value if period > 0 and (index + 1) % period else None

    def cache_elements(self, index: int, layers: int, windowed: bool, recurrent: bool) -> int:
        """That one token adds to the keys and values of a layer."""
        interval = self.count("full_attention_interval", default=0, least=0)
        if recurrent and interval and (index + 1) % interval:
            return 0
        if index >= layers - self.count("attention.shared_kv_layers", default=0, least=0):
            return 0  # it uses those of an earlier layer
        if self.latent():
            # Keys and values are made from one vector, and the values' part of it is not kept twice.
            return self.count("attention.kv_lora_rank") + self.count("rope.dimension_count")
        heads = self.kv_heads(layers)[index]
        if not heads:
            return 0
        return heads * (
            self._length("key_length", index, layers, windowed) + self._length("value_length", index, layers, windowed)
        )

    def _length(self, name: str, index: int, layers: int, windowed: bool) -> int:
        if windowed and self.key(f"attention.{name}_swa") in self._values:
            return self.count(f"attention.{name}_swa")
        if self.key(f"attention.{name}") in self._values:
            return self.count(f"attention.{name}")
        hidden, heads = self.count("embedding_length"), self.per_layer("attention.head_count", layers)[index]
        if not heads or hidden % heads:
            raise self.wrong(f"attention.{name}", f"is missing, and {heads} heads do not divide {hidden}")
        return hidden // heads

    def state_bytes(self) -> int:
        """Of one sequence, of a recurrent layer: its window of inputs and its state."""
        inner, state = self.count("ssm.inner_size"), self.count("ssm.state_size")
        groups = self.count("ssm.group_count", default=0, least=0)
        inputs = (self.count("ssm.conv_kernel") - 1) * (inner + 2 * groups * state)
        return (inputs + inner * state) * _STATE_ELEMENT
