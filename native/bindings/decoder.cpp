#include "bindings/bindings.h"

namespace foredraft {
void bind_decoder(nanobind::module_&) {}
}  // namespace foredraft
