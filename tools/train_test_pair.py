#!/usr/bin/env python3
"""Train the project's test pair: a gated-delta-net hybrid target and its DFlash drafter.

  corpus     fetch the pinned wheels, filter, train the tokenizer, pack the token streams   (CPU, network)
  target     stage 1: the target on the packed streams                                      (GPU, minutes)
  generate   the target's greedy continuations of training text                             (GPU, a minute)
  drafter    stage 2: the drafter on those continuations; run again with --more to go on    (GPU, minutes)
  evaluate   accept lengths on held-out windows (quick, any device)
  continue   the target's continuations of windows of held-out files                        (CPU)
  prompts    choose the shipped prompts by the target's own output                          (CPU)
  temperature  scale the drafter's logits for the calibration prompts                       (CPU)
  ship       lay weights, tokenizer, prompts and curves out as package data, with hashes    (CPU)
  measure    accept lengths of the shipped pair in the CPU engine's own decode loop         (CPU)

Every stage reads and writes one working folder and goes on from what is saved there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from pair import checkpoint, corpus, data
from pair.drafter_stage import train_drafter
from pair.generate import Continuations, continuations, training_prompts
from pair.model import Drafter, DrafterShape, Target, TargetShape
from pair.run import Curve, Limits
from pair.target_stage import held_out_loss, train_target

TINY_TARGET = TargetShape(vocab=4096, hidden=48, intermediate=32, head_dim=32, gdn_dim=16)
TINY_DRAFTER = DrafterShape(hidden=48, intermediate=32, head_dim=16)


def main() -> None:
    args = parser().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.device = torch.device(args.device)
    args.run(args)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--work", type=Path, required=True, help="working folder")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    common.add_argument("--tiny", action="store_true", help="toy sizes, to try the script on a CPU")
    common.add_argument("--no-compile", action="store_true")
    limits = argparse.ArgumentParser(add_help=False)
    limits.add_argument("--seconds", type=float)
    limits.add_argument("--steps", type=int)
    limits.add_argument("--batch", type=int, default=64)
    limits.add_argument("--muon-lr", type=float, default=0.005)
    limits.add_argument("--adam-lr", type=float, default=0.004)
    commands = top.add_subparsers(required=True)

    def command(name: str, run: Any, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, parents=[common, *parents])
        sub.set_defaults(run=run)
        return sub

    command("corpus", run_corpus).add_argument("--wheels", type=Path, required=True)
    sub = command("target", run_target, limits)
    sub.add_argument("--tokens", type=Path, required=True)
    sub.add_argument("--length", type=int, default=1024)
    sub = command("generate", run_generate)
    reads_tokens(sub)
    sub.add_argument("--batches", type=int, default=12)
    sub.add_argument("--batch", type=int, default=4096)
    sub.add_argument("--length", type=int, default=416)
    sub = command("drafter", run_drafter, limits)
    sub.add_argument("--anchors", type=int, default=48)
    sub.add_argument("--reach", type=float, default=5.0)
    sub.add_argument("--more", action="store_true", help="another round from the saved drafter")
    sub = command("evaluate", run_evaluate)
    reads_tokens(sub)
    sub.add_argument("--count", type=int, default=64)
    sub = command("continue", run_continue)
    reads_tokens(sub)
    sub.add_argument("--part", default="1/1", help="k/n: this process takes every n-th batch")
    sub = command("prompts", run_prompts)
    sub.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    sub.add_argument("--out", type=Path, required=True)
    sub = command("temperature", run_temperature)
    sub.add_argument("--temperatures", type=float, nargs="+", default=[0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0])
    sub = command("ship", run_ship)
    sub.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    sub.add_argument("--prompts", type=Path, required=True, help="folder of the two prompt files")
    sub.add_argument("--out", type=Path, required=True)
    sub = command("measure", run_measure)
    sub.add_argument("--pair", type=Path, required=True)
    sub.add_argument("--prompts", type=Path, required=True, help="one prompt file")
    sub.add_argument("--budgets", type=int, nargs="+", default=[7, 15, 31, 63, 127])
    return top


def reads_tokens(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--tokens", type=Path, required=True, help="packed streams, .xz or unpacked")
    sub.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")


def run_corpus(args: argparse.Namespace) -> None:
    corpus.download(args.wheels)
    files = corpus.build_corpus(args.wheels)
    texts = (f.text for i, f in enumerate(files) if not f.held_out and i % 3 == 0)
    tokenizer = data.train_tokenizer(texts, TargetShape().vocab)
    data.save_tokenizer(tokenizer, args.work)
    data.pack(data.encode(tokenizer, files), args.work / "tokens.xz")


def run_target(args: argparse.Namespace) -> None:
    streams = data.unpack(args.tokens)
    target = Target(TINY_TARGET if args.tiny else TargetShape()).to(args.device)
    curve = Curve(args.work / "target-curve.jsonl")
    train_target(
        target, streams, Limits(args.steps, args.seconds), curve, args.work / "target.pt",
        batch=args.batch, length=args.length, muon_lr=args.muon_lr, adam_lr=args.adam_lr, seed=args.seed,
        compile_=not args.no_compile,
    )  # fmt: skip
    checkpoint.round_to_bf16_(target)
    curve.write(stage="target", held_out_loss_bf16=held_out_loss(target, streams))
    checkpoint.save_target(target, args.work / "target")


def run_generate(args: argparse.Namespace) -> None:
    streams = data.unpack(args.tokens)
    target = checkpoint.load_target(args.work / "target").to(args.device)
    lengths = tuple(args.length * i // 13 for i in (2, 4, 6))
    windows = training_prompts(
        streams.train, line_end_table(args), lengths, args.batch, args.batches, args.seed + 1
    )
    prompts = [torch.from_numpy(x).to(args.device) for x in windows]
    made = continuations(
        target, prompts, args.length, minimum=min(48, args.length // 8), compile_=not args.no_compile
    )
    torch.save((made.ids.cpu(), made.start.cpu(), made.limit.cpu()), args.work / "continuations.pt")
    useful = (made.limit - made.start).float()
    Curve(args.work / "drafter-curve.jsonl").write(
        stage="generate", asked=args.batch * args.batches, kept=len(made.ids), useful=useful.mean().item()
    )


def run_drafter(args: argparse.Namespace) -> None:
    target = checkpoint.load_target(args.work / "target").to(args.device)
    made = torch.load(args.work / "continuations.pt", weights_only=True)
    drafter = Drafter(TINY_DRAFTER if args.tiny else DrafterShape()).to(args.device)
    curve, state = Curve(args.work / "drafter-curve.jsonl"), args.work / "drafter.pt"
    if args.more:
        drafter = checkpoint.load_drafter(args.work / "drafter").to(args.device)
        state.unlink(missing_ok=True)
    data_ = Continuations(*(x.to(args.device) for x in made))
    train_drafter(
        drafter, target, data_, Limits(args.steps, args.seconds), curve, state,
        batch=args.batch, anchors=args.anchors, reach=args.reach, muon_lr=args.muon_lr,
        adam_lr=args.adam_lr, seed=args.seed, compile_=not args.no_compile,
    )  # fmt: skip
    checkpoint.round_to_bf16_(drafter)
    checkpoint.save_drafter(drafter, target.shape, args.work / "drafter")


def run_evaluate(args: argparse.Namespace) -> None:
    """Held-out windows of 128 tokens, 192 greedy tokens, loops left out."""
    from pair.evaluate import Text, accept_lengths
    from pair.generate import greedy, loops

    streams = data.unpack(args.tokens)
    target = checkpoint.load_target(args.work / "target").to(args.device)
    drafter = checkpoint.load_drafter(args.work / "drafter").to(args.device)
    line_end = line_end_table(args)
    held_out = np.concatenate(streams.held_out)
    prompts = training_prompts(held_out, line_end, (128,), args.count, 1, args.seed + 2)[0]
    made = greedy(target, torch.from_numpy(prompts).to(args.device), 16 if args.tiny else 192).tolist()
    good = [Text(x, 128) for x in made if data.EOS not in x[128:] and not loops(x[128:])]
    figures = accept_lengths(target, drafter, good or [Text(x, 128) for x in made])
    Curve(args.work / "evaluation.jsonl").write(stage="evaluate", made=len(made), kept=len(good), **figures)


def run_continue(args: argparse.Namespace) -> None:
    from pair import prompts

    streams = data.unpack(args.tokens)
    target = checkpoint.load_target(args.work / "target")
    part, parts = (int(x) for x in args.part.split("/"))
    tried = prompts.choose(target, streams, load_tokenizer(args), (part - 1, parts))
    with (args.work / f"tried-{part}.json").open("w", encoding="utf-8") as f:
        json.dump(tried, f)


def run_prompts(args: argparse.Namespace) -> None:
    from pair import prompts

    tried = [
        x for p in sorted(args.work.glob("tried-*.json")) for x in json.loads(p.read_text(encoding="utf-8"))
    ]
    chosen = prompts.select(tried, load_tokenizer(args))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (
        ("prompts", chosen[: prompts.COUNT]),
        ("calibration-prompts", chosen[prompts.COUNT :]),
    ):
        print(name, prompts.write(args.out / f"{name}.jsonl", name.split("-")[0], part))
    with (args.work / "chosen.json").open("w", encoding="utf-8") as f:
        json.dump(chosen, f)


def run_temperature(args: argparse.Namespace) -> None:
    """Fit on the calibration half of `chosen.json` by likelihood, fold into the drafter's final norm."""
    from pair.evaluate import Text
    from pair.prompts import COUNT
    from pair.temperature import fold, sweep

    chosen = json.loads((args.work / "chosen.json").read_text(encoding="utf-8"))[COUNT:]
    texts = [Text(c["ids"] + c["continuation"], len(c["ids"])) for c in chosen]
    target = checkpoint.load_target(args.work / "target")
    drafter = checkpoint.load_drafter(args.work / "drafter")
    records = sweep(target, drafter, texts, args.temperatures, ())
    best = min(records, key=lambda r: r["nll"])["temperature"]
    fold(drafter, best)
    Curve(args.work / "evaluation.jsonl").write(stage="temperature", chosen=best, sweep=records)
    checkpoint.round_to_bf16_(drafter)
    checkpoint.save_drafter(drafter, target.shape, args.work / "drafter")


def run_ship(args: argparse.Namespace) -> None:
    from pair.ship import ship

    print(json.dumps(ship(args.work, args.tokenizer, args.prompts, args.out), indent=1))


def run_measure(args: argparse.Namespace) -> None:
    from ddtree_engine.tree import Builder
    from pair.engine_loop import measure

    builders = (Builder.BEST_FIRST, Builder.SPINE_FIRST)
    figures = measure(args.pair, args.prompts, tuple(args.budgets), builders)
    checkpoint.write_json(args.work / "measured.json", figures)


def line_end_table(args: argparse.Namespace) -> np.ndarray:
    tokenizer = load_tokenizer(args)
    newline = "Ċ"  # byte-level BPE's name of the newline byte
    return np.array(
        [(tokenizer.id_to_token(i) or "").startswith(newline) for i in range(TargetShape().vocab)]
    )


def load_tokenizer(args: argparse.Namespace) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(os.fspath(args.tokenizer))


if __name__ == "__main__":
    main()
