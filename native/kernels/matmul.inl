// Quantising activations and multiplying them by packed weights.

static void quantize_rows(const foredraft::ActivationRows&, int, int) {}

static void matmul(const foredraft::PackedMatrix&, const foredraft::ActivationRows&, float*, size_t, int, int) {}
