// Cosines and sines of rotary position embeddings.
#pragma once
#include <cstddef>
#include <vector>

namespace foredraft {

class RopeTable {
  public:
    // inverse_frequencies [head_dim / 2]; `factor` multiplies cosines and sines (YaRN's attention factor).
    RopeTable(std::vector<double> inverse_frequencies, double factor);

    // Makes positions 0..num_positions-1 available. Invalidates pointers.
    void grow(int num_positions);
    int num_pairs() const { return int(inverse_frequencies_.size()); }
    const float* cos(int position) const { return &cos_[size_t(position) * inverse_frequencies_.size()]; }
    const float* sin(int position) const { return &sin_[size_t(position) * inverse_frequencies_.size()]; }

  private:
    std::vector<double> inverse_frequencies_;
    double factor_;
    int num_positions_ = 0;
    std::vector<float> cos_, sin_;  // [positions, head_dim / 2], computed in double, rounded once
};

}  // namespace foredraft
