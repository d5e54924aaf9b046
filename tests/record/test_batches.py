from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracekit.record.batches import LOOKAHEAD, batches
from tracekit.record.job import Job
from tracekit.record.rendered import Rendered


def job(number: int, lengths: list[int]) -> Job:
    def part(length: int) -> Rendered:
        return Rendered(
            ids=(1,) * length,
            roles=(None,) * length,
            turns=(0,) * length,
            is_template=(False,) * length,
            spans=(None,) * length,
            context_end=None,
            turn_ends=(),
            answer_turn=1,
            text="",
        )

    parts = tuple(part(length) for length in lengths)
    return Job(sequence_id=str(number), prompt_id="p", domain="d", parts=parts)


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), max_size=60),
    size=st.integers(1, 5),
)
def test_each_job_runs_once_and_those_of_several_parts_alone(
    shapes: list[list[int]], size: int
) -> None:
    jobs = [job(number, lengths) for number, lengths in enumerate(shapes)]
    made = list(batches(iter(jobs), size))
    assert sorted(one.sequence_id for batch in made for one in batch) == sorted(
        one.sequence_id for one in jobs
    )
    assert all(1 <= len(batch) <= size for batch in made)
    assert all(len(batch) == 1 for batch in made if any(len(one.parts) > 1 for one in batch))
    if size == 1:
        assert [batch[0].sequence_id for batch in made] == [one.sequence_id for one in jobs]


def test_neighbours_are_of_like_length() -> None:
    jobs = [job(number, [length]) for number, length in enumerate([9, 1, 8, 2, 7, 3, 6, 4])]
    made = [[len(one.parts[0].ids) for one in batch] for batch in batches(jobs, 2)]
    assert made == [[1, 2], [3, 4], [6, 7], [8, 9]]
    assert len(jobs) <= LOOKAHEAD * 2
