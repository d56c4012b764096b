"""The options of all commands, as one table.

A heading is a command and, behind a colon, the group of its help; ``+`` puts the rows of another
heading in. A row is a flag (or, without dashes, a position), what it takes, and its help. Of what
it takes, ``N`` and ``RANK`` are whole numbers, ``X`` and ``S`` numbers, ``FILE`` and ``PLAN.json``
paths, words in braces the choices, any other word a text; a flag that takes nothing is a switch.
Brackets mean that the word may be left out, dots that there may be
several; ``rest`` is all that is left. ``=`` is the default, ``const`` what holds where the word is
left out, ``>=`` the least number, ``dest`` the name among the arguments.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError

TABLE = """
trained
  --lora [RANK] const=16 >=1        train LoRA adapters of this rank (16); needs peft
  --lora-targets NAME,... =all-linear
                                    modules with adapters, as target_modules of PEFT. all-linear
                                    puts them on fused experts too, which then cannot be streamed
                                    (default: all-linear)
  --lora-dropout X =0               lora_dropout of PEFT (default: 0)
  --adapter-dtype {float32,bfloat16} =float32
                                    float32 is PEFT's own choice, here under autocast in bfloat16
                                    as with Trainer's bf16=True; bfloat16:
                                    autocast_adapter_dtype=False (default: float32)
  --base {bf16,nf4,nf4-double,int8} =bf16
                                    with --lora: how bitsandbytes stores linear layers but the
                                    head. nf4-double: with bnb_4bit_use_double_quant=True
                                    (default: bf16, not quantised)
  --kbit-prepared                   with --lora: PEFT's prepare_model_for_kbit_training was
                                    called, so that embeddings, norms and head are float32, and
                                    hidden states with them (default: not, as TRL 1.16 trains)
  --dtype {bfloat16,float16} =bfloat16
                                    of weights and arithmetic; float16 on cards before Ampere,
                                    such as the T4, which has no fused attention in bfloat16
                                    (default: bfloat16)
  --engine {plain,zero2} =plain     plain: gradients and optimizer are on the device. zero2: each
                                    gradient moves to the host when it is complete, and the
                                    optimizer is there (default: plain)
  --optimizer {adamw,adamw-32bit,adamw-8bit,sgd} =adamw
                                    its states on the device, with engine plain: two moments in
                                    the dtype of what is trained (adamw), in 32 or 8 bits, or none
                                    (default: adamw)
  --optimizer-step {fused,foreach,for-loop} =fused
                                    torch's implementation of the optimizer on the device. fused
                                    allocates nothing more (transformers' default), foreach as
                                    much as all weights (torch's default), for-loop as much as the
                                    two largest weights (default: fused)
  --deterministic                   torch.use_deterministic_algorithms(True): kernels of attention
                                    allocate more
  --attention {flash,cudnn} =flash  the kernel of attention without a mask in 16 bits:
                                    FlashAttention-2, or cuDNN's, which torch prefers on compute
                                    capability 9.0 and 10.0 unless
                                    torch.backends.cuda.enable_cudnn_sdp(False) is called
                                    (default: flash)
streamed
  --stream-weights off|auto|N =off  with --lora: frozen weights of layers live on the host and are
                                    uploaded layer by layer: as few layers as is fastest (auto),
                                    or all but N (default: off)
  --stream-embeddings {off,on} =off
                                    with --stream-weights: frozen embeddings and head live on the
                                    host, too; the time of their uploads is not predicted
                                    (default: off)
levers
  --long-context                    as training with long_context: chunked loss, MLPs in tiles,
                                    each layer's input offloaded and the layer run again in
                                    backward, attention not. Each can be given otherwise beside it
  --head-loss {off,chunked}         chunked: the loss without all logits at once (default: off;
                                    with --long-context: chunked)
  --mlp-tiles {off,auto,N}          run MLPs over tiles of tokens, so that their intermediate
                                    tensors exist for one at a time; auto: as many as keep matrix
                                    products efficient (default: off; with --long-context: auto)
  --checkpoint-every K              of every K layers only the first one's input is saved, and
                                    they run again in backward. 2 takes half of the host memory
                                    that 1 does (default: 0, which is off; with --long-context: 1)
  --[no-]checkpoint-nested          with --checkpoint-every of 2 or more: have the K layers'
                                    tensors on the device one layer at a time, for up to one more
                                    forward (default: no; with --long-context: yes)
  --[no-]save-attention             with --checkpoint-every: save what attention returns too, so
                                    that its kernel does not run again (default: no; with
                                    --long-context: yes)
  --attention-groups {off,auto,N}   run flash attention over groups of samples and heads, so that
                                    what its backward allocates inside exists for one group at a
                                    time; auto: as many as keep that small while each group fills
                                    the device (default: off; with --long-context: auto)
bench: what is measured
  --model MODEL                     see below
  --micro-batch N >=1               sequences (default: 4)
  --find-largest                    find each method's largest micro-batch instead, and measure
                                    there; see --memory-cap-gib
  --sequence-length N >=2           tokens (default: 512)
  --dtype {float32,bfloat16,float16}
                                    of the weights (default: bfloat16)
  --autocast {float32,bfloat16,float16}
                                    run the forward under autocast
  --attention NAME                  sdpa, eager, ... (default: transformers chooses)
  --methods METHOD...               see below (default: all in the list)
bench: how
  --device NAME =auto               auto, cpu, cuda, ... (default: auto)
  --steps N >=1                     timed steps (default: 10)
  --warmup N >=0                    steps before them (default: 3)
  --seed N =0                       of weights, data, dropout (default: 0)
  --gradients {keep,release} =keep  keep them until the step ends, or release each as it is
                                    complete (default: keep)
  --memory-cap-gib X                most device memory, in GiB of 2**30 bytes
  --ballast-gib X =0.0 >=0          device memory set aside, as for a gradient bucket (default: 0)
  --timeout X =600.0                seconds for a row (default: 600)
  --output FILE.json                default: named by model
  --smoke                           tiny model, short steps and few methods: a trial of the
                                    program
estimate: what is trained
  --model MODEL required            see below
  --sequence-length N >=2           tokens of a sample (default: 512; not with --find sequence)
  --lengths A-B                     texts of A to B tokens, such as 91-8192, in place of
                                    --sequence-length: what is reserved is then the worst case, of
                                    steps that grow from A to B, and all else is for B
  --micro-batch N >=1               times and peaks for this many samples (default: for the most
                                    that fit); with --find sequence or model-size: samples of a
                                    micro-batch (default: 1)
  + trained
estimate: what it is trained on
  --device/--gpu NAME =rtx4070      a card, see below (default: rtx4070)
  --device-memory SIZE              memory of the card, such as 12GiB, if another; the CUDA
                                    context is taken off
  --link SPEED                      speed of the link in each direction, such as 25GiB/s, if
                                    another
  --disk SPEED                      with streamed weights and --host-memory: a disk that has what
                                    the host has no room for, and how fast it is read, such as
                                    3GiB/s (`pyao doctor --disk FOLDER` measures it)
  --alloc-conf SETTINGS =           what PYTORCH_CUDA_ALLOC_CONF is to be, such as
                                    expandable_segments:True (default: PyTorch's default)
estimate: how
  --zeroth-order [SETTING=VALUE...]
                                    the device memory of fine-tuning by two forwards a step, with
                                    all layers on the host; of momentum, head_loss and
                                    transfer_dtype, those that are given
  --no-longest-sequence             do not look for the longest sequence, which takes half of the
                                    time
  --processes N >=1                 processes that work at it, 3 at most (default: 2, where there
                                    are two cores)
  --no-cache                        compute the answer, even if the same question was answered
                                    before, and do not keep it (answers are kept in
                                    ~/.cache/hf_pyao, or in $XDG_CACHE_HOME/hf_pyao)
  --json                            print JSON, which `pyao report` reads
  --output FILE.json                write the JSON here too
  --step FILE.json                  write one step over time here: memory, compute, copies; `pyao
                                    report` draws it
  --step-method WAY                 which way --step shows, such as 'policy all' (default: the one
                                    that the verdict names)
estimate: to choose a micro-batch, a length or a number of layers
  --find {micro-batch,largest-micro-batch,sequence,model-size}
                                    the micro-batch with the least time per sample, the largest
                                    one that fits, the longest sequence that fits, or the most
                                    layers that the model may have (model-size)
  --global-batch N >=1              samples of one optimizer step on one device; micro-batches
                                    have to divide it (default: 64)
  --micro-batches N,N,...           consider these alone (default: all that divide the global
                                    batch)
  --host-memory SIZE                most host memory for what is offloaded, such as 64GiB
                                    (default: no limit); without --find it goes with --disk
  + streamed
estimate: with --find: what changes the step itself
  + levers
profile
  -o/--output FILE.json =profile.json
                                    the file to write (default: profile.json)
profile: measured
  --steps N =3 >=1                  micro-batches to measure (default: 3)
  --keep-running                    let the script go on when it is done
  -m/--module                       SCRIPT is a module, as with python -m
  script [SCRIPT]                   the training script
  arguments ARGS rest               its own arguments
profile: predicted
  --model MODEL                     as for pyao estimate
  --device NAME                     a card, as for pyao estimate (default: rtx4070)
  --micro-batch N =1 >=1
  --sequence-length N =512 >=2
  + trained
  + levers
advise
  script SCRIPT                     the training script
  arguments ARGS rest               its own arguments
  --gpu/--device NAME               the card that is advised on, as for pyao estimate (default:
                                    the one that the script runs on)
  --device-memory SIZE              memory of the card, as 16GiB (default: its own)
  --link SPEED                      speed of the link in each direction, as 25GiB/s
  --steps N =2 >=1                  micro-batches that the script trains before it is ended; the
                                    largest one counts (default: 2)
  --unprotected                     do not have the kernel forbid the script to write: Python's
                                    own writes still go to a temporary folder, those of compiled
                                    code and other processes do not
  -m/--module                       SCRIPT is a module, as with python -m
plan
  source [PROFILE.json|MODEL]       what is planned for
  --device-memory SIZE              what may be reserved for tensors, as 11GiB (default: the
                                    device's memory less the CUDA context)
  --host-memory SIZE                most on the host, as 32GiB (default: no bound)
  --device/--gpu NAME               a card, as for pyao estimate (default: of a model rtx4070, of
                                    a profile the one that was profiled)
  --link SPEED                      speed of the link in each direction, as 25GiB/s
  --disk SPEED                      with streamed weights and --host-memory: a disk that has what
                                    the host has no room for, and how fast it is read, such as
                                    3GiB/s (`pyao doctor --disk FOLDER` measures it)
  --alloc-conf SETTINGS =           what PYTORCH_CUDA_ALLOC_CONF is to be, such as
                                    expandable_segments:True (default: PyTorch's default)
  --window SIZE                     bytes in flight, or 'layer' (default: the plan chooses)
  --keep-last-layers N              (default: by the plan)
  --allow-lossy                     int8 may be chosen where it is faster
  --micro-batch N =1 >=1            of a model (default: 1)
  --sequence-length N =512 >=2      of a model (default: 512)
  --save FILE.json                  write the plan, or what --try says
  --json                            print JSON
  --no-cache                        compute the answer, even if the same question was answered
                                    before, and do not keep it (answers are kept in
                                    ~/.cache/hf_pyao, or in $XDG_CACHE_HOME/hf_pyao)
  --compare PLAN.json...            show plans side by side
  --try [PLAN.json...] dest=tried   search nothing: predict the step of a profile under these
                                    plans, with nothing offloaded and with everything offloaded
plan: how a model is trained
  + trained
  + streamed
plan: what changes a model's step itself
  + levers
sweep: what is swept
  --model MODEL required            opt:1.3b, ARCH:key=value,..., a folder or a name on the hub,
                                    as for `pyao bench`
  --budgets LIST                    see below (default: 0,1,2,4,8,16,32)
  --micro-batch N >=1               samples (default: 4)
  --sequence-length N =512 >=2      tokens (default: 512)
  --dtype {float32,bfloat16,float16} =bfloat16
                                    of the weights (default: bfloat16)
  --checkpointing                   checkpoint the layers, and offload the rest
  --min-bytes SIZE                  least size of what leaves
  --keep-last-layers N >=0          last layers that are kept (default: 1)
  --window SIZE                     bytes in flight, or 'layer': with a window, a budget that is
                                    smaller frees nothing while the host runs ahead (default:
                                    256MiB)
sweep: what changes the step itself
  + levers
sweep: how
  --device NAME                     auto, cpu, cuda, ...; with --predict a card, as for `pyao
                                    estimate` (default: auto, or rtx4070)
  --json                            print JSON, which `pyao report` reads
  --output FILE.json                default: named by model, if measured
sweep: how it is measured
  --seeds N >=1                     seeds (default: 5)
  --seed N >=0                      the first of them (default: 0)
  --steps N >=1                     timed steps (default: 10)
  --warmup N >=0                    steps before (default: 3)
  --order-seed N >=0                shuffles the order of budgets (default: 0)
  --attention NAME                  sdpa, eager, ... (default: transformers chooses)
  --timeout S                       seconds for a point (default: 600)
sweep: how it is predicted
  --predict                         predict, and run no model
  --device-memory SIZE              memory of the card, if another
  --link SPEED                      such as 25GiB/s, each way, if another
  --tflop-per-s X                   1e12 operations that matrix products reach in a second, if
                                    another than the card's for 16 bits; float32 needs it
  --engine {plain,zero2}            as for `pyao estimate` (default: plain)
  --optimizer {adamw,adamw-32bit,adamw-8bit,sgd}
                                    whose states are on the device, as for `pyao estimate`
                                    (default: adamw)
report
  files FILE.json...
  -o/--output FILE                  a .md, .html or .json file to write
  --no-plots                        tables alone; matplotlib is then not needed
doctor
  --device NAME =auto               auto, cpu, cuda, ... (default: auto)
  --disk FOLDER                     measure the disk of this folder, too: 1 GiB is written,
                                    flushed, read and removed
  --json                            as JSON, for a bug report
  --model MODEL =opt:1.3b           what the verdict is for, as pyao estimate takes it (default:
                                    opt:1.3b)
  --no-verdict                      leave it out: it takes a minute
"""

ABOUT = {
    "estimate: to choose a micro-batch, a length or a number of layers": "The samples of an "
    "optimizer step stay as they are: smaller micro-batches are accumulated. PyAOTrainer does the "
    "same for the model that it trains, and tries what it chose "
    "(--activation_offload_auto_micro_batch).",
    "estimate: with --find: what changes the step itself": "With a chunked loss or tiles each size "
    "is recorded, which takes longer.",
    "plan: what changes a model's step itself": "Give training the same settings: the plan is for "
    "what they leave to decide on.",
}
"""What is said below a heading."""

_TYPES = {"N": int, "RANK": int, "X": float, "S": float}
_PATHS = ("FILE", "PLAN.json")


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of *command* to its parser."""
    for heading in _table():
        name, _, title = heading.partition(": ")
        if name == command:
            group: argparse._ActionsContainer = parser
            if title:
                group = parser.add_argument_group(title, ABOUT.get(heading))
            add_rows(group, heading)


def given_of(args: argparse.Namespace, heading: str) -> list[str]:
    """Return which options of a heading have another value in *args* than without them."""
    parser = argparse.ArgumentParser(add_help=False)
    add_rows(parser, heading)
    default = vars(parser.parse_args([]))
    return [flag_of(name) for name, value in default.items() if getattr(args, name) != value]


def flag_of(name: str) -> str:
    """Return how an option is written, by its name among the arguments."""
    return "--" + name.replace("_", "-")


@functools.cache
def _table() -> dict[str, list[tuple[str, str]]]:
    """Return the rows of each heading: what is said of an option, and its help."""
    found: dict[str, list[tuple[str, str]]] = {}
    rows: list[tuple[str, str]] = []
    for line in TABLE.strip().splitlines():
        if not line.startswith(" "):
            rows = found[line] = []
        elif line.startswith("  + "):
            rows += found[line[4:]]
        elif line.startswith("   "):
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {line.strip()}".strip()
        else:
            spec, _, help = line.strip().partition("  ")
            rows.append((spec, help.strip()))
    return found


def add_rows(group: argparse._ActionsContainer, heading: str) -> None:
    """Add the rows of one heading to a group of a parser."""
    for spec, help in _table()[heading]:
        flags, *words = spec.split()
        more: dict[str, Any] = {"help": help or None}
        for key, value in _said_of(words):
            more[key] = value
        kind = more.get("type", str)
        more |= {key: kind(more[key]) for key in ("default", "const") if key in more}
        if "[no-]" in flags:
            more["action"] = argparse.BooleanOptionalAction
        elif flags.startswith("-") and not more.keys() & {"metavar", "choices"}:
            more["action"] = "store_true"
        if "least" in more:
            more["action"] = functools.partial(_AtLeast, least=more.pop("least"))
        group.add_argument(*flags.replace("[no-]", "").split("/"), **more)


def _said_of(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield arguments of ``add_argument`` for what a row says behind its flag."""
    for word in words:
        if word.startswith(">="):
            yield "least", int(word[2:])
        elif word.startswith("="):
            yield "default", word[1:]
        elif word.startswith(("dest=", "const=")):
            yield word.split("=")[0], word.split("=")[1]
        elif word == "rest":
            yield "nargs", argparse.REMAINDER
        elif word == "required":
            yield "required", True
        elif re.fullmatch("{[^A-Z]*}", word):
            yield "choices", tuple(word[1:-1].split(","))
        else:
            yield from _taken(word)


def _taken(word: str) -> Iterator[tuple[str, Any]]:
    """Yield the same for what an option takes."""
    found = re.fullmatch(r"(\[?)(.+?)((?<!,)\.\.\.)?\]?", word)
    assert found is not None
    optional, metavar, dots = found.groups()
    yield "metavar", metavar
    yield "type", Path if metavar.startswith(_PATHS) else _TYPES.get(metavar, str)
    if optional or dots:
        yield "nargs", "*" if optional and dots else "?" if optional else "+"


class _AtLeast(argparse.Action):
    """Takes a number that is not less than another."""

    def __init__(self, *args: Any, least: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self._least = least

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take it.

        Raises:
            ConfigError: it is less.
        """
        if not values >= self._least:
            raise ConfigError(
                f"{option_string} is {values}; expected {self._least} or more.",
                key="setting-value",
            )
        setattr(namespace, self.dest, values)
