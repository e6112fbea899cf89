#include "bindings/bindings.h"

NB_MODULE(_native, m) {
    // An error that ends the interpreter keeps its frames' objects alive to the end: no leak of ours.
    nanobind::set_leak_warnings(false);
    m.doc() = "The CPU core of foredraft.";
    foredraft::bind_kernels(m);
    foredraft::bind_gguf(m);
    foredraft::bind_decoder(m);
    foredraft::bind_sampling(m);
}
