"""The inner loops in C, built when they are first needed and a C compiler is there.

Torch runs one pass over memory per operation; the transform to normals has about fifty. The same
operations as one loop are several times faster on a CPU. The C text below repeats, operation by
operation, what `gaussian.normals_in_torch_`, `philox.philox` and `correlate.correlate_in_torch_`
say in torch: only +, −, ×, ÷, √ and integer operations, each exactly rounded (contraction is
switched off). So both give the same bits, the torch form is the twin in the tests, and a machine
without a compiler computes the same noise, only slower.

The library is built for this very processor into a private temporary folder and is never kept
(about a second, once a process). NOSHUFFLE_NATIVE=off in the environment switches it off.

>>> library() is library()
True
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache, partial
from pathlib import Path

import torch

from noshuffle.noise.constants import HALF, LN2, LOG, ROOT_HALF_BITS, SINE, TILE

_FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

_TEXT = r"""
#include <stdint.h>
#include <string.h>
#include <math.h>

static inline float sine(float a) {
    float q = a * a;
    return ((((S4 * q + S3) * q + S2) * q + S1) * q + S0) * a;
}

/* out = weight z, or out += weight z */
void normals(const int32_t *restrict words, float *restrict out, int64_t tiles, float weight,
             int accumulate) {
    for (int64_t tile = 0; tile < tiles; tile++, words += TILE, out += TILE)
        for (int j = 0; j < HALF; j++) {
            float u = (float)words[j] * 0x1p-31f + 0x1p-32f;
            float square = u * u, m;
            int32_t bits;
            memcpy(&bits, &square, 4);
            int32_t e = (bits - ROOT_HALF_BITS) >> 23;
            bits -= e * (1 << 23);
            memcpy(&m, &bits, 4);
            float s = (m - 1.0f) / (m + 1.0f), q = s * s;
            float series = (((L2 * q + L1) * q + L0) * q + 2.0f) * s;
            float r = copysignf(sqrtf(-((float)e * LN2 + series)), u) * weight;
            float a = (float)words[HALF + j] * 0x1p-32f;
            float first = r * sine(a), second = r * sine(0.5f - fabsf(a));
            out[j] = accumulate ? out[j] + first : first;
            out[HALF + j] = accumulate ? out[HALF + j] + second : second;
        }
}

/* columns: five rows of `tiles` numbers: first block, key (2), tag (2) */
void philox(int32_t *restrict words, const int64_t *restrict columns, int64_t tiles, uint32_t row) {
    for (int64_t tile = 0; tile < tiles; tile++, words += TILE) {
        uint32_t first = columns[tile], key0 = columns[tiles + tile];
        uint32_t key1 = columns[2 * tiles + tile];
        uint32_t tag0 = columns[3 * tiles + tile], tag1 = columns[4 * tiles + tile];
        for (int b = 0; b < TILE / 4; b++) {
            uint32_t x0 = first + b, x1 = row, x2 = tag0, x3 = tag1, k0 = key0, k1 = key1;
#pragma GCC unroll 10
            for (int round = 0; round < 10; round++) {
                uint64_t p0 = (uint64_t)x0 * 0xD2511F53u, p1 = (uint64_t)x2 * 0xCD9E8D57u;
                x0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0;
                x2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
                x1 = (uint32_t)p1;
                x3 = (uint32_t)p0;
                k0 += 0x9E3779B9u;
                k1 += 0xBB67AE85u;
            }
            words[b] = x0;
            words[TILE / 4 + b] = x1;
            words[TILE / 2 + b] = x2;
            words[3 * TILE / 4 + b] = x3;
        }
    }
}

/* inner, outer: one number per buffer; decays: the same, or null; store: a buffer, or -1 */
void correlate(float *restrict y, const float *restrict u, float *const *restrict state,
               int buffers, const float *inner, const float *decays, const float *outer,
               int store, float gain, int64_t tiles) {
    float v[TILE];
    for (int64_t at = 0; at < tiles * TILE; at += TILE) {
        for (int j = 0; j < TILE; j++) v[j] = u[at + j];
        for (int b = 0; b < buffers; b++) {
            float c = inner[b], *s = state[b] + at;
            if (c != 0) for (int j = 0; j < TILE; j++) v[j] += s[j] * c;
            if (decays) for (int j = 0; j < TILE; j++) s[j] = s[j] * decays[b] + u[at + j];
        }
        if (store >= 0) memcpy(state[store] + at, v, sizeof v);
        for (int j = 0; j < TILE; j++) v[j] *= gain;
        for (int b = 0; b < buffers; b++) {
            float c = outer[b], *s = state[b] + at;
            if (c != 0) for (int j = 0; j < TILE; j++) v[j] += s[j] * c;
        }
        memcpy(y + at, v, sizeof v);
    }
}
"""


def _constants() -> str:
    names = {f"S{i}": c for i, c in enumerate(SINE)} | {f"L{i}": c for i, c in enumerate(LOG)}
    names["LN2"] = LN2
    lines = [f"#define {name} {value.hex()}f" for name, value in names.items()]
    integers = {"TILE": TILE, "HALF": HALF, "ROOT_HALF_BITS": ROOT_HALF_BITS}
    return "\n".join(lines + [f"#define {name} {value}" for name, value in integers.items()])


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be built or are switched off.

    Guarantees: a library is handed out only after a tile of its words, normals and correlated
    noise was found equal to the torch form, bit for bit.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("NOSHUFFLE_NATIVE", "").lower() in ("off", "0"):
        return None
    built = _build(compiler, text=_constants() + _TEXT)
    return built if built is not None and _agrees(built) else None


def _build(compiler: str, *, text: str) -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory(prefix="noshuffle-", ignore_cleanup_errors=True) as folder:
        source, target = Path(folder, "noise.c"), Path(folder, "noise.so")
        source.write_text(text, encoding="utf-8")
        command = [compiler, *_FLAGS, "-march=native", "-o", str(target), str(source), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            built = ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError):
            return None
    pointer, real, whole, long = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
    built.normals.argtypes = [pointer, pointer, long, real, whole]
    built.philox.argtypes = [pointer, pointer, long, ctypes.c_uint32]
    built.correlate.argtypes = [pointer] * 3 + [whole] + [pointer] * 3 + [whole, real, long]
    built.normals.restype = built.philox.restype = built.correlate.restype = None
    return built


def _agrees(built: ctypes.CDLL) -> bool:
    """Whether the C loops and the torch form give the same bits; each is run on two tiles."""
    # The torch forms import this module, so they can be had only now.
    from noshuffle.noise import correlate, gaussian, moves, philox

    columns = torch.tensor([[0, 7 * TILE], [1, 2**32 - 1], [2, 5], [3, 2**31], [4, 0]])
    slow_words, fast_words = torch.empty(2, 2, TILE, dtype=torch.int32)
    philox.words_in_torch_(slow_words, columns=columns.unsqueeze(-1), row=11)
    built.philox(fast_words.data_ptr(), columns.data_ptr(), 2, 11)
    extremes = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for words in (slow_words, fast_words):
        words[0, :5] = extremes
        words[1, HALF : HALF + 5] = extremes
    slow, fast = torch.zeros(2, 4, 2, TILE)
    move = moves.Move((), ((0, 0.3), (1, -0.7)), 1.3, ((1, 0.9),), store=0, decays=(0.6, 0.8))
    for z in (slow, fast):
        form = gaussian.normals_in_torch_ if z is slow else None
        for i, weight in enumerate((0.7, -1.9, 1.0)):
            if form:
                form(z[i], words=slow_words, weight=weight)
                form(z[i], words=slow_words, weight=0.1, accumulate=True)
            else:
                built.normals(fast_words.data_ptr(), z[i].data_ptr(), 2, weight, 0)
                built.normals(fast_words.data_ptr(), z[i].data_ptr(), 2, 0.1, 1)
        step = correlate.correlate_in_torch_ if form else partial(correlate.correlate_in_c_, built)
        step(z[3], u=z[0], move=move, state=correlate.Buffers([z[1], z[2]]), scale=0.5)
    return torch.equal(slow_words, fast_words) and torch.equal(slow, fast)
