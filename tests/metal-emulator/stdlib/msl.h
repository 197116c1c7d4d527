// A small metal_stdlib for clang: the compute subset. Translated .metal files are compiled against it.
#pragma once
#include "abi.h"
#define EMU_NOSAN __attribute__((no_sanitize("thread")))
#define EMU_INLINE inline __attribute__((always_inline))
#define EMU_HERE emu_site at_ = {__builtin_FILE(), __builtin_LINE(), __builtin_COLUMN()}
namespace msl {
#include "scalar.h"
#include "swizzle.h"
#include "vector.h"
namespace metal {
#include "math.h"
#include "simd.h"
#include "matrix.h"
#include "atomic.h"
}
#include "bind.h"
}
// Keywords and macros, last.
#define EMU_TG(site, name, dims, ...) \
  typedef __VA_ARGS__ emu_tg_##site dims; \
  emu_tg_##site &name = *(emu_tg_##site *)emu_tg_variable(site, sizeof(emu_tg_##site), alignof(emu_tg_##site), #name, \
                                                          emu_site{__FILE__, __LINE__, 0})
#define device
#define threadgroup
#define thread
#define constant const
#define kernel inline
#define METAL_FUNC inline
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_E_F 2.71828182845904523536f
#define HUGE_VALF (__builtin_inff())
#define MAXHALF (half(65504.0f))
#define HALF_MAX (half(65504.0f))
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX 4294967295u
#define USHRT_MAX 65535
#define FLT_MIN __FLT_MIN__
#define FLT_MAX __FLT_MAX__
#define FLT_EPSILON __FLT_EPSILON__
#define MAXFLOAT __FLT_MAX__
