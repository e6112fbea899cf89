#include "rope_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace foredraft {

RopeTable::RopeTable(std::vector<double> inverse_frequencies, double factor)
    : inverse_frequencies_(std::move(inverse_frequencies)), factor_(factor) {}

void RopeTable::grow(int num_positions) {
    if (num_positions <= num_positions_) return;
    const int end = std::max(num_positions, num_positions_ + 256);
    cos_.reserve(size_t(end) * inverse_frequencies_.size());
    sin_.reserve(size_t(end) * inverse_frequencies_.size());
    for (; num_positions_ < end; ++num_positions_) {
        for (const double frequency : inverse_frequencies_) {
            const double angle = double(num_positions_) * frequency;
            cos_.push_back(float(std::cos(angle) * factor_));
            sin_.push_back(float(std::sin(angle) * factor_));
        }
    }
}

}  // namespace foredraft
