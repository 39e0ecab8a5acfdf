"""Sizes, and the numbers that all forms of the transform share, all of them float32.

    sin πa = a·(S0 + S1 t + … + S4 t⁴)       t = a² + ⅛, |a| ≤ ½      relative error 6e-9
    cos πa = C0 + C1 t + … + C4 t⁴                                    error 5e-8
    −2 ln(1+f) = f·(L0 + L1 f + … + L7 f⁷)   ½ ≤ 1 + f < 1            relative error 1.5e-7

They are minimax fits, rounded to float32 one coefficient after the other.

>>> round(sum(c / 8**k for k, c in enumerate(SINE)), 6), round(-LOG[0] / 2, 6)
(3.141593, 1.0)
"""

from __future__ import annotations

#: Normals (and random words) in one tile: half of them make radii, half make angles.
TILE = 1024
HALF = TILE // 2

#: Tiles worked on together: in ordinary memory as many as torch leaves on one thread and a cache
#: holds, on an accelerator as many as keep it busy.
CPU_CHUNK, DEVICE_CHUNK = 32, 16384
#: Without C loops in ordinary memory: as many as torch shares out among its own threads. Threads
#: of ours would wait for each other, since fifty small operations a chunk hold the interpreter.
TORCH_CHUNK = 128

SINE = (
    3.8285884857177734,
    -5.833874225616455,
    2.781672716140747,
    -0.6369983553886414,
    0.07753802090883255,
)
COSINE = (
    1.6829167604446411,
    -6.013545036315918,
    4.578469753265381,
    -1.4417455196380615,
    0.21971319615840912,
)
LOG = (
    -1.999999761581421,
    1.0000687837600708,
    -0.6638188362121582,
    0.5436059832572937,
    -0.08042425662279129,
    1.5593502521514893,
    2.1477081775665283,
    2.361654758453369,
)
LN2 = 0.6931471824645996

#: 4u = SPREAD·w + (shift, see below). The factor is a unit below 2⁻²⁹, so that words that float32
#: rounds up to 2³¹ do not reach u = 1.
SPREAD = 2.0**-29 - 2.0**-53

#: The shift is BASE·(k + ½)/2¹⁴ with k the first 14 bits of SCATTER times the angle word (modulo
#: 2³²): they become these digits of a float32 between BASE and 2·BASE, of which BASE is taken off.
SCATTER = 0x9E3779B1 - 2**32
SHIFT_DIGITS, SHIFT_ONES, BASE = 0x7FFE00, 0x31000100, 2.0**-29

#: The low bytes of the radius word and of the angle word of a pair, of which the conversion to
#: float32 keeps little, decide how its two numbers are rounded (`grid`): they become these digits
#: of a float32, and the last one is always set, half a unit.
RADIUS_DIGITS, ANGLE_DIGITS, MIDDLE_DIGIT = 0x7F80, 0x7F8000, 0x40
