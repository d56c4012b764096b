"""Cards that are common, with their speeds and where those are from.

Speeds are what kernels reach, not what data sheets promise: 85 % of a sheet's dense tensor-core
rate for 16-bit inputs that are summed in 32 bits, and 80 % of its memory bandwidth, unless the
source says otherwise; a PCIe 4.0 link of 16 lanes carries 25e9 bytes a second, a PCIe 5.0 link
50e9, a PCIe 3.0 link or a PCIe 4.0 link of 8 lanes 12.5e9, a PCIe 3.0 link of 8 lanes 6.25e9. They
are starting points: give measured ones where there are any.

Numbers of streaming multiprocessors are those of NVIDIA's data sheets and whitepapers (GA106,
GA107, GA102, GA100: Ampere; AD102, AD104, AD106: Ada; TU104: Turing; GH100: Hopper; GB202:
Blackwell), and compute units of AMD's; compute capabilities are those of NVIDIA's page "CUDA GPUs".
What attention allocates inside depends on both (``attention_workspaces``).

What of a card's memory no tensor can have, ``context_gib``, is what the driver keeps (the memory
that is sold less the "total capacity" of PyTorch's out-of-memory messages) and the CUDA context of
one process (memory "in use" less what is allocated and reserved in such a message). Both are from
messages that users have posted:

=========  =========================================================  ========  =======
card       posted in                                                  capacity  context
=========  =========================================================  ========  =======
rtx4070    GitHub, Kwai-Kolors/Kolors, issue 11 (a 4070 Ti)           11.70      0.33
rtx4090    GitHub, 3DTopia/Phidias-Diffusion, issue 8                 23.64      0.49
rtx5090    GitHub, Wan-Video/Wan2.1, issue 465                        31.37      0.58
a100       GitHub, lianqi1008/Control-GIC, issue 6                    79.14      0.49
h100       GitHub, Tianhao-Qi/Mask2DiT, issue 4 (card not named)      79.33      0.50
rtx3090    GitHub, ucwxb/GraphAvatar, issue 4                         23.69
t4         GitHub, Zheng-Chong/CatVTON, issue 133                     14.56      0.13
l4         GitHub, ArcInstitute/evo2, issue 190                       22.03      0.23
a100-40gb  GitHub, TianheWu/CoSeR, issue 10 (size not named)          39.50      0.49
=========  =========================================================  ========  =======

PyTorch's developers name 300 to 400 MB for a context since CUDA 11.7 loads kernels when they first
run (GitHub, pytorch/pytorch, issues 107667 and 109888): 0.4 GiB are taken where a message shows
less, and 0.5 where it does not say. The capacity of the RTX 4060 Ti is taken to be that of another
card of 16 GB (15.61 GiB, GitHub, DengKaiCQ/VGGT-Long, issue 6). For cards that are not in the table
0.65 GiB are taken in all. The memory of the H200 is its capacity; 0.65 GiB is the largest context
that was seen. ``pyao doctor`` says what it is on a card that is there."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel, DiskModel, LinkModel

COMPUTE_SHARE = 0.85
MEMORY_SHARE = 0.80
CONTEXT_GIB = 0.65
"""What no tensor can have of a card of which nothing was measured."""
_PCIE_GIB_PER_S = {
    "3x8": 6.25e9 / GIB,
    "3x16": 12.5e9 / GIB,
    "4x8": 12.5e9 / GIB,
    "4x16": 25e9 / GIB,
    "5x16": 50e9 / GIB,
}
"""Generation and lanes -> what a link carries in each direction."""

_FIELDS = (
    *("name", "tflop_per_s", "reached", "gb_per_s", "memory_gib", "context_gib", "link"),
    *("copy_engines", "num_multiprocessors", "capability"),
)
"""Columns of the table of cards, but for the source."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device, its memory, and its link to the host."""

    name: str
    device: DeviceModel
    link: LinkModel
    memory_gib: float
    """Memory of the device."""
    context_gib: float = 0.0
    """What of it no tensor can have: the driver's part, and the context of one process."""
    source: str
    """Where the speeds are from."""
    num_multiprocessors: int = 0
    """Streaming multiprocessors; 0: not known."""
    capability: int = 0
    """CUDA compute capability, 10 x major + minor; 0: not known, or no CUDA device."""
    host_memory_gib: float | None = None
    """Host memory for weights and activations that leave the device; None: no limit."""

    def __post_init__(self) -> None:
        """Check the memory.

        Raises:
            ConfigError: it is not positive, or the context takes all of it.
        """
        if not self.memory_gib > 0:
            raise ConfigError(
                f"memory_gib is {self.memory_gib}; expected a positive number of GiB.",
                key="wrong-argument",
            )
        if not 0 <= self.context_gib < self.memory_gib:
            raise ConfigError(
                f"context_gib is {self.context_gib}; expected 0 or more, and less than the "
                f"{self.memory_gib:g} GiB of the device.",
                key="wrong-argument",
            )

    @property
    def kernels(self) -> KernelSettings:
        """How kernels run on it, as far as the card decides."""
        return KernelSettings(self.num_multiprocessors, self.capability)

    def with_link(self, gib_per_s: float) -> Hardware:
        """Return the same device behind a link of another speed in both directions."""
        link = dataclasses.replace(self.link, d2h_gib_per_s=gib_per_s, h2d_gib_per_s=gib_per_s)
        return dataclasses.replace(self, link=link)

    def with_disk(self, gib_per_s: float) -> Hardware:
        """Return the same device with weights on a disk, which is read at this speed."""
        link = dataclasses.replace(self.link, disk=DiskModel(read_gib_per_s=gib_per_s))
        return dataclasses.replace(self, link=link)

    @property
    def host_limit_bytes(self) -> float:
        """The host memory in bytes; infinite where there is no limit."""
        return math.inf if self.host_memory_gib is None else self.host_memory_gib * GIB


_TABLE = """
card           TFLOP/s reached GB/s  GiB   context PCIe engines SMs capability
rtx2050        10.2    -       112   4     -       3x8  1       16  86
  RTX 2050 Laptop at 45 W: 5.1 TFLOP/s of shaders, tensor cores twice that with 32-bit sums;
  PCIe 3.0 of 8 lanes
rtx3060        25.6    -       360   12    -       4x16 1       28  86
  RTX 3060 12 GB: 12.8 TFLOP/s of shaders, tensor cores twice that with 32-bit sums
rtx3090        71      -       936   24    0.85    4x16 1       82  86
  NVIDIA GA102 architecture whitepaper, tensor cores with 32-bit sums
rtx4060ti-16gb 44.1    -       288   16    0.9     4x8  1       34  89
  RTX 4060 Ti 16 GB: 22.06 TFLOP/s of shaders, tensor cores twice that with 32-bit sums; PCIe
  4.0 of 8 lanes
rtx4070        58.3    -       504   12    -       4x16 1       46  89
  RTX 4070: 29.15 TFLOP/s of shaders, tensor cores twice that with 32-bit sums
rtx4090        165.2   -       1008  24    0.85    4x16 1       128 89
  NVIDIA Ada architecture whitepaper
rtx5090        209.5   -       1792  32    1.2     5x16 1       170 120
  NVIDIA RTX Blackwell architecture whitepaper
t4             65      -       320   16    1.85    3x16 2       40  75
  NVIDIA T4 data sheet, float16: it has no bfloat16 units, and torch's flash attention does not
  run on it
l4             121     -       300   24    2.4     4x16 2       58  89
  NVIDIA L4 data sheet, half of the rate that it states with sparsity
a10            125     -       600   24    2.4     4x16 2       72  86
  NVIDIA A10 data sheet; its capacity is taken to be that of the L4
a10g           70      -       600   24    2.4     4x16 2       80  86
  NVIDIA A10G data sheet (AWS G5); its capacity is taken to be that of the L4
a100-40gb      312     -       1555  40    1.0     4x16 2       108 80
  NVIDIA A100 40 GB data sheet
a100           312     -       2039  80    1.35    4x16 2       108 80
  NVIDIA A100 80 GB SXM data sheet
h100           989     670     3350  80    1.2     5x16 2       132 90
  NVIDIA H100 SXM data sheet; matrix products of 16 bits reach about 670 TFLOP/s
h200           989     670     4800  139.8 -       5x16 2       132 90
  NVIDIA H200 data sheet; matrix products of 16 bits reach about 670 TFLOP/s
mi300x         1307    650     5300  192   -       5x16 2       304 0
  AMD MI300X data sheet; matrix products of 16 bits reach about half of it
"""
"""A row for each card, and below it where its figures are from. The columns: what its data sheet
says of 16-bit matrix products, what these reach where that is known, its memory's speed and size,
what of it no tensor can have, generation and lanes of its link, copy engines, multiprocessors, and
compute capability."""


def _cards() -> Iterator[Hardware]:
    """Yield the cards of the table."""
    _, *rows = _TABLE.strip().replace("\n  ", " ").splitlines()
    for row in rows:
        name, *figures, source = row.split(None, len(_FIELDS))
        of: dict[str, Any] = {
            field: None if text == "-" else text if "x" in text else json.loads(text)
            for field, text in zip(_FIELDS[1:], figures, strict=True)
        }
        speed = _PCIE_GIB_PER_S[of["link"]]
        yield Hardware(
            name=name,
            device=DeviceModel(
                tflop_per_s=of["reached"] or COMPUTE_SHARE * of["tflop_per_s"],
                memory_gib_per_s=MEMORY_SHARE * of["gb_per_s"] * 1e9 / GIB,
            ),
            link=LinkModel(
                d2h_gib_per_s=speed, h2d_gib_per_s=speed, copy_engines=of["copy_engines"]
            ),
            memory_gib=of["memory_gib"],
            context_gib=CONTEXT_GIB if of["context_gib"] is None else of["context_gib"],
            source=source,
            num_multiprocessors=of["num_multiprocessors"],
            capability=of["capability"],
        )


OTHERS_TIMES: Mapping[tuple[str, str], tuple[float, float]] = MappingProxyType(
    {
        ("a100", "eager"): (1.04, 1.36),
        ("a100", "fused"): (0.87, 1.06),
        ("rtx4090", "fused"): (0.57, 0.78),
        ("h100", "fused"): (0.48, 0.65),
    }
)
"""Card, and whether its layers' kernels are fused -> the least and the most of steps of 1,000
tokens or more that others measured on it, as a multiple of the predicted time. Source: table
``gpus`` in ``recipes/results/published_gpus.json``."""


HARDWARE: Mapping[str, Hardware] = MappingProxyType({card.name: card for card in _cards()})
"""By name, in lower case and without spaces."""


def find_hardware(name: str) -> Hardware:
    """Return the card called *name*; case, spaces, hyphens and the maker are forgiven.

    Raises:
        ConfigError: there is none; the nearest name and all names are given.
    """
    key = _key(name)
    for maker in ("nvidia", "geforce", "tesla", "amd", "instinct"):
        key = key.removeprefix(maker)
    known = {_key(each): card for each, card in HARDWARE.items()}
    key = _OTHER_NAMES.get(key, key)
    if f"rtx{key}" in known:
        key = f"rtx{key}"
    if key not in known:
        raise unknown_name("device", name, HARDWARE)
    return known[key]


_OTHER_NAMES = {
    "a10040": "a10040gb",
    "a100pcie40gb": "a10040gb",
    "a100sxm440gb": "a10040gb",
    "a10080": "a100",
    "a10080gb": "a100",
    "a10080gbpcie": "a100",
    "a100sxm480gb": "a100",
    "h10080gbhbm3": "h100",
    "rtx4060ti16": "rtx4060ti16gb",
    "4060ti16": "rtx4060ti16gb",
}
"""Further names, those that torch gives among them. Cards with other speeds than the row have none:
H100 PCIe and NVL, H200 NVL, those of laptops, parts of a card (MIG). "RTX 4060 Ti" is two cards."""


def _key(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")
