"""CPU engines with one real fault each: ``python mangled_engine.py "FAULT <options of the engine>" ...``.

Each is a process of its own, forked once torch is imported, which is what starting takes long for.

none     no fault

leak     recurrent layers take rows in order in a server that says `ddtree`, and no self-check stops it
chain    the server says `ddtree` and verifies the chain only
biased   a pass of several rows chooses as if its best token were less likely
short    every other step throws away what it accepted; the text stays right
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable

import torch
from ddtree_engine.reference import __main__ as command
from ddtree_engine.reference import engine as module
from ddtree_engine.reference import launch
from ddtree_engine.reference.engine import Arm, Engine
from ddtree_engine.reference.sampling import Sampler
from ddtree_engine.reference.shape import unsafe_shape
from ddtree_engine.tree import Accepted


def leak() -> None:
    Engine.shape_of = lambda self, tree: unsafe_shape(tree, self.target.config.conv_kernel)
    launch.require_passed = lambda found: None


def chain() -> None:
    stock = Engine._speculative_step

    def step(self, sequence):
        self.arm = Arm.SHADOW
        try:
            return stock(self, sequence)
        finally:
            self.arm = Arm.DDTREE

    Engine._speculative_step = step


def biased() -> None:
    stock = Sampler.choose

    def choose(self, logits, positions):
        if len(logits) > 1:
            best = logits.argmax(dim=-1, keepdim=True)
            logits = logits.scatter_add(1, best, torch.full(best.shape, -2.0))
        return stock(self, logits, positions)

    Sampler.choose = choose


def short() -> None:
    stock, turn = module.walk, itertools.count()

    def walk(tree, tokens):
        accepted = stock(tree, tokens)
        return accepted if next(turn) % 2 else Accepted((0,), int(tokens[0]))

    module.walk = walk


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "leak": leak,
    "chain": chain,
    "biased": biased,
    "short": short,
}

if __name__ == "__main__":
    for wish in sys.argv[1:]:
        fault, *options = wish.split()
        if os.fork() == 0:
            FAULTS[fault]()
            sys.exit(command.main(options))
    for _ in sys.argv[1:]:
        os.wait()
