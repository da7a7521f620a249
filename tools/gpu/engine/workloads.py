"""What an arm is asked to serve; every answer is kept as it came."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine import penalties
from engine.checkpoints import images, long
from engine.host import Context
from engine.servers import Server
from engine.widths import auto, widths

# Of the plan's time, what ties leave to the rest.
TIES_SECONDS = 120


def greedy(context: Context, server: Server) -> Any:
    """Every prompt alone, at T=0."""
    rows = []
    for number, ids in enumerate(context.prompts[: server.arm.prompts]):
        began = time.monotonic()
        rid = f"greedy-{number}-{os.getpid()}"
        answer = server.generate(ids, context.options.tokens, rid=rid)
        meta = answer["meta_info"]
        rows.append(
            {
                "rid": rid,
                "output_ids": answer["output_ids"],
                "seconds": time.monotonic() - began,
                "meta": {
                    key: value for key, value in meta.items() if key.startswith(("spec_", "completion_"))
                },
            }
        )
    return rows


def ties(context: Context, server: Server) -> Any:
    """Valid executions of one prefix: decode alone and eight at once, prefill alone and four at once.

    One row a place of the text; prefills are asked for at every seventh.
    """
    top = {"return_logprob": True, "top_logprobs_num": 5}
    rows = []
    for first in range(0, len(context.prompts), 8):
        if first and context.seconds_left() < TIES_SECONDS:
            context.left_over.append(f"{server.name}.ties from prompt {first}")
            break
        prompts = context.prompts[first : first + 8]
        alone = [server.generate(ids, 64, **top) for ids in prompts]
        together = at_once(lambda ids: server.generate(ids, 64, **top), prompts)
        for ids, one, other in zip(prompts, alone, together, strict=True):
            rows += tie_rows(one, other)
            if first:
                continue
            for place in range(1, 64, 7):
                prefix = ids + one["output_ids"][:place]
                prefills = [server.generate(prefix, 1, **top)]
                prefills += at_once(lambda ids: server.generate(ids, 1, **top), [prefix] * 4)
                found = [answer["meta_info"]["output_top_logprobs"][0] for answer in prefills]
                rows[place - 64] |= {"prefill": found[0], "batched": found[1:]}
    return rows


def tie_rows(alone: dict[str, Any], together: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a token of `alone`; `together` counts as long as its text is the same."""
    rows = []
    same = True
    for place, best in enumerate(alone["meta_info"]["output_top_logprobs"]):
        row = {"decode": best}
        if same:
            row["together"] = together["meta_info"]["output_top_logprobs"][place]
        rows.append(row)
        same = same and alone["output_ids"][place] == together["output_ids"][place]
    return rows


def at_once(ask: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(ask, values))


def info(context: Context, server: Server) -> Any:
    """The plugin's counters; asked twice, since the first question starts the copy that the second reads."""
    server.get("/server_info")
    time.sleep(0.5)
    server.generate(context.prompts[0], 8)
    state = json.loads(server.get("/server_info"))["internal_states"][0]
    wanted = ("ddtree", "avg_spec_accept_length", "memory_usage", "startup_time")
    return {key: state.get(key) for key in wanted} | {
        key: state.get(key)
        for key in (
            "speculative_num_draft_tokens",
            "speculative_eagle_topk",
            "speculative_num_steps",
            "disable_overlap_schedule",
            "disable_cuda_graph",
            "cuda_graph_config",
        )
    }


def steps(context: Context, server: Server) -> Any:
    """How many lines the step log has; the log itself is packed with the raw files."""
    server.generate(context.prompts[0], 8)
    log = context.raw / f"{server.name}.steps" / "steps.jsonl"
    return {"lines": sum(1 for _ in log.open()), "bytes": log.stat().st_size}


def cache(context: Context, server: Server) -> Any:
    """A continuation that hits what a tree commit has cached, against the same one on an empty cache."""
    rows = []
    for number, ids in enumerate(context.prompts[:10]):
        server.flush()
        first = server.generate(ids, 96)["output_ids"]
        keep = 40 + 5 * number
        follow = ids + first[:keep] + ids[:12]
        warm = server.generate(follow, 48)
        server.flush()
        cold = server.generate(follow, 48)
        rows.append(
            {
                "prefix": follow,
                "warm": warm["output_ids"],
                "cold": cold["output_ids"],
                "cached_tokens": warm["meta_info"].get("cached_tokens"),
            }
        )
    return rows


def lengths(context: Context, server: Server) -> Any:
    """Prompt lengths around page and chunk boundaries, warm against cold."""
    text = [token for ids in context.prompts for token in ids]
    rows = []
    for length in [*range(1, 4), *range(14, 19), *range(62, 67), *range(126, 131), *range(254, 259)]:
        ids = text[7 : 7 + length]
        server.flush()
        cold = server.generate(ids, 40)
        warm = server.generate(ids, 40)
        rows.append(
            {"prefix": ids, "cold": cold["output_ids"], "warm": warm["output_ids"]}
            | {"cached_tokens": warm["meta_info"].get("cached_tokens")}
        )
    return rows


def batches(context: Context, server: Server) -> Any:
    """The same prompts 1, 2, 4 and 8 at a time."""
    return _at_a_time(server, context.prompts[:16], (1, 2, 4, 8), 64)


def padded(context: Context, server: Server) -> Any:
    """A few prompts at batch sizes that a graph is padded up to: 3 of 4 and 5 of 8 rows are real."""
    return _at_a_time(server, context.prompts[:10], (1, 2, 3, 5, 8), 32)


def _at_a_time(server: Server, prompts: list[list[int]], sizes: tuple[int, ...], tokens: int) -> Any:
    rows: dict[str, Any] = {}
    for size in sizes:
        with concurrent.futures.ThreadPoolExecutor(size) as pool:
            answers = list(pool.map(lambda ids: server.generate(ids, tokens), prompts))
        rows[str(size)] = [answer["output_ids"] for answer in answers]
    return rows


def kinds(context: Context, server: Server) -> Any:
    """One request of every kind that the load mixes, alone and all at once; what was wrong, if anything."""
    ids = context.prompts[0]
    expected = server.generate(ids, 48)["output_ids"]
    every = ("greedy", "sampled", "seeded", "penalty", "logprobs", "stop", "abort")

    def ask(kind: str) -> Any:
        try:
            return one_request(server, kind, ids, random.Random(0), expected)
        except Exception as error:  # one kind that breaks must not hide the others
            return f"{type(error).__name__}: {error}"

    alone = {kind: ask(kind) for kind in every}
    with concurrent.futures.ThreadPoolExecutor(len(every)) as pool:
        together = dict(zip(every, pool.map(ask, every), strict=True))
    problems = [f"{kind}: {said}" for kind, said in alone.items() if said is not None]
    problems += [f"{kind}, all at once: {said}" for kind, said in together.items() if said is not None]
    for problem in problems:
        print(f"  {server.name}.kinds: {problem[:300]}", flush=True)
    return {"alone": alone, "together": together}


def aborts(context: Context, server: Server) -> Any:
    """Connections that break in mid-stream; afterwards the server answers as before."""
    before = server.generate(context.prompts[0], 64)["output_ids"]
    broken = 0
    for number in range(12):
        body = {
            "input_ids": context.prompts[number % len(context.prompts)],
            "stream": True,
            "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True},
        }
        request = urllib.request.Request(
            server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = urllib.request.urlopen(request, timeout=60)
        for _ in range(1 + number % 5):
            answer.readline()
        answer.close()
        broken += 1
    time.sleep(2)
    after = server.generate(context.prompts[0], 64)["output_ids"]
    return {"aborted": broken, "before": before, "after": after}


def load(context: Context, server: Server) -> Any:
    """Mixed requests at eight in flight; greedy ones are compared with what they gave alone."""
    seconds = min(context.options.load_minutes * 60, context.seconds_left() - 60)
    expected = [server.generate(ids, 48)["output_ids"] for ids in context.prompts[:8]]
    deadline = time.monotonic() + seconds
    lock = threading.Lock()
    outcome: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    slowest = [0.0]

    def worker(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < deadline:
            place = rng.randrange(8)
            ids = context.prompts[place]
            kind = rng.choice(["greedy", "greedy", "sampled", "penalty", "logprobs", "stop", "abort"])
            began = time.monotonic()
            try:
                problem = one_request(server, kind, ids, rng, expected[place])
            except Exception as error:  # counted, not raised: the load goes on
                problem = f"{type(error).__name__}: {error}"
            with lock:
                outcome[kind] += 1
                slowest[0] = max(slowest[0], time.monotonic() - began)
                if problem is not None:
                    outcome[f"{kind}: problem"] += 1
                    if len(differing) < 40:
                        differing.append({"kind": kind, "prompt": place, "problem": problem})

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "seconds": seconds,
        "requests": dict(outcome),
        "problems": differing,
        "slowest_seconds": slowest[0],
        "prefixes": context.prompts[:8],
        "expected": expected,
    }


def one_request(
    server: Server, kind: str, ids: list[int], rng: random.Random, expected: list[int]
) -> str | dict[str, Any] | None:
    """Send one request of a kind; what was wrong with the answer, if anything."""
    if kind == "greedy":
        output = server.generate(ids, 48)["output_ids"]
        return None if output == expected else {"output_ids": output}
    if kind == "abort":
        try:
            server.post(
                "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 600}}, timeout=0.2
            )
        except OSError:
            return None
        return None
    sampling: dict[str, Any] = {"top_p": 0.9, "min_p": 0.02}
    if kind == "seeded":
        sampling = {"top_k": 20, "sampling_seed": 7}
    if kind == "penalty":
        sampling = {"frequency_penalty": 0.5, "presence_penalty": 0.3}
    if kind == "stop":
        sampling = {"stop": ["\n\n", "return"], "ignore_eos": False}
    more: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3} if kind == "logprobs" else {}
    tokens = rng.randrange(8, 64)
    answer = server.generate(ids, tokens, temperature=0.8, sampling=sampling, **more)
    count = len(answer["output_ids"])
    if kind != "stop" and count != tokens:
        return f"asked for {tokens} tokens, got {count}"
    if kind == "logprobs" and len(answer["meta_info"]["output_token_logprobs"]) != tokens:
        return f"{len(answer['meta_info']['output_token_logprobs'])} log-probabilities for {tokens} tokens"
    return None


def draws(context: Context, server: Server) -> Any:
    """Counts of the first three tokens at T=0.8: the first is prefill's, the others a verify pass's."""
    rows = []
    for ids in context.prompts[:20]:
        counts: Counter[str] = Counter()
        remaining = context.options.draws
        while remaining > 0:
            size = min(64, remaining)
            sampling = {"max_new_tokens": 3, "temperature": 0.8, "ignore_eos": True}
            answers = server.post("/generate", {"input_ids": [ids] * size, "sampling_params": sampling}, 300)
            counts.update(",".join(map(str, answer["output_ids"])) for answer in answers)
            remaining -= size
        rows.append(dict(counts))
    return rows


def features(context: Context, server: Server) -> Any:
    """Logit bias, logprobs and stop strings at T=0, to be compared between arms; penalties, judged alone."""
    bias = {str(context.prompts[0][3]): -100.0}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "logit_bias": ({"logit_bias": bias}, {}),
        "stop": ({"stop": ["return", "\n\n"], "ignore_eos": False}, {}),
        "stop_token_ids": ({"stop_token_ids": [context.prompts[1][5]], "ignore_eos": False}, {}),
        "logprobs": ({}, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
        "min_p, near zero temperature": ({"min_p": 0.5, "temperature": 0.01}, {}),
    }
    rows: dict[str, Any] = {}
    for name, (sampling, more) in cases.items():
        rows[name] = [server.generate(ids, 40, sampling=sampling, **more) for ids in context.prompts[:4]]
    rows["penalties"] = penalised(context, server)
    return rows


def penalised(context: Context, server: Server) -> list[dict[str, Any]]:
    """Every case of penalties with four prompts, two of them alone and then all at once."""
    prompts = context.prompts[:4]
    # What an answer says most often ends it, where a shortest length is asked for.
    answers = [server.generate(ids, penalties.TOKENS)["output_ids"] for ids in prompts]
    stops = [Counter(output).most_common(1)[0][0] for output in answers]
    ends = penalties.end_tokens(context.pair_of(server.arm) / "target")
    pairs = [(case, number) for case in penalties.CASES for number in range(len(prompts))]

    def ask(pair: tuple[str, int]) -> dict[str, Any]:
        case, number = pair
        return {"prompt": number, **penalties.ask(server, case, prompts[number], stops[number], ends)}

    rows = [ask(pair) | {"together": False} for pair in pairs if pair[1] < 2]
    rows += [row | {"together": True} for row in at_once(ask, pairs)]
    print(f"  {server.name}.features: penalised tokens {penalties.summary(rows, noise=0.0)}", flush=True)
    return rows


def grammar(context: Context, server: Server) -> Any:
    """Answers under a grammar have to match it."""
    rows = []
    for ids in context.prompts[:4]:
        for temperature in (0.0, 0.8):
            sampling = {"regex": "(yes|no|perhaps) [0-9]{3}", "ignore_eos": False}
            answer = server.generate(ids, 24, temperature=temperature, sampling=sampling)
            rows.append({"text": answer["text"], "finish": answer["meta_info"]["finish_reason"]})
    return rows


def refusals(context: Context, server: Server) -> Any:
    """Requests that must be answered 400."""
    bodies: dict[str, dict[str, Any]] = {
        "ddtree_budget": {"sampling_params": {"custom_params": {"ddtree_budget": 7}, "max_new_tokens": 4}},
        "return_hidden_states": {"return_hidden_states": True, "sampling_params": {"max_new_tokens": 4}},
    }
    if (server.arm.config or {}).get("mode") == "shadow":
        for case, sampling in penalties.CASES.items():
            bodies[case] = {"sampling_params": {"max_new_tokens": 20, **sampling}}
    rows = {}
    for name, body in bodies.items():
        try:
            answer = server.post("/generate", {"input_ids": context.prompts[0], **body})
            rows[name] = {"status": 200, "body": answer}
        except urllib.error.HTTPError as error:
            rows[name] = {"status": error.code, "body": error.read().decode()[:600]}
    return rows


def fixtures(context: Context, server: Server) -> Any:
    """A real server's answers as they are, for the CPU engine's server to be tested against."""
    ids = context.prompts[2]
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        stream = answer.read().decode()
    chat = {"model": "default", "messages": [{"role": "user", "content": "def"}], "max_tokens": 8}
    completion = {"model": "default", "prompt": "def add(", "max_tokens": 8, "temperature": 0}
    recorded: dict[str, Any] = {
        "generate": server.generate(ids, 24),
        "generate_logprobs": server.generate(ids, 4, return_logprob=True, top_logprobs_num=2),
        "generate_stream": stream,
        "server_info": json.loads(server.get("/server_info")),
        "metrics": server.get("/metrics"),
        "model_info": json.loads(server.get("/model_info")),
        "v1_models": json.loads(server.get("/v1/models")),
        "v1_completions": server.post("/v1/completions", completion),
    }
    try:
        recorded["v1_chat_completions"] = server.post("/v1/chat/completions", chat)
    except urllib.error.HTTPError as error:  # a tokenizer without a chat template
        recorded["v1_chat_completions"] = {"status": error.code, "body": error.read().decode()[:600]}
    return recorded


WORKLOADS: dict[str, Callable[[Context, Server], Any]] = {
    function.__name__: function
    for function in (
        greedy, ties, info, steps, cache, lengths, batches, padded, kinds,
        aborts, load, draws, features, grammar, refusals, fixtures, widths, auto, images, long,
    )
}  # fmt: skip
