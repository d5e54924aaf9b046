"""Every table that tracekit writes: its columns with type, unit and meaning.

Shape legend, used as suffixes of array names everywhere: B batch, T position, L layer, H query
head, G key-value head, M query heads a group (H = G * M), Q query, K key, D head size, V
vocabulary, E hidden size, N kept fractions of one policy. ``score_GK`` has axes (G, K).

A value that does not apply is null, never 0 or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
"""Raised when a table changes so that older readers would misread it."""

RESULTS_VERSION = 5
"""The same for tables of results, which are computed anew more lightly than a trace is recorded."""

ALL = -1
"""In ``layer`` and ``kv_head`` columns: all of them together."""

ANY = "all"
"""In ``domain`` and ``bucket`` columns: all of them together."""


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, its unit ('' where there is none) and what it means."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table: its columns, in order, and what one row is."""

    name: str
    row: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, units and meanings in the fields' metadata."""
        return pa.schema(
            [
                pa.field(c.name, c.type, metadata={"unit": c.unit, "meaning": c.meaning})
                for c in self.columns
            ]
        )

    def build(self, num_rows: int, columns: Mapping[str, Any]) -> pa.Table:
        """Return an Arrow table of this schema.

        Parameters
        ----------
        num_rows
            Rows; single values and missing columns (null) are repeated so often.
        columns
            By name: an array or list of ``num_rows`` values, a 2-d array for list columns, an Arrow
            array as it is, or one value for all rows. NaN becomes null.

        Raises
        ------
        KeyError
            If a column is not in the schema.
        """
        if unknown := set(columns) - {column.name for column in self.columns}:
            msg = f"table {self.name} has no column {', '.join(sorted(unknown))}"
            raise KeyError(msg)
        arrays = [_array(columns.get(c.name), c.type, num_rows) for c in self.columns]
        return pa.table(arrays, schema=self.schema)


def _array(values: Any, kind: pa.DataType, num_rows: int) -> pa.Array:
    """Return ``values`` as an Arrow array of one kind, single values repeated."""
    if isinstance(values, pa.Array):
        return values
    if values is None or isinstance(values, str | bytes | int | float | np.generic):
        return _repeated(values, kind, num_rows)
    if isinstance(values, np.ndarray) and values.ndim == 2:
        width, dense = values.shape[1], pa.array(values.ravel(), type=kind.value_type)
        offsets = np.arange(0, values.size + 1, width) if width else np.zeros(len(values) + 1)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), dense)
    if pa.types.is_dictionary(kind):
        return pa.array(values, type=kind.value_type, from_pandas=True).dictionary_encode()
    return pa.array(values, type=kind, from_pandas=True)


def _repeated(value: Any, kind: pa.DataType, num_rows: int) -> pa.Array:
    if value is None:
        return pa.nulls(num_rows, type=kind)
    if pa.types.is_dictionary(kind):
        codes = pa.array(np.zeros(num_rows, dtype=np.int32))
        return pa.DictionaryArray.from_arrays(codes, pa.array([value], type=kind.value_type))
    return pa.repeat(pa.scalar(value, type=kind), num_rows)


_ID = pa.dictionary(pa.int32(), pa.string())
_I16, _I32, _I64 = pa.int16(), pa.int32(), pa.int64()
_F32, _F64 = pa.float32(), pa.float64()
_STR, _BOOL = pa.string(), pa.bool_()

_SEQUENCE = Column("sequence_id", _ID, "", "prompt id and sample number: story-01#0")
_LAYER = Column("layer", _I16, "", "layer number, 0 at the input")

SEQUENCES = Table(
    "sequences",
    "a recorded sequence",
    (
        Column("sequence_id", _STR, "", "prompt id and sample number: story-01#0"),
        Column("prompt_id", _STR, "", "id of the prompt"),
        Column("domain", _STR, "", "kind of text: story, code, translation..."),
        Column("sample", _I32, "", "number of the sample of this prompt"),
        Column("seed", _I64, "", "seed of the sampler for this sequence"),
        Column("num_tokens", _I32, "tokens", "length, prompt and generated"),
        Column("context_end", _I32, "tokens", "length of the context that a question follows"),
        Column("prompt_end", _I32, "tokens", "length of the prompt; null in plain text"),
        Column("turn_ends", pa.list_(_I32), "tokens", "length after each turn"),
        Column("finish_reason", _STR, "", "eos, length (token limit) or given (no generation)"),
        Column("text_source", _STR, "", "generated or given: perplexity needs given text"),
        Column(
            "text_start", _I32, "tokens", "where in its text this window begins; null elsewhere"
        ),
        Column(
            "scored_from",
            _I32,
            "tokens",
            "first position that counts: the window before has the rest",
        ),
        Column(
            "beyond_trained", _BOOL, "", "longer than the positions that the model was trained on"
        ),
        Column(
            "rerender_agrees",
            _BOOL,
            "",
            "template over all answers gives these ids; null for one turn",
        ),
        Column("prompt_text", _STR, "", "prompt as the model read it, special tokens written out"),
        Column(
            "text",
            _STR,
            "",
            "generated text, special tokens left out, a blank line between answers",
        ),
        Column("check", _STR, "", "JSON: how the answer can be judged"),
        Column("sampler", _STR, "", "JSON: generation settings"),
        Column("probed_from", _I32, "tokens", "first row with influence probes; null: none"),
        Column("unprobed", _STR, "", "why probes that were asked for are not there"),
    ),
)

TOKENS = Table(
    "tokens",
    "a token of a sequence, position 0 included",
    (
        _SEQUENCE,
        Column("position", _I32, "tokens", "position of this token, 0 first"),
        Column("token_id", _I32, "", "id in the vocabulary"),
        Column("turn", _I16, "", "number of the message that it belongs to"),
        Column("role", _ID, "", "system, user, assistant; null in raw text"),
        Column("is_generated", _BOOL, "", "made by the model in this run"),
        Column("is_template", _BOOL, "", "part of the chat template, not of a message"),
        Column("span", _ID, "", "context, question, needle or answer, where the prompt marks it"),
    ),
)

STEPS = Table(
    "steps",
    "a predicted token",
    (
        _SEQUENCE,
        Column(
            "position", _I32, "tokens", "position of the predicted token: the length of its context"
        ),
        Column(
            "is_scored", _BOOL, "", "counts here; false where the window before scored the token"
        ),
        Column("path", _ID, "", "prefill or decode: the forward pass that predicted it"),
        Column("temperature", _F32, "", "temperature of the statistics; raw logits have 1"),
        Column("entropy_nats", _F32, "nats", "Shannon entropy of the next-token distribution"),
        Column("varentropy", _F32, "nats^2", "variance of the surprisal; equals the heat capacity"),
        Column("surprisal_nats", _F32, "nats", "-ln p of the token that came"),
        Column("rank", _I32, "", "tokens with a higher logit than the one that came"),
        Column(
            "top1_margin", _F32, "nats", "difference of the two highest logits over temperature"
        ),
        Column("logsumexp", _F32, "nats", "ln sum exp of the logits over temperature, as they are"),
        Column("free_energy", _F32, "logit units", "-T ln Z, mean logit subtracted"),
        Column("internal_energy", _F32, "logit units", "-E[z], mean logit subtracted; F = U - T S"),
        Column("effective_support_90", _I32, "tokens", "fewest tokens with 90 % of the mass"),
        Column("effective_support_95", _I32, "tokens", "fewest tokens with 95 % of the mass"),
        Column("effective_support_99", _I32, "tokens", "fewest tokens with 99 % of the mass"),
        Column("renyi2_nats", _F32, "nats", "collision entropy -ln sum p^2"),
        Column("entropy_change", _F32, "nats", "entropy minus that of the step before"),
        Column("padded_mass", _F32, "", "probability of logit rows that no token has"),
        Column("nonfinite", _I32, "", "logits that are not finite"),
        Column("top_ids", pa.list_(_I32), "", "the most likely tokens, best first"),
        Column("top_logprobs", pa.list_(_F32), "nats", "their log-probabilities"),
        Column(
            "wall_s",
            _F32,
            "s",
            "time of the forward pass, of the whole batch; null inside a prefill",
        ),
        Column("kv_bytes", _I64, "bytes", "logical bytes of this sequence's cache after the pass"),
        Column("device_bytes", _I64, "bytes", "memory allocated on the device; null on CPU"),
    ),
)

KV = Table(
    "kv",
    "a layer of the cache after a forward pass",
    (
        _SEQUENCE,
        Column("position", _I32, "tokens", "position of the token that the pass predicted"),
        _LAYER,
        Column("entries", _I32, "tokens", "entries that a head holds"),
        Column("logical_bytes", _I64, "bytes", "bytes of the entries"),
        Column(
            "resident_bytes", _I64, "bytes", "bytes of the storage behind them; a batch's share"
        ),
    ),
)

SINK_KEYS = 4
"""First keys whose mass is ``sink_mass``."""
WINDOW_KEYS = 64
"""Newest keys whose mass is ``window_mass``."""
TOP_KEYS = 8
"""Largest entries of a row whose mass is ``top_mass``."""

ATTENTION = Table(
    "attention",
    "an attention row: a query of a head",
    (
        _SEQUENCE,
        _LAYER,
        Column("head", _I16, "", "query head"),
        Column("query", _I32, "tokens", "position of the query"),
        Column("entropy_nats", _F32, "nats", "entropy of the row over its keys"),
        Column("sink_mass", _F32, "", f"mass on the first {SINK_KEYS} positions"),
        Column("window_mass", _F32, "", f"mass on the newest {WINDOW_KEYS} keys"),
        Column("top_mass", _F32, "", f"mass on the {TOP_KEYS} largest entries"),
        Column("effective_keys", _F32, "keys", "1 / sum a^2, the participation number"),
        Column(
            "top_keys", pa.list_(_I32), "tokens", "positions of the K largest (--attention-topk)"
        ),
        Column("top_weights", pa.list_(_F32), "", "their attention, largest first"),
        Column("rest_mass", _F32, "", "attention on all other keys"),
        Column(
            "map",
            pa.large_binary(),
            "",
            "float16 attention on the keys seen, up to its own (--maps)",
        ),
    ),
)

KEYS = Table(
    "keys",
    "a key of a KV head",
    (
        _SEQUENCE,
        _LAYER,
        Column("kv_head", _I16, "", "key-value head"),
        Column("key", _I32, "tokens", "position of the key"),
        Column("mass_received", _F32, "", "attention received, summed over rows and query heads"),
        Column("reads", _I32, "", "rows of the group's heads t with attention > 1 / (t + 1)"),
        Column("last_read", _I32, "tokens", "position of the last such row; null if none"),
    ),
)

TENSORS = Table(
    "tensors",
    "a block of a tensor",
    (
        _SEQUENCE,
        Column(
            "kind",
            _ID,
            "",
            "hidden, residual (leaves the layer) [T, E]; query [H, T, D]; key, value [G, T, D]; "
            "influence [H, T, D']",
        ),
        Column("layer", _I16, "", "layer number; -1 for the final hidden state"),
        Column("probe", _I16, "", "number of the influence probe; null elsewhere"),
        Column("first_position", _I32, "tokens", "position of the block's first row"),
        Column("shape", pa.list_(_I32), "", "shape of the block"),
        Column("dtype", _ID, "", "float32, float16 or bfloat16"),
        Column("data", pa.large_binary(), "", "the numbers, row-major, little-endian"),
    ),
)

VOCAB = Table(
    "vocab",
    "a row of the logits",
    (
        Column("token_id", _I32, "", "id"),
        Column("piece", pa.binary(), "", "bytes that the token stands for; null for padded rows"),
        Column("text", _STR, "", "readable form: bytes and control characters written out"),
        Column(
            "class",
            _ID,
            "",
            "special, byte, whitespace, number, cjk, identifier, word, other, padded",
        ),
    ),
)

SHARD_TABLES = (SEQUENCES, TOKENS, STEPS, KV, ATTENTION, KEYS, TENSORS)

_DOMAIN = Column("domain", _ID, "", "domain of the sequence; 'all' for all together")
_BUCKET = Column("bucket", _ID, "", "length bucket of the sequence; 'all' for all together")
_LEVEL = Column("level", _ID, "", "local, predicted, propagated or generated")
_SCORED = Column("num_scored", _I32, "steps", "scored positions")

KV_RESULTS = Table(
    "kv",
    "a policy at one kept fraction on one sequence; layer or KV head -1 is all together",
    (
        _SEQUENCE,
        _DOMAIN,
        Column("policy", _ID, "", "canonical text of the policy, its identity"),
        Column("family", _ID, "", "short name, the same for all kept fractions of a policy"),
        _LEVEL,
        Column(
            "causal", _BOOL, "", "false for a bound that looks at later rows: no decoder has it"
        ),
        Column("selects", _BOOL, "", "each row chooses what it reads of the entries held (recall)"),
        Column("evict_at", _ID, "", "schedule: at=prompt, at=context, every=1,from=prompt ..."),
        Column("query_aware", _BOOL, "", "whether the question was seen before the first eviction"),
        _LAYER,
        Column("kv_head", _I16, "", "key-value head"),
        Column("steps", _ID, "", "steps after the eviction point: 'all', 1-16, 17-64 ..."),
        _BUCKET,
        Column("target_frac", _F32, "", "what the policy was asked to keep of the tokens seen"),
        Column("kept_frac", _F32, "", "bytes held over bytes of the full cache, mean over steps"),
        Column("kept_end_frac", _F32, "", "the same at the last step"),
        Column("peak_frac", _F32, "", "peak bytes held over peak bytes of the full cache"),
        Column("padded_frac", _F32, "", "longest head times heads: what a rectangle would hold"),
        Column("read_frac", _F32, "", "bytes read a step over bytes of the full cache"),
        Column("kv_bytes", _F64, "bytes", "bytes held, mean over scored steps"),
        Column("peak_kv_bytes", _F64, "bytes", "most bytes held at a scored step"),
        Column("full_kv_bytes", _F64, "bytes", "bytes of the full cache, mean over scored steps"),
        Column("read_bytes", _F64, "bytes", "bytes read a step, those of an index included"),
        Column("fetched_bytes", _F64, "bytes", "of these, fetched from the slow tier a step"),
        Column("hit_frac", _F32, "", "entries read that the fast tier held; null without a tier"),
        Column("transfer_s", _F64, "s", "time a step for these bytes at the bandwidths given"),
        Column("state_bytes", _F64, "bytes", "what the policy itself must keep, mean over steps"),
        Column("num_evicted", _I64, "entries", "entries evicted by then, over layers and heads"),
        Column(
            "is_idle", _BOOL, "", "nothing was evicted: the budget was never short; not averaged"
        ),
        Column("is_clipped", _BOOL, "", "the budget was smaller than what was to be protected"),
        Column("is_clamped", _BOOL, "", "the budget was larger than what the full cache held"),
        Column("output_error", _F32, "", "relative L2 of the attention output over scored rows"),
        Column("output_cosine", _F32, "", "mean cosine of pruned and full attention output"),
        Column(
            "projected_error",
            _F32,
            "",
            "the same after the output projection (traces with --store-oproj); a head's is that of "
            "its own part",
        ),
        Column(
            "mass_kept",
            _F32,
            "",
            "recorded attention mass on the keys read; sink logits take the rest",
        ),
        Column("attention_kl_nats", _F32, "nats", "KL(pruned || full) of attention rows, mean"),
        Column(
            "topk_overlap",
            _F32,
            "",
            "keys read that are among as many most attended ones, at up to 8 rows, evenly spaced",
        ),
        Column(
            "oracle_overlap",
            _F32,
            "",
            "keys left by the first decision that are among as many of most later attention",
        ),
        Column("needle_kept", _F32, "", "needle entries that are held, mean over scored steps"),
        Column("erased_frac", _F32, "", "tokens seen that were evicted from all heads of this row"),
        Column("evicted_age_tokens", _F32, "tokens", "age of entries when evicted, mean"),
        Column("churn", _F32, "entries a step", "evictions after the first decision, a head"),
        Column("kl_nats", _F32, "nats a token", "KL of the next-token distributions (propagated)"),
        Column("kl_predicted_nats", _F32, "nats a token", "the same foretold from probes"),
        Column("kl_predicted_se_nats", _F32, "nats a token", "standard error over probes"),
        Column(
            "kl_corrected_nats",
            _F32,
            "nats a token",
            "kl_predicted_nats after the power law of the calibration: an estimate, no measurement",
        ),
        Column(
            "noise_kl_nats", _F32, "nats a token", "KL between two runs that differ by rounding"
        ),
        Column("jsd_nats", _F32, "nats a token", "Jensen-Shannon divergence of the same"),
        Column("nll_full", _F32, "nats a token", "surprisal under the full cache"),
        Column("nll_pruned", _F32, "nats a token", "surprisal under the reduced cache"),
        Column("same_top_frac", _F32, "", "steps whose most likely token stays the same"),
        _SCORED,
    ),
)

HELD = Table(
    "held",
    "what is left of a sequence's cache under a policy once its last row was read, level local",
    (
        _SEQUENCE,
        Column("policy", _ID, "", "canonical text of the policy"),
        Column("family", _ID, "", "short name, the same for all kept fractions of a policy"),
        Column("point", _I32, "tokens", "eviction point: tokens seen at the first decision"),
        Column(
            "held_frac",
            pa.list_(_F32),
            "",
            "by position of the entry: the part of the KV heads of all layers that hold it, of those "
            "that would under the full cache",
        ),
    ),
)

LOGITS = Table(
    "logits",
    "a scored step of a policy at level propagated: the next-token distribution under both caches",
    (
        _SEQUENCE,
        _DOMAIN,
        Column("policy", _ID, "", "canonical text of the policy"),
        Column("family", _ID, "", "short name, the same for all kept fractions of a policy"),
        Column("position", _I32, "tokens", "position of the predicted token"),
        Column("distance", _I32, "steps", "steps after the eviction point, from 1"),
        Column("nll_full", _F64, "nats", "surprisal of the recorded token under the full cache"),
        Column("nll_pruned", _F64, "nats", "under the reduced cache"),
        Column("kl_nats", _F64, "nats", "KL(full || pruned)"),
        Column("jsd_nats", _F64, "nats", "Jensen-Shannon divergence"),
        Column("delta_p", _F64, "", "probability of the recorded token, pruned - full"),
        Column("entropy_full_nats", _F64, "nats", "entropy under the full cache"),
        Column("top1_margin_full", _F64, "nats", "logit of full's best less its second best"),
        Column(
            "margin_pruned",
            _F64,
            "nats",
            "pruned logit of full's best less the best other: negative where it flipped",
        ),
        Column("same_top", _BOOL, "", "the most likely token stays the same"),
        Column("hit", _BOOL, "", "the most likely token under the reduced cache is the recorded"),
        Column("hit_full", _BOOL, "", "the same under the full cache"),
        Column("is_given", _BOOL, "", "of a text that was given, not made by the model"),
        Column("is_answer", _BOOL, "", "token of a marked answer"),
        Column("is_needle", _BOOL, "", "token that also stands in the needle of the prompt"),
    ),
)

LOGIT_STATS = Table(
    "logit_stats",
    "a statistic of the scored steps of a policy at level propagated, by group of steps",
    (
        Column("policy", _ID, "", "canonical text of the policy"),
        Column("family", _ID, "", "short name, the same for all kept fractions of a policy"),
        Column("kept_frac", _F64, "", "bytes held over the full cache's, mean over sequences"),
        Column("convention", _ID, "", "how steps are read and errors made: tracekit or llama.cpp"),
        Column(
            "grouping",
            _ID,
            "",
            "all, domain, bucket (length), distance (from the eviction point), entropy, needle",
        ),
        Column("group", _ID, "", "which of them"),
        Column("statistic", _ID, "", "what is told, in llama.cpp's order"),
        Column("unit", _ID, "", "its unit; empty for a share"),
        Column("value", _F64, "", "its value over all steps alike (micro average)"),
        Column("macro", _F64, "", "of means over sequences of each one's mean (macro average)"),
        Column("low", _F64, "", "lower end of the 95 % bootstrap interval over sequences"),
        Column("high", _F64, "", "upper end"),
        Column("error", _F64, "", "Gaussian standard error over tokens (llama.cpp's convention)"),
        Column("n", _I32, "sequences", "sequences"),
        Column("num_steps", _I64, "steps", "scored steps"),
    ),
)

_ESTIMATOR = Column("estimator", _ID, "", "canonical text of the estimator")
_CONTROLLER = Column(
    "controller", _ID, "", "what sets the size at each step, and what checks: fixed, rate:..."
)
ASKED, OTHERS, OWN, SHUFFLED = "asked", "others", "own", "shuffled"
"""How sizes come about: as asked; with a controller, so that their mean over steps of other prompts
is the size asked (a method), or over the sequence's own steps (a fair comparison with a fixed set of
that size, which no decoder can make); or those of ``own`` at other steps, drawn once: what a
controller gains over them is what its timing knows."""

DECODED_FITS = (ASKED, OTHERS)
"""Those that a decoder can have."""

_FIT = Column(
    "fit",
    _ID,
    "",
    "sizes: asked; others: their mean over other prompts' steps is the size; own: over these "
    "steps; shuffled: those of own at other steps",
)
_SIZE = Column("size", _I32, "tokens", "size asked for, pinned tokens aside")
_HIT_CHOSEN = "recorded token is a candidate"
_HIT_ARGMAX = "most likely token is a candidate"

VOCAB_RESULTS = Table(
    "vocab",
    "an estimator at one size on one sequence; means over its scored steps",
    (
        _SEQUENCE,
        _DOMAIN,
        _ESTIMATOR,
        _CONTROLLER,
        _FIT,
        _SIZE,
        _BUCKET,
        Column("hit_chosen", _F32, "", f"steps whose {_HIT_CHOSEN}"),
        Column("hit_argmax", _F32, "", f"steps whose {_HIT_ARGMAX}"),
        Column("hit_top_k", _F32, "", "steps at which all 50 most likely tokens are candidates"),
        Column("hit_top_p", _F32, "", "the same of the most likely tokens with 95 % of the mass"),
        Column("hit_min_p", _F32, "", "of tokens at least 5 % as likely as the most likely one"),
        Column("mass", _F32, "", "probability of the candidates: draft acceptance"),
        Column("neg_log_mass_nats", _F32, "nats", "-ln of that mass: KL(pruned|full)"),
        Column("jsd_nats", _F32, "nats", "Jensen-Shannon divergence of pruned and full"),
        Column(
            "backoff_kl_nats",
            _F32,
            "nats",
            "KL(full|back-off): the missing mass spread evenly over the other tokens",
        ),
        Column(
            "backoff_kl_causal_nats",
            _F32,
            "nats",
            "the same, the missing mass foretold as its mean over the steps before",
        ),
        Column("set_size_mean", _F32, "tokens", "candidates really scored, pinned ones included"),
        Column("fallback_frac", _F32, "", "steps at which the full head was run after all"),
        Column("cost_frac", _F32, "", "bytes read a step over those of the full head"),
        Column("macs_frac", _F32, "", "multiply-adds a step over those of the full head"),
        Column("nll_full", _F32, "nats a token", "surprisal of the recorded tokens, full head"),
        Column(
            "nll_backoff",
            _F32,
            "nats a token",
            "the same from candidates, the missing mass spread evenly over the other tokens",
        ),
        _SCORED,
    ),
)

SCORED = Table(
    "scored_steps",
    "a step on which candidate sets were tried: what is true of it whatever the set",
    (
        _SEQUENCE,
        _DOMAIN,
        _BUCKET,
        Column("position", _I32, "tokens", "position of the predicted token"),
        Column("token_id", _I32, "", "the recorded token"),
        Column("best_id", _I32, "", "the most likely token"),
        Column("class", _ID, "", "class of the recorded token"),
        Column("best_class", _ID, "", "class of the most likely token"),
        Column("nll_full", _F64, "nats", "surprisal of the recorded token"),
        Column("best_prob", _F64, "", "probability of the most likely token"),
        Column("entropy_nats", _F64, "nats", "entropy"),
        Column("top_k_size", _I32, "tokens", "tokens at least as likely as the 50th"),
        Column("top_p_size", _I32, "tokens", "most likely tokens that have 95 % of the mass"),
        Column("min_p_size", _I32, "tokens", "tokens at least 5 % as likely as the most likely"),
        Column("is_given", _BOOL, "", "of a text that was given, not made by the model"),
        Column("regime", _I32, "", "stretch of steady entropy, counted from 0"),
    ),
)

CANDIDATES = Table(
    "candidates",
    "an estimator's set of one size at one scored step",
    (
        _SEQUENCE,
        Column("position", _I32, "tokens", "position of the predicted token"),
        _ESTIMATOR,
        _CONTROLLER,
        _FIT,
        _SIZE,
        Column("set_size", _I32, "tokens", "candidates really scored, pinned ones included"),
        Column("is_fallback", _BOOL, "", "the full head was run after all"),
        Column("hit_chosen", _BOOL, "", f"the {_HIT_CHOSEN}"),
        Column("hit_argmax", _BOOL, "", f"the {_HIT_ARGMAX}"),
        Column("hit_top_k", _BOOL, "", "all 50 most likely tokens are candidates"),
        Column("hit_top_p", _BOOL, "", "so are the most likely tokens with 95 % of the mass"),
        Column("hit_min_p", _BOOL, "", "so are tokens at least 5 % as likely as the best"),
        Column("neg_log_mass_nats", _F64, "nats", "-ln of the candidates' mass: KL(pruned|full)"),
        Column("jsd_nats", _F32, "nats", "Jensen-Shannon divergence of pruned and full"),
        Column("backoff_kl_nats", _F32, "nats", "KL(full|back-off with the true missing mass)"),
        Column("backoff_kl_causal_nats", _F32, "nats", "KL(full|back-off with a foretold one)"),
        Column("nll_backoff", _F32, "nats", "surprisal of the recorded token under the back-off"),
    ),
)

CANDIDATE_SETS = Table(
    "candidate_sets",
    "an estimator's ranking at one of a few scored steps, for the union over a batch",
    (
        _SEQUENCE,
        Column("position", _I32, "tokens", "position of the predicted token"),
        _ESTIMATOR,
        _CONTROLLER,
        Column("ids", pa.list_(_I32), "", "candidates, best first, pinned ones left out"),
    ),
)

_LOW = Column("low", _F64, "", "lower end of the 95 % bootstrap interval; null below 3 sequences")
_HIGH = Column("high", _F64, "", "upper end")
_N = Column("n", _I32, "sequences", "sequences that have such a step")

CANDIDATE_STATS = Table(
    "candidate_stats",
    "a statistic of a scheme's sets of one size, by group of scored steps",
    (
        _ESTIMATOR,
        _CONTROLLER,
        _FIT,
        _SIZE,
        Column(
            "grouping",
            _ID,
            "",
            "all, domain, bucket (length), entropy, class (of the recorded token), position (number "
            "of the scored step), regime",
        ),
        Column("group", _ID, "", "which of them"),
        Column("statistic", _ID, "", "what is told"),
        Column("unit", _ID, "", "its unit; empty for a share"),
        Column("value", _F64, "", "its value over all steps alike (micro average)"),
        _LOW,
        _HIGH,
        _N,
        Column("num_steps", _I64, "steps", "steps that it is taken over"),
    ),
)

MISSES = Table(
    "misses",
    "a step whose most likely token was no candidate, of the most certain ones of a scheme and size",
    (
        _ESTIMATOR,
        _CONTROLLER,
        _FIT,
        _SIZE,
        Column("place", _I32, "", "1 is the most certain one"),
        Column("num_misses", _I64, "steps", "all such steps, shown or not"),
        _SEQUENCE,
        _DOMAIN,
        Column("position", _I32, "tokens", "position of the predicted token"),
        Column("best_id", _I32, "", "the most likely token"),
        Column("text", _STR, "", "its readable text"),
        Column("class", _ID, "", "its class"),
        Column("best_prob", _F64, "", "its probability"),
        Column("entropy_nats", _F64, "nats", "entropy of the step"),
        Column("token_id", _I32, "", "the recorded token"),
        Column("token_text", _STR, "", "its readable text"),
        Column("context", _STR, "", "readable text of the 12 tokens before"),
    ),
)

MISS_CLASSES = Table(
    "miss_classes",
    "a class of tokens: its part of what a scheme's sets of one size missed",
    (
        _ESTIMATOR,
        _CONTROLLER,
        _FIT,
        _SIZE,
        Column("class", _ID, "", "class of the most likely token"),
        Column("num_misses", _I64, "steps", "steps whose most likely token was no candidate"),
        Column("num_steps", _I64, "steps", "steps whose most likely token is of this class"),
        Column("miss_share", _F64, "", "part of all misses; null where nothing was missed"),
        Column("step_share", _F64, "", "part of all steps"),
        Column("lift", _F64, "", "share of misses over share of steps: above 1 is missed more"),
    ),
)

BATCH_UNIONS = Table(
    "batch_unions",
    "a scheme's sets of one size in batches of requests that are decoded together",
    (
        _ESTIMATOR,
        _CONTROLLER,
        _FIT,
        _SIZE,
        Column("batch", _I32, "", "requests, each of another sequence"),
        Column("num_draws", _I32, "", "batches that the means are over"),
        Column("n", _I32, "sequences", "sequences that they are drawn from"),
        Column("union_size", _F64, "tokens", "tokens that are a candidate of some request, mean"),
        Column("union_frac", _F64, "", "the same over V"),
        Column(
            "cost_frac",
            _F64,
            "",
            "bytes of the union and, once, of the estimator over those of the head, which a batch "
            "reads once",
        ),
        Column("macs_own_frac", _F64, "", "multiply-adds a request that scores its own set"),
        Column("macs_union_frac", _F64, "", "the same if each request scores the union"),
    ),
)

VERDICTS = Table(
    "verdicts",
    "a domain and a share of most likely tokens to be kept: what keeps it, the cheapest; chosen on "
    "one half of the prompts, judged on the other",
    (
        _DOMAIN,
        Column("hit_level", _F64, "", "share of steps whose most likely token is to be kept"),
        Column(
            "verdict",
            _ID,
            "",
            "kept, not kept on the other half, not suitable, too few prompts, not enough steps, "
            "nothing to judge",
        ),
        Column("estimator", _ID, "", "what was chosen, else the best there is; null without any"),
        _CONTROLLER,
        _FIT,
        _SIZE,
        Column("hit_argmax", _F64, "", f"steps that judge whose {_HIT_ARGMAX}"),
        Column(
            "low",
            _F64,
            "",
            "lower end of the 95 % bootstrap interval over prompts, at most 1 - 3 / steps where nothing "
            "was missed; null below 3 prompts",
        ),
        _HIGH,
        Column("n", _I32, "prompts", "prompts that judge, each with all its sequences"),
        Column("num_steps", _I64, "steps", "scored steps that judge"),
        Column("n_choosing", _I32, "prompts", "prompts that choose"),
        Column("hit_choosing", _F64, "", "hit_argmax on them"),
        Column("low_choosing", _F64, "", "low on them"),
        Column("steps_needed", _I64, "steps", "steps without a miss that would show the level"),
        Column("cost_frac", _F64, "", "bytes read a step over those of the full head"),
        Column("set_size_mean", _F64, "tokens", "candidates really scored"),
        Column("why", _STR, "", "the verdict in a sentence"),
    ),
)

PROTECTED_RECENT = 16
"""Newest keys at the eviction point that a recommended fraction protects, beside the sinks."""

_NEEDED = "of the keys seen at the point, those that keep"
_WITH = f"with the first {SINK_KEYS} and the newest {PROTECTED_RECENT} protected"

ATTENTION_RESULTS = Table(
    "attention",
    "the attention of a KV head of a layer on one sequence, or of the layer (KV head -1); means over "
    "scored rows and query heads, rows scaled to 1 over the keys",
    (
        _SEQUENCE,
        _DOMAIN,
        _BUCKET,
        _LEVEL,
        _LAYER,
        Column("kv_head", _I16, "", "key-value head"),
        Column("first_row", _I32, "tokens", "position of the first row measured"),
        Column("num_scored", _I32, "rows", "rows measured, of each query head"),
        Column("seen_keys", _F32, "keys", "keys that a row sees"),
        Column("key_mass", _F32, "", "softmax on keys, before scaling; sink logits have the rest"),
        Column("entropy_nats", _F32, "nats", "entropy of a row over its keys"),
        Column("entropy_frac", _F32, "", "entropy over ln(keys seen); rows of one key left out"),
        Column("entropy_variance", _F32, "nats^2", "variance of the entropy over rows"),
        Column(
            "row_variance",
            _F32,
            "",
            "variance over later rows of the attention on a key, summed over the point's keys",
        ),
        Column("effective_keys", _F32, "keys", "1 / sum a^2, the participation number"),
        Column("keys_90", _F32, "keys", "fewest keys with 90 % of a row's mass"),
        Column("keys_95", _F32, "keys", "fewest keys with 95 %"),
        Column("keys_99", _F32, "keys", "fewest keys with 99 %"),
        Column("keys_90_frac", _F32, "", "those over the keys seen, 90 %"),
        Column("keys_95_frac", _F32, "", "95 %"),
        Column("keys_99_frac", _F32, "", "99 %"),
        Column("gini", _F32, "", "Gini index over the keys seen: 0 all alike, near 1 one has all"),
        Column("top_1_mass", _F32, "", "mass on the largest 1 % of the seen keys, rounded up"),
        Column("top_5_mass", _F32, "", "on the largest 5 %"),
        Column("top_10_mass", _F32, "", "on the largest 10 %"),
        Column("first_1_mass", _F32, "", "mass on the sequence's first key"),
        Column("first_4_mass", _F32, "", "on its first 4"),
        Column("newest_1_mass", _F32, "", "mass on the row's own key"),
        Column("newest_32_mass", _F32, "", "on its newest 32"),
        Column("newest_128_mass", _F32, "", "on its newest 128"),
        Column("mean_distance", _F32, "tokens", "distance from query to key, weighted by mass"),
        Column(
            "distance_mass",
            pa.list_(_F32),
            "",
            "mass by distance from query to key: 0, 1, 2 to 3, 4 to 7 ... (doubling); the sequence's "
            "first key left out, so that these and first_1_mass add up to 1",
        ),
        Column("overlap_lags", pa.list_(_I32), "rows", "lags of the overlap: 1, 2, 4 ..."),
        Column(
            "overlap",
            pa.list_(_F32),
            "",
            f"part of a row's {TOP_KEYS} top keys on top so many rows later",
        ),
        Column("half_life_rows", _F32, "rows", "lag at which half is left; null if more stays"),
        Column(
            "group_jaccard",
            _F32,
            "",
            f"Jaccard overlap of the {TOP_KEYS} top keys, pairs of query heads of a group",
        ),
        Column(
            "kv_head_jaccard", _F32, "", "the same with the layer's other KV heads, group means"
        ),
        Column("next_layer_jaccard", _F32, "", "the same with the layer above, layer means"),
        Column("point", _I32, "tokens", "tokens seen when the oracle's set is chosen, once"),
        Column("point_keys", _I32, "keys", "keys that the cache of a head holds there"),
        Column("row_quantile", _F32, "", "share of later rows and heads that must keep the mass"),
        Column("oracle_frac_90", _F32, "", f"{_NEEDED} 90 % of a later row's mass, oracle's order"),
        Column("oracle_frac_95", _F32, "", "95 %"),
        Column("oracle_frac_99", _F32, "", "99 %"),
        Column("needed_frac_90", _F32, "", f"{_NEEDED} 90 %, {_WITH}"),
        Column("needed_frac_95", _F32, "", "95 %"),
        Column("needed_frac_99", _F32, "", "99 %"),
    ),
)

ANCHOR_KEYS = 16
"""Most attended keys of a row, mean over the heads of a layer, that are its anchors."""

_HEAD = Column("head", _I16, "", "query head; -1: the mean of all heads' numbers")

ATTENDED = Table(
    "attended",
    "how the attention of a query head foretells the next token on one sequence; means over scored "
    "rows. Positions with the same token count as one; the sequence's first key is left out and "
    "the rest of a row scaled to 1: the context",
    (
        _SEQUENCE,
        _DOMAIN,
        _BUCKET,
        _LEVEL,
        _LAYER,
        _HEAD,
        Column("first_row", _I32, "tokens", "position of the first row measured"),
        Column("num_scored", _I32, "rows", "rows measured: those that a token follows"),
        Column("copied_frac", _F32, "", "rows whose next token is in the context: copied rows"),
        Column("distinct_tokens", _F32, "tokens", "distinct tokens in the context"),
        Column("next_mass", _F32, "", "attention on the next token, of copied rows"),
        Column("chance_mass", _F32, "", "what it would get if all positions got alike"),
        Column(
            "rank_median",
            _F32,
            "",
            "median over copied rows of its rank among distinct tokens by attention, 1 the most "
            "attended; tokens that get as much go before it",
        ),
        Column("reciprocal_rank", _F32, "", "mean of 1 / rank, of copied rows"),
        Column("top_1_hit", _F32, "", "copied rows whose most attended token comes next"),
        Column("top_8_hit", _F32, "", "whose next token is among the 8 most attended"),
        Column("top_64_hit", _F32, "", "among the 64"),
        Column("top_1_hit_all", _F32, "", "the same share of all rows: at most copied_frac"),
        Column("top_8_hit_all", _F32, "", "of all rows, among the 8"),
        Column("top_64_hit_all", _F32, "", "of all rows, among the 64"),
        Column(
            "repeated_frac",
            _F32,
            "",
            "rows with a repeat: a position in the context that follows a copy of the row's token",
        ),
        Column("induction_mass", _F32, "", "attention on such positions, of rows with a repeat"),
        Column("induction_chance", _F32, "", "what they would get if all positions got alike"),
        Column("induction_hit", _F32, "", "rows with a repeat: the next token stands there"),
    ),
)

_CONTEXT = (
    Column("context_first", _I32, "tokens", "fewest tokens seen of the bucket, the row's included"),
    Column("context_last", _I32, "tokens", "most tokens seen of the bucket"),
)

ANCHOR_DRIFT = Table(
    "anchor_drift",
    f"how a layer's anchors move on one sequence, in one bucket of context length: the "
    f"{ANCHOR_KEYS} keys that the mean of its heads attends to most, the first key left out; means "
    "over scored rows that see more keys than that",
    (
        _SEQUENCE,
        _DOMAIN,
        _BUCKET,
        _LEVEL,
        _LAYER,
        *_CONTEXT,
        Column("num_scored", _I32, "rows", "rows measured"),
        Column("overlap_1", _F32, "", "Jaccard overlap with the anchors of the row before"),
        Column("overlap_16", _F32, "", "with those of 16 rows before; null if there are none"),
        Column("drift_1", _F32, "", "1 - overlap_1"),
        Column("drift_16", _F32, "", "1 - overlap_16"),
        Column("age_tokens", _F32, "tokens", "distance from a row to its anchors"),
        Column("prompt_frac", _F32, "", "anchors that lie in the prompt; null in plain text"),
    ),
)

ATTENDED_SUMMARY = Table(
    "attended_summary",
    "a measure of attended or anchor_drift over sequences, with its interval",
    (
        Column("layer", _I16, "", "layer number; -1: mean over layers within a sequence"),
        _HEAD,
        _DOMAIN,
        *_CONTEXT,
        _LEVEL,
        Column("measure", _ID, "", "column that is summarised"),
        Column("mean", _F64, "", "mean over sequences"),
        Column("low", _F64, "", "lower end of the 95 % bootstrap interval; null below 3 sequences"),
        Column("high", _F64, "", "upper end"),
        Column("n", _I32, "sequences", "sequences that have a value"),
    ),
)

_RULE = Column("rule", _ID, "", "what is done to one layer alone; its identity")

LAYER_RESULTS = Table(
    "layers",
    "a layer (KV head -1) or a KV head of it under a rule on one sequence, all others full",
    (
        _SEQUENCE,
        _DOMAIN,
        _RULE,
        _LAYER,
        Column("kv_head", _I16, "", "key-value head"),
        _LEVEL,
        Column("target_frac", _F32, "", "what the rule was asked to keep of the tokens seen"),
        Column(
            "dropped_entries_frac", _F64, "", "entries that rows dropped; null where they are kept"
        ),
        Column(
            "kept_frac",
            _F64,
            "",
            "entries held there over those of the full cache; null for rows and transforms",
        ),
        Column("is_idle", _BOOL, "", "the rule found nothing to drop there: no measurement"),
        Column("nll_full", _F64, "nats a token", "surprisal under the full cache"),
        Column("nll_pruned", _F64, "nats a token", "surprisal with the layer changed"),
        Column("kl_nats", _F64, "nats a token", "KL of the next-token distributions"),
        Column("kl_predicted_nats", _F64, "nats a token", "the same foretold from probes"),
        Column(
            "noise_kl_nats", _F64, "nats a token", "KL of the same rows run anew: rounding alone"
        ),
        Column("same_top_frac", _F64, "", "steps whose most likely token stays the same"),
        _SCORED,
    ),
)

LAYER_SUMMARY = Table(
    "layer_summary",
    "a layer (KV head -1) or a KV head under a rule, over sequences",
    (
        _RULE,
        _LAYER,
        Column("kv_head", _I16, "", "key-value head"),
        _LEVEL,
        Column("kl_nats", _F64, "nats a token", "mean over sequences"),
        Column("low", _F64, "", "lower end of its 95 % bootstrap interval; null below 3 sequences"),
        Column("high", _F64, "", "upper end"),
        Column("n", _I32, "sequences", "sequences"),
        Column("num_excluded", _I32, "sequences", "sequences left out: nothing to drop there"),
        Column("share", _F64, "", "its part of the sum over layers (over heads, of all layers)"),
        Column("rank", _I32, "", "place by mean KL, 1 the most sensitive"),
        Column("nll_change", _F64, "nats a token", "surprisal over that of the full cache, mean"),
        Column("noise_kl_nats", _F64, "nats a token", "KL that rounding alone makes, mean"),
        Column("is_protected", _BOOL, "", "to be protected by the stated rule; null: no claim"),
    ),
)

RECOMMENDED = Table(
    "recommended",
    "a layer: the part of the keys seen at the eviction point that is worth keeping, and why",
    (
        _LAYER,
        _LEVEL,
        Column("kept_frac", _F32, "", f"quantile over sequences of what is needed, {_WITH}"),
        Column("low", _F64, "", "lower end of its 95 % bootstrap interval; null below 3 sequences"),
        Column("high", _F64, "", "upper end"),
        Column("n", _I32, "sequences", "sequences"),
        Column("mass_frac", _F32, "", "attention mass of a later row that is to be kept"),
        Column("quantile", _F32, "", "share of rows and heads, and of sequences, that keep it"),
        Column("num_scored", _I64, "rows", "rows measured, over sequences"),
        Column("point_keys", _F32, "keys", "keys seen at the eviction point, mean"),
        Column("mean_frac", _F32, "", "what is needed, mean over sequences"),
        Column("oracle_frac", _F32, "", "the same without protection"),
        Column("head_mean_frac", _F32, "", "each head with a budget of its own, mean over heads"),
        Column("head_max_frac", _F32, "", "the same of the head that needs most"),
        Column("entropy_frac", _F32, "", "entropy over ln(keys seen), mean over sequences"),
        Column("effective_keys", _F32, "keys", "participation number of a row"),
        Column(
            "keys_95_frac", _F32, "", "keys with 95 % of a row's mass, chosen anew for each row"
        ),
        Column("first_4_mass", _F32, "", "mass on the first 4 keys"),
        Column("newest_32_mass", _F32, "", "mass on the newest 32 keys"),
        Column("half_life_rows", _F32, "rows", "half-life of top keys, where they have one"),
        Column("kv_head_jaccard", _F32, "", "overlap of top keys between KV heads"),
        Column("next_layer_jaccard", _F32, "", "overlap of top keys with the layer above"),
    ),
)

STACKING = Table(
    "stacking",
    "a policy that evicts and transforms, at one kept fraction: each alone, then together",
    (
        Column("policy", _ID, "", "canonical text of both together"),
        Column("eviction", _ID, "", "canonical text of the policy without its transform"),
        Column("transform", _ID, "", "canonical text of the transform alone, on the full cache"),
        _LEVEL,
        Column(
            "measure",
            _ID,
            "",
            "local: output_error, output_error_sq; else a KL; the last two add up if independent",
        ),
        Column("kept_frac", _F64, "", "bytes held together over the full cache's, mean"),
        Column("eviction_mean", _F64, "", "measure of the eviction alone, mean over sequences"),
        Column("transform_mean", _F64, "", "of the transform alone"),
        Column("together_mean", _F64, "", "of both together"),
        Column("interaction", _F64, "", "together - (eviction + transform), mean"),
        Column("low", _F64, "", "lower end of its 95 % bootstrap interval; null below 3 sequences"),
        Column("high", _F64, "", "upper end"),
        Column("n", _I32, "sequences", "sequences that have all three"),
        Column("num_excluded", _I32, "sequences", "sequences left out: nothing was evicted there"),
        Column("error_bound", _F64, "", "output error at which a transform alone costs too much"),
        Column("exceeds_error_bound", _BOOL, "", "the transform alone does: do not stack it"),
        Column(
            "perplexity_change", _F64, "", "perplexity that the transform alone costs (propagated)"
        ),
        Column("perplexity_bound", _F64, "", "perplexity at which it costs too much"),
        Column("exceeds_perplexity_bound", _BOOL, "", "the transform alone does: do not stack it"),
    ),
)

ENOUGH_CELLS = 10
"""Fewer cells of a calibration correct nothing, and say nothing of how far to trust a prediction."""

CALIBRATION = Table(
    "calibration",
    "how far an estimate can be trusted: a statistic of cells that were run at all three levels",
    (
        Column(
            "statistic",
            _ID,
            "",
            "spearman, spearman_within (sequences), spearman_lowest, log_pearson, pairs_ordered "
            "(share of pairs of policies of one target on one sequence), "
            "propagated_over_predicted (median), power_law_a and power_law_b (log propagated = a + "
            "b log predicted), left_out_factor (exp of the median |log error|, each sequence by the "
            "law of all others), cells and pairs (counts)",
        ),
        Column(
            "level",
            _ID,
            "",
            "whose estimate is held against propagated KL: predicted (KL) or local (output error)",
        ),
        Column(
            "group",
            _ID,
            "",
            "all, or which of them: bucket of the predicted KL, sequence, what is left out (bound: "
            "looks ahead; idle: changes nothing; no logarithm: propagated KL at or below the noise "
            "floor, or a prediction of 0; tied; near noise)",
        ),
        Column("value", _F64, "", "its value over all of these cells"),
        Column("low", _F64, "", "lower end of its 95 % bootstrap interval; null below 3 sequences"),
        Column("high", _F64, "", "upper end"),
        Column("num_cells", _I32, "cells", "cells: a policy on a sequence"),
        Column("num_sequences", _I32, "sequences", "sequences"),
    ),
)

SUMMARY = Table(
    "summary",
    "a measure of a policy or estimator over sequences, with its interval",
    (
        Column("question", _ID, "", "kv or vocab"),
        Column("family", _ID, "", "short name of a policy or estimator, without its size"),
        Column("name", _ID, "", "canonical text"),
        _LEVEL,
        _DOMAIN,
        _BUCKET,
        Column("causal", _BOOL, "", "false for a bound that no decoder reaches"),
        Column("x_name", _ID, "", "what x is: kept_frac, read_frac (recall policies) or size"),
        Column("x", _F64, "", "mean of it over the sequences"),
        Column("target", _F64, "", "what was asked for: fraction or size"),
        Column("measure", _ID, "", "column of the results that is summarised"),
        Column("mean", _F64, "", "mean over sequences"),
        Column("low", _F64, "", "lower end of the 95 % bootstrap interval; null below 3 sequences"),
        Column("high", _F64, "", "upper end"),
        Column("n", _I32, "sequences", "sequences"),
        Column("num_excluded", _I32, "sequences", "sequences left out: nothing was evicted there"),
    ),
)

TIMINGS = Table(
    "timings",
    "a piece of work of one run",
    (
        Column("what", _STR, "", "cell group or phase"),
        Column("sequence_id", _STR, "", "sequence; null for phases"),
        Column("num_cells", _I32, "cells", "cells computed"),
        Column("wall_s", _F64, "s", "time"),
    ),
)

HEAD_TIMES = Table(
    "head_times",
    "a candidate-set size at a batch: what its rows of the head take on the machine of the run",
    (
        Column("batch", _I32, "", "hidden states multiplied at once, each with a set of its own"),
        Column("size", _I32, "tokens", "candidates of each of them, random; at most V"),
        Column("gathered_rows", _I32, "tokens", "rows of the union of the sets; median"),
        Column("gather_s", _F64, "s", "copying these rows side by side; median"),
        Column("multiply_s", _F64, "s", "their product with the hidden states; median"),
        Column("contiguous_s", _F64, "s", "product alone, one list of size rows side by side"),
        Column("full_s", _F64, "s", "product with the whole head; median"),
        Column("spread_s", _F64, "s", "interquartile range of gathering and multiplying together"),
        Column("full_spread_s", _F64, "s", "interquartile range of the whole head"),
        Column("rounds", _I32, "", "how often each was timed, in turn"),
        Column("threads", _I32, "", "threads of torch"),
        Column("dtype", _ID, "", "the head's own type, in which it was multiplied"),
        Column("head_share", _F64, "", "the head's part of the weight bytes a step reads; or null"),
        Column("ceiling_free", _F64, "", "speed-up of a step at batch 1 if the head were free"),
    ),
)

SHOWN = Table(
    "shown",
    "a token of a sequence that a report shows",
    (
        _SEQUENCE,
        Column("position", _I32, "tokens", "position"),
        Column("text", _STR, "", "readable text of the token"),
        Column("is_generated", _BOOL, "", "made by the model"),
        Column("role", _ID, "", "role of its message"),
        Column("entropy_nats", _F32, "nats", "entropy of the step that predicted it"),
        Column("surprisal_nats", _F32, "nats", "its surprisal"),
        Column("rank", _I32, "", "its rank"),
        Column("top_texts", pa.list_(_STR), "", "readable text of the most likely tokens"),
        Column("top_probs", pa.list_(_F32), "", "their probabilities"),
    ),
)

RESULT_TABLES = (
    KV_RESULTS,
    VOCAB_RESULTS,
    ATTENTION_RESULTS,
    ATTENDED,
    ANCHOR_DRIFT,
    ATTENDED_SUMMARY,
    RECOMMENDED,
    SUMMARY,
    TIMINGS,
    SHOWN,
)
"""What a simulation writes that is asked for nothing in particular."""

ASKED_TABLES = (
    HELD,
    SCORED,
    CANDIDATES,
    CANDIDATE_STATS,
    MISSES,
    MISS_CLASSES,
    BATCH_UNIONS,
    VERDICTS,
    HEAD_TIMES,
    STACKING,
    LOGITS,
    LOGIT_STATS,
    LAYER_RESULTS,
    LAYER_SUMMARY,
)
"""What stands in a results folder where it was asked for."""
