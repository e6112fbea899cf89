#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace {
#include "kernels/vec_avx512.h"
#include "kernels/math.inl"
}  // namespace
