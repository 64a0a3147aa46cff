"""What an error suggests."""

import pytest

from octavo.base.errors import did_you_mean


@pytest.mark.parametrize("word", [float("nan"), 3, None], ids=repr)
def test_a_word_that_is_no_text_is_still_answered(word):
    assert did_you_mean(word, ["nearest"]) == "Known: nearest."
