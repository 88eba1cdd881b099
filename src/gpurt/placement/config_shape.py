"""From a configuration to what the model is made of."""

from __future__ import annotations

from typing import Any, Final

from gpurt.placement.config_fields import Fields
from gpurt.placement.families import FAMILIES, SAME_AS, Family
from gpurt.placement.model_shape import LayerShape, Matrix, ModelShape
from gpurt.weights.errors import shown

MAX_LAYERS: Final = 4096
_WINDOWED: Final = ("sliding_attention", "chunked_attention")


def shape_of(config: Fields) -> ModelShape:
    """What the model of text in a whole ``config.json`` is made of.

    Raises:
        InvalidPlacementInput: of a family that is not known here, or a field is missing or cannot be.
    """
    inner = config.part("text_config") or config.part("llm_config")
    outer_type = config.text("model_type")
    text = config if inner is None else inner
    model_type = text.text("model_type") or outer_type
    name = SAME_AS.get(model_type or "", model_type or "")
    known = ", ".join(sorted(FAMILIES))
    if not name:
        raise text.wrong("model_type", f'is missing: it tells the architecture, such as "llama"; known are {known}')
    if name not in FAMILIES:
        raise text.wrong("model_type", f"{shown(model_type)} is not known here; known are {known}")
    family = FAMILIES[name]
    fields = text.with_usual(family.usual)
    tied = fields.flag("tie_word_embeddings", config.flag("tie_word_embeddings", family.tied))
    return _Counter(name, family, fields).model(tied, config.get("torch_dtype") or config.get("dtype"))


class _Counter:
    """Counts one model. Extents that every layer needs are read once."""

    def __init__(self, name: str, family: Family, fields: Fields) -> None:
        self._name = name
        self._family = family
        self._fields = fields
        self._hidden = fields.count("hidden_size", "n_embd")
        self._heads = fields.count("num_attention_heads", "n_head")
        self._layers = fields.count("num_hidden_layers", "n_layer")
        if self._layers > MAX_LAYERS:
            raise fields.wrong("num_hidden_layers", f"at most {MAX_LAYERS:,} are allowed, and it is {self._layers:,}")
        self._kv_heads = self._heads if family.attention == "latent" else self._key_value_heads()
        self._head_dim = self._width_of_head()
        self._split: set[int] = {self._heads, self._kv_heads, self._hidden}

    def model(self, tied: bool, dtype: Any) -> ModelShape:
        family, fields = self._family, self._fields
        vocabulary = fields.count("vocab_size")
        windows = self._windows()
        layers = tuple(self._layer(index, windows[index]) for index in range(self._layers))
        final = self._hidden * (1 + family.norm_bias) + (vocabulary if family.head_bias else 0)
        inside = fields.text("torch_dtype") or fields.text("dtype")
        return ModelShape(
            family=self._name,
            hidden_size=self._hidden,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            vocabulary=vocabulary,
            tied=tied,
            layers=layers,
            split=tuple(sorted(self._split)),
            final_elements=final,
            context=fields.count_or_none("max_position_embeddings"),
            dtype=inside if inside is not None else dtype,
            assumed=tuple(fields.assumed),
        )

    def _key_value_heads(self) -> int:
        fields = self._fields
        if self._family.attention == "falcon" and not fields.flag("new_decoder_architecture", False):
            return 1 if fields.flag("multi_query", True) else self._heads
        kv_heads = fields.count("num_key_value_heads", "num_kv_heads", "n_head_kv", default=self._heads)
        if self._heads % kv_heads:
            raise fields.wrong("num_key_value_heads", f"{kv_heads} do not divide {self._heads} heads")
        return kv_heads

    def _width_of_head(self) -> int:
        if self._family.attention == "latent":
            return self._fields.count("v_head_dim")
        if self._fields.get("head_dim") is not None:
            return self._fields.count("head_dim")
        if self._hidden % self._heads:
            raise self._fields.wrong("head_dim", f"is missing, and {self._heads} heads do not divide {self._hidden}")
        return self._hidden // self._heads

    def _windows(self) -> tuple[int | None, ...]:
        """Of every layer."""
        fields, kind, count = self._fields, self._family.windows, self._layers
        types = fields.texts("layer_types")
        if types:
            return self._windows_by_type(types)
        size = None if kind == "none" else fields.count_or_none("sliding_window")
        if size is None:
            return (None,) * count
        if kind == "all":
            return (size,) * count
        if kind == "alternate":
            return tuple(None if index % 2 else size for index in range(count))
        if kind == "some_layers":
            full = fields.count("max_window_layers", default=count, least=0)
            windowed = fields.flag("use_sliding_window", False)
            return tuple(size if windowed and index >= full else None for index in range(count))
        every = fields.count("sliding_window_pattern", default=6)
        return tuple(size if (index + 1) % every else None for index in range(count))

    def _windows_by_type(self, types: tuple[str, ...]) -> tuple[int | None, ...]:
        fields = self._fields
        if len(types) != self._layers:
            raise fields.wrong("layer_types", f"has {len(types)} entries for {self._layers} layers")
        unknown = set(types) - {"full_attention", *_WINDOWED}
        if unknown:
            raise fields.wrong("layer_types", f"{shown(sorted(unknown))} are not known here")
        if not set(types) & set(_WINDOWED):
            return (None,) * len(types)
        size = fields.count("sliding_window", "attention_chunk_size")
        return tuple(size if kind in _WINDOWED else None for kind in types)

    def _layer(self, index: int, window: int | None) -> LayerShape:
        attention, vectors, cached = self._attention()
        feed_forward, more = self._feed_forward(index)
        norms = self._norms() * self._hidden * (1 + self._family.norm_bias)
        return LayerShape((*attention, *feed_forward), norms + vectors + more, cached, window)

    def _norms(self) -> int:
        fields = self._fields
        if self._family.attention != "falcon":
            return self._family.norms
        if fields.flag("new_decoder_architecture", False):
            return fields.count("num_ln_in_parallel_attn", default=2)
        return 1 if fields.flag("parallel_attn", True) else 2

    # Attention

    def _attention(self) -> tuple[tuple[Matrix, ...], int, int]:
        """Its matrices, the elements of its vectors, and what a token adds to the cache."""
        family, fields = self._family, self._fields
        if family.attention == "latent":
            return self._latent()
        if family.attention == "falcon":
            on_inputs = on_outputs = fields.flag("bias", False)
        else:
            on_inputs = fields.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
            on_outputs = on_inputs if family.output_bias is None else family.output_bias
            # Of this family the output has none, whatever the field says.
            on_outputs = on_outputs and self._name != "glm4_moe"
        query, key = self._heads * self._head_dim, self._kv_heads * self._head_dim
        matrices = (
            Matrix("self_attn.q_proj", query, self._hidden, on_inputs),
            Matrix("self_attn.k_proj", key, self._hidden, on_inputs),
            Matrix("self_attn.v_proj", key, self._hidden, on_inputs),
            Matrix("self_attn.o_proj", self._hidden, query, on_outputs),
        )
        normed = family.head_norms or (self._name == "glm4_moe" and fields.flag("use_qk_norm", False))
        sinks = self._heads if self._name == "gpt_oss" else 0
        return matrices, sinks + (2 * self._head_dim if normed else 0), 2 * key

    def _latent(self) -> tuple[tuple[Matrix, ...], int, int]:
        """Keys and values are made from one small vector per token, which is all that is cached."""
        fields, hidden, heads = self._fields, self._hidden, self._heads
        bias = fields.flag("attention_bias", False)
        rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
        nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
        query_rank = fields.count_or_none("q_lora_rank")
        queries = heads * (nope + rope)
        if query_rank is None:
            matrices = [Matrix("self_attn.q_proj", queries, hidden)]
        else:
            matrices = [
                Matrix("self_attn.q_a_proj", query_rank, hidden, bias),
                Matrix("self_attn.q_b_proj", queries, query_rank),
            ]
        matrices += [
            Matrix("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, bias),
            Matrix("self_attn.kv_b_proj", heads * (nope + value), rank),
            Matrix("self_attn.o_proj", hidden, heads * value, bias),
        ]
        return tuple(matrices), rank + (query_rank or 0), rank + rope

    # Feed-forward

    def _feed_forward(self, index: int) -> tuple[tuple[Matrix, ...], int]:
        """Its matrices and the elements of its vectors."""
        kind, fields = self._family.experts, self._fields
        if kind == "gpt_oss":
            return self._fused_experts(), 0
        if kind == "mixtral":
            size = fields.count("intermediate_size")
            return self._experts("num_local_experts", size, "block_sparse_moe", ("w1", "w3", "w2")), 0
        if kind == "qwen" and self._sparse_of_qwen(index):
            routed = self._experts("num_experts", fields.count("moe_intermediate_size"))
            shared = fields.count("shared_expert_intermediate_size", default=0, least=0)
            if not shared or self._name != "qwen2_moe":
                return routed, 0
            gate = Matrix("mlp.shared_expert_gate", 1, self._hidden, plain=True)
            return (*routed, gate, *self._block(shared, "mlp.shared_expert", False)), 0
        if kind == "deepseek" and self._sparse_of_deepseek(index):
            size = fields.count("moe_intermediate_size")
            routed = self._experts("n_routed_experts", size)
            shared = fields.count("n_shared_experts", default=0, least=0) * size
            extra = fields.count("n_routed_experts") if self._family.expert_bias else 0
            return (*routed, *(self._block(shared, "mlp.shared_experts", False) if shared else ())), extra
        if self._family.attention == "falcon":
            return self._block(
                fields.count("ffn_hidden_size", default=4 * self._hidden), "mlp", fields.flag("bias", False)
            ), 0
        bias = fields.flag("mlp_bias", False) if self._family.mlp_bias is None else self._family.mlp_bias
        return self._block(fields.count("intermediate_size"), "mlp", bias), 0

    def _sparse_of_qwen(self, index: int) -> bool:
        step = self._fields.count("decoder_sparse_step", default=1)
        return index not in self._fields.counts("mlp_only_layers") and (index + 1) % step == 0

    def _sparse_of_deepseek(self, index: int) -> bool:
        first = self._fields.count("first_k_dense_replace", default=0, least=0)
        every = self._fields.count("moe_layer_freq", default=1)
        return index >= first and index % every == 0

    def _block(self, size: int, name: str, bias: bool) -> tuple[Matrix, ...]:
        self._split.add(size)
        up = (
            Matrix(f"{name}.up_proj", size, self._hidden, bias),
            Matrix(f"{name}.down_proj", self._hidden, size, bias),
        )
        return (Matrix(f"{name}.gate_proj", size, self._hidden, bias), *up) if self._family.gated else up

    def _used(self, experts: int) -> int:
        used = self._fields.count("num_experts_per_tok", "experts_per_token")
        if used > experts:
            raise self._fields.wrong("num_experts_per_tok", f"is {used}, of {experts} experts")
        return used

    def _experts(
        self,
        number: str,
        size: int,
        name: str = "mlp",
        parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> tuple[Matrix, ...]:
        self._split.add(size)
        experts = self._fields.count(number)
        used = self._used(experts)
        extents = ((size, self._hidden), (size, self._hidden), (self._hidden, size))
        return (
            Matrix(f"{name}.gate", experts, self._hidden, plain=True),
            *(
                Matrix(f"{name}.experts.0.{part}", rows, columns, copies=experts, used=used)
                for part, (rows, columns) in zip(parts, extents, strict=True)
            ),
        )

    def _fused_experts(self) -> tuple[Matrix, ...]:
        """Stored as two tensors with a matrix per expert."""
        size, hidden = self._fields.count("intermediate_size"), self._hidden
        experts = self._fields.count("num_local_experts", "num_experts")
        used = self._used(experts)
        self._split.add(size)
        return (
            Matrix("mlp.router", experts, hidden, True, plain=True),
            Matrix("mlp.experts.gate_up_proj", 2 * size, hidden, True, experts, used),
            Matrix("mlp.experts.down_proj", hidden, size, True, experts, used),
        )
