"""The built-in stories: distinct, repeatable, and grammatical in what can be checked."""

import re
from collections import Counter
from itertools import islice

from finetune.data.synthetic.story_generator import read_story_data, stories


def test_stories_are_distinct_and_of_a_fair_length() -> None:
    made = list(stories(5000))
    assert len({story.text for story in made}) == 5000
    sizes = [len(story.text.split()) for story in made]
    assert min(sizes) >= 80
    assert max(sizes) <= 220
    counts = Counter(story.label for story in made)
    assert set(counts) == set(read_story_data()["plots"])
    assert min(counts.values()) > 500


def test_the_first_stories_never_depend_on_the_number() -> None:
    assert list(stories(20)) == list(islice(stories(3000), 20))
    assert next(stories(1, seed=1)) != next(stories(1, seed=0))


def test_sentences_are_whole() -> None:
    for story in stories(3000):
        assert not re.search(r"[{}]|  |\ba [aeiou]|\ban [^aeiou]", story.text), story.text
        assert re.fullmatch(r'[A-Z"].*[.!?]"?', story.text), story.text
        assert story.text.count('"') % 2 == 0, story.text
        for sentence in re.split(r"(?<=[.!?]) ", story.text):
            assert re.match(r'["A-Z]', sentence), (sentence, story.text)
