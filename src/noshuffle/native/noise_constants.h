/* Sizes, and the numbers that all forms of the transform share: the twin of noise/gaussian.py,
   which says what they are; a test compares the two. */
#ifndef NOSHUFFLE_NOISE_CONSTANTS_H
#define NOSHUFFLE_NOISE_CONSTANTS_H

#define TILE 1024
#define HALF (TILE / 2)

#define SINE0 0x1.ea0f3p+1f
#define SINE1 (-0x1.755e32p+2f)
#define SINE2 0x1.640ddap+1f
#define SINE3 (-0x1.4624a6p-1f)
#define SINE4 0x1.3d9882p-4f
#define COSINE0 0x1.aed3a2p+0f
#define COSINE1 (-0x1.80ddecp+2f)
#define COSINE2 0x1.2505a6p+2f
#define COSINE3 (-0x1.71163cp+0f)
#define COSINE4 0x1.c1f8fep-3f
#define LOG0 (-0x1.fffffcp+0f)
#define LOG1 0x1.000482p+0f
#define LOG2 (-0x1.53e01p-1f)
#define LOG3 0x1.165386p-1f
#define LOG4 (-0x1.496af2p-4f)
#define LOG5 0x1.8f3194p+0f
#define LOG6 0x1.12e81ap+1f
#define LOG7 0x1.2e4ab4p+1f
#define LN2 0x1.62e43p-1f

#define SPREAD 0x1.fffffep-30f
#define SCATTER 0x9e3779b1u
#define SHIFT_DIGITS 0x7ffe00
#define SHIFT_ONES 0x31000100
#define BASE 0x1p-29f
#define RADIUS_DIGITS 0x7f80
#define ANGLE_DIGITS 0x7f8000
#define MIDDLE_DIGIT 0x40

#endif
