#include "bindings/bindings.h"

namespace foredraft {
void bind_gguf(nanobind::module_&) {}
}  // namespace foredraft
