"""Is a link fast enough? What averaged gradients, DiLoCo and EDiT would cost, on paper.

    python -m lab.planner --model 7b --replicas 2 --shards 8 --link_mbps 10000 --tau 16
    python -m lab.planner --model 1b --replicas 4 --shards 8 --link_mbps 25000 --tau 64
    python -m lab.planner --parameters 10.8e6 --layers 6 --step_s 1.0 --link_mbps 100 --tau 64

The first line has the setting of README and of explain.html. The formulas are in
plumbing/plan.py, where train.py --dry_run takes them from, too. A step takes

    tokens per rank x FLOPs per token / (tflops x mfu)

seconds, for a GPU with a peak of --tflops, of which it reaches the share --mfu. By default this is
an H100 at 40%. Better is --step_s, the time of a step that you have measured on one replica with
its share of --tokens_per_step (`ms` in the lines `step` of a run). If a step has several
micro-steps, give --accum: only the last backward hides gradients, only the first forward a sync.

A training in rounds needs more steps to the same loss, so it keeps only the share --kept of its
speed: by default what was measured in a small model. With 1 `worth` compares equally many steps.

    vendor's peak in bf16, TFLOP/s    A100 312, H100 and H200 989, B200 2250

Source: the formulas are ours. tests/test_planner.py compares them with table 4 of arXiv 2501.18512.
"""

import sys

from config import PRESETS, Config, Parser, UserError, make_config, padded_vocabulary, run_command
from edit import EDiT
from plumbing.plan import MFU, TFLOPS, Plan, Run, describe

GPT2_VOCABULARY = 50257


def read_command(argv) -> Run:
    """Raises UserError."""
    parser = Parser(prog="python -m lab.planner", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="7b", choices=list(PRESETS), help="a preset of train.py (default: 7b)")
    add("--parameters", type=float, help="of another model; then give --layers and --step_s")
    add("--layers", type=int, help="its blocks")
    add("--replicas", type=int, default=2, help="M, mostly machines (default: 2)")
    add("--shards", type=int, default=8, help="N, ranks of a replica (default: 8)")
    add("--link_mbps", type=float, required=True, help="Mbit/s of each replica to the others")
    add("--tau", type=int, help="steps of a round (default: 16)")
    add("--tokens_per_step", type=int, help="of all ranks (default: about 524288)")
    add("--accum", type=int, default=1, help="micro-steps of a step (default: 1)")
    add("--step_s", type=float, help="seconds of a step without waiting")
    add("--tflops", type=float, default=TFLOPS, help=f"a GPU's peak (default: {TFLOPS}, an H100)")
    add("--mfu", type=float, default=MFU, help=f"the share of it that is reached (default: {MFU})")
    add("--bits", type=float, default=32.0, help="of a gradient on the link (default: 32)")
    add("--kept", type=float, help="share of the speed that rounds keep (default: see above)")
    add("--max_steps", type=int, help="of the run (default: the preset's)")
    add("--sync_warmup_steps", type=int, help="of averaged gradients (default: the preset's)")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not value > 0 and name != "sync_warmup_steps":
            raise UserError(f"--{name} {value}: must be above 0")
    if args.kept and args.kept > 1:
        raise UserError(f"--kept {args.kept:g}: a share of the speed, at most 1")
    return make_run(args)


def make_run(args) -> Run:
    given = {"model": args.model, "method": "edit", "shards": args.shards, "device": "cuda"}
    given |= {"dtype": "bf16", "link_mbps": args.link_mbps}
    ranks = args.replicas * args.shards
    unit = ranks * PRESETS[args.model].get("block_size", Config.block_size)  # a sequence on each
    given["tokens_per_step"] = args.tokens_per_step or -(-(2**19) // unit) * unit
    for name in "tau", "max_steps", "sync_warmup_steps":
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    config = make_config(given, {"edit": EDiT}, {})
    vocabulary = padded_vocabulary(config, GPT2_VOCABULARY)
    plan = Plan(config, EDiT, vocabulary, ranks)
    run = plan.run(args.step_s or plan.step_seconds(args.tflops, args.mfu), args.bits)
    if args.parameters:
        if not args.layers or not args.step_s:
            raise UserError("--parameters: give --layers and --step_s, too")
        run.parameters, run.layers = args.parameters, args.layers
        run.tokens_per_step = args.tokens_per_step or 0
    run.micro_steps, run.kept = args.accum, args.kept or 0
    return run


def main(argv):
    run = read_command(argv)
    print(f"{run.parameters:,.0f} parameters in {run.layers} layers")
    print(describe(run))


if __name__ == "__main__":
    run_command("planner.py", lambda: main(sys.argv[1:]))
