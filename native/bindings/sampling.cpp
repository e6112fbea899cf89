#include "bindings/bindings.h"

namespace foredraft {
void bind_sampling(nanobind::module_&) {}
}  // namespace foredraft
