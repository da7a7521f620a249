"""GET /v1/loads: a gateway must be able to tell a busy engine from an idle one."""

from __future__ import annotations

import json
import threading

from .conftest import process
from .test_server import wait_for

REQUEST = {
    "input_ids": list(range(5, 25)),
    "sampling_params": {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True},
}


def test_running_and_waiting_requests_and_their_tokens_are_counted(tiny):
    with process(tiny, "--arm", "ar", "--max-running", "1", "--context-length", "1000") as (client, _):

        def core():
            (rank,) = client.get("/v1/loads?include=core,disagg,queues,memory").json()["loads"]
            return rank

        idle = core()
        assert (idle["num_running_reqs"], idle["num_waiting_reqs"], idle["token_usage"]) == (0, 0, 0)

        def ask():
            with client.stream("POST", "/generate", json={**REQUEST, "stream": True}) as response:
                for _ in response.iter_lines():
                    pass

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: core()["num_running_reqs"] == 1 and core()["num_waiting_reqs"] == 1)
        busy = core()
        assert busy["num_waiting_uncached_tokens"] == 20
        assert 20 <= busy["num_used_tokens"] < 1000
        assert busy["num_total_tokens"] == busy["num_used_tokens"] + 20
        assert busy["token_usage"] == busy["num_used_tokens"] / 1000
        assert busy["utilization"] == 1
        client.post("/abort_request", json={"abort_all": True})
        for thread in threads:
            thread.join(60)
        wait_for(lambda: core()["num_used_tokens"] == 0)

        assert client.get("/v1/loads?dp_rank=1").json()["loads"] == []
        for query in ("include=core,cake", "dp_rank=x"):
            refused = client.get(f"/v1/loads?{query}")
            assert refused.status_code == 400, refused.text
            assert json.loads(refused.text)["error"]["param"] == query.partition("=")[0]
