#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace {
#include "kernels/vec_avx2.h"
#include "kernels/math.inl"
#include "kernels/matmul.inl"
#include "kernels/elementwise.inl"
#include "kernels/attention.inl"
#include "kernels/sampling.inl"
#include "kernels/set.inl"
}  // namespace

namespace foredraft {
extern const KernelSet kAvxVnniKernels = kernel_set("avxvnni");
}
