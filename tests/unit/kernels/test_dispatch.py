from __future__ import annotations

import json
from importlib.resources import files

import pytest
import torch
from ddtree_kernels.tree_gdn import triton as gdn
from ddtree_kernels.tree_gdn.dispatch import TABLE, choose_form, form_in

from .cases import layer

ROWS = [
    {"batch": 1, "width": 8, "form": "scan"},
    {"batch": 4, "width": 8, "form": "wy"},
    {"batch": 1, "width": 32, "form": "wy"},
]


@pytest.mark.parametrize(
    ("batch", "width", "form"),
    [(1, 8, "scan"), (1, 5, "scan"), (2, 8, "wy"), (9, 8, "wy"), (1, 16, "wy"), (1, 128, "wy")],
)
def test_a_shape_takes_the_nearest_measured_row_that_covers_it(batch, width, form):
    assert form_in({"rows": ROWS}, batch, width) == form


def test_without_a_measurement_every_shape_takes_the_wy_form():
    assert form_in({"rows": []}, 1, 8) == "wy"


def test_the_shipped_table_says_whether_it_was_measured():
    table = json.loads(files("ddtree_kernels.tree_gdn").joinpath(TABLE).read_text(encoding="utf-8"))
    assert (table["schema"], table["kind"]) == (1, "ddtree-verify-dispatch")
    assert bool(table["rows"]) == (table["measured"] is not None)
    assert choose_form(1, 8) in ("wy", "scan")


@pytest.mark.parametrize("form", ["wy", "scan"])
def test_auto_runs_the_form_that_the_table_names(form, monkeypatch):
    ran = []
    monkeypatch.setattr(gdn, "choose_form", lambda batch, width: form)
    monkeypatch.setattr(gdn, "tree_gdn_scan_unchecked", lambda *a: ran.append("scan"))
    monkeypatch.setattr(gdn, "tree_gdn_verify_unchecked", lambda *a: ran.append("wy"))
    case = layer("random", dtype=torch.float32)
    gdn.tree_gdn_verify(*case.verify_args(case.x), form="auto")
    assert ran == [form]
