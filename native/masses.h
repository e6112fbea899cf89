// Sums of weights over a vocabulary by chunks, and the place where a running sum passes a share of the total.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/kernels.h"

namespace foredraft {

inline double sum_of(const std::vector<double>& values) {
    double sum = 0;
    for (double value : values) sum += value;
    return sum;
}

template <typename Weight>
std::vector<double> chunk_sums(int n, Weight weight) {
    std::vector<double> sums((n + kSumChunk - 1) / kSumChunk);
    for (int i = 0; i < n; ++i) sums[i / kSumChunk] += weight(i);
    return sums;
}

// Where the running sum of weight(0..n-1) passes u of the total; -1 where there is no mass. u in [0, 1).
// sums: of each kSumChunk weights, so that finding the place costs one chunk.
template <typename Weight>
int find_place(int n, const std::vector<double>& sums, Weight weight, double u) {
    const double target = u * sum_of(sums);
    double before = 0;
    size_t place = 0;  // the chunk where the sum passes; by rounding, the last one with mass
    for (size_t chunk = 0; chunk < sums.size(); ++chunk) {
        if (!(sums[chunk] > 0)) continue;
        place = chunk;
        if (before + sums[chunk] > target) break;
        before += sums[chunk];
    }
    int last = -1;
    const int begin = int(place) * kSumChunk, end = std::min(n, begin + kSumChunk);
    for (int i = begin; i < end; ++i) {
        const double w = weight(i);
        if (!(w > 0)) continue;
        last = i;
        before += w;
        if (before > target) break;
    }
    return last;
}

}  // namespace foredraft
