// Which kernel sets this processor can run.
#pragma once
#include <vector>

#include "kernels/kernels.h"

namespace foredraft {

// Best first; the portable set is always there.
std::vector<const KernelSet*> runnable_kernel_sets();

}  // namespace foredraft
