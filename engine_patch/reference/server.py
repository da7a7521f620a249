"""The HTTP side: SGLang 0.5.23's routes on Starlette."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ddtree_engine.reference.answers import Answers, usage
from ddtree_engine.reference.errors import DrainingError, QueueFullError, RequestError
from ddtree_engine.reference.loads import loads
from ddtree_engine.reference.metrics import Metrics
from ddtree_engine.reference.requests import GenerateRequest, Limits, parse_request
from ddtree_engine.reference.scheduler import Scheduler, Ticket, Update
from ddtree_engine.reference.text import TextCodec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
# Fields of SGLang's routes that this engine cannot honour, with the values that mean "not used".
REFUSED_GENERATE = (
    "image_data", "video_data", "audio_data", "lora_path", "session_params", "token_ids_logprob",
    "custom_logit_processor", "return_hidden_states", "return_sampling_mask", "input_embeds",
)  # fmt: skip
REFUSED_OPENAI = (
    "logprobs", "top_logprobs", "echo", "suffix", "best_of", "tools", "response_format", "lora_path",
    "return_hidden_states", "custom_logit_processor", "session_params",
)  # fmt: skip
# OpenAI's name -> SGLang's sampling parameter.
OPENAI_PARAMS = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "seed": "sampling_seed",
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "stop": "stop",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens", "no_stop_trim": "no_stop_trim",
    "custom_params": "custom_params", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "repetition_penalty": "repetition_penalty", "n": "n",
    "min_tokens": "min_new_tokens", "logit_bias": "logit_bias", "regex": "regex", "ebnf": "ebnf",
    "json_schema": "json_schema", "stop_regex": "stop_regex",
}  # fmt: skip
DEFAULT_COMPLETION_TOKENS = 16


class Service:
    """Routes around a scheduler. `info` is `/server_info`'s answer."""

    def __init__(
        self,
        scheduler: Scheduler,
        codec: TextCodec,
        answers: Answers,
        metrics: Metrics,
        limits: Limits,
        info: Mapping[str, Any],
    ) -> None:
        self.scheduler = scheduler
        self.codec = codec
        self.answers = answers
        self.metrics = metrics
        self.limits = limits
        self.info = info

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/loads", self.loads),
            Route("/health", self.health),
            Route("/health_generate", self.health),
            Route("/ready", self.health),
            Route("/server_info", self.server_info),
            Route("/get_server_info", self.server_info),
            Route("/model_info", self.model_info),
            Route("/get_model_info", self.model_info),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            Route("/abort_request", self.abort, methods=["POST"]),
            Route("/metrics", self.prometheus),
        ]
        handlers: dict[Any, Any] = {
            RequestError: _request_error,
            QueueFullError: self._queue_full,
            DrainingError: _draining,
            404: _no_route,
            405: _no_route,
            500: _internal,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def generate(self, http: Request) -> Response:
        """POST /generate."""
        body = await _body(http)
        _refuse(body, REFUSED_GENERATE)
        params = body.get("sampling_params")
        params = {} if params is None else params
        if not isinstance(params, dict):
            raise RequestError(
                f"sampling_params: found {type(params).__name__}, allowed is an object", "sampling_params"
            )
        request = parse_request(
            self._prompt(body),
            params,
            self.limits,
            rid=body.get("rid"),
            stream=body.get("stream", False),
            return_logprob=body.get("return_logprob", False),
            top_logprobs=body.get("top_logprobs_num", 0),
            logprob_start=body.get("logprob_start_len", -1),
            text_in_logprobs=body.get("return_text_in_logprobs", False),
        )
        started = time.monotonic()
        stream = self._submit(request)
        if request.stream:
            events = self._generate_events(request, stream, started)
            return StreamingResponse(events, media_type="text/event-stream")
        update = await self._last(http, stream)
        if isinstance(update, Response):
            return update
        return JSONResponse(self.answers.generate(request, update, time.monotonic() - started))

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        body = await _body(http)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            ids = self._encode(prompt, "prompt")
        elif isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            ids = prompt
        else:
            raise RequestError(
                f"prompt: found {_brief(prompt)}, allowed is one string or one list of token ids", "prompt"
            )
        return await self._openai(http, body, ids, chat=False)

    async def chat(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await _body(http)
        ids = self._encode(self.codec.render_chat(_messages(body.get("messages"))), "messages")
        return await self._openai(http, body, ids, chat=True)

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        card = {
            "id": self.answers.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "ddtree",
            "root": self.answers.model_name,
            "max_model_len": self.limits.context_length,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def loads(self, http: Request) -> Response:
        """GET /v1/loads: how busy the engine is, for gateways."""
        asked = http.query_params
        return JSONResponse(
            loads(self.scheduler.load(), self.info, asked.get("include"), asked.get("dp_rank"))
        )

    async def health(self, _: Request) -> Response:
        """GET /health, /health_generate and /ready: 200 while the worker takes requests, else 503."""
        return Response(status_code=200 if self.scheduler.alive else 503)

    async def server_info(self, _: Request) -> Response:
        """GET /server_info."""
        return JSONResponse(dict(self.info))

    async def model_info(self, _: Request) -> Response:
        """GET /model_info."""
        keys = ("model_path", "served_model_name", "tokenizer_path")
        return JSONResponse({key: self.info[key] for key in keys} | {"is_generation": True})

    async def flush_cache(self, _: Request) -> Response:
        """GET or POST /flush_cache: there is no prefix cache; 400 with requests running, as SGLang."""
        if self.scheduler.idle():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed: requests are running or waiting.\n", status_code=400)

    async def abort(self, http: Request) -> Response:
        """POST /abort_request {"rid"} or {"abort_all": true}."""
        body = await _body(http)
        rid = body.get("rid")
        if body.get("abort_all") is True:
            rid = None
        elif not isinstance(rid, str) or not rid:
            raise RequestError(f"rid: found {rid!r}, allowed is a request id, or abort_all true", "rid")
        self.scheduler.abort(rid)
        return Response(status_code=200)

    async def prometheus(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise RequestError("text, input_ids: found both or neither, allowed is exactly one", "text")
        if text is not None:
            if not isinstance(text, str):
                raise RequestError(f"text: found {_brief(text)}, allowed is one string", "text")
            return self._encode(text, "text")
        if not isinstance(ids, list):
            raise RequestError(
                f"input_ids: found {_brief(ids)}, allowed is one list of token ids", "input_ids"
            )
        return ids

    def _encode(self, text: str, field: str) -> list[int]:
        ids = self.codec.encode(text)
        if not ids:
            raise RequestError(f"{field}: found no token, allowed is a prompt of one token or more", field)
        return ids

    async def _openai(
        self, http: Request, body: Mapping[str, Any], ids: list[int], *, chat: bool
    ) -> Response:
        _refuse(body, REFUSED_OPENAI)
        request = self._openai_request(body, ids, chat=chat)
        details = body.get("return_spec_tokens_details", False)
        if not isinstance(details, bool):
            raise RequestError(
                f"return_spec_tokens_details: found {details!r}, allowed is true or false",
                "return_spec_tokens_details",
            )
        options = body.get("stream_options") or {}
        include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        stream = self._submit(request)
        if request.stream:
            events = self._openai_events(
                request, stream, chat=chat, details=details, include_usage=include_usage
            )
            return StreamingResponse(events, media_type="text/event-stream")
        update = await self._last(http, stream)
        if isinstance(update, Response):
            return update
        return JSONResponse(
            self.answers.completion(request, update.text, update, chat=chat, chunk=False, details=details)
        )

    def _openai_request(self, body: Mapping[str, Any], ids: list[int], *, chat: bool) -> GenerateRequest:
        params = {
            OPENAI_PARAMS[key]: value
            for key, value in body.items()
            if key in OPENAI_PARAMS and value is not None
        }
        if "max_new_tokens" not in params:
            params["max_new_tokens"] = None if chat else DEFAULT_COMPLETION_TOKENS
        try:
            return parse_request(
                ids,
                params,
                self.limits,
                rid=body.get("rid"),
                stream=body.get("stream", False),
            )
        except RequestError as error:
            raise _in_openai_words(error) from error

    def _submit(self, request: GenerateRequest) -> _Updates:
        updates = _Updates(asyncio.get_running_loop())
        updates.ticket = self.scheduler.submit(request, updates.deliver)
        return updates

    async def _last(self, http: Request, stream: _Updates) -> Update | Response:
        """The final update; the work is cancelled if the client leaves before."""
        result = asyncio.ensure_future(stream.last())
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                log.info("client of %s left", stream.rid)
                return Response(status_code=499)
            update = result.result()
        finally:
            stream.cancel()
            for task in (result, gone):
                task.cancel()
        if update.error is not None:
            return _error(500, f"the engine failed: {update.error}", "internal_error", None)
        return update

    async def _generate_events(
        self, request: GenerateRequest, stream: _Updates, started: float
    ) -> AsyncIterator[bytes]:
        with contextlib.closing(stream):
            async for update in stream:
                if update.error is not None:
                    yield _event(_stream_error(update.error))
                else:
                    yield _event(self.answers.generate(request, update, time.monotonic() - started))
            yield b"data: [DONE]\n\n"

    async def _openai_events(
        self, request: GenerateRequest, stream: _Updates, *, chat: bool, details: bool, include_usage: bool
    ) -> AsyncIterator[bytes]:
        shown, first = 0, True
        with contextlib.closing(stream):
            async for update in stream:
                if update.error is not None:
                    yield _event(_stream_error(update.error))
                    break
                chunk = self.answers.completion(
                    request, update.text[shown:], update, chat=chat, chunk=True, details=details
                )
                shown = max(shown, len(update.text))
                if chat and first:
                    chunk["choices"][0]["delta"]["role"] = "assistant"
                first = False
                yield _event(chunk)
                if update.finish is not None and include_usage:
                    yield _event(chunk | {"choices": [], "usage": usage(request, update)})
            yield b"data: [DONE]\n\n"

    async def _queue_full(self, _: Request, __: Exception) -> Response:
        self.metrics.rejected.inc()
        response = _error(503, "the queue is full; try again later", "overloaded_error", None)
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return response


class _Updates:
    """Updates of one request, carried from the worker thread into the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ticket: Ticket | None = None
        self._loop = loop
        self._queue: asyncio.Queue[Update] = asyncio.Queue()

    @property
    def rid(self) -> str:
        return self.ticket.request.rid if self.ticket else "?"

    def deliver(self, update: Update) -> None:
        """Called from the worker thread; a loop that is gone has no client left to tell."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, update)

    async def __aiter__(self) -> AsyncIterator[Update]:
        while True:
            update = await self._queue.get()
            yield update
            if update.finish is not None or update.error is not None:
                return

    async def last(self) -> Update:
        """The final update."""
        updates = [update async for update in self]
        return updates[-1]

    def cancel(self) -> None:
        """Drop the request if it is still running."""
        if self.ticket is not None:
            self.ticket.cancel()

    def close(self) -> None:
        """For `contextlib.closing`."""
        self.cancel()


async def _body(http: Request) -> dict[str, Any]:
    try:
        body = json.loads(await http.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"body: found no JSON ({error})", "body") from error
    if not isinstance(body, dict):
        raise RequestError(f"body: found {type(body).__name__}, allowed is an object", "body")
    return body


def _messages(found: Any) -> list[dict[str, Any]]:
    """Messages with plain text; text parts are joined."""
    if not isinstance(found, list) or not found:
        raise RequestError(f"messages: found {_brief(found)}, allowed is a list of messages", "messages")
    messages = []
    for index, message in enumerate(found):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"{name}: found {_brief(message)}, allowed is an object with role and content", name
            )
        content = message.get("content")
        if isinstance(content, list) and all(
            isinstance(p, dict) and isinstance(p.get("text"), str) for p in content
        ):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise RequestError(f"{name}.content: found {_brief(content)}, allowed is text", f"{name}.content")
        messages.append({**message, "content": content})
    return messages


def _refuse(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if body.get(name):
            raise RequestError(
                f"{name}: found {_brief(body[name])}, not implemented by the reference engine", name
            )


def _in_openai_words(error: RequestError) -> RequestError:
    """Name the field as the client sent it."""
    param = (error.param or "").removeprefix("sampling_params.")
    back = {inner: outer for outer, inner in OPENAI_PARAMS.items() if outer != "max_completion_tokens"}
    named = back.get(param, param)
    message = error.message
    if error.param and message.startswith(error.param):
        message = named + message[len(error.param) :]
    return RequestError(message, named or None, error.status)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _stream_error(message: str) -> dict[str, Any]:
    return {"error": {"message": f"the engine failed: {message}", "type": "internal_error", "code": 500}}


def _error(status: int, message: str, kind: str, param: str | None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(error.status, error.message, "invalid_request_error", error.param)


async def _draining(_: Request, __: Exception) -> Response:
    response = _error(503, "the server is shutting down", "overloaded_error", None)
    response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return response


async def _no_route(http: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _error(status, f"{http.method} {http.url.path}: no such route", "not_found_error", None)


async def _internal(http: Request, error: Exception) -> Response:
    log.error("%s %s failed", http.method, http.url.path, exc_info=error)
    return _error(500, f"internal error: {type(error).__name__}", "internal_error", None)
