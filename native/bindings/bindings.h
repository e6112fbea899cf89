// Each room of the core binds its own names; module.cpp only calls them.
#pragma once
#include <nanobind/nanobind.h>
#include <string>

#include "kernels/kernels.h"

namespace foredraft {
void bind_kernels(nanobind::module_& m);   // kernel sets, packing, dequantising, matmul for tests
void bind_gguf(nanobind::module_& m);      // GGUF reader
void bind_decoder(nanobind::module_& m);   // thread pool, KV cache, decoder
void bind_sampling(nanobind::module_& m);  // filters, noise, verification

Format format_by_name(const std::string& name);  // "Q4K" ...; throws std::invalid_argument
}  // namespace foredraft
