"""examples/language_model.py: how a text becomes numbers, and what a perplexity is."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest
import torch

import language_model
from language_model import Sizes, Text

TEXT = "The cat, the dog; the cat!\nO'er the dog..." + " the" * 90 + " Cat ran away"


def test_numbered_most_frequent_words_have_numbers_and_the_rest_is_unknown() -> None:
    text = language_model.numbered(TEXT, vocabulary=4, words=None)
    assert text.vocabulary == 4
    assert text.train[:9].tolist() == [1, 3, 0, 1, 0, 0, 1, 3, 0]  # the cat , the dog ; the cat !
    assert text.train[9:15].tolist() == [0, 1, 0, 2, 2, 2]  # o'er the dog . . .


def test_numbered_vocabulary_does_not_look_at_the_held_out_part() -> None:
    text = language_model.numbered(TEXT, vocabulary=1_000, words=None)
    assert len(text.held_out) == round(0.03 * (len(text.train) + len(text.held_out))) == 3
    assert text.held_out.tolist() == [text.train[1], 0, 0]
    assert text.vocabulary == len({"the", "cat", ",", "dog", ";", "!", "o'er", ".", "<unk>"})


def test_numbered_first_words_only() -> None:
    text = language_model.numbered(TEXT, vocabulary=1_000, words=10)
    assert len(text.train) + len(text.held_out) == 10


def test_pieces_targets_are_the_words_that_follow() -> None:
    inputs, targets = language_model.pieces(np.arange(9, dtype=np.int32), length=4)
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert inputs.dtype == torch.int64


def test_pieces_last_word_has_nothing_that_follows() -> None:
    inputs, _ = language_model.pieces(np.arange(8, dtype=np.int32), length=4)
    assert inputs.tolist() == [[0, 1, 2, 3]]


def test_unigram_perplexity_is_that_of_the_frequencies_plus_one() -> None:
    text = Text(np.array([1, 1, 1, 2], np.int32), np.empty(0, np.int32), 3)
    targets = torch.tensor([[1, 2], [0, 1]])  # frequencies 1, 4, 2 of 7
    expected = (7 / 4 * 7 / 2 * 7 / 1 * 7 / 4) ** (1 / 4)
    assert language_model.unigram(text, targets) == pytest.approx(expected)


def test_perplexity_of_a_model_that_knows_nothing_is_the_number_of_words() -> None:
    sizes = Sizes(vocabulary=11, embedding=3, hidden=5)
    state = language_model.LanguageModel(sizes).state_dict()
    nothing = {name: np.zeros(value.shape, np.float32) for name, value in state.items()}
    targets = torch.arange(80).remainder(11).view(40, 2)  # more pieces than go at a time
    found = language_model.perplexity(nothing, sizes, targets, targets)
    assert found == pytest.approx(11, rel=1e-5)


def test_perplexity_of_a_model_that_is_sure_and_right_is_one() -> None:
    sizes = Sizes(vocabulary=11, embedding=3, hidden=5)
    state = dict(language_model.LanguageModel(sizes).state_dict())
    state["linear.bias"] = torch.full((11,), -math.inf)
    state["linear.bias"][7] = 0.0
    targets = torch.full((1, 6), 7)
    assert language_model.perplexity(state, sizes, targets, targets) == pytest.approx(1)


def test_default_sizes_are_the_tutorials() -> None:
    options: argparse.Namespace = language_model.parse([])
    assert (options.vocabulary, options.embedding, options.hidden) == (10_000, 256, 512)
    assert options.lr == 1e-3
