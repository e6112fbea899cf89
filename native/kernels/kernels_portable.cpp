#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace {
#include "kernels/vec_portable.h"
#include "kernels/math.inl"
}  // namespace
