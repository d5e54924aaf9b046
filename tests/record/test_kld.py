"""Base files of llama.cpp's perplexity tool, written by loops from its rule and imported."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests import tiny
from tracekit.errors import CellsFailedError, InputError
from tracekit.record import kld_file
from tracekit.record.kld import import_kld
from tracekit.record.kld_file import read_kld
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracekit.model.load import LoadedModel

HALF_CODE_NATS = 16 / 65535 / 2 + 1e-5
"""Largest error of a log-probability that is not clamped: half a code, and float32 rounding."""

VOCAB = 272


def encode(logits: Sequence[float], clamp: float = 16.0) -> bytes:
    """Return one row as llama.cpp writes it: ``log_softmax`` of perplexity.cpp, loop by loop."""
    highest, lowest = max(logits), min(logits)
    lowest = max(lowest, highest - clamp)
    log_sum_exp = math.log(sum(math.exp(z - highest) for z in logits))
    scale = (highest - lowest) / 65535
    codes = []
    for z in logits:
        is_above = z > lowest and scale > 0
        codes.append(round((z - lowest) / scale) if is_above else 0)
    row = struct.pack("<2f", scale, lowest - highest - log_sum_exp)
    row += struct.pack(f"<{len(codes)}H", *codes)
    return row + b"\0\0" * (len(logits) % 2)


def write_kld(
    path: Path, tokens: Sequence[Sequence[int]], logits: Any, clamp: float = 16.0
) -> None:
    """Write a file; ``logits[chunk][position]`` are those of every position of every chunk."""
    num_ctx, num_vocab = len(tokens[0]), len(logits[0][0])
    data = b"_logits_" + struct.pack("<3i", num_ctx, num_vocab, len(tokens))
    for chunk in tokens:
        data += struct.pack(f"<{num_ctx}i", *chunk)
    for rows in logits:
        for position in range(num_ctx // 2, num_ctx - 1):
            data += encode([float(z) for z in rows[position]], clamp)
    path.write_bytes(data)


def random_text(seed: int, num_chunks: int, num_ctx: int, num_vocab: int = VOCAB) -> Any:
    """Return tokens [C, n_ctx] and logits [C, n_ctx, V] whose range stays within the clamp."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(3, min(num_vocab, 260), (num_chunks, num_ctx)).tolist()
    return tokens, draw.uniform(-7, 7, (num_chunks, num_ctx, num_vocab))


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    from tracekit.model.load import load_model

    return load_model(str(model_folder))


@pytest.fixture
def kld(tmp_path: Path) -> Path:
    """Return a file of 3 chunks of 12 tokens."""
    write_kld(tmp_path / "base.kld", *random_text(0, 3, 12))
    return tmp_path / "base.kld"


def steps_of(trace: Trace, chunk: int) -> Any:
    return trace.table("steps", sequence_id=f"chunk-{chunk:04d}#0")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


@settings(max_examples=40, deadline=None)
@given(
    num_vocab=st.integers(1, 41),
    num_ctx=st.integers(3, 9),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    clamp=st.sampled_from([16.0, 24.0]),
    num_masked=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_decoded_rows_are_the_log_probabilities_that_were_encoded(
    tmp_path_factory: pytest.TempPathFactory,
    num_vocab: int,
    num_ctx: int,
    spread: float,
    clamp: float,
    num_masked: int,
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 1, (2, num_ctx, num_vocab)) * spread
    masked = min(num_masked, num_vocab - 1)
    logits[..., :masked] = -np.inf
    tokens = draw.integers(0, num_vocab, (2, num_ctx)).tolist()
    path = tmp_path_factory.mktemp("kld") / "base.kld"
    write_kld(path, tokens, logits, clamp)
    file = read_kld(path)
    assert file.token_CT.tolist() == tokens
    assert (file.num_whole, file.num_scored) == (2, num_ctx - 1 - num_ctx // 2)
    for chunk in range(2):
        blocks = list(file.rows(chunk))
        decoded = np.concatenate([block.log_prob_TV for block in blocks])
        counted = np.concatenate([block.num_clamped_T for block in blocks])
        assert counted.sum() == file.num_clamped(chunk)
        for number, position in enumerate(range(num_ctx // 2, num_ctx - 1)):
            row = logits[chunk, position]
            low = row < row.max() - clamp
            wanted = np.where(low, log_softmax(row).max() - clamp, log_softmax(row))
            np.testing.assert_allclose(decoded[number], wanted, atol=clamp / 65535 / 2 + 1e-5)
            # An entry less than half a code above the clamp cannot be told from those at it.
            least, most = low.sum(), (row < row.max() - clamp + clamp / 65535).sum()
            assert least <= counted[number] <= (most if least else 0)


@pytest.mark.parametrize("num_ctx", [3, 11, 12])
def test_steps_are_those_of_the_logits_within_half_a_code(
    loaded: LoadedModel, tmp_path: Path, num_ctx: int
) -> None:
    tokens, logits = random_text(num_ctx, 3, num_ctx)
    write_kld(tmp_path / "base.kld", tokens, logits)
    done = import_kld(tmp_path / "base.kld", loaded, tmp_path / "trace")
    assert (done.num_sequences, done.num_new, done.num_missing) == (3, 3, 0)
    assert done.num_clamped == 0
    trace, first = Trace(tmp_path / "trace"), num_ctx // 2
    nlls, wanted = [], []
    for chunk in range(3):
        steps = steps_of(trace, chunk)
        assert steps["position"].tolist() == list(range(first + 1, num_ctx))
        assert steps["is_scored"].all()
        for _, step in steps.iterrows():
            position, target = step["position"], tokens[chunk][step["position"]]
            z = logits[chunk, position - 1]
            log_prob, mean = log_softmax(z), z.mean()
            prob, bound = np.exp(log_prob), HALF_CODE_NATS
            assert step["surprisal_nats"] == pytest.approx(-log_prob[target], abs=bound)
            # d(entropy) = sum of |d ln p| p (|ln p| + 1), at most.
            slack = bound * (1 + (prob * np.abs(log_prob)).sum()) * 2
            assert step["entropy_nats"] == pytest.approx(-(prob * log_prob).sum(), abs=slack)
            assert step["internal_energy"] == pytest.approx(mean - (prob * z).sum(), abs=4 * slack)
            assert step["free_energy"] == pytest.approx(
                mean - z.max() + log_prob.max(), abs=4 * slack
            )
            least = (z > z[target] + 2 * bound).sum()
            assert least <= step["rank"] <= (z > z[target] - 2 * bound).sum()
            np.testing.assert_allclose(
                step["top_logprobs"], np.sort(log_prob)[::-1][:20], atol=2 * bound
            )
            nlls.append(step["surprisal_nats"])
            wanted.append(-log_prob[target])
        assert steps["logsumexp"].isna().all()
        assert math.isnan(steps["entropy_change"][0])
    assert math.exp(np.mean(nlls)) == pytest.approx(
        math.exp(np.mean(wanted)), rel=2 * HALF_CODE_NATS
    )


def test_statistics_are_those_of_the_decoded_numbers(loaded: LoadedModel, tmp_path: Path) -> None:
    tokens, logits = random_text(5, 1, 8)
    logits *= 3  # far beyond the clamp
    logits[0, 5, 7:40] = -np.inf
    write_kld(tmp_path / "base.kld", tokens, logits)
    done = import_kld(tmp_path / "base.kld", loaded, tmp_path / "trace")
    steps = steps_of(Trace(tmp_path / "trace"), 0)
    rows = [encode([float(z) for z in logits[0, position]]) for position in (4, 5, 6)]
    num_zero = 0
    for (_, step), raw in zip(steps.iterrows(), rows, strict=True):
        scale, floor = struct.unpack_from("<2f", raw)
        codes = struct.unpack_from(f"<{VOCAB}H", raw, 8)
        decoded = np.array([scale * code + floor for code in codes])
        target = tokens[0][step["position"]]
        prob = np.exp(log_softmax(decoded))
        assert step["surprisal_nats"] == pytest.approx(-decoded[target], abs=1e-5)
        assert step["rank"] == sum(code > codes[target] for code in codes)
        assert step["entropy_nats"] == pytest.approx(-(prob * np.log(prob)).sum(), abs=1e-5)
        assert step["padded_mass"] == pytest.approx(prob[len(loaded.tokenizer) :].sum(), abs=1e-6)
        num_zero += codes.count(0)
    # The mean logit is not in the file where entries are clamped.
    assert steps[["free_energy", "internal_energy"]].isna().all(axis=None)
    manifest = Trace(tmp_path / "trace").manifest
    assert done.num_clamped == manifest["imported"]["num_clamped"] == num_zero
    assert done.num_entries == 3 * VOCAB


def test_sequences_are_chunks_of_given_text(loaded: LoadedModel, kld: Path, tmp_path: Path) -> None:
    import_kld(kld, loaded, tmp_path / "trace")
    trace = Trace(tmp_path / "trace")
    assert trace.sequence_ids == [f"chunk-000{n}#0" for n in range(3)]
    one = trace.sequences.iloc[2]
    assert one[["domain", "text_source", "finish_reason"]].tolist() == ["text", "given", "given"]
    assert one[["num_tokens", "text_start", "scored_from"]].tolist() == [12, 24, 7]
    tokens = trace.table("tokens", sequence_id="chunk-0002#0")
    assert tokens["token_id"].tolist() == read_kld(kld).token_CT[2].tolist()
    assert not tokens["is_generated"].any()
    source = trace.manifest["settings"]
    assert (source["kind"], source["source"], source["n_ctx"]) == ("kld", "base.kld", 12)
    assert len(source["source_sha256"]) == 64
    assert trace.capture == "steps"


def test_an_imported_trace_is_valid(loaded: LoadedModel, kld: Path, tmp_path: Path) -> None:
    import_kld(kld, loaded, tmp_path / "trace")
    done = validate(tmp_path / "trace")
    assert (done.problems, done.num_sequences) == ((), 3)


def test_an_imported_trace_can_be_shown(
    loaded: LoadedModel, kld: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracekit.cli.show import show

    import_kld(kld, loaded, tmp_path / "trace")
    show(str(tmp_path / "trace"))
    show(str(tmp_path / "trace"), sequence="chunk-0001#0")
    assert "chunk-0002#0" in capsys.readouterr().out


def test_blocks_of_rows_change_nothing(
    loaded: LoadedModel, kld: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_kld(kld, loaded, tmp_path / "whole")
    monkeypatch.setattr(kld_file, "BLOCK_BYTES", 2 * 4 * VOCAB)
    import_kld(kld, loaded, tmp_path / "blocks")
    whole, blocks = (Trace(tmp_path / name).table("steps") for name in ("whole", "blocks"))
    assert whole.equals(blocks)


def test_bos_stands_first_in_every_chunk_if_the_text_begins_with_it(
    model_folder: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    from tracekit.model.load import load_model

    loaded = load_model(str(model_folder))
    with_bos = tiny.tokenizer.__wrapped__()
    with_bos.bos_token = "<|im_start|>"
    tokens, logits = random_text(1, 2, 6)
    write_kld(tmp_path / "plain.kld", tokens, logits)
    tokens[0][0] = with_bos.bos_token_id
    write_kld(tmp_path / "bos.kld", tokens, logits)
    loaded = replace(loaded, tokenizer=with_bos)
    for name, first in (("plain", tokens[1][0]), ("bos", with_bos.bos_token_id)):
        import_kld(tmp_path / f"{name}.kld", loaded, tmp_path / name)
        made = Trace(tmp_path / name).table("tokens", sequence_id="chunk-0001#0")
        assert made["token_id"].tolist() == [first, *tokens[1][1:]]


def test_a_row_that_is_not_finite_is_flagged_counted_and_shown(
    loaded: LoadedModel, kld: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracekit.cli.show import show

    raw = bytearray(kld.read_bytes())
    struct.pack_into("<2f", raw, 20 + 4 * 36, math.nan, math.nan)
    kld.write_bytes(raw)
    import_kld(kld, loaded, tmp_path / "trace")
    steps = steps_of(Trace(tmp_path / "trace"), 0)
    assert steps["nonfinite"].tolist() == [VOCAB, 0, 0, 0, 0]
    assert steps["entropy_nats"].isna().tolist() == [True, False, False, False, False]
    done = validate(tmp_path / "trace")
    assert (done.num_steps, done.num_nonfinite, done.problems) == (15, 1, ())
    show(str(tmp_path / "trace"))
    show(str(tmp_path / "trace"), sequence="chunk-0000#0")
    said = capsys.readouterr().out
    assert "1 steps have logits that are not finite" in said
    assert "(logits are not finite)" in said


def test_whole_chunks_of_a_cut_file_are_kept_and_the_rest_comes_later(
    loaded: LoadedModel, kld: Path, tmp_path: Path
) -> None:
    raw = kld.read_bytes()
    kld.write_bytes(raw[:-1])
    done = import_kld(kld, loaded, tmp_path / "trace")
    assert (done.num_sequences, done.num_missing) == (2, 1)
    kld.write_bytes(raw)
    done = import_kld(kld, loaded, tmp_path / "trace")
    assert (done.num_sequences, done.num_new, done.num_missing) == (3, 1, 0)
    import_kld(kld, loaded, tmp_path / "at once")
    one, other = (Trace(tmp_path / name) for name in ("trace", "at once"))
    assert one.table("steps").equals(other.table("steps"))
    assert one.manifest["imported"] == other.manifest["imported"]


def test_another_file_is_refused_unless_the_trace_is_overwritten(
    loaded: LoadedModel, kld: Path, tmp_path: Path
) -> None:
    import_kld(kld, loaded, tmp_path / "trace")
    assert import_kld(kld, loaded, tmp_path / "trace").num_new == 0
    write_kld(kld, *random_text(9, 2, 12))
    with pytest.raises(InputError, match="source_sha256 is"):
        import_kld(kld, loaded, tmp_path / "trace")
    assert import_kld(kld, loaded, tmp_path / "trace", overwrite=True).num_new == 2


def changed(at: int, value: int) -> Callable[[bytes], bytes]:
    """Return a change of one int32 of the header."""
    return lambda raw: raw[:at] + struct.pack("<i", value) + raw[at + 4 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", "does not begin with _logits_"),
    "half a header": (lambda raw: raw[:15], "does not begin with _logits_"),
    "another format": (lambda raw: b"GGUF" + raw[4:], "does not begin with _logits_"),
    "nothing scored": (changed(8, 2), "announces 3 chunks of 2 tokens"),
    "negative vocabulary": (changed(12, -5), "vocabulary -5"),
    "smaller vocabulary": (changed(12, 200), "bytes of rows"),
    "no chunks": (changed(16, 0), "announces 0 chunks"),
    "too many chunks": (changed(16, 2**31 - 1), "ends before its first chunk"),
    "token outside": (changed(20, 272), "names 1 tokens outside"),
    "half the tokens": (lambda raw: raw[:100], "ends before its first chunk"),
    "half a chunk": (lambda raw: raw[:1000], "ends before its first chunk"),
    "a byte too many": (lambda raw: raw + b"\0", "bytes of rows"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_file_is_refused_in_one_sentence(
    loaded: LoadedModel, kld: Path, tmp_path: Path, name: str
) -> None:
    damage, why = DAMAGES[name]
    kld.write_bytes(damage(kld.read_bytes()))
    with pytest.raises(InputError, match=why):
        import_kld(kld, loaded, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_another_vocabulary_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    write_kld(tmp_path / "base.kld", *random_text(0, 1, 6, num_vocab=271))
    with pytest.raises(InputError, match=r"271 logits a token, but .* has 272"):
        import_kld(tmp_path / "base.kld", loaded, tmp_path / "trace")


def test_a_file_without_the_models_padded_rows_is_taken(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    write_kld(tmp_path / "base.kld", *random_text(0, 1, 6, num_vocab=loaded.spec.num_tokens))
    import_kld(tmp_path / "base.kld", loaded, tmp_path / "trace")
    assert steps_of(Trace(tmp_path / "trace"), 0)["padded_mass"].eq(0).all()


def test_a_missing_file_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        import_kld(tmp_path / "none.kld", "no model at all", tmp_path / "trace")


def test_the_command_prints_what_was_imported_and_fails_for_a_cut_file(
    model_folder: Path, kld: Path, tmp_path: Path
) -> None:
    from tracekit.cli.import_ import import_app

    out = tmp_path / "trace"
    command = ["kld", str(kld), "--model", str(model_folder), "-o", str(out), "--progress", "none"]
    done = CliRunner().invoke(import_app, [*command, "--json"])
    assert json.loads(done.stdout)["num_sequences"] == 3
    kld.write_bytes(kld.read_bytes()[:-1])
    done = CliRunner().invoke(import_app, [*command, "--overwrite"])
    assert "2 sequences (2 new)" in done.stdout
    assert isinstance(done.exception, CellsFailedError)
    assert "1 of 3 chunks" in str(done.exception)


@pytest.mark.slow
def test_a_file_of_the_real_models_logits_gives_its_steps(tmp_path: Path) -> None:
    from tracekit.measure.logits import step_statistics
    from tracekit.model.load import load_model

    loaded = load_model("smollm2-135m")
    text = Path(__file__).with_name("test_kld.py").read_text(encoding="utf-8")
    ids = torch.tensor(loaded.tokenizer(text[:600])["input_ids"][:48]).reshape(2, 24)
    with torch.no_grad():
        logits_CTV = loaded.model(ids).logits.float()
    write_kld(tmp_path / "base.kld", ids.tolist(), logits_CTV.numpy())
    import_kld(tmp_path / "base.kld", loaded, tmp_path / "trace")
    trace, nlls = Trace(tmp_path / "trace"), []
    for chunk in range(2):
        steps = steps_of(trace, chunk)
        wanted = step_statistics(
            logits_CTV[chunk, 12:-1], ids[chunk, 13:], num_tokens=loaded.spec.num_tokens
        )
        assert steps["position"].tolist() == list(range(13, 24))
        likely = wanted["surprisal_nats"] < 15
        surprisal = steps["surprisal_nats"].to_numpy()
        np.testing.assert_allclose(
            surprisal[likely], wanted["surprisal_nats"][likely], atol=HALF_CODE_NATS
        )
        # The raised tail: at most V exp(-16) of mass, each entry 16 nats and a little below the top.
        np.testing.assert_allclose(steps["entropy_nats"], wanted["entropy_nats"], atol=0.1)
        np.testing.assert_allclose(steps["top1_margin"], wanted["top1_margin"], atol=1e-3)
        same = [a[0] == b[0] for a, b in zip(steps["top_ids"], wanted["top_ids"], strict=True)]
        assert all(same)
        nlls += [surprisal.mean(), wanted["surprisal_nats"].mean()]
    assert nlls[0] == pytest.approx(nlls[1], abs=2 * HALF_CODE_NATS)
    assert trace.manifest["imported"]["num_clamped"] > 0
