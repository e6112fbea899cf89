// Timing of one kernel or of plain reading, for benchmarks and for the measured bandwidth that doctor prints.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels/kernels.h"

namespace foredraft {

// Seconds that `threads` threads need to multiply `rows` rows by one [n, k] matrix, one figure a repeat. Each repeat walks
// over `copies` matrices with different addresses, so that no cache holds them. The weights are arbitrary bytes.
std::vector<double> time_matmul(const KernelSet& set, Format format, int n, int k, int rows, int threads, int copies, int repeats);

// Bytes a second that `threads` threads read from memory, asked for well ahead; one figure a repeat over `bytes` bytes.
std::vector<double> time_reading(size_t bytes, int threads, int repeats);

}  // namespace foredraft
