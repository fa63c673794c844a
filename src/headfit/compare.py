"""One rank's part of `headfit compare`: load, convert, run padded and planned in turn, compare every bit, gather.

Belongs here: what happens inside a rank. Must not: start processes (`launch`), print, draw. Both runs share one set of
weights and have a cache each; they alternate chunk by chunk and swap order at every step, so that drift of the machine
cancels.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headfit import comparison as data
from headfit import subject as subjects
from headfit import verify
from headfit.ranks import Event, InputError, Rank, join_group, leave_group
from headfit.width import Policy

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from headfit.layer import LaneRecord

_WARM_UP_ROWS = 16  # on a CPU, where only allocations and thread pools warm; a GPU compiles, so it takes a whole chunk
_WARM_UP_STEPS = 2


def rank_main(rank: Rank, payload: dict[str, Any], emit: Callable[[Event], None]) -> dict[str, Any] | None:
    """The job of one rank, as `launch.run_ranks` calls it: `payload` holds the options and, in base64, the prompt.

    Rank 0 returns the comparison as a dict, the others None.
    """
    started = time.perf_counter()
    options = data.Options(**payload["options"])
    device = choose_device(options.device, rank)
    emit({"event": "status", "text": "joining the group"})
    group = join_group(rank, device)
    comparison = run(options, base64.b64decode(payload["prompt"]), rank, group, device, emit, started)
    leave_group()  # not in a finally: after a failure the peers are gone, and leaving would wait for them
    return None if comparison is None else data.to_dict(comparison)


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """The device of this rank: `auto` takes a GPU a rank where there are enough, else the CPU. Raises InputError."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and count == 0:
        raise InputError(
            "--device cuda: torch sees no CUDA GPU here; use --device cpu, or install a CUDA build of torch"
        )
    if wanted == "cuda" and count < rank.local_world:
        raise InputError(
            f"--device cuda: {rank.local_world} ranks need {rank.local_world} GPUs "
            f"and {count} are here; lower --tp or use --device cpu"
        )
    if wanted == "cpu" or count < max(1, rank.local_world):
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    return device


# ---------------------------------------------------------------- the two runs


@dataclass
class _Side:
    """One of the two runs: its policy, its cache, what it recorded in the current step, what it generated."""

    name: str
    policy: Policy
    cache: Any
    records: list[LaneRecord] = field(default_factory=list)
    trace: list[verify.Stage] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class _Lane:
    """Running sums of the calls that were decided alike."""

    record: LaneRecord
    width_off: int
    reason_off: str
    layers: set[int] = field(default_factory=set)
    calls: int = 0
    rows: int = 0
    off: float = 0.0
    on: float = 0.0
    identical: bool = True


class _Runner:
    """The model with both runs' state, stepped one chunk or token at a time."""

    def __init__(
        self, subject: subjects.Subject, rank: Rank, group: ProcessGroup | None, device: torch.device, policy: str
    ) -> None:
        self.subject, self.rank, self.group, self.device = subject, rank, group, device
        self.policies = (Policy.padded(), data.POLICIES[policy]())
        self.lanes: dict[tuple[Any, ...], _Lane] = {}
        self.first: verify.Difference | None = None
        self.checked = 0
        self.step = 0
        self.current: _Side | None = None
        self.restart()
        for layer in subject.attention:
            layer.observer = self._observe
        for index, layer in enumerate(subject.model.model.layers):
            layer.register_forward_hook(self._layer_hook(index))

    def restart(self) -> None:
        """Fresh caches, nothing generated."""
        self.off, self.on = (
            _Side(name, policy, self.subject.new_cache())
            for name, policy in zip(("off", "on"), self.policies, strict=True)
        )

    def _observe(self, record: LaneRecord) -> None:
        if self.current is not None:
            self.current.records.append(record)
            # A copy of the surviving heads: the record's own tensors hold the padded buffer in memory.
            self.current.trace.append(verify.Stage(record.layer, verify.ATTENTION_OUT, record.out.clone()))
            self.current.trace.append(verify.Stage(record.layer, verify.LSE, record.lse.clone()))

    def _layer_hook(self, index: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if self.current is not None:
                value: Tensor = output[0] if isinstance(output, tuple) else output
                self.current.trace.append(verify.Stage(index, verify.LAYER_OUTPUT, value.flatten(0, 1)))

        return hook

    def advance(self, tokens_off: list[int], tokens_on: list[int], position: int, *, record: bool = True) -> None:
        """One forward of both sides; the chosen next token of each is appended to its `tokens`."""
        pairs = [(self.off, tokens_off), (self.on, tokens_on)]
        for side, tokens in pairs if self.step % 2 == 0 else pairs[::-1]:
            self._forward(side, tokens)
        if record:
            self._account(position, len(tokens_on))
        self.step += 1
        for side, _ in pairs:
            side.records, side.trace = [], []

    def _forward(self, side: _Side, tokens: list[int]) -> None:
        self.subject.set_policy(side.policy)
        ids = torch.tensor([tokens], device=self.device)
        if self.group is not None:
            dist.barrier(self.group)  # ranks enter together, so no lane is timed while a peer still does something else
        self.current = side
        begun = time.perf_counter()
        logits = self.subject.forward(ids, side.cache)[0, -1:]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        side.seconds += time.perf_counter() - begun
        self.current = None
        token = logits.argmax(dim=-1)
        side.trace.append(verify.Stage(None, verify.LOGITS, logits))
        if self.group is not None:
            dist.broadcast(token, group=self.group, group_src=0)
        side.trace.append(verify.Stage(None, verify.TOKEN, token))
        side.tokens.append(int(token))

    def _account(self, position: int, rows: int) -> None:
        off, on = self.off, self.on
        first_head = self.rank.rank * (on.records[0].n_local if on.records else 0)
        difference = verify.first_difference(
            off.trace,
            on.trace,
            step=self.step,
            position=position,
            rows=rows,
            rank=self.rank.rank,
            first_head=first_head,
        )
        if difference is not None and self.first is None:
            self.first = difference
        self.checked += sum(stage.value.numel() for stage in on.trace)
        outs = [
            [stage for stage in side.trace if stage.name in (verify.ATTENTION_OUT, verify.LSE)] for side in (off, on)
        ]
        for index, (a, b) in enumerate(zip(off.records, on.records, strict=True)):
            key = (b.phase, b.kind, a.decision.width, b.decision.width, a.decision.reason, b.decision.reason)
            lane = self.lanes.setdefault(key, _Lane(b, a.decision.width, a.decision.reason))
            lane.layers.add(b.layer)
            lane.calls += 1
            lane.rows += b.rows
            lane.off += a.seconds
            lane.on += b.seconds
            pairs = zip(outs[0][2 * index : 2 * index + 2], outs[1][2 * index : 2 * index + 2], strict=True)
            lane.identical &= all(verify.bits_equal(x.value, y.value) for x, y in pairs)


def run(
    options: data.Options,
    content: bytes,
    rank: Rank,
    group: ProcessGroup | None,
    device: torch.device,
    emit: Callable[[Event], None],
    started: float,
) -> data.Comparison | None:
    """Both runs of `options` on this rank, over the prompt `content` (rank 0's counts).

    Returns the comparison on rank 0, None elsewhere. Raises InputError for what cannot run.
    """
    clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    emit({"event": "status", "text": "loading the model"})
    subject = subjects.load(options, group, device)
    prompt = _agree(subjects.tokenize(content, options, subject) if rank.rank == 0 else None, group, device)
    runner = _Runner(subject, rank, group, device, options.policy)
    chunks = list(_chunks(prompt.tokens, options.prefill_chunk))
    total = len(chunks) + options.new_tokens - 1
    with torch.inference_mode():
        emit({"event": "status", "text": "warming up"})
        _warm_up(runner, chunks[0])
        position = 0
        for done, chunk in enumerate(chunks):
            emit(
                {
                    "event": "progress",
                    "done": done,
                    "total": total,
                    "text": f"prefill, chunk {done + 1} of {len(chunks)}",
                }
            )
            runner.advance(chunk, chunk, position)
            position += len(chunk)
        for side in (runner.off, runner.on):
            del side.tokens[:-1]  # a chunk's guess counts only after the last one
        for index in range(options.new_tokens - 1):
            emit(
                {
                    "event": "progress",
                    "done": len(chunks) + index,
                    "total": total,
                    "text": f"decode, token {index + 2} of {options.new_tokens}",
                }
            )
            runner.advance(runner.off.tokens[-1:], runner.on.tokens[-1:], position)
            position += 1
    emit({"event": "progress", "done": total, "total": total, "text": "gathering"})
    mine = _Summary(
        list(runner.lanes.values()),
        runner.first,
        runner.checked,
        runner.off.seconds,
        runner.on.seconds,
        _device_name(device),
    )
    everyone = _gather(mine.detached(), group, rank)
    if rank.rank != 0:
        return None
    workload = subjects.describe(options, subject, prompt, len(chunks), runner.policies)
    environment = subjects.environment(rank, device, clock, tuple(part.device for part in everyone))
    return _combine(options, environment, workload, runner, everyone, started)


def _chunks(tokens: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(tokens), size):
        yield tokens[first : first + size]


def _warm_up(runner: _Runner, chunk: list[int]) -> None:
    rows = chunk if runner.device.type == "cuda" else chunk[:_WARM_UP_ROWS]
    for _ in range(_WARM_UP_STEPS):  # both orders
        runner.advance(rows, rows, 0, record=False)
        runner.advance(rows[-1:], rows[-1:], len(rows), record=False)
        runner.restart()
    runner.step = 0


# ---------------------------------------------------------------- all ranks


@dataclass
class _Summary:
    """What one rank tells rank 0."""

    lanes: list[_Lane]
    first: verify.Difference | None
    checked: int
    seconds_off: float
    seconds_on: float
    device: str

    def detached(self) -> _Summary:
        """Without the tensors that the records hold."""
        for lane in self.lanes:
            empty = torch.empty(0)
            lane.record = type(lane.record)(**{**lane.record.__dict__, "out": empty, "lse": empty})
        return self


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _agree(value: Any, group: ProcessGroup | None, device: torch.device) -> Any:
    """Rank 0's value on every rank: machines may hold different files under the same name."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0, device=device)
    return box[0]


def _gather(mine: _Summary, group: ProcessGroup | None, rank: Rank) -> list[_Summary]:
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * rank.world
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _combine(
    options: data.Options,
    environment: data.Environment,
    workload: data.Workload,
    runner: _Runner,
    everyone: list[_Summary],
    started: float,
) -> data.Comparison:
    lanes = []
    for parts in zip(*(summary.lanes for summary in everyone), strict=True):
        head = parts[0]
        record = head.record
        lanes.append(
            data.LaneRow(
                phase=record.phase,
                kind=record.kind,
                layers=len(head.layers),
                calls=head.calls,
                rows=head.rows,
                heads=record.n_local,
                width_off=head.width_off,
                width_on=record.decision.width,
                reason_off=head.reason_off,
                reason=record.decision.reason,
                seconds_off=tuple(part.off for part in parts),
                seconds_on=tuple(part.on for part in parts),
                identical=all(part.identical for part in parts),
            )
        )
    differences = sorted((part.first for part in everyone if part.first is not None), key=verify.Difference.order)
    first = None
    if differences:
        d = differences[0]
        first = data.FirstDifference(d.step, d.token, d.layer, d.stage, d.rank, d.sentence())
    return data.Comparison(
        options=options,
        environment=environment,
        workload=workload,
        lanes=tuple(lanes),
        tokens_off=tuple(runner.off.tokens),
        tokens_on=tuple(runner.on.tokens),
        text_off=runner.subject.decode(runner.off.tokens),
        text_on=runner.subject.decode(runner.on.tokens),
        first_difference=first,
        checked_elements=sum(part.checked for part in everyone),
        wall_seconds=time.perf_counter() - started,
        forward_seconds_off=max(part.seconds_off for part in everyone),
        forward_seconds_on=max(part.seconds_on for part in everyone),
        waste=data.waste_of(workload.heads),
    )
