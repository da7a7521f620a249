"""The tokenizer, the chat template, and output text that grows token by token and stops where it should."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_engine.reference.errors import InputError, RequestError
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextCodec:
    """`tokenizer.json` with what `tokenizer_config.json` adds: end-of-sequence token and chat template."""

    def __init__(self, tokenizer: Tokenizer, eos_token: str | None, chat_template: str | None) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.token_to_id(eos_token) if eos_token else None
        self._template = None
        if chat_template:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _raise_in_template
            try:
                self._template = environment.from_string(chat_template)
            except TemplateError as error:
                raise InputError(
                    f"tokenizer_config.json: chat_template: found no valid template ({error})"
                ) from error

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read a model folder's tokenizer. Raises `InputError` naming the file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"{path}: no readable tokenizer ({error})") from error
        settings: dict[str, Any] = {}
        extra = folder / "tokenizer_config.json"
        if extra.is_file():
            try:
                settings = json.loads(extra.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"{extra}: found no JSON ({error})") from error
        eos = settings.get("eos_token")
        template = settings.get("chat_template")
        jinja = folder / "chat_template.jinja"
        if jinja.is_file():
            template = jinja.read_text(encoding="utf-8")
        return cls(tokenizer, eos.get("content") if isinstance(eos, dict) else eos, template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; an incomplete character at the end becomes U+FFFD."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """A conversation through the chat template, ready for the assistant's turn."""
        if self._template is None:
            raise RequestError("the model has no chat template; use /v1/completions or /generate", "messages")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except TemplateError as error:
            raise RequestError(f"messages: the chat template refused them ({error})", "messages") from error


@dataclass
class OutputText:
    """Text of a growing output. `push` says whether a stop string is complete; `visible` may be shown.

    Text that could still become a stop string is held back, so that a stream never shows part of one.
    """

    codec: TextCodec
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    text: str = ""
    ids: list[int] = field(default_factory=list)
    _held: int = 0
    _stream: Any = None

    def __post_init__(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)

    def push(self, token: int) -> str | None:
        """Add one token; the stop string that it completes, if any. After that the text is final."""
        self.ids.append(token)
        piece = self._stream.step(self.codec.tokenizer, token)
        if not piece:
            return None
        before = len(self.text)
        self.text += piece
        if not self.stop:
            return None
        found = self._first_stop(before)
        if found is None:
            self._held = self._partial_stop()
            return None
        at, matched = found
        self._held = 0
        if not self.no_stop_trim:
            self.text = self.text[:at]
        return matched

    def finish(self, drop_last: bool) -> None:
        """End without a stop string: show what was held back; `drop_last` leaves out the last token."""
        self._held = 0
        whole = self.codec.decode(self.ids[:-1] if drop_last else self.ids, self.skip_special_tokens)
        if drop_last or whole.startswith(self.text):
            self.text = whole

    @property
    def visible(self) -> str:
        """What a client may see now."""
        return self.text[: len(self.text) - self._held] if self._held else self.text

    def _first_stop(self, before: int) -> tuple[int, str] | None:
        """(position, stop string) of the earliest match that ends in the new text; longer first."""
        found = []
        for stop in self.stop:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                found.append((at, -len(stop), stop))
        if not found:
            return None
        at, _, stop = min(found)
        return at, stop

    def _partial_stop(self) -> int:
        """Length of the longest tail that begins a stop string."""
        return max(
            (
                length
                for stop in self.stop
                for length in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )


def _raise_in_template(message: str) -> None:
    raise TemplateError(message)
