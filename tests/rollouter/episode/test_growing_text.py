"""Text that is sent while it is sampled."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouter.episode.sessions import GrowingText
from asyncrl.text.tokenizer import ByteTokenizer

WHOLE = st.text(alphabet="aü世🙂 ", max_size=30).map(lambda text: list(text.encode()))
ANY = st.lists(st.integers(0, 255), max_size=60)


@given(st.one_of(WHOLE, ANY), st.data())
def test_pieces_are_a_prefix_of_the_text_and_lack_no_whole_character(tokens, data):
    decode = ByteTokenizer().decode
    growing, reported, at = GrowingText(decode), "", 0
    while at < len(tokens):
        at = data.draw(st.integers(at + 1, len(tokens)))
        reported += growing.more(tokens[:at])
        assert reported == decode(tokens[:at]).rstrip("\N{REPLACEMENT CHARACTER}")


def test_a_late_piece_costs_as_much_as_an_early_one():
    read = []

    def decode(ids):
        read.append(len(ids))
        return ByteTokenizer().decode(ids)

    growing, tokens = GrowingText(decode), list(b"abcdefgh" * 500)
    assert "".join(growing.more(tokens[:end]) for end in range(8, 4001, 8)) == "abcdefgh" * 500
    assert max(read) == 16
