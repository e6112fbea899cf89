#include "bindings/bindings.h"

NB_MODULE(_native, m) {
    m.doc() = "The CPU core of foredraft.";
    foredraft::bind_kernels(m);
    foredraft::bind_gguf(m);
    foredraft::bind_decoder(m);
    foredraft::bind_sampling(m);
}
