"""The block estimator against loops, and against exact Gauss-Newton by all possible labels."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.measure.influence import block_sums, foretell


def slow_foretold(
    effects: list[np.ndarray], block: int, offset: int, num_scored: int
) -> tuple[list[float], list[list[float]]]:
    """Return KL by probe and contributions [source][probe], by loops over rows."""
    num_probes, num_rows = effects[0].shape
    kls, parts = [], [[0.0] * num_probes for _ in effects]
    for p in range(num_probes):
        blocks: dict[int, list[float]] = {}
        for t in range(num_rows):
            own = blocks.setdefault((t + offset) // block, [0.0] * len(effects))
            for x, effect_PR in enumerate(effects):
                own[x] += float(effect_PR[p, t])
        kls.append(sum(sum(own) ** 2 for own in blocks.values()) / (2 * num_scored))
        for x in range(len(effects)):
            parts[x][p] = sum(own[x] * sum(own) for own in blocks.values()) / (2 * num_scored)
    return kls, parts


@given(
    probes=st.integers(1, 4),
    rows=st.integers(1, 50),
    block=st.integers(1, 20),
    offset=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
def test_the_estimator_is_that_of_plain_loops(
    probes: int, rows: int, block: int, offset: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    stacks = [draw.normal(size=(2, 3, probes, rows)), draw.normal(size=(1, 1, probes, rows))]
    sums = [block_sums(one, block=block, offset=offset) for one in stacks]
    told = foretell(sums, num_scored=rows)
    effects = [one for stack in stacks for one in stack.reshape(-1, probes, rows)]
    kls, parts = slow_foretold(effects, block, offset, rows)
    assert told.kl_nats == pytest.approx(np.mean(kls))
    if probes > 1:
        assert told.se_nats == pytest.approx(np.std(kls, ddof=1) / np.sqrt(probes))
    else:
        assert np.isnan(told.se_nats)
    assert [one.shape for one in told.parts_nats] == [(2, 3), (1, 1)]
    found = np.concatenate([one.reshape(-1) for one in told.parts_nats])
    np.testing.assert_allclose(found, np.mean(parts, axis=1), atol=1e-12)
    assert found.sum() == pytest.approx(told.kl_nats)


def test_sources_without_probes_have_no_part_and_add_nothing() -> None:
    draw = np.random.default_rng(0)
    probed, bare = draw.normal(size=(2, 3, 20)), np.zeros((4, 0, 20))
    told = foretell([block_sums(bare), block_sums(probed)], num_scored=20)
    alone = foretell([block_sums(probed)], num_scored=20)
    assert told.kl_nats == alone.kl_nats
    np.testing.assert_array_equal(told.parts_nats[1], alone.parts_nats[0])
    assert np.isnan(told.parts_nats[0]).all()
    assert np.isnan(foretell([block_sums(bare)], num_scored=20).kl_nats)


def softmax(logits_V: np.ndarray) -> np.ndarray:
    weights_V = np.exp(logits_V - logits_V.max())
    return weights_V / weights_V.sum()


def test_one_row_a_block_gives_the_exact_gauss_newton_kl_over_all_labels() -> None:
    """Logits W o at each row: KL to second order is 1 / 2 delta^T F delta, F the Fisher matrix."""
    draw = np.random.default_rng(1)
    weight_VD, output_RD = draw.normal(size=(5, 3)), draw.normal(size=(2, 3))
    delta_RD = 0.01 * draw.normal(size=(2, 3))
    exact, mean = 0.0, 0.0
    for output_D, delta_D in zip(output_RD, delta_RD, strict=True):
        p_V = softmax(weight_VD @ output_D)
        fisher_VV = np.diag(p_V) - np.outer(p_V, p_V)
        exact += float(delta_D @ weight_VD.T @ fisher_VV @ weight_VD @ delta_D) / 2 / 2
    p_RV = np.array([softmax(weight_VD @ output_D) for output_D in output_RD])
    for labels in product(range(5), repeat=2):
        chance = np.prod([p_RV[t, y] for t, y in enumerate(labels)])
        gradient_RD = np.array([(p_RV[t] - np.eye(5)[y]) @ weight_VD for t, y in enumerate(labels)])
        effect_1R = (gradient_RD * delta_RD).sum(-1)[None]
        mean += chance * foretell([block_sums(effect_1R, block=1)], num_scored=2).kl_nats
    assert mean == pytest.approx(exact, rel=1e-9)
    true = np.mean(
        [
            np.sum(p_V * np.log(p_V / softmax(weight_VD @ (output_D + delta_D))))
            for p_V, output_D, delta_D in zip(p_RV, output_RD, delta_RD, strict=True)
        ]
    )
    assert mean == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("block", [1, 2, 3])
def test_products_across_rows_cancel_over_all_labels_where_rows_read_earlier_changes(
    block: int,
) -> None:
    """Row t's logits are the sum of W_ts o_s, s <= t: one block of all rows is exact, on average."""
    draw = np.random.default_rng(2)
    weight_RRVD = draw.normal(size=(3, 3, 3, 2))
    output_RD, delta_RD = draw.normal(size=(3, 2)), draw.normal(size=(3, 2))
    logits_RV = [sum(weight_RRVD[t, s] @ output_RD[s] for s in range(t + 1)) for t in range(3)]
    p_RV = np.array([softmax(one) for one in logits_RV])
    exact = 0.0
    for t in range(3):
        moved_V = sum(weight_RRVD[t, s] @ delta_RD[s] for s in range(t + 1))
        exact += float(p_RV[t] @ moved_V**2 - (p_RV[t] @ moved_V) ** 2) / 2 / 3
    mean = 0.0
    for labels in product(range(3), repeat=3):
        chance = np.prod([p_RV[t, y] for t, y in enumerate(labels)])
        error_RV = p_RV - np.eye(3)[list(labels)]
        gradient_RD = np.array(
            [sum(error_RV[t] @ weight_RRVD[t, s] for t in range(s, 3)) for s in range(3)]
        )
        effect_1R = (gradient_RD * delta_RD).sum(-1)[None]
        mean += chance * foretell([block_sums(effect_1R, block=block)], num_scored=3).kl_nats
    if block == 3:
        assert mean == pytest.approx(exact, rel=1e-9)
    else:
        # Shorter blocks leave out what rows of one share with rows of another.
        assert mean != pytest.approx(exact, rel=1e-3)


def test_rows_that_read_no_earlier_change_give_the_same_for_any_block_on_average() -> None:
    draw = np.random.default_rng(3)
    p_RV = np.array([softmax(draw.normal(size=3)) for _ in range(3)])
    move_RV = draw.normal(size=(3, 3))
    means = []
    for block in (1, 2, 3):
        mean = 0.0
        for labels in product(range(3), repeat=3):
            chance = np.prod([p_RV[t, y] for t, y in enumerate(labels)])
            effect_1R = ((p_RV - np.eye(3)[list(labels)]) * move_RV).sum(-1)[None]
            mean += chance * foretell([block_sums(effect_1R, block=block)], num_scored=3).kl_nats
        means.append(mean)
    np.testing.assert_allclose(means, means[0], rtol=1e-9)
