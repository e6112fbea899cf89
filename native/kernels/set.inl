// The table of this instruction set: included last, after the kernels that it names.
constexpr foredraft::KernelSet kernel_set(const char* name) {
    return {
        .name = name,
        .quantize_rows = quantize_rows,
        .matmul = matmul,
        .attention = nullptr,
        .rms_norm = nullptr,
        .rope = nullptr,
        .silu_mul = nullptr,
        .gelu_tanh_mul = nullptr,
        .add = nullptr,
        .softcap = nullptr,
        .argmax = argmax,
        .max_value = max_value,
        .exp_sum = exp_sum,
        .gather = gather,
        .race = race,
    };
}
