"""Sizes, and the numbers that the torch and the C form of the transform share, all float32.

    sin(πa) = a·(S0 + S1 a² + … + S4 a⁸)                |a| ≤ ½,      relative error 4e-8
    ln((1+s)/(1−s)) = s·(2 + L0 s² + L1 s⁴ + L2 s⁶)     |s| ≤ 0.172,  relative error 3e-9

Both are minimax fits of the relative error, rounded to float32, which is what limits the first.

>>> 3.14159 < SINE[0] < 3.1416
True
"""

from __future__ import annotations

#: Normals (and random words) in one tile: half of them make radii, half make angles.
TILE = 1024
HALF = TILE // 2

#: Tiles worked on together: in ordinary memory as many as torch leaves on one thread and a cache
#: holds, on an accelerator as many as keep it busy.
CPU_CHUNK, DEVICE_CHUNK = 32, 16384

SINE = (
    3.1415927410125732,
    -5.167709827423096,
    2.550069808959961,
    -0.5982421636581421,
    0.0775604248046875,
)
LOG = (0.6666668653488159, 0.3998875916004181, 0.295806348323822)
LN2 = 0.6931471824645996

#: The bits of √½ as float32: numbers are split as 2^e·m with √½ ≤ m < √2.
ROOT_HALF_BITS = 0x3F3504F3
