"""examples/language_model.py learns more of a text than how frequent its words are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import datasets
import language_model
from paramserve.errors import ParamServeError


@pytest.fixture(scope="module")
def folder() -> Path:
    """The plays, from the user's cache or fetched into it."""
    try:
        return datasets.fetch_plays()
    except ParamServeError as error:
        pytest.skip(f"THE LANGUAGE MODEL IS NOT CHECKED HERE: {error}")


SMALL = "--words 60000 --vocabulary 500 --embedding 32 --hidden 64 --lr 0.005 --servers 2"


@pytest.mark.slow
@pytest.mark.timeout(400)  # fetching may try each source to its end first
def test_language_model_example_small_is_clearly_better_than_unigrams(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"{SMALL} --steps 200 --every 50 --data {folder}"
    assert language_model.main(options.split()) == 0
    output = capsys.readouterr().out
    assert "58,200 words to train on, 1,780 held out, vocabulary 500" in output
    while_training = re.findall(r"update +(\d+) +perplexity +([\d.]+)", output)
    assert while_training
    # Two servers without a common clock agree on a moment: one update or a few later.
    versions = [int(version) for version, _ in while_training]
    assert all(version >= 50 and version % 50 < 25 for version in versions), versions
    ended = re.search(r"Held-out perplexity: ([\d.]+); of the unigram model: ([\d.]+)", output)
    assert ended is not None
    reached, unigram = map(float, ended.groups())
    assert reached < 0.75 * unigram
