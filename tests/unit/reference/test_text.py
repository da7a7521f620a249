"""Output text: stop strings wherever they fall, characters split over tokens, nothing shown too early."""

from __future__ import annotations

import json

import pytest
from ddtree_engine.reference.errors import InputError, RequestError
from ddtree_engine.reference.text import OutputText, TextCodec


def feed(codec, text, **options):
    """Push the text byte by byte; (matched stop, OutputText, what was visible after each token)."""
    output, seen, matched = OutputText(codec, **options), [], None
    for token in codec.encode(text):
        matched = output.push(token)
        seen.append(output.visible)
        if matched is not None:
            break
    return matched, output, seen


def test_text_is_what_was_encoded(codec):
    _, output, seen = feed(codec, "def f():\n    return 'héé 🌲'\n")
    output.finish(drop_last=False)
    assert output.visible == "def f():\n    return 'héé 🌲'\n"
    assert all(output.visible.startswith(part) for part in seen)
    assert not any("\ufffd" in part for part in seen)


def test_an_unfinished_character_shows_only_at_the_end(codec):
    output = OutputText(codec)
    for token in codec.encode("ab🌲")[:-1]:
        output.push(token)
    assert output.visible == "ab"
    output.finish(drop_last=False)
    assert output.visible.startswith("ab\ufffd")


@pytest.mark.parametrize("before", ["", "x", "abc en"])
def test_a_stop_string_cuts_and_is_never_shown_in_part(codec, before):
    matched, output, seen = feed(codec, before + "END more", stop=("END",))
    assert matched == "END"
    assert output.visible == before
    assert not any("E" in part for part in seen)


def test_text_held_back_is_shown_when_the_stop_does_not_come(codec):
    matched, output, seen = feed(codec, "a ENx", stop=("END",))
    assert matched is None
    assert seen[3] == "a "
    assert output.visible == "a ENx"


def test_held_back_text_is_shown_when_the_output_ends(codec):
    _, output, _ = feed(codec, "a EN", stop=("END",))
    assert output.visible == "a "
    output.finish(drop_last=False)
    assert output.visible == "a EN"


def test_the_earliest_of_several_stops_wins(codec):
    matched, output, _ = feed(codec, "one\n\ntwo", stop=("two", "\n\n", "\n\nt"))
    assert (matched, output.visible) == ("\n\n", "one")


def test_no_stop_trim_keeps_the_stop(codec):
    matched, output, _ = feed(codec, "abc;def", stop=(";",), no_stop_trim=True)
    assert (matched, output.visible) == (";", "abc;")


def test_special_tokens_are_skipped_unless_asked_for(codec):
    ids = codec.encode("<|im_start|>hi")
    assert codec.decode(ids) == "hi"
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>hi"


def test_chat_goes_through_the_template(codec):
    text = codec.render_chat([{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_cannot_reach_out_of_its_sandbox(codec):
    hostile = TextCodec(codec.tokenizer, None, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="chat template"):
        hostile.render_chat([{"role": "user", "content": "x"}])


def test_a_model_without_template_says_so(codec):
    with pytest.raises(RequestError, match="no chat template"):
        TextCodec(codec.tokenizer, None, None).render_chat([])


def test_broken_tokenizer_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: no readable tokenizer"):
        TextCodec.load(tmp_path)


def test_a_broken_template_is_named(tmp_path, codec):
    codec.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    with pytest.raises(InputError, match="chat_template"):
        TextCodec.load(tmp_path)
