"""A recorded step with frozen weights streamed: what stays on the device, and which layers."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.engine.weights.expert_groups import experts_per_group, largest_block_bytes
from hf_pyao.engine.weights.host_bytes import ALIGNMENT_BYTES
from hf_pyao.errors import ConfigError
from hf_pyao.plan.step.layer_graph import LayerGraph
from hf_pyao.plan.step.step_program import OUTSIDE, Operation, Resident, StepProgram
from hf_pyao.plan.step.streamed_blocks import LayerBlocks, StreamedBlocks, WeightBlock


def block_bytes(program: StepProgram) -> tuple[int, ...]:
    """Return what each layer's weights would take on the host if they were streamed.

    Args:
        program: a step with all weights resident.
    """
    found = [0] * program.num_layers
    for each in program.residents:
        if _is_streamable(each):
            found[each.layer] += _aligned(each.nbytes)
    return tuple(found)


def streamed_blocks(program: StepProgram, layers: Collection[int]) -> StreamedBlocks:
    """Return the blocks of *layers*, as the run would make them.

    Args:
        program: a step with all weights resident.
        layers: positions of layers; those without frozen weights are left out.
    """
    weights: defaultdict[int, list[Resident]] = defaultdict(list)
    for each in program.residents:
        if _is_streamable(each) and each.layer in layers:
            weights[each.layer].append(each)
    limit_bytes = largest_block_bytes(
        sum(each.nbytes for each in of_layer if not each.experts) for of_layer in weights.values()
    )
    numbers = range(program.num_layers)
    return StreamedBlocks(
        tuple(
            _blocks_of(weights[layer], limit_bytes) if layer in weights else () for layer in numbers
        ),
        tuple(sum(_aligned(each.nbytes) for each in weights.get(layer, ())) for layer in numbers),
    )


def with_streamed_blocks(program: StepProgram, layers: Collection[int]) -> StepProgram:
    """Return *program* with the weights of *layers* streamed.

    Args:
        program: a step with all weights resident.
        layers: positions of layers; those without frozen weights are left out.

    Raises:
        ConfigError: something is streamed already.
    """
    if program.streamed:
        raise ConfigError(
            "the step has streamed blocks already; expected one with all resident.",
            key="wrong-argument",
        )
    streamed = streamed_blocks(program, layers)
    if not streamed:
        return program
    kept = [
        each for each in program.residents if not (_is_streamable(each) and each.layer in streamed)
    ]
    gone_bytes = sum(each.nbytes for each in program.residents) - sum(each.nbytes for each in kept)
    ring = [Resident(OUTSIDE, streamed.slot_bytes, is_streamable=True)] * streamed.num_slots
    return dataclasses.replace(
        program,
        operations=_in_groups(program, streamed),
        graph=_without_experts(program, streamed),
        residents=(*ring, *kept),
        resident_bytes=program.resident_bytes - gone_bytes + streamed.device_bytes,
        streamed=streamed,
    )


def streamed_layers(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """Return which layers are streamed if *num_streamed* are: the others are spread evenly."""
    stay = resident_layers(num_layers, num_layers - num_streamed) if num_streamed else ()
    if num_streamed >= num_layers:
        return tuple(range(num_layers))
    return tuple(layer for layer in range(num_layers) if layer not in stay) if num_streamed else ()


# ---- blocks --------------------------------------------------------------------------------------


def _blocks_of(weights: Sequence[Resident], limit_bytes: int) -> LayerBlocks:
    """Return the blocks of a layer with these streamed weights."""
    if sum(each.nbytes for each in weights) <= limit_bytes or not any(w.experts for w in weights):
        return (WeightBlock(sum(_aligned(each.nbytes) for each in weights)),)
    rest = [each.nbytes for each in weights if not each.experts]
    blocks = [WeightBlock(_slot_bytes((0, nbytes) for nbytes in rest))] if rest else []
    for number in sorted({each.experts for each in weights if each.experts}):
        together = [each for each in weights if each.experts == number]
        num_experts = together[0].num_experts
        all_bytes = sum(each.nbytes for each in together)
        size = experts_per_group(all_bytes, num_experts, limit_bytes)
        for first in range(0, num_experts, size):
            last = min(first + size, num_experts)
            of_expert = [each.nbytes // num_experts for each in together]
            nbytes = _slot_bytes((first * one, (last - first) * one) for one in of_expert)
            blocks.append(WeightBlock(nbytes, number, first, last))
    return tuple(blocks)


def _slot_bytes(places: Iterable[tuple[int, int]]) -> int:
    """Return what weights take of a slot, one behind the other.

    Each begins as far behind a multiple of the alignment as it does on the host.

    Args:
        places: first byte in the parameter on the host, which is aligned, and bytes.
    """
    end = 0
    for first, nbytes in places:
        end = _aligned(end + first % ALIGNMENT_BYTES + nbytes)
    return end


def _is_streamable(resident: Resident) -> bool:
    """Say whether a weight may be streamed: one of a layer that is not tied with another."""
    return resident.is_streamable and resident.layer != OUTSIDE and resident.num_names == 1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---- operations that read experts by group ---------------------------------------------------


def _in_groups(program: StepProgram, streamed: StreamedBlocks) -> Sequence[Operation]:
    """Return the operations, with what products of one group of experts take beside the result.

    A product of all experts is computed group by group into its result
    (``hf_pyao/model/weights/experts.py``). How many rows a group has is up to the router: they are
    taken to be spread evenly.
    """
    if not _has_groups(streamed):
        return program.operations
    made_bytes: defaultdict[int, int] = defaultdict(int)
    for buffer in program.buffers:
        made_bytes[buffer.birth] += buffer.nbytes
    operations = list(program.operations)
    for segment in program.segments:
        if segment.layer not in streamed:
            continue
        blocks = streamed.layer_blocks[segment.layer]
        for number in range(segment.start, segment.end):
            operation = operations[number]
            if operation.reads is None or not operation.reads.experts:
                continue
            num_groups = sum(each.experts == operation.reads.experts for each in blocks)
            if num_groups > 1:
                beside_bytes = _aligned(-(-made_bytes[number] // num_groups))
                workspace_bytes = operation.workspace_bytes + beside_bytes
                operations[number] = operation._replace(workspace_bytes=workspace_bytes)
    return tuple(operations)


def _without_experts(program: StepProgram, streamed: StreamedBlocks) -> LayerGraph | None:
    """Return the graph of a layer in which no product of experts by group can run again.

    Such a product is one function for autograd, into which recomputation does not look.
    """
    graph = program.graph
    if graph is None or not _has_groups(streamed):
        return graph
    unseen = dict.fromkeys(graph.unseen)
    for operation in graph.operations:
        reads = program.operations[operation.number].reads
        if reads is not None and reads.experts:
            unseen |= dict.fromkeys(operation.makes)
    return dataclasses.replace(graph, unseen=tuple(unseen))


def _has_groups(streamed: StreamedBlocks) -> bool:
    return any(block.experts for _, block in streamed.blocks)
