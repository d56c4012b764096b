"""Train on several nodes that are all this machine, with real links between them.

Each node is a network namespace with one `accelerate launch` in it; a bridge joins them, and `tc`
gives every link its rate. OPT, GPT-2 or Llama in miniature train there on real text, as train_*.py
do, under DeepSpeed's ZeRO or DistributedDataParallel, with hf_pyao attached. One micro-batch after
the other, a table says how long the nodes took to accumulate the target, and how many bytes they
sent. Rates are scaled down with the models, so that links and not the cores decide.

    python recipes/local_cluster.py                      five nodes, 50 Mbit/s, about two minutes
    python recipes/local_cluster.py --smoke              two nodes, half a minute
    python recipes/local_cluster.py --model all --repeats 3 --result sweep.json
    python recipes/local_cluster.py --engine ddp --gradient-accumulation 4
    python recipes/local_cluster.py --rate 1gbit --model-size tiny
    python recipes/local_cluster.py --output-dir out --save-steps 3 --kill-node 2 --kill-at-step 5
    python recipes/local_cluster.py --output-dir out --save-steps 3 --resume
    python recipes/local_cluster.py -- --activation_offload_codec int8

Options behind `--` are the training recipes' (`python recipes/train_opt.py --help`).

Needs Linux with `ip`, `tc` and `unshare`, and unprivileged user namespaces, root, or sudo without a
password. No packet leaves the namespaces, and nothing is left of them, however it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cluster.cluster_checks import (
    check_kernel,
    check_nodes,
    check_system,
    choose_engine,
    find_isolation,
    read_launch_options,
)
from cluster.cluster_namespaces import parse_rate
from cluster.cluster_report import Progress, format_sweep
from cluster.cluster_result import ENGINES, ClusterSetup, ClusterSweep, write_sweep
from cluster.cluster_settings import Fault, NodeSettings, SupervisorSettings
from cluster.cluster_sweep import ClusterError, Event, plan_points, run_sweep, write_logs
from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.tools.estimate.model_sizes import MODEL_SIZES, find_size

DEFAULT_BLOCK_SIZE = 32
START_TIMEOUT_S = 180.0


def main(argv: Sequence[str] | None = None) -> None:
    """Check everything, run the sweep, print the table; errors are one line."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(parse(argv))
    except PyAOError as error:
        print(f"local_cluster.py: error: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, ClusterError) else 2) from None
    except KeyboardInterrupt:
        print("local_cluster.py: stopped; the nodes are gone.", file=sys.stderr)
        raise SystemExit(130) from None


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(args: argparse.Namespace) -> ClusterSweep:
    """Run the sweep that *args* ask for; write and print what it comes to.

    Raises:
        ConfigError: it cannot be run here, or not like this.
        ClusterError: it began, and a node failed.
    """
    load_average = os.getloadavg()[0]
    settings = _settings(args)
    check_system()
    isolation = find_isolation()
    check_kernel(isolation)
    node = settings.node
    progress = Progress(node.points, node.compute_steps)

    def on_event(event: Event) -> None:
        progress.take(event)
        if event["event"] == "end" and args.log_dir is not None:
            write_logs(Path(args.log_dir), event["logs"])

    try:
        points = run_sweep(settings, isolation, on_event)
    finally:
        progress.close()
    setup = ClusterSetup(
        nodes=node.nodes,
        engine=node.engine,
        precision=node.precision,
        rate_mbit=node.rate_mbit,
        model_size=node.model_size,
        block_size=_block_size(node.options),
        target=args.target,
        target_over=args.target_over,
        activation_offload=node.activation_offload,
        isolation=isolation,
        options=node.options,
        load_average=load_average,
    )
    sweep = ClusterSweep(setup=setup, points=points)
    print(format_sweep(sweep))
    if args.result is not None:
        write_sweep(args.result, sweep)
    return sweep


def _settings(args: argparse.Namespace) -> SupervisorSettings:
    """Return the settings, after every check that needs no privileges."""
    fault = None
    if args.kill_node is not None:
        fault = Fault(node=args.kill_node, step=args.kill_at_step, kind=args.kill_how)
    check_nodes(args.nodes, fault)
    rate_mbit = parse_rate(args.rate)
    engine = choose_engine(args.engine)
    architectures = list(MODEL_SIZES) if args.model == "all" else [args.model]
    for architecture in architectures:
        find_size(architecture, args.model_size)
    points = plan_points(
        architectures,
        _micro_batches(args.micro_batches),
        gradient_accumulation=_at_least(1, args, "gradient_accumulation"),
        nodes=args.nodes,
        target=_at_least(1, args, "target"),
        target_over=args.target_over,
        steps=(_at_least(1, args, "min_steps"), args.max_steps),
        repeats=_at_least(1, args, "repeats"),
    )
    if fault is not None and fault.step > points[0].steps:
        raise ConfigError(
            f"--kill-at-step is {fault.step}, and the first point has {points[0].steps} steps. "
            "Give a smaller one, or raise --min-steps."
        )
    if (args.resume or args.save_steps) and args.output_dir is None:
        raise ConfigError("--save-steps and --resume need --output-dir, where checkpoints are.")
    precision = args.precision or ("fp32" if engine == "ddp" else "bf16")
    node = NodeSettings(
        nodes=args.nodes,
        engine=engine,
        precision=precision,
        rate_mbit=rate_mbit,
        points=points,
        compute_steps=_at_least(0, args, "compute_steps"),
        activation_offload=args.activation_offload,
        model_size=args.model_size,
        options=args.recipe_options,
        timeout_s=_at_least(5, args, "timeout"),
        work_dir="",  # the supervisor's
        output_dir=None if args.output_dir is None else str(Path(args.output_dir).resolve()),
        save_steps=_at_least(0, args, "save_steps"),
        resume=args.resume,
    )
    return SupervisorSettings(
        node=node,
        python=sys.executable,
        launch_options=_launch_options(args, engine),
        start_timeout_s=START_TIMEOUT_S,
        fault=fault,
    )


def _launch_options(args: argparse.Namespace, engine: str) -> list[str]:
    if args.config is not None:
        return read_launch_options(args.config, args.nodes, engine)
    return [
        *("--multi_gpu", "--num_machines", str(args.nodes), "--num_processes", str(args.nodes)),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ]


def _micro_batches(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise ConfigError(
            f"--micro-batches is {text!r}; expected whole numbers of 1 or more, each once, such "
            "as 1,2,4,8."
        )
    return values


def _at_least(least: int, args: argparse.Namespace, name: str) -> int:
    value: int = getattr(args, name)
    if value < least:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected {least} or more.")
    return value


def _block_size(options: list[str]) -> int:
    for position, option in enumerate(options):
        name, _, value = option.partition("=")
        if name == "--block_size":
            return int(value or options[position + 1])
    return DEFAULT_BLOCK_SIZE


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is behind ``--`` is kept for the training recipe."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    args = parser.parse_args(arguments[:split])
    if args.smoke:  # other defaults; what is given wins
        parser.set_defaults(nodes=2, micro_batches="1,4", target=16, compute_steps=2, min_steps=3)
        args = parser.parse_args(arguments[:split])
    args.recipe_options = arguments[split + 1 :]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="local_cluster.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=5, help="how many (default: %(default)s)")
    add("--rate", default="50mbit", help="of each link, each way (default: %(default)s)")
    add("--engine", choices=ENGINES, help="default: zero2 where DeepSpeed is installed, else ddp")
    add("--precision", choices=("bf16", "fp32"), help="default: bf16, of ddp fp32")
    add("--model", choices=(*MODEL_SIZES, "all"), default="opt", help="default: %(default)s")
    add("--model-size", default="mini", help="as in train_opt.py --help (default: %(default)s)")
    add("--micro-batches", default="1,2,4,8", help="of one node (default: %(default)s)")
    add("--gradient-accumulation", type=int, default=1, help="micro-steps in an optimizer step")
    add("--target", type=int, default=256, help="samples to accumulate (default: %(default)s)")
    over = "over all nodes together, or on each node (default: %(default)s)"
    add("--target-over", choices=("all", "node"), default="all", help=over)
    add("--min-steps", type=int, default=4, help="optimizer steps of a point, at least")
    add("--max-steps", type=int, help="at most; a target further off is not timed")
    add("--compute-steps", type=int, default=6, help="steps with the links unshaped; 0: none")
    add("--repeats", type=int, default=1, help="of the whole sweep (default: %(default)s)")
    add("--activation_offload", action="store_true", default=True, help="attach hf_pyao (default)")
    add(
        "--no_activation_offload",
        dest="activation_offload",
        action="store_false",
        help="do not: the same losses, bit for bit",
    )
    add("--result", metavar="FILE.json", help="write the figures here")
    add("--output-dir", help="write checkpoints here, a folder for each point")
    add("--save-steps", type=int, default=0, help="one every so many steps (default: none)")
    add("--resume", action="store_true", help="go on from the newest checkpoint of each point")
    add("--timeout", type=int, default=45, help="seconds that a collective may take")
    add("--kill-node", type=int, help="end this node in the first point, to see what happens")
    add("--kill-at-step", type=int, default=5, help="in this step of it (default: %(default)s)")
    how = "its processes by SIGKILL, or its link (default: %(default)s)"
    add("--kill-how", choices=("kill", "unplug"), default="kill", help=how)
    add("--log-dir", help="write the last lines of the nodes that failed here")
    add("--config", help="accelerate's configuration for the nodes: a file of recipes/configs")
    add("--smoke", action="store_true", help="two nodes, two micro-batches, seconds")
    return parser


if __name__ == "__main__":
    main()
