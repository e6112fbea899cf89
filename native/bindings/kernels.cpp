#include "bindings/bindings.h"

namespace foredraft {
void bind_kernels(nanobind::module_&) {}
}  // namespace foredraft
