"""Steps of several models measured side by side on one GPU: time, memory, share of bandwidth.

`measure` builds one row after the other, warms it up, and reads torch's peak of allocated bytes
during one step (or what stays reserved after it, if that is more: the pools of CUDA graphs),
without what the rows before it hold. Then every round runs each row for three steps, one behind
the other as in training, and waits for the device at their end; rows take turns, so that a busy
host or a warmer chip meets all of them alike; the table has the median, the fastest and the
slowest round. Where the models do not fit beside each other (`together=False`), each row has its
rounds alone and is gone before the next is built. A row that fails prints its error and the others
go on.

`bandwidth` is what a copy of 1 GiB reaches, in bytes a second, read and write counted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[], object]
WARM = 3
STEPS = 3


@dataclass(frozen=True)
class Found:
    """Milliseconds of every round, and the peak of a step in GiB (0 where it is not known)."""

    times: tuple[float, ...]
    gib: float

    @property
    def ms(self) -> float:
        return statistics.median(self.times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _held(device: torch.device) -> tuple[int, int]:
    """Bytes in tensors, and bytes taken from the device; the latter has the pools of graphs."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def _ready(make: Callable[[], Step], device: torch.device) -> tuple[Step, float]:
    """A warm step, and its peak above what was held before it was made."""
    clean(device)
    before = _held(device)
    step = make()
    for _ in range(WARM):
        step()
    wait(device)
    if device.type != "cuda":
        return step, 0.0
    clean(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) - before[0]
    clean(device)
    return step, max(peak, _held(device)[1] - before[1]) / 2**30


def _round(step: Step, device: torch.device) -> float:
    wait(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait(device)
    return 1e3 * (time.perf_counter() - begin) / STEPS


def measure(
    rows: Mapping[str, Callable[[], Step]], *, device: torch.device, rounds: int, together: bool
) -> dict[str, Found | str]:
    """Every row, or the error that it ended with."""
    found: dict[str, Found | str] = {}
    running: dict[str, tuple[Step, float]] = {}
    for name, make in rows.items():
        try:
            step, gib = _ready(make, device)
            if together:
                running[name] = step, gib
            else:
                _round(step, device)
                found[name] = Found(tuple(_round(step, device) for _ in range(rounds)), gib)
            del step
        except Exception as error:
            text = " ".join(str(error).split())
            found[name] = f"{type(error).__name__}: {text[:160]}"
    for name in running:
        _round(running[name][0], device)
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, (step, _) in running.items():
            times[name].append(_round(step, device))
    found |= {name: Found(tuple(times[name]), gib) for name, (_, gib) in running.items()}
    running.clear()
    clean(device)
    return {name: found[name] for name in rows}


def show(found: Mapping[str, Found | str]) -> None:
    """A Markdown table; ratios are to the first row."""
    print("| step | ms (fastest to slowest round) | × plain | GiB | × plain |")
    print("|---|---|---|---|---|")
    base = next((each for each in found.values() if isinstance(each, Found)), None)
    for name, each in found.items():
        if isinstance(each, str) or base is None:
            print(f"| {name} | not measured: {each} | | | |", flush=True)
            continue
        spread = f"{min(each.times):.1f} to {max(each.times):.1f}"
        memory = f"{each.gib:.2f} | {each.gib / base.gib:.2f}" if each.gib else "– | –"
        ratio = each.ms / base.ms
        print(f"| {name} | {each.ms:.1f} ({spread}) | {ratio:.2f} | {memory} |", flush=True)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    if device.type != "cuda":
        return 0.0
    source = torch.zeros(2**28, device=device)
    target = torch.empty_like(source)
    times = [_round(lambda: target.copy_(source), device) for _ in range(12)]
    return 2.0 * 4.0 * source.numel() / (statistics.median(times[2:]) / 1e3)


def bytes_of_release(dtype: torch.dtype, optimizer: str, *, buffers: int = 4) -> int:
    """Bytes a parameter that noise, division and update have to read and write, each once.

    The sum and the buffers are float32; the private gradient is rounded to the parameter's type.
    """
    size = torch.empty(0, dtype=dtype).element_size()
    noise = 8 + 8 * buffers
    rounding = 0 if dtype == torch.float32 else 4 + size
    moments = 2 if optimizer == "adamw" else 0
    update = (2 + moments) * size + (1 + moments) * size
    return noise + rounding + update


def tell_release(
    whole: Found | str | None,
    clipping: Found | str | None,
    *,
    count: int,
    each: int,
    speed: float,
) -> None:
    """What a step does after its sum, beside the time in which a copy moves the same bytes."""
    if not isinstance(whole, Found) or not isinstance(clipping, Found) or not speed:
        return
    rest, least = whole.ms - clipping.ms, 1e3 * count * each / speed
    print(
        f"after the sum (noise, division, update): {rest:.2f} ms; a copy "
        f"moves the same {each} bytes a parameter in {least:.2f} ms ({least / rest:.2f} of it)"
    )
