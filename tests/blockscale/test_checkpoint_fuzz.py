"""Damaged checkpoints are read rightly or refused in one line, and nothing else ever happens."""

import pytest
from checkpoint_mutations import judge, mutate

COUNT = 10_000


def outcomes(numbers, folder):
    found = {"right": 0, "refused": 0}
    for number in numbers:
        what = mutate(number, folder)
        try:
            found[judge(folder)] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number}, {what}") from error
    return found


def test_a_sample_of_damaged_checkpoints(tmp_path):
    found = outcomes(range(0, COUNT, 50), tmp_path / "m")
    assert found["right"] > 20
    assert found["refused"] > 60


@pytest.mark.prove
@pytest.mark.parametrize("share", range(10))
def test_every_damaged_checkpoint(share, tmp_path):
    found = outcomes(range(share, COUNT, 10), tmp_path / "m")
    assert sum(found.values()) == COUNT // 10
