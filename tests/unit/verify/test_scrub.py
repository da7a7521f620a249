import pytest

from ddtree_ops.verify.scrub import Scrubber

SCRUB = Scrubber({"gpu-a.example.org": "host-1", "gpu-a": "host-1"}, ["correct horse battery"])


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key sk-abcdefgh1234 used", "key [redacted] used"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer [redacted]"),
        ("token hf_ABCDEFGH1234 here", "token [redacted] here"),
        ("api_key='s3cr3tvalue'", "api_key='[redacted]'"),
        ("the correct horse battery staple", "the [redacted] staple"),
        ("Cannot connect to http://10.1.2.3:30003/generate", "Cannot connect to http://[address]"),
        (
            "Cannot connect to host 10.1.2.3:30003 ssl:default",
            "Cannot connect to host [address]:30003 ssl:default",
        ),
        ("to [2001:db8::1]:30003", "to [address]:30003"),
        ("on gpu-a.example.org and GPU-A.", "on host-1 and host-1."),
        ("alice@corp.example wrote", "[address] wrote"),
        ("/home/alice/secret/models/target is missing", "[folder]/target is missing"),
        ("model_path=/data/x/y,", "model_path=[folder]/y,"),
        ("~/work/keys/id_rsa", "[folder]/id_rsa"),
        ("below /home/bob.", "below [folder]"),
        (r"C:\Users\alice\x", "[folder]"),
    ],
)
def test_what_says_where_a_bundle_was_made_is_taken_out(text: str, clean: str) -> None:
    assert SCRUB.text(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "driver 580.95.05, torch 2.13.0+cpu, vbios 98.02.8D.00.01, 1.2.3.4.5",
        "POST /v1/models: 404",
        "/server_info: ddtree.topk: found 8, asked for 16",
        "3 identical / 1 near-tie, 94-141 tok/s",
        "http on 127.0.0.1:30003 and 0.0.0.0",
        "took 12:34:56, sha256:0123abcd",
        "gpu-ab and my-gpu-a stay",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    ],
)
def test_what_says_nothing_of_the_place_stays(text: str) -> None:
    assert SCRUB.text(text) == text


def test_data_is_scrubbed_in_depth_and_cards_keep_a_name() -> None:
    card = "GPU-0e0e0e0e-1111-2222-3333-444444444444"
    clean = SCRUB.data({"gpu-a": [{"uuid": card, "value": 1.5, "note": "on gpu-a"}], "none": None})
    (gpu,) = clean["host-1"]
    assert gpu["uuid"].startswith("sha256:")
    assert card not in str(clean)
    assert (gpu["value"], gpu["note"], clean["none"]) == (1.5, "on host-1", None)
    assert SCRUB.data(clean) == clean


def test_this_process_s_secrets_and_home_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plain-looking-value")
    monkeypatch.setenv("HOME", "/home/alice")
    found = Scrubber.here({}).text("a plain-looking-value below /home/alice.")
    assert found == "a [redacted] below [home]."
